"""The protocol of a variant: a frozen dataclass whose fields are its settings, with two verbs, ``model`` and ``guide``.

To add one: a file here, and a line in ``ZOO``. Its class attributes say the rest: ``summary`` (the idea in one line),
``paper``, and ``has`` (keys of ``inference.NEEDS``, from which follows what methods suit it);
``images_only = True`` where inputs must have a height and a width. Those tuned for a data set go into ``tuned.toml``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import nn

from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.parts.likelihoods import make_likelihood
from bnn_pyro.parts.nets import MLP
from bnn_pyro.parts.priors import BayesianNet
from bnn_pyro.settings import Settings, setting

__all__ = ["Entry", "Network"]


class Entry(Protocol):
    """One Bayesian network: p(y, w | x) and its q(w)."""

    summary: ClassVar[str]
    paper: ClassVar[str]
    has: ClassVar[frozenset[str]]

    def model(self, schema: Schema) -> nn.Module:
        """m with m(x, y=None): draws w, then the site "y" in a plate of len(x). It never learns N.

        Besides: ``initial`` {site: value} where optimisers start. ``parts.priors.BayesianNet`` makes one of any module.
        """
        ...

    def guide(self, model: nn.Module) -> nn.Module | None:
        """q over exactly the model's latent sites, or None."""
        ...


@dataclass(frozen=True)
class Network(Settings):
    """What variants on a network of the package's own share: a fully connected one, and no guide.

    hidden      widths of the hidden layers; () is a linear model
    activation  relu, tanh, sigmoid, leaky_relu or gelu
    bias        in every layer, or in none
    prior       normal:SCALE, fan-in:SCALE, gamma:SHAPE,RATE or scale-mixture:WIDE,NARROW,WEIGHT; of a point estimate
                the weight decay
    noise       regression only: learned, heteroscedastic, or a standard deviation in target units
    """

    hidden: tuple[int, ...] = setting((50,), low=1)
    activation: str = "relu"
    bias: bool = True
    prior: str = "fan-in:1"
    noise: str | float = "learned"

    def net(self, schema: Schema, outputs: int) -> nn.Module:
        """The deterministic network."""
        return MLP(schema.input_shape, self.hidden, outputs, self.activation, self.bias)

    def model(self, schema: Schema) -> BayesianNet:
        """p(y, w | x), out of training mode; see ``Entry.model``."""
        likelihood = make_likelihood(schema, self.noise)
        return BayesianNet(self.net(schema, likelihood.outputs), likelihood, self.prior).eval()

    def guide(self, model: nn.Module) -> nn.Module | None:
        """None: a point estimate needs no q."""
        return None
