"""What variants are made of, against densities written out, libraries' and quadrature."""

import math

import pyro.poutine as poutine
import pytest
import torch
import torch.nn.functional as F
from scipy.integrate import quad
from scipy.stats import gamma, kstest, norm
from torch.distributions import Independent, Normal, kl_divergence
from torch.func import functional_call

import bnn_pyro as bp
from bnn_pyro import c_code
from bnn_pyro.parts import gradients, weights
from bnn_pyro.parts.nets import ACTIVATIONS, MLP
from bnn_pyro.parts.observed import ReadLikelihood
from bnn_pyro.parts.priors import GammaNormal, ScaleMixture, parse_prior
from bnn_pyro.parts.weights import CentredNormal, DropoutWeights, FlatNormals, FreeWeights, LogUniform, NormalWeights


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("dtype", "narrow"), [(torch.float64, False), (torch.float32, False), (torch.float32, True)])
@pytest.mark.parametrize("piece", [5, 15, 100])
def test_draws_of_many_arrays_and_their_kl_are_torchs(monkeypatch, piece, dtype, narrow):
    """Values and gradients, also in pieces that do not divide the arrays; a second draw has noise of its own.

    float32 of more than a piece is by compiled code, where there is a compiler, in two forms; the rest by torch's
    operators.
    """
    monkeypatch.setattr(gradients, "PIECE", piece)
    shapes = {"a": torch.Size([4, 3]), "b": torch.Size([]), "c": torch.Size([7])}
    loc, rho = (randn(20, seed=i).to(dtype).requires_grad_() for i in (1, 2))
    with torch.no_grad():
        rho[:3] = torch.tensor([-12.0, 1.0, 25.0])
        if narrow:
            rho.copy_(-3.001 - rho.abs() / 4)
    mean, sd = (weights.cut(flat, shapes) for flat in (loc, F.softplus(rho)))
    slopes, scale = weights.cut(randn(20, seed=3).to(dtype), shapes), torch.tensor(0.7, dtype=dtype)
    mine = dict(FlatNormals(loc, rho, shapes, [torch.full((20,), math.nan, dtype=dtype)]).arrays())
    with bp.isolated(0):
        draws, again = ({name: q.rsample() for name, q in mine.items()} for _ in range(2))
    assert all((draws[name] != again[name]).any() for name in shapes)
    totals = [0.0, 0.0]
    for i, (name, shape) in enumerate(shapes.items()):
        noise = ((draws[name] - mean[name]) / sd[name]).detach()
        q = Independent(Normal(mean[name], sd[name]), len(shape))
        prior = Independent(Normal(slopes[name] if name == "c" else torch.zeros(shape), scale), len(shape))
        centred = CentredNormal(0.7, shape, like=loc) if i else CentredNormal(scale, shape)
        own = prior if name == "c" else centred
        pairs = ((draws[name], mine[name], own), (mean[name] + sd[name] * noise, q, prior))
        for k, (draw, one, p) in enumerate(pairs):  # the draw of "b" is not used
            used = 0.0 if name == "b" else (slopes[name] * draw).sum()
            totals[k] = totals[k] + used + (i + 1) * kl_divergence(one, p)
    results = [(total, *torch.autograd.grad(total, [loc, rho], retain_graph=True)) for total in totals]
    torch.testing.assert_close(*results)
    if piece < len(loc) and dtype == torch.float32 and gradients.compiled():
        with pytest.raises(RuntimeError, match="one backward pass"):
            totals[0].backward()
    noise = torch.cat([((draws[name] - mean[name]) / sd[name]).flatten() for name in shapes])
    assert noise.abs().max() < 5 and 0.3 < noise.std() < 2  # of standard Normals


def test_compiled_noise_is_of_independent_standard_normals(monkeypatch):
    """Its distribution, its correlations within and between pieces and steps; of the seed alone, on any threads."""
    shapes = {"a": torch.Size([1 << 18]), "b": torch.Size([100]), "c": torch.Size([1 << 17])}
    loc = torch.zeros(sum(shape.numel() for shape in shapes.values()), requires_grad=True)
    rho = torch.full_like(loc, math.log(math.e - 1)).requires_grad_()  # a scale of 1
    if gradients.compiled() is None:
        pytest.skip("no compiler that makes vector instructions")

    def draws(seed, threads, steps=2):
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        with bp.isolated(seed):
            flats = (dict(FlatNormals(loc, rho, shapes, []).arrays()) for _ in range(steps))
            return torch.stack([torch.cat([q.rsample().detach() for q in flat.values()]) for flat in flats])

    found = draws(0, 1)
    assert (found == draws(0, 3)).all() and (found != draws(1, 1)).float().mean() > 0.999
    assert kstest(found.flatten().double().numpy(), "norm").pvalue > 1e-3
    for value in (found, (found.square() - 1) / math.sqrt(2)):  # about 500 standard Normals
        pairs = [(value[0, lag:], value[0, :-lag]) for lag in [*range(1, 257), gradients.PIECE, 2 * gradients.PIECE]]
        assert max(abs(a.dot(b).item()) / math.sqrt(len(a)) for a, b in [*pairs, value]) < 4.5


