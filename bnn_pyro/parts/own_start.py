"""Where a fit of a user's own network starts: q as wide as its activations can bear, and what was seen on the way.

A σ that suits one layer can drown a deep network: the variance of activations under draws of q is compared, layer by
layer, with that of one forward pass at the means, and every σ is halved until no layer is off by more than a factor.

In training every row has noise of its own, where a random weight reaches ``F.linear`` or a convolution once.

    rows      f = x μ + √(x² σ²) ε              x (B, D): local reparametrization (Kingma et al. 2015, arXiv:1506.02557)
    flipout   f = x ∗ μ + r ((s x) ∗ (w − μ))   x (B, …): r, s = ±1 by row and channel (Wen et al. 2018, 1803.04386)
    weights   f = x ∗ w                         anywhere else

The outputs of a row are distributed as under drawn weights, so that the ELBO has the same expectation; its gradient
scatters less. Positions of an image and tokens share their weights, as they do under Flipout; noise for every
activation would be another model.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import pyro.poutine as poutine
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from bnn_pyro.isolation import isolated
from bnn_pyro.parts.gradients import LocalLinear
from bnn_pyro.parts.nets import in_mode, outputs_seen
from bnn_pyro.parts.own_module import check_pure, norm_layers
from bnn_pyro.parts.priors import BayesianNet

__all__ = ["RowNoise", "Start", "sampling_of", "start_guide", "variance_ratio"]


class Start:
    """Constants of the start: rows and draws that it is measured by.

    share   σ of a weight, as a share of the root mean square of its site's values
    factor  by which the variance of a layer's activations may be off
    """

    rows: int = 128
    draws: int = 8
    share: float = 0.1
    factor: float = 2.0


def start_guide(model: BayesianNet, guide: nn.Module, x: Tensor, init_scale: float | None) -> dict[str, Any]:
    """Set the σ of a guide (unless ``init_scale`` says it), and what the model is normalised by; facts for provenance.

    x: the training rows (N, *input_shape).

    Raises UserError for a network whose outputs depend on more than a row of x and the weights.
    """
    rows = x[: Start.rows]
    norms, net = norm_layers(model.net), model.net
    if model.statistics is not None:
        model.statistics.take(x)
    with in_mode(net, training=False):
        check_pure(net, rows[:8])
        ignored = _without_gradient(net, rows)
    q = getattr(guide, "random", guide)
    share, widest = Start.share, math.nan
    for _ in range(20):
        if init_scale is None:
            q.start_at({site: share * _typical(value) for site, value in q.sites().items()})
        widest = variance_ratio(model, guide, rows)
        if init_scale is not None or widest <= Start.factor:
            break
        share /= 2
    facts = {
        "class": type(net).__name__,
        "parameters": {name: list(p.shape) for name, p in net.named_parameters()},
        "points": len(model.points),
        "init_scale": init_scale if init_scale is not None else f"{share:g} of the weights",
        "variance_ratio": round(widest, 4),
    }
    if norms:
        facts["batch_norm"] = "frozen" if model.frozen else "batch"
    if any(isinstance(part, nn.modules.dropout._DropoutNd) and part.p for part in net.modules()):
        facts["dropout"] = "masks in training, none in predictions"
    if ignored:
        facts["ignored"] = ignored
        warnings.warn(f"the outputs of {type(net).__name__} have no gradient along {', '.join(ignored)}: they do not "
                      "depend on it, or take it as .data or .detach()", stacklevel=2)  # fmt: skip
    return facts


def _without_gradient(net: nn.Module, x: Tensor) -> list[str]:
    """Parameters along which no output at x has a slope, at weights near the module's, of which none is 0."""
    with isolated(0), torch.enable_grad():
        w = {n: (p + _typical(p) * torch.randn_like(p)).requires_grad_() for n, p in net.named_parameters()}
        f = functional_call(net, w, (x,))
        total = (f * torch.randn_like(f)).sum()
        slopes = torch.autograd.grad(total, w.values(), allow_unused=True) if total.requires_grad else [None] * len(w)
    return [name for name, slope in zip(w, slopes, strict=True) if slope is None or not slope.any()]


def _typical(value: Tensor) -> float:
    """The root mean square of a site's values, at least a tenth of 1/√fan-in."""
    fan_in = value[0].numel() if value.dim() > 1 else 1
    return max(value.square().mean().sqrt().item(), 0.1 / math.sqrt(fan_in))


