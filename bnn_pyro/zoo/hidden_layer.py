"""Networks by local reparametrization: Bayesian layers that sample activations, not weights.

    W ~ p(W)    f = net_W(x)    y ~ likelihood(f)          q(W) = ∏ᵢ Normal(Wᵢ; μᵢ, σᵢ)

The network and the posterior family are those of mean-field weights; the ELBO is the same number, its gradient less
noisy, because every row of a mini-batch has noise of its own (Kingma, Salimans & Welling 2015, arXiv:1506.02557).
Model and guide meet in activations, for training; the fitted q is over the weights.

With p(W) ∝ ∏ 1/|W| and σ² = α μ² it is variational dropout: Gaussian dropout whose variance α ≤ 1 is learned for a
layer, for each input unit of it, or for each weight (section 3 there). With a free σ it is the sparse kind: weights
that the data do not need become noise around 0 (Molchanov, Ashukha & Vetrov 2017, arXiv:1701.05369).

The convolutional network has two convolutions with max-pooling and a hidden layer, as LeNet. In training every position
of a convolution's output has noise of its own, where drawn weights share theirs: exact for each position, an
approximation for all of them together, so that the ELBO in the trace is that of the approximation (see
``parts.local_layer``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.errors import UserError
from bnn_pyro.parts.local_net import SCALES, LocalGuide, LocalNet
from bnn_pyro.settings import setting
from bnn_pyro.zoo.networks import Convolutions, MeanField

__all__ = ["BayesianConvNet", "HiddenLayerNet", "SparseDropout", "VariationalDropout"]


@dataclass(frozen=True)
class HiddenLayerNet(MeanField):
    """Settings of a network of hidden layers: those of ``MeanField``, and how σ depends on the mean.

    activation  leaky_relu, relu, tanh, sigmoid or gelu
    prior       by-target, normal:SCALE, fan-in:SCALE or log-uniform
    scale       free: a σ for every weight; layer, unit or weight: σ = √α·|mean|, with one α < 1 for each of these
    init_scale  σ of every weight where training starts, or α
    """

    activation: str = "leaky_relu"
    init_scale: float = setting(0.01, above=0)
    scale: str = setting("free", choices=SCALES)

    summary: ClassVar[str] = "HiddenLayer: mean-field weights that train on sampled activations"
    paper: ClassVar[str] = "Kingma, Salimans & Welling 2015, arXiv:1506.02557"
    has: ClassVar[frozenset[str]] = frozenset({"guide"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale != "free" and self.init_scale >= 1:
            raise UserError(f"init_scale is the first α of variational dropout and below 1, got {self.init_scale}")

    def model(self, schema: Schema) -> LocalNet:
        """p(y, h | x) over activations; ``.weight_space`` is p(y, W | x). See ``Entry.model``."""
        return LocalNet(super().model(schema))

    def guide(self, model: nn.Module) -> LocalGuide:
        """q(h | x), starting at the network's own initial weights; ``.weight_space`` is q(W). See ``Entry.guide``."""
        return LocalGuide(model, self.scale, self.init_scale)


@dataclass(frozen=True)
class VariationalDropout(HiddenLayerNet):
    """Settings of a network with variational dropout: those of ``HiddenLayerNet``; init_scale is the first α."""

    prior: str = "log-uniform"
    scale: str = setting("layer", choices=SCALES)
    init_scale: float = setting(0.05, above=0)

    summary: ClassVar[str] = "Gaussian dropout with a learned rate (variational dropout)"
    paper: ClassVar[str] = "Kingma, Salimans & Welling 2015, arXiv:1506.02557"


@dataclass(frozen=True)
class SparseDropout(HiddenLayerNet):
    """Settings of a network with sparse variational dropout: those of ``HiddenLayerNet``."""

    prior: str = "log-uniform"

    summary: ClassVar[str] = "A dropout rate for every weight, unbounded, which removes weights"
    paper: ClassVar[str] = "Molchanov, Ashukha & Vetrov 2017, arXiv:1701.05369"


@dataclass(frozen=True)
class BayesianConvNet(Convolutions, HiddenLayerNet):
    """Settings of a small convolutional network: those of ``HiddenLayerNet`` and ``Convolutions``.

    hidden  widths of the hidden layers after the convolutions
    """

    hidden: tuple[int, ...] = setting((128,), low=1)

    summary: ClassVar[str] = "A small convolutional network with mean-field weights, for images"
    paper: ClassVar[str] = "Shridhar, Laumann & Liwicki 2019, arXiv:1901.02731"
