"""Reference posteriors of Bayesian networks, verified in function space, stored in ``bnn_pyro/checks/references``.

    python -m benchmarks.checks.references toy-curve breast-cancer digits-last-layer mnist-160 boston
    python -m benchmarks.checks.references boston --no-store           # sample only

Each is sampled twice: 10,000 draws by ChEES-HMC, every chain from a starting point of its own, thinned; and a second
run that shares nothing with it, by NUTS or from other starting points, unthinned. The criteria are those of posteriordb
(Magnusson et al. 2024, arXiv:2407.04967), for what the network computes, because weights are not identified: 10,000
draws, R-hat < 1.01, E-BFMI > 0.2, |autocorrelation at lag 1| < 0.05, no divergences; and means and spreads of the two
runs agree within their Monte-Carlo errors. What misses one is stored as such, with the numbers.

A run is kept in ``--runs`` (seconds to an hour each) and, when interrupted, goes on from there to the same draws. The
posteriors are those of ``references.toml``.
"""

from __future__ import annotations

import argparse
import io
import json
import time
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import norm
from torch import Tensor, nn

import bnn_pyro as bp
from benchmarks.provenance import provenance
from bnn_pyro.checks.check import ALPHA
from bnn_pyro.checks.reference import FORMAT, REFERENCES, ReferencePosterior, bounded, log_joints_at
from bnn_pyro.diagnostics.convergence import bfmi, chain_statistics, ess_mean, nested_rhat
from bnn_pyro.files import write_whole
from bnn_pyro.posterior import archive_digest
from bnn_pyro.settings import build

__all__ = ["RECIPES", "measured", "sampled", "store"]

RECIPES: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("references.toml").read_text())


# -- the two runs ------------------------------------------------------------------------------------------------------
def entry_of(recipe: dict[str, Any], data: bp.Dataset, folder: Path) -> Any:
    """The variant with its settings, on its backbone where it has one."""
    backbone = {"backbone": backbone_of(recipe["backbone"], data, folder)} if "backbone" in recipe else {}
    return build(bp.ZOO[recipe["variant"]], {**recipe["entry"], **backbone})


def backbone_of(about: dict[str, Any], data: bp.Dataset, folder: Path) -> nn.Module:
    """Pixels in [0, 1] -> features: the hidden layer of a network fitted to its most probable weights."""
    entry = build(bp.MLP, {k: v for k, v in about.items() if k != "method"})
    how = dict(seed=0, out=folder / "backbone", resume=True, device="cpu", progress=False)
    w = {s: v[0].double() for s, v in bp.fit(entry, data, build(bp.MAP, about["method"]), **how).draw(1).items()}
    (shift,), (scale,) = data.schema.x_shift, data.schema.x_scale
    layer = nn.Linear(*reversed(w["layers.0.weight"].shape))
    with torch.no_grad():
        layer.weight.copy_(w["layers.0.weight"] / scale)
        layer.bias.copy_(w["layers.0.bias"] - w["layers.0.weight"].sum(1) * shift / scale)
    return nn.Sequential(nn.Flatten(), layer, nn.ReLU())


def inputs_of(recipe: dict[str, Any], data: bp.Dataset) -> Tensor:
    """(B, *input_shape) standardised inputs that are predicted."""
    if recipe["inputs"] == "line":
        return data.schema.standardise(torch.linspace(-4, 4, 81, dtype=torch.float64)[:, None])
    if recipe["inputs"] == "rows":
        return torch.cat([data.x_test[:60], data.x_train[:60]])
    if recipe["inputs"] == "mesh":
        low, high = data.x_train.amin(0) - 0.5, data.x_train.amax(0) + 0.5
        axes = [torch.linspace(a, b, 12) for a, b in zip(low.tolist(), high.tolist(), strict=True)]
        return torch.cat([data.x_test, torch.cartesian_prod(*axes)])
    return data.x_test[:150]


