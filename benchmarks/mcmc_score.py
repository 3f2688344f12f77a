"""What a set of chains is worth: effective draws and R-hat of the network at test points, and agreement of means."""

from __future__ import annotations

import math
import warnings

import numpy as np
from scipy.stats import norm

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # 0.23 announces 1.0, once a day
    import arviz

__all__ = ["disagreement", "nested_rhat", "score"]


def score(f: np.ndarray, superchain: np.ndarray | None = None) -> dict:
    """Bulk effective draws and R-hat of f (C, D, M), the worst and the median of the M points.

    One chain is compared with itself, first half with second. superchain: (C,), which chains set out from the same
    point: then R-hat is nested.
    """
    f = f[:, : f.shape[1] // 2 * 2]
    series = np.moveaxis(f, 2, 0)
    ess = np.array([arviz.ess(s, method="bulk") for s in series])
    if superchain is not None:
        rhat, kind = np.array([nested_rhat(ranks(s), superchain) for s in series]), "nested"
    else:
        # ArviZ splits every chain in two, but wants two to begin with.
        two = series if f.shape[0] > 1 else series.reshape(len(series), 2, -1)
        rhat, kind = np.array([arviz.rhat(s, method="rank") for s in two]), "split"
    return {
        "ess_min": round(float(ess.min()), 1),
        "ess_median": round(float(np.median(ess)), 1),
        "rhat": kind,
        "rhat_max": round(float(rhat.max()), 4),
        "rhat_median": round(float(np.median(rhat)), 4),
        "rhat_share_below_1.01": round(float((rhat <= 1.01).mean()), 3),
    }


def ranks(series: np.ndarray) -> np.ndarray:
    """Rank-normalised (C, D), as Vehtari et al. 2021 (arXiv:1903.08008) have it."""
    order = series.ravel().argsort().argsort().reshape(series.shape) + 1.0
    return norm.ppf((order - 0.375) / (series.size + 0.25))


def nested_rhat(series: np.ndarray, superchain: np.ndarray) -> float:
    """√(1 + B/W) of (C, D): B between the means of superchains, W within them (Margossian et al., arXiv:2110.13017)."""
    groups = [series[superchain == k] for k in np.unique(superchain)]
    between = np.var([g.mean() for g in groups], ddof=1)
    spread = [g.mean(1).var(ddof=1) if len(g) > 1 else 0.0 for g in groups]  # between the chains of a superchain
    within = np.mean([s + g.var(1, ddof=1).mean() for s, g in zip(spread, groups, strict=True)])
    return math.sqrt(1 + between / within)


def means(f: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(mean of f (C, D, M) at each point, its Monte-Carlo standard error)."""
    ess = np.array([arviz.ess(s, method="mean") for s in np.moveaxis(f, 2, 0)])
    return f.mean((0, 1)), f.std((0, 1), ddof=1) / np.sqrt(ess)


def disagreement(one: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray], tests: int) -> dict:
    """Largest |z| of the difference of two estimates (means, standard errors), and where chance alone ends.

    tests: how many z are looked at in all; the limit is Bonferroni's at 1 %, two-sided.
    """
    z = (one[0] - other[0]) / np.hypot(one[1], other[1])
    return {"z_max": round(float(np.abs(z).max()), 2), "z_limit": round(float(norm.isf(0.005 / tests)), 2)}
