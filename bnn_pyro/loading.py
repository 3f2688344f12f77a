"""Load a saved posterior (tensors and JSON), and use a posterior as the start, not the prior, of another fit."""

import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.fx import GraphModule

from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.errors import UserError, refusing, unknown
from bnn_pyro.inference import METHODS
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.backbone import in_words
from bnn_pyro.parts.correlated_normal import parse_family
from bnn_pyro.parts.guides import PrunedGuide, weight_sites
from bnn_pyro.parts.nets import layers_digest
from bnn_pyro.parts.own_module import select
from bnn_pyro.posterior import Posterior, model_buffers, read_archive, weight_space
from bnn_pyro.settings import build, plain
from bnn_pyro.zoo import ZOO, Bayesian, Entry


def load(folder: str | Path, entry: Entry | None = None, *, module: Any = None) -> Posterior:
    """Load a posterior saved by :func:`fit` or ``posterior.save``; no code from the files is executed.

    entry: needed only for a variant of your own that is not in ``ZOO``, with the settings that it was fitted with, and
        for a last layer on a module of your own, which gets the inputs (standardised or raw) that it had in the fit.
    module: needed only for ``Bayesian``: a module with the same layers, a function that returns it, or
        "package.module:name".
    Raises UserError if the archive is absent, damaged, of an unknown variant, or of other settings than ``entry``'s.
    """
    tensors, meta = read_archive(folder)
    entry = entry() if isinstance(entry, type) else entry
    if entry is not None and not hasattr(entry, "model"):
        raise UserError(f"entry is a variant, such as bp.MeanField(), not {entry!r:.40}; leave it out for one of the "
                        "zoo, and give a torch.nn.Module as module=")  # fmt: skip
    try:
        return _restored(folder, entry, module, tensors, meta)
    except Exception as error:
        if entry is not None or module is not None or isinstance(error, UserError):  # an error of the user's own code
            raise
        raise UserError(f"the posterior in {folder} does not fit its own settings; train again") from error