def sampled(name: str, which: str, runs: Path) -> bp.Posterior:
    """The first or the second run, from ``runs`` where it is there; ``run.json`` beside it tells what made it."""
    recipe, folder = RECIPES[name], runs / name
    data, settings = bp.load_data(**recipe["data"]), dict(recipe[which])
    entry, about = entry_of(recipe, data, folder), folder / which / "run.json"
    if not about.is_file():
        about.parent.mkdir(parents=True, exist_ok=True)
        about.write_text(json.dumps(provenance()))
    start = time.perf_counter()
    how = dict(seed=0 if which == "first" else 1, out=folder / which, resume=True, device="cpu", progress=False)
    posterior = bp.fit(entry, data, build(bp.METHODS[settings.pop("method")], settings), **how)
    print(f"{name}, {which} run: {time.perf_counter() - start:.0f} s", flush=True)
    return posterior


# -- what they say -----------------------------------------------------------------------------------------------------
def outputs(posterior: bp.Posterior, x: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of all draws at x: outputs (C, D, B, J), probabilities or means (C·D, B, K), noise (C·D, 1) or empty."""
    shape = next(iter(posterior.chains.values())).shape[:2]
    values, means, noise = [], [], np.zeros((0, 1))
    for part in x.split(25):
        prediction = bp.predict(posterior, part, num_draws=shape.numel())
        values.append(prediction.output_values().numpy().astype(np.float32))
        if prediction.task == "regression":
            means.append(prediction.locs[..., None].numpy())
            noise = prediction.scales[:, :1].double().numpy()
        else:
            means.append(prediction.probs.numpy())
    return np.concatenate(values, 1).reshape(*shape, len(x), -1), np.concatenate(means, 1), noise


def series(values: np.ndarray) -> np.ndarray:
    """(C, D, …) -> (M, C, D)."""
    return np.moveaxis(values.reshape(*values.shape[:2], -1), 2, 0)


def lag1(values: np.ndarray) -> np.ndarray:
    """Autocorrelation at lag 1 of (M, C, D) about the mean of all chains, which R-hat says they share; (M,)."""
    apart = values - values.mean((1, 2), keepdims=True)
    return (apart[..., 1:] * apart[..., :-1]).mean((1, 2)) / np.square(apart).mean((1, 2))


def averages(values: np.ndarray, centre: np.ndarray, spread: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means of the bounded functions of outputs (C, D, B, J), and their Monte-Carlo errors; (2, B, J) each."""
    found = bounded(values.astype(np.float64), centre, spread)
    error = [one.std((0, 1)) / np.sqrt(ess_mean(series(one)).reshape(centre.shape)) for one in found]
    return found.mean((1, 2)), np.stack(error)


def criteria_of(first: np.ndarray, posterior: bp.Posterior, again: bp.Posterior) -> dict[str, list]:
    """{criterion: [what was reached, the limit, whether that meets it]} of the first run's outputs (C, D, B, J)."""
    values = series(first).astype(np.float64)
    nested = nested_rhat(values, np.arange(values.shape[1]))
    energies = [bfmi(p.stats["energy"].numpy()) for p in (posterior, again)]
    reached = {
        "draws": (values[0].size, 10_000, int.__ge__),
        "rhat_split_max": (float(np.nanmax(chain_statistics(values).rhat)), 1.01, float.__lt__),
        "rhat_of_starts_max": (float(np.nanmax(nested)), 1.01, float.__lt__),
        "bfmi_min": (float(min(e.min() for e in energies)), 0.2, float.__gt__),
        "lag1_max": (float(np.abs(lag1(values)).max()), 0.05, float.__lt__),
        "divergences": (int(sum(p.stats["diverging"].sum() for p in (posterior, again))), 0, int.__eq__),
    }
    return {name: [value, limit, meets(value, limit)] for name, (value, limit, meets) in reached.items()}


def measured(name: str, runs: Path) -> ReferencePosterior:
    """A reference of both runs, whether or not it meets the criteria."""
    recipe, folder = RECIPES[name], runs / name
    data = bp.load_data(**recipe["data"])
    entry, x = entry_of(recipe, data, folder), inputs_of(recipe, data)
    posterior, again = (sampled(name, which, runs) for which in ("first", "second"))
    values, means, noise = outputs(posterior, x)
    others, _, _ = outputs(again, x)
    centre, spread = (getattr(values.astype(np.float64), f)((0, 1)) for f in ("mean", "std"))
    (expected, error), (compared, other_error) = (averages(v, centre, spread) for v in (values, others))
    criteria = criteria_of(values, posterior, again)
    z = np.abs(expected - compared) / np.hypot(error, other_error)
    p = float(min(1.0, 2 * norm.sf(z.max()) * z.size))
    criteria["second_run_p"] = [p, ALPHA, p > ALPHA]
    shift = (values.mean((0, 1), dtype=np.float64) - others.mean((0, 1), dtype=np.float64)) / spread
    lp = series(posterior.stats["lp"].numpy()[..., None])
    about = {
        **{key: recipe[key] for key in ("title", "variant", "entry", "data")},
        "backbone": recipe.get("backbone", {}),
        "task": data.schema.task,
        "dataset": data.name,
        "fingerprint": data.fingerprint,
        "unit": data.schema.target,
        "classes": list(data.schema.classes),
        "weights": sum(v[0, 0].numel() for v in posterior.chains.values()),
        "draws": int(values.shape[0] * values.shape[1]),
        "criteria": criteria,
        "met": all(met for *_, met in criteria.values()),
        "log_joint_rhat": float(chain_statistics(lp).rhat[0]),
        "log_joint_lag1": float(lag1(lp)[0]),
        "ess_min": float(chain_statistics(series(values)).ess_bulk.min()),
        "largest_shift_between_runs": float(np.abs(shift).max()),
        "log_joint": log_joints_at(entry, data).tolist(),
        "runs": {w: run_of(folder / w, p) for w, p in (("first", posterior), ("second", again))},
        "measured": provenance(),
    }
    stored, points = (1000, 60) if centre.shape[1] == 1 else (330, 30)
    kept = np.linspace(0, values.shape[0] * values.shape[1] - 1, stored).round().astype(int)
    places = np.linspace(0, len(x) - 1, min(len(x), points)).round().astype(int)
    draws = ((values.reshape(-1, *centre.shape)[kept] - centre) / spread)[:, places].astype(np.float16)
    layer = entry.backbone.net[1] if "backbone" in recipe else None
    arrays = (
        x.numpy(),
        means.mean(0, dtype=np.float64),
        means.std(0, dtype=np.float64),
        centre,
        spread,
        expected,
        error,
    )
    return ReferencePosterior(
        name, about, *(a.astype(np.float32) for a in arrays), places, draws,
        noise[kept].astype(np.float32) if len(noise) else noise,
        {} if layer is None else {k: getattr(layer, k).detach().numpy() for k in ("weight", "bias")},
    )  # fmt: skip


def run_of(place: Path, posterior: bp.Posterior) -> dict[str, Any]:
    """What made a run, and how long it took."""
    made = {k: posterior.provenance[k] for k in ("method", "method_settings", "seed", "seconds", "versions")}
    gradients = float(posterior.stats["n_steps"].sum())
    return json.loads((place / "run.json").read_text()) | made | {"gradients_after_warmup": gradients}


def store(reference: ReferencePosterior, folder: Path = REFERENCES) -> None:
    """Write both files of a reference, each whole or not at all."""
    arrays = {f.name: getattr(reference, f.name) for f in fields(reference)}
    arrays = {name: value for name, value in arrays.items() if isinstance(value, np.ndarray)}
    arrays |= {f"backbone.{name}": value for name, value in reference.backbone.items()}
    np.savez_compressed(buffer := io.BytesIO(), **arrays)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / f"{reference.name}.npz", buffer.getvalue())
    about = {"format": FORMAT, **reference.about}
    about["sha256"] = archive_digest(buffer.getvalue(), about)
    text = json.dumps(about, indent=1, ensure_ascii=False)
    write_whole(folder / f"{reference.name}.json", (text + "\n").encode())


def main() -> None:
    """Sample, measure, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=list(RECIPES), metavar="NAME", help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--runs", type=Path, default=Path("runs/references"), help="where runs are kept")
    parser.add_argument("--no-store", action="store_true", help="sample only")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.names:
        for which in ("first", "second"):
            sampled(name, which, args.runs)
        if args.no_store:
            continue
        reference = measured(name, args.runs)
        for criterion, (value, limit, met) in reference.about["criteria"].items():
            print(f"  {criterion:22} {value:<12.6g} limit {limit:<8g} {'met' if met else 'NOT MET'}", flush=True)
        store(reference)
        print(f"{name}: {'meets the criteria' if reference.about['met'] else 'does NOT meet the criteria'}; stored")


if __name__ == "__main__":
    main()
