"""Ranks of simulated quantities among the draws given simulated data: are they as uniform as chance lets them be?

    r = #{s : f(w_s) < f(w*)} + ties broken at random,   s = 1 … L        uniform on 0 … L where the posterior is right

Talts et al. 2018, arXiv:1804.06788. The statistic is that of Säilynoja, Bürkner & Vehtari 2022, arXiv:2103.10522:

    N_i = #{r < i} ~ Binomial(R, i/(L+1)),  i = 1 … L        γ = min_i 2 min(P(N_i ≤ n_i), P(N_i ≥ n_i))

What they simulate is exact here: paths of N inside a band are summed over, as a chain of Poisson increments given their
total. An ECDF finds any kind of fault, and so none of them early. Two sums beside it find the common ones with a
quarter of the ranks: of normal scores z = Φ⁻¹((r + ½)/(L + 1)), for bias, and their squares, for width; also exact.
"""

from functools import lru_cache, partial

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft
from scipy.special import ndtr, ndtri
from scipy.stats import binom, poisson

#: Central intervals whose coverage is counted.
LEVELS = (0.5, 0.8, 0.95)
#: p-values below are told as this.
SMALLEST = 1e-12
#: Steps between the smallest and the largest score: the sum of rounded scores has an exact distribution.
STEPS = 2000


def ranks(truth: np.ndarray, draws: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Rank of each ``truth`` (…,) among its ``draws`` (…, L): whole numbers 0 … L; ties by lot."""
    truth = np.asarray(truth)[..., None]
    below, equal = (draws < truth).sum(-1), (draws == truth).sum(-1)
    return below + generator.integers(0, equal, endpoint=True)


def p_uniform(ranks: np.ndarray, num: int) -> float:
    """The p-value of R ranks (R,) on 0 … ``num``: the chance that R uniform ones have as small a γ."""
    total = len(ranks)
    gamma = _tails(total, num)[np.arange(num), np.bincount(ranks, minlength=num + 1)[:-1].cumsum()].min()
    return float(max(SMALLEST, 1.0 - _inside(*_limits(gamma, total, num), total)))


@lru_cache(maxsize=256)
def band(total: int, num: int, chance: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(u, low, high), each (num + 2,): where the empirical distribution function of ``total`` uniform ranks stays.

    At u_i = i/(num + 1) it lies between low_i and high_i, at all i at once but for a share of at most ``chance``.
    """
    below, above = 0.0, 1.0  # γ: with the lower one the band is wide enough, with the upper one it is not
    for _ in range(60):
        middle = 0.5 * (below + above)
        fits = 1.0 - _inside(*_limits(middle, total, num), total) <= chance
        below, above = (middle, above) if fits else (below, middle)
    low, high = _limits(below, total, num)
    return np.arange(num + 2) / (num + 1), np.r_[0, low, total] / total, np.r_[0, high, total] / total


def ecdf_difference(ranks: np.ndarray, num: int) -> np.ndarray:
    """Empirical minus uniform distribution function of ranks (R,) on 0 … ``num``, at i/(num + 1); (num + 2,)."""
    return np.r_[0.0, np.bincount(ranks, minlength=num + 1).cumsum() / len(ranks)] - np.arange(num + 2) / (num + 1)


def width(ranks: np.ndarray, num: int) -> np.ndarray:
    """How wide the draws lie, as a share of what is right, by ranks (…, R) on 0 … ``num``; (…,).

    1/rms of the normal scores, over that of uniform ranks. (They end at 0 and ``num``: ½ comes out as 0.6.)
    """
    z = normal_scores(np.arange(num + 1), num)
    return np.sqrt(np.square(z).mean() / np.square(z[ranks]).mean(-1))


def normal_scores(ranks: np.ndarray, num: int) -> np.ndarray:
    """Φ⁻¹((r + ½)/(num + 1)) of ranks r (…,), of their shape: standard Normal, nearly, where they are uniform."""
    return ndtri((np.asarray(ranks) + 0.5) / (num + 1))


def scores_beside(sample: np.ndarray, values: np.ndarray) -> np.ndarray:
    """(C, M) -> (C, M) as the standard Normal has them, whose tails are light: by ranks in a sorted sample (S, M)."""
    pairs, num = list(zip(sample.T, values.T, strict=True)), len(sample)
    below, upto = (np.stack([np.searchsorted(s, v, side) for s, v in pairs], 1) for side in ("left", "right"))
    return ndtri((0.5 * (below + upto) / num).clip(0.5 / num, 1 - 0.5 / num))


def covered(ranks: np.ndarray, num: int, level: float) -> np.ndarray:
    """Whether the central interval of ``level`` holds the truth, by its rank (…,) on 0 … ``num``.

    Rank r is [r, r+1]/(num + 1), and counts by its share inside: of uniform ranks, exactly ``level`` are covered.
    """
    low = 0.5 * (1 - level) * (num + 1)
    return np.clip(np.minimum(ranks + 1, num + 1 - low) - np.maximum(ranks, low), 0.0, 1.0)


@lru_cache(maxsize=32)
def _sum(total: int, num: int, power: int) -> tuple[np.ndarray, np.ndarray]:
    """(scores of ranks 0 … ``num`` as whole numbers, distribution function of the sum of ``total`` of them)."""
    z = normal_scores(np.arange(num + 1), num) ** power
    scores = np.rint((z - z.min()) * (STEPS / max(z.max() - z.min(), 1e-300))).astype(int)
    length = total * scores.max() + 1
    padded = next_fast_len(length, real=True)
    return scores, irfft(rfft(np.bincount(scores, minlength=padded) / (num + 1)) ** total, padded)[:length].cumsum()


def _p_of_sum(ranks: np.ndarray, num: int, power: int) -> float:
    scores, below = _sum(len(ranks), num, power)
    at = scores[ranks].sum()
    return float(min(1.0, max(SMALLEST, 2 * min(below[at], 1.0 - (below[at - 1] if at else 0.0)))))


#: The two-sided p-values of the sum of the normal scores of ranks (R,) on 0 … ``num``: is the truth in the middle of
#: the draws? And of that of their squares: large where draws lie too close together, small where too far apart.
p_location, p_width = partial(_p_of_sum, power=1), partial(_p_of_sum, power=2)


def seen(total: int, num: int, chance: float) -> tuple[float, float]:
    """Widths of Normal draws, one below 1 and one above, beyond which ``p_width`` < chance with a power of 0.8, about.

    Of ``total`` data sets and ``num`` draws each; 0 or infinite where it is below 0.2 or above 5.
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
    """The least and the largest n at each i, (num,), whose tails are above γ: equal ones count as outside."""
    inside = _tails(total, num) > gamma * (1 + 1e-9)
    some = inside.any(1)
    low = np.where(some, inside.argmax(1), 1)
    return low, np.where(some, total - inside[:, ::-1].argmax(1), 0)  # low above high: nothing is inside


def _inside(low: np.ndarray, high: np.ndarray, total: int) -> float:
    """P(low_i ≤ N_i ≤ high_i for all i)."""
    if (low > high).any():
        return 0.0
    increment = poisson.pmf(np.arange(total + 1), total / (len(low) + 1))
    path, first = np.ones(1), 0  # P(N = first, first + 1, … and inside so far)
    for least, most in zip(np.r_[low, total], np.r_[high, total], strict=True):
        path = np.convolve(path, increment[: most - first + 1])[: most - first + 1]
        path, first = path[max(0, least - first) :], max(first, least)
    return float(path[0] / poisson.pmf(total, total))
