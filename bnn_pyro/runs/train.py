"""A run fitted into its folder: the variant, and the deterministic network beside it or below it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.distributed import here
from bnn_pyro.fitting import check_divisible, fit, resolve_backbone
from bnn_pyro.inference import check_timed
from bnn_pyro.isolation import isolated, one_thread
from bnn_pyro.posterior import Posterior
from bnn_pyro.runs.folder import RunFolder
from bnn_pyro.runs.recipe import Recipe
from bnn_pyro.zoo import Entry

__all__ = ["fit_run", "prepared"]

#: Weights × rows of a step below which a second thread costs more than it brings.
SMALL_STEP = 20_000_000


def prepared(recipe: Recipe, data: Dataset, max_minutes: float | None = None) -> tuple[Entry, Recipe | None]:
    """(the variant with what it needs at hand, the recipe of the network beside or below it), both built once.

    Raises UserError where settings or method do not suit the data: before any file is written.
    """
    check_timed(recipe.method(), max_minutes)
    entry, below = resolve_backbone(recipe.entry(), data), recipe.for_baseline(data.schema)
    for one, variant in ((recipe, entry), *(((below, below.entry()),) if below is not None else ())):
        method = one.method()
        check_divisible(method, here())
        if hasattr(method, "check"):
            method.check(data)
        with isolated(0):
            variant.guide(variant.model(data.schema))
    return entry, below


def fit_run(
    folder: RunFolder,
    recipe: Recipe,
    data: Dataset,
    entry: Entry,
    below: Recipe | None,
    *,
    resume: bool = False,
    max_minutes: float | None = None,
) -> tuple[Posterior, Posterior | None]:
    """(posterior, that of the baseline or None), in a folder that was begun; entry, below: see :func:`prepared`.

    resume: go on from the folder's checkpoints, to the very same result; what is finished is just loaded.
    max_minutes: of the posterior alone; see ``fit``.

    Where the fit has several processes, all of them call this, and rank 0 writes.

    Raises what ``fit`` raises.
    """

    def fit_into(folder: RunFolder, recipe: Recipe, entry: Entry, **limit: float | None) -> Posterior:
        how = dict(seed=recipe.seed, out=folder.path, resume=resume, device=recipe.device, auto=recipe.auto, **limit)
        with _threads(recipe, entry, data):
            posterior = fit(entry, data, recipe.method(), **how)
            if here().first:
                folder.write_training(posterior)
        return posterior

    def fit_baseline() -> Posterior:
        with here().first_holds(folder.baseline.begun(below, keep=resume)):
            return fit_into(folder.baseline, below, below.entry())

    if recipe.backbone_variant(data.schema) is not None:
        baseline = fit_baseline()
        return fit_into(folder, recipe, replace(entry, backbone=baseline), max_minutes=max_minutes), baseline
    posterior = fit_into(folder, recipe, entry, max_minutes=max_minutes)
    return posterior, None if below is None else fit_baseline()


def _threads(recipe: Recipe, entry: Entry, data: Dataset) -> AbstractContextManager[None]:
    """One thread where a step is so small that threads would only wait for one another (a busy machine: 25 times)."""
    with isolated(0):
        weights = sum(value.numel() for value in entry.model(data.schema).initial.values())
    rows = min(recipe.inference_settings.get("batch_size") or len(data.x_train), len(data.x_train))
    return one_thread() if weights * rows < SMALL_STEP else nullcontext()
