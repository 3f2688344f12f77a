"""Dropout against every mask there is; local reparametrization against sampled weights and a known optimum."""

import gc
import math
import weakref
from dataclasses import replace
from itertools import product

import pyro.poutine as poutine
import pytest
import torch
from conjugate import dataset
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from pyro.poutine.messenger import Messenger
from run_folders import reseal
from torch import nn
from zoo_problems import problem

import bnn_pyro as bp
from bnn_pyro.errors import UserError
from bnn_pyro.inference.log_joint import Rescale, elbo_of
from bnn_pyro.parts.guides import DroppedColumns, PointMass
from bnn_pyro.parts.likelihoods import make_likelihood
from bnn_pyro.parts.nets import MLP, ConvNet, in_mode
from bnn_pyro.parts.priors import BayesianNet, widest_activation

W = torch.tensor([[1.0, -2.0, 0.5], [3.0, 0.25, -1.0]])
X = torch.randn(12, 3, generator=torch.Generator().manual_seed(5))
DATA = dataset(X, (X[:, 0] > 0).long(), bp.Schema("classification", (3,), classes=("a", "b")), X[:5] + 0.1)
SMALL = dict(hidden=(6, 4), input_dropout=0.2, hidden_dropout=0.5)


def fit(method, entry=None, **settings):
    entry = bp.DropoutMLP(**{**SMALL, **settings}) if entry is None else entry
    return bp.fit(entry, DATA, method, seed=0, progress=False, device="cpu")


def test_archives_of_earlier_versions_that_hold_no_rates_have_those_of_then(tmp_path):
    x = torch.rand(4, 1, 2, 2, generator=torch.Generator().manual_seed(5))
    data = dataset(x, torch.tensor([0, 1, 0, 1]), bp.Schema("classification", (1, 2, 2), ("a", "b")), x)
    made = bp.fit(bp.DropoutMLP(hidden=(3,)), data, bp.MCDropout(epochs=1), seed=0, progress=False, device="cpu")
    made.save(tmp_path)
    assert list(bp.load(tmp_path).guide.rates.values()) == [0.05, 0.1]
    rates = ("input_dropout", "hidden_dropout")
    settings = {k: v for k, v in made.provenance["entry_settings"].items() if k not in rates}
    reseal(tmp_path, provenance={**made.provenance, "entry_settings": settings})
    assert list(bp.load(tmp_path).guide.rates.values()) == [0.2, 0.5]
    # Of tables the rates are the same, and keys held none.
    how = dict(seed=0, progress=False, device="cpu", out=tmp_path)
    made = bp.fit(bp.DropoutMLP(hidden=(3,)), DATA, bp.MCDropout(epochs=1), **how)
    variant, settings, *rest = made.provenance["key"]
    earlier = [variant, {k: v for k, v in settings.items() if not k.endswith("dropout")}, *rest]
    reseal(tmp_path, provenance={**made.provenance, "key": earlier})
    again = bp.fit(bp.DropoutMLP(hidden=(3,)), DATA, bp.MCDropout(epochs=1), **how, resume=True)
    assert again.guide.loc.equal(made.guide.loc)
    with pytest.raises(UserError, match="of other settings"):
        bp.fit(bp.DropoutMLP(hidden=(3,), hidden_dropout=0.2), DATA, bp.MCDropout(epochs=1), **how, resume=True)


def test_held_out_rows_of_a_table_choose_the_rate_of_hidden_units(tmp_path):
    """That with the least NLL of the validation rows, by its own fit; the archive and a resumed fit have it too."""
    x = torch.randn(40, 1, generator=torch.Generator().manual_seed(1))
    data = dataset(x, x[:, 0].sin(), bp.Schema("regression", (1,)), x)
    data = replace(data, x_val=0.9 * x[:20], y_val=(0.9 * x[:20, 0]).sin())
    method, how = bp.MCDropout(epochs=30), dict(seed=0, progress=False, device="cpu")
    made = bp.fit(bp.DropoutMLP(hidden=(20,)), data, method, out=tmp_path, **how)
    rates = (0.05, 0.1, 0.02, 0.005)
    each = [bp.fit(bp.DropoutMLP(hidden=(20,), hidden_dropout=rate), data, method, **how) for rate in rates]
    nll = [bp.metrics.nll(bp.predict(one, data.x_val), data.y_val) for one in each]
    best = nll.index(min(nll))
    assert rates[best] != 0.05 and made.guide.loc.equal(each[best].guide.loc)
    again = bp.fit(bp.DropoutMLP(hidden=(20,)), data, method, out=tmp_path, resume=True, **how)
    for one in (made, again, bp.load(tmp_path)):
        assert list(one.guide.rates.values()) == [0.0, rates[best]]
    assert len(made.rows) == 60  # the rows that chose are no test rows


