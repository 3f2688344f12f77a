"""R-hat, effective sample size and related statistics, for many series of draws at once.

    values (M, C, D): M scalars, each a series of D draws in C chains -> (M,)

Vehtari, Gelman, Simpson, Carpenter & Bürkner 2021 (arXiv:1903.08008); if many short chains share a few starting points,
the nested R-hat of Margossian et al. 2022 (arXiv:2110.13017). The results equal ArviZ's, which takes one series at a
time; they are NaN for a scalar that never varies. For chains of fewer than 50 draws ArviZ's effective sample size is
too large: with 16 or more such chains, the smaller of it and C·Var/Var(means) is taken.
"""

import warnings
from dataclasses import dataclass

import numpy as np
from scipy.fft import next_fast_len
from scipy.special import chdtrc, ndtri
from scipy.stats import f_oneway, rankdata

#: Numbers that are processed at once: few enough to stay in the processor's cache.
BLOCK = 2**19
#: Smallest number of draws per chain for split R-hat, and for an effective sample size by autocorrelations.
MIN_CHAIN_DRAWS, COUNTED = 4, 10
#: If chains have fewer than SHORT draws and there are MANY of them, the variance of their means is used as well.
SHORT, MANY = 50, 16


@dataclass(frozen=True)
class ChainStatistics:
    """Statistics of M scalars, each (M,).

    rhat      rank-normalised split R-hat, or nested R-hat: near 1 if the chains agree; usually below 1.01 is required
    rhat_p    p-value of the hypothesis that the chains agree: how often chance alone makes R-hat as large
    ess_bulk  effective sample size for the centre of the distribution, of C·D draws
    ess_tail  the smaller of the effective sample sizes for the 5 % and 95 % quantiles
    mcse      Monte-Carlo standard error of the mean, in standard deviations of the scalar
    """

    rhat: np.ndarray
    rhat_p: np.ndarray
    ess_bulk: np.ndarray
    ess_tail: np.ndarray
    mcse: np.ndarray


