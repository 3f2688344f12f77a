"""The one door to training: build the variant, isolate, infer, keep a checkpoint; and the way back from disk."""

from __future__ import annotations

import platform
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch

from bnn_pyro.checkpoint import Checkpoint
from bnn_pyro.datasets.dataset import Dataset, Schema
from bnn_pyro.errors import UserError, unknown
from bnn_pyro.inference import METHODS, Method
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.pruned import PrunedGuide, weight_sites
from bnn_pyro.posterior import Posterior, read_archive, weight_space
from bnn_pyro.progress import progress_bar
from bnn_pyro.settings import build, plain
from bnn_pyro.zoo import ZOO, Entry, Fit

__all__ = ["choose_device", "fit", "load", "tuned"]


def tuned(entry: str, data: str, method: str | None = None) -> tuple[str, Fit]:
    """(name of the method, the settings tuned for this variant, data set and method; empty where there are none).

    Raises UserError for an unknown variant or a method that does not suit it.
    """
    if entry not in ZOO:
        raise unknown("variant", entry, ZOO)
    kind = ZOO[entry]
    if method is None:
        method = kind.methods[0]
    elif method not in kind.methods:
        raise unknown(f"inference method for {entry}", method, kind.methods)
    return method, kind.fits.get(data, {}).get(method, Fit())


def choose_device(name: str) -> torch.device:
    """ "auto", "cpu" or "cuda" -> a device; UserError where CUDA is asked for and absent."""
    if name not in ("auto", "cpu", "cuda"):
        raise unknown("device", name, ("auto", "cpu", "cuda"))
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device 'cuda' was asked for, but this machine has none that torch can use; take --device cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


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
    out: a folder for ``checkpoint/`` while training and the posterior's archive after it.
    resume: go on from ``out``'s checkpoint, to the very same result; a finished posterior is just loaded.

    Raises UserError for bad input or a loss that is not finite, and ``Interrupted`` (a KeyboardInterrupt) on Ctrl-C
    or SIGTERM where ``out`` was given: its checkpoint is then whole.
    """
    entry, method = _resolve(entry, data, method)
    name = _name(entry, ZOO)
    key = [name, plain(entry), _name(method, METHODS), plain(method), seed, data.fingerprint]
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
        "fingerprint": data.fingerprint,
        "rows": {part: len(getattr(data, f"x_{part}")) for part in ("train", "val", "test")},
        "versions": {
            "python": platform.python_version(),
            **{p: version(p) for p in ("bnn-pyro", "pyro-ppl", "torch", "numpy")},
        },
    }
    if not len(data.x_train):
        raise UserError(f"data set '{data.name}' has no training rows")
    checkpoint = None if out is None else Checkpoint(Path(out) / "checkpoint", key)
    # A checkpoint beside a finished posterior is that of a later run, stopped before it could replace it.
    if checkpoint is not None and resume and not checkpoint.exists and (Path(out) / "posterior.json").is_file():
        return _finished(out, entry, key)
    if checkpoint is not None and not resume:
        checkpoint.discard()
    where = choose_device(device)
    on_device = data.to(where)
    start = time.perf_counter()
    with isolated(seed), progress_bar(f"{name} · {provenance['method']} · {data.name}", progress) as report:
        model = entry.model(data.schema).to(where)
        guide = entry.guide(model)
        guide = guide if guide is None else guide.to(where)
        settings = dict(seed=seed, report=report)
        if checkpoint is None:
            posterior = method.run(model, guide, on_device, **settings)
        else:
            with checkpoint:
                posterior = method.run(model, guide, on_device, checkpoint=checkpoint, **settings)
    provenance |= {"seconds": round(time.perf_counter() - start, 3), "device": str(where)}
    posterior = replace(posterior, provenance=provenance)
    if checkpoint is not None:
        posterior.save(out)
        checkpoint.discard()
    return posterior


def load(folder: str | Path, entry: Entry | None = None) -> Posterior:
    """A posterior saved by :func:`fit` or ``posterior.save``; executes nothing from the files.

    entry: needed only for a variant of your own that is not in ``ZOO``, with the settings that it was fitted with.

    Raises UserError where the archive is absent, damaged, or of a variant that this version does not know.
    """
    tensors, meta = read_archive(folder)
    provenance = meta["provenance"]
    if entry is None:
        if provenance.get("entry") not in ZOO:
            raise unknown(f"variant in {folder}", provenance.get("entry"), ZOO)
        entry = build(ZOO[provenance["entry"]], provenance["entry_settings"])
    schema = Schema.from_dict(meta["schema"])
    with isolated(0):
        model = entry.model(schema)
        guide = None if tensors["guide"] is None else weight_space(entry.guide(model))
        model = weight_space(model)
    if guide is not None and "pruned" in provenance:
        masks = {site: torch.ones_like(model.initial[site], dtype=torch.bool) for site in weight_sites(model)}
        guide = PrunedGuide(guide, masks)
    chains = tensors["chains"]
    try:
        if guide is not None:
            guide.load_state_dict(tensors["guide"])
        elif {k: v.shape[2:] for k, v in chains.items()} != {k: v.shape for k, v in model.initial.items()}:
            raise RuntimeError
    except RuntimeError:
        raise UserError(f"the posterior in {folder} does not fit its own settings; train again") from None
    return Posterior(model, schema, guide, chains, tensors["stats"], meta["trace"], provenance)


def _finished(folder: str | Path, entry: Entry, key: list) -> Posterior:
    """The finished posterior in ``folder``, if it is the one asked for."""
    posterior = load(folder, entry)
    if posterior.provenance.get("key") != key:
        raise UserError(
            f"{folder} holds a finished posterior of other settings, seed or data; choose another folder, "
            "or start again with --overwrite"
        )
    return posterior


def _resolve(entry: str | Entry, data: Dataset, method: str | Method | None) -> tuple[Entry, Method]:
    """Settings for both, the tuned ones where a name was given; either may be of the user's own class."""
    if isinstance(entry, str) and entry not in ZOO:
        raise unknown("variant", entry, ZOO)
    kind = ZOO[entry] if isinstance(entry, str) else type(entry)
    given = method is not None and not isinstance(method, str)
    name = _name(method, METHODS) if given else method or kind.methods[0]
    if name not in kind.methods and not (given and name not in METHODS):
        raise unknown(f"inference method for {kind.__name__}", name, kind.methods)
    best = kind.fits.get(data.name, {}).get(name, Fit())
    return (
        build(kind, best.entry) if isinstance(entry, str) else entry,
        method if given else build(METHODS[name], best.method),
    )


def _name(settings: object, table: dict[str, type]) -> str:
    """The name of a variant or method in its table; the class's own name where it is the user's."""
    return next((name for name, kind in table.items() if type(settings) is kind), type(settings).__name__)
