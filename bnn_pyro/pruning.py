"""Pruning by signal-to-noise ratio: remove the weights whose posterior is wide relative to its mean.

    SNR = |μ| / σ        log α = log σ²/μ² = −2 log SNR

Weights are removed in the order of their SNR, over all layers together (Blundell et al. 2015, arXiv:1505.05424,
section 5.1), or beyond a threshold of log α (Molchanov, Ashukha & Vetrov 2017, arXiv:1701.05369). A removed weight is 0
in every draw. Only entries of weight matrices and convolution kernels are removed, not biases or the noise.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import Distribution, Normal

from bnn_pyro import metrics
from bnn_pyro.errors import UserError
from bnn_pyro.isolation import isolated
from bnn_pyro.metrics.metric import Estimate, Targets
from bnn_pyro.parts.correlated_normal import Part
from bnn_pyro.parts.guides import PrunedGuide, PrunedWeights, weight_sites
from bnn_pyro.parts.weights import NormalWeights, base_of, cut
from bnn_pyro.posterior import Posterior, drawn_sites
from bnn_pyro.predictive import predict

#: Shares of the weights that ``pruning_curve`` removes: those of Blundell et al., table 2, and a few in between.
SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98)
#: The threshold of Molchanov et al.: a variance of e³ = 20 times the squared mean, a dropout rate above 0.95.
LOG_ALPHA = 3.0
#: Logarithms of ratios are rounded to this: ratios of a layer with one α differ by rounding errors only.
SAME = 1e-4


class Removed(NamedTuple):
    """Share of the weights beyond the threshold: of all weights, and {site: share} of each layer."""

    share: float
    layers: dict[str, float]


class PrunedScore(NamedTuple):
    """Scores after pruning, with 95 % bootstrap intervals over the points.

    share    share of all weights that is removed     weights  number of weights left     nll  nats per point
    measure  "error", "rmse", …, by the task          loss     its value: a share of the points, or in target units
    """

    share: float
    weights: int
    measure: str
    loss: Estimate
    nll: Estimate

    def flat(self) -> dict[str, float]:
        """{"share", "weights", "nll", "nll_low", "nll_high", …}, as in pruning.json."""
        return {"share": self.share, "weights": self.weights} | self.loss.flat(self.measure) | self.nll.flat("nll")


def signal_to_noise(posterior: Posterior) -> dict[str, Tensor]:
    """{site: |mean| / standard deviation} of every weight, of the site's shape, on the CPU; 0 if the mean is 0.

    Raises UserError for stored draws and point estimates, and if q is not an independent Normal in every weight, as
    with MC dropout and low-rank or full covariances.
    """
    return {site: ratio for site, (_, ratio) in _ratios(posterior).items()}


def share_removed(posterior: Posterior, log_alpha: float = LOG_ALPHA) -> Removed:
    """The share of weights whose log α = log σ²/μ² exceeds ``log_alpha``; ``prune`` with this share removes them.

    The threshold was proposed for the log-uniform prior, under which such weights are noise around 0.
    """
    beyond = {site: ratio < math.exp(-log_alpha / 2) for site, ratio in signal_to_noise(posterior).items()}
    layers = {site: b.double().mean().item() for site, b in beyond.items()}
    return Removed(torch.cat([b.flatten() for b in beyond.values()]).double().mean().item(), layers)


def prune(posterior: Posterior, share: float) -> Posterior:
    """A posterior without the ``share`` of weights with the lowest signal-to-noise ratio; the argument is unchanged.

    Round(share · weights) weights are 0 in every draw; all others are drawn bit for bit as before. Of weights with
    equal ratios (variational dropout has one α per layer), those with the smaller |mean| are removed first.
    Raises UserError for a share outside 0 to 1, and where ``signal_to_noise`` does.
    """
    if not 0 <= share <= 1:
        raise UserError(f"the share of weights to remove must lie between 0 and 1, got {share:g}")
    ratios = _ratios(posterior)
    size, ratio = (torch.cat([pair[i].flatten() for pair in ratios.values()]) for i in (0, 1))
    by_size = size.argsort(stable=True)
    order = by_size[(ratio.log() / SAME).round()[by_size].argsort(stable=True)]
    mask = torch.ones(len(order), dtype=torch.bool)
    mask[order[: round(share * len(order))]] = False
    masks = cut(mask, {site: mean.shape for site, (mean, _) in ratios.items()})
    guide = PrunedGuide(posterior.guide, masks).to(posterior.device)
    return posterior.derived({"pruned": float(share)}, guide=guide)


def pruning_curve(
    posterior: Posterior, x: Tensor, y: Targets, shares: Sequence[float] = SHARES, *, num_draws: int = 100,
    seed: int | None = 0, progress: Callable[[int, int], None] | None = None,
) -> list[PrunedScore]:  # fmt: skip
    """Loss and NLL on (x, y) after removing each share of the weights, lowest signal-to-noise ratio first.

    x: (B, *input_shape), standardised.   y: (B,) labels, or targets in their own units.
    num_draws, seed, progress: as for ``predict``; the draws of the remaining weights are the same for all shares.
    """
    curve = []
    for number, (share, pruned) in enumerate([(share, prune(posterior, share)) for share in shares]):
        report = progress and (lambda done, of, at=number * num_draws: progress(at + done, len(shares) * num_draws))
        scores = metrics.evaluate(predict(pruned, x, num_draws=num_draws, seed=seed, progress=report), y)
        num_left = sum(int(mask.sum()) for mask in pruned.guide.kept.values())
        measure = next(name for name in ("error", "rmse", "nrmse", "label_error", "concordance") if name in scores)
        curve.append(PrunedScore(float(share), num_left, measure, scores[measure], scores["nll"]))
    return curve


def _ratios(posterior: Posterior) -> Mapping[str, tuple[Tensor, Tensor]]:
    """{site: (|mean|, |mean| / scale)} of the network's weights, in the model's order; float64 on the CPU."""
    if posterior.guide is None:
        raise UserError("signal-to-noise ratios need mean and standard deviation of every weight; this is a point "
                        "estimate or stored draws; fit mean-field, hidden-layer or sparse-dropout by svi")  # fmt: skip
    with isolated(0):
        nodes = drawn_sites(posterior.guide)
    moments = {s: _moments(nodes[s]["fn"]) if s in nodes else None for s in weight_sites(posterior.model)}
    if not moments or None in moments.values():
        why = "has no mean and standard deviation of every weight"
        if any(isinstance(nodes[site]["fn"], Part) for site in moments if site in nodes):
            why = "draws all weights jointly, and the ratio of each alone ignores their correlations"
        name = type(posterior.guide).__name__
        raise UserError(f"{name} {why}; fit mean-field, hidden-layer or sparse-dropout by svi")
    pairs = {site: [v.detach().double().cpu() for v in pair] for site, pair in moments.items()}
    return {s: (m.abs(), torch.where(m == 0, 0.0, m.abs() / scale)) for s, (m, scale) in pairs.items()}


def _moments(q: Distribution) -> tuple[Tensor, Tensor] | None:
    """(mean, standard deviation) of every weight, or None if q is not independently Normal."""
    if isinstance(q, PrunedWeights):
        moments = _moments(q.whole)
        return moments and (q.mean, moments[1])
    q = base_of(q)
    return (q.mean, q.scale) if isinstance(q, Normal | NormalWeights) else None
