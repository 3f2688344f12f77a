"""Training: build the variant, isolate, infer, keep a checkpoint."""

import math
import platform
import time
import warnings
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyro.poutine as poutine
import torch
from torch import Tensor, nn

from bnn_pyro.checkpoint import AGAIN, LAYERS, TAILS, Checkpoint, same_fit
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.datasets.rows import is_large, row_digests
from bnn_pyro.distributed import SharedError, choose_device, joined_processes, process_group
from bnn_pyro.errors import UserError, refusing
from bnn_pyro.features import check_split, of_frozen_layers, on_features
from bnn_pyro.files import lock_folder
from bnn_pyro.inference import METHODS, Method
from bnn_pyro.inference.cost import LARGE
from bnn_pyro.inference.early_stopping import chosen_settings
from bnn_pyro.inference.log_joint import check_sites
from bnn_pyro.isolation import isolated
from bnn_pyro.loading import Start, load
from bnn_pyro.parts.backbone import from_text
from bnn_pyro.parts.guides import PointMass
from bnn_pyro.parts.nets import blank_row, in_mode
from bnn_pyro.parts.priors import widest_activation
from bnn_pyro.posterior import Posterior, read_archive, split_frozen, weight_space
from bnn_pyro.progress import announce, forwarded, progress_bar
from bnn_pyro.zoo import ZOO, Entry, model_of
from bnn_pyro.zoo.auto import Setup, limit_of, make_setup, say, set_up

#: The entries of a provenance's ``key``; the last one is optional.
KEY = ("variant", "its settings or first weights", "method", "the method's settings", "seed", "training rows", "start")


@joined_processes()
def fit(
    entry: str | Entry | nn.Module | Setup, data: Dataset | tuple[Any, Any], method: str | Method | None = None, *,
    seed: int = 0, out: str | Path | None = None, resume: bool = False, device: str = "auto", progress: bool = True,
    max_minutes: float | None = None, minutes: float | None = None, start: Posterior | None = None,
) -> Posterior:  # fmt: skip
    """The posterior of a variant given the training rows of ``data``.

    entry: a name in ``ZOO`` (with default settings), a variant with settings, a module (``Bayesian(module)``), "auto"
        (variant, settings and method chosen by rows, inputs and ``minutes``), or a ``Setup`` of ``zoo.auto.set_up``.
    data: a data set; or (X, y) as for ``dataset``, where all rows are training rows.
    method: a name in ``METHODS``, or settings such as ``SVI(epochs=200)``; by default the variant's first.
    seed: determines initial weights, order of mini-batches and noise; the caller's generators do not change.
    out: a folder for ``checkpoint/`` during training and the posterior's archive after it; if the backbone of a last
        layer has to be trained first, it is written to ``baseline/`` in this folder.
    resume: continue from the checkpoint in ``out``, with exactly the same result; a finished posterior is loaded.
    max_minutes: time after which a fit ends with the draws or weights that it has by then (provenance: "stopped").
    minutes: time for which "auto" chooses, by default 5; if given, also a limit once chains have a fifth of the draws.
    start: an earlier posterior, such as of fewer rows, at whose q (svi) or weights (map, mle, mc-dropout, ensemble) the
        optimisation starts. It is not used as a prior: the result is the posterior given ``data`` alone.

    Under torchrun, or in a process group of torch.distributed, all processes fit one posterior: each calls this with
    the same arguments, has a share of the rows of every step, and returns it; rank 0 writes. Any number may resume.
    Raises UserError for bad input, a loss that is not finite, a chain without a draw after ``max_minutes``, or ``out``
    in use by another fit; ``Interrupted`` (a KeyboardInterrupt) after writing a checkpoint on Ctrl-C or SIGTERM.
    """
    if not isinstance(data, Dataset):
        from bnn_pyro.datasets.in_memory import dataset

        if not isinstance(data, tuple) or len(data) != 2:
            raise UserError(f"a fit takes a data set (bp.load_data, bp.dataset) or (X, y), not a {type(data).__name__}")
        data = dataset(*data, split=0.0, validation=0)
    before = getattr(start, "schema", data.schema)
    if before.input_shape == data.schema.input_shape:  # the network is to be that of the start
        data = replace(data, schema=replace(data.schema, x_tails=before.x_tails))
    setup = entry if isinstance(entry, Setup) else set_up(entry, method, lambda: data, minutes=minutes)
    if setup.auto and progress and process_group().is_rank0:
        say(setup)
    setup = check_setup(setup, data, max_minutes)
    options = dict(seed=seed, resume=resume, device=device, progress=progress)
    if (first := setup.backbone_variant(data.schema)) is not None:
        backbone = fit_setup(make_setup(first), data, out=None if out is None else Path(out) / "baseline", **options)
        setup = replace(setup, entry=replace(setup.entry, backbone=backbone))
    if start is not None:
        options["start"] = Start.of(setup, start, data.schema)
    return fit_setup(setup, data, out=out, max_minutes=max_minutes, **options)


