"""Figures of a diagnosis: traces and ranks of chains, R-hat, effective draws, Pareto k, LOO-PIT, replicated data.

All functions take plain arrays, of C chains of D draws of M quantities; thresholds of verdicts are drawn. Of many
chains some are drawn as lines, evenly chosen from the lowest to the highest mean, over the range of all.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import ArrayLike
from scipy.stats import rankdata

from bnn_pyro.diagnostics.draws import even
from bnn_pyro.diagnostics.verdicts import ESS, RHAT
from bnn_pyro.errors import UserError
from bnn_pyro.plots import layout
from bnn_pyro.plots.checks import draw_ecdf_difference
from bnn_pyro.plots.style import BAYES, CONTRAST, DASHED, DATA, LINES, REFERENCE, WRONG, drawn, look, tint

#: Pareto k above which an estimate is less precise, and above which it is unreliable (Vehtari et al. 2024).
GOOD_K, BAD_K = 0.5, 0.7
#: Largest number of rows that are named, and number of rows above which markers are small.
NAMED, MANY = 6, 2000
#: Largest numbers of replicated data sets and of classes that are drawn.
MAX_REPLICATED, MAX_CLASSES = 40, 20
#: Number of points at which the band of the LOO-PIT holds.
PLACES = 100
#: Largest number of chains that are drawn as lines.
MAX_CHAINS = 8


@drawn
def convergence(
    rhat: ArrayLike, ess_bulk: ArrayLike, ess_tail: ArrayLike | None = None, *, draws: int | None = None,
    nested: bool = False,
) -> np.ndarray:  # fmt: skip
    """ECDFs of R-hat (left) and effective draws (right) of the network's outputs at test points; axes (2,).

    Dashed: the requirements, R-hat below 1.01 and 400 effective draws; values on the shaded side do not meet them.

    rhat, ess_bulk, ess_tail: any shape, NaN where an output never varies.   draws: C·D, the effective draws of an
    ideal sampler.   nested: R-hat is the nested one (Margossian et al. 2022, arXiv:2110.13017), for many short chains.
    """
    arrays = [np.asarray(v, dtype=float) for v in (rhat, ess_bulk, ess_tail)]
    rhat, *effective = (v[np.isfinite(v)] for v in arrays)
    if not len(rhat):
        raise UserError("no output varies between draws, so there is no R-hat to draw")
    axes = layout.panels(2, 2, (3.9, 3.2))
    name, worst, good = "nested R-hat" if nested else "R-hat", rhat.max(), (rhat < RHAT).mean()
    without = f"; {num_constant:,} without" if (num_constant := arrays[0].size - len(rhat)) else ""
    low, high = max(0.9, min(0.998, rhat.min() - 0.001)), max(1.02, 1.0 + 1.15 * (worst - 1))
    _threshold(axes[0], RHAT, high)
    axes[0].ecdf(rhat, color=BAYES, label=name)
    axes[0].set(xlim=(low, high), xlabel=f"{name} of an output", ylabel="share of the outputs")
    axes[0].xaxis.set_major_locator(MaxNLocator(6))
    axes[0].set_title(f"largest {name} {worst:.3f}; below {RHAT:g}: {100 * good:.0f} %{without}")
    effective = {kind: v for kind, v in zip(("bulk", "tail"), effective, strict=True) if len(v)}
    fewest = {kind: v.min() for kind, v in effective.items()}
    low = min(ESS, *fewest.values()) / 1.3
    high = max(ESS, draws or 0, *(v.max() for v in effective.values())) * 1.3
    _threshold(axes[1], ESS, low)
    if draws:
        axes[1].axvline(draws, color=REFERENCE, linestyle=":", linewidth=1.2, label=f"{draws:,} draws in all")
    for k, (kind, v) in enumerate(effective.items()):
        axes[1].ecdf(v, **look(k, marker=None), label=kind)
    axes[1].set(xscale="log", xlim=(low, high), xlabel="effective draws of an output")
    layout.plain_numbers(axes[1])
    axes[1].set_title("fewest effective draws: " + ", ".join(f"{np.floor(v):,.0f} ({k})" for k, v in fewest.items()))
    for ax in axes:
        ax.set_ylim(0, 1.02)
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
    return layout.legend_below(axes, 2)


def _threshold(ax: Axes, value: float, end: float) -> None:
    ax.axvspan(value, end, color="0.93", linewidth=0)
    ax.axvline(value, **DASHED, label=f"{value:g}: required")


@drawn
def pareto_k(k: ArrayLike, *, rows: ArrayLike | None = None, ax: layout.Panel = None) -> Axes:
    """Pareto k of every training row: how much the posterior changes without the row; Vehtari et al. 2024.

    Above 0.7 (crosses) PSIS-LOO of the row, and so its sum, is unreliable: the row is an outlier, or very influential.

    k: (N,).   rows: (N,) numbers of these rows, from ``data.index_train``; None: 0, 1, …
    """
    k = np.asarray(k, dtype=float).ravel()
    rows = np.arange(len(k)) if rows is None else np.asarray(rows)
    bad, fair = k > BAD_K, (k > GOOD_K) & (k <= BAD_K)
    ax = layout.panel(ax, 7.2, 3.2)
    for some, marker, colour, label in (
        (~bad & ~fair, "." if len(k) <= MANY else ",", BAYES, "up to 0.5: good"),
        (fair, "^", CONTRAST[0], "0.5 to 0.7: usable"),
        (bad, "x", WRONG, "above 0.7: unreliable"),
    ):
        ax.plot(rows[some], k[some], marker, color=colour, label=f"{label} ({some.sum():,})")
    ax.axhline(GOOD_K, color=REFERENCE, linestyle=":", linewidth=1)
    ax.axhline(BAD_K, **DASHED)
    finite = np.isfinite(k)
    for i in sorted(np.flatnonzero(bad & finite), key=lambda i: -k[i])[:NAMED]:
        ax.annotate(str(rows[i]), (rows[i], k[i]), (4, 0), textcoords="offset points", size=7, va="center")
    end = rows.max() + 1
    ax.set(xlabel="training row, as its file numbers it (else from 0)", ylabel="Pareto k")
    ax.set_xlim(-0.02 * end, 1.04 * end)
    ax.set_ylim(min(0, k[finite].min(initial=0.05) - 0.05), max(1.0, k[finite].max(initial=0) + 0.08))
    ax.set_title(f"largest k {k[finite].max(initial=0):.2f}; {bad.sum():,} of {len(k):,} rows above {BAD_K}")
    return layout.legend_below(ax, 3)


@drawn
def loo_pit(pit: ArrayLike) -> np.ndarray:
    """Leave-one-out PIT of the targets: histogram, and ECDF minus the uniform one; axes (2,).

    It is uniform if predictions are calibrated; a U means too narrow, a hill too wide, a slope biased. At most 5 % of
    calibrated models leave the band (Säilynoja et al. 2022, arXiv:2103.10522).   pit: (N,) in [0, 1].
    """
    pit = np.asarray(pit, dtype=float).ravel()
    if not len(pit) or not ((pit >= 0) & (pit <= 1)).all():
        raise UserError("the LOO-PIT takes numbers between 0 and 1, without gaps")
    axes = layout.panels(2, 2, (3.9, 3.1))
    layout.calibrated_histogram(axes[0], pit, xlabel="LOO-PIT: P(Y ≤ observed y)", ylabel="training rows")
    ranks = np.minimum((PLACES + 1) * pit, PLACES).astype(int)
    leaves = draw_ecdf_difference(axes[1], ranks, PLACES, {0.05: "95 % band, all places at once"})
    axes[1].set(xlabel="LOO-PIT", ylabel="ECDF − uniform", title="leaves the band" if leaves else "stays in the band")
    layout.legend_below(axes[1], 3)
    return axes


@drawn
def posterior_predictive(
    replicated: ArrayLike, observed: ArrayLike, *, classes: Sequence[str] = (), label: str = "target"
) -> np.ndarray:
    """Data sets drawn from the posterior predictive and the observed one; axes (1,), or (2,) for a regression.

    Regression: ECDFs of the targets and of replicated targets, and the standard deviations of all sets.
    Classification: number of rows of each class, with the central 95 % of the replicated sets.

    replicated: (S, N) targets, or labels, drawn for the rows of ``observed`` (N,).   classes: their names; () for a
    regression.   label: name and unit of the target.
    """
    replicated, observed = np.asarray(replicated, dtype=float), np.asarray(observed, dtype=float).ravel()
    if replicated.ndim != 2 or replicated.shape[1] != len(observed):
        raise UserError(f"replicated data must be (draws, {len(observed)} rows), got the shape {replicated.shape}")
    if len(classes):
        return _class_counts(replicated.astype(int), observed.astype(int), classes)
    axes = layout.panels(2, 2, (3.9, 3.2), width_ratios=(3, 2))
    few = replicated[even(len(replicated), MAX_REPLICATED)]
    low, high = np.quantile(np.concatenate([few.ravel(), observed]), (0.002, 0.998))
    low, high = min(low, observed.min()), max(high, observed.max())
    name = f"replicated ({len(few)} of {len(replicated):,} shown)"
    for k, row in enumerate(few):
        axes[0].ecdf(row, color=tint(BAYES, 0.55), linewidth=0.5, label=None if k else name)
    axes[0].ecdf(observed, color=DATA, linewidth=1.8, label="observed")
    margin = 0.03 * (high - low)
    axes[0].set(xlabel=label, ylabel="share of the training rows", ylim=(0, 1), xlim=(low - margin, high + margin))
    spread, actual = replicated.std(1), observed.std()
    axes[1].hist(spread, 20, color=tint(BAYES, 0.55), edgecolor="white", label="replicated")
    axes[1].axvline(actual, color=DATA, linewidth=1.8, label="observed")
    axes[1].set(xlabel=f"standard deviation of {label}", ylabel="replicated sets")
    axes[1].set_title(f"{100 * (spread >= actual).mean():.0f} % of the replicated ones are larger")
    return layout.legend_below(axes, 2)


def _class_counts(replicated: np.ndarray, observed: np.ndarray, classes: Sequence[str]) -> np.ndarray:
    num = len(classes)
    counts = np.stack([np.bincount(row, minlength=num)[:num] for row in [observed, *replicated]])
    picks = np.sort(np.argsort(-counts[0], kind="stable")[:MAX_CLASSES])
    actual, (low, middle, high) = counts[0, picks], np.quantile(counts[1:, picks], (0.025, 0.5, 0.975), axis=0)
    axes = layout.panels(1, 1, (max(4.4, 1.6 + 0.42 * len(picks)), 3.3))
    ax, place = axes[0], np.arange(len(picks))
    ax.vlines(place, low, high, color=tint(BAYES, 0.55), linewidth=7, label="replicated, 95 %")
    ax.plot(place, middle, "_", color=BAYES, markersize=11, mew=1.8, label="replicated, median")
    ax.plot(place, actual, "D", color=DATA, markersize=4.5, label="observed")
    long = max(len(classes[k]) for k in picks) * len(picks) > 55
    ax.set_xticks(place, [classes[k] for k in picks], rotation=40 if long else 0, ha="right" if long else "center")
    ax.set(ylabel="training rows", xlim=(-0.6, len(picks) - 0.4), ylim=(0, 1.1 * max(high.max(), actual.max())))
    more = f"{len(picks)} of {num} classes; " if len(picks) < num else ""
    ax.set_title(f"{more}{((actual < low) | (actual > high)).sum()} of {len(picks)} outside their 95 %")
    return layout.legend_below(axes, 3, below=60 if long else 34)


@drawn
def trace_ranks(
    values: ArrayLike, labels: Sequence[str], *, diverging: ArrayLike | None = None, unit: str = "value"
) -> np.ndarray:
    """Trace (left) and ranks (right) of each quantity, axes (2·M,); Vehtari et al. 2021, arXiv:1903.08008, figure 5.

    Ranks are among all draws, with one row per chain (or per group of many chains): a row of one colour means that the
    chain visits low and high values as often as the others. Crosses below mark divergent draws.

    values: (C, D, M), the first 6 of M are shown.   diverging: (C, D), 0 or 1.   unit: of the values, for the axis.
    """
    values = np.asarray(values, dtype=float)
    if values.ndim != 3 or values.shape[2] != len(labels):
        raise UserError(f"values must be (chains, draws, {len(labels)} quantities), got the shape {values.shape}")
    chains, _, every = values.shape
    num = min(6, every)
    axes = layout.panels(2 * num, 2, (3.9, 1.25), (0, 0.75), width_ratios=(3, 2))
    lost = () if diverging is None else 1 + np.flatnonzero(np.any(diverging, axis=0))
    for trace, rank, label, chain_values in zip(axes[::2], axes[1::2], labels, np.moveaxis(values, 2, 0), strict=False):
        _lines(trace, chain_values)
        if len(lost):
            style = dict(color=DATA, transform=trace.get_xaxis_transform(), label="divergent")
            trace.plot(lost, np.full(len(lost), 0.03), "x", **style)
        trace.set_title(label if len(label) <= 44 else f"{label[:43]}…", size=8.5, loc="left")
        trace.yaxis.set_major_locator(MaxNLocator(3))
        trace.set_ylabel(unit, size=8)
        _ranks(rank, chain_values)
    for ax in axes[:-2]:
        ax.tick_params(labelbottom=False)
    few = "" if num == every else f"; {num} of {every} quantities"
    axes[-2].set_xlabel(f"kept draw ({min(MAX_CHAINS, chains)} of {chains} chains{few})", size=8)
    axes[-1].set_xlabel("rank of the draw, in % of all draws", size=8)
    return axes


def _lines(ax: Axes, values: np.ndarray) -> None:
    draw, chains = np.arange(1, values.shape[1] + 1), values.shape[0]
    picks = np.sort(values.mean(1).argsort(kind="stable")[even(chains, MAX_CHAINS)])
    if chains > len(picks):
        low, high = np.nanquantile(values, (0.05, 0.95), axis=0)
        ax.fill_between(draw, low, high, color="0.85", linewidth=0, label=f"5–95 % of {chains} chains")
    for k, c in enumerate(picks):
        style = look(k, linestyle=LINES[k // 5], marker="o" if len(draw) == 1 else None)
        ax.plot(draw, values[c], **style, linewidth=0.7, label=f"chain {c}")
    ax.set_xlim(1, max(2, len(draw)))
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def _ranks(ax: Axes, values: np.ndarray) -> None:
    chains = len(values)
    share = (rankdata(values, axis=None).reshape(values.shape) - 0.5) / values.size
    rows = np.array_split(share, min(chains, 64))  # more chains share rows
    bins = int(np.clip(min(r.size for r in rows) // 8, 2, 20))  # with an expected number of 8 draws or more
    edges = np.linspace(0, 1, bins + 1)
    counts = [np.histogram(r, edges)[0] / (r.size / bins) for r in rows]
    mesh = ax.pcolormesh(100 * edges, np.arange(len(rows) + 1) - 0.5, counts, cmap="PuOr_r", vmin=0, vmax=2)
    bar = ax.figure.colorbar(mesh, ax=ax, ticks=[0, 1, 2], pad=0.02, aspect=12)
    bar.ax.set_yticklabels(["0", "1 ×", "2 ×"], size=7)
    ax.set(ylim=(len(rows) - 0.5, -0.5), yticks=range(chains) if chains <= MAX_CHAINS else [])
    ax.xaxis.set_major_locator(MaxNLocator(4))
    each = -(-chains // len(rows))
    ax.set_ylabel("chain" if each == 1 else f"rows of ≤{each} chains", size=8)
    ax.set_title("ranks, times the expected", size=8.5, loc="left")
