"""A run fitted into its folder: its data, the variant, and the deterministic network beside it; how it was made."""

import os
import platform
import secrets
import shlex
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import pandas as pd
import torch

from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.distributed import Ranks, here
from bnn_pyro.errors import FitFailed
from bnn_pyro.files import cache_root
from bnn_pyro.fitting import check_setup, first_member, fit_setup
from bnn_pyro.isolation import isolated, one_thread
from bnn_pyro.posterior import Posterior
from bnn_pyro.runs.folder import RunFolder
from bnn_pyro.runs.recipe import Recipe
from bnn_pyro.zoo.auto import Setup

#: Weights × rows of a step below which a second thread costs more than it brings.
SMALL_STEP = 20_000_000
#: Bytes of rows from which on the processes of a machine have them in common; fewer are loaded by each.
LARGE = 2**28
#: Whose versions are kept.
PACKAGES = ("bnn-pyro", "pyro-ppl", "torch", "torchvision", "numpy", "pandas", "scikit-learn", "matplotlib")


def prepare_run(recipe: Recipe, data: Dataset, max_minutes: float | None = None) -> tuple[Recipe, Recipe | None]:
    """(the recipe with what its variant needs, that of its baseline or backbone), each built once on the data.

    Raises UserError where settings or method do not suit the data: before any file is written.
    """
    baseline = recipe.for_baseline(data.schema)
    pair = check_setup(recipe, data, max_minutes), None if baseline is None else check_setup(baseline, data)
    for one in filter(None, pair):
        with isolated(0):
            one.entry.guide(one.entry.model(data.schema))
    return pair


def fit_run(
    folder: RunFolder,
    recipe: Recipe,
    data: Dataset,
    baseline: Recipe | None,
    *,
    resume: bool = False,
    max_minutes: float | None = None,
) -> tuple[Posterior, Posterior | None]:
    """(posterior, that of the baseline or None), in a folder that was begun; recipe, baseline: see :func:`prepare_run`.

    resume: go on from the folder's checkpoints, to the very same result; what is finished is just loaded.
    max_minutes: of the posterior alone; see ``fit``.

    Where the fit has several processes, all of them call this, and rank 0 writes.

    Raises what ``fit`` raises.
    """

    def fit_into(
        folder: RunFolder, recipe: Recipe, members: Posterior | None = None, **limit: float | None
    ) -> Posterior:
        with _threads(recipe, data):
            if members is None or (resume and here().first_does(folder.has_fit)):
                place = dict(out=folder.path, resume=resume, device=recipe.device)
                posterior = fit_setup(recipe, data, seed=recipe.seed, **place, **limit)
            else:
                posterior = first_member(members, recipe, data, recipe.seed, folder.path)
            if here().first:
                # One line per recorded epoch, in nats of the whole training set.
                folder.write("history.csv", pd.DataFrame(posterior.trace).to_csv(index=False))
                facts = environment(posterior.provenance["device"], posterior.provenance["seconds"])
                folder.write("environment.json", facts)
        return posterior

    def fit_baseline(members: Posterior | None = None) -> Posterior:
        with folder.baseline.begun(baseline, keep=resume):
            return fit_into(folder.baseline, baseline, members)

    backbone = fit_baseline() if recipe.backbone_variant(data.schema) is not None else None
    ready = recipe if backbone is None else replace(recipe, entry=replace(recipe.entry, backbone=backbone))
    posterior = fit_into(folder, ready, max_minutes=max_minutes)
    beside = backbone
    if backbone is None and baseline is not None:
        beside = fit_baseline(posterior if has_member(ready, baseline) else None)
    return posterior, beside


def calibrate_set_aside(folder: RunFolder, recipe: Recipe, data: Dataset, posterior: Posterior) -> None:
    """By the rows that ``conformal`` has set aside, where it is asked for."""
    if recipe.conformal:
        from bnn_pyro.runs.predict import calibrate_run

        with suppress(FitFailed):  # the scores say so
            calibrate_run(folder, recipe, data, posterior, level=recipe.conformal)


