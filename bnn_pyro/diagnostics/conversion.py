"""Any posterior as an ArviZ data set: what was drawn, what it was drawn from, and what it predicts.

    posterior            every weight that fits, dimensions (chain, draw, layer.out, layer.in)
    sample_stats         of the sampler, by ArviZ's names
    log_likelihood       of the training rows, nats, in target units; posterior_predictive: new targets for them
    prior, prior_predictive
    observed_data, constant_data     the training targets and inputs (standardised)
    predictions          what the network says of the test inputs: probabilities of classes, or the mean

Weights are not what to judge convergence by (units can be exchanged); ``predictions`` are. Memory is bounded: large
sites and some rows are left out, and the attribute ``left_out`` says which.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyro.poutine as poutine
import torch
from torch import Tensor

import bnn_pyro
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.diagnostics.arviz_bridge import Variables, as_arviz
from bnn_pyro.diagnostics.draws import (
    KINDS,
    WORK,
    even,
    held,
    kind,
    rows_at_hand,
    sized,
    stride,
    thinned,
    walk,
    weight_count,
)
from bnn_pyro.diagnostics.importance import proper_prior, temperature_of
from bnn_pyro.errors import UserError
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.backbone import once
from bnn_pyro.parts.likelihoods import OBSERVED
from bnn_pyro.parts.nets import in_mode
from bnn_pyro.posterior import Posterior

__all__ = ["to_arviz"]

#: A weight's dimensions after its outputs and inputs: those of a convolution's kernel.
KERNEL = ("kernel_height", "kernel_width")
#: Numbers that one group may hold: 80 MB in float64.
NUMBERS = 10**7
#: Fresh draws of a guide, and of a prior; test inputs.
GUIDE_DRAWS, PRIOR_DRAWS, POINTS = 1000, 500, 200
#: ArviZ's names for what samplers here call otherwise.
STATS = {"log_joint": "lp"}


def to_arviz(posterior: Posterior, data: Dataset, *, num_draws: int | None = None, seed: int = 0) -> Any:
    """The posterior with its data as what the installed ArviZ takes: ``InferenceData`` (0.23) or ``DataTree`` (1.x).

    num_draws: at most so many draws in all. None: every stored draw, or 1,000 of a guide, as long as that is no great
        work; chains are thinned evenly, all by the same step.
    seed: for draws of a guide, of the prior and of new targets.

    Attributes say what the draws are (``approximate`` is "yes" where they are not those of Markov chains), the
    temperature and what was left out. A posterior whose prior is improper, or was left out of the fit, has no prior
    groups.

    Raises UserError for a number of draws below 1.
    """
    if num_draws is not None and num_draws < 1:
        raise UserError(f"the number of draws must be at least 1, got {num_draws}")
    left_out: list[str] = []
    draws = _draws(posterior, num_draws)
    whole, step = sized(posterior, draws), stride(posterior, draws)
    posterior = thinned(posterior, draws)
    shape = sized(posterior, draws)
    if posterior.chains is not None and shape != whole:
        left_out.append(f"{whole[1] - shape[1]:,} of each chain's {whole[1]:,} draws (evenly thinned)")
    rows = rows_at_hand(posterior, len(data.x_train), math.prod(shape), NUMBERS)
    if len(rows) < len(data.x_train):
        left_out.append(f"{len(data.x_train) - len(rows):,} of {len(data.x_train):,} training rows (evenly chosen)")
    names, coords = dimensions(posterior)
    coords |= {"chain": np.arange(shape[0]), "draw": np.arange(shape[1]) * step, "observation": rows}
    groups: dict[str, Variables] = {"posterior": _weights(posterior, shape, names, left_out, seed)}
    groups["sample_stats"] = _sample_stats(posterior, shape)
    groups |= _training_rows(posterior, data, rows, shape, seed)
    if not groups["posterior_predictive"]:
        left_out.append("posterior_predictive: some draws predict numbers that are not finite")
    groups["constant_data"], more = _inputs(posterior, data, rows, left_out)
    coords |= more
    groups |= _prior(posterior, data, rows, names, left_out, seed)
    if len(data.x_test):
        groups["predictions"], points = _predictions(posterior, data, shape, seed)
        coords["test_observation"] = points
    coords["class"] = np.array(posterior.schema.classes or ("",))
    return as_arviz(groups, coords, _attributes(posterior, left_out))


def dimensions(posterior: Posterior) -> tuple[dict[str, tuple[str, ...]], dict[str, np.ndarray]]:
    """({site: names of its dimensions}, {dimension: labels}).

    "layers.0.weight" has the dimensions ("layers.0.out", "layers.0.in"). Inputs of the first layer are the features by
    name, outputs of the last one the classes (of two, the second: its log-odds); everything else is numbered.
    """
    shapes = {site: tuple(value.shape) for site, value in posterior.model.initial.items()}
    names: dict[str, tuple[str, ...]] = {}
    coords: dict[str, np.ndarray] = {}
    for site, shape in shapes.items():
        layer, _, role = site.rpartition(".")
        if role == "weight" and layer and len(shape) in (2, 4):
            names[site] = tuple(f"{layer}.{part}" for part in ("out", "in", *KERNEL)[: len(shape)])
        elif role == "bias" and layer and len(shape) == 1:
            names[site] = (f"{layer}.out",)
        else:
            names[site] = tuple(f"{site}.dim_{i}" for i in range(len(shape)))
        coords |= {name: np.arange(size) for name, size in zip(names[site], shape, strict=True)}
    weights = [site for site in shapes if site.endswith(".weight")]
    if weights:
        _label(coords, names[weights[0]][1:2], _features(posterior))
        _label(coords, names[weights[-1]][:1], _outputs(posterior))
    return names, coords


def _label(coords: dict[str, np.ndarray], name: tuple[str, ...], labels: tuple[str, ...]) -> None:
    if name and len(coords[name[0]]) == len(labels) == len(set(labels)):
        coords[name[0]] = np.array(labels)


def _features(posterior: Posterior) -> tuple[str, ...]:
    """Names of the network's inputs; none where it stands on the features of another."""
    return () if hasattr(posterior.model, "backbone") else posterior.schema.features


