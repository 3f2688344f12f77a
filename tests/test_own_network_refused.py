"""Networks of one's own that are odd: what can be fitted is, and the rest is refused with the way out."""

import pytest
from own_networks import OUT
from refused import refuses
from test_own_network import fit, rows
from torch import nn

import bnn_pyro as bp

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize("method", [bp.SVI(epochs=2, accumulate=40), bp.MAP(epochs=2, batch_size=1)])
def test_a_single_row_is_no_batch_to_normalise_by(method):
    net = nn.Sequential(nn.Flatten(), nn.Linear(24, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, OUT))
    refuses("a single row, .* larger batch_size, a smaller accumulate, or batch_norm='frozen'", fit, net, method)
    fit(bp.Bayesian(net, batch_norm="frozen"), method, data=rows(10))
