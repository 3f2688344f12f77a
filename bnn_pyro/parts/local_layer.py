"""Local reparametrization: Bayesian layers that sample their outputs instead of their weights.

    A ~ Normal(M, V)        pre-activation of X = X·M + √(X²·V) · ε        (Kingma et al. 2015, arXiv:1506.02557)

The density of the output is intractable, but an ELBO does not need it: the expectation of log p − log q is
−KL(q(A) ‖ p(A)). A layer in the guide is q, and a layer at the same site of the model is p. Each of the B rows of the
batch shape has the share KL_factor · KL / B, so that a plate over the rows adds up to one KL. ``TraceMeanField_ELBO``
calls ``kl_divergence``; under ``Trace_ELBO`` the log density of the model's layer is −KL of the guide's layer that
sampled the value, and that of the guide's layer is 0. If a plate scales its sites by N/B, KL_factor must be B/N.

A convolution is an approximation: each position of the output has the correct distribution, but ε is drawn
independently, although positions that share weights are correlated. The ELBO of such a layer is not a bound on the
evidence of the network over its weights, but this is common practice (Molchanov, Ashukha & Vetrov 2017,
arXiv:1701.05369, section 4.4; Shridhar, Laumann & Liwicki 2019, arXiv:1901.02731).
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
    """The activations of a layer with random weights: batch shape (…, B), one row per input.

    X: (…, B, *input), where an input has ``input_dims`` dimensions.   weights: their distribution, of batch shape ();
        in a guide with ``mean`` and ``variance``.   event_shape: shape of the activations of one row.
    non_linearity: applied to the pre-activations; None for none.

    A subclass draws them, reparametrised, in ``pre_activation(sample_shape)``: sample_shape + batch_shape + (…).
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
        self._origin = object()  # identifies this layer in expanded copies, without a reference cycle to self

    def expand(self, batch_shape: torch.Size, _instance: object = None) -> Self:
        """The same layer for a larger batch; each leading index counts the weights' KL once."""
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
        activation.drawn_from = self  # so that the model's layer knows q under Trace_ELBO
        return activation

    def log_prob(self, value: Tensor) -> Tensor:
        """The site's contribution to log p or log q, (…, B): −KL per row in the model, 0 in the guide.

        Raises NotImplementedError for a value that no layer has drawn, as its density is intractable.
        """
        if (q := getattr(value, "drawn_from", None)) is None:
            raise NotImplementedError("the density of a HiddenLayer's output is intractable: use it in model and guide "
                                      "under an ELBO, or sample weights for MCMC (bnn_pyro.MeanField)")  # fmt: skip
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

    adjoin_one: the weights have the event shape (D + 1, H), and their last row is the bias.
    Raises ValueError for shapes that do not match.
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

    weights: of event shape (C·kh·kw, out), or (C·kh·kw + 1, out) with the biases in the last row.
    like: the deterministic convolution with these channels, kernel, stride and padding.
    non_linearity: a function of (…, out, H', W') that may change the last three dimensions, the event shape.
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
    """The output of a Bayesian linear layer, with the arguments of ``pyro.contrib.bnn.HiddenLayer``.

    X: (…, B, D) inputs.   A_mean, A_scale: (D, H) mean and standard deviation of the weights.
    non_linearity: applied to the pre-activations; None for none.
    KL_factor: weight of the KL: B/N for mini-batches of B out of N rows.
    A_prior_scale: standard deviation of the zero-mean prior in :attr:`KL`. The KL of a guide's layer to a model's layer
        uses the A_mean and A_scale of the model's layer instead.
    include_hidden_bias: append a 1 to the output, by which the next layer has a bias.
    weight_space_sampling: draw A itself instead of pre-activations, once per draw; for tests.

    Batch shape (…, B), event shape (H,), or (H + 1,) with the appended 1.
    Raises ValueError for shapes that do not match.
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