def _restored(
    folder: str | Path, entry: Entry | None, module: Any, tensors: dict[str, Any], meta: dict[str, Any]
) -> Posterior:
    provenance = meta["provenance"]
    if module is not None or (entry is None and "module" in provenance):
        entry = _with_module(folder, module, provenance)
    elif entry is None:
        if (name := provenance.get("entry")) not in ZOO:
            raise UserError(f"{unknown(f'variant in {folder}', name, ZOO)}; one of your own: load(folder, variant)")
        kind = ZOO[name]
        former = getattr(kind, "former_of_images", {}) if Schema.from_dict(meta["schema"]).is_image else {}
        entry = build(kind, former | provenance["entry_settings"])
    else:
        saved = {k: v for k, v in provenance.get("entry_settings", {}).items() if k != "module"}
        backbone, then = getattr(entry, "backbone", None), saved.get("backbone")
        kind = getattr(backbone, "description", {}).get("kind")
        if isinstance(then, dict) and kind == then.get("kind") == "module":  # archives of earlier versions: raw inputs
            entry = replace(entry, backbone=backbone.taking(then.get("inputs", "raw")))
        for name, value in json.loads(json.dumps(plain(entry))).items():
            if value != saved.get(name, value):
                now, then = (in_words(v) if isinstance(v, dict) else v for v in (value, saved[name]))
                raise UserError(f"the posterior in {folder} was fitted with {name} {then}, and the variant given has "
                                f"{now}{' (its weights or layers differ)' * (now == then)}")  # fmt: skip
    schema = Schema.from_dict(meta["schema"])
    with isolated(0):
        if "module" in provenance:  # frozen parameters are those of the archive, not those of ``requires_grad``
            sites, buffers, net = provenance["module"]["parameters"], tensors.get("buffers", {}), entry.own(schema)
            for name, p in net.named_parameters():
                p.requires_grad_(name in sites or (p.requires_grad and f"net.{name}" not in buffers))
            theirs = provenance["module"].get("constants", {})
            for path, part in net.named_modules():  # earlier versions drew padding rows like all others
                if hasattr(part, "padding_row") and f"{path}.padding_row".lstrip(".") not in theirs:
                    part.padding_row = None
            entry = replace(entry, module=net)
            names = select(net, entry.frozen, "frozen") if entry.frozen not in ("", "*") else []
            if sites.keys() & names:  # earlier versions did not freeze these
                entry = replace(entry, frozen="|".join(name for name in names if name not in sites))
        model = entry.model(schema)
        if "module" in provenance:
            shapes = {name: list(p.shape) for name, p in model.net.named_parameters()}
            if mismatch := _differences(shapes, provenance["module"]["parameters"]):
                raise UserError(f"the module has not the parameters of the posterior in {folder}: {mismatch}")
            for site in provenance["module"].get("sampled_as_weights", ()):
                model.sampling.pop(site, None)
            settings, now = provenance["entry_settings"].get("module"), layers_digest(model.net)
            earlier = settings.get("layers", now) if isinstance(settings, dict) else now  # unknown for a function
            exported = {isinstance(model.net, GraphModule), provenance["module"]["class"] == "GraphModule"}
            if provenance["module"].get("layers", earlier) != now and exported == {False}:
                warnings.warn(f"the module prints other layers than that of the posterior in {folder}: the same "
                              "parameters in another network predict otherwise", stacklevel=4)  # fmt: skip
            if others := [name for name, digest in theirs.items() if model.constants.get(name, digest) != digest]:
                warnings.warn(
                    f"'{others[0]}' of the module, which no archive holds, is not that of {folder}, and "
                    "predictions are others: make it as it was, or a buffer, and fit again",
                    stacklevel=4,
                )
        guide, family = None, getattr(METHODS.get(provenance.get("method")), "family", None)
        if tensors["guide"] is not None:  # an untrained guide, from the variant or from the method's own family
            guide = weight_space(entry.guide(model)) if family is None else parse_family(family)(model.initial, 1.0)
        model = weight_space(model)
    if guide is not None and "pruned" in provenance:
        masks = {site: torch.ones_like(model.initial[site], dtype=torch.bool) for site in weight_sites(model)}
        guide = PrunedGuide(guide, masks)
    chains = tensors["chains"]
    with refusing(f"the posterior in {folder} does not fit its own settings; train again", RuntimeError):
        if tensors.get("backbone") is not None:
            model.backbone.load_state_dict(tensors["backbone"])
        if guide is not None:
            guide.load_state_dict(tensors["guide"])
        elif {k: v.shape[2:] for k, v in chains.items()} != {k: v.shape for k, v in model.initial.items()}:
            raise RuntimeError
        if "buffers" in tensors:  # archives of earlier versions have none
            if tensors["buffers"].keys() != model_buffers(model).keys():
                raise RuntimeError
            model.load_state_dict(tensors["buffers"], strict=False)
    return Posterior(model, schema, guide, chains, tensors["stats"], meta["trace"], provenance, tensors.get("rows"))


def _with_module(folder: str | Path, module: Any, provenance: dict[str, Any]) -> Entry:
    if "module" not in provenance:
        raise UserError(f"the posterior in {folder} is not of a module of your own; leave 'module' out")
    saved = provenance["entry_settings"]
    if module is None:
        name, hint = provenance["module"]["class"], saved.get("module")
        raise UserError(f"the posterior in {folder} is of a module of your own ({name}), which an archive of tensors "
                        "cannot hold; pass it: load(folder, module=…), on the command line --module "
                        f"{hint if hint and isinstance(hint, str) else 'package.module:function'}")  # fmt: skip
    if isinstance(saved.get("likelihood"), dict):
        raise UserError(f"the posterior in {folder} has a likelihood of your own; load(folder, entry=bp.Bayesian(…))")
    return build(Bayesian, {**saved, "module": module})


