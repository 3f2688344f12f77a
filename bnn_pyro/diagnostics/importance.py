"""Importance weights: the distance of q(w) from the posterior, and predictions of each row without that row.

    log r(w) = log p(y | x, w)/T + log p(w) − log q(w)            k̂ of r: is q close enough to the posterior?
    log r_i(w) = [log r(w), for a q] − log p(y_i | x_i, w)/T      leaves row i out: PSIS-LOO, and LOO-PIT

k̂ is the shape of the Pareto tail of the weights (Yao, Vehtari, Simpson & Gelman 2018, arXiv:1802.02538): above 0.7,
sums of the weights are unreliable. Leave-one-out by Vehtari, Gelman & Gabry 2017 (arXiv:1507.04544); for draws of an
approximation by Magnusson, Andersen, Jonasson & Vehtari 2019 (arXiv:1904.10679), which requires k̂ of q below 0.7.
"""

import math
import warnings
from functools import cache
from importlib.metadata import version
from typing import NamedTuple

import numpy as np
import pyro
import pyro.poutine as poutine
import torch
from pyro.distributions import Delta
from scipy.special import logsumexp
from scipy.stats import kstest
from torch import Tensor

from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.diagnostics.convergence import ess_mean
from bnn_pyro.diagnostics.draws import WORK, as_chain, even, rows_within, sized, thinned, walk
from bnn_pyro.inference import METHODS
from bnn_pyro.inference.log_joint import log_joints
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.guides import DroppedColumns
from bnn_pyro.parts.nets import in_mode
from bnn_pyro.parts.weights import base_of
from bnn_pyro.posterior import Posterior, split_frozen

#: Largest k̂ for which sums of importance weights are reliable.
GOOD_K = 0.7
#: Smallest number of draws to whose tail a Pareto distribution is fitted.
MIN_TAIL = 25
#: Largest and smallest number of draws for k̂, and largest number of weights in all of them, 200 MB.
MAX_DRAWS, MIN_DRAWS, MAX_WEIGHTS = 2000, 100, 5e7
#: Leave-one-out: largest number of draws, and of draws × rows.
LOO_DRAWS, LOO_NUMBERS = 4000, 1e7
#: Predictive check: largest numbers of rows and draws, smallest number of data sets, number of sets in the figure.
CHECK_ROWS, CHECK_DRAWS, MIN_SETS, SHOWN_SETS = 2000, 400, 100, 50


class NoWeights(Exception):
    """There are no importance weights, for the reason in the message."""


class Loo(NamedTuple):
    """Leave-one-out cross-validation by importance sampling, of M training rows.

    rows      (M,) indices of the training rows; all of them unless that would take too long
    elpd      (M,) log p(y_i | x_i, all other rows), nats
    p_loo     (M,) log p(y_i | x_i, all rows) − elpd_i: the contribution of the row itself
    pareto_k  (M,) k̂ of the row's weights: above 0.7 its elpd is unreliable
    pit       (M,) P(Y ≤ y_i | x_i, all other rows), uniform if the model is right; randomised for discrete targets
    """

    rows: np.ndarray
    elpd: np.ndarray
    p_loo: np.ndarray
    pareto_k: np.ndarray
    pit: np.ndarray

    @property
    def standard_error(self) -> float:
        """Standard error of the sum of ``elpd``, over rows."""
        return float(np.sqrt(len(self.elpd)) * self.elpd.std(ddof=1)) if len(self.elpd) > 1 else float("nan")


