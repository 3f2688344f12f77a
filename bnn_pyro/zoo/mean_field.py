"""Mean-field Normal weights: every weight its own mean and standard deviation (Bayes by Backprop).

    w ~ p(w)    f = net_w(x)    y ~ likelihood(f)          q(w) = ∏ᵢ Normal(wᵢ; μᵢ, softplus(ρᵢ))

Blundell, Cornebise, Kavukcuoglu & Wierstra 2015, arXiv:1505.05424. The model is an ordinary Pyro model that any
method takes. With the "scale-mixture" prior the KL is estimated by Monte Carlo, with the others it is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.parts.guides import MeanFieldNormal
from bnn_pyro.parts.likelihoods import make_likelihood
from bnn_pyro.parts.nets import MLP
from bnn_pyro.parts.priors import BayesianNet
from bnn_pyro.settings import Settings, setting

__all__ = ["MeanField"]


@dataclass(frozen=True)
class MeanField(Settings):
    """Settings of a fully connected network with mean-field Normal weights.

    hidden      widths of the hidden layers; () is a linear model
    activation  relu, tanh, sigmoid, leaky_relu or gelu
    bias        in every layer, or in none
    prior       normal:SCALE, fan-in:SCALE, gamma:SHAPE,RATE or scale-mixture:WIDE,NARROW,WEIGHT
    noise       regression only: learned, heteroscedastic, or a standard deviation in target units
    init_scale  σ of every weight where training starts
    """

    hidden: tuple[int, ...] = setting((50,), low=1)
    activation: str = "relu"
    bias: bool = True
    prior: str = "fan-in:1"
    noise: str | float = "learned"
    init_scale: float = setting(1e-3, above=0)

    summary: ClassVar[str] = "A mean and a standard deviation for every weight (Bayes by Backprop)"
    paper: ClassVar[str] = "Blundell et al. 2015, arXiv:1505.05424"
    has: ClassVar[frozenset[str]] = frozenset({"guide", "weights", "proper prior"})

    def model(self, schema: Schema) -> BayesianNet:
        """p(y, w | x); see ``Entry.model``."""
        likelihood = make_likelihood(schema, self.noise)
        net = MLP(schema.input_shape, self.hidden, likelihood.outputs, self.activation, self.bias)
        return BayesianNet(net, likelihood, self.prior)

    def guide(self, model: nn.Module) -> MeanFieldNormal:
        """q(w), starting at the network's own initial weights; see ``Entry.guide``."""
        return MeanFieldNormal(model.initial, self.init_scale)
