"""Weights: the posterior of a few as several methods see it, and which of them a network can do without."""

from collections.abc import Mapping, Sequence

import numpy as np
import seaborn
from matplotlib.ticker import LogLocator

from bnn_pyro.diagnostics.draws import chosen_weights, even_weights
from bnn_pyro.errors import UserError
from bnn_pyro.parts.nets import weights_digest
from bnn_pyro.plots.layout import legend_outside, panels
from bnn_pyro.plots.style import BAYES, CONTRAST, DASHED, DATA, drawn, look, tint
from bnn_pyro.posterior import Posterior
from bnn_pyro.pruning import LOG_ALPHA, PrunedScore

_LOSSES = {"error": "error, % of points", "rmse": "RMSE, target units"}
#: Weights that are compared at most, evenly chosen over the network.
CANDIDATES = 1000
#: A curve that rises by more than this is drawn on a log scale: its flat part is what matters.
STEEP = 4
#: Draws of a guide by which marginals are compared.
DRAWS = 1000


@drawn
def weight_posteriors(posteriors: Mapping[str, Posterior], *, num: int = 6) -> np.ndarray:
    """Marginal posterior densities of the weights on which methods differ most, on the same axes; axes (num,).

    That is the largest Wasserstein-2 distance of two methods' Normal approximations, √((μ − μ')² + (σ − σ')²), in units
    of the mean σ; of a single method, its widest ones. Of a large network, 1,000 weights are compared.
    The densities are kernel estimates from the draws; a point estimate is a vertical line. Marginals do not show how
    weights depend on one another, and predictions can agree where they differ.

    posteriors: {label: posterior} of one model.   Raises UserError for posteriors of different models.
    """
    if not posteriors:
        raise UserError("there is no posterior to draw")
    first, *rest = posteriors
    for label in rest:
        if reason := _unlike(posteriors[first], posteriors[label]):
            raise UserError(f"'{first}' and '{label}' are not posteriors of one model: {reason}")
    picks = even_weights(posteriors[first], CANDIDATES)  # of which those are shown that differ most between two methods
    draws = [chosen_weights(posterior, picks, DRAWS)[1] for posterior in posteriors.values()]
    draws = [d for d in draws if d[0].size > 1] or draws  # a point says nothing of the spread
    means, scales = (np.stack([f(d, axis=(1, 2)) for d in draws]) for f in (np.mean, np.std))
    apart = np.square(means[:, None] - means[None]) + np.square(scales[:, None] - scales[None])
    score = np.sqrt(apart.max((0, 1))) / np.maximum(scales.mean(0), 1e-30) if len(draws) > 1 else scales[0]
    picks = [picks[i] for i in np.argsort(-score, kind="stable")[:num]]
    values = {label: chosen_weights(p, picks, DRAWS) for label, p in posteriors.items()}
    axes = panels(len(picks), 3, (2.6, 2.1), (0, 0.5), least=3.6)
    for k, ax in enumerate(axes):
        for m, (label, (_, draws)) in enumerate(values.items()):
            v, style = draws[k].ravel(), look(m, marker=None, label=label)
            if len(v) > 1 and np.ptp(v) > 0:
                seaborn.kdeplot(x=v, ax=ax, gridsize=300, **style)
            else:
                ax.axvline(v[0], **style | {"color": DATA})
        ax.set(ylim=(0, None), yticks=[], xlabel="", ylabel="", title=values[first][0][k])
    axes[0].figure.supxlabel("weight")
    axes[0].figure.supylabel("density")
    return legend_outside(axes, 4)


def _unlike(a: Posterior, b: Posterior) -> str | None:
    """Why a weight of one does not mean the same in the other; None where it does."""
    one, two = ({site: tuple(value.shape) for site, value in p.model.initial.items()} for p in (a, b))
    for site in [*one, *two]:
        if one.get(site) != two.get(site):
            return f"'{site}' has shape {one.get(site, 'none')} in one and {two.get(site, 'none')} in the other"
    backbones = [getattr(p.model, "backbone", None) for p in (a, b)]
    digests = [None if net is None else weights_digest(net) for net in backbones]
    return None if digests[0] == digests[1] else "they stand on different backbones"


@drawn
def pruning_curve(curve: Sequence[PrunedScore], *, removed: float | None = None) -> np.ndarray:
    """Loss (left) and NLL (right) against the share of weights removed, with 95 % bootstrap intervals; axes (2,).

    curve: of ``pruning.pruning_curve``.   removed: a share to mark, that beyond log α = 3.
    Raises UserError for fewer than two points, or one with no weights left, which has no place on a log scale.
    """
    curve = sorted(curve, key=lambda point: point.share)
    if len(curve) < 2 or curve[-1].share >= 1:
        raise UserError("a pruning curve needs two shares or more, each below 1")
    axes = panels(2, 2, (3.8, 3.3))
    left = np.array([1 - point.share for point in curve])
    # The share at the threshold has a line of its own: a tick would run into its neighbour.
    ticks = [point.share for point in curve if removed is None or abs(point.share - removed) > 1e-9]
    losses = np.array([point.loss for point in curve]) * (100 if curve[0].measure == "error" else 1)
    nll = np.array([point.nll for point in curve])
    for ax, scores, label in zip(axes, (losses, nll), (_LOSSES[curve[0].measure], "NLL, nats a point"), strict=True):
        value, low, high = scores.T
        ax.fill_between(left, low, high, color=tint(BAYES, 0.25), linewidth=0, label="95% interval over points")
        ax.axhline(value[0], **DASHED, label="all weights")
        ax.plot(left, value, color=BAYES, marker="o", label="pruned")
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
