"""bnn_pyro: a zoo of Bayesian neural networks in Pyro, with posteriors that have been checked.

>>> import bnn_pyro as bp
>>> data = bp.load_data("breast-cancer", features=["mean radius", "mean texture"])
>>> posterior = bp.fit("mean-field", data, bp.SVI(epochs=50), progress=False)
>>> bp.predict(posterior, data.x_test).mean.shape[1]
2

Names are imported when first used: importing the package does not import torch.
"""

from bnn_pyro.lazy import lazy_names

__version__ = "0.1.0"

_NAMES = {
    "datasets": "DATASETS dataset load_data load_inputs",
    "datasets.dataset": "Dataset Schema",
    "inference": "METHODS HMC NUTS ChEES MILE SGHMC SGLD MAP MLE SVI MCDropout Ensemble Laplace",
    "zoo": "ZOO MeanField HiddenLayerNet VariationalDropout SparseDropout BayesianConvNet LastLayer MLP ConvNet "
    "DropoutMLP Bayesian",
    "parts.local_layer": "HiddenLayer",
    "posterior": "Posterior",
    "predictive": "Prediction predict",
    "fitting": "fit prior",
    "calibration.calibrated": "calibrate load",
    "explanation": "explain",
    "listing": "help",
    "isolation": "isolated",
    "parallel.executor": "executor",
    "errors": "UserError",
    "parts.priors": "BayesianNet",
}
__all__, __getattr__, __dir__ = lazy_names(
    __name__, _NAMES, modules="calibration checks diagnostics metrics plots pruning reports sklearn"
)
