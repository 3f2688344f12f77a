"""Batch normalisation of a network whose weights are random: by frozen statistics, or by those of each draw's own.

    frozen   running statistics as they are, in training and prediction
    batch    those of the mini-batch in training; out of it, for each draw of the weights, those of training rows, which
             are kept with the model: what a draw computes is then a function of x and the weights alone

Running averages, which torch predicts with, would mix the statistics of many draws, none of which they belong to
(Maddox et al. 2019, arXiv:1902.02476, recompute them for each draw likewise).
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from bnn_pyro.errors import UserError
from bnn_pyro.parts.own_module import norm_layers

__all__ = ["BATCH_NORM", "BatchStatistics"]

BATCH_NORM = ("batch", "frozen")
#: Training rows whose statistics a draw is normalised by.
ROWS = 1024


class _DrawnNorm(_BatchNorm):
    """By the statistics of the batch in training, else by its buffers, of which gradients can be taken."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
        scale = (self.running_var + self.eps).rsqrt() * (1.0 if self.weight is None else self.weight)
        shift = (0.0 if self.bias is None else self.bias) - self.running_mean * scale
        shape = (-1, *(1 for _ in range(x.dim() - 2)))
        return torch.addcmul(shift.view(shape), x, scale.view(shape))


class BatchStatistics(nn.Module):
    """The mean and the variance at every batch normalisation of ``net`` that draws of the weights have on ``rows``.

    net: out of training mode it is normalised by its buffers, for which ``forward`` has the values.
    rows: (R, *input_shape), none before :meth:`take`.

    Raises UserError for a normalisation that is not over a batch.
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
            layer.__class__ = _DrawnNorm  # of the copy; nothing is averaged in training
        self.register_buffer("rows", torch.empty(0))
        probe = copy.deepcopy(net).to("meta").eval()
        self._seen: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for path, layer in norm_layers(probe).items():
            layer.train().register_forward_pre_hook(partial(self._record, path))
        self._probe = (probe,)  # no submodule: it has no tensors of its own
        self._last: tuple[tuple[Tensor, ...], list[int], dict[str, Tensor]] | None = None

    def _record(self, path: str, _: nn.Module, given: tuple[Tensor, ...]) -> None:
        over = [dim for dim in range(given[0].dim()) if dim != 1]
        self._seen.setdefault(path, []).append((given[0].mean(over), given[0].var(over, correction=0)))

    def take(self, x: Tensor) -> None:
        """Normalise by at most ``ROWS`` of these training rows (N, *input_shape), evenly spaced."""
        self._last = None
        self.rows = x[torch.linspace(0, len(x) - 1, min(len(x), ROWS)).round().long().to(x.device)]

    def forward(self, net: nn.Module, w: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """{buffer: (…, channels)} of draws {parameter: (…, *shape)}; one forward pass over the rows for each draw.

        Raises UserError before :meth:`take`, and where one layer is called several times.
        """
        if not len(self.rows):
            raise UserError("batch statistics need training rows: call model.statistics.take(x_train) before")
        key, versions = tuple(w.values()), [value._version for value in w.values()]
        if self._last is not None and all(map(operator.is_, self._last[0], key)) and self._last[1] == versions:
            return self._last[2]
        shapes = {name: p.shape for name, p in net.named_parameters()}
        lead = torch.broadcast_shapes(*(v.shape[: v.dim() - len(shapes[name])] for name, v in w.items()))
        flat = {name: v.expand(lead + shapes[name]).reshape(-1, *shapes[name]) for name, v in w.items()}
        buffers, pieces = dict(net.named_buffers()), []
        for draw in range(lead.numel()):
            self._seen.clear()
            one = {**buffers, **{name: v[draw] for name, v in flat.items()}}
            functional_call(self._probe[0], one, (self.rows,))
            if twice := [path for path, calls in self._seen.items() if len(calls) > 1]:
                raise UserError(f"'{twice[0]}' normalises several times in one call; use batch_norm='frozen'")
            pieces.append({path: calls[0] for path, calls in self._seen.items()})
        self._seen.clear()
        found = {}
        for path in pieces[0]:
            for i, name in enumerate(("running_mean", "running_var")):
                found[f"{path}.{name}"] = torch.stack([piece[path][i] for piece in pieces]).reshape(*lead, -1)
        # The same draws meet many rows, a few at a time.
        self._last = None if torch.is_grad_enabled() else (key, versions, found)
        return found

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}rows" in state:  # of any number
            self._last = None
            self.rows = torch.empty_like(state[f"{prefix}rows"], device=self.rows.device)
        super()._load_from_state_dict(state, prefix, *args)