def _differences(mine: Mapping[str, list[int]], saved: Mapping[str, list[int]]) -> str:
    """Say in which names and shapes a module (here) differs from an archive (there); "" if they agree."""
    kinds = {
        "missing": [name for name in saved if name not in mine],
        "unexpected": [name for name in mine if name not in saved],
        "of another shape": [f"{n} {tuple(s)}, not {tuple(saved[n])}" for n, s in mine.items() if saved.get(n, s) != s],
    }
    short = {kind: ", ".join(names[:4]) + (", …" if len(names) > 4 else "") for kind, names in kinds.items() if names}
    return "; ".join(f"{kind}: {names}" for kind, names in short.items())


class Start(NamedTuple):
    """A start of a fit. starts_at: "guide", a posterior's q, or "point", its weights.   facts: for records."""

    posterior: Posterior
    starts_at: str
    facts: Mapping[str, Any]

    @classmethod
    def of(cls, setup: Any, posterior: Posterior, schema: Any) -> Self:
        """Return the start for a setup. Raises UserError if its method cannot start at this posterior."""
        if not isinstance(posterior, Posterior):
            raise UserError(f"start= takes a posterior, such as of bp.load(folder), not a {type(posterior).__name__}")
        about, starts_at = posterior.provenance, getattr(setup.method, "starts_at", None)
        if starts_at is None:
            raise UserError(f"{setup.inference} does not start from a posterior; svi, map, mle, mc-dropout and "
                            "ensemble do")  # fmt: skip
        names, former = ("task", "target_scale", "input_shape", "features", "classes", "targets"), posterior.schema
        if about.get("entry") != setup.variant or any(getattr(schema, k) != getattr(former, k) for k in names):
            raise UserError(f"start= takes a posterior of the same variant, inputs, task and classes; this is of "
                            f"{about.get('entry')} on {about.get('data')}")  # fmt: skip
        if starts_at == "guide" and posterior.guide is None:
            raise UserError(f"{setup.inference} starts at a q, and this posterior by {about.get('method')} has none")
        weights = posterior.chains or posterior.guide.state_dict()
        digest = hashlib.sha256(b"".join(value.cpu().contiguous().numpy().tobytes() for value in weights.values()))
        facts = {name: about.get(name) for name in ("method", "data", "fingerprint")}
        return cls(posterior, starts_at, facts | {"digest": digest.hexdigest()[:16]})

    @torch.no_grad()
    def put(self, model: nn.Module, guide: nn.Module | None) -> dict[str, Any]:
        """Load the posterior's q into ``guide``, or return {"start": {site: (C, *shape)}}, points for ``method.run``.

        The points are the stored draws, or the mean weights of a q. Raises UserError for weights of other shapes.
        """
        posterior = self.posterior
        if {k: v.shape for k, v in posterior.model.initial.items()} != {k: v.shape for k, v in model.initial.items()}:
            raise UserError("start= takes weights of the same network; these have other shapes")
        frozen = {model.net.get_buffer(name).data_ptr() for name in getattr(model, "still", ())}  # by all their names
        skipped = {name for name, value in model.named_buffers(remove_duplicate=False) if value.data_ptr() in frozen}
        skipped |= {"centre", "statistics.rows"}
        carried = {name: value for name, value in model_buffers(posterior.model).items() if name not in skipped}
        weight_space(model).load_state_dict(carried, strict=False)
        if self.starts_at == "guide":
            with refusing("start= takes a q of the same family and network; this has other parameters", RuntimeError):
                weight_space(guide).load_state_dict(posterior.guide.state_dict())
            return {}
        chains = posterior.chains or posterior.at_mean_weights().chains
        device = next(iter(model.initial.values())).device
        return {"start": {site: value.flatten(0, 1).to(device) for site, value in chains.items()}}
