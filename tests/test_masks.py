"""Masks of dropout in networks of one's own: points train with them, weights that are drawn without."""

import numpy as np
import pytest
import torch
from test_own_network import fit, rows
from torch import nn

import bnn_pyro as bp
from bnn_pyro.posterior import moved_buffers

pytestmark = pytest.mark.usefixtures("seeded")


class Attention(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 4, p, batch_first=True)

    def forward(self, h):
        return self.layer(h.view(len(h), 3, 4)).flatten(1)


class Masked(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, h):
        return nn.functional.dropout(h, self.p, self.training)


class Recurrent(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.layer = nn.LSTM(4, 4, 2, batch_first=True, dropout=p)

    def forward(self, h):
        return self.layer(h.view(len(h), 3, 4))[0].flatten(1)


class Counting(nn.Module):
    """Counts its passes in training mode, with masks in a layer of its own."""

    def __init__(self, p):
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))
        self.inner = nn.Sequential(nn.Dropout(p))

    def forward(self, h):
        self.passes = self.passes + self.training
        return self.inner(h)


@pytest.mark.parametrize("layer", [nn.Dropout, Masked, Attention, Recurrent, Counting])
def test_masks_of_dropout_are_for_points_alone(layer):
    def traces(entry, method):
        nets = ([nn.Flatten(), nn.Linear(24, 12), layer(p), nn.Linear(12, 3)] for p in (0.0, 0.4))
        with bp.isolated(0):
            first, second = (nn.Sequential(*net) for net in nets)
            second.load_state_dict(first.state_dict())
        return [fit(entry(net), method, rows()).trace["log_likelihood"] for net in (first, second)]

    drawn, ways = traces(bp.Bayesian, bp.SVI(epochs=3, patience=0)), [(bp.Bayesian, bp.MAP(epochs=3, patience=0))]
    np.testing.assert_allclose(*drawn)
    ways.append((lambda net: bp.Bayesian(net, where="3.*"), bp.SVI(epochs=3, patience=0)))  # the others are points
    for entry, method in ways:
        assert not np.allclose(*traces(entry, method))


class Averages(nn.Module):
    """Divides by running moments of its own, as a layer of batch normalisation that somebody wrote."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(24))

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


@pytest.mark.parametrize("method", [bp.SVI(epochs=60, patience=0), bp.MAP(epochs=60, patience=0)])
def test_averages_that_a_layer_keeps_are_updated_whoever_trains(method):
    data = rows()
    with bp.isolated(0):
        linear = nn.utils.spectral_norm(nn.Linear(24, 24))  # by a hook, with singular vectors for buffers
        net = nn.Sequential(nn.Flatten(), Averages(), linear, nn.Dropout(0.4), nn.Linear(24, 3))
    u = linear.weight_u.clone()
    posterior = fit(net, method, data)
    fitted, table = posterior.model.net, posterior.describe()
    assert len(table) == 4
    far = data.x_train.flatten(1).mean(0)
    torch.testing.assert_close(fitted[1].mean, far, rtol=0, atol=0.3 * far.abs().max().item() + 0.05)
    assert not torch.allclose(fitted[2].weight_u, u) and torch.equal(linear.weight_u, u)


def test_a_pass_that_tells_which_averages_move_leaves_them_as_they_were():
    """One gets another tensor, one is written in place."""
    data = rows()
    with bp.isolated(0):
        net = nn.Sequential(nn.Flatten(), Averages(), nn.utils.spectral_norm(nn.Linear(24, 3)), nn.BatchNorm1d(3))
    net[1].register_buffer("still", torch.zeros(2))
    model = bp.Bayesian(net).model(data.schema)
    before = {name: (value, value.clone()) for name, value in model.named_buffers()}
    moved = moved_buffers(model, data.x_train, data.y_train)
    assert moved and "net.1.still" not in moved and {"net.1.mean", "net.2.weight_u"} <= {*moved}
    for name, value in model.named_buffers():
        assert value is before[name][0] and torch.equal(value, before[name][1])
    assert moved_buffers(model, data.x_train, data.y_train) == moved
