"""The start of a fit of a user's own network: the initial σ of q, checks of the network, and batch statistics.

In a deep network the noise of the weights can grow from layer to layer. The variance of activations under draws of q is
therefore compared, layer by layer, with that at the means, and every σ is halved until no layer's variance differs by
more than a factor of ``FACTOR``. No σ starts above that of a Normal prior.

Batch normalisation has two modes:

    frozen   the running statistics of the module, in training and prediction
    batch    the statistics of the mini-batch in training; in evaluation mode those that each draw of the weights has on
             training rows stored with the model, so that its outputs are a function of x and the weights alone

Running averages, which torch uses, would mix the statistics of many draws (Maddox et al. 2019, arXiv:1902.02476).
"""

import copy
import math
import operator
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import ref

import pyro.poutine as poutine
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from bnn_pyro.errors import UserError, refusing
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.nets import in_mode, layers_digest, on_copy, outputs_seen, users_code, with_weights
from bnn_pyro.parts.own_module import calling, check_pure, norm_layers
from bnn_pyro.parts.weights import CentredNormal

PRODUCTS = {torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__}
BATCH_NORM = ("batch", "frozen")
#: Number of training rows for the batch statistics of a draw.
NORM_ROWS = 512
#: Number of rows and of draws for the choice of the initial σ.
START_ROWS, START_DRAWS = 128, 8
#: The first σ to try, as a share of a site's root mean square, and the largest factor between a layer's variances.
SHARE, FACTOR = 0.1, 2.0


def start_guide(model: nn.Module, guide: nn.Module, x: Tensor, init_scale: float | None) -> dict[str, Any]:
    """Set a guide's σ (unless ``init_scale`` is given) and the rows for batch statistics; return facts for provenance.

    x: the training rows (N, *input_shape).
    Raises UserError for a network whose outputs depend on more than a row of x and the weights.
    """
    rows = x[:START_ROWS].clone()  # a copy, as the network may change its inputs in place
    norms, net = norm_layers(model.net), model.net
    if model.statistics is not None:
        model.statistics.take(x)
    with in_mode(net, training=False), calling(net):
        check_pure(net, rows[:8])
        _check_passes(net, rows, model.likelihood)
        ignored = _without_gradient(net, rows)
    q, priors = getattr(guide, "random", guide), {site: getattr(p, "base_dist", p) for site, p in model.prior().items()}
    most = {site: p.scale.mean().item() for site, p in priors.items() if isinstance(p, CentredNormal | Normal)}
    for share in (SHARE / 2**halved for halved in range(20)):
        if init_scale is None:
            scales = {site: share * _typical(value) for site, value in q.sites().items()}
            q.start_at({site: min(scale, most.get(site, math.inf)) for site, scale in scales.items()})
        widest = variance_ratio(model, guide, rows)
        if init_scale is not None or widest <= FACTOR:
            break
    facts = {"class": type(net).__name__, "layers": layers_digest(net), "points": len(model.points),
             "parameters": {name: list(p.shape) for name, p in net.named_parameters()},
             "init_scale": f"{share:g} of the weights, at most that of the prior" if init_scale is None else init_scale,
             "variance_ratio": round(widest, 4)}  # fmt: skip
    if norms:
        facts["batch_norm"] = "frozen" if model.frozen else "batch"
    if any(isinstance(part, nn.modules.dropout._DropoutNd) and part.p for part in net.modules()):
        facts["dropout"] = "masks in training of points, none in predictions"
    if ignored:
        facts["ignored"] = ignored
        warnings.warn(f"the outputs of {type(net).__name__} have no gradient along {', '.join(ignored)}: they do not "
                      "depend on it, or take it as .data or .detach()", stacklevel=2)  # fmt: skip
    return facts


