"""Can this posterior be trusted? R-hat and effective draws, Pareto k, LOO-PIT, replicated data, importance weights.

All from plain arrays; thresholds are drawn where a verdict rests on them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from numpy.typing import ArrayLike
from scipy.stats import binom

from bnn_pyro.errors import UserError
from bnn_pyro.plots.style import BAYES, CONTRAST, DATA, REFERENCE, WRONG, drawn, legend_below, panel, panels, tint
from bnn_pyro.plots.training import draw_curve

__all__ = ["convergence", "importance_weights", "loo_pit", "objective", "pareto_k", "posterior_predictive"]

#: What the verdicts ask for: R-hat and effective draws (Vehtari et al. 2021), Pareto k (Vehtari et al. 2024).
RHAT, ESS, GOOD_K, BAD_K = 1.01, 400, 0.5, 0.7
#: Observations whose k is too large that are named, and points beyond which dots are drawn small.
NAMED, MANY = 6, 2000
#: Replicated data sets, and classes, that are drawn.
MOST_REPLICATED, MOST_CLASSES = 40, 20
#: Uniform samples from which the simultaneous band is made, and the places at which it holds.
SIMULATED, PLACES = 2000, 100


@drawn
def convergence(
    rhat: ArrayLike,
    ess_bulk: ArrayLike,
    ess_tail: ArrayLike | None = None,
    *,
    draws: int | None = None,
    nested: bool = False,
    axes: Sequence[Axes] | None = None,
) -> np.ndarray:
    """R-hat (left) and effective draws (right) of what the network computes at test points, as shares; axes (2,).

    A curve at (v, s) says that a share s of the outputs has at most v. Dashed: what is asked for, R-hat below 1.01 and
    400 effective draws; the shaded side is not good enough.

    rhat, ess_bulk, ess_tail: any shape, NaN where an output never varies.   draws: C·D, the effective draws of an
    ideal sampler.   nested: R-hat is the nested one (Margossian et al. 2022, arXiv:2110.13017), for many short chains.
    """
    rhat, bulk = (np.asarray(v, dtype=float).ravel() for v in (rhat, ess_bulk))
    tail = None if ess_tail is None else np.asarray(ess_tail, dtype=float).ravel()
    axes = panels(axes, 1, 2, 7.8, 3.2)
    held = rhat[np.isfinite(rhat)]
    if not len(held):
        raise UserError("no output varies between draws, so there is no R-hat to draw")
    name = "nested R-hat" if nested else "R-hat"
    worst = held.max()
    far = max(1.02, 1.0 + 1.15 * (worst - 1))
    low = max(0.9, min(0.998, held.min() - 0.001))
    axes[0].axvspan(RHAT, far, color="0.93", linewidth=0)
    axes[0].axvline(RHAT, color=REFERENCE, linestyle="--", linewidth=1.2, label=f"{RHAT:g}: asked for")
    axes[0].step(*_shares(held, low, far), where="post", color=BAYES, label=name)
    axes[0].set(xlim=(low, far), xlabel=f"{name} of an output", ylabel="share of the outputs")
    axes[0].set_title(f"largest {name} {worst:.3f}; below {RHAT:g}: {_share((held < RHAT).mean())}", size=9)
    axes[0].xaxis.set_major_locator(MaxNLocator(6))
    kinds = [(bulk, "bulk", BAYES, "-")] + ([(tail, "tail", CONTRAST[0], "--")] if tail is not None else [])
    kept = [(v[np.isfinite(v)], *rest) for v, *rest in kinds]
    least, most = min(v.min() for v, *_ in kept), max(v.max() for v, *_ in kept)
    low, far = min(least, ESS) / 1.3, max(most, ESS, draws or 0) * 1.3
    axes[1].axvspan(low, ESS, color="0.93", linewidth=0)
    axes[1].axvline(ESS, color=REFERENCE, linestyle="--", linewidth=1.2, label=f"{ESS}: asked for")
    if draws:
        axes[1].axvline(draws, color=REFERENCE, linestyle=":", linewidth=1.2, label=f"{draws:,} draws in all")
    for v, label, colour, dash in kept:
        axes[1].step(*_shares(v, low, far), where="post", color=colour, linestyle=dash, label=label)
    axes[1].set(xscale="log", xlim=(low, far), xlabel="effective draws of an output")
    axes[1].xaxis.set_major_formatter("{x:,.0f}")
    axes[1].xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if far / low < 300 else (1.0,)))
    axes[1].xaxis.set_minor_locator(NullLocator())
    axes[1].set_title(
        f"fewest effective draws: {', '.join(f'{np.floor(v.min()):,.0f} ({n})' for v, n, *_ in kept)}", size=9
    )
    for ax in axes:
        ax.set_ylim(0, 1.02)
        ax.yaxis.set_major_formatter(lambda v, _: f"{100 * v:.0f} %")
        legend_below(ax, columns=2)
    return axes


@drawn
def pareto_k(k: ArrayLike, *, rows: ArrayLike | None = None, ax: Axes | None = None) -> Axes:
    """Pareto k of every training row: how much leaving it out would move the posterior; Vehtari et al. 2024.

    Above 0.7 (crosses; the largest are named) the estimate of PSIS-LOO for that row, and so their sum, is unreliable:
    the row is an outlier, or the network bends to fit it.

    k: (N,).   rows: (N,) numbers of the training rows that they are of; None: all, in order.
    """
    k = np.asarray(k, dtype=float).ravel()
    bad, fair = k > BAD_K, (k > GOOD_K) & (k <= BAD_K)
    rows, small = np.arange(len(k)) if rows is None else np.asarray(rows), len(k) > MANY
    ax = panel(ax, 7.2, 3.2)
    kinds = ((~bad & ~fair, "o", BAYES, "up to 0.5: good"), (fair, "^", CONTRAST[0], "0.5 to 0.7: usable"),
             (bad, "x", WRONG, "above 0.7: unreliable"))  # fmt: skip
    for some, marker, colour, label in kinds:
        size = (1.2 if small else 2.6) if marker == "o" else 4.5
        label = f"{label} ({some.sum():,})"
        ax.plot(rows[some], k[some], marker, color=colour, markersize=size, linestyle="none", label=label)
    for threshold in (GOOD_K, BAD_K):
        ax.axhline(threshold, color=REFERENCE, linestyle="--" if threshold == BAD_K else ":", linewidth=1)
    for i in sorted(np.flatnonzero(bad & np.isfinite(k)), key=lambda i: -k[i])[:NAMED]:
        ax.annotate(str(rows[i]), (rows[i], k[i]), (4, 0), textcoords="offset points", size=7, va="center")
    held = k[np.isfinite(k)]
    top = max(1.0, held.max() + 0.08) if len(held) else 1.0
    ax.set(xlabel="training row (the first is 0)", ylabel="Pareto k")
    ax.set_xlim(-0.02 * (rows.max() + 1), 1.04 * (rows.max() + 1))
    ax.set_ylim(min(0, held.min() - 0.05) if len(held) else 0, top)
    ax.set_title(f"largest k {held.max():.2f}; {bad.sum():,} of {len(k):,} rows above {BAD_K}" if len(held) else "no k")
    legend_below(ax, columns=3)
    return ax


@drawn
def loo_pit(pit: ArrayLike, *, axes: Sequence[Axes] | None = None) -> np.ndarray:
    """Where each target lies in the prediction that did not see it: histogram, and ECDF minus the uniform; axes (2,).

    Uniform if the predictions are calibrated. A U is too narrow, a hill too wide, a slope off to one side. The curve
    leaves the band somewhere in 5 % of calibrated models: it holds at all places at once (Säilynoja et al. 2022,
    arXiv:2103.10522, here by simulation).

    pit: (N,) in [0, 1].
    """
    pit = np.sort(np.asarray(pit, dtype=float).ravel())
    if not len(pit) or not np.isfinite(pit).all() or pit[0] < 0 or pit[-1] > 1:
        raise UserError("the LOO-PIT takes numbers between 0 and 1, without gaps")
    axes = panels(axes, 1, 2, 7.8, 3.1)
    bins = 10 if len(pit) < 500 else 20
    counts, edges = np.histogram(pit, np.linspace(0, 1, bins + 1))
    axes[0].bar(edges[:-1], counts, 1 / bins, align="edge", color=tint(BAYES, 0.6), edgecolor="white")
    axes[0].axhline(len(pit) / bins, color=REFERENCE, linestyle="--", linewidth=1)
    axes[0].set(xlim=(0, 1), xlabel="LOO-PIT: P(Y ≤ observed y)", ylabel="training rows", title="uniform if calibrated")
    place, low, high = _simultaneous_band(len(pit))
    found = np.searchsorted(pit, place, side="right") / len(pit) - place
    outside = (found < low - 1e-12) | (found > high + 1e-12)
    axes[1].fill_between(place, low, high, color="0.87", linewidth=0, label="95 % band, all places at once")
    axes[1].axhline(0, color=REFERENCE, linestyle="--", linewidth=1)
    axes[1].plot(place, found, color=BAYES, label="this posterior")
    if outside.any():
        axes[1].plot(place[outside], found[outside], "x", color=WRONG, markersize=4, label="outside")
    axes[1].set(xlim=(0, 1), xlabel="LOO-PIT", ylabel="ECDF − uniform")
    axes[1].set_title("leaves the band" if outside.any() else "stays in the band")
    legend_below(axes[1], columns=3)
    return axes


@drawn
def posterior_predictive(
    replicated: ArrayLike,
    observed: ArrayLike,
    *,
    classes: Sequence[str] = (),
    label: str = "target",
    axes: Sequence[Axes] | None = None,
) -> np.ndarray:
    """Data that the posterior would have made beside the data that there are; axes (1,), or (2,) for a regression.

    Regression: ECDF of the targets over those of replicated sets, and where their standard deviation lies among
    theirs. Classification: number of rows of each class, with the central 95 % of the replicated sets.

    replicated: (S, N) targets, or labels, drawn for the rows of ``observed`` (N,).   classes: their names; () for a
    regression.   label: name and unit of the target.
    """
    replicated, observed = np.asarray(replicated, dtype=float), np.asarray(observed, dtype=float).ravel()
    if replicated.ndim != 2 or replicated.shape[1] != len(observed):
        raise UserError(f"replicated data must be (draws, {len(observed)} rows), got the shape {replicated.shape}")
    if len(classes):
        return _class_counts(replicated.astype(int), observed.astype(int), classes, axes)
    axes = panels(axes, 1, 2, 7.8, 3.2, width_ratios=(3, 2))
    few = np.unique(np.linspace(0, len(replicated) - 1, min(len(replicated), MOST_REPLICATED)).round().astype(int))
    low, high = np.quantile(np.concatenate([replicated[few].ravel(), observed]), (0.002, 0.998))
    margin = 0.03 * (max(high, observed.max()) - min(low, observed.min()))
    low, high = min(low, observed.min()) - margin, max(high, observed.max()) + margin
    for k, row in enumerate(replicated[few]):
        name = f"replicated ({len(few)} of {len(replicated):,} shown)" if not k else None
        axes[0].step(*_shares(row, low, high), where="post", color=tint(BAYES, 0.55), linewidth=0.5, label=name)
    axes[0].step(*_shares(observed, low, high), where="post", color=DATA, linewidth=1.8, label="observed")
    axes[0].set(xlabel=label, ylabel="share of the training rows", ylim=(0, 1), xlim=(low, high))
    spread, own = replicated.std(1), observed.std()
    larger = (spread >= own).mean()
    axes[1].hist(spread, 20, color=tint(BAYES, 0.55), edgecolor="white", label="replicated")
    axes[1].axvline(own, color=DATA, linewidth=1.8, label="observed")
    axes[1].set(xlabel=f"standard deviation of {label}", ylabel="replicated sets")
    axes[1].set_title(f"{100 * larger:.0f} % of the replicated ones are larger", size=9)
    for ax in axes:
        legend_below(ax, columns=2)
    return axes


@drawn
def objective(elbo: ArrayLike, *, ax: Axes | None = None) -> Axes:
    """ELBO in nats of the whole training set per recorded step; its running median where single ones are noisy."""
    elbo = np.asarray(elbo, dtype=float).ravel()
    ax = panel(ax, 5.2, 3.3)
    draw_curve(ax, np.arange(1, len(elbo) + 1), elbo, "ELBO")
    late = elbo[-max(2, len(elbo) // 10) :]
    ax.set(xlabel="epoch", ylabel="ELBO, nats, all training rows")
    ax.set_title(f"last tenth: mean {late.mean():,.4g}, sd {late.std():.2g}".replace("-", "−"))
    return ax


@drawn
def importance_weights(log_weights: ArrayLike, *, khat: float | None = None, ax: Axes | None = None) -> Axes:
    """The largest weights p(w, D) / q(w) of draws from q, on log scales; Yao et al. 2018, arXiv:1802.02538.

    k-hat is the shape of the tail: the steeper, the more of the posterior lies where q hardly goes. Above 0.7 (dotted:
    a tail of that shape with the same median) no reweighting of q's draws would give the posterior.

    log_weights: (S,) nats, up to a constant.   khat: shape of the generalised Pareto distribution fitted to the tail.
    """
    weights = np.sort(np.asarray(log_weights, dtype=float).ravel())[::-1]
    weights = weights[np.isfinite(weights)]
    if len(weights) < 5:
        raise UserError(f"the tail of the importance weights needs at least 5 of them, got {len(weights)}")
    share = (np.arange(len(weights)) + 0.5) / len(weights)
    nats = weights - np.log(np.mean(np.exp(weights - weights[0]))) - weights[0]
    tail = int(min(0.2 * len(weights), 3 * np.sqrt(len(weights)))) or 1
    ax = panel(ax, 5.2, 3.5)
    ax.plot(share[tail:], nats[tail:] / np.log(10), ".", color=tint(BAYES, 0.55), markersize=3, label="a draw")
    ax.plot(share[:tail], nats[:tail] / np.log(10), "o", color=BAYES, markersize=3, label=f"tail: {tail} largest")
    for k, dash, colour, name in ((khat, "-", WRONG, "fit with k-hat"), (BAD_K, ":", DATA, f"with k = {BAD_K}")):
        if k is not None and np.isfinite(k):
            curve = _pareto_tail(np.exp(nats[: tail + 1]), share[: tail + 1], k)
            ax.plot(share[: tail + 1], np.log10(curve), dash, color=colour, label=name)
    ax.axhline(0, color=REFERENCE, linewidth=0.8)
    low, high = np.quantile(nats, (0.05, 1)) / np.log(10)  # the smallest weights tell nothing
    ax.set_ylim(min(low, -0.1) - 0.05 * (high - low), max(high, 0) + 0.08 * (high - low))
    ax.set(xscale="log", xlabel="share of the draws with a larger weight", ylabel="log₁₀ (weight / mean weight)")
    ax.xaxis.set_major_formatter(lambda v, _: f"{100 * v:g} %")
    ax.xaxis.set_minor_locator(NullLocator())
    said, largest = "" if khat is None else f"k-hat {khat:.2f}; ", 100 * np.exp(nats[0]) / len(weights)
    ax.set_title(f"{said}the largest weight is {largest:{'.0f' if largest > 10 else '.2g'}} % of all {len(weights):,}")
    legend_below(ax, columns=4)
    return ax


# -- pieces ------------------------------------------------------------------------------------------------------------
def _class_counts(
    replicated: np.ndarray, observed: np.ndarray, classes: Sequence[str], axes: Sequence[Axes] | None
) -> np.ndarray:
    num = len(classes)
    counts = np.stack([np.bincount(row, minlength=num)[:num] for row in replicated])
    own = np.bincount(observed, minlength=num)[:num]
    low, middle, high = np.quantile(counts, (0.025, 0.5, 0.975), axis=0)
    shown = np.sort(np.argsort(-own, kind="stable")[:MOST_CLASSES])
    axes = panels(axes, 1, 1, max(4.4, 1.6 + 0.42 * len(shown)), 3.3)
    place = np.arange(len(shown))
    axes[0].vlines(place, low[shown], high[shown], color=tint(BAYES, 0.55), linewidth=7, label="replicated, 95 %")
    axes[0].plot(place, middle[shown], "_", color=BAYES, markersize=11, mew=1.8, label="replicated, median")
    axes[0].plot(place, own[shown], "D", color=DATA, markersize=4.5, label="observed")
    outside = ((own < low) | (own > high))[shown]
    long = max(len(classes[k]) for k in shown) * len(shown) > 55
    axes[0].set_xticks(place, [classes[k] for k in shown], rotation=40 if long else 0, ha="right" if long else "center")
    axes[0].set(ylabel="training rows", xlim=(-0.6, len(shown) - 0.4), ylim=(0, 1.1 * max(high.max(), own.max())))
    more = f"{len(shown)} of {num} classes; " if len(shown) < num else ""
    axes[0].set_title(f"{more}{outside.sum()} of {len(shown)} outside their 95 %")
    legend_below(axes[0], columns=3, below=60 if long else 34)
    return axes


def _pareto_tail(weights: np.ndarray, share: np.ndarray, k: float) -> np.ndarray:
    """Quantiles of the generalised Pareto distribution of shape k with this tail's threshold (last) and median."""
    above, part = weights - weights[-1], share / share[-1]
    k = k if abs(k) > 1e-3 else 1e-3
    return weights[-1] + np.median(above) / (2**k - 1) * (part**-k - 1)


def _simultaneous_band(num: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(places, low, high) of ECDF − uniform in which 95 % of uniform samples of this size stay at all places."""
    place = np.linspace(0, 1, min(num, PLACES) + 2)[1:-1]
    cells = np.diff(np.concatenate([[0], place, [1]]))
    counts = np.random.default_rng(0).multinomial(num, cells, SIMULATED).cumsum(1)[:, :-1]
    # How extreme each path is where it is most extreme, as a two-sided pointwise probability.
    at_most, at_least = (binom.cdf(counts, num, place), binom.sf(counts - 1, num, place))
    level = np.quantile(2 * np.minimum(at_most, at_least).min(1), 0.05)
    low, high = binom.ppf(level / 2, num, place), binom.ppf(1 - level / 2, num, place)
    return place, low / num - place, high / num - place


def _shares(values: np.ndarray, low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
    """Steps of the empirical distribution function between two ends."""
    values = np.sort(values)
    share = np.concatenate([[0], np.arange(1, len(values) + 1) / len(values), [1]])
    return np.concatenate([[min(low, values[0])], values, [max(high, values[-1])]]), share


def _share(value: float) -> str:
    return "all" if value == 1 else "none" if value == 0 else f"{100 * value:.0f} %"
