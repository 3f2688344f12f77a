"""The deterministic convolutional network: a point estimate of every weight, with dropout where it is fully connected.

    ŵ = argmax_w log p(y | x, w) + log p(w)

It is the baseline of what is Bayesian on images, and the backbone of a Bayesian last layer. Training stops early: the
weights are those of the epoch that predicted the validation rows best.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.errors import UserError
from bnn_pyro.parts import nets
from bnn_pyro.settings import Settings, setting
from bnn_pyro.zoo.mean_field import Network

__all__ = ["ConvNet", "Convolutions"]


@dataclass(frozen=True)
class Convolutions(Settings):
    """Convolutions before the fully connected layers of a :class:`Network`.

    channels  of each convolution, which 2 × 2 max-pooling follows
    kernel    height and width of every convolution, in pixels
    padding   pixels of zeros around each one's input; half the kernel keeps the image's size
    """

    channels: tuple[int, ...] = setting((16, 32), low=1)
    kernel: int = setting(3, low=1)
    padding: int = 1

    images_only: ClassVar[bool] = True
    dropout: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.channels:
            raise UserError("channels: one or more numbers, got none; for a network without convolutions take mlp")
        if not 0 <= self.padding < self.kernel:
            raise UserError(f"padding must lie between 0 and less than the kernel of {self.kernel}, got {self.padding}")

    def net(self, schema: Schema, outputs: int) -> nets.ConvNet:
        """The deterministic network. Raises UserError for inputs that are no images, or too small for it."""
        layers = schema.input_shape, self.channels, self.hidden, outputs
        return nets.ConvNet(*layers, self.activation, self.bias, self.kernel, self.padding, self.dropout)


@dataclass(frozen=True)
class ConvNet(Convolutions, Network):
    """Settings of a deterministic convolutional network: those of ``Network`` and ``Convolutions``.

    hidden   widths of the hidden layers after the convolutions; the last is that of the features
    dropout  share of the inputs of every fully connected layer that training removes; 0 for none
    """

    hidden: tuple[int, ...] = setting((256,), low=1)
    dropout: float = setting(0.5, low=0, below=1)

    summary: ClassVar[str] = "The deterministic convolutional network: one point estimate, or an ensemble of them"
    paper: ClassVar[str] = "LeCun, Bottou, Bengio & Haffner 1998, doi:10.1109/5.726791"
    has: ClassVar[frozenset[str]] = frozenset({"weights", "deterministic"})