def prior(entry: str | Entry | nn.Module, data: Dataset, *, num_draws: int = 500, seed: int = 0) -> Posterior:
    """``num_draws`` independent draws from a variant's prior, as a posterior for ``predict`` and the plots.

    entry: as in :func:`fit`.   data: may have no rows; a frozen backbone and batch normalisation use rows, if any.
    Raises UserError for a prior that cannot be sampled, and for a last layer without a trained backbone.
    """
    setup = set_up(entry, None, lambda: data)
    if setup.backbone_variant(data.schema) is not None:
        raise UserError(f"the prior of {setup.variant} is that of its last layer: give a trained network as backbone")
    with isolated(seed):
        setup = check_setup(setup, data) if len(data.x_train) else setup
        model = setup.entry.model(data.schema)
        if len(data.x_train):
            inferred, features = on_features(model, data, False)
            if hasattr(setup.entry, "prepare"):
                setup.entry.prepare(inferred, setup.entry.guide(model), features)
        chains = prior_draws(weight_space(model), blank_row(model, data.schema), num_draws)
    about = provenance_of(setup, data, seed) | {"method": "prior", "method_settings": {}, "stored_draws": num_draws}
    del about["key"]  # so that no fit is resumed from it
    return Posterior(model, data.schema, chains={site: w[None] for site, w in chains.items()}, provenance=about)


def prior_draws(model: nn.Module, x: Tensor, num: int) -> dict[str, Tensor]:
    """Draws {site: (num, *shape)} of the prior, at x (1, *input_shape). Raises UserError for an improper prior."""
    way = "take another, such as fan-in:1"
    if points := getattr(model, "points", ()):
        way = f"points that are trained, such as '{points[0]}', have no prior: frozen='*' lets them stay"
    message = f"the prior is improper and has no samples; {way}"
    with refusing(message, NotImplementedError), torch.no_grad(), in_mode(model, training=False):
        head, x = split_frozen(model, x)
        traces = [poutine.trace(head).get_trace(x).nodes for _ in range(num)]
    return {site: torch.stack([nodes[site]["value"] for nodes in traces]) for site in model.initial}


def check_setup(setup: Setup, data: Dataset, max_minutes: float | None = None) -> Setup:
    """Check a setup before anything is fitted or written, and load its backbone from a folder or a file.

    Raises UserError if there are no training rows, the method does not support a time limit or several processes, the
    backbone does not exist, or its training may have used validation or test rows of ``data``.
    """
    make_setup(setup.entry, setup.method)  # raises if the settings of the entry do not suit the method
    users_net = setup.variant == "my-network" or getattr(setup.entry, "backbone", None) is not None
    users_net = users_net and not setup.backbone_variant(data.schema)  # not a network of this package
    if not users_net and (codes := [part.name for part in data.schema.input_parts if part.is_whole]):
        warnings.warn(f"whole numbers in '{codes[0]}' stay as they are, for an nn.Embedding of a network of your own; "
                      f"{setup.variant} takes them for quantities: give X.astype(float)", stacklevel=2)  # fmt: skip
    if not len(data.x_train):
        raise UserError(f"data set '{data.name}' has no training rows; for draws from the prior see bp.prior")
    if max_minutes is not None and not 0 < max_minutes < math.inf:
        raise UserError(f"max_minutes must be a number above 0, got {max_minutes}")
    if max_minutes is not None and not getattr(setup.method, "timed", False):
        raise UserError(f"max_minutes is for methods that can end early ({_methods('timed')}); take fewer epochs")
    if process_group().size > 1 and not getattr(setup.method, "divisible", False):
        raise SharedError(f"{setup.inference} does not divide one fit among processes, as {_methods('divisible')} do; "
                              "start it without torchrun")  # fmt: skip
    with process_group().sharing_errors():
        entry, backbone = setup.entry, getattr(setup.entry, "backbone", None)
        _takes_all_rows(setup, data)
        if isinstance(backbone, str) and setup.backbone_variant(data.schema) is None:
            entry = replace(entry, backbone=load(backbone) if Path(backbone).is_dir() else from_text(backbone))
        if (backbone := getattr(entry, "backbone", None)) is not None:
            check_split(getattr(backbone, "description", {}), data)
    return replace(setup, entry=entry)


