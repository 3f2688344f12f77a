"""Training: build the variant, isolate, infer, keep a checkpoint."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bnn_pyro.checkpoint import Checkpoint
from bnn_pyro.datasets.dataset import Dataset, Schema, row_digests
from bnn_pyro.distributed import Agreed, Ranks, choose_device, here, joined
from bnn_pyro.errors import UserError, unknown
from bnn_pyro.features import check_split, on_features
from bnn_pyro.files import lock_folder
from bnn_pyro.inference import METHODS, Method, check_timed, methods_for, unsuitable
from bnn_pyro.isolation import isolated
from bnn_pyro.loading import load
from bnn_pyro.parts.backbone import OnFeatures, from_text
from bnn_pyro.posterior import Posterior, read_archive
from bnn_pyro.progress import forwarded, progress_bar
from bnn_pyro.settings import build, plain
from bnn_pyro.zoo import TUNED, ZOO, Bayesian, Entry, Fit
from bnn_pyro.zoo.auto import AUTO, MINUTES, Choice, choose

__all__ = ["backbone_variant", "check_divisible", "fit", "resolve_backbone", "tuned"]


def tuned(entry: str, data: str, method: str | None = None, kind: Any = None) -> tuple[str, Fit]:
    """(name of the method, the settings tuned for this variant, data set and method; empty where there are none).

    method: by default the variant's first.   kind: the variant or its class, where it is not the one in ``ZOO``.

    Raises UserError for an unknown variant or a method that does not suit it.
    """
    if kind is None and entry not in ZOO:
        raise unknown("variant", entry, ZOO)
    kind = kind or ZOO[entry]
    if method is not None and method not in methods_for(kind):
        raise unsuitable(method, entry, kind)
    name = method or methods_for(kind)[0]
    return name, TUNED.get(entry, {}).get(data, {}).get(name, Fit())


def backbone_variant(entry: Entry, schema: Schema) -> str | None:
    """The name of the variant that has to be fitted first, as the backbone of a last layer; None for most."""
    return entry.backbone_variant(schema) if hasattr(entry, "backbone_variant") else None


@joined()
def fit(
    entry: str | Entry | nn.Module,
    data: Dataset | tuple[Any, Any],
    method: str | Method | None = None,
    *,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    device: str = "auto",
    progress: bool = True,
    max_minutes: float | None = None,
    minutes: float = MINUTES,
    auto: Mapping[str, Any] | None = None,
) -> Posterior:
    """The posterior of a variant given the training rows of ``data``.

    entry: a name in ``ZOO`` (with the settings tuned for ``data.name``), a variant with your own settings, or "auto":
        variant, settings and method are chosen by rows, inputs and ``minutes`` (``zoo.auto``); or a module of your
        own, which is ``Bayesian(module)``.
    data: a data set; or (X, y) as ``dataset`` takes them, of which all rows train.
    method: a name in ``METHODS``, or settings such as ``SVI(epochs=200)``; by default the variant's first.
    seed: determines initial weights, order of mini-batches and noise; the caller's generators are left as they were.
    out: a folder for ``checkpoint/`` while training and the posterior's archive after it; the backbone of a last
        layer, where it has to be trained first, is in ``baseline/`` there.
    resume: go on from ``out``'s checkpoint, to the very same result; a finished posterior is just loaded.
    max_minutes: after which a sampler ends with the draws it has, as many of every chain (provenance: "stopped").
    minutes: that a fit of "auto" may take.   auto: for ``posterior.provenance``, of a choice made before.

    Under torchrun, or in a process group of torch.distributed, all processes fit one posterior: each calls this with
    the same arguments, has a share of the rows of every step, and returns it; rank 0 writes. A checkpoint may be
    resumed by any number of processes.

    Raises UserError for bad input, a loss that is not finite, a chain without a draw after ``max_minutes``, or ``out``
    in use by another process, and ``Interrupted`` (a KeyboardInterrupt) on Ctrl-C or SIGTERM where ``out`` was given:
    its checkpoint is then whole.
    """
    if not isinstance(data, Dataset):
        data = _all_training(data)
    if not len(data.x_train):
        raise UserError(f"data set '{data.name}' has no training rows")
    ranks, (entry, method, chosen) = here(), _resolve(entry, data, method, minutes)
    if chosen is not None:
        auto = chosen.tell(progress and ranks.first)
    check_divisible(method, ranks)
    limit = check_timed(method, max_minutes)
    with ranks.agreed():
        entry = resolve_backbone(entry, data)
    if (first := backbone_variant(entry, data.schema)) is not None:
        below = None if out is None else Path(out) / "baseline"
        backbone = fit(first, data, seed=seed, out=below, resume=resume, device=device, progress=progress)
        entry = replace(entry, backbone=backbone)
    provenance = _provenance(entry, method, data, seed) | ({"auto": dict(auto)} if auto else {})
    _check_same(ranks, provenance["key"])
    checkpoint = None if out is None else Checkpoint(Path(out) / "checkpoint", provenance["key"])
    # A checkpoint beside a finished posterior is that of a later run, stopped before it could replace it.
    finished = checkpoint is not None and resume and not checkpoint.exists
    if finished and ranks.first_does((Path(out) / "posterior.json").is_file):
        with ranks.agreed():
            return _finished(out, entry, provenance["key"])
    with nullcontext() if out is None else ranks.first_holds(lock_folder(out)):
        if checkpoint is not None and not resume:
            checkpoint.discard()
        with ranks.agreed():
            where, start = choose_device(device), time.perf_counter()
        label = f"{provenance['entry']} · {provenance['method']} · {data.name}"
        with isolated(seed), ExitStack() as stack:
            model = entry.model(data.schema).to(where)
            inferred, seen = model, data.to(where)
            if isinstance(model, OnFeatures):
                inferred, seen = on_features(model, seen, progress and ranks.first)
            guide = None if (guide := entry.guide(model)) is None else guide.to(where)
            report = forwarded(stack.enter_context(progress_bar(label, progress and ranks.first)))
            how = dict(limit, seed=seed, report=report)
            facts = entry.prepare(inferred, guide, seen) if hasattr(entry, "prepare") else {}
            if checkpoint is not None:
                how["checkpoint"] = stack.enter_context(checkpoint)
            posterior = method.run(inferred, guide, seen, **how)
        provenance = {**posterior.provenance, **provenance, "device": str(where)}
        provenance |= {"module": facts} if facts else {}
        provenance["seconds"] = round(time.perf_counter() - start, 3)
        if ranks.size > 1:
            provenance["processes"] = ranks.size
        whole = posterior.model if inferred is model else model
        rows = _rows(method, data, getattr(entry, "backbone", None))
        posterior = replace(posterior, model=whole, schema=data.schema, provenance=provenance, rows=rows)
        if checkpoint is not None:
            ranks.first_does(lambda: posterior.save(out))
            checkpoint.discard()
        return posterior


def _all_training(data: Any) -> Dataset:
    from bnn_pyro.datasets.in_memory import dataset

    if not isinstance(data, tuple) or len(data) != 2:
        raise UserError(f"a fit takes a data set (bp.load_data, bp.dataset) or (X, y), not a {type(data).__name__}")
    return dataset(*data, split=0.0, validation=0)


def _provenance(entry: Entry, method: Method, data: Dataset, seed: int) -> dict[str, Any]:
    """What the posterior's archive says of its fit; ``key`` is what a fit must have in common to be resumed."""
    incidental = getattr(method, "incidental", ())
    settings_that_count = {k: v for k, v in plain(method).items() if k not in incidental}
    name, method_name, fingerprint = _name(entry, ZOO), _name(method, METHODS), data.fingerprint
    versions = {"python": platform.python_version()}
    versions |= {package: version(package) for package in ("bnn-pyro", "pyro-ppl", "torch", "numpy")}
    return {
        "key": [name, plain(entry), method_name, settings_that_count, seed, fingerprint],
        "entry": name,
        "entry_settings": plain(entry),
        "method": method_name,
        "method_settings": plain(method),
        "seed": seed,
        "data": data.name,
        "source": data.source,
        "split": dict(data.split),
        "fingerprint": fingerprint,
        "rows": {part: len(getattr(data, f"x_{part}")) for part in ("train", "val", "test")},
        "versions": versions,
    }


