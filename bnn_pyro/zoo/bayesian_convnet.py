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

from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.parts.convnet import ConvNet, check_convolutions
from bnn_pyro.parts.likelihoods import make_likelihood
from bnn_pyro.parts.local_net import LocalNet
from bnn_pyro.parts.priors import BayesianNet
from bnn_pyro.settings import setting
from bnn_pyro.zoo.hidden_layer import HiddenLayerNet

__all__ = ["BayesianConvNet"]


@dataclass(frozen=True)
class BayesianConvNet(HiddenLayerNet):
    """Settings of a small convolutional network: those of ``HiddenLayerNet``, and of the convolutions.

    channels  of each convolution, which 2 × 2 max-pooling follows
    kernel    height and width of every convolution, in pixels
    padding   pixels of zeros around each one's input; half the kernel keeps the image's size
    hidden    widths of the hidden layers after the convolutions
    """

    hidden: tuple[int, ...] = setting((128,), low=1)
    init_scale: float = setting(0.01, above=0)
    channels: tuple[int, ...] = setting((16, 32), low=1)
    kernel: int = setting(3, low=1)
    padding: int = 1

    summary: ClassVar[str] = "A small convolutional network with mean-field weights, for images"
    paper: ClassVar[str] = "Shridhar, Laumann & Liwicki 2019, arXiv:1901.02731"
    images_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_convolutions(self.channels, self.kernel, self.padding)

    def model(self, schema: Schema) -> LocalNet:
        """p(y, h | x) over activations; ``.weight_space`` is p(y, W | x). See ``Entry.model``.

        Raises UserError for inputs that are no images, or too small for the convolutions.
        """
        likelihood = make_likelihood(schema, self.noise)
        net = ConvNet(
            schema.input_shape,
            self.channels,
            self.hidden,
            likelihood.outputs,
            self.activation,
            self.bias,
            self.kernel,
            self.padding,
        )
        return LocalNet(BayesianNet(net, likelihood, self.prior))
