"""The one door to training: build the variant, isolate, infer, keep a checkpoint."""

from __future__ import annotations

import json
import platform
import time
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch

from bnn_pyro.checkpoint import Checkpoint
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.distributed import Agreed, Ranks, here, joined
from bnn_pyro.errors import UserError, unknown
from bnn_pyro.features import check_split, on_features
from bnn_pyro.files import lock_folder
from bnn_pyro.inference import METHODS, Method, methods_for, unsuitable
from bnn_pyro.isolation import isolated
from bnn_pyro.loading import load
from bnn_pyro.parallel.task import forwarded
from bnn_pyro.parts.pretrained import from_text
from bnn_pyro.posterior import Posterior, read_archive
from bnn_pyro.progress import progress_bar
from bnn_pyro.settings import build, plain
from bnn_pyro.zoo import TUNED, ZOO, Entry, Fit

__all__ = ["at_hand", "check_divisible", "choose_device", "fit", "tuned"]


def tuned(entry: str, data: str, method: str | None = None) -> tuple[str, Fit]:
    """(name of the method, the settings tuned for this variant, data set and method; empty where there are none).

    Raises UserError for an unknown variant or a method that does not suit it.
    """
    if entry not in ZOO:
        raise unknown("variant", entry, ZOO)
    kind = ZOO[entry]
    if method is None:
        method = methods_for(kind)[0]
    elif method not in methods_for(kind):
        raise unsuitable(method, entry, kind)
    return method, TUNED.get(entry, {}).get(data, {}).get(method, Fit())


