"""What given weights say of rows that did not train: log-likelihoods, a few rows at a time, without gradients."""

from __future__ import annotations

from collections.abc import Mapping

import pyro.poutine as poutine
import torch
from torch import Tensor, nn

from bnn_pyro.parts.likelihoods import ReadLikelihood
from bnn_pyro.parts.priors import widest_activation

__all__ = ["log_likelihood"]

#: Bytes that the widest activation of one chunk may take.
MAX_MEMORY = 64 * 2**20


@torch.no_grad()
def log_likelihood(model: nn.Module, weights: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """log p(y_n | x_n, w_s) in nats, (S, B), for weights {site: (S, *shape)}."""
    draws = next(iter(weights.values())).shape[0]
    rows = max(1, MAX_MEMORY // (4 * draws * widest_activation(model, x)))
    found = []
    for x_part, y_part in zip(x.split(rows), y.split(rows), strict=True):
        with ReadLikelihood() as read, poutine.condition(data=dict(weights)):
            model(x_part)
        found.append(read.mixture(read.likelihood).log_probs(y_part).expand(draws, len(x_part)))
    return torch.cat(found, 1)
