"""``benchmarks/mcmc.py posteriors``: two small networks by mean-field SVI, HMC, NUTS and ChEES, and how sure each is.

Where classes overlap is decided by the reference, NUTS: cells of a grid, and test rows, to which it gives a probability
between 0.2 and 0.8. Cells are told apart by whether there are training rows near them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch
from mcmc_problems import PROBLEMS, Problem, functions
from mcmc_score import score
from mcmc_speed import HERE, append, stamp

import bnn_pyro as bp
from bnn_pyro.fitting import tuned
from bnn_pyro.inference import METHODS
from bnn_pyro.settings import build

__all__ = ["METHOD_TITLES", "RESULTS", "fit_and_score", "posterior", "regions"]

RESULTS = HERE / "results" / "mcmc_posteriors.json"
REFERENCE = "nuts"
CHAINS = {"chains": 4, "warmup": 1000, "draws": 1000}
#: Method -> how the tables name it.
METHOD_TITLES = {
    "svi": "mean-field SVI, as tuned",
    "svi-converged": "mean-field SVI, converged",
    "hmc": "HMC",
    "nuts": "NUTS",
    "chees": "ChEES",
}
#: Problem -> epochs after which the ELBO rises no more.
CONVERGED = {"breast-cancer": 6000, "toy-curve": 12000}
#: Draws that are scored; those of a regression's CRPS are compared with each other in pairs.
DRAWS = {"classification": 4000, "regression": 1000}
#: A cell is among the data where so many training rows are so near, in standard deviations of the inputs.
NEAR, ROWS = 0.4, 5
#: Groups of draws that Monte-Carlo errors are taken from.
GROUPS = 8


def method(name: str, problem: str) -> object:
    """The settings of a method."""
    if name.startswith("svi"):
        best = tuned("mean-field", problem, "svi")[1].method
        return bp.SVI(**(best if name == "svi" else best | {"epochs": CONVERGED[problem]}))
    return build(METHODS[name], {"chains": 64} if name == "chees" else CHAINS)


def entry(problem: Problem) -> bp.MeanField:
    """The model, with the tuned start of SVI: no other method looks at it."""
    best = tuned("mean-field", problem.name, "svi")[1].entry
    return bp.MeanField(**best)


def posterior(name: str, problem: Problem, runs: Path, again: bool = False) -> bp.Posterior:
    """The fitted posterior, from ``runs`` if it is there."""
    place = runs / f"{problem.name}-{name}"
    if again and place.exists():
        shutil.rmtree(place)
    how = method(name, problem.name)
    return bp.fit(entry(problem), problem.data, how, seed=0, out=place, resume=True, device="cpu", progress=False)


def fit_and_score(runs: Path, again: bool) -> None:
    """Fit what is not there, score everything, write."""
    torch.set_num_threads(2)
    for problem in (PROBLEMS["breast-cancer"](), PROBLEMS["toy-curve"]()):
        assert entry(problem).model(problem.data.schema).net.layers[0].weight.shape[1] == problem.points.shape[1]
        found: dict[str, bp.Posterior] = {}
        for name in METHOD_TITLES:
            if name.split("-")[0] not in METHODS:
                print(f"{problem.name} {name}: skipped; this version of bnn_pyro has no such method (yet)", flush=True)
                continue
            found[name] = posterior(name, problem, runs, again)
        exact = predict(found[REFERENCE], problem.data.x_test)
        areas = regions(problem, found[REFERENCE]) if exact.task == "classification" else {}
        for name, fitted in found.items():
            line = {"problem": problem.name, "method": name, "seconds": fitted.provenance["seconds"]}
            line |= scored(problem, fitted, exact) | {"settings": dict(fitted.provenance["method_settings"])}
            line["areas"] = {area: sureness(fitted, x) for area, x in areas.items()}
            append(RESULTS, {**line, **stamp()}, ("problem", "method"))
            shown = {k: line.get(k) for k in ("seconds", "metrics", "distance", "ess_min", "rhat_max")}
            print(problem.name, name, shown, flush=True)


def predict(fitted: bp.Posterior, x: torch.Tensor) -> bp.Prediction:
    """With as many draws as are scored."""
    return bp.predict(fitted, x, num_draws=DRAWS[fitted.schema.task])


def scored(problem: Problem, fitted: bp.Posterior, exact: bp.Prediction) -> dict:
    """Test metrics, distance to the reference's predictions, and what function space says of the chains."""
    prediction = predict(fitted, problem.data.x_test)
    metrics = bp.metrics.evaluate(prediction, problem.data.y_test, bootstrap=200)
    line: dict = {"metrics": {name: round(e.value, 5) for name, e in metrics.items()}}
    line["distance"] = {name: round(e.value, 5) for name, e in bp.metrics.distances(prediction, exact).items()}
    if fitted.chains is not None:
        chains = {site: value.numpy() for site, value in fitted.chains.items()}
        shared = fitted.stats.get("superchain")
        line |= score(functions(problem, chains), None if shared is None else shared[:, 0].numpy())
        line |= {name: int(fitted.stats[key].sum()) for name, key in STATS.items() if key in fitted.stats}
        line["draws"] = [int(n) for n in next(iter(chains.values())).shape[:2]]
        line["distance_floor"] = {n: round(e.value, 5) for n, e in bp.metrics.distance_floor(prediction).items()}
    return line


STATS = {"gradients": "n_steps", "divergences": "diverging"}


def regions(problem: Problem, reference: bp.Posterior) -> dict[str, torch.Tensor]:
    """{area: points} where the reference gives class 1 a probability between 0.2 and 0.8."""
    data = problem.data
    mesh = bp.plots.grid(data, num=60).x
    inside = overlap(reference, mesh)
    near = (torch.cdist(inside, data.x_train) < NEAR).sum(1) >= ROWS
    areas = {"among": inside[near], "beyond": inside[~near], "rows": overlap(reference, data.x_test)}
    return {name: points for name, points in areas.items() if len(points)}


def overlap(reference: bp.Posterior, x: torch.Tensor) -> torch.Tensor:
    """The points in doubt."""
    p = predict(reference, x).mean[:, 1]
    return x[(p > 0.2) & (p < 0.8)]


def sureness(fitted: bp.Posterior, x: torch.Tensor) -> dict:
    """Means over the points, each with its Monte-Carlo standard error, from groups of draws (or of chains).

    confidence: probability of the more probable class; entropies in nats; log_odds_sd: over the draws.
    """
    p = predict(fitted, x).probs[..., 1].double()  # (S, B), chain after chain
    whole = summary(p)
    parts = [summary(part) for part in p.tensor_split(GROUPS)]
    found = {
        name: [round(value, 5), round(float(np.std([part[name] for part in parts], ddof=1)) / GROUPS**0.5, 5)]
        for name, value in whole.items()
    }
    return {"points": len(x), **found}


def summary(p: torch.Tensor) -> dict[str, float]:
    """Means over B points of what S draws of the probability say."""
    mean = p.mean(0)
    total, aleatoric = entropy(mean), entropy(p).mean(0)
    return {
        "probability": mean.mean().item(),
        "confidence": torch.maximum(mean, 1 - mean).mean().item(),
        "total": total.mean().item(),
        "epistemic": (total - aleatoric).mean().item(),
        "log_odds_sd": torch.logit(p.clamp(1e-12, 1 - 1e-12)).std(0).mean().item(),
    }


def entropy(p: torch.Tensor) -> torch.Tensor:
    """Of a Bernoulli variable, nats."""
    return -(torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p))
