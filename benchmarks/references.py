"""Reference posteriors of networks, verified in function space: made here, stored in ``bnn_pyro/checks/references``.

    python benchmarks/references.py toy-curve breast-cancer digits-last-layer mnist-160 boston --runs /tmp/references
    python benchmarks/references.py boston --runs /tmp/references --no-store      # sample and print the bar only

Each is sampled twice: 10,000 draws by ChEES-HMC, every chain from a starting point of its own, thinned; and a second
run that shares nothing with it, by NUTS or from other starting points, unthinned. The bar is that of posteriordb
(Magnusson et al. 2024, arXiv:2407.04967), asked of what the network computes, because weights are not identified:
10,000 draws, R-hat < 1.01, E-BFMI > 0.2, |autocorrelation at lag 1| < 0.05, no divergences; and means and spreads of
the two runs must agree within their Monte-Carlo errors. What misses one is stored as such, with the numbers.

A run is kept in ``--runs`` (seconds to an hour each) and, when interrupted, goes on from there to the same draws.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reference_recipes import RECIPES, data_of, entry_of, inputs_of
from scipy.stats import norm
from torch import Tensor

import bnn_pyro as bp
from bnn_pyro.checks.check import ALPHA
from bnn_pyro.checks.reference_posterior import REFERENCES, ReferencePosterior, bounded, log_joints_at
from bnn_pyro.diagnostics.chain_statistics import bfmi, chain_statistics, ess_mean, nested_rhat
from bnn_pyro.diagnostics.functions import output_values
from bnn_pyro.inference import METHODS
from bnn_pyro.settings import build


def sampled(name: str, which: str, runs: Path) -> bp.Posterior:
    """The first or the second run, from ``runs`` where it is there; ``run.json`` beside it tells what made it."""
    recipe, folder = RECIPES[name], runs / name
    method, settings = getattr(recipe, which)
    data = data_of(recipe)
    entry, place = entry_of(recipe, data, folder), folder / which
    about = place / "run.json"
    if not about.is_file():
        place.mkdir(parents=True, exist_ok=True)
        about.write_text(json.dumps(stamp()))
    seed = 0 if which == "first" else 1
    start = time.perf_counter()
    how = dict(seed=seed, out=place, resume=True, device="cpu", progress=False)
    posterior = bp.fit(entry, data, build(METHODS[method], settings), **how)
    print(f"{name}, {which} run: {time.perf_counter() - start:.0f} s", flush=True)
    return posterior


def outputs(posterior: bp.Posterior, x: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of all draws at x: outputs (C, D, B, J), probabilities or means (C·D, B, K), noise (C·D, 1) or empty."""
    shape = next(iter(posterior.chains.values())).shape[:2]
    values, means, noise = [], [], np.zeros((0, 1))
    for part in x.split(25):
        prediction = bp.predict(posterior, part, num_draws=shape.numel())
        values.append(output_values(prediction).astype(np.float32))
        if prediction.task == "regression":
            means.append(prediction.locs[..., None].numpy())
            noise = prediction.scales[:, :1].double().numpy()
        else:
            means.append(prediction.probs.numpy())
    return np.concatenate(values, 1).reshape(*shape, len(x), -1), np.concatenate(means, 1), noise


def series(values: np.ndarray) -> np.ndarray:
    """(C, D, …) -> (M, C, D)."""
    return np.moveaxis(values.reshape(*values.shape[:2], -1), 2, 0)


def neighbours(values: np.ndarray) -> np.ndarray:
    """Autocorrelation at lag 1 of (M, C, D) about the mean of all chains, which R-hat says they share; (M,)."""
    apart = values - values.mean((1, 2), keepdims=True)
    return (apart[..., 1:] * apart[..., :-1]).mean((1, 2)) / np.square(apart).mean((1, 2))


