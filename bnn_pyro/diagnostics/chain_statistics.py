"""R-hat, effective sample size and their kin, for many series of draws at once.

    values (M, C, D): M scalars, each a series of D draws in C chains -> (M,)

The estimators are those of Vehtari, Gelman, Simpson, Carpenter & Bürkner 2021 (arXiv:1903.08008) and, where many short
chains share a few starting points, the nested R-hat of Margossian et al. 2022 (arXiv:2110.13017). They are ArviZ's,
number for number, which takes them one series at a time: a network has hundreds of outputs, and chains may number
hundreds too. A scalar that every draw gives the same value has none of these numbers: NaN.

In chains of fewer than 10 draws there is no autocorrelation to speak of, and ArviZ counts more effective draws than
there are; in fewer than 50 it counts too many where they depend on one another. Of 16 chains and more the variance of
the chains' means tells the same without it: C·Var/Var(means), and the smaller count is taken. Fewer chains that short
have none.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from scipy.fft import next_fast_len
from scipy.special import chdtrc, fdtrc, ndtri

__all__ = ["ChainStatistics", "autocorrelation", "bfmi", "chain_statistics", "ess_mean", "nested_rhat"]

#: Numbers that are worked on at once: few enough to stay in the processor's cache.
BLOCK = 2**19
#: Draws of a chain below which it cannot be split for R-hat; below which autocorrelation tells nothing, and not enough;
#: and chains that are enough to tell by the variance of their means.
LEAST_DRAWS, COUNTED, SHORT, MANY = 4, 10, 50, 16


@dataclass(frozen=True)
class ChainStatistics:
    """Of M scalars, each (M,).

    rhat      rank-normalised split R-hat, or nested R-hat: near 1 where chains agree, below 1.01 is the usual demand
    rhat_p    p-value of "the chains agree": how often they would show as large an R-hat by chance
    ess_bulk  effective number of draws for the centre of the distribution, of C·D
    ess_tail  that for its 5 % and 95 % quantiles, the smaller one
    mcse      Monte-Carlo standard error of the mean, in standard deviations of the scalar itself
    """

    rhat: np.ndarray
    rhat_p: np.ndarray
    ess_bulk: np.ndarray
    ess_tail: np.ndarray
    mcse: np.ndarray


def chain_statistics(values: np.ndarray, superchain: np.ndarray | None = None) -> ChainStatistics:
    """All of them, of ``values`` (M, C, D).

    superchain: (C,) which starting point each chain shared with others; R-hat is then the nested one.

    R-hat is NaN for a single chain, and without superchains for fewer than 4 draws a chain; the others are NaN for
    fewer than 16 chains of fewer than 10 draws.
    """
    size = max(1, BLOCK // max(1, values.shape[1] * values.shape[2]))
    parts = [_block(values[i : i + size], superchain) for i in range(0, len(values), size)]
    return ChainStatistics(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(ChainStatistics)))


def _block(values: np.ndarray, superchain: np.ndarray | None) -> ChainStatistics:
    values = np.asarray(values, dtype=np.float64)
    num, chains, draws = values.shape
    rhat, chance, bulk, tail, mcse = (np.full(num, np.nan) for _ in range(5))
    nested = superchain is not None and len(np.unique(superchain)) > 1
    usable = np.isfinite(values).all((1, 2)) & (values.max((1, 2)) > values.min((1, 2)))
    if not usable.any() or (draws < LEAST_DRAWS and not nested and chains < MANY):
        return ChainStatistics(rhat, chance, bulk, tail, mcse)
    v = values[usable]
    halves = _split(v) if draws >= LEAST_DRAWS else v
    centred, folded = _normal_scores(halves)
    with np.errstate(divide="ignore", invalid="ignore"):
        if nested:
            groups = np.concatenate([superchain, superchain]) if draws >= LEAST_DRAWS else superchain
            rhat[usable] = np.fmax(nested_rhat(centred, groups), nested_rhat(folded, groups))
        elif chains > 1 and draws >= LEAST_DRAWS:
            rhat[usable] = np.fmax(_rhat(centred), _rhat(folded))
        if nested or (chains > 1 and draws >= LEAST_DRAWS):
            one, other = (_chance(scores, superchain if nested else None, chains) for scores in (centred, folded))
            chance[usable] = np.minimum(2 * np.minimum(one, other), 1.0)  # the larger R-hat of two was taken
        many = chains >= MANY and draws < SHORT
        bulk[usable] = _counted(centred, _normal_scores(v)[0] if many else v)
        low, high = (_counted(_split(i), i) for i in (v <= _quantile_of(v, q)[:, None, None] for q in (0.05, 0.95)))
        tail[usable], mcse[usable] = np.minimum(low, high), _counted(halves, v) ** -0.5
    return ChainStatistics(rhat, chance, bulk, tail, mcse)


def _chance(scores: np.ndarray, superchain: np.ndarray | None, chains: int) -> np.ndarray:
    """p-values (M,) of "all chains have one mean", of their normal scores (M, C or 2C halves, D).

    R-hat² − 1 is, but for factors, the F of an analysis of variance. Between superchains the yardstick is how far the
    means of chains within one are apart, however short they are. Without them it is variance / effective draws of a
    half, by autocorrelations around the half's own mean: around the mean of all, chains apart would pass for slow ones.
    """
    means = scores.mean(2)
    if superchain is not None:
        means = means.reshape(len(means), -1, chains).mean(1)  # of whole chains: halves of one are not independent
        names, which, count = np.unique(superchain, return_inverse=True, return_counts=True)
        if count.min() > 1:
            member = (which[:, None] == np.arange(len(names))).astype(np.float64)
            centre = means @ member / count
            between = (count * np.square(centre - means.mean(1, keepdims=True))).sum(1) / (len(names) - 1)
            within = np.square(means - centre[:, which]).sum(1) / (chains - len(names))
            return fdtrc(len(names) - 1, chains - len(names), between / within)
        means = scores.mean(2)
    own = scores - means[..., None]
    effective = _ess(own) / scores.shape[1]
    apart = np.square(means - means.mean(1, keepdims=True)).sum(1)
    return chdtrc(scores.shape[1] - 1, effective * apart / np.square(own).mean((1, 2)))


def _counted(halves: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Effective sample size of ``values`` (M, C, D) and, for the autocorrelations, of their split chains; (M,)."""
    chains, draws = values.shape[1:]
    found = _ess(halves) if draws >= COUNTED else np.full(len(values), np.nan)
    if chains < MANY or draws >= SHORT:
        return found
    return np.fmin(found, chains * values.var((1, 2)) / values.mean(2).var(1, ddof=1))


