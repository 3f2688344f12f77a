"""bnn_pyro: a zoo of Bayesian neural networks in Pyro, with posteriors that have been checked.

>>> import bnn_pyro as bp
>>> data = bp.load_data("breast-cancer", features=["mean radius", "mean texture"])
>>> posterior = bp.fit("mean-field", data, bp.SVI(epochs=50), progress=False)
>>> bp.predict(posterior, data.x_test).mean.shape[1]
2

Names are imported when first used: importing the package does not import torch.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_HOMES = {
    "DATASETS": "datasets",
    "load_data": "datasets",
    "load_inputs": "datasets",
    "Dataset": "datasets.dataset",
    "Schema": "datasets.dataset",
    "METHODS": "inference",
    "HMC": "inference",
    "NUTS": "inference",
    "ChEES": "inference",
    "SGHMC": "inference",
    "SGLD": "inference",
    "MAP": "inference",
    "MLE": "inference",
    "SVI": "inference",
    "MCDropout": "inference",
    "Ensemble": "inference",
    "Laplace": "inference",
    "ZOO": "zoo",
    "LastLayer": "zoo",
    "MLP": "zoo",
    "ConvNet": "zoo",
    "MeanField": "zoo",
    "HiddenLayerNet": "zoo",
    "VariationalDropout": "zoo",
    "SparseDropout": "zoo",
    "BayesianConvNet": "zoo",
    "DropoutMLP": "zoo",
    "HiddenLayer": "parts.hidden_layer",
    "Posterior": "posterior",
    "pool": "posterior",
    "Prediction": "predictive",
    "predict": "predictive",
    "prune": "pruning",
    "pruning_curve": "pruning",
    "share_removed": "pruning",
    "signal_to_noise": "pruning",
    "fit": "fitting",
    "load": "loading",
    "isolated": "isolation",
    "executor": "executors",
    "UserError": "errors",
}
_MODULES = ("checks", "diagnostics", "metrics", "plots", "pruning", "reports")

__all__ = ["checks", "diagnostics", "metrics", "plots", "pruning", "reports", *_HOMES]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(f"bnn_pyro.{_HOMES[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"bnn_pyro.{name}")
    raise AttributeError(f"module 'bnn_pyro' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