@torch.no_grad()
def variance_ratio(model: BayesianNet, guide: nn.Module, x: Tensor) -> float:
    """Variance of a module's outputs over draws of q and rows x, over that of the pass at the means: the most off.

    In training mode, but without dropout.
    """
    with isolated(0):
        means = _mean_squares(model, {name: p for name, p in model.net.named_parameters()}, x)
        off = dict.fromkeys(means, 0.0)
        for _ in range(Start.draws):
            with poutine.trace() as trace:
                guide(x[:1])
            w = {name: trace.trace.nodes[name]["value"] for name in dict(model.net.named_parameters())}
            for path, square in _mean_squares(model, w, x).items():
                off[path] += square / Start.draws
    ratios = [off[path] / means[path] for path in means if means[path] > 1e-12]
    finite = [ratio if math.isfinite(ratio) else math.inf for ratio in ratios]
    return max(finite, key=lambda ratio: abs(math.log(ratio)) if 0 < ratio < math.inf else math.inf, default=1.0)


def _mean_squares(model: BayesianNet, w: Mapping[str, Tensor], x: Tensor) -> dict[str, float]:
    """{path of a module: variance of its outputs}."""
    variances: dict[str, float] = {}

    def record(path: str, output: Any) -> None:
        first = output[0] if isinstance(output, tuple | list) and output else output
        if isinstance(first, Tensor) and first.is_floating_point() and first.numel() > 1:
            variances[path] = first.double().var().item()

    buffers = {name: value.clone() for name, value in model.net.named_buffers()}  # running averages stay as they are
    with ExitStack() as modes, outputs_seen(model.net, record):
        modes.enter_context(in_mode(model.net, training=False))
        for layer in norm_layers(model.net).values() if model.statistics is not None else ():
            modes.enter_context(in_mode(layer, training=True))
        functional_call(model.net, {**buffers, **w}, (x,))
    return variances


# -- noise of every row ------------------------------------------------------------------------------------------------
LAYERS = (F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
#: Rows by which a layer's inputs are told from others: a number that no other dimension has by chance.
ROWS = 13


class RowNoise(TorchFunctionMode):
    """Samples layers by row.   w: {site: a draw of its q, as ``drawn_from``}.   sampling: of :func:`sampling_of`."""

    def __init__(self, w: Mapping[str, Tensor], sampling: Mapping[str, str]) -> None:
        super().__init__()
        self.w = w  # whose ids stay theirs
        q = {id(v): getattr(getattr(v, "drawn_from", None), "base_dist", None) for k, v in w.items() if k in sampling}
        self.q = {key: own for key, own in q.items() if isinstance(own, Normal)}

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        """A layer's outputs, or what the function gives."""
        q = self.q.get(id(args[1])) if func in LAYERS and len(args) > 1 else None
        if q is None:
            return func(*args, **(kwargs or {}))
        x, w, bias, *rest = *args, *(None,) * (len(args) == 2)
        own = self.q.get(id(bias))
        if x.dim() == 2:
            f = LocalLinear.apply(x, q.loc.mT, q.scale.square().mT, False, torch.Size())
            return f if bias is None else f + (bias if own is None else own.loc + own.scale * torch.randn_like(f))
        mean = func(x, q.loc, bias if own is None else own.loc, *rest)
        signs = [torch.randint(2, (len(part), part.shape[-1 if func is F.linear else 1]), device=x.device) * 2 - 1
                 for part in (x, mean)]  # fmt: skip
        extra = (slice(None), *(None,) * (x.dim() - 2))
        s, r = (sign[extra] if func is F.linear else sign[(..., *extra[1:])] for sign in signs)
        return mean + r * func(x * s, w - q.loc, None if own is None else bias - own.loc, *rest)


class _Uses(TorchFunctionMode):
    """How each of these weights enters a call of ROWS rows: {site: one way a use}."""

    def __init__(self, w: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.sites, self.ways = {id(value): site for site, value in w.items()}, {site: [] for site in w}

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if any(isinstance(part, Tensor) for part in tree_leaves(output)):
            layer = func in LAYERS and not kwargs and id(args[0]) not in self.sites and len(args[0]) == ROWS
            way = "weights" if not layer else "rows" if args[0].dim() == 2 else "flipout"
            for part in tree_leaves((args, kwargs)):
                if id(part) in self.sites:
                    self.ways[self.sites[id(part)]].append(way)
        return output


class Sampling(dict):
    """{parameter: "rows" or "flipout"}."""

    def noise(self, w: Mapping[str, Tensor]) -> RowNoise:
        """The mode in which a forward pass with these weights is sampled so."""
        return RowNoise(w, self)


def sampling_of(net: nn.Module, input_shape: tuple[int, ...]) -> Sampling:
    """Of the parameters that a pass uses once, in a layer whose inputs are its rows."""
    with isolated(0), in_mode(net, training=False), torch.enable_grad():
        w = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
        with _Uses(w) as uses:
            functional_call(net, w, (torch.zeros(ROWS, *input_shape),))
    return Sampling((site, ways[0]) for site, ways in uses.ways.items() if len(ways) == 1 and ways[0] != "weights")