def fit_setup(
    setup: Setup, data: Dataset, *, seed: int = 0, out: str | Path | None = None, resume: bool = False,
    device: str = "auto", progress: bool = True, max_minutes: float | None = None, start: Start | None = None,
) -> Posterior:  # fmt: skip
    """Fit a setup that :func:`check_setup` returned; see :func:`fit`.   start: a ``loading.Start``."""
    if resume and out is None:
        raise UserError("resume=True goes on with the fit in a folder: give out=, as it had")
    ranks, entry = process_group(), setup.entry
    show = progress and ranks.is_rank0
    if _takes_all_rows(setup, data):
        data = replace(data, x_train=data.x_train[:], x_val=data.x_val[:])
    provenance = provenance_of(setup, data, seed)
    if start is not None:
        provenance["start"], provenance["key"] = start.facts, [*provenance["key"], start.facts["digest"]]
    checkpoint = None if out is None else Checkpoint(Path(out) / "checkpoint", provenance["key"])
    ranks.check_same(dict(zip(KEY, provenance["key"], strict=False)))
    # A checkpoint next to a finished posterior belongs to a later run that was stopped.
    finished = checkpoint is not None and resume and not checkpoint.exists
    if finished and ranks.on_rank0((Path(out) / "posterior.json").is_file):
        with ranks.sharing_errors():
            if not same_fit((about := read_archive(out)[1]["provenance"]).get("key"), provenance["key"], TAILS):
                raise UserError(f"{out} holds a finished posterior of other settings, seed or data, or of another "
                                f"module; choose another folder, or {AGAIN}")  # fmt: skip
            if ended := about.get("stopped"):
                more = f"; for a longer fit {AGAIN}" * ("limit" in ended)
                announce(f"{out}: {ended}, and finished there{more}", show)
            return load(out, replace(entry, **about.get("by_held_out_rows", {})))
    if options := getattr(entry, "to_choose", lambda schema: ())(data.schema):
        max_minutes = None if max_minutes is None else max_minutes / (len(options) + 1)
        how = dict(seed=seed, device=device, progress=progress, max_minutes=max_minutes, start=start)
        tried = lambda one, apart: fit_setup(setup.changed(one), apart, **how)  # noqa: E731
        if chosen := chosen_settings(options, data, seed, tried, show):
            setup, provenance["by_held_out_rows"] = setup.changed(chosen), chosen
            entry, provenance["entry_settings"] = setup.entry, setup.variant_settings
    with ExitStack() as lock:
        with ranks.sharing_errors():
            where, began = choose_device(device), time.perf_counter()
            if checkpoint is not None and ranks.is_rank0:
                lock.enter_context(lock_folder(out))
        if checkpoint is not None and not resume:
            checkpoint.discard()
        label = f"{provenance['entry']} · {provenance['method']} · {data.name}"
        with torch.inference_mode(False), isolated(seed), ExitStack() as stack:  # enables gradients
            model = model_of(entry, data.schema)
            if device == "auto" and hasattr(setup.method, "compiled") and getattr(entry, "backbone", None) is None:
                work = len(data.x_train) * sum(value.numel() for value in model.initial.values())
                where = torch.device("cpu") if work <= LARGE else where  # compiled gradients are for CPUs
            model = model.to(where)
            inferred, features = on_features(model, data.to(where), show)
            guide = None if (guide := entry.guide(model)) is None else guide.to(where)
            if type(entry) not in ZOO.values():
                point = getattr(setup.method, "starts_at", "") == "point"
                q = guide if "guide" in setup.method.needs else PointMass(inferred.initial) if point else None
                check_sites(inferred, q, features.x_train[:2], features.y_train[:2])
            report = forwarded(stack.enter_context(progress_bar(label, show)))
            options = dict(limit_of(setup, max_minutes), seed=int(seed), report=report)
            facts = entry.prepare(inferred, guide, features) if hasattr(entry, "prepare") else {}
            if getattr(model, "statistics", None) is not None and "proper prior" in setup.method.needs:
                announce(f"a gradient of {setup.inference} normalises by {len(model.statistics.rows):,} training rows; "
                         "a trained network with batch_norm='frozen' takes a fraction of the time", show)  # fmt: skip
            widest_activation(weight_space(inferred), features.x_train[:1])  # raises for an unsupported likelihood
            options |= {} if start is None else start.put(inferred, guide)
            if checkpoint is not None:
                options["checkpoint"] = stack.enter_context(checkpoint)
            if getattr(inferred, "still", ()) and getattr(setup.method, "augment", None) is None:
                inferred, features = of_frozen_layers(inferred, features, show)
            posterior = setup.method.run(inferred, guide, features, **options)
        provenance = {**posterior.provenance, **provenance, "device": str(where)} | ({"module": facts} if facts else {})
        provenance["seconds"] = round(time.perf_counter() - began, 3)
        if posterior.chains is not None:
            chains, draws = next(iter(posterior.chains.values())).shape[:2]
            provenance |= {"stored_chains": chains, "stored_draws": chains * draws}
        provenance |= {"processes": ranks.size} if ranks.size > 1 else {}
        full_model = posterior.model if inferred is model else model
        validated = {"early_stopping", "by_held_out_rows"} & provenance.keys() or getattr(setup.method, "patience", 0)
        rows = _rows(bool(validated), data, getattr(entry, "backbone", None), start and start.posterior)
        posterior = replace(posterior, model=full_model, schema=data.schema, provenance=provenance, rows=rows)
        if checkpoint is not None:
            ranks.on_rank0(lambda: posterior.save(out))
            checkpoint.discard()
        return posterior


