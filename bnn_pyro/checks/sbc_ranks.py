"""Tests of whether ranks of simulated quantities among posterior draws given simulated data are uniform.

    r = #{s : f(w_s) < f(w*)} + ties broken at random,   s = 1 … L        uniform on 0 … L if the posterior is right

Talts et al. 2018, arXiv:1804.06788. The statistic is that of Säilynoja, Bürkner & Vehtari 2022, arXiv:2103.10522:

    N_i = #{r < i} ~ Binomial(R, i/(L+1)),  i = 1 … L        γ = min_i 2 min(P(N_i ≤ n_i), P(N_i ≥ n_i))

Its distribution, which they simulate, is computed exactly here, by a sum over the paths of N inside a band, a chain of
Poisson increments with a fixed total. The ECDF detects every kind of error, but with little power. Two further tests
detect the most common errors with a quarter of the ranks: the sum of normal scores z = Φ⁻¹((r + ½)/(L + 1)), for bias,
and the sum of their squares, for width. They are exact, too.
"""

from functools import lru_cache, partial

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft
from scipy.special import ndtr, ndtri
from scipy.stats import binom, poisson

#: Levels of the central intervals whose coverage is computed.
LEVELS = (0.5, 0.8, 0.95)
#: Smallest p-value that is reported.
SMALLEST = 1e-12