def chain_statistics(values: np.ndarray, superchain: np.ndarray | None = None) -> ChainStatistics:
    """All statistics of ``values`` (M, C, D); NaN where chains are too few or too short.

    superchain: (C,) the number of the starting point of each chain, if chains share some; R-hat is then nested.
    """
    chains, draws = values.shape[1:]
    statistics = ChainStatistics(*np.full((5, len(values)), np.nan))
    nested = superchain is not None and len(np.unique(superchain)) > 1
    if draws < MIN_CHAIN_DRAWS and chains < MANY and not nested:
        return statistics
    size = max(1, BLOCK // max(1, chains * draws))
    for start in range(0, len(values), size):
        block = np.asarray(values[start : start + size], dtype=np.float64)
        usable = np.isfinite(block).all((1, 2)) & (block.max((1, 2)) > block.min((1, 2)))
        if usable.any():
            rows = start + np.flatnonzero(usable)
            for name, numbers in _numbers(block[usable], superchain if nested else None).items():
                getattr(statistics, name)[rows] = numbers
    return statistics


def _numbers(v: np.ndarray, superchain: np.ndarray | None) -> dict[str, np.ndarray]:
    """{statistic: (M,)} of series that vary.   superchain: (C,) for nested R-hat, else None."""
    chains, draws = v.shape[1:]
    splits, nested, numbers = draws >= MIN_CHAIN_DRAWS, superchain is not None, {}
    halves = _split(v) if splits else v
    both = _normal_scores(halves)
    with np.errstate(divide="ignore", invalid="ignore"):
        if nested or (chains > 1 and splits):
            groups = np.tile(superchain, 1 + splits) if nested else np.arange(halves.shape[1])
            rhat = np.fmax(*(nested_rhat(s, groups) for s in both))
            # R-hat of chains with separate starting points has 1 − 1/D in place of the 1 in nested R-hat.
            numbers["rhat"] = rhat if nested else np.sqrt(np.square(rhat) - 1 / halves.shape[2])
            chance = np.minimum(*(_chance(s, superchain, chains) for s in both))
            numbers["rhat_p"] = np.minimum(2 * chance, 1.0)  # corrected for taking the larger of two R-hats
        numbers["ess_bulk"] = _counted(both[0], _normal_scores(v)[0] if chains >= MANY and draws < SHORT else v)
        tails = (v <= q[:, None, None] for q in np.quantile(v, (0.05, 0.95), axis=(1, 2)))
        numbers["ess_tail"] = np.minimum(*(_counted(_split(tail), tail) for tail in tails))
        numbers["mcse"] = _counted(halves, v) ** -0.5
    return numbers


def _chance(scores: np.ndarray, superchain: np.ndarray | None, chains: int) -> np.ndarray:
    """p-values (M,) of the hypothesis that all chains have the same mean, from normal scores (M, C or 2C halves, D).

    Up to factors, R-hat² − 1 is the F statistic of an analysis of variance. The means of superchains are compared with
    the spread of chain means within a superchain. Without superchains, the means of the halves are compared with
    variance / effective sample size of a half, whose autocorrelations are around its own mean.
    """
    means = scores.mean(2)
    if superchain is not None:
        chain_means = means.reshape(len(means), -1, chains).mean(1)  # not of their halves, which are not independent
        groups = [chain_means[:, superchain == name] for name in np.unique(superchain)]
        if min(group.shape[1] for group in groups) > 1:
            with warnings.catch_warnings(action="ignore"):  # about means that are all equal
                return f_oneway(*groups, axis=1).pvalue
    centred = scores - means[..., None]
    effective = _ess(centred) / scores.shape[1]
    between = np.square(means - means.mean(1, keepdims=True)).sum(1)
    return chdtrc(scores.shape[1] - 1, effective * between / np.square(centred).mean((1, 2)))


def _counted(halves: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Effective sample size (M,) of ``values`` (M, C, D), with autocorrelations of their ``halves`` (M, 2C, D // 2)."""
    chains, draws = values.shape[1:]
    effective = _ess(halves) if draws >= COUNTED else np.full(len(values), np.nan)
    if chains < MANY or draws >= SHORT:
        return effective
    return np.fmin(effective, chains * values.var((1, 2)) / values.mean(2).var(1, ddof=1))


def ess_mean(values: np.ndarray) -> np.ndarray:
    """Effective sample size for the mean of each of ``values`` (M, C, D), (M,)."""
    return _ess(_split(np.asarray(values, dtype=np.float64)))


def nested_rhat(values: np.ndarray, superchain: np.ndarray) -> np.ndarray:
    """√(1 + B/W) of ``values`` (M, C, D), without rank normalisation, (M,): Margossian et al. 2022, equations 6 to 8.

    B is the variance between the means of superchains. W is the variance within superchains: of the draws in a chain
    plus that between the means of chains with the same starting point, so that chains may be short.
    superchain: (C,) the number of the superchain of each chain; all superchains have equal weight.
    """
    names, membership = np.unique(superchain, return_inverse=True)
    member = (membership[:, None] == np.arange(len(names))).astype(np.float64)  # (C, K)
    count = member.sum(0)
    means = values.mean(2)  # (M, C)
    inside = values.var(2, ddof=1) if values.shape[2] > 1 else np.zeros_like(means)
    centre = means @ member / count  # (M, K)
    between = np.square(means - centre[:, membership]) @ member / np.maximum(count - 1, 1)
    within = (inside @ member / count + between).mean(1)
    return np.sqrt(1 + centre.var(1, ddof=1) / within)


def bfmi(energy: np.ndarray) -> np.ndarray:
    """Bayesian fraction of missing information of every chain: energy (C, D) in nats -> (C,).

    E[(Eₜ − Eₜ₋₁)²] / Var E (Betancourt 2016, arXiv:1604.00695): below 0.3, new momenta change the energy too little to
    reach the tails. NaN for a chain of fewer than 4 draws, or with constant energy.
    """
    energy = np.asarray(energy, dtype=np.float64)
    if energy.shape[1] < MIN_CHAIN_DRAWS:
        return np.full(len(energy), np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.square(np.diff(energy, axis=1)).mean(1) / energy.var(1, ddof=1)


def _split(values: np.ndarray) -> np.ndarray:
    """(M, C, D) -> (M, 2C, D // 2): the two halves of every chain as separate chains."""
    half = values.shape[2] // 2
    return np.concatenate([values[..., :half], values[..., values.shape[2] - half :]], 1)


def _normal_scores(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Normal quantiles of the ranks over all chains, (M, C, D), of ``values`` and of |value − median| (folded)."""
    flat = values.reshape(len(values), -1)
    both, size = (flat, np.abs(flat - np.median(flat, 1, keepdims=True))), flat.shape[1]
    return tuple(ndtri((rankdata(v, axis=1) - 0.375) / (size + 0.25)).reshape(values.shape) for v in both)


def _ess(values: np.ndarray) -> np.ndarray:
    """Effective sample size by Geyer's initial monotone sequence of the autocorrelations of (M, C, D); (M,)."""
    values = np.asarray(values, dtype=np.float64)
    num, chains, draws = values.shape
    total = float(chains * draws)
    if draws < 2:
        return np.full(num, np.nan)
    length = next_fast_len(2 * draws, real=True)
    transformed = np.fft.rfft(values - values.mean(2, keepdims=True), n=length, axis=2)
    power = (np.square(transformed.real) + np.square(transformed.imag)).mean(1)
    covariance = np.fft.irfft(power, n=length, axis=1)[:, :draws] / draws  # biased, mean over chains: (M, D)
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
    unpaired = np.where((pairs[rows, last] >= 0) | (even > 0) | (last == 0), even, 0.0)
    time = np.maximum(-1 + 2 * falling.sum(1) + unpaired, 1 / np.log10(total))
    return np.where(np.ptp(values, axis=(1, 2)) < 1e-15, total, total / time)  # constant, as an indicator may be