def _takes_all_rows(setup: Setup, data: Dataset) -> bool:
    """Whether training rows in a file must be read into memory. Raises UserError if they are too large for it."""
    num, size = len(data.x_train), getattr(setup.method, "batch_size", 0)
    fixed = getattr(setup.entry, "backbone", None) is not None or setup.backbone_variant(data.schema) is not None
    streams = getattr(setup.method, "streams", False) and not fixed and (size is None or 0 < size < num)
    if isinstance(data.x_train, Tensor) or streams:
        return False
    if is_large(data.x_train.shape):
        need = 4 * math.prod(data.x_train.shape) / 2**30
        user = "a backbone" if fixed else "batch_size=0" if getattr(setup.method, "streams", False) else setup.inference
        raise UserError(f"{user} takes all {num:,} training rows at once, {need:.3g} GiB of memory; take mini-batches "
                        f"(batch_size) of {_methods('streams')}, or set BNN_PYRO_MEMORY={math.ceil(need)} if the "
                        "machine has that much")  # fmt: skip
    return True


def provenance_of(setup: Setup, data: Dataset, seed: int) -> dict[str, Any]:
    """Facts about a fit for the posterior's archive; a fit can be resumed with the same ``key`` only."""
    incidental, former = getattr(setup.method, "incidental", ()), getattr(setup.method, "former", {})
    entry_settings, method_settings = setup.variant_settings, setup.inference_settings
    settings_that_count = {k: v for k, v in (method_settings | former).items() if k not in incidental}
    as_before = () if data.schema.is_image else getattr(setup.entry, "former_of_images", ())
    entry_that_counts = {k: v for k, v in entry_settings.items() if v is not None or k not in as_before}
    entry_that_counts |= {LAYERS: known_by(data.schema)} if (known_by := getattr(setup.entry, "known_by", None)) else {}
    tails = getattr(setup.entry, "tails", lambda _: ())(data.schema)
    entry_that_counts |= {TAILS: [*map(list, tails)]} if tails else {}
    more = {"asinh_beside": data.schema.tail_names} if tails else {}
    more |= {"auto": dict(setup.auto)} if setup.auto else {}
    versions, fingerprint = {"python": platform.python_version()}, data.fingerprint
    versions |= {package: version(package) for package in ("bnn-pyro", "pyro-ppl", "torch", "numpy")}
    return {
        "key": [setup.variant, entry_that_counts, setup.inference, settings_that_count, int(seed), fingerprint],
        **dict(entry=setup.variant, entry_settings=entry_settings),
        **dict(method=setup.inference, method_settings=method_settings, seed=int(seed)),
        **dict(data=data.name, source=data.source, split=dict(data.split), fingerprint=fingerprint),
        "rows": {part: len(getattr(data, f"x_{part}")) for part in ("train", "val", "test")},
        **dict(versions=versions, **more),
    }


def _rows(stops: bool, data: Dataset, *others: Any) -> Tensor:
    """Digests of the training rows, of validation rows if these stop the fit, and of the rows of backbone and start."""
    held_out = [row_digests(data.x_val, data.y_val)] if stops else []
    rows = torch.cat([row_digests(data.x_train, data.y_train), *held_out])
    for more in (getattr(other, "rows", None) for other in others):
        rows = rows if more is None else torch.cat([rows, more[~torch.isin(more, rows)]])
    return rows


def _methods(capability: str) -> str:
    return ", ".join(name for name, kind in METHODS.items() if getattr(kind, capability, False))
