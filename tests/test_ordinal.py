"""Classes in an order: the cumulative logit against a model written by hand and SciPy; sums; orders that are given."""

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from refused import refuses
from scipy import stats
from test_parts import read

import bnn_pyro as bp
from bnn_pyro.inference.log_joint import LogJoint
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.likelihoods import make_likelihood
from bnn_pyro.parts.observed import OrdinalMixture

SIZES = ("low", "middle", "high", "top")
SCHEMA = bp.Schema("ordinal", (1,), classes=SIZES)


def ratings(num=240, seed=0):
    """Four classes by a logistic variable around 2 x, cut at −1.5, 0 and 2."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, num)
    return x[:, None], np.searchsorted([-1.5, 0.0, 2.0], 2 * x + rng.logistic(size=num))


def test_far_from_every_cut_no_digits_are_lost():
    """log P(y = k) to 1e-5 where probabilities are 1e-30 and where two cuts are 1e-6 apart."""
    own = torch.tensor([0.0, np.log(1e-6), 1.0])
    found = read(make_likelihood(SCHEMA), torch.tensor([[70.0], [-70.0]]), cuts=own).logits.double().numpy()
    gap = stats.logistic.logpdf(70.0) + np.log(1e-6)  # density times width
    np.testing.assert_allclose(found[0, :2], [-70.0, gap], rtol=1e-5)
    np.testing.assert_allclose(found[1, [1, 3]], [gap, -70.0 - np.e], rtol=1e-5)


def test_the_log_joint_is_that_of_a_model_written_by_hand():
    data = bp.dataset(*ratings(60), task="ordinal", seed=0)
    x, y = data.x_train, data.y_train
    with isolated(0):
        log_joint = LogJoint(bp.MLP(hidden=(), prior="normal:2").model(data.schema), x, y)
    u = log_joint.initial + 0.3 * torch.randn(3, log_joint.size, generator=torch.Generator().manual_seed(0)).double()

    def written(w):
        for site in ("layers.0.weight", "layers.0.bias"):
            pyro.sample(site, dist.Normal(0.0, 2.0).expand(w[site].shape).to_event(w[site].dim()), obs=w[site])
        cuts, even = w["cuts"], torch.tensor([0.25, 0.5, 0.75]).logit()
        loc = torch.cat([even[:1], (even[1:] - even[:-1]).log()])
        pyro.sample("cuts", dist.Normal(loc, torch.tensor([1.5, 1.0, 1.0])).to_event(1), obs=cuts)
        points = torch.stack([cuts[0], cuts[0] + cuts[1].exp(), cuts[0] + cuts[1].exp() + cuts[2].exp()])
        f = (x @ w["layers.0.weight"].T + w["layers.0.bias"])[:, 0]
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.OrderedLogistic(f, points), obs=y)

    values = [{k: v[s] for k, v in log_joint.sites(u).items()} for s in range(3)]
    expected = torch.stack([poutine.trace(written).get_trace(w).log_prob_sum() for w in values]).double()
    torch.testing.assert_close(log_joint.log_density(u), expected, rtol=1e-5, atol=1e-3)


def test_the_ranked_probability_score_is_the_crps_of_the_classes():
    rng = np.random.default_rng(0)
    logits, y = rng.normal(size=(5, 30, 4)), rng.integers(0, 4, 30)
    prediction = OrdinalMixture(dist.Categorical(logits=torch.from_numpy(logits)))
    p = (np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)).mean(0)
    k = np.arange(4)
    distance = (p * np.abs(k - y[:, None])).sum(1)  # E|Y − y| − ½ E|Y − Y'|
    pairs = np.einsum("bi,bj,ij->b", p, p, np.abs(k[:, None] - k))
    assert bp.metrics.rps(prediction, y) == pytest.approx((distance - pairs / 2).mean(), rel=1e-6)
    assert len(prediction[:3].set(0.9).members) == 3  # as of other classes


def test_the_order_is_that_of_numbers_of_categories_or_of_what_is_given():
    x, y = ratings()
    frame = pd.DataFrame({"x": x[:, 0], "size": np.array(SIZES)[y], "stars": y + 9})
    ordered = frame.assign(size=pd.Categorical(frame["size"], [*SIZES, "unused"], ordered=True))
    assert bp.dataset(frame, "stars", task="ordinal").schema.classes == ("9", "10", "11", "12")
    for data in (
        bp.dataset(ordered.drop(columns="stars"), "size", task="ordinal"),
        bp.dataset(frame.drop(columns="stars"), "size", task="ordinal", classes=SIZES),
        bp.dataset(x, frame["size"], task="ordinal", classes=SIZES),
        bp.dataset(x, y, task="ordinal", classes=SIZES),
    ):
        assert data.schema.task == "ordinal" and data.schema.classes == SIZES and data.schema.has_classes
        np.testing.assert_array_equal(data.y_test, y[data.index_test])
    assert bp.dataset(ordered, "size").schema.classes == tuple(sorted(SIZES))  # as before, where no order is asked for


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "target 'y': the order of the classes high, low, middle, top is not known; give classes= .--classes."),
        ({"classes": SIZES[:3]}, "unknown class 'top'"),
        ({"classes": (*SIZES, "huge")}, "no row of class 'huge'"),
        ({"classes": (*SIZES, "low")}, "names it twice"),
        ({"classes": SIZES, "task": "counts"}, "classes= .--classes. names classes, and the task is counts"),
    ],
)
def test_orders_that_are_refused(options, message):
    x, y = ratings()
    refuses(message, bp.dataset, x, np.array(SIZES)[y], **{"task": "ordinal", **options})
