"""Independent noise for each row in training, for random weights of layers that are called once per pass.

    rows      f = x μ + √(x² σ²) ε              x (B, D): local reparametrization (Kingma et al. 2015, arXiv:1506.02557)
    flipout   f = x ∗ μ + r ((s x) ∗ (w − μ))   x (B, …): r, s = ±1 by row and channel (Wen et al. 2018, 1803.04386)
    weights   f = x ∗ w                         all other uses of a weight

The outputs of a row have the same distribution as with drawn weights, so that the ELBO has the same expectation and its
gradient a lower variance. Positions of an image and tokens share the noise: independent noise would be another model.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from bnn_pyro.errors import UserError
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.gradients import local_linear
from bnn_pyro.parts.nets import in_mode, with_weights

#: The functions whose weights :class:`RowNoise` samples by row.
LAYERS = (F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
#: Numbers of rows of two passes: only the first dimension of x has these sizes, which identifies a layer's rows.
ROWS = (13, 17)


class RowNoise(TorchFunctionMode):
    """Samples layers by row, and records in ``ways`` {site: how each use of it was sampled}.

    w: {site: a draw, with its q as the attribute ``drawn_from``}.   rows: number of rows of the pass.
    sampling: the result of :func:`sampling_of`; with {} every use is recorded and none is sampled by row.
    Raises UserError if a site that is sampled by row is used again, or in another way.
    """

    def __init__(self, w: Mapping[str, Tensor], rows: int, sampling: Mapping[str, str]) -> None:
        super().__init__()
        self.w, self.rows = w, rows  # keeps the draws, so that their ids are not reused
        q = {k: getattr(v, "drawn_from", None) for k, v in w.items() if k in sampling}
        self.q = {k: own for k, v in q.items() if hasattr(own := getattr(v, "base_dist", v), "loc")}
        self.sites = {id(v): k for k, v in w.items() if k in self.q or not sampling}
        self.ways: dict[str, list[str]] = {site: [] for site in w}

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        """The outputs of a layer that is sampled by row, or the result of the function."""
        used = [self.sites[id(part)] for part in tree_leaves((args, kwargs)) if id(part) in self.sites]
        if getattr(func, "__name__", "") in ("grad", "_make_dual"):  # noise of f gives wrong derivatives by x
            used = [*self.sites.values()]
        layer = used and func in LAYERS and not kwargs and id(args[0]) not in self.sites and len(args[0]) == self.rows
        layer = layer and (is_compiling() or not is_functorch_wrapped_tensor(args[0]))  # vmap: other axes share them
        output = self._layer(func, *args) if layer else func(*args, **(kwargs or {}))
        for site in used if used and any(isinstance(part, Tensor) for part in tree_leaves(output)) else ():
            if site in self.q and (self.ways[site] or not layer):
                raise UserError(f"'{site}' is used again in a pass of training, or on other inputs than the rows, and "
                                "noise of each row would be wrong; take sampling='weights'")  # fmt: skip
            self.ways[site].append("weights" if not layer else "rows" if args[0].dim() == 2 else "flipout")
        return output

    def _layer(self, func: Any, x: Tensor, w: Tensor, bias: Tensor | None = None, *rest: Any) -> Tensor:
        q, q_bias = (self.q.get(self.sites.get(id(part), "")) for part in (w, bias))
        if q is None:
            return func(x, w, bias, *rest)
        if x.dim() == 2:
            f = local_linear(x, q.loc.mT, q.scale.square().mT, False, torch.Size())
            noisy = bias if q_bias is None else q_bias.loc + q_bias.scale * torch.randn_like(f)
            return f if bias is None else f + noisy.to(f.dtype)
        mean = func(x, q.loc, bias if q_bias is None else q_bias.loc, *rest)
        ones = (part.new_ones(len(part), part.shape[-1 if func is F.linear else 1]) for part in (x, mean))
        signs = [one.random_(2).mul_(2).sub_(1) for one in ones]
        extra = (slice(None), *(None,) * (x.dim() - 2))
        s, r = (sign[extra] if func is F.linear else sign[(..., *extra[1:])] for sign in signs)
        return torch.addcmul(mean, r, func(x * s, w - q.loc, None if q_bias is None else bias - q_bias.loc, *rest))


def sampling_of(net: nn.Module, *inputs: Tensor, training: bool = False) -> dict[str, str]:
    """{parameter: "rows" or "flipout"} of parameters that each pass uses once, in a layer whose inputs are its rows."""
    # Evaluation mode without gradients may call other functions; stored results with gradients could not be copied.
    with isolated(0), in_mode(net, training=training), torch.set_grad_enabled(not training):
        w = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
        buffers, passes = {name: b.clone() for name, b in net.named_buffers()}, []
        for x in inputs:
            with RowNoise(w, len(x), {}) as uses:
                with_weights(net, {**buffers, **w}, x)
            passes.append(uses.ways)
    return {site: way for site in w for way in ("rows", "flipout") if all(ways[site] == [way] for ways in passes)}
