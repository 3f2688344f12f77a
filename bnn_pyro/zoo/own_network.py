"""A user's own network, any ``torch.nn.Module``, with all or some of its parameters Bayesian, the others points.

    w ~ p(w)    f = module_{w, θ}(x)    y ~ likelihood(f)        q(w) = ∏ᵢ Normal(wᵢ; μᵢ, σᵢ),  θ trained or frozen

The module is copied and never changed. Its parameters are the latent sites, by their own names; q starts at the
module's weights. A parameter that ``where`` does not match is a point: a site without a prior, whose q is one value.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.fx import GraphModule

from bnn_pyro.datasets.dataset import Dataset, Schema
from bnn_pyro.errors import UserError
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.backbone import INPUTS, check_scale, from_text, unpack
from bnn_pyro.parts.correlated_normal import parse_family
from bnn_pyro.parts.guides import WithPoints
from bnn_pyro.parts.likelihoods import Categorical, Likelihood, make_likelihood
from bnn_pyro.parts.nets import blank_row, constants, described, in_mode, layers_digest, users_code
from bnn_pyro.parts.own_module import assign, check_outputs, freeze, imported, norm_layers, own_copy, select
from bnn_pyro.parts.own_start import BATCH_NORM, SHARE, START_ROWS, BatchStatistics, inputs_of_products, start_guide
from bnn_pyro.parts.priors import BayesianNet, parse_prior
from bnn_pyro.parts.row_noise import ROWS, sampling_of
from bnn_pyro.settings import Settings, setting


@dataclass(frozen=True, eq=False)
class ModuleSource:
    """A user's module, or a function that creates one, with the schema as optional argument."""

    origin: nn.Module | Callable[..., nn.Module]

    @property
    def description(self) -> dict[str, Any]:
        """JSON values that identify it: the name of a function, or the class of a module and digests of it."""
        if not isinstance(self.origin, nn.Module):
            return {"kind": "function", "name": getattr(self.origin, "__qualname__", type(self.origin).__name__)}
        own_copy(self.origin)  # raises if it cannot be copied
        return described(getattr(self.origin, "_orig_mod", self.origin))

    def make(self, schema: Schema) -> nn.Module:
        """A copy of the module.   Raises UserError if the function fails, or does not return a module."""
        if isinstance(self.origin, nn.Module):
            return own_copy(self.origin)
        name = self.description["name"]
        way = f" and is a class; give an instance, {name}(...)" if isinstance(self.origin, type) else ""
        with users_code(f"{name} gave no module{way}"):
            names = inspect.signature(self.origin).parameters
            named = {"schema": schema} if "schema" in names else {}
            made = self.origin(schema) if any(p.default is p.empty for p in names.values()) else self.origin(**named)
        if not isinstance(made, nn.Module):
            raise UserError(f"{name} must return a torch.nn.Module, and gave {type(made).__name__}")
        return own_copy(made)