def choose_device(name: str) -> torch.device:
    """ "auto", "cpu" or "cuda" -> a device; UserError where CUDA is asked for and absent.

    Each process of a fit has a GPU of its own.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise unknown("device", name, ("auto", "cpu", "cuda"))
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device 'cuda' was asked for, but this machine has none that torch can use; take --device cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    ranks = here()
    if ranks.local >= torch.cuda.device_count():
        raise UserError(
            f"this machine has {torch.cuda.device_count()} GPUs for {ranks.local + 1} processes or more; start as many "
            "processes as there are GPUs (torchrun --nproc-per-node), or take --device cpu"
        )
    if ranks.size == 1:
        return torch.device("cuda")
    torch.cuda.set_device(ranks.local)  # where NCCL works
    return torch.device("cuda", ranks.local)


def fit(
    entry: str | Entry,
    data: Dataset,
    method: str | Method | None = None,
    *,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    device: str = "auto",
    progress: bool = True,
) -> Posterior:
    """The posterior of a variant given the training rows of ``data``.

    entry: a name in ``ZOO`` (with the settings tuned for ``data.name``), or a variant with your own settings.
    method: a name in ``METHODS``, or settings such as ``SVI(epochs=200)``; by default the variant's first.
    seed: determines initial weights, order of mini-batches and noise; the caller's generators are left as they were.
    out: a folder for ``checkpoint/`` while training and the posterior's archive after it; the network that a last
        layer stands on, where it has to be trained first, is in ``baseline/`` there.
    resume: go on from ``out``'s checkpoint, to the very same result; a finished posterior is just loaded.

    Under torchrun, or in a process group of torch.distributed, all processes fit one posterior: each calls this with
    the same arguments, has a share of the rows of every step, and returns it; rank 0 writes. A checkpoint may be
    resumed by any number of processes.

    Raises UserError for bad input, a loss that is not finite, or ``out`` in use by another process, and
    ``Interrupted`` (a KeyboardInterrupt) on Ctrl-C or SIGTERM where ``out`` was given: its checkpoint is then whole.
    """
    with joined() as ranks, ranks.connected():
        return _fit(ranks, entry, data, method, seed, out, resume, device, progress and ranks.first)


def _fit(
    ranks: Ranks,
    entry: str | Entry,
    data: Dataset,
    method: str | Method | None,
    seed: int,
    out: str | Path | None,
    resume: bool,
    device: str,
    progress: bool,
) -> Posterior:
    entry, method = _resolve(entry, data, method)
    if not len(data.x_train):
        raise UserError(f"data set '{data.name}' has no training rows")
    check_divisible(method, ranks)
    entry = ranks.all_do(lambda: at_hand(entry, data))
    stands_on = entry.foundation(data.schema) if hasattr(entry, "foundation") else None
    if stands_on is not None:
        below = None if out is None else Path(out) / "baseline"
        how = dict(seed=seed, out=below, resume=resume, device=device, progress=progress)
        entry = entry.on(fit(stands_on, data, **how))
    name = _name(entry, ZOO)
    incidental = getattr(method, "incidental", ())
    settings_that_count = {k: v for k, v in plain(method).items() if k not in incidental}
    fingerprint = data.fingerprint
    key = [name, plain(entry), _name(method, METHODS), settings_that_count, seed, fingerprint]
    provenance = {
        "key": key,
        "entry": name,
        "entry_settings": plain(entry),
        "method": _name(method, METHODS),
        "method_settings": plain(method),
        "seed": seed,
        "data": data.name,
        "source": data.source,
        "split": dict(data.split),
        "fingerprint": fingerprint,
        "rows": {part: len(getattr(data, f"x_{part}")) for part in ("train", "val", "test")},
        "versions": {
            "python": platform.python_version(),
            **{p: version(p) for p in ("bnn-pyro", "pyro-ppl", "torch", "numpy")},
        },
    }
    _check_same(ranks, key)
    checkpoint = None if out is None else Checkpoint(Path(out) / "checkpoint", key)
    # A checkpoint beside a finished posterior is that of a later run, stopped before it could replace it.
    finished = checkpoint is not None and resume and not checkpoint.exists
    if finished and ranks.first_does((Path(out) / "posterior.json").is_file):
        return ranks.all_do(lambda: _finished(out, entry, key))
    with nullcontext() if out is None else ranks.first_holds(lambda: lock_folder(out)):
        if checkpoint is not None and not resume:
            checkpoint.discard()
        where = ranks.all_do(lambda: choose_device(device))
        on_device = data.to(where)
        start = time.perf_counter()
        label = f"{name} · {provenance['method']} · {data.name}"
        with isolated(seed), ExitStack() as bars:
            model = entry.model(data.schema).to(where)
            inferred, seen = on_features(model, on_device, progress)
            guide = entry.guide(model)
            report = forwarded(bars.enter_context(progress_bar(label, progress)))
            guide = guide if guide is None else guide.to(where)
            settings = dict(seed=seed, report=report)
            if checkpoint is None:
                posterior = method.run(inferred, guide, seen, **settings)
            else:
                with checkpoint:
                    posterior = method.run(inferred, guide, seen, checkpoint=checkpoint, **settings)
        provenance |= {"seconds": round(time.perf_counter() - start, 3), "device": str(where)}
        if ranks.size > 1:
            provenance["processes"] = ranks.size
        whole = posterior.model if inferred is model else model
        provenance = {**posterior.provenance, **provenance}
        posterior = replace(posterior, model=whole, schema=data.schema, provenance=provenance)
        if checkpoint is not None:
            ranks.all_do(lambda: posterior.save(out) if ranks.first else None)
            checkpoint.discard()
        return posterior


def check_divisible(method: Method, ranks: Ranks) -> None:
    """Raises UserError where there are several processes and the method cannot share a fit among them."""
    if ranks.size > 1 and not getattr(method, "divisible", False):
        can = ", ".join(name for name, kind in METHODS.items() if getattr(kind, "divisible", False))
        raise Agreed(
            f"{_name(method, METHODS)} does not divide one fit among processes, as {can} do; start it without torchrun"
        )


def _check_same(ranks: Ranks, key: list) -> None:
    """Raises UserError on every rank unless all of them were asked for the same fit."""
    asked = ranks.gather(json.dumps(key, sort_keys=True, default=str))
    if len(set(asked)) > 1:
        rank = next(r for r, other in enumerate(asked) if other != asked[0])
        names = ("variant", "its settings", "inference method", "its settings", "seed", "training rows")
        here, there = (json.loads(asked[r]) for r in (0, rank))
        what = ", ".join(name for name, a, b in zip(names, here, there, strict=True) if a != b)
        raise Agreed(f"processes 0 and {rank} of this fit were given other things ({what}); give all of them the same")


def at_hand(entry: Entry, data: Dataset) -> Entry:
    """A last layer whose backbone is in a folder or a file, with that loaded; any other variant as it is.

    Raises UserError where there is none, or where rows that validate or test here may have trained it.
    """
    backbone = getattr(entry, "backbone", None)
    if isinstance(backbone, str) and entry.foundation(data.schema) is None:
        found = load(backbone) if Path(backbone).is_dir() else from_text(backbone)
        entry = replace(entry, backbone=found)
    check_split(getattr(getattr(entry, "backbone", None), "description", {}), data)
    return entry


def _finished(folder: str | Path, entry: Entry, key: list) -> Posterior:
    """The finished posterior in ``folder``, if it is the one asked for."""
    if read_archive(folder)[1]["provenance"].get("key") != key:
        raise UserError(
            f"{folder} holds a finished posterior of other settings, seed or data; choose another folder, "
            "or start again with --overwrite"
        )
    return load(folder, entry)


def _resolve(entry: str | Entry, data: Dataset, method: str | Method | None) -> tuple[Entry, Method]:
    """Settings for both, the tuned ones where a name was given; either may be of the user's own class."""
    if isinstance(entry, str) and entry not in ZOO:
        raise unknown("variant", entry, ZOO)
    kind = ZOO[entry] if isinstance(entry, str) else type(entry)
    given = method is not None and not isinstance(method, str)
    name = _name(method, METHODS) if given else method or methods_for(kind)[0]
    if name not in methods_for(kind) and not (given and name not in METHODS):
        raise unsuitable(name, kind.__name__, kind)
    variant = next((name for name, other in ZOO.items() if other is kind), "")
    best = TUNED.get(variant, {}).get(data.name, {}).get(name, Fit())
    return (
        build(kind, best.entry) if isinstance(entry, str) else entry,
        method if given else build(METHODS[name], best.method),
    )


def _name(settings: object, table: dict[str, type]) -> str:
    """The name of a variant or method in its table; the class's own name where it is the user's."""
    return next((name for name, kind in table.items() if type(settings) is kind), type(settings).__name__)
