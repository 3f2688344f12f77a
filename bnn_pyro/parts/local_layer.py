"""Local reparametrization: what a Bayesian layer needs to sample its output instead of its weights.

:class:`LocalLayer` is the Pyro distribution over a layer's activations that the layers of this package share: its
shapes, its sampling, and how the KL of its weights enters an ELBO. :class:`LinearLayer` is the fully connected one.
Kingma, Salimans & Welling 2015, arXiv:1506.02557.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from torch import Tensor
from torch.distributions import Distribution, kl_divergence, register_kl

from bnn_pyro.parts.weights import CentredNormal

__all__ = ["LinearLayer", "LocalLayer"]


class LocalLayer(dist.TorchDistribution):
    """The activations of a layer whose weights are random: batch shape (…, B), one row per input.

    The density of activations is not tractable and inside an ELBO not needed: log p − log q integrates to −KL of the
    weights. A share of 1/B of it belongs to each row, so that a plate over the rows adds up to one KL; see
    ``parts.hidden_layer``.

    X: (…, B, *input), inputs of ``input_dims`` dimensions each.   weights: their distribution, of batch shape ();
        in a guide with ``mean`` and ``variance``.   event_shape: of one row's activations.
    non_linearity: applied to the pre-activations; None for none.   KL_factor: weight of the KL.
    """

    arg_constraints: dict = {}  # noqa: RUF012
    has_rsample = True

    def __init__(
        self,
        X: Tensor,
        weights: dist.TorchDistribution,
        event_shape: torch.Size,
        input_dims: int,
        non_linearity: Callable[[Tensor], Tensor] | None,
        KL_factor: float,
    ) -> None:
        self.X, self.weights, self.input_dims = X, weights, input_dims
        self.non_linearity, self.KL_factor = non_linearity, KL_factor
        self._origin = object()  # the same one in every expanded copy; not self: that would be a reference cycle
        super().__init__(X.shape[: X.dim() - input_dims], event_shape, validate_args=False)

    def weights_kl(self, prior: dist.TorchDistribution) -> Tensor:
        """KL(weights ‖ prior), a scalar in nats."""
        return kl_divergence(self.weights, prior)

    @constraints.dependent_property(is_discrete=False)
    def support(self) -> constraints.Constraint:
        """Reals, as one event."""
        return constraints.independent(constraints.real, len(self.event_shape))

    def expand(self, batch_shape: torch.Size, _instance: object = None) -> LocalLayer:
        """The same layer for a larger batch; the weights' KL is still counted once for each leading index."""
        batch_shape = torch.Size(batch_shape)
        if batch_shape == self.batch_shape:
            return self
        new = copy.copy(self)
        new.X = self.X.expand(batch_shape + self.X.shape[self.X.dim() - self.input_dims :])
        new._batch_shape = batch_shape
        return new

    def pre_activation(self, sample_shape: torch.Size) -> Tensor:
        """Reparametrised draws before the non-linearity, sample_shape + batch_shape + (…)."""
        raise NotImplementedError

    def rsample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008 (torch's own signature)
        """Activations of shape sample_shape + batch_shape + event_shape."""
        activation = self.pre_activation(torch.Size(sample_shape))
        if self.non_linearity is not None:
            activation = self.non_linearity(activation)
        activation.drawn_from = self  # lets the model's layer find q under Trace_ELBO
        return activation

    def log_prob(self, value: Tensor) -> Tensor:
        """log p − log q's share of this site, (…, B): −KL per row in the model, 0 in the guide.

        Raises NotImplementedError for a value that no layer has drawn: its density is not tractable.
        """
        q = getattr(value, "drawn_from", None)
        if q is None:
            raise NotImplementedError(
                "a HiddenLayer has no tractable density of its output: use it in model and guide under an ELBO "
                "(TraceMeanField_ELBO, Trace_ELBO), or sample weights instead (bnn_pyro.MeanField) for MCMC"
            )
        return self.X.new_zeros(self.batch_shape) if q._origin is self._origin else -kl_divergence(q, self)


@register_kl(LocalLayer, LocalLayer)
def _kl_rows(q: LocalLayer, p: LocalLayer) -> Tensor:
    """KL_factor · KL(q(w) ‖ p(w)) / B for each row, of q's batch shape; a plate over the rows adds up to one KL."""
    return (q.weights_kl(p.weights) * (q.KL_factor / q.batch_shape[-1])).expand(q.batch_shape)


@register_kl(LocalLayer, Distribution)
def _kl_of_another_kind(q: LocalLayer, p: Distribution) -> Tensor:
    raise ValueError(
        f"the guide samples this site from a {type(q).__name__}, the model from a {type(p).__name__}: the KL of the "
        "weights needs the prior of the weights, so make the model's site a HiddenLayer as well"
    )


class LinearLayer(LocalLayer):
    """The output of a Bayesian linear layer: X (…, B, D) and weights of event shape (D, H) to (…, B, H).

    adjoin_one: a 1 joins every row of X, whose weights, the last row of (D + 1, H), are the bias.
    prior_scale: in a guide, the standard deviation, () or (D, 1), of the CentredNormal that the model's layer is
        expected to have: the KL to it then comes with the output, which is the cheapest. A layer that turns out to
        have another prior is no mistake, its KL is computed by itself.

    Raises ValueError where the shapes do not fit.
    """

    def __init__(
        self,
        X: Tensor,
        weights: dist.TorchDistribution,
        non_linearity: Callable[[Tensor], Tensor] | None = None,
        KL_factor: float = 1.0,
        adjoin_one: bool = False,
        prior_scale: Tensor | None = None,
    ) -> None:
        D, H = weights.event_shape
        D -= adjoin_one
        self.adjoin_one, self.prior_scale = adjoin_one, prior_scale
        self._kl: Tensor | None = None
        if X.dim() < 2 or X.shape[-1] != D:
            raise ValueError(f"X must be (…, B, {D}) for these weights, got {tuple(X.shape)}")
        super().__init__(X, weights, torch.Size((H,)), 1, non_linearity, KL_factor)

    def pre_activation(self, sample_shape: torch.Size) -> Tensor:
        """Draws of X A, sample_shape + (…, B, H)."""
        output, self._kl = self.weights.linear(self.X, self.adjoin_one, sample_shape, self.prior_scale)
        return output

    def weights_kl(self, prior: dist.TorchDistribution) -> Tensor:
        """KL(weights ‖ prior), a scalar in nats: the one made with the output, where it is of this very prior."""
        known = self._kl is not None and isinstance(prior, CentredNormal) and prior.scale is self.prior_scale
        if known and (self._kl.requires_grad or not torch.is_grad_enabled()):  # not one of a draw without gradients
            return self._kl
        return super().weights_kl(prior)