def test_the_rates_are_the_inputs_and_the_hidden_ones():
    image = bp.Schema("classification", (1, 4, 4), ("a", "b"))
    with bp.isolated(0), torch.no_grad():
        assert bp.DropoutMLP(hidden=(5, 4), input_dropout=0.1).model(DATA.schema).net.rates == (0.1, 0.05, 0.05)
        assert bp.DropoutMLP().model(DATA.schema).net.rates == (0.0, 0.05)
        assert bp.DropoutMLP(hidden_dropout=0.3).model(image).net.rates == (0.05, 0.3)
        net, seen = MLP((1000,), (2000,), 1, dropout=(0.2, 0.5)), []
        for layer in net.layers:
            layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        net.layers[0].bias += 10.0  # no hidden unit is 0 of itself
        net(torch.ones(50, 1000))
    for values, rate in zip(seen, (0.2, 0.5), strict=True):
        assert (values == 0).float().mean().item() == pytest.approx(rate, abs=0.01)


def test_draws_of_dropped_columns_have_the_shares_of_the_masks_and_log_prob_is_theirs(num=40_000):
    q, shares = DroppedColumns(W, 0.3), []
    with bp.isolated(0):
        draws = q.expand((num,)).sample()
    for mask in product((0.0, 1.0), repeat=3):
        value, p = W * torch.tensor(mask) / 0.7, math.prod(0.7 if z else 0.3 for z in mask)
        assert q.log_prob(value).item() == pytest.approx(math.log(p), abs=1e-6)
        shares.append(torch.isclose(draws, value).flatten(1).all(1).double().mean().item())
        assert shares[-1] == pytest.approx(p, abs=5 * math.sqrt(p * (1 - p) / num))
    assert sum(shares) == pytest.approx(1.0)  # there are no other draws: columns fall as a whole
    assert q.log_prob(W).item() == -math.inf and DroppedColumns(W, 0.0).log_prob(W).item() == 0.0
    zero = W * torch.tensor([1.0, 0.0, 1.0])
    assert DroppedColumns(zero, 0.3).log_prob(zero / 0.7).item() == pytest.approx(2 * math.log(0.7))


def test_the_gradient_is_the_mean_over_all_masks():
    """Every mask of a net with 2 inputs and 2 hidden units, by dropped columns, against masks drawn in training."""
    g = torch.Generator().manual_seed(3)
    x, y = torch.tensor([[1.0, -0.7], [0.4, 1.3]]), torch.tensor([1, 0])
    rates, copies = (0.3, 0.5), 40_000
    with bp.isolated(1):
        own = dict(activation="tanh", prior="normal:1", input_dropout=rates[0], hidden_dropout=rates[1])
        entry = bp.DropoutMLP(hidden=(2,), **own)
        model = entry.model(bp.Schema("classification", (2,), classes=("a", "b")))
        start = {name: torch.randn(v.shape, generator=g) for name, v in model.initial.items()}

        exact = PointMass(start)
        total = 0.0
        for mask in product((0.0, 1.0), repeat=4):
            z = torch.tensor(mask)
            p = math.prod((1 - r) if keep else r for keep, r in zip(mask, (0.3, 0.3, 0.5, 0.5), strict=True))
            w = exact.sites()
            w["layers.0.weight"] = w["layers.0.weight"] * z[:2] / 0.7
            w["layers.1.weight"] = w["layers.1.weight"] * z[2:] / 0.5
            with poutine.block(), poutine.condition(data=w), poutine.trace() as trace:
                model(x, y)
            total = total + p * trace.trace.nodes["y"]["fn"].log_prob(y.float()).sum()
        total.backward()

        drawn = PointMass(start)
        many = x.repeat(copies, 1), y.repeat(copies)
        with in_mode(model, training=True):
            objective, _ = elbo_of(Rescale(1 / copies, 0.0)(model), Rescale(latent=0.0)(drawn), *many)
        objective.backward()
    assert objective.item() == pytest.approx(total.item(), rel=0.01)
    torch.testing.assert_close(drawn.loc.grad, exact.loc.grad, rtol=0.02, atol=0.01)


