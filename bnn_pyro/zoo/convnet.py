"""The deterministic convolutional network: a point estimate of every weight, with dropout where it is fully connected.

    ŵ = argmax_w log p(y | x, w) + log p(w)

It is the baseline of what is Bayesian on images, and what a Bayesian last layer stands on. Training stops early: the
weights are those of the epoch that predicted the validation rows best.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.parts.convnet import ConvNet as Net
from bnn_pyro.parts.convnet import check_convolutions
from bnn_pyro.parts.likelihoods import make_likelihood
from bnn_pyro.parts.priors import BayesianNet
from bnn_pyro.settings import Settings, setting

__all__ = ["ConvNet"]


@dataclass(frozen=True)
class ConvNet(Settings):
    """Settings of a deterministic convolutional network.

    channels    of each convolution, which 2 × 2 max-pooling follows
    kernel      height and width of every convolution, in pixels
    padding     pixels of zeros around each one's input; half the kernel keeps the image's size
    hidden      widths of the hidden layers after the convolutions; the last is that of the features
    activation  relu, leaky_relu, tanh, sigmoid or gelu
    bias        in every layer, or in none
    prior       normal:SCALE, fan-in:SCALE or scale-mixture:WIDE,NARROW,WEIGHT: the weight decay
    noise       regression only: learned, heteroscedastic, or a standard deviation in target units
    dropout     share of the inputs of every fully connected layer that training removes; 0 for none
    """

    channels: tuple[int, ...] = setting((16, 32), low=1)
    kernel: int = setting(3, low=1)
    padding: int = 1
    hidden: tuple[int, ...] = setting((256,), low=1)
    activation: str = "relu"
    bias: bool = True
    prior: str = "fan-in:1"
    noise: str | float = "learned"
    dropout: float = setting(0.5, low=0, below=1)

    summary: ClassVar[str] = "The deterministic convolutional network: one point estimate, or an ensemble of them"
    paper: ClassVar[str] = "LeCun, Bottou, Bengio & Haffner 1998, doi:10.1109/5.726791"
    has: ClassVar[frozenset[str]] = frozenset({"weights", "deterministic"})
    images_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_convolutions(self.channels, self.kernel, self.padding)

    def model(self, schema: Schema) -> BayesianNet:
        """p(y, w | x), out of training mode; see ``Entry.model``. Raises UserError for inputs that are no images."""
        likelihood = make_likelihood(schema, self.noise)
        net = Net(
            schema.input_shape,
            self.channels,
            self.hidden,
            likelihood.outputs,
            self.activation,
            self.bias,
            self.kernel,
            self.padding,
            self.dropout,
        )
        return BayesianNet(net, likelihood, self.prior).eval()

    def guide(self, model: nn.Module) -> None:
        """None: a point estimate needs no q."""
        return None