@torch.no_grad()
def _check_passes(net: nn.Module, x: Tensor, likelihood: nn.Module) -> None:
    """Warn of outputs like probabilities. UserError: not finite, or a pass in training mode fails or changes values."""
    name = type(net).__name__
    with on_copy(x, name) as inputs:
        f = net(inputs)
    if not all(torch.isfinite(value).all() for value in (f, *net.parameters())):  # tanh hides infinite weights
        raise UserError(f"{name} has weights or gives outputs that are not finite for training rows")
    buffers = {n: value.clone() for n, value in net.named_buffers()}
    with isolated(0):  # weights far away give large logits, and exceed the bound of an nn.Embedding's max_norm
        far = {n: p + 30 * _typical(p) * torch.randn_like(p) for n, p in net.named_parameters()}
        w = {n: value.clone() for n, value in far.items()}
        both = torch.cat([f, with_weights(net, w, x)])
        with in_mode(net, training=True), on_copy(x, name) as inputs, users_code(f"{name} fails in training mode"):
            trained = with_weights(net, buffers | w, inputs)
    of_each = both.shape[1] == 1 or getattr(likelihood, "event_dim", 0)  # separate probabilities, of labels
    sums_to_one = of_each or ((both.sum(1) - 1).abs() < 1e-4).all()
    if likelihood.has_classes and sums_to_one and (both >= 0).all() and (both <= 1).all() and both.var() > 0:
        message = f"the outputs of {name} look like probabilities, and must be logits"
        warnings.warn(f"{message}: leave its last softmax or sigmoid out", stacklevel=2)
    if getattr(trained, "shape", None) != f.shape:
        made = tuple(trained.shape) if isinstance(trained, Tensor) else type(trained).__name__
        raise UserError(f"{name} gives {made} in training mode, and outputs of shape {tuple(f.shape)} out of it; leave "
                        "out what is for training alone, such as aux_logits")  # fmt: skip
    if changed := [n for n, value in far.items() if not torch.equal(w[n], value)]:
        raise UserError(f"{name} changes its own '{changed[0]}' in a forward pass, as an nn.Embedding with max_norm "
                        "does; leave that out, and let the prior keep weights small")  # fmt: skip


class _Products(TorchFunctionMode):
    """Notes the inputs of weights w in products x @ w, the length of their last axis but one, by names[id(w)]."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS and len(args) == 2 and id(args[1]) in self.names:
            self.inputs[self.names[id(args[1])]] = args[1].shape[-2]
        return func(*args, **(kwargs or {}))


def inputs_of_products(net: nn.Module, x: Tensor) -> dict[str, int]:
    """{name: number of inputs} of parameters that multiply from the right; ``nn.Linear`` has (outputs, inputs)."""
    products = _Products()
    products.names, products.inputs = {id(p): name for name, p in net.named_parameters() if p.dim() > 1}, {}
    with products, in_mode(net, training=False), isolated(0), torch.no_grad():
        net(x)
    return products.inputs


class _WholeGradients(TorchFunctionMode):
    """Raises UserError for calls of F.embedding in which torch omits or rescales gradients of the weight.

    padded: ids of the weights of layers with a padding row, for which such calls are allowed.
    """

    def __init__(self, padded: Collection[int]) -> None:
        super().__init__()
        self.padded = padded

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding and args[1].requires_grad and id(args[1]) not in self.padded:
            name = "padding_idx" if kwargs.get("padding_idx") is not None else "scale_grad_by_freq"
            if name == "padding_idx" or kwargs.get(name):
                raise UserError(f"F.embedding with {name} alters gradients; leave it out, or freeze the weight")
        return func(*args, **kwargs)


def _without_gradient(net: nn.Module, x: Tensor) -> list[str]:
    """Parameters with a gradient of 0 for all outputs at x, at random weights near those of the module."""
    with isolated(0), torch.enable_grad():
        w = {n: (p + _typical(p) * torch.randn_like(p)).requires_grad_() for n, p in net.named_parameters()}
        tables = {id(part.weight) for part in net.modules() if hasattr(part, "padding_row")}
        with _WholeGradients([id(w[n]) for n, p in net.named_parameters() if id(p) in tables]):
            f = with_weights(net, w, x)
        total, name = (f * torch.randn_like(f)).sum(), type(net).__name__
        with refusing(f"{name} has no gradient by other weights than its own, as with checkpoints of activations, or "
                      "torch.no_grad, .detach() or numpy in its forward; leave these out ({error})"):  # fmt: skip
            slopes = dict(zip(w, torch.autograd.grad(total, w.values(), allow_unused=True), strict=True))
            if all(slope is None for slope in slopes.values()):
                raise RuntimeError("none of its parameters is used")
    return [name for name, slope in slopes.items() if slope is None or not slope.any()]


def _typical(value: Tensor) -> float:
    """The root mean square of a site's values, at least 0.1/√fan-in."""
    return max(value.square().mean().sqrt().item(), 0.1 / math.sqrt(value[0].numel() if value.dim() > 1 else 1))


