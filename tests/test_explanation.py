"""What predictions rest on: formulas for linear networks, rows changed by hand, and scikit-learn's numbers."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from conjugate import correlated
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.inspection import partial_dependence

import bnn_pyro as bp
from bnn_pyro import plots
from bnn_pyro.diagnostics.draws import as_chain
from bnn_pyro.errors import UserError

NOISE, DRAWS = 0.7, 40


@pytest.fixture(scope="module")
def linear():
    """40 draws of a linear network of 3 inputs, of which the last has no weight in any of them."""
    problem = correlated(num=60, inputs=3, noise=NOISE)
    fitted = bp.fit(problem.entry(), problem.data, bp.SVI(epochs=2), progress=False)
    weight = 1 + 0.2 * torch.randn(DRAWS, 1, 3, generator=torch.Generator().manual_seed(1))
    weight[..., 2] = 0.0
    draws = {"layers.0.weight": weight, "layers.0.bias": torch.zeros(DRAWS, 1)}
    return SimpleNamespace(posterior=as_chain(fitted, draws), data=problem.data, weight=weight[:, 0].double())


def test_importance_of_a_linear_network_is_its_formula(linear):
    """E over permutations of (r + w (x − x'))² − r² is 2 w cov(r, x) + 2 w² var(x), of each draw."""
    found = bp.explain(linear.posterior, linear.data, num_draws=DRAWS)
    x, y = linear.data.x_train.double(), linear.data.y_train.double()
    residual = y[:, None] - x @ linear.weight.mT  # (N, S)
    covariance = torch.einsum("ns,nj->sj", residual - residual.mean(0), x - x.mean(0)) / len(x)
    exact = 2 * linear.weight * (covariance + linear.weight * x.var(0, correction=0)) / y.var(correction=0)  # (S, 3)
    table = found.importance.loc[["feature 0", "feature 1", "feature 2"]]
    assert found.rows == "60 training rows" and not table.loc["feature 2"].abs().max() > 1e-6
    tables = [
        bp.explain(linear.posterior, linear.data, num=1, num_draws=DRAWS, seed=seed).importance for seed in (1, 2, 3)
    ]
    tables = np.array([one.loc[table.index] for one in (found.importance, *tables)])  # (4, 3 columns, 3 numbers)
    mean, error = tables.mean(0), tables.std(0, ddof=1) / 2
    right = exact.quantile(torch.tensor([0.5, 0.05, 0.95]).double(), 0).mT.numpy()
    assert list(table.columns) == ["importance", "low", "high"]
    assert (np.abs(mean - right) < 4 * error.mean() + 1e-6).all(), (mean, right, error)


def test_dependence_of_a_linear_network_is_its_weights(linear):
    found = bp.explain(linear.posterior, linear.data, num_draws=DRAWS, num=2)
    assert list(found.dependence) == list(found.importance.index[:2]) and found.outputs == ["mean of y"]
    for name, (values, outputs) in found.dependence.items():
        slopes = (outputs[:, -1, 0] - outputs[:, 0, 0]) / (values[-1] - values[0])
        assert np.allclose(slopes, linear.weight[:, int(name[-1])], atol=1e-4) and outputs.shape == (DRAWS, 20, 1)


def test_on_a_log_scale_it_is_the_logarithm_that_is_explained():
    """One draw whose mean of y is beyond any number of the data would else be all that is seen."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(60, 2, generator=g).numpy()
    y = np.exp(x[:, 0] + 0.3 * torch.randn(60, generator=g).numpy())
    found = []
    for target, scale in ((y, "log"), (np.log(y), "identity")):
        data = bp.dataset(x, target, target_scale=scale)
        fitted = bp.fit(bp.MeanField(hidden=(), noise="heteroscedastic"), data, bp.SVI(epochs=2), progress=False)
        draws = {site: value.clone() for site, value in fitted.draw(DRAWS, seed=0).items()}
        draws["layers.0.bias"][0, 1] += 6.0  # a noise of e⁶ times the others
        found.append(bp.explain(as_chain(fitted, draws), data, num_draws=DRAWS))
    np.testing.assert_allclose(*(one.importance.to_numpy() for one in found), rtol=1e-3, atol=1e-5)
    effects = [next(iter(one.dependence.values())).outputs for one in found]
    np.testing.assert_allclose(effects[0], np.exp(effects[1]), rtol=1e-3)
    assert found[0].outputs == ["median of y"] and "variances of log y" in found[0].loss


def test_dependence_of_one_draw_is_scikit_learns(linear):
    data = linear.data
    mlp = bp.fit(bp.MLP(hidden=(4,)), data, "map", progress=False)

    class Network(RegressorMixin, BaseEstimator):
        def fit(self, x, y):
            return self

        def __sklearn_is_fitted__(self):
            return True

        def predict(self, x):
            return bp.predict(mlp, data.schema.standardise(torch.from_numpy(x))).mean.numpy()

    found = bp.explain(mlp, data, num=1)
    ((name, (values, outputs)),) = found.dependence.items()
    raw = data.schema.unstandardise(data.x_train.double()).numpy()
    where = {int(name[-1]): np.array(values)}
    own = partial_dependence(Network(), raw, [int(name[-1])], custom_values=where, kind="average", method="brute")
    assert np.allclose(own["average"][0], outputs[0, :, 0], atol=1e-4)


def test_categories_and_gaps_are_set_as_in_the_users_own_rows():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"area": rng.normal(60, 20, 90), "town": rng.choice(["north", "south", "west"], 90)})
    frame["class"] = np.where((frame["town"] == "north") == (rng.random(90) < 0.9), "dear", "cheap")
    frame.loc[:5, "area"] = np.nan
    data = bp.dataset(frame, "class", missing="indicator")
    posterior = bp.fit(bp.MeanField(hidden=(3,)), data, bp.SVI(epochs=300), progress=False)
    found = bp.explain(posterior, data, num_draws=10)
    assert found.importance.index[0] == "town" and found.outputs == ["P(class = dear)"]
    values, outputs = found.dependence["town"]
    rows = frame.loc[data.index_train.numpy() if len(data.x_test) < 20 else data.index_test.numpy()]
    for k, town in enumerate(values):
        own = bp.predict(posterior, rows.assign(town=town).drop(columns="class"), num_draws=10)
        assert outputs[:, k, 0] == pytest.approx(own.probs[..., 1].mean(1).numpy(), abs=1e-5)
    assert len(found.dependence["area"].values) == 20 and np.isfinite(found.dependence["area"].outputs).all()
    axes = plots.partial_dependence(found)
    assert [ax.get_xlabel() for ax in axes] == ["town", "area"] and axes[0].figure.get_supylabel() == found.outputs[0]
    assert [t.get_text() for t in plots.permutation_importance(found).get_yticklabels()] == ["town", "area"]


def test_what_cannot_be_explained(linear):
    wide = correlated(num=30, inputs=201)
    with pytest.raises(UserError, match="at most 200 columns, and 'by-hand' has 201"):
        bp.explain(SimpleNamespace(schema=wide.data.schema), wide.data)
    with pytest.raises(UserError, match="has inputs of shape \\(2,\\), and the posterior takes \\(3,\\)"):
        bp.explain(linear.posterior, correlated(num=30, inputs=2).data)
