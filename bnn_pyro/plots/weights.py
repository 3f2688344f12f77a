"""Weights: the posterior of a few as several methods see it, and which of them a network can do without."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator
from scipy.stats import gaussian_kde
from torch import Tensor

from bnn_pyro.errors import UserError, unknown
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.nets import weights_digest
from bnn_pyro.plots.layout import legend_below, legend_outside, panel, panel_grid, panels
from bnn_pyro.plots.style import BAYES, COLOURS, CONTRAST, DASHED, DATA, LINES, REFERENCE, drawn, tint
from bnn_pyro.posterior import Posterior
from bnn_pyro.pruning import LOG_ALPHA, PrunedScore

__all__ = ["pruning_curve", "signal_to_noise", "unlike", "weight_posteriors"]

_NAME = re.compile(r"(?P<site>[^\[\]]+)\[(?P<index>\s*\d+(\s*,\s*\d+)*\s*)\]")
_LOSSES = {"error": "error, % of points", "rmse": "RMSE, target units"}
#: A curve that rises by more than this is drawn on a log scale: its flat part is what matters.
STEEP = 4
#: dB, the left end of the densities of signal-to-noise ratios.
FLOOR = -60.0


@drawn
def weight_posteriors(
    posteriors: Mapping[str, Posterior],
    weights: Sequence[str] | None = None,
    *,
    num: int = 6,
    num_draws: int = 1000,
    seed: int = 0,
    axes: Sequence[Axes] | None = None,
) -> np.ndarray:
    """Marginal posterior densities of a few weights by method, on the same axes; axes (weights,).

    The densities are kernel estimates from the draws; a point estimate is a vertical line. Marginals do not show how
    weights depend on one another, and predictions can agree where they differ.

    posteriors: {label: posterior} of one model.
    weights: names such as "layers.0.weight[3, 17]"; None takes the ``num`` on which the methods disagree most: the
        largest Wasserstein-2 distance of two methods' Normal approximations, √((μ − μ')² + (σ − σ')²), in units of the
        mean σ. Of a single method, its widest ones.

    Raises UserError for posteriors of different models, or a weight that they have not.
    """
    if not posteriors:
        raise UserError("there is no posterior to draw")
    first, *rest = posteriors
    for label in rest:
        if reason := unlike(posteriors[first], posteriors[label]):
            raise UserError(f"'{first}' and '{label}' are not posteriors of one model: {reason}")
    shapes = _shapes(posteriors[first])
    if weights is None:
        places = _disagreement(posteriors, shapes, num, num_draws, seed)
    else:
        places = [_place(name, shapes) for name in weights]
    draws = {label: _values(posterior, places, num_draws, seed) for label, posterior in posteriors.items()}
    axes, columns = panel_grid(axes, len(places), 3, (2.6, 2.1), (0, 0.5), least=3.6)
    for k, (ax, (site, index)) in enumerate(zip(axes, places, strict=True)):
        _densities(ax, {label: values[:, k] for label, values in draws.items()})
        ax.set(ylim=(0, None), yticks=[], title=f"{site}[{', '.join(map(str, index))}]")
    for ax in axes[-columns:]:
        ax.set_xlabel("weight")
    for ax in axes[::columns]:
        ax.set_ylabel("density")
    legend_below(axes[min(len(places) - 1, (len(places) - 1) // columns * columns + columns // 2)], 4)
    return axes


def unlike(a: Posterior, b: Posterior) -> str | None:
    """Why a weight of one does not mean the same in the other; None where it does."""
    one, two = _shapes(a), _shapes(b)
    for site in [*one, *two]:
        if one.get(site) != two.get(site):
            return f"'{site}' has shape {one.get(site, 'none')} in one and {two.get(site, 'none')} in the other"
    backbones = [getattr(p.model, "backbone", None) for p in (a, b)]
    digests = [None if net is None else weights_digest(net) for net in backbones]
    return None if digests[0] == digests[1] else "they stand on different backbones"


def _shapes(posterior: Posterior) -> dict[str, tuple[int, ...]]:
    return {site: tuple(value.shape) for site, value in posterior.model.initial.items()}


def _densities(ax: Axes, values: Mapping[str, np.ndarray]) -> None:
    """A density of each method's draws of one weight; a line where they do not vary."""
    varied = {label: len(v) > 1 and np.ptp(v) > 0 for label, v in values.items()}
    ends = np.concatenate([np.quantile(v, [0.001, 0.999]) if varied[label] else v[:1] for label, v in values.items()])
    margin = 0.15 * np.ptp(ends) or 1.0
    x = np.linspace(ends.min() - margin, ends.max() + margin, 300)
    for k, (label, v) in enumerate(values.items()):
        colour, dash = COLOURS[k % 5], LINES[k % 4]
        if not varied[label]:
            ax.axvline(v[0], color=DATA, linestyle=dash, linewidth=1.2, label=label)
            continue
        density = gaussian_kde(v)(x)
        if k == 0:
            ax.fill_between(x, density, color=tint(colour, 0.25), linewidth=0)
        ax.plot(x, density, color=colour, linestyle=dash, label=label)
    ax.set_xlim(x[0], x[-1])


def _place(name: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, tuple[int, ...]]:
    """The site and the index that "site[3, 17]" names."""
    match = _NAME.fullmatch(name.strip())
    if match is None:
        raise UserError(f"a weight is named like 'layers.0.weight[3, 17]', got '{name}'")
    site, index = match["site"].strip(), tuple(int(i) for i in match["index"].split(","))
    if site not in shapes:
        raise unknown("site", site, shapes)
    if len(index) != len(shapes[site]) or any(i >= n for i, n in zip(index, shapes[site], strict=True)):
        raise UserError(f"there is no {name}: '{site}' has shape {shapes[site]}")
    return site, index


def _values(posterior: Posterior, places: Sequence[tuple[str, tuple[int, ...]]], num: int, seed: int) -> np.ndarray:
    """(draws, weights): the draws of the chosen weights alone, so that all of a large network need not be held."""
    with isolated(seed):
        blocks = [
            torch.stack([block[site][(slice(None), *index)] for site, index in places], 1).cpu()
            for block in posterior.blocks(num)
        ]
    return torch.cat(blocks).double().numpy()


def _moments(posterior: Posterior, num: int, seed: int) -> tuple[Tensor, Tensor, int]:
    """Mean and standard deviation of every weight, flat in the order of the model's sites, and the number of draws."""
    total = square = 0.0
    count = 0
    with isolated(seed):
        for block in posterior.blocks(num):
            draws = [block[site] for site in posterior.model.initial]
            flat = torch.cat([part.reshape(len(part), -1) for part in draws], 1).cpu().double()
            total, square, count = total + flat.sum(0), square + flat.square().sum(0), count + len(flat)
    mean = total / count
    return mean, (square / count - mean.square()).clamp_min(0).sqrt(), count


def _disagreement(
    posteriors: Mapping[str, Posterior], shapes: Mapping[str, tuple[int, ...]], num: int, num_draws: int, seed: int
) -> list[tuple[str, tuple[int, ...]]]:
    """Sites and indices of the ``num`` weights whose marginals differ most between any two methods."""
    moments = [_moments(posterior, num_draws, seed) for posterior in posteriors.values()]
    moments = [m for m in moments if m[2] > 1] or moments  # a point says nothing of the spread
    if len(moments) == 1:
        score = moments[0][1]
    else:
        means, scales = (torch.stack([m[i] for m in moments]) for i in (0, 1))
        apart = (means[:, None] - means[None]).square() + (scales[:, None] - scales[None]).square()
        score = apart.amax((0, 1)).sqrt() / scales.mean(0).clamp_min(1e-30)
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
    places = []
    for flat in score.argsort(descending=True, stable=True)[:num].tolist():
        site = list(shapes)[np.searchsorted(ends, flat, side="right")]
        within = flat - (ends[list(shapes).index(site)] - math.prod(shapes[site]))
        places.append((site, tuple(int(i) for i in np.unravel_index(within, shapes[site]))))
    return places


# -- pruning -----------------------------------------------------------------------------------------------------------
@drawn
def pruning_curve(
    curve: Sequence[PrunedScore], *, removed: float | None = None, axes: Sequence[Axes] | None = None
) -> np.ndarray:
    """Loss (left) and NLL (right) against the share of weights removed, with 95 % bootstrap intervals; axes (2,).

    curve: of ``pruning.pruning_curve``.   removed: a share to mark, that beyond log α = 3.

    Raises UserError for fewer than two points, or one with no weights left, which has no place on a log scale.
    """
    curve = sorted(curve, key=lambda point: point.share)
    if len(curve) < 2 or curve[-1].share >= 1:
        raise UserError("a pruning curve needs two shares or more, each below 1")
    axes = panels(axes, 1, 2, 7.6, 3.3)
    left = np.array([1 - point.share for point in curve])
    # The share at the threshold has a line of its own: a tick would run into its neighbour.
    ticks = [point.share for point in curve if removed is None or abs(point.share - removed) > 1e-9]
    losses = np.array([point.loss for point in curve]) * (100 if curve[0].measure == "error" else 1)
    nll = np.array([point.nll for point in curve])
    for ax, scores, label in zip(axes, (losses, nll), (_LOSSES[curve[0].measure], "NLL, nats a point"), strict=True):
        value, low, high = scores.T
        ax.fill_between(left, low, high, color=tint(BAYES, 0.25), linewidth=0, label="95% interval over points")
        ax.axhline(value[0], **DASHED, label="all weights")
        ax.plot(left, value, color=BAYES, marker="o", markersize=4, label="pruned")
        if removed is not None and 0 < removed < 1:
            ax.axvline(1 - removed, color=CONTRAST[0], linestyle=":", label=f"log α > {LOG_ALPHA:g}: {removed:.1%}")
        ax.set(xscale="log", xlim=(1.08, left[-1] / 1.12), xlabel="weights removed, % (log scale of those left)")
        ax.set_xticks([1 - share for share in ticks], [f"{100 * share:.3g}" for share in ticks])
        ax.set_ylabel(label)
        if value.min() > 0 and value.max() > STEEP * value.min():
            ax.set(yscale="log", ylim=(0.8 * max(low.min(), value.min() / 2), 1.2 * high.max()))
            ax.set_ylabel(f"{label} (log scale)")
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.yaxis.set_major_formatter("{x:g}")
        ax.minorticks_off()
        ax.grid(axis="y", color="0.92")
    return legend_outside(axes, 4)


@drawn
def signal_to_noise(
    ratios: Mapping[str, Tensor], *, shares: Sequence[float] = (0.5, 0.75, 0.95), bins: int = 80, ax: Axes | None = None
) -> Axes:
    """Density of |mean| / standard deviation of the weights in dB, 20 log₁₀, and where each share of them is removed.

    ratios: {site: array} of ``pruning.signal_to_noise``. What lies below −60 dB, a mean of a thousandth of its noise
        (weights of pixels that are always black, say), is in the first bin.
    shares: up to four, marked at their quantiles; log α = 3 is marked besides.
    """
    values = np.concatenate([np.asarray(ratio).ravel() for ratio in ratios.values()])
    db = 20 * np.log10(values.clip(1e-12, 1e12))
    threshold = -10 * LOG_ALPHA / math.log(10)
    low, high = max(np.quantile(db, 0.005), FLOOR), db.max()
    edges = np.linspace(min(low, threshold - 3), max(high, threshold + 3) + 1e-9, bins + 1)
    density = np.histogram(db.clip(edges[0], edges[-1]), edges, density=True)[0]
    ax = panel(ax, 5.2, 3.6)
    ax.stairs(density, edges, fill=True, color=tint(BAYES, 0.55), label=f"{len(db):,} weights")
    for share, colour, line in zip(shares, CONTRAST, LINES, strict=False):
        ax.axvline(np.quantile(db, share), color=colour, linestyle=line, label=f"{share:.0%} removed")
    label = f"log α = {LOG_ALPHA:g}: {(db < threshold).mean():.1%} below"
    ax.axvline(threshold, color=REFERENCE, linewidth=2.4, label=label)
    ax.set(xlabel="signal-to-noise ratio |mean| / standard deviation, dB", ylabel="density, 1/dB")
    ax.set(xlim=(edges[0], edges[-1]), ylim=(0, None))
    return legend_below(ax, 3)
