"""The approximate posterior q(w | D) that every inference method returns, and its archive on disk.

No later module depends on the method that produced a posterior. The archive contains tensors and JSON only, and is
read with ``weights_only=True``, so that loading executes no code from the file.
"""

import hashlib
import io
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import pandas as pd
import pyro
import pyro.poutine as poutine
import torch
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn
from torch.distributions import kl_divergence
from torch.utils._pytree import tree_map_only

from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.errors import Introduced, UserError, refusing
from bnn_pyro.files import write_whole
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.backbone import OnFeatures
from bnn_pyro.parts.correlated_normal import Part
from bnn_pyro.parts.nets import in_mode, tensors_of

FORMAT = 1
#: The most bytes of weights that are drawn at once, and the approximate count of numbers drawn by ``describe``.
BLOCK_BYTES, DESCRIBED = 64 * 2**20, 10**8


def weight_space(module: nn.Module | None) -> nn.Module | None:
    """The version over weights of a model or guide whose sites are activations; any other module itself."""
    return getattr(module, "weight_space", module)


def model_buffers(model: nn.Module) -> dict[str, Tensor]:
    """{name: value} of a model's persistent buffers, such as running statistics, without those of its backbone."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {k: v for k, v in tensors_of(model).items() if k not in parameters and not k.startswith("backbone.")}


def moved_buffers(model: nn.Module, x: Tensor, y: Tensor) -> list[str]:
    """Names of the buffers that a forward pass in training mode changes; their values are restored."""
    before = {name: (value, value.clone()) for name, value in model.named_buffers()}
    with isolated(0), torch.no_grad(), in_mode(model, training=True):
        poutine.condition(model, dict(model.initial))(x, y)
        pairs = [(name, before[name][1], value) for name, value in model.named_buffers() if name in before]
        moved = [n for n, a, b in pairs if a.shape != b.shape or not ((a == b) | (a.isnan() & b.isnan())).all()]
        for name in moved:
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._buffers[leaf] = before[name][0].copy_(before[name][1])
    return moved


def split_frozen(model: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
    """The part of the model that depends on the draws, and its inputs: the outputs of the frozen layers for x."""
    if getattr(model, "still", ()):
        from bnn_pyro.parts.frozen_layers import without_frozen_layers  # needed for a user's own network only

        head, (x,) = without_frozen_layers(model, x) or (model, [x])
        return head, x
    return (model.head, model.backbone(x)) if isinstance(model, OnFeatures) else (model, x)


@dataclass(frozen=True)
class Posterior(Introduced):
    """An approximate posterior over the weights. Shapes: S draws, C chains, D draws a chain.

    model       the conditional p(y | x, w) whose weights are drawn
    schema      the description of the data: columns, task, units
    guide       q as a module to sample from; None if draws are stored
    chains      {site: (C, D, *site shape)}; None if q is a guide
    stats       {name: (C, D)}: diverging, acceptance_rate, energy, …
    trace       {name: one number per epoch}: elbo, log_likelihood, kl, … in nats, of the whole training set
    provenance  entry, settings, seed, versions, data fingerprint, seconds; JSON values
    rows        (N,) ``row_digests`` of the rows used for training or early stopping; None if unknown
    """

    model: nn.Module
    schema: Schema
    guide: nn.Module | None = None
    chains: Mapping[str, Tensor] | None = None
    stats: Mapping[str, Tensor] = field(default_factory=dict)
    trace: Mapping[str, list[float]] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    rows: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("model", "guide"):  # models and guides over activations are for training only
            object.__setattr__(self, name, weight_space(getattr(self, name)))
        if (self.guide is None) == (self.chains is None):
            raise ValueError("a Posterior is either a guide or chains")

    def __repr__(self) -> str:
        about, draws = self.provenance, "a guide, which gives any number of draws"
        if self.chains is not None:
            chains, stored = next(iter(self.chains.values())).shape[:2]
            draws = f"{chains:,} {'chain' if chains == 1 else 'chains'} of {stored:,}"
        name, method, data = (about.get(key, "unknown") for key in ("entry", "method", "data"))
        settings = {**about.get("entry_settings", {}), **about.get("method_settings", {})}
        return (
            f"<Posterior of {name} by {method} on {data}: {self.num_weights:,} weights; {draws}>\n"
            f"settings: {', '.join(f'{name}={value}' for name, value in settings.items())}\n"
            "next: bp.predict(posterior, data.x_test); posterior.draw(100); posterior.history; posterior.save(folder)"
        )

    @property
    def num_weights(self) -> int:
        """P, the number of weights."""
        return sum(value.numel() for value in self.model.initial.values())

    @property
    def history(self) -> pd.DataFrame:
        """The trace as a table with one row per epoch (or step of the sampler), without empty columns."""
        return pd.DataFrame({name: pd.Series(values) for name, values in self.trace.items() if len(values)})

    def describe(self) -> pd.DataFrame:
        """A table of the network's sites: shape, prior, "sampled", mean σ / prior's σ, median |μ|/σ, KL.

        "sampled": how training samples a site, "rows" or "flipout" (``row_noise``), "weights" (one draw for all rows),
        "point" or "frozen". Estimates are from up to 200 draws (20 for many millions of weights), so that means of
        0 have an |μ|/σ of 0.05 to 0.15 by chance. Raises UserError for a user's own model that is no ``BayesianNet``.
        """
        model, lines = getattr(self.model, "head", self.model), []
        if not hasattr(model, "net"):
            raise UserError(f"describe() takes a BayesianNet, and this model is a {type(model).__name__}; "
                            "bp.diagnostics.to_arviz(posterior) has its sites")  # fmt: skip
        draws, priors, q = self.draw(min(200, max(20, DESCRIBED // self.num_weights)), seed=0), model.prior(), {}
        if self.guide is not None:
            with isolated(0):
                q = {site: node["fn"] for site, node in drawn_sites(self.guide).items()}
        parameters = {name for name, _ in model.net.named_parameters()} | {*model.still}
        for site, value in model.net.state_dict().items():
            if site not in parameters:  # a buffer, or a second name of a shared parameter
                continue
            point, share, ratio, kl = site not in model.texts or site in model.points, *(float("nan"),) * 3
            if not point and len(draws[site]) > 1:
                mean, sd = draws[site].mean(0), draws[site].std(0)
                ratio = (mean.abs() / sd).median().item()
                with suppress(NotImplementedError):  # a prior without a variance
                    share = (sd / priors[site].variance.sqrt()).mean().item()
                with suppress(NotImplementedError):  # the KL has no closed form
                    kl = kl_divergence(q[site], priors[site]).item() if q and not isinstance(q[site], Part) else kl
            by_row = model.sampling if hasattr(getattr(own := q.get(site), "base_dist", own), "loc") else {}
            sampled = "frozen" if site in model.still else "point" if point else by_row.get(site, "weights")
            lines.append([site, list(value.shape), "" if point else model.texts[site], sampled, share, ratio, kl])
        return pd.DataFrame(lines, columns=["site", "shape", "prior", "sampled", "σ/prior", "|μ|/σ", "KL"])

    @property
    def device(self) -> torch.device:
        """The device of the guide's parameters or of the stored draws."""
        return next(iter(self.guide.parameters() if self.guide is not None else self.chains.values())).device

    def draw(self, num: int, x: Tensor | None = None, seed: int | None = None) -> dict[str, Tensor]:
        """{site: (num, *site shape)}: new draws from a guide, or evenly thinned stored draws.

        num: number of draws; of stored ones at most C·D are returned, as none is repeated.
        x: (B, *input_shape), for a guide whose draws depend on the input.
        seed: seed of a guide's draws; None uses the caller's random generator.
        """
        with isolated(seed):
            blocks = list(self.blocks(num, x))
        return blocks[0] if len(blocks) == 1 else {site: torch.cat([b[site] for b in blocks]) for site in blocks[0]}

    def blocks(self, num: int, x: Tensor | None = None) -> Iterator[dict[str, Tensor]]:
        """Like :meth:`draw`, in blocks of at most ``BLOCK_BYTES``; to be iterated inside ``isolated``."""
        if num < 1:
            raise UserError(f"the number of draws must be at least 1, got {num}")
        size = max(1, BLOCK_BYTES // (4 * self.num_weights))
        if self.chains is None:
            for start in range(0, num, size):
                with pyro.plate("draws", min(size, num - start), dim=-1):
                    sites = drawn_sites(self.guide, x)
                yield {name: node["value"] for name, node in sites.items()}
            return
        stored = next(iter(self.chains.values())).shape[:2].numel()
        for part in torch.linspace(0, stored - 1, min(num, stored)).round().long().split(size):
            yield {site: v.flatten(0, 1)[part.to(v.device)] for site, v in self.chains.items()}

    def at_mean_weights(self) -> Self:
        """A posterior with the mean of q as its only draw: one forward pass, no epistemic uncertainty.

        Raises UserError for stored draws (hidden units can be permuted, so that the mean of probable networks is in
        general not probable), and if q has a site without a mean or one that the model does not have.
        """
        if self.guide is None:
            raise UserError("stored draws have no mean weights: the mean of likely networks is in general not likely")
        with isolated(0):
            sites = drawn_sites(self.guide)
        with refusing(f"{type(self.guide).__name__} has no mean of every weight; use its draws", NotImplementedError):
            if sites.keys() != self.model.initial.keys():
                raise NotImplementedError
            chains = {name: node["fn"].mean.detach().clone()[None, None] for name, node in sites.items()}
        return self.derived({"draws": "mean weights"}, guide=None, chains=chains, stats={})

    def derived(self, about: Mapping[str, Any], **changes: Any) -> Self:
        """A copy with changed fields and ``about`` added to its provenance, without the key for resuming a fit."""
        return replace(self, provenance={k: v for k, v in self.provenance.items() if k != "key"} | about, **changes)

    def save(self, folder: str | os.PathLike) -> None:
        """Write ``posterior.pt`` (tensors) and ``posterior.json`` (the rest, with a checksum), each atomically."""
        folder = Path(folder)
        modules = {"guide": self.guide, "backbone": getattr(self.model, "backbone", None)}
        tensors = {name: None if part is None else dict(part.state_dict()) for name, part in modules.items()}
        tensors |= {"chains": None if self.chains is None else dict(self.chains), "stats": dict(self.stats)}
        more = {"rows": self.rows, "buffers": model_buffers(self.model) or None}
        tensors |= {name: value for name, value in more.items() if value is not None}
        buffer = io.BytesIO()
        torch.save(tree_map_only(Tensor, Tensor.cpu, tensors), buffer)
        blob = buffer.getvalue()
        meta = {"format": FORMAT, "schema": self.schema.to_dict(), "trace": dict(self.trace)}
        meta["provenance"] = dict(self.provenance)
        meta["sha256"] = archive_digest(blob, meta)
        write_whole(folder / "posterior.pt", blob)
        write_whole(folder / "posterior.json", json.dumps(meta, indent=1).encode())


@torch.no_grad()
def drawn_sites(guide: nn.Module, x: Tensor | None = None) -> dict[str, dict]:
    """The sites sampled by a guide, without auxiliary ones, such as the vector of all weights of a joint guide."""
    with poutine.trace() as trace:
        guide(x)
    nodes = trace.trace.iter_stochastic_nodes()
    return {name: node for name, node in nodes if not (site_is_subsample(node) or node["infer"].get("is_auxiliary"))}


def archive_digest(blob: bytes, meta: Mapping[str, Any]) -> str:
    """SHA-256 of both files: the tensors, and all entries of the JSON except the checksum itself."""
    unsigned = json.loads(json.dumps({k: v for k, v in meta.items() if k != "sha256"}))
    return hashlib.sha256(blob + json.dumps(unsigned, sort_keys=True).encode()).hexdigest()


def read_archive(folder: str | os.PathLike) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tensors, meta) of a saved posterior. Raises UserError if a file is missing, altered or of another format."""
    folder = Path(folder)
    about, path = folder / "posterior.json", folder / "posterior.pt"
    if absent := [file.name for file in (about, path) if not file.is_file()]:
        raise UserError(f"no {absent[0]} in {folder}: not a finished run, or not a run at all")
    with refusing(f"{about} is damaged; train again or restore it", ValueError, KeyError, TypeError, RecursionError):
        meta = json.loads(about.read_text(encoding="utf-8"))
        expected, version = meta["sha256"], meta["format"]
    if version != FORMAT:
        raise UserError(f"{about} has format {version}; this version reads format {FORMAT}")
    blob = path.read_bytes()
    if archive_digest(blob, meta) != expected:
        raise UserError(f"{path} (or posterior.json) is truncated or was altered (checksum); train again or restore it")
    with refusing(f"{path} holds something else than tensors and was not loaded; train again"):
        return torch.load(io.BytesIO(blob), map_location="cpu", weights_only=True), meta