def ess_mean(values: np.ndarray) -> np.ndarray:
    """Effective sample size for the mean of each of ``values`` (M, C, D), of C·D; (M,)."""
    return _ess(_split(np.asarray(values, dtype=np.float64)))


def nested_rhat(values: np.ndarray, superchain: np.ndarray) -> np.ndarray:
    """√(1 + B/W) of ``values`` (M, C, D) as they are, equations 6 to 8 of Margossian et al. 2022; (M,).

    B is the variance between the means of superchains, W that within them: of draws in a chain, and between the means
    of the chains that started together. Chains may be short: W counts how far they have come apart. (C,) superchain
    numbers; superchains weigh the same.
    """
    names, which = np.unique(superchain, return_inverse=True)
    member = (which[:, None] == np.arange(len(names))).astype(np.float64)  # (C, K)
    count = member.sum(0)
    means = values.mean(2)  # (M, C)
    inside = values.var(2, ddof=1) if values.shape[2] > 1 else np.zeros_like(means)
    centre = means @ member / count  # (M, K)
    apart = np.square(means - centre[:, which]) @ member / np.maximum(count - 1, 1)
    within = (inside @ member / count + apart).mean(1)
    return np.sqrt(1 + centre.var(1, ddof=1) / within)


def bfmi(energy: np.ndarray) -> np.ndarray:
    """Bayesian fraction of missing information of every chain: energy (C, D) in nats -> (C,).

    E[(Eₜ − Eₜ₋₁)²] / Var E (Betancourt 2016, arXiv:1604.00695): below 0.3, momenta that are drawn afresh change the
    energy too little to reach the tails. NaN for a chain of fewer than 4 draws, or of one energy.
    """
    energy = np.asarray(energy, dtype=np.float64)
    if energy.shape[1] < LEAST_DRAWS:
        return np.full(len(energy), np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.square(np.diff(energy, axis=1)).mean(1) / energy.var(1, ddof=1)


def autocorrelation(values: np.ndarray, lags: int = 100) -> np.ndarray:
    """Autocorrelation of ``values`` (M, C, D), averaged over the chains: (M, lags), lag 0 first."""
    covariance = _autocovariance(np.asarray(values, dtype=np.float64))[:, :lags]
    with np.errstate(divide="ignore", invalid="ignore"):
        return covariance / covariance[:, :1]


# -- the parts -----------------------------------------------------------------------------------------------------
def _split(values: np.ndarray) -> np.ndarray:
    """(M, C, D) -> (M, 2C, D // 2): the halves of every chain as chains of their own."""
    half = values.shape[2] // 2
    return np.concatenate([values[..., :half], values[..., values.shape[2] - half :]], 1)


def _normal_scores(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The normal quantiles of the ranks over all chains, of the shape of ``values`` (M, C, D): (its own, folded ones).

    Folded: of |value − median|, which tells chains apart that have one centre and different spreads.
    """
    flat = values.reshape(len(values), -1)
    order = flat.argsort(1)
    ordered = np.take_along_axis(flat, order, 1)
    folded = np.abs(ordered - _quantile(ordered, 0.5)[:, None])  # falls, then rises: a merge sort takes one pass
    again = folded.argsort(1, kind="stable")
    pair = ((order, ordered), (np.take_along_axis(order, again, 1), np.take_along_axis(folded, again, 1)))
    centred, spread = (_scores(*sorted_).reshape(values.shape) for sorted_ in pair)
    return centred, spread


def _scores(order: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    """Of rows whose values in ascending order are ``ordered``, and stood at ``order``: (M, S), like both.

    Equal values share their mean rank, as is common among many draws in single precision.
    """
    size = ordered.shape[1]
    half_ranks = ndtri((np.arange(2 * size - 1) / 2 + 1 - 0.375) / (size + 0.25))  # of twice the rank, from 0
    place = np.arange(size)
    differs = np.ones((len(ordered), size + 1), dtype=bool)
    np.not_equal(ordered[:, 1:], ordered[:, :-1], out=differs[:, 1:-1])
    found = np.broadcast_to(half_ranks[::2], ordered.shape)
    tied = ~differs.all(1)
    if tied.any():
        first = np.maximum.accumulate(np.where(differs[tied, :-1], place, 0), 1)
        last = np.minimum.accumulate(np.where(differs[tied, 1:], place, size)[:, ::-1], 1)[:, ::-1]
        found = found.copy()
        found[tied] = half_ranks[first + last]
    scores = np.empty_like(ordered)
    np.put_along_axis(scores, order, found, 1)
    return scores


def _quantile(ordered: np.ndarray, level: float) -> np.ndarray:
    """Of rows in ascending order, (M, S) -> (M,); linear between neighbours."""
    place = level * (ordered.shape[1] - 1)
    low = int(place)
    high = min(low + 1, ordered.shape[1] - 1)
    return (1 - place + low) * ordered[:, low] + (place - low) * ordered[:, high]


def _quantile_of(values: np.ndarray, level: float) -> np.ndarray:
    flat = values.reshape(len(values), -1)
    place = level * (flat.shape[1] - 1)
    low = int(place)
    high = min(low + 1, flat.shape[1] - 1)
    two = np.partition(flat, (low, high), axis=1)
    return (1 - place + low) * two[:, low] + (place - low) * two[:, high]


def _rhat(values: np.ndarray) -> np.ndarray:
    draws = values.shape[2]
    between = draws * values.mean(2).var(1, ddof=1)
    within = values.var(2, ddof=1).mean(1)
    return np.sqrt((between / within + draws - 1) / draws)


def _autocovariance(values: np.ndarray) -> np.ndarray:
    """Mean over the chains of the biased autocovariance: (M, C, D) -> (M, D)."""
    draws = values.shape[2]
    length = next_fast_len(2 * draws, real=True)
    transformed = np.fft.rfft(values - values.mean(2, keepdims=True), n=length, axis=2)
    power = (np.square(transformed.real) + np.square(transformed.imag)).mean(1)
    return np.fft.irfft(power, n=length, axis=1)[:, :draws] / draws


def _ess(values: np.ndarray) -> np.ndarray:
    """Effective sample size by Geyer's initial monotone sequence of the autocorrelations of (M, C, D); (M,)."""
    values = np.asarray(values, dtype=np.float64)
    num, chains, draws = values.shape
    total = float(chains * draws)
    if draws < 2:
        return np.full(num, np.nan)
    covariance = _autocovariance(values)
    within = covariance[:, 0] * draws / (draws - 1)
    overall = covariance[:, 0] + (values.mean(2).var(1, ddof=1) if chains > 1 else 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        rho = 1 - (within[:, None] - covariance) / overall[:, None]
    rho[:, 0] = 1.0
    pairs = rho[:, 0 : draws - 1 : 2] + rho[:, 1:draws:2]  # (M, K): positive and falling in a reversible chain
    most = max(0, min(pairs.shape[1] - 1, -(-(draws - 2) // 2) - 1))
    ended = pairs[:, : most + 1] <= 0
    last = np.where(ended.any(1), ended.argmax(1), most)
    falling = np.minimum.accumulate(pairs, 1) * (np.arange(pairs.shape[1]) < last[:, None])
    rows = np.arange(num)
    even = rho[rows, 2 * last]
    odd_one_out = np.where((pairs[rows, last] >= 0) | (even > 0) | (last == 0), even, 0.0)
    time = np.maximum(-1 + 2 * falling.sum(1) + odd_one_out, 1 / np.log10(total))
    constant = values.max((1, 2)) - values.min((1, 2)) < 1e-15  # an indicator that is always 1
    return np.where(constant, total, total / time)
