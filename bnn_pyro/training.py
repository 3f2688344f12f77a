"""The one door to training: build the variant, isolate, infer, keep a checkpoint; and the way back from disk."""

from __future__ import annotations

import json
import platform
import time
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bnn_pyro.checkpoint import Checkpoint, Claim
from bnn_pyro.datasets.dataset import Dataset, Schema
from bnn_pyro.errors import UserError, unknown
from bnn_pyro.features import check_split, on_features
from bnn_pyro.inference import METHODS, Method
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.backbone import spoken
from bnn_pyro.parts.joint import parse_family
from bnn_pyro.parts.pretrained import from_text
from bnn_pyro.parts.pruned import PrunedGuide, weight_sites
from bnn_pyro.posterior import Posterior, read_archive, weight_space
from bnn_pyro.progress import progress_bar
from bnn_pyro.settings import build, plain
from bnn_pyro.zoo import ZOO, Entry, Fit

__all__ = ["at_hand", "choose_device", "fit", "load", "tuned"]


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
    out: a folder for ``checkpoint/`` while training and the posterior's archive after it; the network that a last
        layer stands on, where it has to be trained first, is in ``baseline/`` there.
    resume: go on from ``out``'s checkpoint, to the very same result; a finished posterior is just loaded.

    Raises UserError for bad input, a loss that is not finite, or ``out`` in use by another process, and
    ``Interrupted`` (a KeyboardInterrupt) on Ctrl-C or SIGTERM where ``out`` was given: its checkpoint is then whole.
    """
    entry, method = _resolve(entry, data, method)
    if not len(data.x_train):
        raise UserError(f"data set '{data.name}' has no training rows")
    entry = at_hand(entry, data)
    stands_on = entry.foundation(data.schema) if hasattr(entry, "foundation") else None
    if stands_on is not None:
        below = None if out is None else Path(out) / "baseline"
        how = dict(seed=seed, out=below, resume=resume, device=device, progress=progress)
        entry = entry.on(fit(stands_on, data, **how))
    name = _name(entry, ZOO)
    incidental = getattr(method, "incidental", ())
    settings_that_count = {k: v for k, v in plain(method).items() if k not in incidental}
    key = [name, plain(entry), _name(method, METHODS), settings_that_count, seed, data.fingerprint]
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
    checkpoint = None if out is None else Checkpoint(Path(out) / "checkpoint", key)
    # A checkpoint beside a finished posterior is that of a later run, stopped before it could replace it.
    if checkpoint is not None and resume and not checkpoint.exists and (Path(out) / "posterior.json").is_file():
        return _finished(out, entry, key)
    with nullcontext() if out is None else Claim(out):
        if checkpoint is not None and not resume:
            checkpoint.discard()
        where = choose_device(device)
        on_device = data.to(where)
        start = time.perf_counter()
        label = f"{name} · {provenance['method']} · {data.name}"
        with isolated(seed), ExitStack() as bars:
            model = entry.model(data.schema).to(where)
            inferred, seen = on_features(model, on_device, progress)
            guide = entry.guide(model)
            report = bars.enter_context(progress_bar(label, progress))
            guide = guide if guide is None else guide.to(where)
            settings = dict(seed=seed, report=report)
            if checkpoint is None:
                posterior = method.run(inferred, guide, seen, **settings)
            else:
                with checkpoint:
                    posterior = method.run(inferred, guide, seen, checkpoint=checkpoint, **settings)
        provenance |= {"seconds": round(time.perf_counter() - start, 3), "device": str(where)}
        whole = posterior.model if inferred is model else model
        provenance = {**posterior.provenance, **provenance}
        posterior = replace(posterior, model=whole, schema=data.schema, provenance=provenance)
        if checkpoint is not None:
            posterior.save(out)
            checkpoint.discard()
        return posterior


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


def load(folder: str | Path, entry: Entry | None = None) -> Posterior:
    """A posterior saved by :func:`fit` or ``posterior.save``; executes nothing from the files.

    entry: needed only for a variant of your own that is not in ``ZOO``, with the settings that it was fitted with.

    Raises UserError where the archive is absent, damaged, of a variant that this version does not know, or of other
    settings than those of ``entry``.
    """
    tensors, meta = read_archive(folder)
    try:
        return _restored(folder, entry, tensors, meta)
    except UserError:
        raise
    except Exception as error:
        if entry is not None:  # it may be the user's own code
            raise
        raise UserError(f"the posterior in {folder} does not fit its own settings; train again") from error


def _restored(folder: str | Path, entry: Entry | None, tensors: dict[str, Any], meta: dict[str, Any]) -> Posterior:
    """The posterior that an archive describes."""
    provenance = meta["provenance"]
    if entry is None:
        if provenance.get("entry") not in ZOO:
            raise unknown(f"variant in {folder}", provenance.get("entry"), ZOO)
        entry = build(ZOO[provenance["entry"]], provenance["entry_settings"])
    else:
        _same_settings(folder, json.loads(json.dumps(plain(entry))), provenance.get("entry_settings", {}))
    schema = Schema.from_dict(meta["schema"])
    with isolated(0):
        model = entry.model(schema)
        guide = None if tensors["guide"] is None else _guide(entry, model, provenance)
        model = weight_space(model)
    if tensors.get("backbone") is not None:
        _fill_backbone(model.backbone, tensors["backbone"], folder)
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


def _same_settings(folder: str | Path, given: dict[str, Any], saved: dict[str, Any]) -> None:
    """Refuse a variant with settings other than those that the posterior was fitted with."""
    for name in given:
        if name in saved and given[name] != saved[name]:
            here, there = (spoken(v) if isinstance(v, dict) else v for v in (given[name], saved[name]))
            raise UserError(
                f"the posterior in {folder} was fitted with {name} {there}, and the variant given has {here}"
                + (" (its weights or layers differ)" if here == there else "")
            )


def _guide(entry: Entry, model: nn.Module, provenance: dict[str, Any]) -> nn.Module:
    """q as it was before training: the variant's own, or one of the family that its method makes by itself."""
    family = getattr(METHODS.get(provenance.get("method")), "family", None)
    return weight_space(entry.guide(model)) if family is None else parse_family(family)(model.initial, 1.0)


def _fill_backbone(backbone: nn.Module, state: dict[str, torch.Tensor], folder: str | Path) -> None:
    """Put the archive's weights into the network, or, where that is the user's own, see that they are the same."""
    own = backbone.description["kind"] in ("module", "file")
    here = backbone.state_dict()
    try:
        if own and any(not torch.equal(here[k].cpu(), v) for k, v in state.items() if k != "scale"):
            raise RuntimeError
        backbone.load_state_dict(state)
    except (RuntimeError, KeyError):
        raise UserError(
            f"the posterior in {folder} stands on another backbone than the one given ({spoken(backbone.description)})"
        ) from None


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