def ranks(truth: np.ndarray, draws: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Rank of each ``truth`` (…,) among its ``draws`` (…, L): whole numbers 0 … L; ties are broken at random."""
    truth = np.asarray(truth)[..., None]
    below, equal = (draws < truth).sum(-1), (draws == truth).sum(-1)
    return below + generator.integers(0, equal, endpoint=True)


def p_uniform(ranks: np.ndarray, num: int) -> float:
    """p-value of ranks (R,) on 0 … ``num``: the probability that R uniform ranks have a γ that is as small."""
    total = len(ranks)
    gamma = _tails(total, num)[np.arange(num), np.bincount(ranks, minlength=num + 1)[:-1].cumsum()].min()
    return float(max(SMALLEST, 1.0 - _inside(*_limits(gamma, total, num), total)))


@lru_cache(maxsize=256)
def band(total: int, num: int, chance: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(u, low, high), each (num + 2,): a simultaneous band of the ECDF of ``total`` uniform ranks on 0 … ``num``.

    At u_i = i/(num + 1) the ECDF lies between low_i and high_i, for all i, except with a probability of ``chance``.
    """
    below, above = 0.0, 1.0  # bounds of γ: at ``below`` the band is wide enough, at ``above`` it is not
    for _ in range(60):
        middle = 0.5 * (below + above)
        fits = 1.0 - _inside(*_limits(middle, total, num), total) <= chance
        below, above = (middle, above) if fits else (below, middle)
    low, high = _limits(below, total, num)
    return np.arange(num + 2) / (num + 1), np.r_[0, low, total] / total, np.r_[0, high, total] / total


def width(ranks: np.ndarray, num: int) -> np.ndarray:
    """Width of the draws relative to the correct width, estimated from ranks (…, R) on 0 … ``num``; (…,).

    1/rms of the normal scores over that of uniform ranks. It is biased towards 1 (½ is estimated as 0.6), because ranks
    are bounded by 0 and ``num``.
    """
    z = normal_scores(np.arange(num + 1), num)
    return np.sqrt(np.square(z).mean() / np.square(z[ranks]).mean(-1))


def normal_scores(ranks: np.ndarray, num: int) -> np.ndarray:
    """Φ⁻¹((r + ½)/(num + 1)) of ranks r (…,), of the same shape; nearly standard Normal if the ranks are uniform."""
    return ndtri((np.asarray(ranks) + 0.5) / (num + 1))


def scores_beside(sample: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Normal scores (C, M) of values (C, M), by their ranks in a sorted sample (S, M)."""
    pairs, num = list(zip(sample.T, values.T, strict=True)), len(sample)
    below, upto = (np.stack([np.searchsorted(s, v, side) for s, v in pairs], 1) for side in ("left", "right"))
    return ndtri((0.5 * (below + upto) / num).clip(0.5 / num, 1 - 0.5 / num))


def covered(ranks: np.ndarray, num: int, level: float) -> np.ndarray:
    """Whether the central interval of ``level`` covers the truth, by its rank (…,) on 0 … ``num``.

    Rank r stands for [r, r+1]/(num + 1), of which the share inside the interval is returned, so that the mean over
    uniform ranks is exactly ``level``.
    """
    low = 0.5 * (1 - level) * (num + 1)
    return np.clip(np.minimum(ranks + 1, num + 1 - low) - np.maximum(ranks, low), 0.0, 1.0)


@lru_cache(maxsize=32)
def _sum(total: int, num: int, power: int) -> tuple[np.ndarray, np.ndarray]:
    """(scores of ranks 0 … ``num``, rounded to whole numbers 0 … 2,000; exact cdf of the sum of ``total`` of them)."""
    z = normal_scores(np.arange(num + 1), num) ** power
    scores = np.rint((z - z.min()) * (2000 / max(z.max() - z.min(), 1e-300))).astype(int)
    length = total * scores.max() + 1
    padded = next_fast_len(length, real=True)
    return scores, irfft(rfft(np.bincount(scores, minlength=padded) / (num + 1)) ** total, padded)[:length].cumsum()


def _p_of_sum(ranks: np.ndarray, num: int, power: int) -> float:
    scores, below = _sum(len(ranks), num, power)
    at = scores[ranks].sum()
    return float(min(1.0, max(SMALLEST, 2 * min(below[at], 1.0 - (below[at - 1] if at else 0.0)))))


#: Two-sided p-values of ranks (R,) on 0 … ``num``: of the sum of their normal scores, which detects a truth above or
#: below the draws, and of the sum of the squared scores, which detects draws that are too narrow or too wide.
p_location, p_width = partial(_p_of_sum, power=1), partial(_p_of_sum, power=2)


def seen(total: int, num: int, chance: float) -> tuple[float, float]:
    """Relative widths of Normal draws, below and above 1, beyond which ``p_width`` < chance with a power of about 0.8.

    For ``total`` data sets and ``num`` draws each; 0 or infinite if the width would be below 0.2 or above 5.
    """
    scores, below = _sum(total, num, 2)
    low, high = np.searchsorted(below, [chance / 2, 1 - chance / 2])
    widths, truths = np.geomspace(0.2, 5, 160), ndtri((np.arange(100) + 0.5) / 100)
    below_truth = ndtr(truths[:, None] / widths[:, None, None])
    chances = binom.pmf(np.arange(num + 1), num, below_truth).mean(1)  # of each rank, (widths, num + 1)
    mean = chances @ scores
    mean, sd = total * mean, np.sqrt(total * (chances @ scores**2 - mean**2))
    noticed = widths[ndtr((low - mean) / sd) + ndtr((mean - high) / sd) >= 0.8]
    return noticed[noticed < 1].max(initial=0.0), noticed[noticed > 1].min(initial=np.inf)


@lru_cache(maxsize=32)
def _tails(total: int, num: int) -> np.ndarray:
    """2 min(P(N ≤ n), P(N ≥ n)) of N ~ Binomial(total, i/(num + 1)), (num, total + 1)."""
    n, share = np.arange(total + 1), np.arange(1, num + 1)[:, None] / (num + 1)
    return 2 * np.minimum(binom.cdf(n, total, share), binom.sf(n - 1, total, share))


def _limits(gamma: float, total: int, num: int) -> tuple[np.ndarray, np.ndarray]:
    """The smallest and the largest n at each i, (num,), with tail probabilities above γ (not equal to it)."""
    inside = _tails(total, num) > gamma * (1 + 1e-9)
    any_inside = inside.any(1)
    low = np.where(any_inside, inside.argmax(1), 1)
    return low, np.where(any_inside, total - inside[:, ::-1].argmax(1), 0)  # low above high: nothing is inside


def _inside(low: np.ndarray, high: np.ndarray, total: int) -> float:
    """P(low_i ≤ N_i ≤ high_i for all i)."""
    if (low > high).any():
        return 0.0
    increment = poisson.pmf(np.arange(total + 1), total / (len(low) + 1))
    path, first = np.ones(1), 0  # P(N = first, first + 1, … and N inside the band so far)
    for least, most in zip(np.r_[low, total], np.r_[high, total], strict=True):
        path = np.convolve(path, increment[: most - first + 1])[: most - first + 1]
        path, first = path[max(0, least - first) :], max(first, least)
    return float(path[0] / poisson.pmf(total, total))
