"""Noise of its own for each row in training, where a random weight reaches ``F.linear`` or a convolution once.

    rows      f = x μ + √(x² σ²) ε              x (B, D): local reparametrization (Kingma et al. 2015, arXiv:1506.02557)
    flipout   f = x ∗ μ + r ((s x) ∗ (w − μ))   x (B, …): r, s = ±1 by row and channel (Wen et al. 2018, 1803.04386)
    weights   f = x ∗ w                         anywhere else

The outputs of a row are distributed as under drawn weights, so that the ELBO has the same expectation; its gradient
scatters less. Positions of an image and tokens share their weights: noise for every activation would be another model.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from bnn_pyro.isolation import isolated
from bnn_pyro.parts.gradients import local_linear
from bnn_pyro.parts.nets import in_mode, with_weights

#: What :class:`RowNoise` samples by row.
LAYERS = (F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
#: Rows of the pass that finds where the rows of x are a layer's inputs: no other dimension is likely to be so long.
ROWS = 13


class RowNoise(TorchFunctionMode):
    """Samples layers by row.   w: {site: a draw of its q, as ``drawn_from``}.   sampling: of :func:`sampling_of`."""

    def __init__(self, w: Mapping[str, Tensor], sampling: Mapping[str, str]) -> None:
        super().__init__()
        self.w = w  # whose ids stay theirs
        q = {id(v): getattr(v, "drawn_from", None) for k, v in w.items() if k in sampling}
        self.q = {k: own for k, v in q.items() if hasattr(own := getattr(v, "base_dist", v), "loc")}

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        """A layer's outputs, or what the function gives."""
        q = self.q.get(id(args[1])) if func in LAYERS and len(args) > 1 else None
        if q is None:
            return func(*args, **(kwargs or {}))
        x, w, bias, *rest = *args, *(None,) * (len(args) == 2)
        own = self.q.get(id(bias))
        if x.dim() == 2:
            f = local_linear(x, q.loc.mT, q.scale.square().mT, False, torch.Size())
            noisy = bias if own is None else own.loc + own.scale * torch.randn_like(f)
            return f if bias is None else f + noisy.to(f.dtype)
        mean = func(x, q.loc, bias if own is None else own.loc, *rest)
        ones = (part.new_ones(len(part), part.shape[-1 if func is F.linear else 1]) for part in (x, mean))
        signs = [one.random_(2).mul_(2).sub_(1) for one in ones]
        extra = (slice(None), *(None,) * (x.dim() - 2))
        s, r = (sign[extra] if func is F.linear else sign[(..., *extra[1:])] for sign in signs)
        return torch.addcmul(mean, r, func(x * s, w - q.loc, None if own is None else bias - own.loc, *rest))


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


def sampling_of(net: nn.Module, input_shape: tuple[int, ...]) -> dict[str, str]:
    """{parameter: "rows" or "flipout"} of those that a pass uses once, in a layer whose inputs are its rows."""
    with isolated(0), in_mode(net, training=False), torch.enable_grad():
        w = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
        with _Uses(w) as uses:
            with_weights(net, w, torch.zeros(ROWS, *input_shape))
    return {site: ways[0] for site, ways in uses.ways.items() if len(ways) == 1 and ways[0] != "weights"}