def _outputs(posterior: Posterior) -> tuple[str, ...]:
    schema = posterior.schema
    if schema.classes:
        return schema.classes[1:] if len(schema.classes) == 2 else schema.classes
    outputs = next((n for n in (getattr(posterior.model, "likelihood", None),) if n is not None), None)
    return (schema.target,) if getattr(outputs, "outputs", 1) == 1 else ("mean", "spread")


def _draws(posterior: Posterior, num_draws: int | None) -> int:
    """Draws in all: of a guide fewer where the network is large."""
    if num_draws is not None:
        return num_draws
    if posterior.chains is not None:
        return NUMBERS // 100
    return min(GUIDE_DRAWS, max(50, int(WORK / (500 * weight_count(posterior)))))


def _attributes(posterior: Posterior, left_out: list[str]) -> dict[str, Any]:
    what, provenance = kind(posterior), posterior.provenance
    return {
        "creation_library": "bnn_pyro",
        "creation_library_version": bnn_pyro.__version__,
        "inference_library": "pyro",
        **{k: str(provenance[k]) for k in ("entry", "method", "data") if k in provenance},
        **{k: int(provenance[k]) for k in ("seed",) if k in provenance},
        "task": posterior.schema.task,
        "target": posterior.schema.target,
        "draws": KINDS[what],
        "approximate": "no" if what == "chains" else "yes",
        "temperature": temperature_of(posterior),
        "left_out": "; ".join(left_out) or "nothing",
    }


# -- groups --------------------------------------------------------------------------------------------------------
def _weights(posterior: Posterior, shape: tuple[int, int], names: Mapping, left_out: list[str], seed: int) -> Variables:
    fitting = _fitting(posterior, math.prod(shape), left_out)
    if posterior.chains is not None:
        values = {site: posterior.chains[site] for site in fitting}
    else:
        blocks: dict[str, list[Tensor]] = {site: [] for site in fitting}
        with isolated(seed):
            for block in posterior.blocks(shape[1]):
                for site in fitting:
                    blocks[site].append(block[site])
        values = {site: torch.cat(parts).unsqueeze(0) for site, parts in blocks.items()}
    return {site: (("chain", "draw", *names[site]), v.detach().cpu().numpy()) for site, v in values.items()}


def _fitting(posterior: Posterior, draws: int, left_out: list[str] | None = None) -> list[str]:
    """The sites of which so many draws fit, the small ones first, in the model's order."""
    sizes = {site: value.numel() * draws for site, value in posterior.model.initial.items()}
    total, kept = 0, set()
    for site in sorted(sizes, key=sizes.__getitem__):
        total += sizes[site]
        if total <= NUMBERS:
            kept.add(site)
        elif left_out is not None:
            left_out.append(f"{site} ({sizes[site]:,} numbers)")
    return [site for site in sizes if site in kept]


