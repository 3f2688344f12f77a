"""Local reparametrization: Bayesian layers that sample their outputs instead of their weights.

    A ~ Normal(M, V)        pre-activation of X = X·M + √(X²·V) · ε        (Kingma et al. 2015, arXiv:1506.02557)

The density of the output is not tractable, and inside an ELBO it is not needed: log p − log q integrates to
−KL(q(A) ‖ p(A)). A layer in the guide is q, the one at the same site of the model is p, and each of the B rows of the
batch shape has a share of KL_factor · KL / B, so that a plate over the rows adds up to one KL. ``TraceMeanField_ELBO``
takes it from ``kl_divergence``; under ``Trace_ELBO`` the layer in the model finds the layer that sampled its value and
answers −KL, the one in the guide 0: give it a layer in both. Where a plate scales its sites by N/B, KL_factor is B/N.

A convolution is not exact: each position of its output has exactly the distribution that sampled weights give it, but
ε is drawn for each by itself, where positions that share weights are correlated. An ELBO made of this layer is then no
bound on the evidence of the network over its weights; it is the usual way all the same (Molchanov, Ashukha & Vetrov
2017, arXiv:1701.05369, section 4.4; Shridhar, Laumann & Liwicki 2019, arXiv:1901.02731).
"""

from collections.abc import Callable
from functools import lru_cache
from typing import ClassVar, Self

import pyro.distributions as dist
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Distribution, kl_divergence, register_kl

from bnn_pyro.parts.gradients import local_conv2d
from bnn_pyro.parts.weights import ArrayDistribution, CentredNormal, NormalWeights


