"""The log joint over a flat vector: against Pyro's own trace, on constrained sites, compiled; refusals."""

import math
import platform
from dataclasses import replace
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from refused import refuses
from torch import nn
from zoo_problems import problem, traced_log_joint

import bnn_pyro as bp
from bnn_pyro import c_code
from bnn_pyro.inference import compiled
from bnn_pyro.inference.compiled import c_pieces
from bnn_pyro.inference.log_joint import with_gradient
from bnn_pyro.inference.potential import Potential
from bnn_pyro.parts.likelihoods import make_likelihood

#: Networks that are compiled here: what a recipe is of is traced and built once for all tests.
NETS = {
    "fixed noise": dict(activation="relu", prior="fan-in:1"),
    "learned noise": dict(activation="leaky_relu", prior="gamma:1,1"),
    "heteroscedastic": dict(activation="sigmoid", prior="scale-mixture"),
    "binary": dict(activation="tanh", prior="ard:1,1/gamma:1,1"),
    "multiclass": dict(activation="gelu", prior="scale-mixture"),
}


def potential(task="binary", temperature=1.0, **settings):
    entry, data = problem("mean-field", task)
    with bp.isolated(0):
        return Potential(replace(entry, **settings).model(data.schema), data.x_train, data.y_train, temperature)


def draws(target, num=5):
    with bp.isolated(1):
        return target.prior_draws(num)


def by_pyro(target, z):
    w = {site: value[0] for site, value in target.weights(z[None]).items()}
    return traced_log_joint(target.model, w, target.x, target.y, target.temperature)


class Hierarchy(nn.Module):
    """log τ ~ Normal(0, 1), w ~ Normal(0, τ) each."""

    def __init__(self):
        super().__init__()
        self.likelihood = make_likelihood(problem("mean-field", "fixed noise")[1].schema, 1.0)
        self.initial = {"log_tau": torch.zeros(1), "w": torch.zeros(3, 1)}

    def forward(self, x, y=None):
        tau = pyro.sample("log_tau", dist.Normal(x.new_zeros(1), 1.0).to_event(1)).exp()
        w = pyro.sample("w", dist.Normal(0.0, tau[..., None].expand(*tau.shape[:-1], 3, 1)).to_event(2))
        return self.likelihood(x[:, :3] @ w, y)


def test_draws_of_the_prior_know_what_a_site_depends_on():
    _, data = problem("mean-field", "fixed noise")
    with bp.isolated(0):
        target = Potential(Hierarchy(), data.x_train, data.y_train)
        few, many = target.sample_prior(5, 20_000)
    assert few["w"].shape == (5, 3, 1) and few["log_tau"].shape == (5, 1)
    logs = torch.cat([many["log_tau"], many["w"][..., 0].abs().log()], 1)
    # log|w| = log τ + log|ε|, whose variances are 1 and π²/8; an error of about 0.005.
    off = torch.corrcoef(logs.T) - (1 / (1 + math.pi**2 / 8)) ** torch.tensor([0, 0.5, 1])[_PAIRS]
    assert off.abs().max() < 0.03
    plain = potential("learned noise")
    with bp.isolated(3):
        drawn = plain.sample_prior(3, 2)
    with bp.isolated(3):  # the same numbers as ever where priors are independent
        alone = {site: [prior.sample((num,)) for num in (3, 2)] for site, prior in plain.priors.items()}
    assert all(torch.equal(drawn[i][site], draws[i]) for site, draws in alone.items() for i in (0, 1))


#: Powers of the correlation of log τ and log|w|, of (log τ, three of log|w|).
_PAIRS = torch.tensor([[0, 1, 1, 1], [1, 0, 2, 2], [1, 2, 0, 2], [1, 2, 2, 0]])


