"""Layers by equations written out: the density that samplers follow, and the ELBO at its maximum by integration."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from own_networks import OUT, Wrong
from refused import refuses
from run_folders import reseal
from test_own_network import fit, rows
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import bnn_pyro as bp
from bnn_pyro.checks.problems import Problem
from bnn_pyro.inference.log_joint import Objective
from bnn_pyro.inference.members import restarted
from bnn_pyro.inference.potential import Potential
from bnn_pyro.parts.guides import inverse_softplus
from bnn_pyro.parts.row_noise import ROWS, sampling_of

# An LSTM cannot be mapped over draws, and says so.
pytestmark = [pytest.mark.usefixtures("seeded"), pytest.mark.filterwarnings("ignore::UserWarning")]


class Net(nn.Module):
    """One layer, of which the named parameters are Bayesian; ``f(layer, x)`` calls it with x (B, 4)."""

    def __init__(self, layer, f, **fixed):
        super().__init__()
        self.layer, self.f = layer, f
        for name, values in fixed.items():
            own = self.layer.get_parameter(name)
            own.data = torch.tensor(values).reshape(own.shape)

    def forward(self, x):
        return self.f(self.layer, x)


def lstm(w, x):
    """h of the last of four steps; w (S, 4) are the recurrent weights of the gates i, f, g, o."""
    h = c = torch.zeros(len(w), len(x), dtype=w.dtype)
    for t in range(4):
        i, f, g, o = (a * x[:, t] + w[:, k : k + 1] * h for k, a in enumerate((1.0, -0.5, 1.5, 0.5)))
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
    return 3 * h


def attention(w, x):
    """Two tokens of two columns; query 1, keys x w, values the first column."""
    tokens = x.view(-1, 2, 2)
    return 2 * ((tokens @ w[:, None, :, None])[..., 0].softmax(-1) * tokens[..., 0]).sum(-1)


def conv(w, x):
    return 2 * torch.tanh(w[:, :1, None] * x[:, :-1] + w[:, 1:, None] * x[:, 1:]).mean(-1)


def normed(w, x, rows):
    """Normalised by the mean and the variance that these weights have on all training rows."""
    z, own = w @ x[:, :2].T, w @ rows[:, :2].T
    return torch.tanh((z - own.mean(1, keepdim=True)) / (own.var(1, correction=0, keepdim=True) + 0.5).sqrt())


def numbers(x):
    return (x > -0.5).long() + (x > 0.5)


def padded(w, x, padding=0.5):
    """A row of the table for each number, of which 0 pads: its row is not drawn."""
    table = torch.cat([w[:, :1] if padding is None else torch.full_like(w[:, :1], padding), w[:, 1:]], 1)
    return table[:, numbers(x)].sum(-1)


def attend(layer, x):
    tokens = x.view(-1, 2, 2)
    return 2 * layer(torch.ones(len(x), 1, 1), tokens, tokens[..., :1])[0][:, 0]


def embedding():
    table = nn.Embedding(3, 1, padding_idx=0, scale_grad_by_freq=True, sparse=True)
    return Net(table, lambda layer, x: layer(numbers(x)).sum(1), weight=[0.5, 1.0, 1.0])


def exported():
    rows = ({0: torch.export.Dim("rows", min=1)},)
    return torch.export.export(embedding(), (torch.zeros(3, 4),), dynamic_shapes=rows).module()


#: {name: (the module, its Bayesian parameters, how many weights these have, the equation)}
LAYERS = {
    "lstm": (
        lambda: Net(
            nn.LSTM(1, 1, bias=False, batch_first=True),
            lambda layer, x: 3 * layer(x[..., None])[0][:, -1],
            weight_ih_l0=[1.0, -0.5, 1.5, 0.5],
        ), "layer.weight_hh_l0", 4, lstm,
    ),
    "attention": (
        lambda: Net(
            nn.MultiheadAttention(1, 1, bias=False, kdim=2, vdim=1, batch_first=True), attend,
            q_proj_weight=[1.0], v_proj_weight=[1.0], **{"out_proj.weight": [1.0]},
        ), "layer.k_proj_weight", 2, attention,
    ),
    "conv": (
        lambda: Net(nn.Conv1d(1, 1, 2, bias=False), lambda layer, x: 2 * layer(x[:, None]).tanh().mean(-1)),
        "layer.weight", 2, conv,
    ),
    "batch norm": (
        lambda: Net(
            nn.Sequential(nn.Linear(2, 1, bias=False), nn.BatchNorm1d(1, eps=0.5, affine=False), nn.Tanh()),
            lambda layer, x: layer(x[:, :2]),
        ), "layer.0.weight", 2, normed,
    ),
    "embedding": (embedding, "*", 3, padded),
    "exported": (exported, "*", 3, lambda w, x: padded(w, x, None)),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Layer(Problem):
    """Regression by one of them; w ~ Normal(0, 1)."""

    size = property(lambda self: LAYERS[self.title][2])
    settings = property(lambda self: {"prior": "normal:1", "noise": self.noise})
    is_linear: ClassVar[bool] = False

    def output(self, w, x):
        return LAYERS[self.title][3](w, x, *[self.inputs] * (self.title == "batch norm"))


def layer(name):
    g = torch.Generator().manual_seed(3)
    x, noise = torch.randn(24, 4, generator=g).double(), 0.5
    size = LAYERS[name][2]
    one = Layer(name, x[:15], x[:15, 0], x[15:18], 1.0, noise)
    w = torch.linspace(1.0, -1.0, size).double()[None]
    y = one.output(w, one.inputs)[0] + noise * torch.randn(15, generator=g).double()
    return replace(one, targets=y.float().double())


def made(name):
    """(the problem, the variant's model of it, its guide)"""
    one, (make, where, *_) = layer(name), LAYERS[name]
    entry = bp.Bayesian(make(), where=where, frozen="*", **one.settings)
    model = entry.model(one.data.schema)
    guide = entry.guide(model)
    entry.prepare(model, guide, one.data)
    return one, model, guide


@pytest.mark.parametrize("name", LAYERS)
def test_the_density_that_samplers_follow_and_its_gradient_are_the_equations(name):
    one, model, _ = made(name)
    potential = Potential(model, one.data.x_train, one.data.y_train)
    w = torch.linspace(-2, 2, 5 * one.size).double().view(5, -1).requires_grad_()
    (found, slope), expected = potential(w.detach()), one.log_joint(w)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(slope, torch.autograd.grad(expected.sum(), w)[0], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", LAYERS)
def test_the_elbo_of_a_layer_has_its_value_and_its_maximum_at_the_best_normal(name):
    """The mean over draws of the ELBO is the integral's, that of its gradient 0, and not 0 beside the maximum."""
    with bp.isolated(1):
        one, model, guide = made(name)
        mean, covariance = one.best_normal(one.mode(), False)
        objective, z = Objective(model.train(), guide, 1), []
        for shift in (0.0, 0.7):
            guide.loc.data = (mean + shift * covariance.diagonal().sqrt()).float()
            guide.rho.data = inverse_softplus(covariance.diagonal().sqrt()).float()
            draws = []
            for _ in range(300):
                elbo, _ = objective(one.data.x_train, one.data.y_train, 1.0, 1.0)
                draws.append(torch.cat([elbo[None], *torch.autograd.grad(elbo, [guide.loc, guide.rho])]).detach())
            draws = torch.stack(draws).double()
            draws[:, 0] -= one.elbo(guide.loc.detach().double(), covariance)
            z.append((draws.mean(0) / (draws.std(0).clamp_min(0.01) / 300**0.5)).abs())  # 0: of a padding row
    assert z[0].max() < 4.5 and z[1][0] < 4.5 < z[1][1:].max()


def test_archives_of_before_predict_by_the_draws_of_a_padding_row(tmp_path):
    data = layer("embedding").data
    posterior = fit(bp.Bayesian(embedding(), noise=0.5), data=data, out=tmp_path)
    module = {k: v for k, v in posterior.provenance["module"].items() if k != "constants"}
    for padding in (0.5, None):
        again = bp.load(tmp_path, module=embedding())
        found = bp.predict(again, data.x_train, num_draws=5, seed=1).components.loc
        w = posterior.draw(5, seed=1)["layer.weight"][..., 0]
        torch.testing.assert_close(found, padded(w, data.x_train, padding))
        reseal(tmp_path, provenance={**posterior.provenance, "module": module})


class TimeFirst(nn.Linear):
    def forward(self, x):
        return super().forward(x.transpose(0, 1)).mean(0)


class Again(nn.Linear):
    def forward(self, x):
        f = super().forward(x[:, 0])
        return f + 0 * super().forward(x[:, 1]) if self.when(x) else f


class More(nn.Linear):
    def forward(self, x):
        return super().forward(torch.cat([x[:, 0]] * (1 + bool(self.when(x)))))[: len(x)]


@pytest.mark.parametrize("kind", [Again, More])
def test_a_site_that_rows_share_is_drawn_or_refused(monkeypatch, kind):
    """Where its use depends on values or training, of which the pass of zeros knows nothing; of steps before rows."""
    data = rows(classes=0)
    for steps in ROWS:
        assert sampling_of(TimeFirst(6, 1), *(torch.zeros(num, steps, 6) for num in ROWS)) == {}
    often, once = [lambda net, x: (x > 1).any(), lambda net, x: net.training], lambda net, x: (x > 99).any()
    for when in (*often, once):
        monkeypatch.setattr(kind, "when", when, raising=False)
        with bp.isolated(0):
            entry = bp.Bayesian(kind(6, 1))
            model = entry.model(data.schema)
            guide = entry.guide(model)
            drawn = entry.prepare(model, guide, data).get("sampled_as_weights", [])
        assert [*model.sampling, *drawn] == ["weight", "bias"] and len(drawn) == 2 * (when in often)
    words = "'weight' is used again .* take sampling='weights'"
    refuses(words, Objective(model.train(), guide, 1), 100 * data.x_train, data.y_train, 1.0, 1.0)


def test_members_of_an_ensemble_share_what_is_frozen_and_nothing_else_may_move():
    with bp.isolated(1):
        net = nn.Sequential(nn.Flatten(), nn.Linear(24, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
    net[3].register_buffer("unknown", torch.tensor([math.nan]))
    model, trained = (bp.Bayesian(net, where="4", frozen="*", batch_norm="frozen", start=start).model(rows().schema)
                      for start in ("initial", "pretrained"))  # fmt: skip
    again = restarted(model)
    assert all(value.allclose(again.get_buffer(n), 0, 0, equal_nan=True) for n, value in model.named_buffers())
    assert not torch.equal(again.net[4].weight, net[4].weight)
    assert torch.equal(restarted(trained).net[4].weight, net[4].weight)
    with pytest.warns(UserWarning, match="all members are equal, .*take batch_size below 38"):
        fit(bp.Bayesian(net, start="pretrained"), bp.Ensemble(members=2, epochs=3, cores=1))
    assert not torch.equal(restarted(one := nn.MultiheadAttention(4, 2)).in_proj_weight, one.in_proj_weight)
    improper = {"4.weight": "log-uniform", "*": "normal:1"}
    for how in ({"where": "4"}, {"batch_norm": "frozen", "prior": improper}):  # neither has draws of the prior
        members, alone = (fit(bp.Bayesian(net, **how), method(epochs=3)) for method in (bp.Ensemble, bp.MAP))
        first, one = (bp.predict(p, rows().x_test).components.logits[0] for p in (members, alone))
        assert torch.equal(first, one)
    refuses(r"points that are trained, such as '1.weight', .*='\*'", bp.prior, bp.Bayesian(net, where="4"), rows())
    net[2] = spectral_norm(nn.Linear(5, 5))
    refuses("training changes 'net.2.*_u', of which each member", fit, net, bp.Ensemble(members=2, epochs=3))


def test_an_archive_says_what_is_frozen_and_which_constants_are_others(tmp_path):
    def made(frozen):
        net = nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))
        net[frozen].requires_grad_(False)
        net[1].table, net[1].seen, net[1].like = torch.randn(3), [], torch.zeros(2, device="meta")
        net[1].register_buffer("mask", torch.ones(3), persistent=False)
        net[1].register_forward_hook(lambda layer, _, f: setattr(layer, "last", f))
        return net

    net = made(frozen=0)
    posterior = fit(net, out=tmp_path)
    assert posterior.provenance["module"]["constants"].keys() == {"1.table", "1.mask"}
    bp.load(tmp_path, module=net)
    with pytest.warns(UserWarning, match=r"'1\.table' of the module, which no archive holds, is not that"):
        again = bp.load(tmp_path, module=made(frozen=3))
    assert torch.equal(again.model.net[0].weight, net[0].weight)


class Scaled(nn.Module):
    """f = k · l(x), k a plain number; or each position of x by one layer, under vmap."""

    def __init__(self, k, positions=0):
        super().__init__()
        self.k, self.positions, self.l = k, positions, nn.Linear(24 // (positions or 1), OUT)

    def forward(self, x):
        if not self.positions:
            return self.k * self.l(x.flatten(1))
        by_position = torch.vmap(self.l, in_dims=1, out_dims=1, randomness="different")
        return by_position(x.reshape(len(x), self.positions, 1, -1)).flatten(1, 2).mean(1)


def test_plain_numbers_of_a_module_are_compared_too(tmp_path):
    fit(Scaled(2.0), out=tmp_path)
    bp.load(tmp_path, module=Scaled(2.0))
    with pytest.warns(UserWarning, match="'k' of the module, which no archive holds"):
        bp.load(tmp_path, module=Scaled(5.0))


def test_layers_under_vmap_are_not_sampled_by_row():
    """Positions share their weights, which noise of each would hide."""
    assert sampling_of(Scaled(1.0, positions=4), *(torch.zeros(num, 24) for num in ROWS)) == {}


def test_names_that_an_earlier_version_did_not_freeze_are_as_they_were_fitted(tmp_path):
    net = nn.Sequential(nn.Flatten(), nn.Linear(24, OUT))
    posterior = fit(net, out=tmp_path)
    settings = posterior.provenance["entry_settings"] | {"frozen": "1.*"}
    reseal(tmp_path, provenance={**posterior.provenance, "entry_settings": settings})
    again = bp.load(tmp_path, module=net)
    assert torch.equal(*(bp.predict(p, rows().x_test).mean for p in (posterior, again)))


def test_outputs_that_are_not_numbers_are_told_with_their_row():
    data, far = rows(), rows().x_train.index_fill(0, torch.tensor([5]), 1e5)
    for method in (bp.SVI(epochs=3), bp.MAP(epochs=3)):
        for how, words in (
            ("gradient", "weights stopped being finite at step 1"),
            ("far away", "held-out.* row 5"),
        ):
            held_out = replace(data, x_val=far, y_val=data.y_train)
            refuses(words, fit, Wrong(f"nan {how}"), method, held_out)
    assert bp.predict(fit(Wrong("half")), far).components.logits.dtype == torch.float32
    refuses(r"output at row 5 \(from 0\) is nan", bp.predict, fit(Wrong("nan far away")), far)