class LocalLayer(ArrayDistribution):
    """The activations of a layer whose weights are random: batch shape (…, B), one row per input.

    X: (…, B, *input), inputs of ``input_dims`` dimensions each.   weights: their distribution, of batch shape ();
        in a guide with ``mean`` and ``variance``.   event_shape: of one row's activations.
    non_linearity: applied to the pre-activations; None for none.

    A subclass draws these in ``pre_activation(sample_shape)``, sample_shape + batch_shape + (…), reparametrised.
    """

    input_dims: ClassVar[int] = 1
    include_hidden_bias = False
    KL_factor: float = 1.0

    def __init__(
        self, X: Tensor, weights: dist.TorchDistribution, event_shape: torch.Size,
        non_linearity: Callable[[Tensor], Tensor] | None,
    ) -> None:  # fmt: skip
        super().__init__(event_shape)
        self.X, self.weights, self.non_linearity = X, weights, non_linearity
        self._batch_shape = X.shape[: X.dim() - self.input_dims]
        self._origin = object()  # the same one in every expanded copy; not self: that would be a reference cycle

    def expand(self, batch_shape: torch.Size, _instance: object = None) -> Self:
        """The same layer for a larger batch; the weights' KL is still counted once for each leading index."""
        new = super().expand(batch_shape)
        new.X = self.X.expand(new.batch_shape + self.X.shape[self.X.dim() - self.input_dims :])
        return new

    def rsample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008 (torch's own signature)
        """Activations of shape sample_shape + batch_shape + event_shape."""
        activation = self.pre_activation(torch.Size(sample_shape))
        if self.non_linearity is not None:
            activation = self.non_linearity(activation)
        if self.include_hidden_bias:
            activation = F.pad(activation, (0, 1), value=1.0)
        activation.drawn_from = self  # lets the model's layer find q under Trace_ELBO
        return activation

    def log_prob(self, value: Tensor) -> Tensor:
        """log p − log q's share of this site, (…, B): −KL per row in the model, 0 in the guide.

        Raises NotImplementedError for a value that no layer has drawn: its density is not tractable.
        """
        if (q := getattr(value, "drawn_from", None)) is None:
            raise NotImplementedError("a HiddenLayer has no tractable density of its output: use it in model and guide "
                                      "under an ELBO (TraceMeanField_ELBO, Trace_ELBO), or sample weights instead "
                                      "(bnn_pyro.MeanField) for MCMC")  # fmt: skip
        return self.X.new_zeros(self.batch_shape) if q._origin is self._origin else -kl_divergence(q, self)


@register_kl(LocalLayer, LocalLayer)
def _kl_rows(q: LocalLayer, p: LocalLayer) -> Tensor:
    """KL_factor · KL(q(w) ‖ p(w)) / B for each row, of q's batch shape; a plate over the rows adds up to one KL."""
    return (kl_divergence(q.weights, p.weights) * (q.KL_factor / q.batch_shape[-1])).expand(q.batch_shape)


@register_kl(LocalLayer, Distribution)
def _kl_of_another_kind(q: LocalLayer, p: Distribution) -> Tensor:
    raise ValueError(f"the guide samples this site from a {type(q).__name__}, the model from a {type(p).__name__}: the "
                     "KL of the weights needs their prior, so make the model's site a HiddenLayer as well")  # fmt: skip


class LinearLayer(LocalLayer):
    """The output of a Bayesian linear layer: X (…, B, D) and weights of event shape (D, H) to (…, B, H).

    adjoin_one: a 1 joins every row of X, whose weights, the last row of (D + 1, H), are the bias.
    Raises ValueError where the shapes do not fit.
    """

    def __init__(
        self, X: Tensor, weights: dist.TorchDistribution, non_linearity: Callable[[Tensor], Tensor] | None = None,
        adjoin_one: bool = False,
    ) -> None:  # fmt: skip
        D, H = weights.event_shape
        D -= adjoin_one
        if X.dim() < 2 or X.shape[-1] != D:
            raise ValueError(f"X must be (…, B, {D}) for these weights, got {tuple(X.shape)}")
        super().__init__(X, weights, torch.Size((H,)), non_linearity)
        self.adjoin_one = adjoin_one

    def pre_activation(self, sample_shape: torch.Size) -> Tensor:
        """Draws of X A, sample_shape + (…, B, H)."""
        return self.weights.linear(self.X, self.adjoin_one, sample_shape)


class Conv2dLayer(LocalLayer):
    """The output of a Bayesian convolution: X (…, B, C, H, W) to non_linearity of (…, B, out, H', W').

    weights: of event shape (C·kh·kw, out), or (C·kh·kw + 1, out) whose last row are the biases.
    like: the deterministic convolution of these channels, kernel, stride and padding.
    non_linearity: of (…, out, H', W'), may change these three dimensions; the event shape is what it makes of them.
    """

    input_dims = 3

    def __init__(
        self, X: Tensor, weights: dist.TorchDistribution, like: nn.Conv2d,
        non_linearity: Callable[[Tensor], Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.geometry = like.weight.shape, like.stride, like.padding
        super().__init__(X, weights, _event_shape(X.shape[-3:], self.geometry, non_linearity), non_linearity)

    def pre_activation(self, sample_shape: torch.Size) -> Tensor:
        """Draws of X ∗ W, sample_shape + (…, B, out, H', W')."""
        X = self.X.flatten(0, -4)
        sampled = local_conv2d(X, self.weights.mean, self.weights.variance, self.geometry, sample_shape)
        return sampled.unflatten(len(sample_shape), self.batch_shape)


@lru_cache(maxsize=16)  # its keys hold networks
def _event_shape(image: torch.Size, geometry: tuple, non_linearity: Callable[[Tensor], Tensor] | None) -> torch.Size:
    """The shape of one row's activations, without computing any."""
    kernel, stride, padding = geometry
    X, W = (torch.empty(shape, device="meta") for shape in ((1, *image), kernel))
    activation = F.conv2d(X, W, stride=stride, padding=padding)
    return (activation if non_linearity is None else non_linearity(activation)).shape[1:]


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
        self, X: Tensor, A_mean: Tensor, A_scale: Tensor, non_linearity: Callable[[Tensor], Tensor] | None = F.relu,
        KL_factor: float = 1.0, A_prior_scale: float | Tensor = 1.0, include_hidden_bias: bool = True,
        weight_space_sampling: bool = False,
    ) -> None:  # fmt: skip
        if A_mean.dim() != 2 or A_scale.shape != A_mean.shape:
            raise ValueError(f"A_mean and A_scale must be (D, H), got {tuple(A_mean.shape)} and {tuple(A_scale.shape)}")
        super().__init__(X, NormalWeights(A_mean, A_scale), non_linearity)
        self.KL_factor = KL_factor
        self.A_mean, self.A_scale, self.A_prior_scale = A_mean, A_scale, A_prior_scale
        self.include_hidden_bias, self.weight_space_sampling = include_hidden_bias, weight_space_sampling
        self._event_shape = torch.Size((A_mean.shape[1] + include_hidden_bias,))

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