def psis(log_weights: np.ndarray, relative_efficiency: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """(smoothed log weights (N, S), each row normalised; Pareto k̂ (N,)) of importance weights (N, S), in nats.

    Vehtari, Simpson, Gelman, Yao & Gabry 2024 (arXiv:1507.02646), by the installed ArviZ. k̂ is 0 if the largest weights
    are all equal; NaN for fewer than 25 draws, and if a weight is not finite.

    relative_efficiency: effective sample size of Markov chains per draw; 1 for independent draws.
    """
    log_weights = np.asarray(log_weights, dtype=np.float64)
    k = np.full(len(log_weights), np.nan)
    with warnings.catch_warnings(action="ignore"), np.errstate(all="ignore"):  # ArviZ 0.23 announces 1.0 once a day
        smoothed = log_weights - logsumexp(log_weights, 1, keepdims=True)
        if log_weights.shape[1] < MIN_TAIL:
            return smoothed, k
        finite = np.isfinite(log_weights).all(1)
        tail = -(-log_weights.shape[1] // 5) + 1
        top = np.partition(np.where(finite[:, None], log_weights, 0.0), -tail, axis=1)[:, -tail:]
        varied = np.ptp(top, axis=1) > 1e-10
        k[finite & ~varied] = 0.0
        for row in np.flatnonzero(finite & varied):
            smoothed[row], k[row] = _smooth(log_weights[row].copy(), relative_efficiency)
    return smoothed, k


@cache
def is_arviz_0() -> bool:
    """Whether the installed ArviZ is 0.x, as on Python 3.11; nearly all names are different in 1.x."""
    return version("arviz").startswith("0.")


def _smooth(row: np.ndarray, efficiency: float) -> tuple[np.ndarray, float]:
    """(S,) log weights -> (smoothed and normalised ones, k̂); ArviZ 1.x takes minus the log weights."""
    if is_arviz_0():
        import arviz

        return arviz.psislw(row, reff=efficiency)
    from arviz_stats.base import array_stats

    return array_stats.psislw(-row, r_eff=efficiency)


def temperature_of(posterior: Posterior) -> float:
    """T: the draws are of p(y | x, w)^(1/T) p(w)."""
    return float(posterior.provenance.get("method_settings", {}).get("temperature", 1.0))


def proper_prior(posterior: Posterior, data: Dataset) -> str:
    """ "" if the prior can be sampled and was used in the fit, else the reason why not."""
    if getattr(METHODS.get(posterior.provenance.get("method")), "prior_weight", 1.0) == 0.0:
        return "the weights were fitted without their prior"
    try:
        with torch.no_grad(), isolated(0), in_mode(posterior.model, training=False):
            model, x = split_frozen(posterior.model, data.x_train[:1].to(posterior.device))
            model(x)
    except NotImplementedError:
        return "the prior is improper and cannot be sampled"
    return ""


def importance_weights(posterior: Posterior, data: Dataset, seed: int = 0) -> tuple[Posterior, np.ndarray]:
    """(draws of the guide, log r (S,) in nats up to a constant). Raises NoWeights if it has none, or is too large."""
    if posterior.chains is not None:
        raise NoWeights("the draws are not from an approximation")
    if reason := proper_prior(posterior, data):
        raise NoWeights(f"{reason}, so there is no posterior to compare with")
    weights = posterior.num_weights
    num = int(min(MAX_DRAWS, WORK / (weights * len(data.x_train)), MAX_WEIGHTS / weights))
    if num < MIN_DRAWS:
        work = f"{len(data.x_train):,} rows × {weights:,} weights × {MIN_DRAWS} draws would take too long here"
        raise NoWeights(f"{work}; for a network of this size k̂ is above 0.7 almost always")
    log_q, draws = torch.zeros(num, dtype=torch.float64), {}
    with isolated(seed), torch.no_grad():
        with poutine.trace() as trace, pyro.plate("draws", num, dim=-1):
            posterior.guide(None)
        for name, node in trace.trace.nodes.items():
            if node["type"] == "sample" and not poutine.util.site_is_subsample(node):
                draws |= {} if node["infer"].get("is_auxiliary") else {name: node["value"]}
                log_q += _density(node).cpu()
    chain = as_chain(posterior, draws)
    with torch.no_grad(), isolated(seed), in_mode(chain.model, training=False):
        model, x = split_frozen(chain.model, data.x_train[:1].to(chain.device))
        log_prior, _ = log_joints(model, draws, x, data.y_train[:1].to(chain.device))
    likelihood = torch.zeros(num, dtype=torch.float64)
    for rows, prediction in walk(chain, data.x_train, num):
        likelihood += prediction.log_probs(data.y_train[rows].cpu()).double().sum(1)
    return chain, (likelihood / temperature_of(posterior) + log_prior.cpu().double() - log_q).numpy()


def _density(node: dict) -> Tensor:
    """log q of one site, (S,)."""
    try:
        if isinstance(base_of(node["fn"]), Delta | DroppedColumns):  # log_prob of a probability mass
            raise NotImplementedError
        term = node["fn"].log_prob(node["value"])
    except NotImplementedError:
        raise NoWeights("its draws have no density (some weights are exactly 0, or fixed), so it has no k̂") from None
    return term.double().reshape(term.shape[0], -1).sum(1)


def leave_one_out(posterior: Posterior, data: Dataset, log_weights: np.ndarray | None = None, seed: int = 0) -> Loo:
    """PSIS-LOO of the training rows, or of some evenly spaced rows of a large set.

    log_weights: (S,) log r of the stored draws, if they are from an approximation; None for Markov chains.
    """
    data.schema.need_one_target("leave-one-out")
    posterior = thinned(posterior, LOO_DRAWS)
    chains, draws = sized(posterior)
    num, temperature = chains * draws, temperature_of(posterior)
    rows = rows_within(posterior, len(data.x_train), num, LOO_NUMBERS)
    x, y = data.x_train[rows], data.y_train[rows].cpu()
    u = np.random.default_rng(seed).random(len(rows))
    of_draws = np.full(num, -np.log(num)) if log_weights is None else psis(log_weights[None])[0][0]
    columns = []
    for part, prediction in walk(posterior, x, num):
        terms = prediction.log_probs(y[part]).double().numpy().T  # (B, S)
        efficiency = 1.0
        if log_weights is None and draws > 3:
            relative = ess_mean(np.exp(terms - terms.max(1, keepdims=True)).reshape(-1, chains, draws)) / num
            efficiency = float(np.nanmean(relative)) if np.isfinite(relative).any() else 1.0
        smooth, k = psis(-terms / temperature + (0.0 if log_weights is None else log_weights), efficiency)
        elpd, everything = logsumexp(smooth + terms, 1), logsumexp(of_draws + terms, 1)
        below, at = (share.numpy().T for share in prediction.component_below(y[part]))
        weights = np.exp(smooth)
        pit = (weights * below).sum(1) + u[part] * (weights * at).sum(1)
        columns.append((elpd, everything - elpd, k, pit.clip(0.0, 1.0)))
    return Loo(rows, *(np.concatenate(column) for column in zip(*columns, strict=True)))


def replicate(posterior: Posterior, data: Dataset, seed: int = 0) -> tuple[np.ndarray, np.ndarray, float]:
    """Posterior-predictive check by a realised discrepancy T(y, w) (Gelman, Meng & Stern 1996, Stat. Sinica 6:733).

    (data sets drawn from the fitted model (R, M) at M training rows, the observed one (M,), p: the share of drawn sets
    with a larger T. p near 0: the data fit worse than data from the model; near 1: they fit better).
    T is −log p(y | x, w) for labels. In regression a learned noise would always make that fit, so T is the largest
    |y − mean| / noise, which finds outliers.
    """
    posterior = thinned(posterior, CHECK_DRAWS)
    num = math.prod(sized(posterior, CHECK_DRAWS))
    rows = even(len(data.x_train), min(CHECK_ROWS, len(rows_within(posterior, len(data.x_train), num, 1e7))))
    y, repeats = data.y_train[rows].cpu(), max(1, -(-MIN_SETS // num))
    observed, made, samples = torch.zeros(num), torch.zeros(repeats, num), []
    with isolated(seed + 1):  # other random numbers than those of the weights
        for part, prediction in walk(posterior, data.x_train[rows], num, seed):
            observed = prediction.discrepancy(y[part], observed)
            new = [prediction.components.sample() for _ in range(repeats)]
            made = torch.stack([prediction.discrepancy(n, m) for n, m in zip(new, made, strict=True)])
            samples.append(torch.cat(new)[even(num * repeats, SHOWN_SETS)])
    p_value = (made > observed).double().mean() + 0.5 * (made == observed).double().mean()
    return torch.cat(samples, 1).numpy(), y.numpy(), float(p_value)


def uniformity(pit: np.ndarray) -> float:
    """Kolmogorov-Smirnov p-value of uniform probability integral transforms (M,); NaN for fewer than 10."""
    return float(kstest(pit, "uniform").pvalue) if len(pit) >= 10 and np.isfinite(pit).all() else math.nan