def test_a_compiler_or_a_folder_that_cannot_be_used_leaves_the_draws_to_torch(monkeypatch):
    for attribute in (("CC", "true"), ("CC", "false")):  # makes no file; fails
        monkeypatch.setenv(*attribute)
        assert gradients.compiled.__wrapped__() is None
    monkeypatch.delenv("CC")
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    c_code.build.cache_clear()
    assert gradients.compiled.__wrapped__() is None


MIXTURE = ScaleMixture(torch.tensor(1.3), torch.tensor(0.04), 0.3, torch.Size())


def test_scale_mixture_density_and_samples():
    w = torch.cat([torch.linspace(-4, 4, 41), torch.linspace(-0.1, 0.1, 21), torch.tensor([30.0, -200.0])])
    parts = [math.log(p) + Normal(0.0, scale).log_prob(w.double()) for p, scale in ((0.3, 1.3), (0.7, 0.04))]
    by_hand = torch.logsumexp(torch.stack(parts), 0)
    torch.testing.assert_close(MIXTURE.log_prob(w).double(), by_hand, rtol=1e-4, atol=1e-4)
    with bp.isolated(3):
        draws = MIXTURE.sample((5000,)).numpy()
    assert kstest(draws, lambda w: 0.3 * norm.cdf(w, scale=1.3) + 0.7 * norm.cdf(w, scale=0.04)).pvalue > 1e-3
    assert kstest(draws, norm(scale=draws.std()).cdf).pvalue < 1e-6  # the test can tell it from one Normal


@pytest.mark.parametrize(("activation", "bias"), [("tanh", True), ("relu", False)])
def test_a_network_by_hand_for_one_draw_and_for_many(activation, bias):
    with bp.isolated(0):
        net = MLP((2, 3), (5, 4), 2, activation, bias)
    x = randn(7, 2, 3)
    draws = {name: randn(6, *p.shape, seed=i) for i, (name, p) in enumerate(net.named_parameters())}
    h = x.flatten(1).expand(6, 7, 6)
    for i in range(3):
        h = h @ draws[f"layers.{i}.weight"].mT + (draws[f"layers.{i}.bias"].unsqueeze(1) if bias else 0.0)
        h = ACTIVATIONS[activation](h) if i < 2 else h
    torch.testing.assert_close(functional_call(net, draws, (x,)), h)
    for s in range(6):
        one = {name: value[s] for name, value in draws.items()}
        torch.testing.assert_close(functional_call(net, one, (x,)), h[s])


def read(likelihood, f, **latent):
    with ReadLikelihood() as kept, poutine.condition(data=latent):
        likelihood(f)
    return kept.likelihood


def test_variant_settings_that_are_refused():
    assert (bp.MeanField(hidden=7), bp.MLP(bias="no")) == (bp.MeanField(hidden=(7,)), bp.MLP(bias=False))
    for settings, message in (
        ({"prior": "normla:1"}, "unknown prior 'normla'; did you mean 'normal'"),
        ({"prior": "normal:0"}, "form normal:SCALE .*SCALE > 0"),
        ({"prior": "gamma:0,1"}, "form gamma:SHAPE,RATE"),
        ({"prior": "scale-mixture:1,2,3,4"}, "form scale-mixture:WIDE,NARROW,WEIGHT"),
        ({"prior": "scale-mixture:1,0.1,1.5"}, "wide component must lie between 0 and 1, got 1.5"),
        ({"hidden": (5, -1)}, "hidden"),
        ({"init_scale": 0.0}, "init"),
        ({"prior": ("normal:1", "normal:2")}, "prior takes a text or a number, such as 'by-target', got"),
        ({"noise": lambda x: x}, "noise takes a text or a number, such as 'learned', got <function"),
        ({"activation": "rleu"}, "unknown activation 'rleu'; did you mean 'relu'"),
        *[({"noise": noise}, "'learned', 'heteroscedastic', .* positive") for noise in ("leanred", "0", -2.0, "nan")],
    ):
        with pytest.raises(bp.UserError, match=message), bp.isolated(0):
            bp.MeanField(**settings).model(bp.Schema("regression", (1,)))


