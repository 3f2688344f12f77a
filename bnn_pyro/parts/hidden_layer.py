r"""A Bayesian linear layer as one Pyro distribution over its output, by local reparametrization.

    A ~ Normal(A_mean, A_scale)        output = non_linearity(X A)

Given X, the pre-activation of row b and unit h is itself Normal, so it is sampled instead of the weights (Kingma,
Salimans & Welling 2015, arXiv:1506.02557, equation 6):

    mean = X·A_mean        variance = X²·A_scale²        pre-activation = mean + √variance · ε

two matrix products, with fresh noise for every row.

**The KL.** The density of the output is not tractable, and inside an ELBO it is not needed: log p − log q integrates
to −KL(q(A) ‖ p(A)), the KL of the two weight distributions, whatever the activations. A layer in the guide is q, the
one at the same site of the model is p, and the pair contributes

    Σ_rows  KL_factor · KL(q(A) ‖ p(A)) / B  =  KL_factor · KL(q(A) ‖ p(A))

exactly once: a share of 1/B for each of the B rows of the site's batch shape, so that a plate over the rows adds up to
one KL and not to B of them. ``TraceMeanField_ELBO`` takes it from ``kl_divergence``, which is registered for the pair.
Under ``Trace_ELBO`` and its kin the layer in the model finds the layer that sampled its value and answers −KL; the
layer in the guide answers 0. A density that is neither is refused, and so is, by ``TraceMeanField_ELBO``, a layer in
the guide alone; ``Trace_ELBO`` does not compare the two sites and cannot tell: give it a layer in both.

A plate that scales its sites by N/B, as ``plate(size=N, subsample_size=B)`` does, scales this site as well: give
``KL_factor=B/N``, as one does for an unscaled mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import kl_divergence

from bnn_pyro.parts.local_layer import LinearLayer
from bnn_pyro.parts.weights import CentredNormal, NormalWeights

__all__ = ["HiddenLayer"]


class HiddenLayer(LinearLayer):
    """The output of a Bayesian linear layer; arguments as those of ``pyro.contrib.bnn.HiddenLayer``.

    X: (…, B, D) inputs.   A_mean, A_scale: (D, H) mean and standard deviation of the weights.
    non_linearity: applied to the pre-activations; None for none.
    KL_factor: weight of the KL: B/N for mini-batches of B out of N rows.
    A_prior_scale: standard deviation of the zero-mean prior that :attr:`KL` refers to; between two layers at one site
        the prior is the model's layer, A_mean and A_scale of it.
    include_hidden_bias: adjoin a 1 to the output, which is the next layer's bias.
    weight_space_sampling: draw A itself, one for every draw, instead of pre-activations; for tests.

    Batch shape (…, B), event shape (H,), or (H + 1,) with the adjoined 1.

    Raises ValueError where the shapes do not fit.
    """

    def __init__(
        self,
        X: Tensor,
        A_mean: Tensor,
        A_scale: Tensor,
        non_linearity: Callable[[Tensor], Tensor] | None = F.relu,
        KL_factor: float = 1.0,
        A_prior_scale: float | Tensor = 1.0,
        include_hidden_bias: bool = True,
        weight_space_sampling: bool = False,
    ) -> None:
        if A_mean.dim() != 2 or A_scale.shape != A_mean.shape:
            raise ValueError(
                f"A_mean and A_scale must both be (D, H), got {tuple(A_mean.shape)} and {tuple(A_scale.shape)}"
            )
        self.A_mean, self.A_scale, self.A_prior_scale = A_mean, A_scale, A_prior_scale
        self.include_hidden_bias, self.weight_space_sampling = include_hidden_bias, weight_space_sampling
        super().__init__(X, NormalWeights(A_mean, A_scale), non_linearity, KL_factor)
        if include_hidden_bias:
            self._event_shape = torch.Size((A_mean.shape[1] + 1,))

    @property
    def KL(self) -> Tensor:
        """KL(A ‖ Normal(0, A_prior_scale)) of all weights, a scalar in nats, without KL_factor."""
        prior_scale = torch.as_tensor(self.A_prior_scale, dtype=self.A_mean.dtype, device=self.A_mean.device)
        return kl_divergence(self.weights, CentredNormal(prior_scale, self.A_mean.shape))

    def pre_activation(self, sample_shape: torch.Size) -> Tensor:
        """Draws of X A, sample_shape + (…, B, H)."""
        if self.weight_space_sampling:
            return self.X @ self.weights.rsample(sample_shape + self.batch_shape[:-1])
        return super().pre_activation(sample_shape)

    def rsample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008 (torch's own signature)
        """Outputs of shape sample_shape + batch_shape + event_shape."""
        output = super().rsample(sample_shape)
        if self.include_hidden_bias:
            output = F.pad(output, (0, 1), value=1.0)
            output.drawn_from = self
        return output