def averages(values: np.ndarray, centre: np.ndarray, spread: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means of the bounded functions of outputs (C, D, B, J), and their Monte-Carlo errors; (2, B, J) each."""
    found = bounded(values.astype(np.float64), centre, spread)
    error = [one.std((0, 1)) / np.sqrt(ess_mean(series(one)).reshape(centre.shape)) for one in found]
    return found.mean((1, 2)), np.stack(error)


def bar(first: np.ndarray, posterior: bp.Posterior, again: bp.Posterior) -> dict[str, list]:
    """{criterion: [what was reached, the limit, whether that meets it]} of the first run's outputs (C, D, B, J)."""
    values = series(first).astype(np.float64)
    split = chain_statistics(values).rhat
    nested = nested_rhat(values, np.arange(values.shape[1]))
    energies = [bfmi(p.stats["energy"].numpy()) for p in (posterior, again)]
    reached = {
        "draws": (values[0].size, 10_000, int.__ge__),
        "rhat_split_max": (float(np.nanmax(split)), 1.01, float.__lt__),
        "rhat_of_starts_max": (float(np.nanmax(nested)), 1.01, float.__lt__),
        "bfmi_min": (float(min(e.min() for e in energies)), 0.2, float.__gt__),
        "lag1_max": (float(np.abs(neighbours(values)).max()), 0.05, float.__lt__),
        "divergences": (int(sum(p.stats["diverging"].sum() for p in (posterior, again))), 0, int.__eq__),
    }
    return {name: [value, limit, meets(value, limit)] for name, (value, limit, meets) in reached.items()}


def measured(name: str, runs: Path) -> ReferencePosterior:
    """A reference of both runs, whether or not it meets the bar."""
    recipe, folder = RECIPES[name], runs / name
    data = data_of(recipe)
    entry, x = entry_of(recipe, data, folder), inputs_of(recipe, data)
    posterior, again = (sampled(name, which, runs) for which in ("first", "second"))
    values, means, noise = outputs(posterior, x)
    centre, spread = (getattr(values.astype(np.float64), f)((0, 1)) for f in ("mean", "std"))
    expected, error = averages(values, centre, spread)
    others, other_error = averages(outputs(again, x)[0], centre, spread)
    criteria = bar(values, posterior, again)
    z = np.abs(expected - others) / np.hypot(error, other_error)
    p = float(min(1.0, 2 * norm.sf(z.max()) * z.size))
    criteria["second_run_p"] = [p, ALPHA, p > ALPHA]
    stored, shown = (1000, 60) if centre.shape[1] == 1 else (330, 30)
    kept = np.linspace(0, values.shape[0] * values.shape[1] - 1, stored).round().astype(int)
    points = np.linspace(0, len(x) - 1, min(len(x), shown)).round().astype(int)
    draws = ((values.reshape(-1, *centre.shape)[kept] - centre) / spread)[:, points]
    lp = series(posterior.stats["lp"].numpy()[..., None])
    about = {
        "title": recipe.title,
        "task": data.schema.task,
        "variant": recipe.variant,
        "entry": dict(recipe.entry),
        "data": dict(recipe.data),
        "backbone": dict(recipe.backbone),
        "dataset": data.name,
        "fingerprint": data.fingerprint,
        "unit": data.schema.target,
        "classes": list(data.schema.classes),
        "weights": sum(v[0, 0].numel() for v in posterior.chains.values()),
        "draws": int(values.shape[0] * values.shape[1]),
        "criteria": criteria,
        "met": all(met for *_, met in criteria.values()),
        "log_joint_rhat": float(chain_statistics(lp).rhat[0]),
        "log_joint_lag1": float(neighbours(lp)[0]),
        "ess_min": float(chain_statistics(series(values)).ess_bulk.min()),
        "largest_shift_between_runs": float(np.abs(means_apart(values, again, x, spread)).max()),
        "log_joint": log_joints_at(entry, data).tolist(),
        "runs": {w: run_of(folder / w, p) for w, p in (("first", posterior), ("second", again))},
        "measured": stamp(),
    }
    backbone = {}
    if recipe.backbone:
        layer = entry.backbone.net[1]
        backbone = {"weight": layer.weight.detach().numpy(), "bias": layer.bias.detach().numpy()}
    small = lambda a: a.astype(np.float32)  # noqa: E731
    averaged = [small(a) for a in (means.mean(0, dtype=np.float64), means.std(0, dtype=np.float64))]
    tests = [small(a) for a in (centre, spread, expected, error)]
    kept_noise = small(noise[kept]) if len(noise) else noise
    return ReferencePosterior(
        name, about, small(x.numpy()), *averaged, *tests, points, draws.astype(np.float16), kept_noise, backbone
    )


def means_apart(values: np.ndarray, again: bp.Posterior, x: Tensor, spread: np.ndarray) -> np.ndarray:
    """Differences of the means of the two runs' outputs, in posterior standard deviations; (B, J)."""
    return (values.mean((0, 1), dtype=np.float64) - outputs(again, x)[0].mean((0, 1), dtype=np.float64)) / spread


def run_of(place: Path, posterior: bp.Posterior) -> dict[str, Any]:
    """What made a run, and how long it took."""
    about = posterior.provenance
    held = {k: about[k] for k in ("method", "method_settings", "seed", "seconds", "versions")}
    gradients = float(posterior.stats["n_steps"].sum())
    return held | {"gradients_after_warmup": gradients} | json.loads((place / "run.json").read_text())


def stamp() -> dict[str, str]:
    """What a run was made by."""
    here = Path(__file__).parent
    return {
        "command": "python " + " ".join(sys.argv),
        "commit": subprocess.check_output(["git", "describe", "--always", "--dirty"], text=True, cwd=here).strip(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, 1 thread, torch {torch.__version__}",
        "date": datetime.date.today().isoformat(),
    }


def main() -> None:
    """Sample, measure, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(RECIPES), metavar="NAME", help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--runs", type=Path, default=Path("runs/references"), help="where runs are kept")
    parser.add_argument("--no-store", action="store_true", help="sample only")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in RECIPES]:
        parser.error(f"no reference '{unknown[0]}'; there are {', '.join(RECIPES)}")
    torch.set_num_threads(1)
    for name in args.names:
        for which in ("first", "second"):
            sampled(name, which, args.runs)
        if args.no_store:
            continue
        reference = measured(name, args.runs)
        for criterion, (value, limit, met) in reference.about["criteria"].items():
            print(f"  {criterion:22} {value:<12.6g} limit {limit:<8g} {'met' if met else 'NOT MET'}", flush=True)
        reference.write()
        size = sum((REFERENCES / f"{name}{end}").stat().st_size for end in (".npz", ".json"))
        verdict = "meets the bar" if reference.about["met"] else "does NOT meet the bar, and says so"
        print(f"{name}: {verdict}; stored, {size / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