@torch.no_grad()
def variance_ratio(model: nn.Module, guide: nn.Module, x: Tensor) -> float:
    """Variance of a layer's outputs over draws of q and rows x, divided by that at the means, farthest from 1."""
    with isolated(0):
        means = _mean_squares(model, named := dict(model.net.named_parameters()), x)
        off = dict.fromkeys(means, 0.0)
        for _ in range(START_DRAWS):
            drawn = poutine.trace(guide).get_trace(x[:1]).nodes
            for path, square in _mean_squares(model, {name: drawn[name]["value"] for name in named}, x).items():
                off[path] += square / START_DRAWS
    ratios = [off[k] / mean if math.isfinite(off[k]) else math.inf for k, mean in means.items() if mean > 1e-12]
    return max(ratios, key=lambda ratio: abs(math.log(ratio)) if 0 < ratio < math.inf else math.inf, default=1.0)


def _mean_squares(model: nn.Module, w: Mapping[str, Tensor], x: Tensor) -> dict[str, float]:
    """{path of a module: variance of its outputs}."""
    variances: dict[str, float] = {}

    def record(path: str, output: Any) -> None:
        first = output[0] if isinstance(output, tuple | list) and output else output
        if isinstance(first, Tensor) and first.is_floating_point() and first.numel() > 1:
            with suppress(RuntimeError):  # values cannot be read if the network itself uses vmap
                variances[path] = first.double().var().item()

    buffers = {name: value.clone() for name, value in model.net.named_buffers()}  # running averages must not change
    norms = norm_layers(model.net).values() if model.statistics is not None else ()
    with in_mode(model.net, training=False), in_mode(*norms, training=True), outputs_seen(model.net, record):
        with_weights(model.net, {**buffers, **w}, x)
    return variances