@pytest.mark.parametrize("task", NETS)
def test_it_is_pyro_s_log_joint(task):
    target = potential(task, temperature=0.5)
    z = draws(target)
    torch.testing.assert_close(target.position(target.weights(z)), z, rtol=1e-6, atol=1e-6)
    density, gradient = target(z)
    assert density.dtype == gradient.dtype == torch.float64 and gradient.shape == z.shape
    for row in range(len(z)):
        assert density[row].item() == pytest.approx(by_pyro(target, z[row]).item(), rel=1e-6)
    # The gradient against central differences along a random direction, in units of the step's own error.
    direction = torch.randn(z.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    target.model.double()
    target.dtype, target.x = torch.float64, target.x.double()
    slope = (target(z + 1e-5 * direction)[0] - target(z - 1e-5 * direction)[0]) / 2e-5
    torch.testing.assert_close((target(z)[1] * direction).sum(1), slope, rtol=1e-4, atol=1e-4)


def normed(norm):
    _, data = problem("mean-field", "fixed noise")
    with bp.isolated(0):
        net = nn.Sequential(nn.Linear(data.schema.input_shape[0], 8), norm(8), nn.Tanh(), nn.Linear(8, 1))
        return Potential(bp.Bayesian(net).model(data.schema), data.x_train, data.y_train)


NORMS = {"layer": nn.LayerNorm, "group": partial(nn.GroupNorm, 2), "rms": nn.RMSNorm}


@pytest.mark.parametrize("name", [*NETS, *NORMS])
def test_compiled(name):
    target = potential(name, **NETS[name]) if name in NETS else normed(NORMS[name])
    z = draws(target, 7)
    expected = target(z)
    assert target.compile(3)  # a warning would be an error
    for found, value in zip(target(z), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-4 if name in NETS else 1e-3)
    alone = [target(row[None]) for row in z]
    assert torch.equal(torch.cat([density for density, _ in alone]), target(z)[0])


def test_elementwise_functions_and_numbers_too_small_to_be_normal_which_are_zero():
    """In single precision, over their whole range, with what is not finite as torch has it."""
    functions = {name: getattr(torch, name) for name in ("tanh", "sigmoid", "exp", "log1p", "expm1", "erf")}
    functions["softplus"] = torch.nn.functional.softplus
    wide = torch.cat([torch.linspace(-80, 80, 4000), torch.logspace(-30, 0, 500)]).double()
    z = torch.cat([wide, torch.tensor([torch.nan, torch.inf, -torch.inf])])
    z = torch.stack([z.clamp_min(-0.999) if name == "log1p" else z for name in functions]).flatten()[None]

    def apply(z):
        parts = z.float().chunk(len(functions), 1)
        return torch.cat([f(part) for f, part in zip(functions.values(), parts, strict=True)], 1).double()

    made = compiled.compile_gradient(lambda z, y: ((w := apply(z)).sum(1), w), z, z)
    torch.testing.assert_close(made(z)[1], apply(z), rtol=1e-5, atol=1e-7, equal_nan=True)
    # The rational approximation of erf is off by up to 4.5e-7, and without a limit beyond 1 near |x| = 4.
    z = torch.linspace(-8, 8, 20_001).double()[None]
    erf = compiled.compile_gradient(lambda z, y: (z.sum(1), torch.erf(z.float()).double()), z, z)(z)[1]
    assert (erf.abs() <= 1).all() and (erf - torch.erf(z)).abs().max() < 6e-7
    # As torch.set_flush_denormal has it: gradients of gelu would take several times as long.
    z = torch.full((2, 3), 1e-20, dtype=torch.float64)
    made = compiled.compile_gradient(lambda z, y: (z.sum(1), z.float().square().double()), z, z)
    assert (made(z)[1] == 0).all() == (platform.machine() in ("x86_64", "AMD64"))
    assert (z.float().square() > 0).all()


#: Of (…, 3, 4) numbers.
OPERATORS = {
    "softmax": lambda h: h.softmax(-1),
    "log_softmax": lambda h: h.log_softmax(-2),
    "diagonal": lambda h: (h[..., :, None] * h[..., None, :]).diagonal(dim1=-2, dim2=-1),
    "elu and selu": lambda h: nn.functional.elu(h) * nn.functional.selu(h),
    "hardtanh": lambda h: nn.functional.hardtanh(h, -0.5, 0.5),
    "softshrink": lambda h: nn.functional.softshrink(h, 0.3),
    "hardsigmoid": lambda h: nn.functional.hardsigmoid(4 * h),
    "variance": lambda h: h.var(-1, keepdim=True) + h.std(-2, unbiased=False, keepdim=True),
    "pad": lambda h: nn.functional.pad(h, (1, 0, 0, 2), value=0.5).square(),
    "roll": lambda h: h.roll(1, -1) * h.flip(-2),
    "index": lambda h: h[..., torch.tensor([0, -1, 0, 2]), torch.tensor([3, 1, 3, 0])] ** 2,
    "every other": lambda h: h[..., ::2] ** 2,
    "unfold": lambda h: h.unfold(-1, 2, 1).sum(-1) ** 3,
    "max": lambda h: h.max(-1)[0] * h.amax(-2).sum(),
    "remainder": lambda h: torch.remainder(h, 0.7).square(),
    "round": lambda h: h * (h.round() + h.floor()),
    "atan2": lambda h: torch.atan2(h, h.cosh()),
    "xlogy": lambda h: torch.xlogy(h.abs(), h.abs() + 0.1),
    "cumsum": lambda h: h.cumsum(-2) ** 2,
    "prod": lambda h: h.prod(-1),
    "attention": lambda h: nn.functional.scaled_dot_product_attention(h, 2 * h, h, is_causal=True),
    "linear map and bias": lambda h: torch.addmm(h[0, 0], h[0, :, :3], h[0]),
}


def test_operators_of_networks_have_torch_s_gradients():
    g = torch.Generator().manual_seed(0)
    z = torch.randn(1, len(OPERATORS) * 12, generator=g, dtype=torch.float64)

    def density(z):
        parts = zip(OPERATORS.values(), z.float().unflatten(1, (-1, 3, 4)).unbind(1), strict=True)
        return sum((f(h) * torch.linspace(-1, 1, f(h).numel()).view(f(h).shape)).sum() for f, h in parts)[None].double()

    expected = with_gradient(density, z)
    found = compiled.compile_gradient(lambda z, y: with_gradient(density, z), z, z)(z)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    for name, row, exact in zip(OPERATORS, *(value[1].view(-1, 12) for value in (found, expected)), strict=True):
        torch.testing.assert_close(row, exact, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("fast", [False, True])
def test_leapfrog(fast):
    target = potential("binary", **NETS["binary"])
    if fast:
        assert target.compile(1)
    z0 = draws(target, 3)
    g = torch.Generator().manual_seed(3)
    r0 = torch.randn(z0.shape, generator=g, dtype=torch.float64)
    mass = torch.rand(target.size, generator=g, dtype=torch.float64) + 0.5
    step = torch.tensor([0.02, 0.05, 0.1]).double()
    z, r, (density, gradient) = z0.clone(), r0.clone(), (t.clone() for t in target(z0))
    target.leapfrog(z, r, density, gradient, mass, step, 10)
    expected, momentum = z0, r0
    for _ in range(10):
        half = momentum + 0.5 * step[:, None] * target(expected)[1]
        expected = expected + step[:, None] * mass * half
        momentum = half + 0.5 * step[:, None] * target(expected)[1]
    for found, exact in ((z, expected), (r, momentum), (density, target(expected)[0])):
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)


class Constrained(nn.Module):
    """A scale, a share of three and a weight: sites that are not on the whole line."""

    def __init__(self):
        super().__init__()
        self.initial = {"w": torch.tensor(0.1), "scale": torch.tensor(1.5), "shares": torch.tensor([0.2, 0.5, 0.3])}

    def forward(self, x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        scale = pyro.sample("scale", dist.Gamma(2.0, 1.0))
        shares = pyro.sample("shares", dist.Dirichlet(torch.ones(3)))
        loc = w.unsqueeze(-1) * x[:, 0] + (shares**2).sum(-1, keepdim=True)
        with pyro.plate("data", len(x), dim=-1):
            return pyro.sample("y", dist.Normal(loc, scale.unsqueeze(-1)), obs=y)


def test_constrained_sites():
    """log |J| of a log and of a stick-breaking transform, by hand, against torch's own."""
    x, y = torch.ones(6, 1), torch.linspace(-1, 1, 6)
    with bp.isolated(0):
        target = Potential(Constrained(), x, y)
        z = target.prior_draws(4)
    model = Constrained()
    model.initial["old"] = torch.zeros(2)
    refuses("has a value for 'old', which is no site of the model", Potential, model, x, y)
    w = target.weights(z)
    transform = torch.distributions.biject_to(dist.Dirichlet(torch.ones(3)).support)
    for row in range(4):
        scale, shares = w["scale"][row], w["shares"][row].double()
        assert scale > 0 and shares.sum().item() == pytest.approx(1)
        jacobian = scale.log() + transform.log_abs_det_jacobian(transform.inv(shares), shares)
        assert target(z)[0][row].item() == pytest.approx((by_pyro(target, z[row]) + jacobian).item(), rel=1e-4)


def test_where_nothing_can_be_compiled_a_warning_says_why(monkeypatch):
    monkeypatch.setattr(compiled, "TRACES", {})
    monkeypatch.setitem(c_pieces.POINTWISE, torch.ops.aten.tanh, "sin{f}({0})")
    with pytest.warns(UserWarning, match="its result is off by"):
        assert not potential(activation="tanh").compile(1)
    target = potential("fixed noise")
    plain = target.model.net.activation
    target.model.net.activation = lambda f: torch.special.i0(plain(f))
    with pytest.warns(UserWarning, match=r"not compiled.*has no C form"):
        assert not target.compile(1)
    data = problem("mean-field", "binary")[1]
    with bp.isolated(0):
        norm = nn.utils.parametrizations.weight_norm(nn.Linear(data.x_train.shape[1], 1))
        own = Potential(bp.Bayesian(norm).model(data.schema), data.x_train, data.y_train)
    with pytest.warns(UserWarning, match=r"slower: the operator aten._weight_norm.* gives several tensors"):
        assert not own.compile(1)
    monkeypatch.setattr(c_code.shutil, "which", lambda name: None)
    with pytest.warns(UserWarning, match=r"not compiled.*no C compiler"):
        assert not target.compile(1)


def test_code_is_made_once_for_targets_and_starts_of_its_own(monkeypatch):
    monkeypatch.setattr(compiled, "TRACES", {})
    c_code.build.cache_clear()
    first, second, other_rows = (potential("fixed noise", activation="tanh") for _ in range(3))
    second.y = second.y.flip(0) + 1
    second.model.net.layers[0].weight += 0.1  # where it starts is no part of the density
    other_rows.x = other_rows.x + 1
    assert first.compile(1) and second.compile(1) and len(compiled.TRACES) == c_code.build.cache_info().currsize == 1
    assert other_rows.compile(1) and len(compiled.TRACES) == 2
    z = draws(first)
    for target in (first, second, other_rows):
        for found, expected in zip(target(z), target.evaluate(z), strict=True):
            assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("task", ["learned noise", "multiclass"])
def test_other_targets(task):
    """Given to all chains, compiled or not, or to each its own: the very density of data with these targets."""
    whole, fast = (potential(task, **NETS[task]) for _ in range(2))
    z = draws(whole, 3)
    g = torch.Generator().manual_seed(4)
    ys = torch.stack([whole.y[torch.randperm(12, generator=g)] for _ in z])
    with bp.isolated(0):
        alone = [Potential(whole.model, whole.x, y)(row[None]) for row, y in zip(z, ys, strict=True)]
    assert fast.compile(3)
    for target in (whole, fast):
        for row, y, expected in zip(z, ys, alone, strict=True):
            target.give(y)
            torch.testing.assert_close(target(row[None]), expected, rtol=1e-4, atol=1e-4)
        assert bool(target.compiled) == (target is fast)
        target.give(ys)
        assert not target.compiled
        torch.testing.assert_close(target(z), tuple(map(torch.cat, zip(*alone, strict=True))), rtol=1e-6, atol=1e-6)
