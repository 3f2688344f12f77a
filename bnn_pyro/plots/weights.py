"""The posterior of a few weights, as several methods see it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from scipy.stats import gaussian_kde
from torch import Tensor

from bnn_pyro.errors import UserError, unknown
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.backbone import weights_digest
from bnn_pyro.plots.style import BAYES, CONTRAST, DATA, LINES, drawn, legend_below, panels, tint
from bnn_pyro.posterior import Posterior

__all__ = ["unlike", "weight_posteriors"]

_NAME = re.compile(r"(?P<site>[^\[\]]+)\[(?P<index>\s*\d+(\s*,\s*\d+)*\s*)\]")


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

    The densities are kernel estimates from the draws, all of one bandwidth rule; a method with a single draw, a point
    estimate, is a vertical line. Marginals do not show how weights depend on one another, and predictions can agree
    where they differ.

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
    shapes = {site: tuple(value.shape) for site, value in posteriors[first].model.initial.items()}
    if weights is None:
        weights = _disagreement(posteriors, num, num_draws, seed)
    places = [_place(name, shapes) for name in weights]
    draws = {label: _values(posterior, places, num_draws, seed) for label, posterior in posteriors.items()}
    columns = 2 if len(places) in (2, 4) else min(len(places), 3)
    lines = -(-len(places) // columns)
    if axes is not None:
        lines, columns = 1, len(places)
    axes = panels(axes, lines, columns, max(2.6 * columns, 3.6), 2.1 * lines + 0.5)
    for ax in axes[len(places) :]:
        ax.set_axis_off()
    for k, (ax, (site, index)) in enumerate(zip(axes, places, strict=False)):
        _densities(ax, {label: values[:, k] for label, values in draws.items()})
        ax.set_title(f"{site}[{', '.join(map(str, index))}]", size=8.5)
        ax.set(ylim=(0, None), yticks=[])
        ax.set_xlabel("weight" if k >= len(places) - columns else "")
    for ax in axes[:: max(columns, 1)]:
        ax.set_ylabel("density")
    legend_below(axes[min(len(places) - 1, (lines - 1) * columns + columns // 2)], columns=4)
    return axes[: len(places)]


def unlike(a: Posterior, b: Posterior) -> str | None:
    """Why a weight of one does not mean the same in the other; None where it does."""
    one, two = ({s: tuple(v.shape) for s, v in p.model.initial.items()} for p in (a, b))
    for site in [*one, *two]:
        if one.get(site) != two.get(site):
            return f"'{site}' has shape {one.get(site, 'none')} in one and {two.get(site, 'none')} in the other"
    backbones = [getattr(p.model, "backbone", None) for p in (a, b)]
    digests = [None if net is None else weights_digest(net) for net in backbones]
    return None if digests[0] == digests[1] else "they stand on different backbones"


def _densities(ax: Axes, values: Mapping[str, np.ndarray]) -> None:
    spread = [v for v in values.values() if _spread(v)]
    points = [v[:1] for v in values.values() if not _spread(v)]
    ends = np.concatenate([*(np.quantile(v, [0.001, 0.999]) for v in spread), *points])
    low, high = ends.min(), ends.max()
    margin = 0.15 * (high - low) or 1.0
    x = np.linspace(low - margin, high + margin, 300)
    for k, (label, v) in enumerate(values.items()):
        colour = [BAYES, *CONTRAST][k % 5]
        if not _spread(v):
            ax.axvline(v[0], color=DATA, linestyle=LINES[k % 4], linewidth=1.2, label=label)
            continue
        density = gaussian_kde(v)(x)
        if k == 0:
            ax.fill_between(x, density, color=tint(colour, 0.25), linewidth=0)
        ax.plot(x, density, color=colour, linestyle=LINES[k % 4], label=label)
    ax.set_xlim(x[0], x[-1])


def _spread(values: np.ndarray) -> bool:
    """Whether there is a density to draw."""
    return len(values) > 1 and np.ptp(values) > 0


def _place(name: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, tuple[int, ...]]:
    found = _NAME.fullmatch(name.strip())
    if found is None:
        raise UserError(f"a weight is named like 'layers.0.weight[3, 17]', got '{name}'")
    site, index = found["site"].strip(), tuple(int(i) for i in found["index"].split(","))
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


def _disagreement(posteriors: Mapping[str, Posterior], num: int, num_draws: int, seed: int) -> list[str]:
    """Names of the ``num`` weights whose marginals differ most between any two methods."""
    moments = [_moments(posterior, num_draws, seed) for posterior in posteriors.values()]
    moments = [m for m in moments if m[2] > 1] or moments  # a point says nothing of the spread
    if len(moments) == 1:
        score = moments[0][1]
    else:
        means, scales = (torch.stack([m[i] for m in moments]) for i in (0, 1))
        apart = (means[:, None] - means[None]).square() + (scales[:, None] - scales[None]).square()
        score = apart.amax((0, 1)).sqrt() / scales.mean(0).clamp_min(1e-30)
    chosen = score.argsort(descending=True, stable=True)[:num].tolist()
    shapes = {site: value.shape for site, value in next(iter(posteriors.values())).model.initial.items()}
    return [_name(i, shapes) for i in chosen]


def _name(flat: int, shapes: Mapping[str, torch.Size]) -> str:
    """What the weight at this place of all sites, flat and joined, is called."""
    for site, shape in shapes.items():
        if flat < shape.numel():
            return f"{site}[{', '.join(map(str, np.unravel_index(flat, shape)))}]"
        flat -= shape.numel()
    raise IndexError(flat)