class _DrawnNorm(_BatchNorm):
    """Normalises by batch statistics in training, else by its buffers, with gradients of the buffers."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with refusing("a step or a part of one has a single row, and batch normalisation takes several: take a "
                          "larger batch_size, a smaller accumulate, or batch_norm='frozen'", ValueError):  # fmt: skip
                return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
        if not torch.is_grad_enabled():  # takes a third of the time, but has no gradients of the buffers
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        scale = (self.running_var + self.eps).rsqrt() * (1.0 if self.weight is None else self.weight)
        shift = (0.0 if self.bias is None else self.bias) - self.running_mean * scale
        shape = (-1, *(1 for _ in range(x.dim() - 2)))
        return torch.addcmul(shift.view(shape), x, scale.view(shape))


class BatchStatistics(nn.Module):
    """Computes the mean and variance at every batch normalisation of ``net`` on ``rows``, for draws of the weights.

    net: its batch normalisations are changed to use the values of ``forward`` as buffers in evaluation mode.
    rows: (R, *input_shape), empty before :meth:`take`.   Raises UserError for other normalisations than over a batch.
    """

    rows: Tensor

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        for path, layer in norm_layers(net).items():
            if not isinstance(layer, _BatchNorm):
                raise UserError(f"'{path}' is {type(layer).__name__} with running statistics; use batch_norm='frozen'")
            for name, start in (("running_mean", 0.0), ("running_var", 1.0)):
                if getattr(layer, name) is None:
                    setattr(layer, name, torch.full((layer.num_features,), start))
            layer.__class__ = _DrawnNorm  # does not update running averages in training
        self.register_buffer("rows", torch.empty(0))
        values = (*net.parameters(), *net.buffers())
        shared = {id(value): nn.Parameter(value.detach().to("meta"), False) for value in values}
        probe = copy.deepcopy(net, shared).eval()
        self._seen: dict[str, Tensor] = {}
        for path, layer in norm_layers(probe).items():
            layer.register_forward_pre_hook(partial(self._record, path))
        self._probe = (probe,)  # a tuple, so that it is not registered as a submodule
        #: Weak references to the last draws, their versions and their statistics.
        self._last: tuple[list[ref[Tensor]], list[int], dict[str, Tensor]] | None = None

    def _record(self, path: str, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        values = inputs[0].reshape(*inputs[0].shape[:2], -1)  # (R, channels, places)
        mean = values.mean(-1).mean(0)
        # A norm is several times as fast as ``var``, and needs no second copy of the activations.
        variance = torch.linalg.vector_norm(values - mean[:, None], dim=-1).square().mean(0) / values.shape[-1]
        layer.running_mean, layer.running_var = mean, variance
        if f"{path}.running_mean" in self._seen:
            raise UserError(f"'{path}' normalises several times in one call; use batch_norm='frozen'")
        self._seen |= {f"{path}.running_mean": mean, f"{path}.running_var": variance}

    def take(self, x: Tensor) -> None:
        """Use at most ``NORM_ROWS`` of these training rows (N, *input_shape), evenly spaced, for the statistics."""
        self._last = None
        self.rows = x[torch.linspace(0, len(x) - 1, min(len(x), NORM_ROWS)).round().long().to(x.device)]

    def forward(self, net: nn.Module, w: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """{buffer: (…, channels)} of draws {parameter: (…, *shape)}; one forward pass over the rows for each draw.

        Raises UserError before :meth:`take`, and if one layer is called several times.
        """
        if not len(self.rows):
            raise UserError("batch statistics need training rows: call model.statistics.take(x_train) before")
        key, versions = [*map(ref, w.values())], [value._version for value in w.values()]
        if self._last is not None and all(map(operator.is_, self._last[0], key)) and self._last[1] == versions:
            return self._last[2]
        shapes = {name: p.shape for name, p in net.named_parameters()}
        lead = torch.broadcast_shapes(*(v.shape[: v.dim() - len(shapes[name])] for name, v in w.items()))
        flat = {name: v.expand(lead + shapes[name]).reshape(-1, *shapes[name]) for name, v in w.items()}
        buffers, pieces = dict(net.named_buffers()), []
        for draw in range(lead.numel()):
            self._seen = {}
            with_weights(self._probe[0], buffers | {name: v[draw] for name, v in flat.items()}, self.rows)
            pieces.append(self._seen)
        self._seen = {}
        statistics = {name: torch.stack([piece[name] for piece in pieces]).reshape(*lead, -1) for name in pieces[0]}
        # Predictions call this again with the same draws for every chunk of rows.
        self._last = None if torch.is_grad_enabled() else (key, versions, statistics)
        return statistics

    def __getstate__(self) -> dict[str, Any]:  # weak references cannot be pickled for another process
        return {**super().__getstate__(), "_last": None}

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}rows" in state:  # the number of rows may differ
            self._last = None
            self.rows = torch.empty_like(state[f"{prefix}rows"], device=self.rows.device)
        super()._load_from_state_dict(state, prefix, *args)
