"""Conversion of any posterior, with its predictions, to an ArviZ data set, and netCDF files. The groups are:

    posterior, prior                          the weights, with dimensions (chain, draw, layer.out, layer.in)
    posterior_predictive, prior_predictive    new targets for the training rows
    sample_stats                              statistics of the sampler, by ArviZ's names
    log_likelihood                            of the training rows, nats, in target units
    observed_data, constant_data              the training targets; the standardised inputs
    predictions                               class probabilities, or the mean, at the test inputs

Memory is bounded: large sites and some rows are left out, and the attribute ``left_out`` says which.
"""

import errno
import math
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import bnn_pyro
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.diagnostics import draws
from bnn_pyro.diagnostics.importance import is_arviz_0, proper_prior, temperature_of
from bnn_pyro.errors import UserError, first_line
from bnn_pyro.files import telling, whole_file
from bnn_pyro.fitting import prior_draws
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.observed import OBSERVED
from bnn_pyro.posterior import Posterior

#: {variable: (names of its dimensions, values)}.
Variables = Mapping[str, tuple[tuple[str, ...], np.ndarray]]
#: Largest number of values in a group: 80 MB in float64.
NUMBERS = 10**7
#: Largest numbers of draws of a guide, draws of the prior, and test inputs.
GUIDE_DRAWS, PRIOR_DRAWS, POINTS = 1000, 500, 200