def test_the_point_is_that_of_map_and_rate_0_is_map_bit_for_bit():
    map_, dropout = (fit(m(epochs=20, batch_size=5)) for m in (bp.MAP, bp.MCDropout))
    assert set(dropout.trace) == {"epoch", "log_likelihood", "log_joint", "log_prior"} and dropout.trace == map_.trace
    for posterior in (map_, dropout.at_mean_weights()):
        assert all(torch.equal(v[0, 0], dropout.guide.sites()[k]) for k, v in posterior.chains.items())
    without, with_masks = (bp.predict(p, DATA.x_test, num_draws=20) for p in (map_, dropout))
    assert without.num_draws == 1 and with_masks.num_draws == 20 and (with_masks.epistemic > 0).all()
    nothing = fit(bp.MCDropout(epochs=10, batch_size=5), input_dropout=0.0, hidden_dropout=0.0)
    plain = fit(bp.MAP(epochs=10, batch_size=5), entry=bp.MLP(hidden=SMALL["hidden"]))
    first = bp.predict(nothing, DATA.x_test, num_draws=1).components.logits
    assert torch.equal(first, bp.predict(plain, DATA.x_test).components.logits)
    assert all(torch.equal(v[0, 0], nothing.guide.sites()[k]) for k, v in plain.chains.items())


def test_a_draw_is_one_function_of_x():
    """The same rows in another batch, and one at a time: the same components, however the model was left."""
    posterior = fit(bp.MCDropout(epochs=3))
    whole = bp.predict(posterior, DATA.x_test, num_draws=6).components.logits
    tight = bp.predict(posterior, DATA.x_test, num_draws=6, max_memory=1).components.logits
    torch.testing.assert_close(tight, whole)
    assert len(whole[:, 0].unique()) > 1 and not any(part.training for part in posterior.model.modules())
    posterior.model.train()
    posterior.model.net.layers[1].eval()
    with pytest.raises(KeyboardInterrupt), in_mode(posterior.model, training=False):
        raise KeyboardInterrupt
    assert not posterior.model.net.layers[1].training
    posterior.model.train()
    assert torch.equal(bp.predict(posterior, DATA.x_test, num_draws=6).components.logits, whole)
    assert posterior.model.training and posterior.model.net.training


# -- local reparametrization; z = 5 of the measured standard errors, unless a comment says otherwise ------------------
FLAT = bp.Schema("classification", (1, 3, 28), classes=("a", "b"))
SCALES = {
    "free": dict(scale="free", init_scale=0.3, prior="fan-in:1.5"),
    "layer": dict(scale="layer", init_scale=0.4, prior="log-uniform"),
    "unit": dict(scale="unit", init_scale=0.4, prior="log-uniform"),
    "weight": dict(scale="weight", init_scale=0.4, prior="normal:2"),
}


def perturbed(entry, data, spread=0.3):
    """Model and guide with parameters that are no starting values."""
    with bp.isolated(1):
        model = entry.model(data.schema)
        guide = entry.guide(model)
        for p in guide.parameters():
            p.data += spread * torch.randn_like(p)
    return model, guide


