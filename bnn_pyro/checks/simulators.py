"""Two simulators of the joint distribution p(w, y | x) of a variant made small, and how far they are apart.

They are compared by quantities g(w, y). Weights alone see little: where the prior is wide beside the posterior, a
sampler that is too wide by a half moves them by nothing. What sees it depends on the data too: the log-likelihood, and
the slopes of the log joint, whose scale is that of the posterior itself (Modrák et al. 2023, arXiv:2211.02383).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyro
import pyro.poutine as poutine
import torch
from scipy.special import ndtri
from scipy.stats import norm
from torch import Tensor, nn

from bnn_pyro.checks.check import ALPHA, Estimate, Finding, Subject, judge
from bnn_pyro.checks.transitions import Start, transitions_of
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.errors import UserError
from bnn_pyro.features import on_features
from bnn_pyro.inference import Method
from bnn_pyro.inference.log_joint import log_joints
from bnn_pyro.inference.potential import Potential
from bnn_pyro.parallel.task import Report
from bnn_pyro.parts.likelihoods import ReadLikelihood
from bnn_pyro.parts.mixtures import Mixture
from bnn_pyro.posterior import weight_space

__all__ = ["NormalScores", "Quantities", "Shift", "Simulators", "targets_of"]

#: Weights and rows that are looked at one by one, at most; sets of weights evaluated at once.
WEIGHTS, ROWS, TOGETHER = 8, 3, 4096
#: Draws of the joint distribution, for every chain.
REFERENCE = 20
#: Quantiles of the normal scores that are kept for a figure.
QUANTILES = norm.ppf((np.arange(199) + 1) / 200)


def targets_of(model: nn.Module, x: Tensor, w: Mapping[str, Tensor]) -> Mixture:
    """p(y | x, w) of C sets of weights, of components (C, N)."""
    with torch.no_grad(), pyro.validation_enabled(False), ReadLikelihood() as read, poutine.condition(data=w):
        model(x)
    return read.mixture(read.likelihood)


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
        x = subject.data.x_train.flatten(1)
        x = x[_spread(len(x), check.rows)]
        varied = [k for k in range(x.shape[1]) if x[:, k].amax() > x[:, k].amin()] or list(range(x.shape[1]))
        x = x[:, [varied[k] for k in _spread(len(varied), check.inputs)]].clone()
        schema = replace(subject.data.schema, input_shape=(x.shape[1],), features=(), columns=())
        classes = len(schema.classes)
        y = torch.zeros(len(x), dtype=torch.int64) if classes else torch.full((len(x),), float(schema.y_shift))
        entry = subject.reduced()
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
        self.expected = self._moments(values)  # (S, M, 2)
        # The targets that a warm-up is given: none out of the ordinary.
        likelihood = values[:, self.quantities.names.index("log-likelihood")]
        middle = int(np.argsort(likelihood)[len(likelihood) // 2])
        self.first = {site: value[middle] for site, value in sample[0].items()}
        self.data = replace(self.data, y_train=sample[1][middle].to(self.data.y_train))

    def draws(self, num: int) -> tuple[dict[str, Tensor], Tensor]:
        """Of the joint distribution: w {site: (num, *shape)} and y (num, N)."""
        w = self.potential.weights(self.potential.prior_draws(num))
        return w, targets_of(self.model, self.data.x_train, w).components.sample()

    def compare(self, method: Method, **settings: Any) -> Shift:
        """Chains of this method, against the joint distribution."""
        check, slopes = self.check, self.quantities.slopes
        w, y = self.draws(check.chains)
        start = Start(self.model, self.data, self.first, w, check.sweeps, self.seed)
        move = transitions_of(type(method))(method, start, **settings)
        moments, last, renewed = [], [], []
        total = 0.0
        for k in range(check.sweeps):
            before = self.scores(self.quantities(w, y))[:, slopes]
            w = move(y)
            values = self.quantities(w, y)
            if not np.isfinite(values).all():
                raise UserError(f"after {k + 1} transitions, densities or their slopes are no longer finite")
            scores, now = self.scores(values), self._moments(values)
            after = scores[:, slopes]  # with means of 0, as before
            norms = np.sqrt((before**2).mean(0) * (after**2).mean(0)).clip(1e-300)
            renewed.append(1 - ((before * after).mean(0) / norms).clip(0, 1))
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

    def _moments(self, values: np.ndarray) -> np.ndarray:
        """Normal scores and their squares, (S, M) -> (S, M, 2)."""
        scores = self.scores(values)
        return np.stack([scores, scores**2], 2)

    def _error(self, values: np.ndarray) -> np.ndarray:
        """Standard error of the difference of the means of two independent samples (…, M, 2)."""
        return np.sqrt(values.var(0) / len(values) + self.expected.var(0) / len(self.expected))

    def evidence(self, shift: Shift) -> dict[str, Any]:
        """See ``JointDistribution``."""
        arrays = shift._asdict() | {"quantities": self.quantities.names, "z": shift.shift / shift.error}
        return arrays | {"levels": QUANTILES, "scores": arrays.pop("quantiles"), "bound": shift.bound}

    def blind(self, shift: Shift) -> float:
        """The least error of posterior variances that would be seen, as a share of them, by those of the slopes.

        These would be off by that after many transitions; after k of them, as far as they have come. A kernel that
        never moves leaves every distribution as it is.
        """
        come = 1 - (1 - shift.renewed) ** np.arange(1, self.check.sweeps + 1)
        error = float(np.median(shift.error[self.quantities.slopes, 1]))
        return shift.bound * error / max(float(come.mean()), 1e-9)

    def findings(
        self, shift: np.ndarray, error: np.ndarray, level: str, tolerance: Any = 0.0, where: str = ""
    ) -> list[Finding]:
        """One for the mean and one for the variance of every quantity, in units of its own spread."""
        sides = [f"{side} of {name}{where}" for name in self.quantities.names for side in ("mean", "variance")]
        estimate = Estimate(shift.ravel(), error.ravel())
        return judge(sides, estimate, np.zeros(shift.size), tolerance=np.ravel(tolerance), level=level)


class Quantities:
    """M numbers of every (w, y), with their names in words.

    potential: of the rows x, in plain coordinates; its targets are exchanged.
    w, y: draws of the joint distribution, which tell how steep the log joint is along each weight.
    """

    def __init__(self, potential: Potential, w: Mapping[str, Tensor], y: Tensor) -> None:
        self.potential, self.scale = potential, None
        self.picked, self.rows = _spread(potential.size, WEIGHTS), _spread(len(potential.x), ROWS)
        places = [(site, place) for site, shape in potential.free.items() for place in np.ndindex(*shape)]
        names = [f"{site}[{', '.join(map(str, place))}]" if place else site for site, place in places]
        names = [names[i] for i in self.picked]
        self.names = [
            *names,
            *(f"{a} · {b}" for a, b in pairwise(names)),
            *(f"slope along {name}" for name in names),
            *("squared slopes", "log joint", "log prior", "log-likelihood"),
            *(f"prediction of row {n + 1}" for n in self.rows),
            "mean target",
        ]
        #: Which of them are slopes.
        self.slopes = [i for i, name in enumerate(self.names) if name.startswith("slope")]
        potential.give(y)
        _, slopes = potential(potential.position(w))
        self.scale = slopes.square().mean(0).clamp_min(1e-300)

    def __call__(self, w: Mapping[str, Tensor], y: Tensor) -> np.ndarray:
        """(C, M) of C sets of weights w {site: (C, *shape)} and targets y (C, N)."""
        blocks = range(0, len(y), TOGETHER)
        parts = [self._block({s: v[a : a + TOGETHER] for s, v in w.items()}, y[a : a + TOGETHER]) for a in blocks]
        return torch.cat(parts).numpy()

    def _block(self, w: Mapping[str, Tensor], y: Tensor) -> Tensor:
        potential = self.potential
        potential.give(y)
        z = potential.position(w)
        log_joint, slopes = potential(z)
        with torch.no_grad(), pyro.validation_enabled(False):
            prior, likelihood = log_joints(potential.model, w, potential.x, y)
        seen = targets_of(potential.model, potential.x, w)
        seen = seen.probs[..., 0] if seen.has_classes else seen.components.mean
        chosen = z[:, self.picked]
        columns = [chosen, chosen[:, 1:] * chosen[:, :-1], slopes[:, self.picked]]
        columns += [(slopes.square() / self.scale).mean(1), log_joint, prior, likelihood]
        columns += [seen[:, self.rows], y.double().mean(1)]
        return torch.cat([c.double().reshape(len(y), -1) for c in columns], 1)


class NormalScores:
    """Values as the standard Normal would have them, by their ranks in a sample of the right distribution.

    A test of means needs tails that are not heavy; ranks have none, whatever the prior.
    """

    def __init__(self, sample: np.ndarray) -> None:
        self.sorted = np.sort(sample, 0)

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """(S, M) -> (S, M)."""
        num = len(self.sorted)
        ranks = [
            0.5 * (np.searchsorted(column, v, "left") + np.searchsorted(column, v, "right"))
            for column, v in zip(self.sorted.T, values.T, strict=True)
        ]
        return ndtri((np.stack(ranks, 1) / num).clip(0.5 / num, 1 - 0.5 / num))


def _spread(size: int, most: int) -> list[int]:
    """At most so many of the numbers below ``size``, evenly spaced."""
    return sorted({int(i) for i in np.linspace(0, size - 1, min(size, most)).round()})
