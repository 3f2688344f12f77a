"""toy-curve, 1-32-1: the band of mean-field SVI beside that of a long NUTS run on the very same model.

    python benchmarks/toy_curve.py --seed 0 1 2 3 4
    python benchmarks/toy_curve.py --nuts --chains 4 --warmup 500 --samples 1000

Six points of y = −x⁴ + 3x² + 1 in [−2, 2]. Asked of every posterior: how much wider its epistemic standard deviation
is at x = ±4 than on average over [−2, 2], and which share of [−2, 2] has the truth inside the 95 % band, the
epistemic one (quantiles of the draws' means) and the predictive one (with the noise). Nothing can be held out of six
points: activation, prior and noise were chosen by hand, among about 100 combinations, for that width and coverage. The
noise of 1 is what lets the band cover the dip between −1 and 1, where there is no point: with one
hidden ReLU layer, mean-field weights cannot widen the epistemic band there (Foong et al. 2020, arXiv:1909.00719).

NUTS is Pyro's; its potential is −log p(y, w | x) of ``posterior.model``, written out for speed (Pyro's own trace of
the model takes six times as long) and checked against that trace before the run. R-hat and ESS are of the function
values f(x), not of the weights, which a network does not identify. Writes ``benchmarks/results/toy_curve.json``.
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
from collections.abc import Callable
from pathlib import Path

import pyro.poutine as poutine
import torch
from pyro.infer.mcmc import MCMC, NUTS
from pyro.ops.stats import effective_sample_size, split_gelman_rubin

import bnn_pyro as bp
from bnn_pyro.isolation import isolated

RESULTS = Path(__file__).parent / "results" / "toy_curve.json"
ENTRY = {"hidden": (32,), "activation": "relu", "prior": "normal:3", "noise": 1.0, "init_scale": 1e-3}
METHOD = {"epochs": 3000, "lr": 0.01, "num_particles": 2}
GRID = torch.linspace(-2, 2, 101)
FAR = torch.tensor([-4.0, 4.0])


def truth(x: torch.Tensor) -> torch.Tensor:
    """The curve."""
    return -(x**4) + 3 * x**2 + 1


def band(prediction: bp.Prediction) -> dict:
    """Widths and coverage of a prediction on GRID and FAR, in this order."""
    epistemic = prediction.epistemic.sqrt()
    inside = epistemic[: len(GRID)].mean()
    y = truth(GRID)
    low, high = prediction.locs[:, : len(GRID)].quantile(torch.tensor([0.025, 0.975]), dim=0)
    predictive = prediction.quantile([0.025, 0.975])[:, : len(GRID)]
    return {
        "epistemic_inside": round(inside.item(), 4),
        "epistemic_at_-4_and_4": [round(v, 3) for v in epistemic[len(GRID) :].tolist()],
        "ratio_at_-4_and_4": [round(v, 2) for v in (epistemic[len(GRID) :] / inside).tolist()],
        "truth_in_epistemic_band": round(((y >= low) & (y <= high)).float().mean().item(), 3),
        "truth_in_predictive_band": round(((y >= predictive[0]) & (y <= predictive[1])).float().mean().item(), 3),
        "largest_error_of_mean": round((prediction.mean[: len(GRID)] - y).abs().max().item(), 3),
        "epistemic_sd": [round(v, 3) for v in epistemic[: len(GRID) : 10].tolist()],
        "mean": [round(v, 3) for v in prediction.mean[: len(GRID) : 10].tolist()],
    }


def fit_svi(data: bp.Dataset, seed: int) -> bp.Posterior:
    """Mean-field SVI."""
    return bp.fit(bp.MeanField(**ENTRY), data, bp.SVI(**METHOD), seed=seed, device="cpu", progress=False)


def log_joint(model: torch.nn.Module, data: bp.Dataset) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
    """log p(y, w | x) of the model as one function of w, checked against Pyro's trace at ten draws of the prior."""
    x, y = data.x_train, (data.y_train - data.schema.y_shift) / data.schema.y_scale
    prior, noise = float(ENTRY["prior"].split(":")[1]), ENTRY["noise"] / data.schema.y_scale

    def compact(w: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden = torch.relu(torch.addmm(w["layers.0.bias"], x, w["layers.0.weight"].T))
        f = torch.addmm(w["layers.1.bias"], hidden, w["layers.1.weight"].T).squeeze(1)
        flat = torch.cat([value.flatten() for value in w.values()])
        return -0.5 * (((y - f) / noise).square().sum() + flat.square().sum() / prior**2)

    offsets = []
    for seed in range(10):
        with isolated(seed):
            w = {name: 0.5 * torch.randn_like(value) for name, value in model.initial.items()}
            trace = poutine.trace(poutine.condition(model, data=w)).get_trace(data.x_train, data.y_train)
            offsets.append((trace.log_prob_sum() - compact(w)).item())
    if max(offsets) - min(offsets) > 1e-2:
        raise SystemExit(f"the compact log joint is not the model's: offsets {offsets}")
    return compact


def sample_nuts(model: torch.nn.Module, data: bp.Dataset, args: argparse.Namespace) -> tuple[bp.Posterior, dict]:
    """Pyro's NUTS, one chain after another, each from its own draw of the prior."""
    chains, divergences, start, cpu = [], 0, time.perf_counter(), time.process_time()
    joint = log_joint(model, data)
    prior = float(ENTRY["prior"].split(":")[1])
    for chain in range(args.chains):
        with isolated(1000 + chain):
            first = {site: prior * torch.randn_like(value) for site, value in model.initial.items()}
            kernel = NUTS(potential_fn=lambda w: -joint(w), max_tree_depth=args.max_tree_depth)
            mcmc = MCMC(
                kernel,
                num_samples=args.samples,
                warmup_steps=args.warmup,
                initial_params=first,
                disable_progbar=True,
            )
            mcmc.run()
            divergences += len(mcmc.diagnostics()["divergences"]["chain 0"])
        chains.append(mcmc.get_samples())
        print(f"chain {chain}: {time.perf_counter() - start:.0f} s", flush=True)
    draws = {site: torch.stack([c[site] for c in chains]) for site in chains[0]}
    return bp.Posterior(model, data.schema, chains=draws), {
        "chains": args.chains,
        "warmup": args.warmup,
        "samples": args.samples,
        "max_tree_depth": args.max_tree_depth,
        "divergences": divergences,
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
    }


def main() -> None:
    """Fit, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--nuts", action="store_true", help="the reference as well, minutes")
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=500)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--max-tree-depth", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = bp.load_data("toy-curve")
    x = data.schema.standardise(torch.cat([GRID, FAR]).unsqueeze(1))
    found: dict = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    found["settings"] = {"entry": ENTRY, "method": METHOD, "temperature": 1.0, "draws": 1000}
    found["svi"] = []
    predictions = []
    for seed in args.seed:
        posterior = fit_svi(data, seed)
        predictions.append(bp.predict(posterior, x, num_draws=1000, seed=seed))
        found["svi"].append(
            {
                "seed": seed,
                **band(predictions[-1]),
                "elbo": round(posterior.trace["elbo"][-1], 2),
                "seconds": posterior.provenance["seconds"],
            }
        )
        print("svi", json.dumps(found["svi"][-1]), flush=True)
    if args.nuts:
        reference, run = sample_nuts(posterior.model, data, args)
        prediction = bp.predict(reference, x, num_draws=args.chains * args.samples)
        f = prediction.locs.double().reshape(args.chains, args.samples, len(x))
        r_hat = split_gelman_rubin(f, chain_dim=0, sample_dim=1)
        ess = effective_sample_size(f, chain_dim=0, sample_dim=1)
        found["nuts"] = {
            **run,
            "r_hat_inside_max": round(r_hat[: len(GRID)].max().item(), 4),
            "r_hat_far": [round(v, 4) for v in r_hat[len(GRID) :].tolist()],
            "ess_min": round(ess.min().item(), 1),
            **band(prediction),
        }
        wide = prediction.epistemic.sqrt()
        found["svi_against_nuts"] = [
            {
                "seed": seed,
                "epistemic_sd_ratio_inside": round((p.epistemic.sqrt() / wide)[: len(GRID)].mean().item(), 3),
                "epistemic_sd_ratio_far": [round(v, 3) for v in (p.epistemic.sqrt() / wide)[len(GRID) :].tolist()],
                "mean_difference_rms_inside": round(
                    (p.mean - prediction.mean)[: len(GRID)].square().mean().sqrt().item(), 3
                ),
            }
            for seed, p in zip(args.seed, predictions, strict=True)
        ]
        print("nuts", json.dumps(found["nuts"]), json.dumps(found["svi_against_nuts"]), flush=True)
    found |= {
        "command": "python " + " ".join(sys.argv),
        "commit": subprocess.check_output(["git", "describe", "--always", "--dirty"], text=True).strip(),
        "machine": f"{platform.machine()}, 1 thread, {os.cpu_count()} cores, torch {torch.__version__}",
        "date": datetime.date.today().isoformat(),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
