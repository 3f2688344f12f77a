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
layer in the guide answers 0. A density that is neither is refused.

A plate that scales its sites by N/B, as ``plate(size=N, subsample_size=B)`` does, scales this site as well: give
``KL_factor=B/N``, as one does for an unscaled mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable

import pyro.distributions as dist
import torch
import torch.nn.functional as F
from pyro.distributions import constraints
from torch import Tensor
from torch.distributions import register_kl

__all__ = ["HiddenLayer", "LocalLinear"]


class HiddenLayer(dist.TorchDistribution):
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

    arg_constraints: dict = {}  # noqa: RUF012
    support = constraints.real_vector
    has_rsample = True

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
        if X.dim() < 2 or X.shape[-1] != A_mean.shape[0]:
            raise ValueError(f"X must be (…, B, {A_mean.shape[0]}) for these weights, got {tuple(X.shape)}")
        self.X, self.A_mean, self.A_scale = X, A_mean, A_scale
        self.non_linearity, self.KL_factor, self.A_prior_scale = non_linearity, KL_factor, A_prior_scale
        self.include_hidden_bias, self.weight_space_sampling = include_hidden_bias, weight_space_sampling
        width = A_mean.shape[1] + int(include_hidden_bias)
        super().__init__(X.shape[:-1], torch.Size((width,)), validate_args=False)

    def expand(self, batch_shape: torch.Size, _instance: object = None) -> HiddenLayer:
        """The same layer for a larger batch; the weights' KL is still counted once for each leading index."""
        if torch.Size(batch_shape) == self.batch_shape:
            return self
        return HiddenLayer(
            self.X.expand(*batch_shape, self.X.shape[-1]),
            self.A_mean,
            self.A_scale,
            self.non_linearity,
            self.KL_factor,
            self.A_prior_scale,
            self.include_hidden_bias,
            self.weight_space_sampling,
        )

    @property
    def weights(self) -> dist.Normal:
        """The distribution of A, (D, H) independent Normals."""
        return dist.Normal(self.A_mean, self.A_scale, validate_args=False)

    @property
    def KL(self) -> Tensor:
        """KL(A ‖ Normal(0, A_prior_scale)) of all weights, a scalar in nats, without KL_factor."""
        return _kl_normal(self.A_mean, self.A_scale, torch.zeros(()), torch.as_tensor(self.A_prior_scale))

    def rsample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008 (torch's own signature)
        """Outputs of shape sample_shape + batch_shape + event_shape."""
        shape = torch.Size(sample_shape)
        if self.weight_space_sampling:
            lead = shape + self.batch_shape[:-1]
            noise = torch.randn(lead + self.A_mean.shape, dtype=self.A_mean.dtype, device=self.A_mean.device)
            activation = self.X @ (self.A_mean + self.A_scale * noise)
        else:
            activation = LocalLinear.apply(self.X, self.A_mean, self.A_scale, shape)
        if self.non_linearity is not None:
            activation = self.non_linearity(activation)
        if self.include_hidden_bias:
            activation = F.pad(activation, (0, 1), value=1.0)
        activation.drawn_from = self  # lets the model's layer find q under Trace_ELBO
        return activation

    def log_prob(self, value: Tensor) -> Tensor:
        """log p − log q's share of this site, (…, B): −KL per row in the model, 0 in the guide.

        Raises NotImplementedError for a value that no HiddenLayer has drawn: its density is not tractable.
        """
        q = getattr(value, "drawn_from", None)
        if q is None:
            raise NotImplementedError(
                "a HiddenLayer has no tractable density of its output: use it in model and guide under an ELBO "
                "(TraceMeanField_ELBO, Trace_ELBO), or sample weights instead (bnn_pyro.MeanField) for MCMC"
            )
        if q is self or (q.A_mean is self.A_mean and q.A_scale is self.A_scale):
            return self.X.new_zeros(self.batch_shape)
        return -_kl_rows(q, self)


class LocalLinear(torch.autograd.Function):
    """Pre-activations mean + √variance·ε and their gradients, with nothing larger than an activation kept.

    Backward, for a gradient G of the output and R = G·ε / (2·std) that of the variance (0 where the variance is 0):

        dA_mean = Xᵀ G      dA_scale = 2·A_scale·(X²)ᵀ R      dX = G A_meanᵀ + 2·X·(R (A_scale²)ᵀ)

    and d of the standard deviation where the variance is exactly 0 is taken as 0, the value of its symmetric
    derivative: there the output does not depend on A_scale (X = 0) or ε averages it away.
    """

    @staticmethod
    def forward(ctx, X: Tensor, A_mean: Tensor, A_scale: Tensor, sample_shape: torch.Size) -> Tensor:
        """Sample; shapes as in HiddenLayer, output sample_shape + (…, B, H)."""
        std = (X.square() @ A_scale.square()).sqrt_()
        noise = torch.randn(sample_shape + std.shape, dtype=std.dtype, device=std.device)
        output = torch.addcmul(X @ A_mean, std, noise)
        ctx.save_for_backward(X, A_mean, A_scale, noise, std)
        return output

    @staticmethod
    def backward(ctx, G: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """Gradients for X, A_mean, A_scale."""
        X, A_mean, A_scale, noise, std = ctx.saved_tensors
        needs = ctx.needs_input_grad
        R = torch.where(std > 0, G * noise / (2 * std), torch.zeros((), dtype=std.dtype, device=std.device))
        extra = G.dim() - std.dim()
        if extra:  # many draws of one input: their gradients add
            G, R = G.sum(tuple(range(extra))), R.sum(tuple(range(extra)))
        flat_X, flat_G, flat_R = X.reshape(-1, X.shape[-1]), G.reshape(-1, G.shape[-1]), R.reshape(-1, R.shape[-1])
        d_mean = flat_X.mT @ flat_G if needs[1] else None
        d_scale = 2 * A_scale * (flat_X.square().mT @ flat_R) if needs[2] else None
        d_X = G @ A_mean.mT + 2 * X * (R @ A_scale.square().mT) if needs[0] else None
        return d_X, d_mean, d_scale, None


def _kl_normal(mean: Tensor, scale: Tensor, prior_mean: Tensor, prior_scale: Tensor) -> Tensor:
    """Σ KL(Normal(mean, scale) ‖ Normal(prior_mean, prior_scale)), in nats."""
    ratio = scale / prior_scale
    return 0.5 * (ratio.square() + ((mean - prior_mean) / prior_scale).square() - 1 - 2 * ratio.log()).sum()


@register_kl(HiddenLayer, HiddenLayer)
def _kl_rows(q: HiddenLayer, p: HiddenLayer) -> Tensor:
    """KL_factor · KL(q(A) ‖ p(A)) / B for each row, of q's batch shape; a plate over the rows adds up to one KL."""
    if q.A_mean.shape != p.A_mean.shape:
        raise ValueError(
            f"guide and model have weights of other shapes at one site: {tuple(q.A_mean.shape)} "
            f"and {tuple(p.A_mean.shape)}"
        )
    whole = q.KL_factor * _kl_normal(q.A_mean, q.A_scale, p.A_mean, p.A_scale)
    return (whole / q.batch_shape[-1]).expand(q.batch_shape)
