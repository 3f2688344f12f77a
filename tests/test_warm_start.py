"""A fit that starts at an earlier posterior: where it starts, where it ends, and who may not."""

import numpy as np
import pytest
import torch

import bnn_pyro as bp

RNG = np.random.default_rng(0)
X = RNG.normal(size=(200, 2))
Y = X @ [1.0, -0.5] + 0.3 * RNG.normal(size=200)
FEW, MORE = (bp.dataset(X[:num], Y[:num], split=0.0, validation=0) for num in (60, 200))
NET = bp.MeanField(hidden=(4,))
#: Steps that hardly move: what is left is the start.
STILL = dict(epochs=1, lr=1e-9, batch_size=0)


def fit(method, data=FEW, entry=NET, **options):
    return bp.fit(entry, data, method, progress=False, device="cpu", **options)


def weights(posterior):
    return dict(posterior.chains or posterior.guide.state_dict())


STOPPED = {"patience": 0}
METHODS = {
    "svi": (NET, bp.SVI(epochs=40), bp.SVI(**STILL)),
    "map": (NET, bp.MAP(epochs=40, **STOPPED), bp.MAP(**STILL, **STOPPED)),
    "ensemble": (
        bp.MLP(hidden=(4,)),
        bp.Ensemble(epochs=40, members=2, cores=1, **STOPPED),
        bp.Ensemble(members=3, cores=1, **STILL, **STOPPED),
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_it_starts_where_the_earlier_one_ended(name):
    entry, method, still = METHODS[name]
    first = fit(method, entry=entry)
    again, cold = fit(still, MORE, entry, start=first), fit(still, MORE, entry)
    for site, value in weights(first).items():
        torch.testing.assert_close(weights(again)[site][: len(value)], value, atol=1e-5, rtol=1e-5)
    assert any((weights(cold)[s][: len(v)] - v).abs().max() > 0.05 for s, v in weights(first).items())
    assert again.provenance["start"]["fingerprint"] == FEW.fingerprint and "start" not in cold.provenance
    assert torch.isin(first.rows, again.rows).all() and len(again.rows) >= 200


def test_the_optimum_is_that_of_the_new_rows(tmp_path):
    """Of a linear network with a convex log joint, from wherever it starts; and a start is part of what is resumed."""
    linear, method = bp.MeanField(hidden=(), noise=0.3, prior="normal:1"), bp.MAP(epochs=1500, lr=0.05, patience=0)
    first = fit(method, entry=linear)
    cold, warm = fit(method, MORE, linear), fit(method, MORE, linear, start=first, out=tmp_path)
    for site, value in cold.chains.items():
        torch.testing.assert_close(warm.chains[site], value, atol=1e-3, rtol=1e-3)
    same = fit(method, MORE, linear, start=first, out=tmp_path, resume=True)
    assert torch.equal(same.chains["layers.0.weight"], warm.chains["layers.0.weight"])
    with pytest.raises(bp.UserError, match="holds a finished posterior of other settings"):
        fit(method, MORE, linear, out=tmp_path, resume=True)


def test_points_start_at_the_mean_of_a_q():
    q = fit(bp.SVI(epochs=40))
    point = fit(bp.MAP(**STILL, patience=0), MORE, start=q)
    for site, value in q.at_mean_weights().chains.items():
        torch.testing.assert_close(point.chains[site], value, atol=1e-5, rtol=1e-5)


def test_who_may_not():
    q, point = fit(bp.SVI(epochs=2)), fit(bp.MAP(epochs=2, patience=0))
    other = bp.dataset(X[:60], (Y[:60] > 0).astype(int), split=0.0, validation=0)
    for message, call in (
        ("nuts does not start from a posterior; svi, map", lambda: fit("nuts", start=q)),
        ("svi starts at a q, and this posterior by map has none", lambda: fit("svi", start=point)),
        ("same variant, inputs, task and classes; this is of mean-field", lambda: fit("svi", other, start=q)),
        ("this is of mean-field", lambda: fit("map", entry=bp.MLP(hidden=(4,)), start=point)),
        ("not a str", lambda: fit("map", start="runs/first")),
        ("other parameters", lambda: fit("svi", entry=bp.MeanField(hidden=(5,)), start=q)),
        ("other shapes", lambda: fit("map", entry=bp.MeanField(hidden=(5,)), start=point)),
    ):
        with pytest.raises(bp.UserError, match=message):
            call()
