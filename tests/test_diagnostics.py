"""Function-space convergence: near 1 for exact draws, large for chains apart, blind to what the function is not."""

import warnings

import pytest
import torch

import bnn_pyro as bp
from bnn_pyro.checks.linear_regression import correlated
from bnn_pyro.diagnostics import function_space, function_space_rhat, functions

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # 0.23 announces 1.0 once a day
    import arviz

CHAINS, DRAWS = 4, 250
PROBLEM = correlated(num=50)


def exact(problem=PROBLEM, shift=0.0, seed=0):
    """Independent draws of the exact posterior as four chains; the first is ``shift`` posterior scales away."""
    g = torch.Generator().manual_seed(seed)
    root = torch.linalg.cholesky(torch.linalg.inv(problem.precision))
    unit = torch.randn(CHAINS, DRAWS, len(root), generator=g, dtype=torch.float64)
    unit[0] += shift
    w = (problem.mean + unit @ root.T).float()
    chains = {"layers.0.weight": w[..., None, :-1], "layers.0.bias": w[..., -1:]}
    with bp.isolated(0):
        model = problem.entry().model(problem.schema)
    return bp.Posterior(model, problem.schema, chains=chains)


def test_it_is_arviz_s_of_the_same_series():
    posterior = exact(shift=0.3)
    x = PROBLEM.data.x_train[:3]
    w = torch.cat([posterior.chains["layers.0.weight"].squeeze(2), posterior.chains["layers.0.bias"]], -1).double()
    f = torch.einsum("bp,cdp->bcd", PROBLEM.design(x), w).numpy()
    found = function_space(posterior, x)
    for row in range(3):
        assert found.rhat[row, 0] == pytest.approx(float(arviz.rhat(f[row], method="rank")), rel=1e-6)
        assert found.ess_bulk[row, 0] == pytest.approx(float(arviz.ess(f[row], method="bulk")), rel=1e-3)


@pytest.mark.parametrize("num_classes", [2, 3])
def test_classes_and_chunks(num_classes, monkeypatch):
    """(B, K), however few inputs are held at once; confidence that rounds to 1 does not tie the ranks."""
    schema = bp.Schema("classification", (2,), classes=tuple("abc"[:num_classes]))
    outputs = 1 if num_classes == 2 else num_classes
    g = torch.Generator().manual_seed(1)
    with bp.isolated(0):
        model = bp.MeanField(hidden=()).model(schema)
    weight, bias = torch.randn(CHAINS, 60, outputs, 2, generator=g), torch.randn(CHAINS, 60, outputs, generator=g)
    bias[..., 0] += 60.0
    posterior = bp.Posterior(model, schema, chains={"layers.0.weight": weight, "layers.0.bias": bias})
    x = torch.randn(5, 2, generator=g)
    whole = function_space(posterior, x)
    assert whole.rhat.shape == (5, num_classes) and torch.isfinite(whole.rhat).all()
    names = functions.output_names(posterior)
    assert names == [f"log-odds of {c}" for c in ("b" if num_classes == 2 else "abc")]
    monkeypatch.setattr(functions, "BLOCK", 1)
    assert torch.equal(function_space_rhat(posterior, x), whole.rhat)


def test_exchanged_units_are_no_disagreement():
    """A network's chains with their hidden units renamed and signs flipped: weights apart, functions together."""
    schema = bp.Schema("regression", (1,))
    g = torch.Generator().manual_seed(2)
    shapes = {"layers.0.weight": (2, 1), "layers.0.bias": (2,), "layers.1.weight": (1, 2), "layers.1.bias": (1,)}
    centre = {site: torch.randn(shape, generator=g) for site, shape in shapes.items()}
    chains = {s: v + 0.1 * torch.randn(2, 100, *v.shape, generator=g) for s, v in centre.items()}
    chains["layers.0.weight"][1] *= -1
    chains["layers.0.bias"][1] *= -1
    chains["layers.1.weight"][1] *= -1  # tanh is odd
    with bp.isolated(0):
        model = bp.MeanField(hidden=(2,), activation="tanh", noise=0.5).model(schema)
    posterior = bp.Posterior(model, schema, chains=chains)
    assert arviz.rhat(chains["layers.0.weight"][:, :, 0, 0].numpy()) > 1.5
    assert function_space_rhat(posterior, torch.linspace(-1, 1, 5)[:, None]).max() < 1.1


def test_refused():
    svi = bp.fit(PROBLEM.entry(), PROBLEM.data, bp.SVI(epochs=1), progress=False, device="cpu")
    with pytest.raises(bp.UserError, match="this posterior is a guide"):
        function_space_rhat(svi, PROBLEM.data.x_train)
    point = bp.fit(PROBLEM.entry(), PROBLEM.data, bp.MAP(epochs=1), progress=False, device="cpu")
    with pytest.raises(bp.UserError, match="holds 1 of 1"):
        function_space_rhat(point, PROBLEM.data.x_train)
