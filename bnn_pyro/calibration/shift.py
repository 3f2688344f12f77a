"""Distribution shift: tests of whether new rows are like the calibration rows, and conformal levels that adapt to it.

The false-alarm rates hold for every model and data set, as the null hypothesis is only that calibration and new rows
are exchangeable. An alarm means that the distribution changed, not that predictions are wrong.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import betabinom, mannwhitneyu
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from bnn_pyro.calibration.calibrated import Calibrated, as_inputs, one_number
from bnn_pyro.errors import UserError
from bnn_pyro.metrics.metric import targets
from bnn_pyro.parts.decisions import check_level
from bnn_pyro.predictive import Prediction

#: Martingale: the ε of its bets 1 + ε (p − ½), and the share of its capital that is redistributed after each row.
BETS, JUMP = np.array([-2.0, -1.0, 0.0, 1.0, 2.0]), 0.01


class Verdict(NamedTuple):
    """The result of a test. The p_value of the martingale is the bound 1 / its largest value."""

    test: str
    p_value: float
    alarm: bool
    sentence: str


def monitor(
    calibrated: Calibrated, x: Tensor, x_new: Tensor, y_new: Tensor | None = None, *, false_alarm: float = 0.01
) -> list[Verdict]:
    """Run all tests that apply.

    x: the calibration rows, (n, *input_shape).   x_new: (m, *input_shape), in order of arrival.
    y_new: (m,), for the martingale, which needs a conformal method.
    false_alarm: largest probability that at least one test alarms although nothing changed (Bonferroni).
    Raises UserError for a rate outside (0, 1), for fewer than four rows, or if x is not as long as at calibration.
    """
    check_level(1 - false_alarm)
    if not isinstance(calibrated, Calibrated):
        raise UserError("monitor takes the result of bp.calibrate, which stores its calibration rows")
    x, x_new = (as_inputs(rows, calibrated.schema) for rows in (x, x_new))
    if min(len(x), len(x_new)) < 4 or len(x) != len(calibrated.epistemic):
        raise UserError(f"monitor takes the {len(calibrated.epistemic)} calibration rows and four new rows or more, "
                        f"got {len(x)} and {len(x_new)}")  # fmt: skip
    prediction = replace(calibrated, conformal=None).predict(x_new)
    p, auroc = classifier_p(x, x_new)
    results = {"inputs": (p, f"a classifier tells new from calibration inputs with an AUROC of {auroc:.3f}")}
    if np.ptp(calibrated.epistemic) > 0:
        p, share = epistemic_p(calibrated.epistemic, one_number(prediction.epistemic))
        sentence = f"{share:.1%} of new rows have an epistemic uncertainty that few calibration rows have"
        results["epistemic"] = p, sentence
    if y_new is not None and calibrated.conformal is not None:
        y_new = torch.as_tensor(targets(prediction, y_new))
        scores = calibrated.conformal.at(len(x_new), x=x_new).score(prediction, y_new).numpy()
        peak = max(0.0, martingale(conformal_p(calibrated.conformal.scores, scores)).max())
        stake = f"{np.exp(peak):.3g}" if peak < 700 else f"1e{peak / np.log(10):.0f}"  # beyond the range of floats
        results["targets"] = (np.exp(-peak), f"a bet against exchangeable targets made 1 into {stake}")
    verdicts = []
    for test, (p, sentence) in results.items():
        alarm = bool(p <= false_alarm / len(results))
        decision = f"alarm: a chance of {false_alarm:.2g} if nothing changed" if alarm else "no alarm"
        verdicts.append(Verdict(test, float(p), alarm, f"{sentence[0].upper()}{sentence[1:]} (p {p:.2g}): {decision}."))
    return verdicts


def classifier_p(x: Tensor, x_new: Tensor, seed: int = 0) -> tuple[float, float]:
    """(p-value, AUROC) of a classifier two-sample test (Lopez-Paz & Oquab 2017, arXiv:1610.06545).

    Logistic regression on features and their squares is fitted to half of the rows; Mann-Whitney compares the others.
    """
    rng = np.random.default_rng(seed)
    old, new = (_flat(v)[rng.permutation(len(v))[:2000]] for v in (x, x_new))  # at most 2,000 rows
    a, b = len(old) // 2, len(new) // 2
    log_odds = _classifier(old[:a], new[:b])
    test = mannwhitneyu(scores := log_odds(new[b:]), others := log_odds(old[a:]), alternative="greater")
    return float(test.pvalue), float(test.statistic / (len(scores) * len(others)))


def likelihood_ratio(x: Tensor, x_new: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """p_new(x) / p(x) of the rows x and x_new, (n,) and (m,), by a classifier: the weights of a covariate shift."""
    old, new = _flat(x), _flat(x_new)
    log_odds = _classifier(old, new)
    return tuple(np.exp(log_odds(rows)) * len(old) / len(new) for rows in (old, new))


def epistemic_p(calibration: Sequence[float], new: np.ndarray) -> tuple[float, float]:
    """(beta-binomial p-value, share) of the new rows above the 95 % quantile of the calibration rows."""
    n = len(calibration)
    k = min(n, int(np.ceil((n + 1) * 0.95)))
    above = int((new > np.sort(calibration)[k - 1]).sum())
    return float(betabinom.sf(above - 1, len(new), n + 1 - k, k)), above / len(new)


def conformal_p(calibration: Sequence[float], new: np.ndarray, seed: int = 0) -> np.ndarray:
    """Ranks of each new score among all so far, ties at random, (m,): independent uniform p-values if exchangeable."""
    scores, rng, ranks = sorted(calibration), np.random.default_rng(seed), []
    for score in new.tolist():
        insort(scores, score)
        left, right = bisect_left(scores, score), bisect_right(scores, score)
        ranks.append((len(scores) - right + rng.random() * (right - left)) / len(scores))
    return np.array(ranks)


def martingale(p_values: np.ndarray) -> np.ndarray:
    """log of the Simple Jumper's capital after each p-value (Vovk et al. 2021, arXiv:2102.10439).

    If p-values are independent and uniform, it ever reaches c with a probability of at most 1 / c (Ville's inequality).
    """
    capital, grown, path = np.full(len(BETS), 1 / len(BETS)), 0.0, []
    for p in p_values:
        capital = ((1 - JUMP) * capital + JUMP * capital.mean()) * (1 + BETS * (p - 0.5))
        grown += np.log(total := capital.sum())
        capital = capital / total
        path.append(grown)
    return np.array(path)


def _flat(x: Tensor) -> np.ndarray:
    return x[:].detach().cpu().double().flatten(1).numpy()


def _classifier(old: np.ndarray, new: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Fit a classifier: rows -> log odds that they are new."""
    rows = np.concatenate([old, new])
    fitted = make_pipeline(StandardScaler(), LogisticRegression(max_iter=300))
    fitted.fit(np.hstack([rows, rows**2]), np.arange(len(rows)) >= len(old))
    return lambda some: fitted.decision_function(np.hstack([some, some**2]))


class Adaptive:
    """Adaptive conformal inference: β ← β + rate · (missed − (1 − level)) after every row (Gibbs & Candès 2021).

    Over T rows the covered share is within about 1 / (rate · T) of the level, however the data change
    (arXiv:2106.00170, Proposition 4.1). Intervals of a level β ≥ 1 exclude nothing; those of β ≤ 0 cover nothing.
    """

    def __init__(self, calibrated: Calibrated, level: float = 0.9, rate: float = 0.01) -> None:
        check_level(level)
        if getattr(calibrated, "conformal", None) is None:
            raise UserError("adaptive intervals start from conformal ones: calibrate with a conformal method first")
        if not 0 < rate < 1:
            raise UserError(f"rate must lie strictly between 0 and 1, got {rate}; 0.01 is usual")
        self.calibrated, self.level, self.rate, self.now = calibrated, level, rate, level
        self._last: Prediction | None = None

    def predict(self, x: Tensor | Any, **options: Any) -> Prediction:
        """``Calibrated.predict`` with intervals or sets of the current level."""
        self._last = self.calibrated.predict(x, level=self.now, **options)
        return self._last

    def update(self, y: Tensor | Sequence[float]) -> Tensor:
        """Whether each target (B,) of the last prediction was covered, which also updates the level."""
        if self._last is None:
            raise UserError("update takes the targets of the last predicted rows, and only once")
        y = torch.as_tensor(targets(self._last, y))
        covered = self._last.guarantee.covers(self._last, y, self.now)
        self.now += self.rate * float((self.level - covered.double()).sum())
        self._last = None
        return covered
