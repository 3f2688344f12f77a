"""Split conformal prediction: intervals and sets that cover a given share of new rows, whatever the model.

A score measures how badly y fits the prediction at x. If n calibration rows and a new row are exchangeable, the score
of the new row exceeds the k-th smallest calibration score, k = ⌈(n + 1) level⌉, with a probability of at most 1 − level
(Vovk, Gammerman & Shafer 2005; Lei et al. 2018, arXiv:1604.04173). Over sets of calibration rows the coverage has a
Beta(k, n + 1 − k) distribution; if scores can tie, it is at least as large.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from scipy.stats import beta
from torch import Tensor

from bnn_pyro.errors import UserError
from bnn_pyro.parts.decisions import ClassSet, Interval
from bnn_pyro.parts.mixtures import Mixture

#: Relative tolerance for rounding errors in (n + 1) level, so that ⌈10 · 0.7⌉ is 7.
ROUNDING = 1e-9
#: RAPS: what each class beyond the first ``FREE`` most probable ones adds to the score.
PENALTY, FREE = 0.01, 2
#: ``local``: the number of nearest rows, and the weight of the mean score of all rows that is added to theirs.
NEAREST, SHRINKAGE = 10, 0.5


def threshold(
    scores: np.ndarray, level: float | np.ndarray, weights: np.ndarray | None = None, new: np.ndarray | float = 1.0
) -> np.ndarray:
    """The smallest score s such that calibration rows with scores up to s have a share ``level`` of all weight, or ∞.

    scores: (n,).   weights: (n,) of the calibration rows; None: all equal.   new: weight of the new row, (…).
    With likelihood ratios of a covariate shift as weights: Tibshirani et al. 2019, arXiv:1904.06019.
    """
    order = np.argsort(scores, kind="stable")
    total = np.arange(1.0, len(scores) + 1) if weights is None else np.cumsum(np.asarray(weights, float)[order])
    needed = np.asarray(level) * ((total[-1] if len(total) else 0.0) + new)
    return np.append(np.asarray(scores, float)[order], np.inf)[np.searchsorted(total, needed * (1 - ROUNDING))]


def rows_needed(level: float) -> int:
    """The smallest number of calibration rows for which intervals of this level are finite."""
    return math.ceil(level / (1 - level) * (1 - ROUNDING))


class Score(NamedTuple):
    """A measure of how badly y fits a prediction."""

    task: str
    # For numbers (prediction, y (B,) or (B, T), level) -> (B,); for classes (prediction) -> (B, K), of every class.
    of: Callable[..., Tensor]
    # For numbers (prediction, threshold (B,), level) -> the ends of {y: score ≤ threshold}.
    bounds: Callable[[Mixture, Tensor, float], tuple[Tensor, Tensor]] | None = None


def _spread(prediction: Mixture) -> Tensor:
    return prediction.total.double().sqrt()


def _ends(prediction: Mixture, level: float) -> Tensor:
    return prediction.quantile([(1 - level) / 2, (1 + level) / 2]).double()


def _outside(prediction: Mixture, y: Tensor, level: float) -> Tensor:
    low, high = _ends(prediction, level)
    return torch.maximum(low - y, y - high)


def _widened(prediction: Mixture, by: Tensor, level: float) -> tuple[Tensor, Tensor]:
    low, high = _ends(prediction, level)
    low, high = low - by, high + by
    middle = (low + high) / 2  # where {y: score ≤ threshold} is empty
    return torch.where(low > high, middle, low), torch.where(low > high, middle, high)


def _central(prediction: Mixture, y: Tensor, level: float) -> Tensor:
    below, at = (share.mean(-2) for share in prediction.component_below(y))
    return 1 - 2 * torch.minimum(below + at, 1 - below)


def _central_ends(prediction: Mixture, share: Tensor, level: float) -> tuple[Tensor, Tensor]:
    low, high = torch.full_like(share, -math.inf), torch.full_like(share, math.inf)
    for one in share[share < 1].unique().tolist():
        rows = (share == one).nonzero()[:, 0]
        low[rows], high[rows] = _ends(prediction[rows], max(one, 1e-9))
    return low, high


def _cumulative(prediction: Mixture, penalty: float = 0.0) -> Tensor:
    """Probability of the classes that are more probable than k, plus a share u of k's own probability, for every k.

    u is a function of the last digits of the probabilities and behaves like a random number. Without it, all rows whose
    class is the least probable one would have equal scores.
    """
    probs, order = prediction.probs.mean(0, dtype=torch.float64).sort(dim=-1, descending=True, stable=True)
    share = (probs @ (1e6 * torch.arange(2, probs.shape[-1] + 2, dtype=torch.float64).sqrt()))[:, None] % 1
    scores = probs.cumsum(-1) - share * probs + penalty * (torch.arange(probs.shape[-1]) + 1 - FREE).clamp_min(0)
    return torch.empty_like(probs).scatter_(-1, order, scores)


#: |y − mean| / standard deviation of the predictive distribution
NORMALISED = Score(
    "regression",
    lambda p, y, level: (y - p.mean).abs() / _spread(p),
    lambda p, t, level: (p.mean - t * _spread(p), p.mean + t * _spread(p)),
)
SCORES: Mapping[str, Score] = {
    "normalised": NORMALISED,
    # the same, divided by its mean over similar calibration rows: see ``Conformal.difficulty``
    "local": NORMALISED,
    # distance of y from the central predictive interval, negative inside (Romano et al. 2019, arXiv:1905.03222)
    "cqr": Score("regression", _outside, _widened),
    # level of the smallest central predictive interval that holds y (Chernozhukov et al. 2021, arXiv:1909.07889)
    "pit": Score("regression", _central, _central_ends),
    # |y − mean|: all intervals have the same width
    "absolute": Score("regression", lambda p, y, _: (y - p.mean).abs(), lambda p, t, _: (p.mean - t, p.mean + t)),
    # the largest normalised score of several targets, for boxes that hold all targets at once
    "joint": Score(
        "targets",
        lambda p, y, level: NORMALISED.of(p, y, level).amax(-1),
        lambda p, t, level: NORMALISED.bounds(p, t[:, None], level),
    ),
    # 1 − p(y): the smallest sets (Sadinle et al. 2019)
    "lac": Score("classification", lambda p: 1 - p.probs.mean(0, dtype=torch.float64)),
    # probability of the more probable classes, plus a random share of that of y (Romano et al. 2020, arXiv:2006.02544)
    "aps": Score("classification", _cumulative),
    # aps, plus PENALTY for each class beyond the first FREE, down to y (Angelopoulos et al. 2021, arXiv:2009.14193)
    "raps": Score("classification", lambda p: _cumulative(p, PENALTY)),
}


@dataclass(frozen=True)
class Conformal:
    """Scores of the calibration rows; ``at`` gives the guarantee of a prediction.

    method, scores   a name in ``SCORES``; (n,), in the order of the calibration rows
    groups           (n,) labels: coverage holds in each group separately (Mondrian); None: one group
    per_class        whether the groups are the true classes
    level            level of the predictive interval that ``cqr`` starts from
    inputs, errors   for ``local``, (m, F) and (m,): every second calibration row, which has no entry in ``scores``
    by_lot           whether equal scores are ordered at random: for ``cqr`` of counts, except in old files
    """

    method: str
    scores: list[float] = field(repr=False)
    groups: list[str] | None = None
    per_class: bool = False
    level: float = 0.9
    inputs: list[list[float]] = field(default=(), repr=False)
    errors: list[float] = field(default=(), repr=False)
    by_lot: bool = False

    @classmethod
    def fit(cls, method: str, prediction: Mixture, y: Tensor, x: Tensor | None = None, **options: Any) -> Self:
        """Compute the scores of the calibration rows; y (n,), for ``local`` x (n, F).   options: the other fields."""
        made = cls(method, [], by_lot=method == "cqr" and prediction.is_discrete, **options)
        if method == "local":
            errors, labels = made.score(prediction, y), made.groups and made.groups[1::2]
            made = replace(made, inputs=x[::2].flatten(1).tolist(), errors=errors[::2].tolist(), groups=labels)
            return replace(made, scores=(errors[1::2] / made.difficulty(x[1::2])).tolist())
        scores = made.score(prediction, y).tolist()
        return replace(made, scores=scores, **({"groups": [str(k) for k in y.tolist()]} if made.per_class else {}))

    def score(self, prediction: Mixture, y: Tensor) -> Tensor:
        """How badly each y (B,) fits its prediction, (B,) float64; y is covered if it is at most the threshold."""
        of = SCORES[self.method].of
        if prediction.has_classes:
            return of(prediction).gather(1, y.long()[:, None])[:, 0]
        return of(prediction.untransformed, prediction.transform.inv(y.double()), self.level) + self.lots(prediction)

    def lots(self, prediction: Mixture) -> Tensor | float:
        """Numbers in [0, 1), (B,), that break ties of scores: the last digits of the mean, which look random."""
        return prediction.mean.double() * 1e6 * math.sqrt(2) % 1 if self.by_lot else 0.0

    def difficulty(self, x: Tensor) -> Tensor:
        """The divisor of a score, (B,): mean error of the NEAREST rows of ``inputs`` plus SHRINKAGE · that of all rows.

        The scores of these rows are not in ``scores``, so that those remain exchangeable with the score of a new row.
        1 for methods other than ``local``.
        """
        from sklearn.neighbors import KNeighborsRegressor

        if not self.errors or not len(x):
            return torch.ones(len(x), dtype=torch.float64)
        near = KNeighborsRegressor(min(NEAREST, len(self.errors))).fit(self.inputs, self.errors)
        return torch.from_numpy(near.predict(x[:].cpu().flatten(1)) + SHRINKAGE * np.mean(self.errors))

    def at(
        self, num: int, groups: np.ndarray | None = None, weights: tuple[np.ndarray, np.ndarray] | None = None,
        level: float | None = None, x: Tensor | None = None,
    ) -> "Rows":  # fmt: skip
        """The guarantee of ``num`` new rows.

        groups: (num,) labels.   weights: likelihood ratios of calibration rows (n,) and new rows (num,).
        level: replaces every level that is requested later, as ``Adaptive`` needs.   x: inputs (num, F), for ``local``.
        """
        groups = np.full(num, "") if groups is None else np.asarray(groups)
        ratios, new = (None, np.ones(num)) if weights is None else (np.asarray(w, float) for w in weights)
        both = np.concatenate([np.ones(len(self.scores)) if ratios is None else ratios, new])
        right = both.shape == (len(self.scores) + num,) and len(new) == num
        if not right or not both.any() or not ((both >= 0) & (both < np.inf)).all():
            raise UserError("weights must be likelihood ratios, finite, not negative and not all 0, "
                            f"({len(self.scores)},) of the calibration rows and ({num},) of the new ones")  # fmt: skip
        scale = torch.ones(num, dtype=torch.float64) if x is None else self.difficulty(x)
        return Rows(self, groups, ratios, new, scale, level)


@dataclass(frozen=True)
class Rows:
    """The guarantee of B new rows, which can be indexed; see ``Conformal.at``."""

    conformal: Conformal
    groups: np.ndarray
    ratios: np.ndarray | None
    new: np.ndarray
    scale: Tensor
    at_level: float | None = None

    def __getitem__(self, index: Any) -> Self:
        index = torch.arange(len(self.new))[index].numpy()
        return replace(self, groups=self.groups[index], new=self.new[index], scale=self.scale[index])

    def interval(self, prediction: Mixture, level: float) -> Interval:
        """See ``Decisions.interval``."""
        level, limits, notes = self._limits(level)
        limits = limits * self.scale - self.conformal.lots(prediction)
        ends = SCORES[self.conformal.method].bounds(prediction.untransformed, limits, self.conformal.level)
        low, high = (prediction.transform(end.double()) for end in ends)
        if level <= 0:  # nothing is to be covered: the interval is a point
            low = high = prediction.mean.double()
        if prediction.is_discrete:  # no count is below 0
            low = torch.where(high < 0, low, low.clamp_min(0.0))
        return Interval(low, high, level, *notes)

    def covers(self, prediction: Mixture, y: Tensor, level: float) -> Tensor:
        """Whether each y is inside its interval or set, (B,) bool."""
        if prediction.has_classes:
            return self.set(prediction, level).members.gather(1, y.long()[:, None])[:, 0]
        return self.score(prediction, y) <= self._limits(level)[1]

    def score(self, prediction: Mixture, y: Tensor) -> Tensor:
        """See :meth:`Conformal.score`, divided by the difficulty."""
        return self.conformal.score(prediction, y) / self.scale

    def set(self, prediction: Mixture, level: float) -> ClassSet:
        """See ``Decisions.set``."""
        scores = SCORES[self.conformal.method].of(prediction)
        level, limits, notes = self._limits(level, scores.shape[1])
        return ClassSet(scores <= limits, level, *notes)

    def _limits(self, level: float, classes: int = 0) -> tuple[float, Tensor, tuple[str, str]]:
        """(the level that applies, thresholds (B,) or for classes (B, K or 1), kind and note of intervals or sets)."""
        level, new = level if self.at_level is None else self.at_level, self.new
        groups, scores = self.groups, np.asarray(self.conformal.scores)
        if classes:
            names = np.arange(classes).astype(str) if self.conformal.per_class else groups[:, None]
            groups, new = np.broadcast_arrays(names, new[:, None])
        limits = np.full(groups.shape, -np.inf)
        for group in np.unique(groups) if level > 0 else ():
            mask = slice(None) if self.conformal.groups is None else np.asarray(self.conformal.groups) == group
            ratios = None if self.ratios is None else self.ratios[mask]
            limits[groups == group] = threshold(scores[mask], level, ratios, new[groups == group])
        return level, torch.from_numpy(limits), self._notes(level, (limits == math.inf).reshape(len(limits), -1).all(1))

    def _notes(self, level: float, infinite: np.ndarray) -> tuple[str, str]:
        """(kind, note) of intervals or sets."""
        num, need = len(self.conformal.scores), rows_needed(level) if 0 < level < 1 else math.inf
        whom, rows, least = "calibration rows", f"{num:,} calibration rows", num
        if self.conformal.groups is not None:
            whom, least = "calibration rows of its group", min(Counter(self.conformal.groups).values())
            rows = f"{whom} ({num:,} in all groups)"
        scope = "all targets of " * (SCORES[self.conformal.method].task == "targets")
        parts = [f"covers {scope}{level:.4g} of new rows that are exchangeable with the {rows}"]
        if self.ratios is not None:
            parts = [f"covers {level:.4g} of new rows if the weights are the likelihood ratios of the covariate shift"]
        elif need <= least:
            k = math.ceil((least + 1) * level * (1 - ROUNDING))
            low, high = beta.ppf([0.05, 0.95], k, least + 1 - k)
            smallest = "" if self.conformal.groups is None else f" of the smallest group ({least:,})"
            spread = f"of 10 such sets of calibration rows{smallest}, 9 give a coverage"
            parts.append(f"{spread} between {low:.3f} and {high:.3f}")
        if infinite.any():
            parts.append(f"{infinite.sum():,} of {len(infinite):,} exclude nothing: a level of {level:.4g} needs "
                         f"{need * (1 + bool(self.conformal.errors)):,} {whom} at least")  # fmt: skip
        return f"conformal: {self.conformal.method}", "; ".join(parts)
