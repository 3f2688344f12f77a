"""Coordinates of linear models: there and back, and round at the mode."""

import pytest
import torch

import bnn_pyro as bp
from bnn_pyro.inference import curvature as whitening
from bnn_pyro.inference.potential import Potential, Space


def linear(classes, temperature=0.5, bias=True):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(60, 2, generator=g) + 1
    kind = "classification" if classes else "regression"
    schema = bp.Schema(
        kind, (2,), classes=tuple("abc"[:classes]), y_shift=2.0 * (not classes), y_scale=1 + (not classes)
    )
    y = torch.randint(classes, (60,), generator=g) if classes else 3 + torch.randn(60, generator=g)
    noise = "learned" if temperature == 1 else 0.7
    model = bp.MeanField(hidden=(), prior="normal:2", noise=noise, bias=bias).model(schema)
    return Potential(model, x, y, temperature)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("classes", [0, 2, 3])
@pytest.mark.parametrize("dense", [0, 4096], ids=["kronecker", "hessian"])
def test_coordinates(dense, classes, bias, monkeypatch):
    """There and back is the identity; by the Hessian the log joint is −½ zᵀz around its mode, to second order."""
    monkeypatch.setattr(whitening, "DENSE", dense)
    with bp.isolated(0):
        target = linear(classes, bias=bias)
        space = whitening.coordinates(target)
        mode = target.position({s: v[None] for s, v in whitening._mode(target, Space()).items()})[0]
    assert type(space) is (whitening.Rounded if dense else whitening.Whitened)
    there = space.inverse(mode)
    torch.testing.assert_close(space.forward(there), mode, rtol=1e-5, atol=1e-5)
    many = torch.stack([there, there + 1, there - 1])
    torch.testing.assert_close(space.inverse(space.forward(many)), many, rtol=1e-5, atol=1e-5)
    curve = torch.autograd.functional.hessian(lambda z: -target.log_density(space.forward(z)[None]).sum(), there)
    if dense:
        assert (curve - torch.eye(len(curve))).abs().max() < 0.02
    else:  # an approximation, near enough to be of use: the weights' own has a ratio of scales above 5
        values = torch.linalg.eigvalsh(curve)
        assert values[0] > 0.2 and values[-1] < 5


def test_the_noise_stays_as_it_is():
    with bp.isolated(0):
        target = linear(0, temperature=1)
        space = whitening.coordinates(target)
        z = target.prior_draws(3)
    assert target.size == 4 and torch.equal(space.forward(z)[:, -1], z[:, -1])
    target.space = space
    assert torch.equal(target.weights(z)["log_noise"], z[:, -1].float())
    torch.testing.assert_close(target.position(target.weights(z)), z, rtol=1e-4, atol=1e-4)


def test_a_network_has_no_such_coordinates():
    with bp.isolated(0):
        schema = bp.Schema("classification", (2,), classes=("a", "b"))
        model = bp.MeanField(hidden=(3,)).model(schema)
        target = Potential(model, torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]))
        assert type(whitening.coordinates(target)) is Space