@dataclass(frozen=True)
class Bayesian(Settings):
    """Settings of a network of one's own.

    module      package.module:function, which is imported, or a torch.export file (.pt2), which executes nothing; in
                Python a module, or a function that returns one, with the schema as optional argument.
                (B, *input_shape) -> (B, outputs): logits of the classes, or the mean
    where       which parameters are Bayesian: names, globs or classes of layers, as layer4.*|fc|Conv2d, or re:REGEX; in
                Python also classes. The others are points
    frozen      which parameters keep their values: a pattern as in where, or "*" for all but where. Parameters that
                require no gradient are frozen too, unless where names them
    prior       by-target (fan-in:8 for classes, fan-in:2 for numbers), normal:SCALE, fan-in:SCALE, gamma:SHAPE,RATE,
                ard:SHAPE,RATE (a scale for each input of a layer), scale-mixture:WIDE,NARROW,WEIGHT, or
                pretrained:SCALE (centred at the module's weights, with scale SCALE/√fan-in); in Python also
                {pattern: prior}, where the first match counts
    start       initial: at the module's weights; pretrained: the same for a trained network, with frozen batch
                normalisation, and as the start of all members of an ensemble
    noise       numbers only: learned, heteroscedastic, correlated (several targets), or a scale in target units
    family      SVI: q is mean-field, low-rank:RANK or full
    init_scale  initial σ of every weight; by default a share of each layer's weights for which activations keep their
                variance, and at most the scale of a Normal prior
    batch_norm  batch: normalise by batch statistics in training, and for each draw by statistics of training rows;
                frozen: by running averages. By default frozen if start is pretrained, else batch
    inputs      standardised, as in ``data.x_train``, or raw, in their own units (pixels in [0, 1])
    likelihood  for numbers, as for mean-field; in Python also a ``Likelihood``
    sampling    SVI: rows (default), with independent noise for each row in layers that allow it, or weights
    """

    module: Any = ""
    where: Any = "*"
    frozen: Any = ""
    prior: Any = "by-target"
    start: str = setting("initial", choices=("initial", "pretrained"))
    noise: str | float = "learned"
    family: str = setting("mean-field", parse=parse_family)
    init_scale: float | None = setting(None, above=0, optional=True)
    batch_norm: str | None = setting(None, choices=BATCH_NORM, optional=True)
    inputs: str = setting("standardised", choices=INPUTS)
    likelihood: Any = None
    sampling: str | None = setting(None, choices=("rows", "weights"), optional=True)

    summary: ClassVar[str] = "A network of your own, any torch.nn.Module: all or some of its weights Bayesian"
    paper: ClassVar[str] = "Blundell et al. 2015, arXiv:1505.05424; Krishnan et al. 2020, arXiv:1906.05323"
    baseline: ClassVar[str] = "my-network"
    has: ClassVar[frozenset[str]] = frozenset({"guide", "weights", "proper prior", "deterministic"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(kind := self.likelihood, type):
            raise UserError(f"likelihood={kind.__name__} is a class; give an instance, {kind.__name__}(...)")
        if isinstance(kind, Likelihood) and self.noise != "learned":
            raise UserError(f"noise={self.noise} is not of a likelihood of your own; leave it out")
        module = ModuleSource(self.module) if callable(self.module) else self.module
        if not isinstance(module, str | ModuleSource):
            raise UserError(f"a module is a torch.nn.Module, or package.module:function, not {module!r:.80}")
        put = {"module": module, "where": _pattern(self.where), "frozen": _pattern(self.frozen)}
        texts = {"*": self.prior}
        if isinstance(self.prior, Mapping):
            put["prior"] = texts = {_pattern(key): text for key, text in self.prior.items()}
        for text in texts.values():
            if not isinstance(text, str):
                raise UserError(f"a prior is a text, as 'normal:1', or {{pattern: text}}, not {type(text).__name__}")
            if "/" in text:
                raise UserError(f"the prior {text!r:.60} is of the package's networks; of a module give those of each "
                                "layer, such as prior={'fc1.weight': 'ard:0.5', '*': 'fan-in:2'}")  # fmt: skip
            parse_prior(text)
        # Trained points are sites without a prior to draw from; frozen points are not sites.
        proper = put["where"] == "*" or put["frozen"] == "*"
        if not proper or any(text.startswith("log-uniform") for text in texts.values()):
            put["has"] = type(self).has - {"proper prior"}
        for name, value in put.items():
            object.__setattr__(self, name, value)

    #: "batch" or "frozen".
    norm = property(lambda self: self.batch_norm or ("frozen" if self.start == "pretrained" else "batch"))

    def own(self, schema: Schema) -> nn.Module:
        """A copy of the module.   Raises UserError if there is none, or it cannot be copied."""
        source = self.module
        if source == "":
            raise UserError("there is no module: give bp.Bayesian(module), or --module package.module:function")
        if isinstance(source, str):
            source = ModuleSource(from_text(source).net if source.endswith(".pt2") else imported(source))
        return source.make(schema)

    def known_by(self, schema: Schema) -> str:
        """A digest of the module's layers, or of its file, which must be the same for resuming a fit."""
        if isinstance(self.module, str) and self.module.endswith(".pt2"):
            return from_text(self.module).description["sha256"]
        with isolated(0):
            net = self.own(schema)
        return "".join([layers_digest(net), *(f" {n}" for n, p in net.named_parameters() if not p.requires_grad)])

    def model(self, schema: Schema) -> BayesianNet:
        """p(y, w | x), in evaluation mode; see ``Entry.model``.

        Raises UserError for a module that does not suit the data or cannot be copied, and a pattern without a match.
        """
        schema.refuse_exposure("my-network")
        net = self.own(schema)
        before = constants(net)
        bayesian = select(net, self.where, "where")
        still = {name for name, p in net.named_parameters() if not p.requires_grad}
        frozen = set() if self.frozen in ("", "*") else set(select(net, self.frozen, "frozen"))
        if self.where == "*":
            bayesian = [name for name in bayesian if name not in still | frozen]
        elif both := frozen.intersection(bayesian):
            raise UserError(f"'{min(both)}' is in both where={self.where!r:.40} and frozen={self.frozen!r:.40}")
        stays = still | frozen if self.frozen != "*" else dict(net.named_parameters())
        still = [name for name, _ in net.named_parameters() if name in stays and name not in bayesian]
        freeze(net, still)
        points = [name for name, _ in net.named_parameters() if name not in bayesian]
        if not bayesian:
            raise UserError("no parameter is Bayesian: those in frozen, and those that require no gradient, are not")
        if isinstance(net, GraphModule) and (self.inputs == "raw" or schema.input_parts):
            received = "raw inputs" if self.inputs == "raw" else "several inputs"
            raise UserError(f"a graph, as of torch.export, cannot take {received}: give the module itself")
        if self.inputs == "raw":
            net.register_forward_pre_hook(partial(_unstandardise, schema))
        if schema.input_parts:
            net.register_forward_pre_hook(partial(unpack, schema.input_parts), with_kwargs=True)
        row = blank_row(net, schema)
        likelihood, inputs = self._likelihood(schema, net, row), inputs_of_products(net, row[[0, 0]])
        prior, norms = assign(net, self.prior, bayesian, "prior"), norm_layers(net)
        if self.norm == "frozen" and any(layer.running_mean is None for layer in norms.values()):
            raise UserError("its batch normalisation has no running statistics to be frozen; use batch_norm='batch'")
        statistics = BatchStatistics(net) if norms and self.norm == "batch" else None
        model = BayesianNet(net, likelihood, prior, points, statistics, self.norm == "frozen", inputs).eval()
        # With batch statistics, a row's output depends on the noise of other rows.
        if self.sampling != "weights" and not statistics:
            model.sampling = sampling_of(net, *(row[[0] * rows] for rows in ROWS))
        model.is_own_network, model.is_pretrained, model.still = True, self.start == "pretrained", still
        model.constants = {k: v for k, v in constants(net).items() if before.get(k) == v}  # not changed by a pass
        if isinstance(self.likelihood, Likelihood):
            model.constants |= {f"likelihood.{name}": digest for name, digest in constants(likelihood).items()}
        return model

    def guide(self, model: nn.Module) -> nn.Module:
        """q(w), starting at the module's own weights; see ``Entry.guide``."""
        random = {site: value for site, value in model.initial.items() if site not in model.points}
        q = parse_family(self.family)(random, self.init_scale or SHARE)
        return WithPoints(q, {site: model.initial[site] for site in model.points}) if model.points else q

    def prepare(self, model: BayesianNet, guide: nn.Module, data: Dataset) -> dict[str, Any]:
        """Check the module on training rows, set q's initial σ and batch statistics, and return facts for provenance.

        Raises UserError for a module whose outputs depend on more than x and the weights.
        """
        check_scale(model.net, data, self.inputs, type(model.net).__name__, "Bayesian", hooked=self.inputs == "raw")
        stays = [name for name in norm_layers(model.net) if f"{name}.weight" in model.still]
        if stays and model.statistics is not None and self.batch_norm is None:
            warnings.warn(f"the weights of {stays[0]} stay, but it normalises by the rows of this fit: batch_norm="
                          "'frozen' (--set batch_norm=frozen) keeps those of its training", stacklevel=2)  # fmt: skip
        facts = start_guide(model, guide, data.x_train, self.init_scale)
        used = sampling_of(model.net, data.x_train[:START_ROWS], training=True) if model.sampling else {}
        if drawn := [site for site, way in model.sampling.items() if used.get(site) != way]:  # a pass may depend on x
            facts["sampled_as_weights"] = drawn
            model.sampling = {site: way for site, way in model.sampling.items() if site not in drawn}
        return facts | ({"constants": model.constants} if model.constants else {})

    def _likelihood(self, schema: Schema, net: nn.Module, row: Tensor) -> Likelihood:
        """The user's likelihood, or that of the data; for two classes a network may have one output or two."""
        likelihood = self.likelihood if isinstance(self.likelihood, Likelihood) else None
        made = likelihood or make_likelihood(schema, self.noise, self.likelihood)
        count, purpose = len(schema.classes), f"the {len(schema.classes)} classes" if schema.classes else "the target"
        widths = {made.outputs: purpose if self.likelihood is None else type(made).__name__}
        if self.likelihood is None and count == 2:
            widths[2] = "two logits"
        with in_mode(net, training=False):
            shapes = {part.name: (2, *part.shape) for part in schema.input_parts}
            whole = ", ".join(f"'{part.name}'" for part in schema.input_parts if part.is_whole)
            way = f" (whole numbers, in {whole}, stay as they are, for an nn.Embedding; else give X.astype(float))"
            width = check_outputs(net, row[[0, 0]], widths, shapes and f"{shapes}{way * bool(whole)}")
        return made if width == made.outputs else Categorical(2)


def _pattern(where: Any) -> str:
    """A pattern as one text, from a text, a class, or a sequence of texts and classes."""
    if isinstance(where, str):
        return where
    parts = where if isinstance(where, list | tuple) else [where]
    if not parts or not all(isinstance(part, str | type) for part in parts):
        raise UserError(f"where, frozen and a prior's patterns are texts or classes of layers, got {where!r:.80}")
    return "|".join(part if isinstance(part, str) else part.__name__ for part in parts)


def _unstandardise(schema: Schema, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A forward pre-hook: inputs in their own units."""
    return (schema.unstandardise(inputs[0]), *inputs[1:])