def _rows(method: Method, data: Dataset, backbone: Any) -> Tensor:
    """Digests of the rows that a fit uses: training rows, validation rows where they stop it, and the backbone's."""
    stops = [row_digests(data.x_val, data.y_val)] if getattr(method, "patience", 0) != 0 else []
    rows = torch.cat([row_digests(data.x_train, data.y_train), *stops])
    below = getattr(backbone, "rows", None)
    return rows if below is None else torch.cat([rows, below[~torch.isin(below, rows)]])


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


def resolve_backbone(entry: Entry, data: Dataset) -> Entry:
    """A last layer whose backbone is in a folder or a file, with that loaded; any other variant as it is.

    Raises UserError where there is none, or where rows that validate or test here may have trained it.
    """
    backbone = getattr(entry, "backbone", None)
    if isinstance(backbone, str) and backbone_variant(entry, data.schema) is None:
        entry = replace(entry, backbone=load(backbone) if Path(backbone).is_dir() else from_text(backbone))
    if (backbone := getattr(entry, "backbone", None)) is not None:
        check_split(getattr(backbone, "description", {}), data)
    return entry


def _finished(folder: str | Path, entry: Entry, key: list) -> Posterior:
    if read_archive(folder)[1]["provenance"].get("key") != key:
        raise UserError(
            f"{folder} holds a finished posterior of other settings, seed or data; choose another folder, "
            "or start again with --overwrite"
        )
    return load(folder, entry)


def _resolve(
    entry: str | Entry | nn.Module, data: Dataset, method: str | Method | None, minutes: float
) -> tuple[Entry, Method, Choice | None]:
    """Settings for both, the tuned ones where a name was given; either may be of the user's own class."""
    entry = Bayesian(entry) if isinstance(entry, nn.Module) else entry
    named, own, choice = isinstance(entry, str), method is not None and not isinstance(method, str), None
    asked = _name(method, METHODS) if own else method
    if named and entry == AUTO:
        how = dict(name=data.name, minutes=minutes, method=asked, given=plain(method) if own else {})
        entry, name, best, _ = choice = choose(data.schema, len(data.x_train), **how)
    elif named and entry not in ZOO:
        raise unknown("variant", entry, [*ZOO, AUTO])
    kind = ZOO[entry] if named else entry  # settings may decide what a variant has
    if choice is None:
        variant, best = entry if named else _name(entry, ZOO), Fit()
        if not own or type(method) in METHODS.values():  # one of the user's own suits any variant
            name, best = tuned(variant, data.name, asked, kind)
    return build(kind, best.entry) if named else entry, method if own else build(METHODS[name], best.method), choice


def _name(settings: object, table: dict[str, type]) -> str:
    """The name of a variant or method in its table; the class's own name where it is the user's."""
    return next((name for name, kind in table.items() if type(settings) is kind), type(settings).__name__)
