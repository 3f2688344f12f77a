"""The bias of stochastic-gradient HMC as a function of its step size, on linear regression, where it is known exactly.

    python benchmarks/sghmc_bias.py

Writes ``benchmarks/results/sghmc_bias.json`` and ``benchmarks/figures/sghmc-bias.png``. Errors are standard errors over
independent chains. Two minutes on one core.
"""

from __future__ import annotations

import json
import math
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

import bnn_pyro as bp
from bnn_pyro.checks.linear_regression import correlated, stationary_covariance
from bnn_pyro.checks.step_size import sample
from bnn_pyro.inference import sghmc
from bnn_pyro.plots import style

HERE = Path(__file__).parent
ROWS, BATCH, CHAINS, FRICTION = 200, 20, 128, 0.1
#: Inputs correlate at 0.7; noise 0.7, prior scale 1.5.
PROBLEM = correlated(num=ROWS, inputs=4)
RATES = (0.003, 0.006, 0.01, 0.02, 0.05, 0.1, 0.2)

#: Name in the picture -> (settings, the form of the update, smallest lr that is affordable, largest that is stable).
FULL = {
    "SGHMC, semi-implicit": (bp.SGHMC(friction=FRICTION), "semi-implicit", 0.0, 1.0),
    "SGHMC, explicit Euler": (bp.SGHMC(friction=FRICTION), "explicit", 0.0, 0.01),
    "SGLD": (bp.SGLD(), "semi-implicit", 0.02, 1.0),
}
MINI = {
    "reshuffled": (bp.SGHMC(friction=FRICTION, batch_size=BATCH), "semi-implicit", 0.0, 0.05),
    "independent": (
        bp.SGHMC(friction=FRICTION, batch_size=BATCH, gradient_noise="ignored"),
        "semi-implicit",
        0.0,
        0.05,
    ),
    "independent, noise subtracted": (
        bp.SGHMC(friction=FRICTION, batch_size=BATCH, gradient_noise="subtracted"),
        "semi-implicit",
        0.0,
        0.05,
    ),
    "SGLD, reshuffled": (bp.SGLD(batch_size=BATCH), "semi-implicit", 0.02, 1.0),
}


@contextmanager
def update(form: str):
    """Within, positions move with the old momentum where ``form`` is "explicit"."""
    own = sghmc.step
    if form == "explicit":
        sghmc.step = lambda w, v, *rest: (w + v, own(w, v, *rest)[1])
    try:
        yield
    finally:
        sghmc.step = own


def measure(settings, form: str, lr: float) -> dict[str, float]:
    """Bias of the standard deviations (relative) and of the means (in sd), each with its standard error."""
    mean, precision = PROBLEM.mean, PROBLEM.precision
    try:
        with update(form):
            found = sample(settings, PROBLEM, lr, chains=CHAINS, times=25.0)
    except bp.UserError:  # diverged
        return {}
    unit = (found.draws - mean) / torch.linalg.inv(precision).diagonal().sqrt()
    variance = unit.square().mean((1, 2))  # a chain, over weights
    ratio = variance.mean().sqrt().item()
    off = unit.mean(1)
    return {
        "lr": lr,
        "eta_lambda_max": lr / ROWS * torch.linalg.eigvalsh(precision)[-1].item(),
        "sd": ratio - 1,
        "sd_error": variance.std().item() / math.sqrt(CHAINS) / (2 * ratio),
        "mean": off.mean(0).square().mean().sqrt().item(),
        "mean_error": (off.var(0).mean() / CHAINS).sqrt().item(),
        "kinetic_temperature": found.kinetic_temperature,
        "steps": found.steps,
    }


def theory(lr: float) -> float:
    """The bias of the standard deviations of semi-implicit SGHMC, full batch, from its stationary covariance."""
    covariance = stationary_covariance(PROBLEM.precision, lr / ROWS, FRICTION)
    return (covariance.diagonal() / torch.linalg.inv(PROBLEM.precision).diagonal()).mean().sqrt().item() - 1


@style.drawn
def draw(found: dict[str, dict[str, list[dict]]]):
    """Standard deviations (all weights together) and means against the step size, full batch and mini-batches."""
    figure = style.figure(7.2, 5.4)
    axes = figure.subplots(2, 2, sharex=True)
    colours = [style.BAYES, *style.CONTRAST]
    for column, (title, lines) in enumerate(found.items()):
        top, below = axes[:, column]
        for i, (name, points) in enumerate(lines.items()):
            look = dict(color=colours[i], marker=style.MARKERS[i], linestyle=style.LINES[i], markersize=4, capsize=2)
            shown = [p for p in points if abs(p["sd"]) < 2]
            x = [p["lr"] for p in shown]
            top.errorbar(x, [100 * p["sd"] for p in shown], [200 * p["sd_error"] for p in shown], label=name, **look)
            below.errorbar(x, [100 * p["mean"] for p in shown], label=name, **look)
        first = next(iter(lines.values()))
        error = [100 * p["mean_error"] for p in first]
        below.fill_between([p["lr"] for p in first], 0, error, color="0.88", label="Monte-Carlo error of the first")
        below.set_ylim(0, 3)
        top.axhspan(-0.5, 0.5, color="0.88", zorder=0)
        if column == 0:
            rates = np.geomspace(RATES[0], RATES[-1], 50)
            look = dict(color=style.REFERENCE, linestyle=":", label="semi-implicit, theory")
            top.plot(rates, [100 * theory(lr) for lr in rates], **look)
            top.legend(handles=top.get_lines()[-1:], loc="lower right")
        top.axhline(0, color=style.REFERENCE, linewidth=0.8)
        top.set_yscale("symlog", linthresh=1)
        top.set_yticks([-50, -10, -1, 0, 1, 10, 100], ["−50", "−10", "−1", "0", "1", "10", "100"])
        top.minorticks_off()
        top.set(title=title, ylim=(-70, 200), xscale="log")
        below.set(xlabel="lr  (η = lr / N)")
        style.legend_below(below, columns=1)
    axes[0, 0].set_ylabel("bias of the sd (%), ± 2 s.e.")
    axes[1, 0].set_ylabel("bias of the means (% of sd)")
    return figure


def main() -> None:
    """Measure, write, draw."""
    torch.set_num_threads(1)
    found = {
        title: {
            name: [p for lr in RATES if low <= lr <= high and (p := measure(settings, form, lr))]
            for name, (settings, form, low, high) in kinds.items()
        }
        for title, kinds in (("full batch", FULL), (f"mini-batches of {BATCH} of {ROWS} rows", MINI))
    }
    for title, lines in found.items():
        for name, points in lines.items():
            for p in points:
                print(f"{title:32s} {name:30s} lr {p['lr']:<6g} ηλ {p['eta_lambda_max']:.3f}  sd {100 * p['sd']:+7.2f} "
                      f"± {100 * p['sd_error']:.2f} %  mean {p['mean']:.3f} ± {p['mean_error']:.3f}  "
                      f"kinetic T {p['kinetic_temperature']:.3f}")  # fmt: skip
    setting = dict(rows=ROWS, batch=BATCH, friction=FRICTION, chains=CHAINS)
    (HERE / "results" / "sghmc_bias.json").write_text(json.dumps({"settings": setting, "bias": found}, indent=1) + "\n")
    draw(found).savefig(HERE / "figures" / "sghmc-bias.png", dpi=160)


if __name__ == "__main__":
    main()
