"""The zoo: every variant is one file here and one line in ``ZOO``."""

from bnn_pyro.zoo.dropout_mlp import DropoutMLP
from bnn_pyro.zoo.entry import Entry, Fit
from bnn_pyro.zoo.mean_field import MeanField
from bnn_pyro.zoo.mlp import MLP

#: Every variant by its name on the command line.
ZOO: dict[str, type[Entry]] = {"mean-field": MeanField, "mlp": MLP, "dropout-mlp": DropoutMLP}

__all__ = ["MLP", "ZOO", "DropoutMLP", "Entry", "Fit", "MeanField"]
