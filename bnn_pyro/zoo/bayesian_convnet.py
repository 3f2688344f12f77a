"""A small Bayesian convolutional network, trained by local reparametrization of its convolutions.

    W ~ p(W)    f = convnet_W(x)    y ~ likelihood(f)          q(W) = ∏ᵢ Normal(Wᵢ; μᵢ, σᵢ)

Two convolutions with max-pooling and a hidden layer, as LeNet has them. The fitted q is over the weights, and
predictions are those of drawn weights. In training every position of a convolution's output has noise of its own,
where drawn weights share theirs: exact for each position, an approximation for all of them together, so that the
ELBO in the trace is that of the approximation (see ``parts.local_conv``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bnn_pyro.settings import setting
from bnn_pyro.zoo.convnet import Convolutions
from bnn_pyro.zoo.hidden_layer import HiddenLayerNet

__all__ = ["BayesianConvNet"]


@dataclass(frozen=True)
class BayesianConvNet(Convolutions, HiddenLayerNet):
    """Settings of a small convolutional network: those of ``HiddenLayerNet`` and ``Convolutions``.

    hidden  widths of the hidden layers after the convolutions
    """

    hidden: tuple[int, ...] = setting((128,), low=1)
    init_scale: float = setting(0.01, above=0)

    summary: ClassVar[str] = "A small convolutional network with mean-field weights, for images"
    paper: ClassVar[str] = "Shridhar, Laumann & Liwicki 2019, arXiv:1901.02731"
