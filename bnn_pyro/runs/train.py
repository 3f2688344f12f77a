"""Fit a run into its folder: the variant and the deterministic network to compare it with; record the environment."""

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.distributed import Ranks, process_group
from bnn_pyro.errors import FitFailed
from bnn_pyro.fitting import check_setup, fit_setup
from bnn_pyro.isolation import isolated, one_thread
from bnn_pyro.posterior import Posterior
from bnn_pyro.runs.folder import RunFolder
from bnn_pyro.runs.recipe import Recipe

#: Packages whose versions are recorded.
PACKAGES = ("bnn-pyro", "pyro-ppl", "torch", "torchvision", "numpy", "pandas", "scikit-learn", "matplotlib")


def prepare_run(recipe: Recipe, data: Dataset, max_minutes: float | None = None) -> tuple[Recipe, Recipe | None]:
    """Complete a recipe for the data: (the recipe, that of its baseline or backbone, or None); each is built once.

    Raises UserError if settings or method do not suit the data, before any file is written.
    """
    baseline = recipe.for_baseline(data.schema)
    pair = check_setup(recipe, data, max_minutes), None if baseline is None else check_setup(baseline, data)
    for one in filter(None, pair):
        with isolated(0):
            one.entry.guide(one.entry.model(data.schema))
    return pair


def fit_run(
    folder: RunFolder, recipe: Recipe, data: Dataset, baseline: Recipe | None, *, resume: bool = False,
    max_minutes: float | None = None,
) -> tuple[Posterior, Posterior | None]:  # fmt: skip
    """Fit into a folder that was begun: (posterior, that of the baseline or None); recipes: see :func:`prepare_run`.

    The posterior is calibrated too, if the recipe asks for it by ``conformal``.
    resume: continue from checkpoints, to the same result; finished fits are loaded.   max_minutes: for the posterior.
    If the fit has several processes, all of them call this, and rank 0 writes.   Raises what ``fit`` raises.
    """

    def fit_into(folder: RunFolder, recipe: Recipe, **limit: float | None) -> Posterior:
        with isolated(0):
            weights = sum(value.numel() for value in recipe.entry.model(data.schema).initial.values())
        rows = min(getattr(recipe.method, "batch_size", 0) or len(data.x_train), len(data.x_train))
        # With several threads small steps are slower, on a busy machine 25 times.
        with one_thread() if weights * rows < 20_000_000 else nullcontext():
            place = dict(out=folder.path, resume=resume, device=recipe.device)
            posterior = fit_setup(recipe, data, seed=recipe.seed, **place, **limit)
            if process_group().is_rank0:
                # One line per recorded epoch; log densities are in nats of the whole training set.
                folder.write("history.csv", pd.DataFrame(posterior.trace).to_csv(index=False))
                facts = environment(posterior.provenance["device"])
                folder.write("environment.json", facts | {"training_seconds": posterior.provenance["seconds"]})
        return posterior

    def fit_baseline() -> Posterior:
        with folder.baseline.begun(baseline, keep=resume):
            return fit_into(folder.baseline, baseline)

    beside = backbone = fit_baseline() if recipe.backbone_variant(data.schema) is not None else None
    ready = recipe if backbone is None else replace(recipe, entry=replace(recipe.entry, backbone=backbone))
    posterior = fit_into(folder, ready, max_minutes=max_minutes)
    if backbone is None and baseline is not None:
        beside = fit_baseline()
    if recipe.conformal and process_group().is_rank0:
        from bnn_pyro.runs.predict import calibrate_run

        with suppress(FitFailed):  # reported with the scores
            calibrate_run(folder, recipe, data, posterior, level=recipe.conformal)
    return posterior, beside


def load_together(ranks: Ranks, load: Callable[[], Dataset]) -> Dataset:
    """Call ``load()`` in all processes, first in one per machine, which downloads. All raise the UserError of any."""
    with ranks.sharing_errors():
        data = load() if ranks.local == 0 else None
    with ranks.sharing_errors():
        return data or load()


def environment(device: str) -> dict[str, Any]:
    """Return the command, the machine, versions and time; JSON-able."""
    return {
        "command": typed_command(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device if device == "cpu" else f"{device}: {torch.cuda.get_device_name(device)}",
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def typed_command() -> str:
    """Return the command line as it could be typed."""
    program = "python -m bnn_pyro.run" if Path(sys.argv[0]).name == "run.py" else Path(sys.argv[0]).name
    return " ".join([program, *map(shlex.quote, sys.argv[1:])])


def _commit() -> str | None:
    """Return the commit of the package's git checkout, marked if files differ from it; None outside a checkout."""
    package = Path(__file__).parents[1]
    ask = ["git", "-C", str(package), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):
        if (package.parent / ".git").exists():
            return subprocess.run(ask, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return None
