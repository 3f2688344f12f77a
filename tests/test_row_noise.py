"""Noise of every row by itself: which sites have it, that the ELBO is the same, and that its gradient scatters less."""

import itertools

import pytest
import torch
from own_networks import NETS, made
from torch import nn

import bnn_pyro as bp
from bnn_pyro.inference.log_joint import Objective
from bnn_pyro.parts.gradients import RowNoise
from bnn_pyro.parts.own_start import sampling_of


class Positions(nn.Module):
    """Inputs (B, 4, 6): a convolution, a layer of tokens, and one of rows; their mean is what matters."""

    def __init__(self):
        super().__init__()
        self.conv, self.token, self.head = nn.Conv1d(4, 3, 2), nn.Linear(5, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.token(self.conv(x).tanh()).tanh().mean(1))


def data(num=16):
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(num, 4, 6, generator=g), torch.randn(num, generator=g)
    return bp.Dataset("by-hand", bp.Schema("regression", (4, 6)), x, y, x[:0], y[:0], x[:0], y[:0])


def objective(sampling, repeats, seed):
    """ELBOs (R,) and their gradients (R, means and scales of q); {site: where its means are}."""
    with bp.isolated(0):
        entry = bp.Bayesian(Positions(), noise=0.7, sampling=sampling, init_scale=0.3)
        model = entry.model(data().schema)
        guide = entry.guide(model)
        of, (x, y) = Objective(model.train(), guide, 1), (data().x_train, data().y_train)
        elbos, gradients = [], []
        torch.manual_seed(seed)
        for _ in range(repeats):
            elbo, _ = of(x, y, 1.0, 1.0)
            gradients.append(torch.cat(torch.autograd.grad(elbo, [guide.loc, guide.rho])))
            elbos.append(elbo.detach())
    ends = torch.tensor([0, *(shape.numel() for shape in guide.shapes.values())]).cumsum(0).tolist()
    places = {site: slice(*pair) for site, pair in zip(guide.shapes, itertools.pairwise(ends), strict=True)}
    return torch.stack(elbos)[:, None], torch.stack(gradients), places


def test_sites_that_reach_one_layer_once_are_sampled_by_row():
    with bp.isolated(0):
        found = sampling_of(Positions(), (4, 6))
    kinds = {"conv": "flipout", "token": "flipout", "head": "rows"}
    assert found == {f"{layer}.{kind}": how for layer, how in kinds.items() for kind in ("weight", "bias")}
    by_net = {name: set(sampling_of(made(name), (4, 6))) for name in NETS}
    assert by_net["embedding, tied"] == set()
    assert by_net["lstm"] == by_net["attention"] == {"head.weight", "head.bias"}
    assert not any(site.startswith("inner") for site in by_net["used twice"])
    schema = bp.Schema("classification", (4, 6), tuple("abc"))
    assert (
        bp.Bayesian(made("norms")).model(schema).sampling and not bp.Bayesian(made("batch norm")).model(schema).sampling
    )


def test_the_elbo_and_its_gradient_are_the_same_on_average_and_scatter_less():
    (*drawn, places), (*by_row, _) = (objective(how, 300, seed=s) for how, s in (("weights", 1), (None, 2)))
    for one, other in zip(drawn, by_row, strict=True):
        error = (one.var(0) / len(one) + other.var(0) / len(other)).sqrt()
        assert ((one.mean(0) - other.mean(0)).abs() < 5 * error).all()
    for site, place in places.items():
        assert by_row[1][:, place].var(0).sum() < 0.8 * drawn[1][:, place].var(0).sum(), site


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_outputs_have_the_moments_of_drawn_weights(kind):
    """Of one row: means and the covariance of all its outputs; groups, stride and padding as the layer has them."""
    with bp.isolated(0):
        layer, x = kind(4, 4, 2, stride=2, padding=1, groups=2), torch.randn(1, 4, 3, 3)
        q = {n: torch.distributions.Independent(torch.distributions.Normal(p.detach(), 0.5 + p.detach().abs()), p.dim())
             for n, p in layer.named_parameters()}  # fmt: skip
        draws = {True: [], False: []}
        for by_row in draws:
            for _ in range(800):
                w = {name: own.rsample() for name, own in q.items()}
                for name, value in w.items():
                    value.drawn_from = q[name]
                with RowNoise(w, dict.fromkeys(w, "flipout") if by_row else {}):
                    draws[by_row].append(torch.func.functional_call(layer, w, (x,)).flatten())
    a, b = (torch.stack(draws[by_row]) for by_row in draws)
    sd = b.std(0)
    assert ((a.mean(0) - b.mean(0)).abs() < 6 * sd * (2 / 800) ** 0.5 + 1e-6).all()
    noise = 8 * sd[:, None] * sd * (2 / 800) ** 0.5 + 1e-6
    assert ((b.T.cov() - b.var(0).diag()).abs() > noise).any()  # noise of every activation by itself would be seen
    assert ((a.T.cov() - b.T.cov()).abs() < noise).all()


def test_a_fit_says_how_each_site_was_sampled():
    entry = bp.Bayesian(Positions, noise=0.7, sampling="rows")
    posterior = bp.fit(entry, data(64), bp.SVI(epochs=20, lr=0.01, batch_size=16), progress=False, device="cpu")
    table = posterior.describe().set_index("site")
    assert table.loc["conv.weight", "sampled"] == "flipout" and table.loc["conv.weight", "shape"] == [3, 4, 2]
    assert table.loc["head.weight", "prior"] == "by-target" and 0 < table.loc["head.weight", "σ/prior"] < 1.2
