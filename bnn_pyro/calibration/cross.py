"""CV+ and jackknife+: conformal intervals that need no rows of their own, but a fit for every fold.

    s_i = |y_i − μ₋ₖ(x_i)| / σ₋ₖ(x_i), k the fold of row i, μ₋ₖ and σ₋ₖ of the fit without it; at x, of n rows:
    low  = the ⌊(1 − level)(n + 1)⌋-th smallest of μ₋ₖ(x) − s_i σ₋ₖ(x)
    high = the ⌈level (n + 1)⌉-th smallest of μ₋ₖ(x) + s_i σ₋ₖ(x)

Barber, Candès, Ramdas & Tibshirani 2021, arXiv:1905.02928, sections 1.2 and 3, there with σ = 1. Rows that are
exchangeable are covered with a probability of at least 2 level − 1, of K < n folds less the smaller of 2 (1 − 1/K) /
(n/K + 1) and (1 − K/n) / (K + 1) (theorems 1 and 4); of level, unless fits are unstable. K = n: the jackknife+.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.model_selection import KFold
from torch import Tensor, nn

from bnn_pyro.calibration.conformal import ROUNDING, rows_needed
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.datasets.in_memory import dataset
from bnn_pyro.errors import UserError
from bnn_pyro.fitting import fit
from bnn_pyro.inference import Method
from bnn_pyro.parallel.map import map_tasks
from bnn_pyro.parts.decisions import Interval, check_level
from bnn_pyro.posterior import Posterior
from bnn_pyro.predictive import predict
from bnn_pyro.zoo import Entry


def cv_plus(
    means: np.ndarray, spreads: np.ndarray, scores: np.ndarray, folds: np.ndarray, level: float
) -> tuple[np.ndarray, np.ndarray]:
    """Ends of the intervals, (B,), by means and spreads (K, B) of the fits without each fold, scores and folds (n,)."""
    num, needed = len(scores), int(np.ceil(level * (len(scores) + 1) * (1 - ROUNDING)))
    if needed > num:
        return np.full(means.shape[1], -np.inf), np.full(means.shape[1], np.inf)
    width = scores[:, None] * spreads[folds]
    low, high = np.sort(means[folds] - width, axis=0), np.sort(means[folds] + width, axis=0)
    return low[num - needed], high[needed - 1]


@dataclass(frozen=True)
class CrossConformal:
    """What :func:`cross_conformal` returns: K posteriors, and of the n rows the scores and the folds."""

    posteriors: tuple[Posterior, ...]
    scores: np.ndarray
    folds: np.ndarray
    num_draws: int = 100

    def interval(self, x: Tensor, level: float = 0.9) -> Interval:
        """In target units, at standardised x (B, *input_shape). Raises UserError for a level outside (0, 1)."""
        check_level(level)
        pairs = [_moments(posterior, x, self.num_draws) for posterior in self.posteriors]
        means, spreads = (np.stack(values) for values in zip(*pairs, strict=True))
        low, high = cv_plus(means, spreads, self.scores, self.folds, level)
        n, k = len(self.scores), len(self.posteriors)
        least = 2 * level - 1 - min(2 * (1 - 1 / k) / (n / k + 1), (1 - k / n) / (k + 1))
        note = f"{n} rows in {k} folds; exchangeable rows are covered at least {max(0.0, least):.1%} of the time, and "
        note += f"about {level:.0%} where fits are stable"
        if not np.isfinite(low).all():
            note = f"{len(self.scores)} rows are too few: a finite interval of {level:.0%} takes {rows_needed(level)}"
        return Interval(torch.from_numpy(low), torch.from_numpy(high), level, "conformal (cv+)", note)


def cross_conformal(
    variant: str | Entry | nn.Module,
    data: Dataset,
    method: str | Method | None = None,
    *,
    folds: int = 10,
    seed: int = 0,
    cores: int = 0,
    num_draws: int = 100,
    **settings: Any,
) -> CrossConformal:
    """Fit as often as there are folds of the training rows, each time without one; all rows train and calibrate.

    variant, method, settings: see ``fit``.   cores: processes; 0: as many as there are cores.
    Inputs and targets are standardised anew for each fit, as no row of its fold may tell it anything.

    Raises UserError for class labels or counts, rows that stay in a file, or fewer than 2 folds or more than rows.
    """
    schema, num, in_memory = data.schema, len(data.x_train), isinstance(data.x_train, Tensor)
    if schema.task != "regression" or schema.target_scale != "identity" or not in_memory:
        raise UserError("cv+ is for numbers on their own scale, and for training rows in memory; set rows aside for "
                        "calibrate(…) otherwise")  # fmt: skip
    if not 2 <= folds <= num:
        raise UserError(f"folds must be from 2 to the number of training rows, {num}, got {folds}")
    parts = [rows for _, rows in KFold(folds, shuffle=True, random_state=seed).split(np.arange(num))]
    function = partial(_fit_fold, variant, method, data.x_train, data.y_train, seed, num_draws, settings)
    fits = map_tasks(function, parts, cores=cores, names=[f"fold {k + 1} of {folds}" for k in range(folds)])
    scores, of_row = np.empty(num), np.empty(num, dtype=int)
    for k, (rows, (_, own)) in enumerate(zip(parts, fits, strict=True)):
        scores[rows], of_row[rows] = own, k
    return CrossConformal(tuple(posterior for posterior, _ in fits), scores, of_row, num_draws)


def _fit_fold(
    variant: Any, method: Any, x: Tensor, y: Tensor, seed: int, num_draws: int, settings: dict[str, Any], out: Tensor
) -> tuple[Posterior, np.ndarray]:
    """(the posterior without the rows ``out`` of a fold, the scores of these)."""
    kept = np.setdiff1d(np.arange(len(x)), out)
    rest = dataset(x[kept], y[kept], task="regression", split=0.0, validation=0)
    posterior = fit(variant, rest, method, seed=seed, progress=False, **settings)
    mean, spread = _moments(posterior, x[out], num_draws)
    return posterior, np.abs(y[out].numpy() - mean) / spread


def _moments(posterior: Posterior, x: Tensor, num_draws: int) -> Sequence[np.ndarray]:
    prediction = predict(posterior, posterior.schema.standardise(x), num_draws=num_draws, seed=0)
    return prediction.mean.double().numpy(), prediction.total.double().sqrt().numpy()
