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

from bnn_pyro.errors import UserError
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.gradients import local_linear
from bnn_pyro.parts.nets import in_mode, with_weights

#: What :class:`RowNoise` samples by row.
LAYERS = (F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
#: Rows of the passes that find where the rows of x are a layer's inputs: no other dimension is as long in both.
ROWS = (13, 17)


class RowNoise(TorchFunctionMode):
    """Samples layers by row, and notes how weights enter a pass: ``ways`` {site: one way a use}.

    w: {site: a draw of its q, as ``drawn_from``}.   rows: of the pass.   sampling: of :func:`sampling_of`.
    Raises UserError for a site sampled by row that is used again, or otherwise.
    """

    def __init__(self, w: Mapping[str, Tensor], rows: int, sampling: Mapping[str, str]) -> None:
        super().__init__()
        self.w, self.rows = w, rows  # w, whose ids stay theirs
        q = {k: getattr(v, "drawn_from", None) for k, v in w.items() if k in sampling}
        self.q = {k: own for k, v in q.items() if hasattr(own := getattr(v, "base_dist", v), "loc")}
        self.sites = {id(v): k for k, v in w.items() if k in self.q or not sampling}
        self.ways: dict[str, list[str]] = {site: [] for site in w}

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        """A layer's outputs, or what the function gives."""
        used = [self.sites[id(part)] for part in tree_leaves((args, kwargs)) if id(part) in self.sites]
        if getattr(func, "__name__", "") in ("grad", "_make_dual"):  # by noise of f, df/dx is not a drawn weight's
            used = [*self.sites.values()]
        layer = used and func in LAYERS and not kwargs and id(args[0]) not in self.sites and len(args[0]) == self.rows
        output = self._layer(func, *args) if layer else func(*args, **(kwargs or {}))
        for site in used if used and any(isinstance(part, Tensor) for part in tree_leaves(output)) else ():
            if site in self.q and (self.ways[site] or not layer):
                raise UserError(f"'{site}' is used again in a pass of training, or on other inputs than the rows, and "
                                "noise of each row would be wrong; take sampling='weights'")  # fmt: skip
            self.ways[site].append("weights" if not layer else "rows" if args[0].dim() == 2 else "flipout")
        return output

    def _layer(self, func: Any, x: Tensor, w: Tensor, bias: Tensor | None = None, *rest: Any) -> Tensor:
        q, own = (self.q.get(self.sites.get(id(part), "")) for part in (w, bias))
        if q is None:
            return func(x, w, bias, *rest)
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


def sampling_of(net: nn.Module, *inputs: Tensor, training: bool = False) -> dict[str, str]:
    """{parameter: "rows" or "flipout"} of those that each pass uses once, in a layer whose inputs are its rows."""
    # Out of training mode torch has other functions without gradients; with them a net may keep what nothing copies.
    with isolated(0), in_mode(net, training=training), torch.set_grad_enabled(not training):
        w = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
        buffers, passes = {name: b.clone() for name, b in net.named_buffers()}, []
        for x in inputs:
            with RowNoise(w, len(x), {}) as uses:
                with_weights(net, {**buffers, **w}, x)
            passes.append(uses.ways)
    return {site: how for site in w for how in ("rows", "flipout") if all(ways[site] == [how] for ways in passes)}
