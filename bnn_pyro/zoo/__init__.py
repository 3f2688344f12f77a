"""The zoo: every variant is a class here, in a file of its own or beside its kin, and one line in ``ZOO``."""

from bnn_pyro.zoo.convnet import ConvNet
from bnn_pyro.zoo.dropout_mlp import DropoutMLP
from bnn_pyro.zoo.entry import Entry
from bnn_pyro.zoo.hidden_layer import BayesianConvNet, HiddenLayerNet, SparseDropout, VariationalDropout
from bnn_pyro.zoo.last_layer import LastLayer
from bnn_pyro.zoo.mean_field import MLP, MeanField
from bnn_pyro.zoo.tuned import TUNED, Fit

#: Every variant by its name on the command line.
ZOO: dict[str, type[Entry]] = {
    "mean-field": MeanField,
    "hidden-layer": HiddenLayerNet,
    "variational-dropout": VariationalDropout,
    "sparse-dropout": SparseDropout,
    "bayesian-convnet": BayesianConvNet,
    "last-layer": LastLayer,
    "mlp": MLP,
    "convnet": ConvNet,
    "dropout-mlp": DropoutMLP,
}

__all__ = ["MLP", "TUNED", "ZOO", "BayesianConvNet", "ConvNet", "DropoutMLP", "Entry", "Fit", "HiddenLayerNet",
           "LastLayer", "MeanField", "SparseDropout", "VariationalDropout"]  # fmt: skip
