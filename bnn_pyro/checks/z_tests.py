"""Averages of draws beside what they should be: their Monte-Carlo errors, and p-values corrected for their number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t

from bnn_pyro.checks.check import ALPHA, Finding
from bnn_pyro.diagnostics.chain_statistics import ess_mean

__all__ = ["Estimate", "bound", "judge", "of_chains", "of_independent", "of_runs", "p_values", "z_scores"]


@dataclass(frozen=True)
class Estimate:
    """Means of M quantities, their standard errors, and the degrees of freedom of the errors; each (M,)."""

    mean: np.ndarray
    error: np.ndarray
    freedom: np.ndarray

    def __getitem__(self, which: object) -> Estimate:
        return Estimate(self.mean[which], self.error[which], self.freedom[which])


def of_chains(values: np.ndarray) -> Estimate:
    """Of series (C, D, M), whose effective numbers of draws make the errors."""
    values = np.asarray(values, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        error = values.std((0, 1)) / np.sqrt(ess_mean(np.moveaxis(values, 2, 0)))
    return Estimate(values.mean((0, 1)), np.nan_to_num(error), np.full(values.shape[2], np.inf))


def of_independent(values: np.ndarray) -> Estimate:
    """Of independent draws (S, M)."""
    values = np.asarray(values, dtype=np.float64)
    return Estimate(values.mean(0), values.std(0) / np.sqrt(len(values)), np.full(values.shape[1], np.inf))


def of_runs(values: np.ndarray) -> Estimate:
    """Of independent runs, or chains, each with its own mean: (R, M)."""
    values = np.asarray(values, dtype=np.float64)
    error = values.std(0, ddof=1) / np.sqrt(len(values))
    return Estimate(values.mean(0), error, np.full(values.shape[1], len(values) - 1.0))


def z_scores(
    found: Estimate, low: np.ndarray, high: np.ndarray | None = None, tolerance: np.ndarray | float = 0.0
) -> np.ndarray:
    """Standard errors between each quantity and [low, high], less what may be off for other reasons; (M,), signed."""
    high = low if high is None else high
    off = np.where(found.mean > high, found.mean - high, np.minimum(found.mean - low, 0.0))
    off = np.sign(off) * np.maximum(np.abs(off) - tolerance, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(off == 0, 0.0, off / found.error)


def p_values(found: Estimate, z: np.ndarray) -> np.ndarray:
    """Two-sided, of each by itself (M,): multiply by M."""
    return np.where(np.isfinite(z), 2 * t.sf(np.abs(z), found.freedom), 0.0)


def bound(found: Estimate) -> float:
    """Standard errors beyond which one of the quantities counts as off."""
    return float(t.isf(ALPHA / (2 * len(found.mean)), found.freedom).max())


def judge(
    abouts: Sequence[str],
    found: Estimate,
    expected: np.ndarray,
    *,
    high: np.ndarray | None = None,
    tolerance: np.ndarray | float = 0.0,
    level: str = "bad",
) -> tuple[Finding, ...]:
    """A finding for each quantity, of ``level`` where it is off; p is corrected for how many there are here.

    high: of an interval that starts at ``expected``, anywhere in which is right.
    tolerance: how far off each may be for reasons other than chance.
    """
    z = z_scores(found, expected, high, tolerance)
    p = np.minimum(1.0, len(abouts) * p_values(found, z))
    near = expected if high is None else np.clip(found.mean, expected, high)
    rows = zip(abouts, found.mean, near, found.error, p, strict=True)
    return tuple(
        Finding(about, float(m), float(e), float(s), float(q), level if q < ALPHA else "good")
        for about, m, e, s, q in rows
    )
