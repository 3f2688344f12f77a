"""Training curves of optimisers and samplers, the NLL by the number of stored draws, and the loss by pruned weights."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator
from torch import Tensor

from bnn_pyro.diagnostics.draws import sized, walk
from bnn_pyro.errors import UserError
from bnn_pyro.metrics.metric import Targets
from bnn_pyro.plots.layout import Panel, legend_below, legend_outside, panel, panels, plain_numbers
from bnn_pyro.plots.style import BAYES, CONTRAST, DASHED, DATA, POINT, REFERENCE, drawn, look, readable, tint
from bnn_pyro.posterior import Posterior
from bnn_pyro.predictive import Prediction
from bnn_pyro.pruning import LOG_ALPHA, PrunedScore

_NATS = "nats, all training rows"
#: Panels of a trace in their order, {name in the trace: (axis label, title)}.
_CURVES = {
    "kinetic_temperature": ("kinetic temperature", "1 where the momenta are in equilibrium"),
    "step_size": ("step size", "step size"),
    "elbo": (_NATS, "ELBO (higher is better)"),
    "log_joint": (_NATS, "log joint density (higher is better)"),
    "log_likelihood": (_NATS, "log likelihood"),
    "kl": (_NATS, "KL to the prior"),
    "log_prior": (_NATS, "log prior density"),
    "validation_nll": ("NLL, nats per validation row", "NLL of validation rows"),
}
#: {loss of a pruned network: axis label}.
_LOSSES = {"error": "error, % of points", "rmse": "RMSE, target units",
           "nrmse": "RMSE, standard deviations of each target", "label_error": "wrong labels, share",
           "concordance": "concordance"}  # fmt: skip


@drawn
def training_curves(trace: Mapping[str, Sequence[float]]) -> np.ndarray:
    """Objective and each of its parts per epoch, in nats of the whole training set; axes (panels,).

    The last panel has the NLL of the validation rows, if there are any, with a mark at the minimum, whose weights early
    stopping keeps. Strong lines are running medians of the faint ones. Titles say where a steep start is cut off.

    For stochastic-gradient samplers: kinetic temperature, 1 in equilibrium (dashed; above it the step is too large or
    the noise estimate too small), step size, log joint density, NLL of the draws stored so far (from the dotted line).

    trace: ``posterior.trace``.   Raises UserError if it has neither an objective nor statistics of a sampler.
    """
    table = pd.DataFrame({name: values for name, values in trace.items() if len(values)}, dtype=float)
    # One row per epoch; without numbers in the trace, they start from 1.
    table = table.set_index("epoch" if "epoch" in table else np.arange(1.0, len(table) + 1))
    present = [name for name in _CURVES if name in table and np.isfinite(table[name]).any()]
    if not {"elbo", "log_joint", "kinetic_temperature", "step_size"} & {*present}:
        raise UserError(f"a training curve needs 'elbo' or 'log_joint'; the trace has {', '.join(trace) or 'nothing'}")
    stored = table.index[table.get("draws", np.zeros(len(table))) > 0]
    axes = panels(len(present), 3, (3.4, 2.7), least=4.4)
    for k, (ax, name) in enumerate(zip(axes, present, strict=True)):
        values, (label, title) = table[name], _CURVES[name]
        if len(stored):  # a sampler
            title = "NLL of the draws so far" if name == "validation_nll" else title.removesuffix(" (higher is better)")
        title += f": {readable(values[np.isfinite(values)].iloc[-1])} at last" * (name != "kinetic_temperature")
        if name == "kinetic_temperature" and len(stored):
            title = f"mean {values[stored].mean():.3f} while draws are stored"
        _curve(ax, values.rename("validation rows" if name == "validation_nll" else name), label, title, k)
        if name == "kinetic_temperature":
            ax.axhline(1, **DASHED)
        elif name == "step_size":
            ax.set_ylim(0, 1.08 * values.max())
        if len(stored):
            first = ax.axvline(stored[0], color=REFERENCE, linestyle=":", label="first stored draw")
        elif name == "validation_nll":
            best, lowest = values.idxmin(), values.min()  # the first minimum
            ax.plot(best, lowest, "D", color=DATA, zorder=4, label=f"lowest: epoch {best:g}, {lowest:.4f} nats")
            ax.axvline(best, color=DATA, linestyle=":", linewidth=1)
            low, high = ax.get_ylim()
            ax.set_ylim(min(low, lowest - 0.05 * (high - low)), high)  # it may be in a start that is cut off
            legend_below(ax, 1)
    if len(stored):
        axes[0].figure.legend(handles=[first], loc="outside lower center")
    return axes


def _curve(ax: Axes, values: pd.Series, ylabel: str, title: str, k: int = 0) -> None:
    window = len(values) // 40 | 1  # odd
    style = look(k, marker="o" if len(values) <= 20 else None)
    if window >= 3:
        ax.plot(values.index, values, color=style["color"], alpha=0.3, linewidth=0.7)
    ax.plot(values.index, values.rolling(window, center=True, min_periods=1).median(), **style, label=values.name)
    plain_numbers(ax)
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.set(xlabel="epoch", ylabel=ylabel, title=title)
    ax.grid(axis="y", color="0.9")
    # The limits are those of the last 90 % of the epochs, if these would otherwise fill a third of the axis or less.
    finite = values[np.isfinite(values)].to_numpy()
    late = finite[len(finite) // 10 :]
    margin = 0.06 * (np.ptp(late) or 1.0)
    if np.ptp(finite) > 3 * (np.ptp(late) + 2 * margin):
        ax.set_ylim(late.min() - margin, late.max() + margin)
        ax.set_title(f"{title}\nstarts at {readable(finite[0])}")


@drawn
def growing_ensemble(
    posterior: Posterior, x: Tensor, y: Targets, *, baseline: Prediction | None = None, ax: Panel = None
) -> Axes:
    """NLL in nats per row of the first s stored draws of every chain, against the number of draws in that ensemble.

    −mean_n log 1/S Σ_s p(y_n | x_n, w_s). Thin: each chain separately. Band: NLL of a single draw, median and central
    68 %. If the curve still falls at its end, more draws would help. With one draw per chain, chains are added instead.

    x: (B, *input_shape), standardised.   y: (B,).   baseline: another prediction of the same rows.
    Raises UserError if the posterior has no stored draws, or only one.
    """
    if posterior.chains is None:
        raise UserError("an ensemble grows by stored draws, but this posterior is a guide, which has none")
    chains, draws = sized(posterior)
    if chains * draws < 2:
        raise UserError("an ensemble of a single draw cannot grow")
    if draws == 1:  # members of a deep ensemble: members are added
        chains, draws = draws, chains
    if baseline is not None and len(baseline) != len(x):
        raise UserError(f"the baseline predicts {len(baseline)} points, and x has {len(x)}")
    together, single, of_chain = _running_nll(posterior, x, y, chains, draws)
    sizes = np.arange(1, draws + 1)
    ax = panel(ax)
    low, middle, high = np.quantile(single, (0.16, 0.5, 0.84))  # robust to extreme draws
    ax.axhspan(low, high, color="0.88", linewidth=0, zorder=0)
    label = f"a single draw: {middle:.4f} ({low:.4f} to {high:.4f})"
    ax.axhline(middle, color=DATA, linestyle=":", linewidth=1.2, label=label)
    if chains > 1:
        label = [f"each of {chains} chains alone", *(f"_chain {k}" for k in range(1, chains))]
        ax.plot(sizes, of_chain.T, color=tint(CONTRAST[2], 0.75), linewidth=0.7, label=label)
    label = "ensemble" if chains == 1 else f"ensemble of {chains} chains"
    ax.plot(chains * sizes, together, color=BAYES, marker="o" if draws <= 20 else None, label=label)
    if baseline is not None:
        nll, limits = -baseline.log_prob(torch.as_tensor(y)).double().mean().item(), ax.get_ylim()
        ax.axhline(nll, color=POINT, linestyle="-.", linewidth=1.4, label=f"baseline: {nll:.4f}")
        if abs(nll - np.mean(limits)) > 2 * np.ptp(limits):  # the other lines would look flat
            ax.set_ylim(limits)
    ax.set(xscale="log", xlabel="stored draws in the ensemble", ylabel="NLL, nats per row")
    plain_numbers(ax)
    ax.set_title(f"NLL {together[-1]:.4f} nats of all {chains * draws:,} draws")
    ax.grid(axis="y", color="0.9")
    return legend_below(ax, 2)


def _running_nll(posterior: Posterior, x: Tensor, y: Targets, chains: int, draws: int) -> tuple[np.ndarray, ...]:
    """NLL of the first s draws of all chains (D,), of each draw (C·D,), and of the first s of each chain (C, D)."""
    num = chains * draws
    if len(y := torch.as_tensor(y)) != len(x):
        raise UserError(f"y has shape {tuple(y.shape)}, but x has {len(x)} rows")
    size = torch.arange(1, draws + 1, dtype=torch.float64)
    together, single, of_chain = (torch.zeros(n, dtype=torch.float64) for n in (draws, num, (chains, draws)))
    for rows, prediction in walk(posterior, x, num):  # every stored draw, chain after chain
        log_prob = prediction.log_probs(y[rows].cpu()).double()
        single -= log_prob.sum(1)
        grown = torch.logcumsumexp(log_prob.reshape(chains, draws, -1), 1)  # (C, D, rows)
        of_chain -= (grown - size.log()[:, None]).sum(2)
        together -= (torch.logsumexp(grown, 0) - (chains * size).log()[:, None]).sum(1)
    return tuple((total / len(x)).numpy() for total in (together, single, of_chain))


@drawn
def pruning_curve(curve: Sequence[PrunedScore], *, removed: float | None = None) -> np.ndarray:
    """Loss (left) and NLL (right) against the share of weights removed, with 95 % bootstrap intervals; axes (2,).

    curve: from ``pruning.pruning_curve``.   removed: a share to mark, of the weights with log α > 3.
    Raises UserError for fewer than two points, or for one without weights, which a log scale cannot show.
    """
    if len(curve := sorted(curve, key=lambda point: point.share)) < 2 or curve[-1].share >= 1:
        raise UserError("a pruning curve needs two shares or more, each below 1")
    axes = panels(2, 2, (3.8, 3.3))
    shares = np.array([1 - point.share for point in curve])
    # The marked share has no tick, which could overlap with its neighbour.
    ticks = [point.share for point in curve if removed is None or abs(point.share - removed) > 1e-9]
    losses = np.array([point.loss for point in curve]) * (100 if curve[0].measure == "error" else 1)
    nll = np.array([point.nll for point in curve])
    for ax, scores, label in zip(axes, (losses, nll), (_LOSSES[curve[0].measure], "NLL, nats a point"), strict=True):
        value, low, high = scores.T
        ax.fill_between(shares, low, high, color=tint(BAYES, 0.25), linewidth=0, label="95% interval over points")
        ax.axhline(value[0], **DASHED, label="all weights")
        ax.plot(shares, value, color=BAYES, marker="o", label="pruned")
        if removed is not None and 0 < removed < 1:
            ax.axvline(1 - removed, color=CONTRAST[0], linestyle=":", label=f"log α > {LOG_ALPHA:g}: {removed:.1%}")
        ax.set(xscale="log", xlim=(1.08, shares[-1] / 1.12), xlabel="weights removed, % (log scale of those left)")
        ax.set_xticks([1 - share for share in ticks], [f"{100 * share:.3g}" for share in ticks])
        ax.set_ylabel(label)
        if value.min() > 0 and value.max() > 4 * value.min():  # to show details of its flat part
            ax.set(yscale="log", ylim=(0.8 * max(low.min(), value.min() / 2), 1.2 * high.max()))
            ax.set_ylabel(f"{label} (log scale)")
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.yaxis.set_major_formatter("{x:g}")
        ax.minorticks_off()
        ax.grid(axis="y", color="0.92")
    return legend_outside(axes, 4)
