"""Masks of dropout in networks of one's own: points train with them, weights that are drawn without."""

import numpy as np
import pytest
from test_own_network import fit, rows
from torch import nn

import bnn_pyro as bp

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


@pytest.mark.parametrize("layer", [nn.Dropout, Masked, Attention, Recurrent])
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