def _sample_stats(posterior: Posterior, shape: tuple[int, int]) -> Variables:
    found = {}
    for name, value in posterior.stats.items():
        if tuple(value.shape) != shape or posterior.chains is None:
            continue  # of the whole fit, such as an evidence
        values = value.cpu().numpy()
        if name in ("n_steps", "tree_depth", "superchain"):
            values = values.astype(np.int64)
        found[STATS.get(name, name)] = (("chain", "draw"), values > 0.5 if name == "diverging" else values)
    deepest = posterior.provenance.get("method_settings", {}).get("max_tree_depth")
    if "tree_depth" in found and deepest is not None:
        found["reached_max_treedepth"] = (("chain", "draw"), found["tree_depth"][1] >= deepest)
    return found


def _training_rows(
    posterior: Posterior, data: Dataset, rows: np.ndarray, shape: tuple[int, int], seed: int
) -> dict[str, Variables]:
    index = torch.from_numpy(rows).to(data.x_train.device)
    x, y = data.x_train[index], data.y_train[index].cpu()
    finite = True
    log_likelihood = np.empty((math.prod(shape), len(rows)))
    replicated = np.empty(log_likelihood.shape, dtype=np.int32 if posterior.schema.has_classes else np.float32)
    with isolated(seed + 1):
        for part, prediction in walk(posterior, x, math.prod(shape), seed):
            log_likelihood[:, part] = prediction.mixture.log_probs(y[part]).double().numpy()
            finite = finite and bool(np.isfinite(log_likelihood[:, part]).all())
            replicated[:, part] = prediction.components.sample().numpy() if finite else 0
    dims = ("chain", "draw", "observation")
    return {
        "log_likelihood": {OBSERVED: (dims, log_likelihood.reshape(*shape, -1))},
        "posterior_predictive": {OBSERVED: (dims, replicated.reshape(*shape, -1))} if finite else {},
        "observed_data": {OBSERVED: (("observation",), y.numpy())},
    }


def _inputs(
    posterior: Posterior, data: Dataset, rows: np.ndarray, left_out: list[str]
) -> tuple[Variables, dict[str, np.ndarray]]:
    """(the standardised inputs, labels of their dimensions)."""
    shape = posterior.schema.input_shape
    if len(rows) * math.prod(shape) > NUMBERS:
        left_out.append("the inputs")
        return {}, {}
    if len(shape) == 1:
        features = posterior.schema.features
        coords = {"feature": np.array(features) if len(features) == shape[0] else np.arange(shape[0])}
    else:
        labels = ("channel", "height", "width") if len(shape) == 3 else [f"input_{i}" for i in range(len(shape))]
        coords = {label: np.arange(size) for label, size in zip(labels, shape, strict=True)}
    index = torch.from_numpy(rows).to(data.x_train.device)
    return {"x": (("observation", *coords), data.x_train[index].cpu().numpy())}, coords


def _prior(
    posterior: Posterior, data: Dataset, rows: np.ndarray, names: Mapping, left_out: list[str], seed: int
) -> dict[str, Variables]:
    """Draws of the weights from the prior, and what a network of such weights predicts for the same rows."""
    if reason := proper_prior(posterior, data):
        left_out.append(f"prior and prior_predictive: {reason}")
        return {}
    num = max(1, min(PRIOR_DRAWS, 2 * NUMBERS // weight_count(posterior), NUMBERS // len(rows)))
    drawn: dict[str, list[Tensor]] = {site: [] for site in posterior.model.initial}
    with torch.no_grad(), isolated(seed + 2), in_mode(posterior.model, training=False):
        model, x = once(posterior.model, data.x_train[:1].to(posterior.device))
        for _ in range(num):
            nodes = poutine.trace(model).get_trace(x).nodes
            for site, values in drawn.items():
                values.append(nodes[site]["value"])
    draws = {site: torch.stack(values) for site, values in drawn.items()}
    kept = _fitting(posterior, num)
    own = replace(held(posterior, draws), trace={})
    predictive = _training_rows(own, data, rows, (1, num), seed + 3)["posterior_predictive"]
    prior = {site: (("chain", "draw", *names[site]), draws[site][None].cpu().numpy()) for site in kept}
    return {"prior": prior, "prior_predictive": predictive}


def _predictions(
    posterior: Posterior, data: Dataset, shape: tuple[int, int], seed: int
) -> tuple[Variables, np.ndarray]:
    classes = len(posterior.schema.classes)
    points = even(len(data.x_test), min(POINTS, NUMBERS // (math.prod(shape) * max(1, classes))))
    index = torch.from_numpy(points).to(data.x_test.device)
    parts = []
    for _, prediction in walk(posterior, data.x_test[index], math.prod(shape), seed):
        parts.append((prediction.probs if classes else prediction.locs).numpy())
    values = np.concatenate(parts, 1)
    values = values.reshape(*shape, *values.shape[1:])
    dims = ("chain", "draw", "test_observation")
    if classes:
        return {"probability": ((*dims, "class"), values)}, points
    return {"mean": (dims, values)}, points
