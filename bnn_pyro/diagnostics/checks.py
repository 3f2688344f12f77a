"""Does the fitted model look like the data, and had its training settled?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import kolmogorov

from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.diagnostics.draws import even, rows_at_hand, sized, thinned, walk
from bnn_pyro.isolation import isolated
from bnn_pyro.posterior import Posterior

__all__ = ["Replication", "replicate", "settled", "uniformity"]

#: Rows and draws of the predictive check, and replicated data sets that are kept for the figure.
ROWS, DRAWS, LEAST, SHOWN = 2000, 400, 100, 50


@dataclass(frozen=True)
class Replication:
    """Data sets made by the fitted model beside the observed one, at M training rows.

    replicated  (R, M) new targets, one data set a row; in target units, or labels
    observed    (M,)
    p_value     share of replicated data sets that fit worse than the observed one: near 0, the data are stranger than
                the model would make them; near 1, they fit better than its own
    """

    replicated: np.ndarray
    observed: np.ndarray
    p_value: float


def replicate(posterior: Posterior, data: Dataset, seed: int = 0) -> Replication:
    """Posterior-predictive check by a realised discrepancy T(y, w) (Gelman, Meng & Stern 1996, Stat. Sinica 6:733).

    T is −log p(y | x, w) for labels; in regression, where a learned noise always makes that fit, the largest
    |y − mean| / noise: are there outliers that the noise does not know of?
    """
    posterior = thinned(posterior, DRAWS)
    shape = sized(posterior, DRAWS)
    num = shape[0] * shape[1]
    rows = even(len(data.x_train), min(ROWS, len(rows_at_hand(posterior, len(data.x_train), num, 1e7))))
    index = torch.from_numpy(rows).to(data.x_train.device)
    y, repeats = data.y_train[index].cpu(), max(1, -(-LEAST // num))
    seen, made, shown = torch.zeros(num), torch.zeros(repeats, num), []
    with isolated(seed):
        for part, prediction in walk(posterior, data.x_train[index], num, seed):
            seen = prediction.mixture.discrepancy(y[part], seen)
            parts = []
            for r in range(repeats):
                new = prediction.components.sample()
                made[r] = prediction.mixture.discrepancy(new, made[r])
                parts.append(new)
            shown.append(torch.cat(parts)[even(num * repeats, SHOWN)])
    p_value = (made > seen).double().mean() + 0.5 * (made == seen).double().mean()
    return Replication(torch.cat(shown, 1).numpy(), y.numpy(), float(p_value))


def uniformity(pit: np.ndarray) -> float:
    """p-value of "these probability integral transforms (M,) are uniform" (Kolmogorov-Smirnov); NaN below 10."""
    num = len(pit)
    if num < 10 or not np.isfinite(pit).all():
        return float("nan")
    ordered, steps = np.sort(pit), np.arange(num + 1) / num
    distance = max((steps[1:] - ordered).max(), (ordered - steps[:-1]).max())
    return float(kolmogorov((np.sqrt(num) + 0.12 + 0.11 / np.sqrt(num)) * distance))  # Stephens 1970


def settled(trace: Mapping[str, Sequence[float]]) -> float:
    """By how many nats the objective still rose in the last fifth of the training, 0 where that is noise.

    The last tenth of the epochs against the tenth before it; NaN without a trace of an objective, or under 20 epochs.
    """
    objective = trace.get("elbo") or trace.get("log_joint") or ()
    tenth = len(objective) // 10
    if tenth < 2 or "kinetic_temperature" in trace:
        return float("nan")
    line = np.asarray(objective, dtype=np.float64)
    before, last = line[-2 * tenth : -tenth], line[-tenth:]
    rise = last.mean() - before.mean()
    noise = np.hypot(before.std(ddof=1), last.std(ddof=1)) / np.sqrt(tenth)
    return float(rise) if rise > max(3 * noise, 1.0, 0.002 * np.ptp(line)) else 0.0
