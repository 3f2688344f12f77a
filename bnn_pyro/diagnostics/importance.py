"""What importance weights tell: how far q(w) is from the posterior, and how each row is predicted without it.

    log r(w) = log p(y | x, w)/T + log p(w) − log q(w)            k̂ of r: is q close enough to stand for the posterior?
    log r_i(w) = [log r(w), for a q] − log p(y_i | x_i, w)/T      leaves row i out: PSIS-LOO, and LOO-PIT

k̂ is the shape of the Pareto tail of the weights (Yao, Vehtari, Simpson & Gelman 2018, arXiv:1802.02538): below 0.5
very good, above 0.7 sums of these weights fail. Leave-one-out by Vehtari, Gelman & Gabry 2017 (arXiv:1507.04544); for
draws of an approximation with its weights, by Magnusson, Andersen, Jonasson & Vehtari 2019 (arXiv:1904.10679), which is
valid where k̂ of q is below 0.7 itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyro
import pyro.poutine as poutine
import torch
from pyro.distributions import Delta, Independent
from scipy.special import kolmogorov
from torch import Tensor

from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.diagnostics.arviz_bridge import psis
from bnn_pyro.diagnostics.chain_statistics import ess_mean
from bnn_pyro.diagnostics.draws import WORK, held, rows_at_hand, sized, thinned, walk, weight_count
from bnn_pyro.inference import METHODS
from bnn_pyro.inference.log_joint import log_joints
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.backbone import once
from bnn_pyro.parts.dropout import DroppedColumns
from bnn_pyro.parts.nets import in_mode
from bnn_pyro.posterior import Posterior

__all__ = [
    "GOOD_K",
    "Loo",
    "NoWeights",
    "importance_weights",
    "leave_one_out",
    "proper_prior",
    "temperature_of",
    "uniformity",
]

#: Above it, sums of importance weights cannot be trusted.
GOOD_K = 0.7
#: Draws that k̂ is estimated from, and that leave-one-out takes, at most; and fewer than which are too few for k̂.
MOST_DRAWS, LEAST_DRAWS = 2000, 100
LOO_DRAWS, LOO_NUMBERS = 4000, 1e7
#: Weights of all draws together that are held for k̂, 200 MB.
HELD = 5e7


class NoWeights(Exception):
    """Says in a sentence why there are no importance weights."""


@dataclass(frozen=True)
class Loo:
    """Leave-one-out cross-validation by importance sampling, of M training rows.

    rows      (M,) which of the training rows; all of them where that is little work
    elpd      (M,) log p(y_i | x_i, all other rows), nats
    p_loo     (M,) log p(y_i | x_i, all rows) − elpd_i: what the row itself adds
    pareto_k  (M,) k̂ of the row's weights: above 0.7 its elpd cannot be trusted
    pit       (M,) P(Y ≤ y_i | x_i, all other rows), uniform where the model is right; for labels, a label's
              probability is split at random, as for any discrete variable
    """

    rows: np.ndarray
    elpd: np.ndarray
    p_loo: np.ndarray
    pareto_k: np.ndarray
    pit: np.ndarray

    @property
    def standard_error(self) -> float:
        """Of the sum of ``elpd``, over rows."""
        return float(np.sqrt(len(self.elpd)) * self.elpd.std(ddof=1)) if len(self.elpd) > 1 else float("nan")


def temperature_of(posterior: Posterior) -> float:
    """T: the draws are of p(y | x, w)^(1/T) p(w)."""
    return float(posterior.provenance.get("method_settings", {}).get("temperature", 1.0))


def proper_prior(posterior: Posterior, data: Dataset) -> str:
    """ "" where the prior has samples and was used, else why there are none."""
    if getattr(METHODS.get(posterior.provenance.get("method")), "prior_weight", 1.0) == 0.0:
        return "the weights were fitted without their prior"
    with torch.no_grad(), isolated(0), in_mode(posterior.model, training=False):
        model, x = once(posterior.model, data.x_train[:1].to(posterior.device))
        try:
            model(x)
        except NotImplementedError:
            return "the prior is improper and has no samples"
    return ""


def importance_weights(posterior: Posterior, data: Dataset, seed: int = 0) -> tuple[Posterior, np.ndarray]:
    """(draws of the guide as one chain, log r (S,) in nats up to a constant), S as many as take seconds.

    Raises NoWeights where q has no density, the prior is improper, or the problem is too large.
    """
    if posterior.chains is not None:
        raise NoWeights("the draws are no approximation's")
    if reason := proper_prior(posterior, data):
        raise NoWeights(f"{reason}, so there is no posterior to compare with")
    num = int(min(MOST_DRAWS, WORK / (weight_count(posterior) * len(data.x_train)), HELD / weight_count(posterior)))
    if num < LEAST_DRAWS:
        raise NoWeights(
            f"{len(data.x_train):,} rows × {weight_count(posterior):,} weights × {LEAST_DRAWS} draws would take too "
            "long here; for a network of this size k̂ is above 0.7 almost always"
        )
    with isolated(seed), torch.no_grad(), poutine.trace() as trace, pyro.plate("draws", num, dim=-1):
        posterior.guide(None)
    log_q, draws = torch.zeros(num, dtype=torch.float64), {}
    for name, node in trace.trace.nodes.items():
        if node["type"] != "sample" or poutine.util.site_is_subsample(node):
            continue
        if not node["infer"].get("is_auxiliary"):
            draws[name] = node["value"]
        with torch.no_grad():
            log_q += _density(node).cpu()
    own = held(posterior, draws)
    with torch.no_grad(), isolated(seed), in_mode(own.model, training=False):
        model, x = once(own.model, data.x_train[:1].to(own.device))
        log_prior, _ = log_joints(model, draws, x, data.y_train[:1].to(own.device))
    likelihood = torch.zeros(num, dtype=torch.float64)
    for rows, prediction in walk(own, data.x_train, num):
        likelihood += prediction.mixture.log_probs(data.y_train[rows].cpu()).double().sum(1)
    return own, (likelihood / temperature_of(posterior) + log_prior.cpu().double() - log_q).numpy()


def _density(node: dict) -> Tensor:
    """log q of one site, (S,)."""
    point = NoWeights("its draws have no density (some weights are exactly 0, or fixed), so it has no k̂")
    q = node["fn"]
    while isinstance(q, Independent):
        q = q.base_dist
    if isinstance(q, Delta | DroppedColumns):  # their log_prob is that of a mass
        raise point
    try:
        term = node["fn"].log_prob(node["value"])
    except NotImplementedError:
        raise point from None
    return term.double().reshape(term.shape[0], -1).sum(1)


def leave_one_out(posterior: Posterior, data: Dataset, log_weights: np.ndarray | None = None, seed: int = 0) -> Loo:
    """PSIS-LOO of the training rows, all of them or, of a large set, some evenly chosen.

    log_weights: (S,) log r of the stored draws, where they are an approximation's; None for Markov chains.
    """
    posterior = thinned(posterior, LOO_DRAWS)
    chains, draws = sized(posterior, 0)
    num, temperature = chains * draws, temperature_of(posterior)
    rows = rows_at_hand(posterior, len(data.x_train), num, LOO_NUMBERS)
    index = torch.from_numpy(rows).to(data.x_train.device)
    x, y = data.x_train[index], data.y_train[index].cpu()
    u = np.random.default_rng(seed).random(len(rows))
    columns = []
    for part, prediction in walk(posterior, x, num):
        terms = prediction.mixture.log_probs(y[part]).double().numpy().T  # (B, S)
        efficiency = 1.0
        if log_weights is None and draws > 3:
            relative = ess_mean(np.exp(terms - terms.max(1, keepdims=True)).reshape(-1, chains, draws)) / num
            efficiency = float(np.nanmean(relative)) if np.isfinite(relative).any() else 1.0
        ratios = -terms / temperature + (0.0 if log_weights is None else log_weights)
        smooth, k = psis(ratios, efficiency)
        most = (smooth + terms).max(1, keepdims=True)
        elpd = most[:, 0] + np.log(np.exp(smooth + terms - most).sum(1))
        everything = _in_sample(terms, log_weights)
        below, at = (share.numpy().T for share in prediction.mixture.component_below(y[part]))
        weights = np.exp(smooth)
        pit = (weights * below).sum(1) + u[part] * (weights * at).sum(1)
        columns.append((elpd, everything - elpd, k, pit.clip(0.0, 1.0)))
    return Loo(rows, *(np.concatenate(column) for column in zip(*columns, strict=True)))


def _in_sample(terms: np.ndarray, log_weights: np.ndarray | None) -> np.ndarray:
    """log p(y_i | x_i, all rows), (B,)."""
    w = np.zeros(terms.shape[1]) if log_weights is None else psis(log_weights[None])[0][0]
    w = w - w.max()
    most = (terms + w).max(1, keepdims=True)
    return most[:, 0] + np.log(np.exp(terms + w - most).sum(1)) - np.log(np.exp(w).sum())


def uniformity(pit: np.ndarray) -> float:
    """p-value of "these probability integral transforms (M,) are uniform" (Kolmogorov-Smirnov); NaN below 10."""
    num = len(pit)
    if num < 10 or not np.isfinite(pit).all():
        return float("nan")
    ordered, steps = np.sort(pit), np.arange(num + 1) / num
    distance = max((steps[1:] - ordered).max(), (ordered - steps[:-1]).max())
    return float(kolmogorov((np.sqrt(num) + 0.12 + 0.11 / np.sqrt(num)) * distance))  # Stephens 1970
