"""Networks of a user's own whose gradients are compiled: attention, correlated noise, what vmap cannot map."""

import numpy as np
import pytest
import torch
from torch import nn

import bnn_pyro as bp
from bnn_pyro.inference.potential import Potential


class Attention(nn.Module):
    """Of three tokens of two numbers to each other."""

    def __init__(self):
        super().__init__()
        self.layer = nn.MultiheadAttention(2, 1, batch_first=True)
        self.last = nn.Linear(6, 1)

    def forward(self, x):
        x = x.unflatten(1, (3, 2))
        return self.last(self.layer(x, x, x, need_weights=False)[0].flatten(1))


class Sign(torch.autograd.Function):
    """sign(x), with the gradient of x."""

    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class StraightThrough(nn.Sequential):
    def forward(self, x):
        return self[1](Sign.apply(self[0](x)))


NETS = {
    "attention": (Attention, {}),
    "correlated noise": (lambda: nn.Linear(6, 2), {"noise": "correlated"}),
    "straight through": (lambda: StraightThrough(nn.Linear(6, 4), nn.Linear(4, 1)), {}),
}


@pytest.mark.filterwarnings("ignore:StraightThrough runs one draw after the other")
@pytest.mark.parametrize("name", NETS)
def test_compiled(name):
    rng, (net, settings) = np.random.default_rng(0), NETS[name]
    x, noise = rng.normal(size=(40, 6)), rng.normal(size=(40, 2))
    data = bp.dataset(x, (x[:, :2] + noise)[:, : 1 + bool(settings)].squeeze(), seed=0)
    with bp.isolated(0):
        target = Potential(bp.Bayesian(net(), **settings).model(data.schema), data.x_train, data.y_train)
        z = target.prior_draws(4)
    expected = target(z)
    assert target.compile(4)
    for found, value in zip(target(z), expected, strict=True):
        assert (found - value).abs().max() < 1e-5 * value.abs().max()
