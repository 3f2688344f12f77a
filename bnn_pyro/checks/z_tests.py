"""Averages of draws beside what they should be: their Monte-Carlo errors, and p-values corrected for their number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t

from bnn_pyro.checks.check import ALPHA, Finding
from bnn_pyro.diagnostics.chain_statistics import ess_mean

__all__ = ["Estimate", "bound", "close", "judge", "of_chains", "of_independent", "of_runs", "p_values", "z_scores"]


@dataclass(frozen=True)
class Estimate:
    """Means of M quantities, their standard errors, and the degrees of freedom of the errors; each (M,)."""

    mean: np.ndarray
    error: np.ndarray
    freedom: np.ndarray | float = np.inf

    def less(self, other: Estimate) -> Estimate:
        """Itself, with the error of the difference to another."""
        return Estimate(self.mean, np.hypot(self.error, other.error), self.freedom)


def of_chains(values: np.ndarray) -> Estimate:
    """Of series (C, D, M), whose effective numbers of draws make the errors."""
    values = np.asarray(values, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        error = values.std((0, 1)) / np.sqrt(ess_mean(np.moveaxis(values, 2, 0)))
    return Estimate(values.mean((0, 1)), np.nan_to_num(error))


def of_independent(values: np.ndarray) -> Estimate:
    """Of independent draws (S, M)."""
    values = np.asarray(values, dtype=np.float64)
    return Estimate(values.mean(0), values.std(0) / np.sqrt(len(values)))


def of_runs(values: np.ndarray) -> Estimate:
    """Of independent runs, or chains, each with its own mean: (R, M)."""
    values = np.asarray(values, dtype=np.float64)
    return Estimate(values.mean(0), values.std(0, ddof=1) / np.sqrt(len(values)), len(values) - 1.0)


def z_scores(
    estimate: Estimate, low: np.ndarray, high: np.ndarray | None = None, tolerance: np.ndarray | float = 0.0
) -> np.ndarray:
    """Standard errors between each quantity and [low, high], less what may be off for other reasons; (M,), signed."""
    high = low if high is None else high
    off = np.where(estimate.mean > high, estimate.mean - high, np.minimum(estimate.mean - low, 0.0))
    off = np.sign(off) * np.maximum(np.abs(off) - tolerance, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(off == 0, 0.0, off / estimate.error)


def p_values(estimate: Estimate, z: np.ndarray) -> np.ndarray:
    """Two-sided, of each by itself (M,): multiply by M."""
    return np.where(np.isfinite(z), 2 * t.sf(np.abs(z), estimate.freedom), 0.0)


def bound(estimate: Estimate) -> float:
    """Standard errors beyond which one of the quantities counts as off."""
    return float(np.max(t.isf(ALPHA / (2 * len(estimate.mean)), estimate.freedom)))


def judge(
    abouts: Sequence[str],
    estimate: Estimate,
    expected: np.ndarray,
    *,
    high: np.ndarray | None = None,
    tolerance: np.ndarray | float = 0.0,
    level: str = "bad",
) -> list[Finding]:
    """A finding for each quantity, of ``level`` where it is off; p is corrected for how many there are here.

    high: of an interval that starts at ``expected``, anywhere in which is right.
    tolerance: how far off each may be for reasons other than chance.
    """
    z = z_scores(estimate, expected, high, tolerance)
    p = np.minimum(1.0, len(abouts) * p_values(estimate, z))
    near = expected if high is None else np.clip(estimate.mean, expected, high)
    rows = zip(abouts, estimate.mean, near, estimate.error, p, strict=True)
    return [
        Finding(about, float(m), float(e), float(s), float(q), level if q < ALPHA else "good")
        for about, m, e, s, q in rows
    ]


def close(about: str, estimate: float, expected: float, tolerance: float, level: str = "bad") -> Finding:
    """A finding without chance, of ``level`` where the two differ by more than ``tolerance``, or one is not finite."""
    good = abs(estimate - expected) <= tolerance
    return Finding(about, float(estimate), float(expected), 0.0, level="good" if good else level)
