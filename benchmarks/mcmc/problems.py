"""The three posteriors that are sampled, and the functions by which draws are compared: the network at test points.

Weights of a network are not identified, so that effective draws of a weight mean little: what counts is f(x) at 50
points, the log-odds or the mean in target units, computed from anybody's weights by one function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

import bnn_pyro as bp

__all__ = ["PROBLEMS", "TITLES", "Problem", "functions"]

#: The two features of the network for breast cancer.
FEATURES = ["mean radius", "mean texture"]
#: Draws whose hidden units are held at once.
CHUNK = 2000
TITLES = {
    "breast-cancer": "breast-cancer 2-5-5-1",
    "toy-curve": "toy-curve 1-32-1",
    "logistic": "logistic regression, 30 features",
}


@dataclass(frozen=True)
class Problem:
    """A variant, its data, and the points (M, features), standardised, where draws are compared."""

    name: str
    entry: bp.MeanField
    data: bp.Dataset
    points: Tensor

    def model(self) -> torch.nn.Module:
        """The Pyro model p(y, w | x)."""
        with bp.isolated(0):
            return self.entry.model(self.data.schema)

    def sites(self) -> list[tuple[str, tuple[int, ...], float]]:
        """(name, shape, standard deviation of its Normal prior) of weights and biases, in the order of the layers."""
        model = self.model()
        return [(n, tuple(prior.event_shape), float(prior.scale)) for n, prior in model.prior().items()]


def _halves(features: list[str] | None) -> bp.Dataset:
    """Breast cancer: 284 rows to learn from, 284 to test on."""
    return bp.load_data("breast-cancer", features=features, fractions=(0.5, 0.0, 0.5), seed=0, limit=284)


def _network() -> Problem:
    entry, data = bp.MeanField(hidden=(5, 5), activation="tanh", prior="fan-in:1.5"), _halves(FEATURES)
    return Problem("breast-cancer", entry, data, data.x_test[:50])


def _toy_curve() -> Problem:
    data = bp.load_data("toy-curve")
    entry = bp.MeanField(hidden=(32,), activation="relu", prior="normal:3", noise=1.0)
    return Problem("toy-curve", entry, data, data.schema.standardise(torch.linspace(-4, 4, 50).unsqueeze(1)))


def _logistic() -> Problem:
    entry, data = bp.MeanField(hidden=(), prior="normal:1"), _halves(None)
    return Problem("logistic", entry, data, data.x_test[:50])


PROBLEMS: dict[str, Callable[[], Problem]] = {"breast-cancer": _network, "toy-curve": _toy_curve, "logistic": _logistic}


def functions(problem: Problem, chains: Mapping[str, np.ndarray]) -> np.ndarray:
    """{site: (C, D, *shape)} -> f at the points, (C, D, M): log-odds of class 1, or the mean in target units."""
    net, schema = problem.model().net, problem.data.schema
    shape = next(iter(chains.values())).shape[:2]
    flat = {site: torch.from_numpy(np.array(v, dtype=np.float32)).flatten(0, 1) for site, v in chains.items()}
    parts = []
    with torch.no_grad():
        for start in range(0, shape[0] * shape[1], CHUNK):
            w = {site: value[start : start + CHUNK] for site, value in flat.items()}
            parts.append(functional_call(net, w, (problem.points,)).squeeze(-1).double())
    f = torch.cat(parts).reshape(*shape, -1)
    if schema.task == "regression":
        f = schema.y_shift + schema.y_scale * f
    return f.numpy()
