"""The zoo: every variant is one file here and one line in ``ZOO``."""

from bnn_pyro.zoo.bayesian_convnet import BayesianConvNet
from bnn_pyro.zoo.convnet import ConvNet
from bnn_pyro.zoo.dropout_mlp import DropoutMLP
from bnn_pyro.zoo.entry import Entry
from bnn_pyro.zoo.hidden_layer import HiddenLayerNet
from bnn_pyro.zoo.last_layer import LastLayer
from bnn_pyro.zoo.mean_field import MeanField
from bnn_pyro.zoo.mlp import MLP
from bnn_pyro.zoo.tuned import TUNED, Fit
from bnn_pyro.zoo.variational_dropout import SparseDropout, VariationalDropout

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

__all__ = [
    "MLP",
    "TUNED",
    "ZOO",
    "BayesianConvNet",
    "ConvNet",
    "DropoutMLP",
    "Entry",
    "Fit",
    "HiddenLayerNet",
    "LastLayer",
    "MeanField",
    "SparseDropout",
    "VariationalDropout",
]