G = torch.Generator().manual_seed(4)
LOC = torch.randn(3, 5, generator=G, dtype=torch.float64)
SCALE = 0.1 + torch.rand(3, 5, generator=G, dtype=torch.float64)
ALPHAS = {"layer": torch.tensor(0.4).double(), "unit": torch.tensor([[0.2], [0.5], [0.9]]).double(), "weight": SCALE}
KINDS = {
    "normal": (NormalWeights(LOC, SCALE), SCALE),
    "free": (FreeWeights(LOC, 2 * SCALE.log()), SCALE),
    **{name: (DropoutWeights(LOC, a), (a.sqrt() * LOC.abs()).expand(3, 5)) for name, a in ALPHAS.items()},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
def test_one_parametrisation_is_like_another(kind, draws=50_000):
    q, scale = KINDS[kind]
    assert (q.batch_shape, q.event_shape) == ((), (3, 5))
    for name, expected in (("scale", scale), ("variance", scale.square()), ("log_variance", 2 * scale.log())):
        torch.testing.assert_close(getattr(q, name), expected)
    value = torch.randn(7, 3, 5, generator=G, dtype=torch.float64)
    torch.testing.assert_close(q.log_prob(value), Normal(LOC, scale).log_prob(value).sum((-1, -2)))
    with bp.isolated(0):
        assert q.expand(torch.Size((2,))).sample().shape == (2, 3, 5)
        drawn = q.sample((draws,))
    assert ((drawn.mean(0) - LOC).abs() < 5 * scale / math.sqrt(draws)).all()
    assert ((drawn.std(0) / scale - 1).abs() < 5 / math.sqrt(2 * draws)).all()


ROWS = torch.tensor([[0.5], [1.0], [2.0]]).double()
PRIORS = {
    "centred": (CentredNormal(ROWS[0, 0], LOC.shape), 0.0, ROWS[0, 0]),
    "a number": (CentredNormal(0.5, LOC.shape, like=LOC), 0.0, ROWS[0, 0]),
    "a scale a row": (CentredNormal(ROWS, LOC.shape), 0.0, ROWS),
    "normal": (NormalWeights(LOC.flip(0), SCALE.flip(1)), LOC.flip(0), SCALE.flip(1)),
}
SENSITIVITY = torch.randn(3, 5, generator=G, dtype=torch.float64)


@every_kind
@pytest.mark.parametrize("prior", PRIORS)
def test_kl_of_normals_against_torch(kind, prior):
    (q, scale), (p, loc, width) = KINDS[kind], PRIORS[prior]
    torch.testing.assert_close(kl_divergence(q, p), kl_divergence(Normal(LOC, scale), Normal(loc, width)).sum())


@pytest.mark.parametrize(
    ("make", "second"),
    [(NormalWeights, SCALE), (FreeWeights, SCALE.log()), *[(DropoutWeights, alpha) for alpha in ALPHAS.values()]],
)
def test_gradients_through_the_parametrisations(make, second):
    def objective(*parameters):
        q = make(*parameters)
        return kl_divergence(q, PRIORS["a scale a row"][0]) + (SENSITIVITY * (q.variance + q.mean)).sum()

    assert torch.autograd.gradcheck(objective, [t.clone().requires_grad_() for t in (LOC, second)])


@pytest.mark.parametrize("alpha", [1e-4, 0.1, 1.0, 100.0])
def test_the_log_uniform_kl_against_its_integral(alpha):
    """−KL = ½ log α − E log|ε| + const, ε ~ Normal(1, α); the constant makes it vanish as α → ∞."""
    scale = math.sqrt(alpha)
    density = lambda z: math.log(abs(1 + scale * z)) * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)  # noqa: E731
    expected = quad(density, -12, 12, points=[-1 / scale] if scale > 1 / 12 else None, limit=500)[0]
    limit = -0.5 * (0.5772156649015329 + math.log(2))  # E log|z| of a standard Normal
    exact = expected - 0.5 * math.log(alpha) - limit
    assert gradients.kl_log_uniform(torch.tensor(alpha).log()).item() == pytest.approx(exact, abs=0.008)