def to_arviz(posterior: Posterior, data: Dataset, *, num_draws: int | None = None, seed: int = 0) -> Any:
    """Convert a posterior and its data for the installed ArviZ: ``InferenceData`` (0.23) or ``DataTree`` (1.x).

    num_draws: largest number of draws in all; chains are thinned evenly, all by the same step. None: every stored draw,
        or 1,000 draws of a guide, fewer if the network is large.
    seed: for draws of a guide, of the prior and of new targets.

    Attributes describe the draws (``approximate`` is "yes" unless they are from Markov chains), the temperature and
    what was left out; the prior is left out if it is improper or was not used in the fit.
    Raises UserError for a number of draws below 1.
    """
    if num_draws is not None and num_draws < 1:
        raise UserError(f"the number of draws must be at least 1, got {num_draws}")
    data.schema.need_one_target("to_arviz")
    left_out: list[str] = []
    affordable = max(50, int(draws.WORK / (500 * posterior.num_weights)))
    most = num_draws or (NUMBERS // 100 if posterior.chains is not None else min(GUIDE_DRAWS, affordable))
    full_shape, step = draws.sized(posterior, most), draws.stride(posterior, most)
    posterior = draws.thinned(posterior, most)
    shape = draws.sized(posterior, most)
    if shape != full_shape:
        left_out.append(f"{full_shape[1] - shape[1]:,} of each chain's {full_shape[1]:,} draws (evenly thinned)")
    rows = draws.rows_within(posterior, len(data.x_train), math.prod(shape), NUMBERS)
    if len(rows) < len(data.x_train):
        left_out.append(f"{len(data.x_train) - len(rows):,} of {len(data.x_train):,} training rows (evenly chosen)")
    names, coords = _dimensions(posterior)
    coords |= {"draw": np.arange(shape[1]) * step, "observation": rows}
    groups: dict[str, Variables] = {"posterior": _weights(posterior, shape, names, left_out, seed)}
    groups["sample_stats"] = {name: (("chain", "draw"), v) for name, v in draws.sampler_series(posterior).items()}
    groups |= _training_rows(posterior, data, rows, shape, seed)
    if not groups["posterior_predictive"]:
        left_out.append("posterior_predictive: some draws predict numbers that are not finite")
    if len(rows) * math.prod(posterior.schema.input_shape) <= NUMBERS:
        features, sizes = posterior.schema.features, posterior.schema.input_shape
        usual = {1: ["feature"], 3: ["channel", "height", "width"]}
        dims = usual.get(len(sizes), [f"input_{i}" for i in range(len(sizes))])
        coords |= {"feature": np.array(features)} if tuple(sizes) == (len(features),) else {}
        groups["constant_data"] = {"x": (("observation", *dims), data.x_train[rows].cpu().numpy())}
    else:
        left_out.append("the inputs")
    groups |= _prior(posterior, data, rows, names, left_out, seed)
    if len(data.x_test):
        groups["predictions"], coords["test_observation"] = _predicted(posterior, data, shape, seed)
    coords["class"] = np.array(posterior.schema.classes or ("",))
    draws_kind, provenance = draws.kind(posterior), posterior.provenance
    return _as_arviz(groups, coords, {
        "creation_library": "bnn_pyro",
        "creation_library_version": bnn_pyro.__version__,
        "inference_library": "pyro",
        **{k: str(provenance[k]) for k in ("entry", "method", "data") if k in provenance},
        **{k: int(provenance[k]) for k in ("seed",) if k in provenance},
        "task": posterior.schema.task,
        "target": posterior.schema.target,
        "draws": draws.KINDS[draws_kind],
        "approximate": "no" if draws_kind == "chains" else "yes",
        "temperature": temperature_of(posterior),
        "left_out": "; ".join(left_out) or "nothing",
    })  # fmt: skip


def _dimensions(posterior: Posterior) -> tuple[dict[str, tuple[str, ...]], dict[str, np.ndarray]]:
    """({site: names of its dimensions}, {dimension: labels}): names of features and classes, numbers for the rest."""
    schema, model = posterior.schema, posterior.model
    names: dict[str, tuple[str, ...]] = {}
    coords: dict[str, np.ndarray] = {}
    for site, value in model.initial.items():
        layer, _, role = site.rpartition(".")
        if role == "weight" and layer and value.dim() in (2, 4):
            parts = ("out", "in", "kernel_height", "kernel_width")[: value.dim()]
            names[site] = tuple(f"{layer}.{part}" for part in parts)
        elif role == "bias" and layer and value.dim() == 1:
            names[site] = (f"{layer}.out",)
        named_sizes = zip(names.get(site, ()), value.shape, strict=False)
        if site not in names or any(len(coords.get(name, range(size))) != size for name, size in named_sizes):
            names[site] = tuple(f"{site}.dim_{i}" for i in range(value.dim()))  # as in transposed convolutions
        coords |= {name: np.arange(size) for name, size in zip(names[site], value.shape, strict=True)}
    if weights := [site for site in names if site.endswith(".weight")]:
        outputs = schema.classes[1:] if len(schema.classes) == 2 else schema.classes
        one = getattr(getattr(model, "likelihood", None), "outputs", 1) == 1
        outputs = outputs or ((schema.target,) if one else ("mean", "spread"))
        features = () if hasattr(model, "backbone") else schema.features  # a backbone's outputs have no names
        for name, labels in ((names[weights[0]][1:2], features), (names[weights[-1]][:1], outputs)):
            if name and len(coords[name[0]]) == len(labels) == len(set(labels)):
                coords[name[0]] = np.array(labels)
    return names, coords


def _weights(posterior: Posterior, shape: tuple[int, int], names: Mapping, left_out: list[str], seed: int) -> Variables:
    """The sites, in the model's order; from the smallest on, as many as fit into NUMBERS values."""
    sizes = {site: value.numel() * math.prod(shape) for site, value in posterior.model.initial.items()}
    ordered = sorted(sizes, key=sizes.__getitem__)
    fits = dict(zip(ordered, np.cumsum([sizes[site] for site in ordered]) <= NUMBERS, strict=True))
    left_out += [f"{site} ({sizes[site]:,} numbers)" for site in ordered if not fits[site]]
    fitting = [site for site in sizes if fits[site]]
    values = draws.stored_or_fresh(posterior, shape[1], seed, lambda block: [block[site] for site in fitting])
    pairs = zip(fitting, values, strict=True)
    return {site: (("chain", "draw", *names[site]), v.detach().cpu().numpy()) for site, v in pairs}


def _training_rows(
    posterior: Posterior, data: Dataset, rows: np.ndarray, shape: tuple[int, int], seed: int
) -> dict[str, Variables]:
    x, y, finite = data.x_train[rows], data.y_train[rows].cpu(), True
    log_likelihood = np.empty((math.prod(shape), len(rows)))
    replicated = np.empty(log_likelihood.shape, dtype=np.int32 if posterior.schema.has_classes else np.float32)
    with isolated(seed + 1):
        for part, prediction in draws.walk(posterior, x, math.prod(shape), seed):
            log_likelihood[:, part] = prediction.log_probs(y[part]).double().numpy()
            finite = finite and bool(np.isfinite(log_likelihood[:, part]).all())
            replicated[:, part] = prediction.components.sample().numpy() if finite else 0
    dims = ("chain", "draw", "observation")
    return {
        "log_likelihood": {OBSERVED: (dims, log_likelihood.reshape(*shape, -1))},
        "posterior_predictive": {OBSERVED: (dims, replicated.reshape(*shape, -1))} if finite else {},
        "observed_data": {OBSERVED: (("observation",), y.numpy())},
    }


def _prior(
    posterior: Posterior, data: Dataset, rows: np.ndarray, names: Mapping, left_out: list[str], seed: int
) -> dict[str, Variables]:
    if reason := proper_prior(posterior, data):
        left_out.append(f"prior and prior_predictive: {reason}")
        return {}
    num = max(1, min(PRIOR_DRAWS, 2 * NUMBERS // posterior.num_weights, NUMBERS // len(rows)))
    with isolated(seed + 2):
        chain = draws.as_chain(posterior, prior_draws(posterior.model, data.x_train[:1].to(posterior.device), num))
    predictive = _training_rows(chain, data, rows, (1, num), seed + 3)["posterior_predictive"]
    return {"prior": _weights(chain, (1, num), names, [], seed), "prior_predictive": predictive}


def _predicted(posterior: Posterior, data: Dataset, shape: tuple[int, int], seed: int) -> tuple[Variables, np.ndarray]:
    classes = len(posterior.schema.classes)
    points = draws.even(len(data.x_test), min(POINTS, NUMBERS // (math.prod(shape) * max(1, classes))))
    blocks = draws.walk(posterior, data.x_test[points], math.prod(shape), seed)
    values = np.concatenate([(p.probs if classes else p.locs).numpy() for _, p in blocks], 1)
    values = values.reshape(*shape, *values.shape[1:])
    dims = ("chain", "draw", "test_observation", "class")
    return {"probability" if classes else "mean": (dims[: values.ndim], values)}, points


def _as_arviz(groups: Mapping[str, Variables], coords: Mapping[str, Any], attrs: Mapping[str, Any]) -> Any:
    """The groups that are not empty as one ArviZ object; a dimension whose labels do not fit is numbered."""
    with warnings.catch_warnings(action="ignore"):  # ArviZ 0.23 announces 1.0 once a day
        import xarray

        datasets = {"/": xarray.Dataset(attrs=dict(attrs))}
        for group, variables in groups.items():
            if variables:
                sizes = {d: n for dims, v in variables.values() for d, n in zip(dims, v.shape, strict=True)}
                values = {d: coords[d] if len(coords.get(d, ())) == n else np.arange(n) for d, n in sizes.items()}
                datasets[group] = xarray.Dataset(dict(variables), coords=values, attrs=dict(attrs))
        tree = xarray.DataTree.from_dict(datasets)
        if not is_arviz_0():
            return tree
        import arviz

        return arviz.from_datatree(tree)


def save_netcdf(tree: Any, path: str | os.PathLike) -> None:
    """Write the result of :func:`to_arviz` as netCDF, atomically. Raises UserError if it cannot be written."""
    with telling(path := Path(path)), warnings.catch_warnings(action="ignore"):
        try:
            with whole_file(path) as file:
                (tree.to_datatree() if is_arviz_0() else tree).to_netcdf(file.name, engine="h5netcdf")
        except RuntimeError as error:  # h5py may raise this if the disk is full
            raise OSError(errno.ENOSPC, first_line(error)) from error
