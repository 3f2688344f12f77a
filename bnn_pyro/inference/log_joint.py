"""Where N meets a mini-batch, and nowhere else: the scale of every site of a model or guide, and of a log joint."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn

from bnn_pyro.parts.gamma_prior import GammaNormal
from bnn_pyro.parts.likelihoods import OBSERVED

__all__ = ["Rescale", "log_joints"]


class Rescale(Messenger):
    """Multiply log p(y | x, w) by ``likelihood`` and the log-density of every latent site by ``latent``.

    With ``likelihood = N/B`` the log joint of B random rows estimates that of all N without bias. ``latent`` is the
    temperature T: T = 1 is Bayes, T < 1 a cold posterior (KL charged T times), 0 leaves the likelihood alone. A model
    and its guide must be given the same ``latent``.
    """

    def __init__(self, likelihood: float = 1.0, latent: float = 1.0) -> None:
        super().__init__()
        self.likelihood, self.latent = likelihood, latent

    def _pyro_sample(self, msg: dict) -> None:
        factor = self.likelihood if msg["name"] == OBSERVED else self.latent
        if factor != 1.0:
            msg["scale"] = msg["scale"] * factor


def log_joints(
    model: nn.Module,
    w: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    likelihood: float = 1.0,
    precision: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(log p(w), ``likelihood`` · log p(y | x, w)) of C sets of weights at once, each (C,), in nats.

    w: {site: (C, *shape)}.   x, y: (B, *input_shape) and (B,) for all of them, or (C, B, …), rows of its own for each.
    likelihood: N/B/T where the B rows stand for N, at temperature T.
    precision: {site: (C,)} for sites with a ``GammaNormal`` prior whose precision is given instead of integrated out.
    """
    with _Terms(w, precision or {}) as terms:
        model(x, y)
    return terms.prior, likelihood * terms.likelihood


class _Terms(Messenger):
    """Gives the latent sites their values and adds up log-densities, a sum for each of the C draws.

    What ``poutine.condition`` and a trace do together, without copies of every message: the log joint of a linear
    model takes a few matrix products, and Pyro's own way several times as long.
    """

    def __init__(self, values: Mapping[str, Tensor], precision: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.values, self.precision = values, precision
        self.prior: Tensor | float = 0.0
        self.likelihood: Tensor | float = 0.0

    def _pyro_sample(self, msg: dict) -> None:
        if not msg["is_observed"] and msg["name"] in self.values:
            msg["value"], msg["done"] = self.values[msg["name"]], True

    def _pyro_post_sample(self, msg: dict) -> None:
        if site_is_subsample(msg):
            return
        fn, value, precision = msg["fn"], msg["value"], self.precision.get(msg["name"])
        given = precision is not None and isinstance(fn, GammaNormal)
        term = fn.log_prob_given(value, precision) if given else fn.log_prob(value)
        if msg["mask"] is not None or not (isinstance(msg["scale"], float | int) and msg["scale"] == 1):
            term = scale_and_mask(term, msg["scale"], msg["mask"])
        if term.dim() > 1:
            term = term.flatten(1).sum(1, dtype=torch.float64)  # thousands of rows: float32 would be noise
        if msg["is_observed"]:
            self.likelihood = self.likelihood + term
        else:
            self.prior = self.prior + term