def test_the_log_uniform_prior_is_improper_and_its_kl_knows_only_alpha():
    a = torch.linspace(-9, 9, 13, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(gradients.kl_log_uniform, a)
    p = LogUniform(LOC.shape)
    for alpha in ALPHAS.values():
        q = DropoutWeights(LOC, alpha)
        free = NormalWeights(LOC, q.scale)  # the same weights by their scale have the same α, and the same KL
        torch.testing.assert_close(weights.log_alpha(free), alpha.log().expand(3, 5))
        for one in (q, DropoutWeights(-7 * LOC, alpha), free):
            torch.testing.assert_close(kl_divergence(one, p), gradients.kl_log_uniform(alpha.log()).expand(3, 5).sum())
    p = LogUniform(torch.Size((2,)))
    with pytest.raises(NotImplementedError, match="improper"):
        p.sample()
    one, other = p.log_prob(torch.tensor([[1.0, 2.0], [3.0, -2.0]]))
    assert (one - other).item() == pytest.approx(math.log(3))


SHAPE, RATE = 2.5, 0.7
W = torch.tensor([[0.3, -1.2, 0.5], [0.9, 0.1, -0.4]])


def test_the_density_is_an_integral_over_the_precision_and_draws_have_the_density():
    prior, w = parse_prior(f"gamma:{SHAPE},{RATE}")(W, 1), W.double().numpy()
    joint = lambda t: gamma.pdf(t, SHAPE, scale=1 / RATE) * math.exp(norm.logpdf(w, scale=t**-0.5).sum())  # noqa: E731
    assert prior.log_prob(W).item() == pytest.approx(math.log(quad(joint, 0, 60)[0]), rel=1e-5)
    several = torch.stack([W, 2 * W, -W])
    for own in (prior.log_prob, prior.expand([3]).log_prob):
        torch.testing.assert_close(own(several), torch.stack([prior.log_prob(v) for v in several]))
    with bp.isolated(0):
        assert prior.expand([3]).sample().shape == (3, 2, 3)
    prior = GammaNormal(torch.tensor(SHAPE), torch.tensor(RATE), torch.Size([2]))
    with bp.isolated(0):
        w = prior.sample((20_000,))
    assert kstest((w.square().sum(1) * SHAPE / RATE / 2).numpy(), "f", args=(2, 2 * SHAPE)).pvalue > 1e-3


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 2, 2)])
def test_each_input_has_a_scale_of_its_own(shape):
    w = W.view(2, 3, 1, 1).mul(torch.tensor([[1.0, 0.5], [2.0, -1.0]])) if len(shape) > 2 else W
    prior, one = (parse_prior(f"{name}:{SHAPE},{RATE}") for name in ("ard", "gamma"))
    of_each = sum(one(column, 1).log_prob(column) for column in w.unbind(1))
    torch.testing.assert_close(prior(w, 1).log_prob(w), of_each)
    with bp.isolated(0):
        drawn = prior(w, 1).sample((20_000,)).square().mul(SHAPE / RATE)
    squares, size = drawn.movedim(2, 0).flatten(2).sum(-1), w[:, 0].numel()
    for found in squares / size:
        assert kstest(found.numpy(), "f", args=(size, 2 * SHAPE)).pvalue > 1e-3
    assert torch.corrcoef(squares.log())[0, 1:].tolist() == pytest.approx([0.0, 0.0], abs=4 / math.sqrt(20_000))
    bias = torch.ones(3)
    assert prior(bias, 1).log_prob(bias) == one(bias, 1).log_prob(bias)


def test_the_first_layer_may_have_a_prior_of_its_own():
    schema = bp.Schema("regression", (5,))
    with bp.isolated(0):
        first, *others = bp.MeanField(hidden=(4, 3), prior="ard:2,1/normal:3").model(schema).prior().values()
        with pytest.raises(bp.UserError, match="unknown prior 'norml'"):
            bp.MeanField(prior="ard:2,1/norml:3").model(schema)
    assert first.groups == 5 and [p.scale.item() for p in others] == [3.0] * 5


@pytest.mark.parametrize(("inputs", "rate"), [(3, 0.01), (14, 0.01), (40, 2 / 1600), (200, 2 / 40_000)])
def test_what_many_inputs_add_up_to_does_not_grow_with_their_number(inputs, rate):
    with bp.isolated(0):
        model = bp.MeanField(hidden=(4,), prior="ard:0.5/fan-in:2").model(bp.Schema("regression", (inputs,)))
        first = model.prior()["layers.0.weight"]
        sums = first.sample((4000,)).sum(-1)[:, 0]  # of Cauchys of scale √(2 rate)
    assert first.rate.item() == pytest.approx(rate)
    assert kstest(sums.numpy() / (inputs * math.sqrt(2 * rate)), "cauchy").pvalue > 1e-3