@pytest.mark.parametrize(("scale", "task"), list(zip(SCALES, ["learned noise", "multiclass"] * 2, strict=True)))
def test_the_elbo_is_that_of_the_same_weights(scale, task, draws=300):
    _, data = problem("hidden-layer", task)
    model, guide = perturbed(bp.HiddenLayerNet(hidden=(6, 5), **SCALES[scale]), data)
    batch = data.x_train, data.y_train
    with bp.isolated(0), torch.no_grad():
        local = [elbo_of(model, guide, *batch) for _ in range(draws)]
        weights = [elbo_of(model.weight_space, guide.weight_space, *batch) for _ in range(draws)]
        vectorised = TraceMeanField_ELBO(num_particles=3, vectorize_particles=True, max_plate_nesting=1)
        pyros = [-one.loss(model, guide, *batch) for one in (TraceMeanField_ELBO(), Trace_ELBO(), vectorised)]
    (elbo, fit), (elbo_w, fit_w) = (torch.tensor(v).double().T for v in (local, weights))
    kl = (fit - elbo).mean()
    torch.testing.assert_close(fit - elbo, kl.expand(draws), rtol=1e-5, atol=1e-3)  # closed: the same in every draw
    # The KL of one matrix (fan-in + 1, out) is that of its weights and biases as sites of their own.
    torch.testing.assert_close((fit_w - elbo_w).mean(), kl, rtol=1e-4, atol=1e-2)
    error = math.sqrt((fit.var() + fit_w.var()) / draws)
    assert abs(fit.mean() - fit_w.mean()) < 5 * error
    assert error < 0.05 * abs(fit.mean())
    assert all(abs(one - (fit.mean() - kl)) < 6 * fit.std() for one in pyros)  # of one draw, and of three


def test_it_is_the_network_that_one_would_write():
    with bp.isolated(0):
        net = ConvNet((1, 12, 12), (3, 4), (5,), 2, "tanh", kernel=3, padding=0)
        x = torch.randn(6, 1, 12, 12)
    conv, linear = net.convolutions, net.layers
    first = (part for layer in conv for part in (layer, nn.Tanh(), nn.MaxPool2d(2)))
    plain = nn.Sequential(*first, nn.Flatten(), linear[0], nn.Tanh())
    assert net(x).std(0).min() > 0.01  # units that are dead would agree whatever came before
    torch.testing.assert_close(net(x), linear[1](plain(x)))
    model = BayesianNet(net, make_likelihood(bp.Schema("regression", (1, 12, 12)), "heteroscedastic"))
    assert widest_activation(model, x) == 3 * 10 * 10


def test_what_does_not_fit_is_refused():
    schema = problem("mlp", "multiclass")[1].schema
    for make, message in (
        (lambda: bp.HiddenLayerNet(scale="layers"), r"unknown scale 'layers'.*layer"),
        (lambda: bp.HiddenLayerNet(scale="unit", init_scale=1.0), r"initial α .* below 1, got 1"),
        (lambda: bp.HiddenLayerNet(prior="scale-mixture").model(schema), "normal, fan-in or log-uniform"),
        (lambda: bp.HiddenLayerNet(prior="log-uniform:1").model(schema), "must have the form log-uniform"),
        (lambda: bp.BayesianConvNet().model(schema), r"takes images .* shape \(3,\); take .* hidden-layer"),
        (lambda: bp.BayesianConvNet().model(FLAT), "images of 3 × 28 pixels are too small for 2 convolutions"),
        (lambda: bp.BayesianConvNet(channels=()), "one or more numbers"),
        (lambda: bp.BayesianConvNet(padding=3), "padding must lie between 0 and"),
        (lambda: bp.DropoutMLP(input_dropout=1.0), "dropout must be at least 0 and below 1"),
        (lambda: fit(bp.MCDropout(epochs=1), entry=bp.MLP(hidden=(3,))), "mc-dropout needs a network with dropout"),
    ):
        with bp.isolated(0), pytest.raises(bp.UserError, match=message):
            make()


@pytest.mark.parametrize(
    "entry", [*(bp.HiddenLayerNet(hidden=(6, 5), **SCALES[s]) for s in ("free", "layer")), bp.MeanField(hidden=(6, 5))]
)
def test_a_step_leaves_nothing_for_the_garbage_collector(entry):
    """Activations of one step in a cycle would stay until some later collection: several steps' memory at once."""
    _, data = problem("hidden-layer", "multiclass")
    model, guide = perturbed(entry, data)
    made = []

    class Remember(Messenger):
        def _pyro_post_sample(self, msg):
            made.extend(weakref.ref(thing) for thing in (msg["fn"], msg["value"]) if thing is not data.y_train)

    with bp.isolated(0):
        elbo_of(model, guide, data.x_train, data.y_train)[0].backward()  # the first may collect
        gc.collect()
        gc.disable()
        try:
            for _ in range(2):
                with Remember():
                    elbo, _ = elbo_of(model, guide, data.x_train, data.y_train)
                elbo.backward()
                del elbo
        finally:
            gc.enable()
    assert len(made) > 20
    assert [ref() for ref in made if ref() is not None] == []