def has_member(ensemble: Setup, point: Setup) -> bool:
    """Whether the first member of an ensemble is the fit that ``point`` would be, but for the noise of its training."""
    settings, shared = vars(ensemble.method), vars(point.method).items()
    if "members" not in settings or not isinstance(ensemble.method, type(point.method)):
        return False
    return ensemble.entry == point.entry and all(settings[name] == value for name, value in shared)


def _threads(recipe: Recipe, data: Dataset) -> AbstractContextManager[None]:
    """One thread where a step is so small that threads would only wait for one another (a busy machine: 25 times)."""
    with isolated(0):
        weights = sum(value.numel() for value in recipe.entry.model(data.schema).initial.values())
    rows = min(getattr(recipe.method, "batch_size", 0) or len(data.x_train), len(data.x_train))
    return one_thread() if weights * rows < SMALL_STEP else nullcontext()


# -- one copy of the rows on a machine ---------------------------------------------------------------------------------
def load_together(ranks: Ranks, load: Callable[[], Dataset]) -> Dataset:
    """``load()`` for all processes of a fit, with one copy of the rows on a machine where they are many.

    One process of every machine loads first, so that the others find what it downloaded. It saves the rows to a
    file without a name, so that nothing is left on the disk however they end; the others open it as ``/proc/PID/fd/N``
    and all map it copy-on-write. Where that cannot be each process has a copy of its own, with a warning.

    Raises on all the UserError of any.
    """
    if ranks.size == 1:
        return load()
    with ranks.agreed():
        early = load() if ranks.local == 0 else None
    # torchrun numbers those of a machine in a row.
    others = 1 in ranks.gather(ranks.local)[ranks.rank + 1 : ranks.rank + 2]
    with ExitStack() as stack:
        saved, mapped, problem = None, None, None
        if early is not None and others and sum(rows.nbytes for rows in early.parts().values()) >= LARGE:
            try:
                cache_root().mkdir(parents=True, exist_ok=True)
                saved = _save(early, stack.enter_context(tempfile.TemporaryFile(dir=cache_root())))
            except OSError as error:
                problem = str(error)
        mine = ranks.gather(saved)[ranks.rank - ranks.local]
        if mine is not None:
            try:
                mapped = _map(*mine)
            except Exception as error:  # torch has several for a file that is not this one
                problem = " ".join(str(error).split())[:200]
        problems = [text for text in ranks.gather(problem) if text is not None]  # here all have mapped it
    if problems and ranks.first:
        warnings.warn(f"processes hold a copy of the data each, not one in common ({problems[0]})", stacklevel=2)
    with ranks.agreed():
        return mapped or early or load()


def _save(data: Dataset, file: BinaryIO) -> tuple[str, str, Dataset]:
    """(the path by which others find the file, a token that tells it from any other, the data without rows)."""
    token = secrets.token_hex()
    torch.save({"token": token, **data.parts()}, file)
    file.flush()
    return f"/proc/{os.getpid()}/fd/{file.fileno()}", token, data.to("meta")


def _map(path: str, token: str, outline: Dataset) -> Dataset:
    tensors = torch.load(path, mmap=True, weights_only=True)
    if tensors.pop("token") != token:  # of another machine or container, with processes of these numbers
        raise OSError(f"{path} is another file")
    return replace(outline, **tensors)


# -- how it was made --------------------------------------------------------------------------------------------------
def environment(device: str, seconds: float | None = None) -> dict[str, Any]:
    """The command, the machine, versions and time; JSON-able.   seconds: of the training."""
    return {
        "command": typed_command(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        **({} if seconds is None else {"training_seconds": seconds}),
        "device": device if device == "cpu" else f"{device}: {torch.cuda.get_device_name(device)}",
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def typed_command() -> str:
    """The command line, as one would type it."""
    program = "python -m bnn_pyro.run" if Path(sys.argv[0]).name == "run.py" else Path(sys.argv[0]).name
    return " ".join([program, *map(shlex.quote, sys.argv[1:])])


def _commit() -> str | None:
    """The commit of the package's own checkout, marked where files differ from it; None outside of one."""
    package = Path(__file__).parents[1]
    if not (package.parent / ".git").exists():
        return None
    try:
        ask = ["git", "-C", str(package), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
        return subprocess.run(ask, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
