"""Two simulators of the joint distribution p(w, y | x) of a variant made small, and how far they are apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from scipy.stats import norm

from bnn_pyro.checks.check import ALPHA, Subject, reduced
from bnn_pyro.checks.quantities import NormalScores, Quantities, targets_of
from bnn_pyro.checks.transitions import Start, transitions_of
from bnn_pyro.checks.z_tests import Estimate, judge
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.errors import UserError
from bnn_pyro.features import on_features
from bnn_pyro.inference import Method
from bnn_pyro.inference.method import Report
from bnn_pyro.inference.potential import Potential
from bnn_pyro.posterior import weight_space

__all__ = ["Shift", "Simulators"]

#: Draws of the joint distribution, for every chain.
REFERENCE = 20
#: Quantiles of the normal scores that are kept for a figure.
QUANTILES = norm.ppf((np.arange(199) + 1) / 200)


class Size(Protocol):
    """See ``JointDistribution``."""

    chains: int
    sweeps: int
    rows: int
    inputs: int
    hidden: int


class Shift(NamedTuple):
    """How far chains are off the joint distribution: shifts of means and variances of normal scores, (M, 2)."""

    shift: np.ndarray
    error: np.ndarray
    drift: np.ndarray  # (sweeps, M, 2)
    drift_error: np.ndarray
    quantiles: np.ndarray  # (199, M)
    renewed: float  # by one transition: 1 less the correlation of slopes before and after, given the same targets

    @property
    def bound(self) -> float:
        """What all of |z| stay below with probability 1 − ALPHA."""
        return float(norm.isf(ALPHA / (2 * self.shift.size)))


class Simulators:
    """Two simulators of the joint distribution of a variant made small, and how far they are apart."""

    def __init__(self, check: Size, subject: Subject, seed: int, report: Report | None) -> None:
        self.check, self.seed, self.report = check, seed, report
        x = _inputs(subject.data.x_train, check.rows, check.inputs)
        schema = replace(subject.data.schema, input_shape=(x.shape[1],), features=(), columns=())
        classes = len(schema.classes)
        y = torch.zeros(len(x), dtype=torch.int64) if classes else torch.full((len(x),), float(schema.y_shift))
        entry = reduced(subject.entry)
        if hasattr(entry, "hidden"):
            entry = replace(entry, hidden=tuple(min(width, check.hidden) for width in entry.hidden))
        if subject.converges_to != "exact" and not classes and isinstance(entry.noise, str):
            # Where the noise is unknown, some draws of the prior have so little that no step is small enough.
            entry = replace(entry, noise=0.5 * schema.y_scale)
        self.entry = entry
        none = dict(x_val=x[:0], y_val=y[:0], x_test=x[:0], y_test=y[:0])
        model, self.data = on_features(entry.model(schema), Dataset(subject.data.name, schema, x, y, **none))
        self.model = weight_space(model)
        self.potential = Potential(self.model, self.data.x_train, self.data.y_train)
        sample = self.draws(check.chains * REFERENCE)
        self.quantities = Quantities(self.potential, *sample)
        values = self.quantities(*sample)
        self.scores = NormalScores(values)
        self.expected = _moments(self.scores(values))  # (S, M, 2)
        # The targets that a warm-up is given: none out of the ordinary.
        likelihood = values[:, self.quantities.names.index("log-likelihood")]
        middle = int(np.argsort(likelihood)[len(likelihood) // 2])
        self.first = {site: value[middle] for site, value in sample[0].items()}
        self.data = replace(self.data, y_train=sample[1][middle].to(self.data.y_train))

    def draws(self, num: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Of the joint distribution: w {site: (num, *shape)} and y (num, N)."""
        w = self.potential.weights(self.potential.prior_draws(num))
        return w, targets_of(self.model, self.data.x_train, w).components.sample()

    def compare(self, method: Method, **settings: Any) -> Shift:
        """Chains of this method, against the joint distribution."""
        check, slopes = self.check, self.quantities.slopes
        w, y = self.draws(check.chains)
        start = Start(self.model, self.data, self.first, w, check.sweeps, self.seed)
        chains = transitions_of(type(method))(method, start, **settings)
        moments, last, renewed = [], [], []
        total = 0.0
        for k in range(check.sweeps):
            before = self.scores(self.quantities(w, y))[:, slopes]
            w = chains.move(y)
            values = self.quantities(w, y)
            if not np.isfinite(values).all():
                raise UserError(f"after {k + 1} transitions, densities or their slopes are no longer finite")
            scores = self.scores(values)
            renewed.append(1 - _correlation(before, scores[:, slopes]).clip(0, 1))
            now = _moments(scores)
            total = total + now
            moments.append((now.mean(0) - self.expected.mean(0), self._error(now)))
            if 2 * k >= check.sweeps - 1:
                last.append(scores)
            y = targets_of(self.model, self.data.x_train, w).components.sample()
            if self.report is not None:
                self.report(k + 1, check.sweeps, {})
        mean = total / check.sweeps
        return Shift(
            mean.mean(0) - self.expected.mean(0),
            self._error(mean),
            *(np.stack(parts) for parts in zip(*moments, strict=True)),
            np.quantile(np.concatenate(last), norm.cdf(QUANTILES), axis=0),
            float(np.median(np.mean(renewed, 0))),
        )

    def _error(self, values: np.ndarray) -> np.ndarray:
        """Standard error of the difference of the means of two independent samples (…, M, 2)."""
        return np.sqrt(values.var(0) / len(values) + self.expected.var(0) / len(self.expected))

    def evidence(self, shift: Shift) -> dict[str, Any]:
        """See ``JointDistribution``."""
        arrays = shift._asdict() | {"quantities": self.quantities.names, "z": shift.shift / shift.error}
        return arrays | {"levels": QUANTILES, "scores": arrays.pop("quantiles"), "bound": shift.bound}

    def blind(self, shift: Shift) -> float:
        """The least error of posterior variances that would be seen, as a share of them.

        A slope is on the scale of the posterior, and its variance would be off by that after many transitions; after
        k of them, as far as these have come. A kernel that never moves leaves every distribution as it is.
        """
        come = 1 - (1 - shift.renewed) ** np.arange(1, self.check.sweeps + 1)
        error = float(np.median(shift.error[self.quantities.slopes, 1]))
        return shift.bound * error / max(float(come.mean()), 1e-9)

    def findings(self, shift: np.ndarray, error: np.ndarray, level: str, tolerance: Any = 0.0, where: str = "") -> list:
        """One for the mean and one for the variance of every quantity, in units of its own spread."""
        sides = [f"{side} of {name}{where}" for name in self.quantities.names for side in ("mean", "variance")]
        estimate = Estimate(shift.ravel(), error.ravel())
        return judge(sides, estimate, np.zeros(shift.size), tolerance=np.ravel(tolerance), level=level)


def _moments(scores: np.ndarray) -> np.ndarray:
    """(S, M) -> (S, M, 2)."""
    return np.stack([scores, scores**2], 2)


def _correlation(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of the columns of two samples (S, M), which have the means 0; (M,)."""
    return (a * b).mean(0) / np.sqrt((a**2).mean(0) * (b**2).mean(0)).clip(1e-300)


def _inputs(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Some of the rows, and of the columns that are not constant there; (N, D)."""
    flat = x.flatten(1)
    flat = flat[torch.linspace(0, len(flat) - 1, min(rows, len(flat))).round().long()]
    varied = (flat.amax(0) > flat.amin(0)).nonzero()[:, 0]
    varied = varied if len(varied) else torch.arange(flat.shape[1])
    return flat[:, varied[torch.linspace(0, len(varied) - 1, min(columns, len(varied))).round().long()]].clone()
