"""The network with dropout: deterministic once trained, or Bayesian by masks that go on falling at prediction.

    h₀ = x    h_l = act(W_l (z_l ∘ h_{l−1}) / (1 − p_l) + b_l)    y ~ likelihood(h_L)        z_l ~ Bernoulli(1 − p_l)

Method map trains with masks and predicts without them (Srivastava, Hinton, Krizhevsky, Sutskever & Salakhutdinov 2014);
mc-dropout keeps them, one for every draw (Gal & Ghahramani 2016). To the model p(y, w | x) they are no part of it: out
of training mode it is that of ``MLP``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.parts.guides import DroppedInputs
from bnn_pyro.parts.nets import MLP
from bnn_pyro.settings import setting
from bnn_pyro.zoo.mean_field import Network

__all__ = ["DropoutMLP"]


@dataclass(frozen=True)
class DropoutMLP(Network):
    """Settings of a multilayer perceptron with dropout: those of ``Network``.

    input_dropout   share of the inputs that a mask removes; 0 for none
    hidden_dropout  share of every hidden layer's units that a mask removes
    """

    hidden: tuple[int, ...] = setting((100,), low=1)
    input_dropout: float = setting(0.2, low=0, below=1)
    hidden_dropout: float = setting(0.5, low=0, below=1)

    summary: ClassVar[str] = "A network with dropout, deterministic or with a mask for every draw (MC dropout)"
    paper: ClassVar[str] = "Srivastava et al. 2014, JMLR 15:1929; Gal & Ghahramani 2016, arXiv:1506.02142"
    has: ClassVar[frozenset[str]] = frozenset({"weights", "dropout"})

    def net(self, schema: Schema, outputs: int) -> MLP:
        """The deterministic network."""
        rates = self.input_dropout, self.hidden_dropout
        return MLP(schema.input_shape, self.hidden, outputs, self.activation, self.bias, rates)

    def guide(self, model: nn.Module) -> DroppedInputs:
        """q(w): the weights with dropped columns; see ``Entry.guide``."""
        return DroppedInputs(model.initial, model.net.dropout_rates)
