"""A run fitted into its folder: the network that it stands on, the variant, the deterministic network beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.distributed import here
from bnn_pyro.fitting import at_hand, fit
from bnn_pyro.isolation import isolated
from bnn_pyro.posterior import Posterior
from bnn_pyro.runs.folder import RunFolder
from bnn_pyro.runs.recipe import Recipe
from bnn_pyro.zoo import Entry

__all__ = ["fit_run", "prepared"]

#: Weights × rows of a step below which a second thread costs more than it brings.
SMALL_STEP = 20_000_000


def prepared(recipe: Recipe, data: Dataset) -> tuple[Entry, Recipe | None]:
    """(the variant with what it needs at hand, the recipe of the network beside or below it), both built once.

    Raises UserError where settings or method do not suit the data: before any file is written.
    """
    entry, below = at_hand(recipe.entry(), data), recipe.for_baseline(data.schema)
    _check_model(recipe, entry, data)
    if below is not None:
        _check_model(below, below.entry(), data)
    return entry, below


def fit_run(
    folder: RunFolder,
    recipe: Recipe,
    data: Dataset,
    entry: Entry,
    below: Recipe | None,
    *,
    resume: bool = False,
    show: bool = True,
) -> tuple[Posterior, Posterior | None]:
    """(posterior, that of the baseline or None), in a folder that was begun; entry, below: see :func:`prepared`.

    resume: go on from the folder's checkpoints, to the very same result; what is finished is just loaded.

    Where the fit has several processes, all of them call this, and rank 0 writes.

    Raises what ``fit`` raises.
    """
    baseline = None
    if recipe.stands_on(data.schema) is not None:
        baseline = _fit_baseline(folder, below, data, resume, show)
        entry = entry.on(baseline)
    posterior = _fit(folder, recipe, entry, data, resume, show)
    if below is not None and baseline is None:
        baseline = _fit_baseline(folder, below, data, resume, show)
    return posterior, baseline


def _fit_baseline(folder: RunFolder, recipe: Recipe, data: Dataset, resume: bool, show: bool) -> Posterior:
    with here().first_holds(lambda: folder.baseline.begun(recipe, keep=resume)):
        return _fit(folder.baseline, recipe, recipe.entry(), data, resume, show)


def _fit(folder: RunFolder, recipe: Recipe, entry: Entry, data: Dataset, resume: bool, show: bool) -> Posterior:
    with _few_threads(recipe, entry, data):
        posterior = fit(
            entry,
            data,
            recipe.method(),
            seed=recipe.seed,
            out=folder.path,
            resume=resume,
            device=recipe.device,
            progress=show,
        )
        if here().first:
            folder.write_training(posterior)
    return posterior


@contextmanager
def _few_threads(recipe: Recipe, entry: Entry, data: Dataset) -> Iterator[None]:
    """One thread where a step is so small that threads would only wait for one another (a busy machine: 25 times)."""
    with isolated(0):
        weights = sum(value.numel() for value in entry.model(data.schema).initial.values())
    rows = recipe.inference_settings.get("batch_size") or len(data.x_train)
    former = torch.get_num_threads()
    if weights * min(rows, len(data.x_train)) < SMALL_STEP:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(former)


def _check_model(recipe: Recipe, entry: Entry, data: Dataset) -> None:
    """Build variant and method once."""
    method = recipe.method()
    if hasattr(method, "check"):
        method.check(data)
    with isolated(0):
        entry.guide(entry.model(data.schema))
