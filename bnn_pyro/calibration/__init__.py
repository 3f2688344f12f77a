"""Guarantees on top of a posterior predictive: recalibration, conformal prediction, and whether they still hold.

``calibrate(posterior, x, y, method=…)`` takes rows that did not train and returns what is used as a posterior.
"""

from bnn_pyro.lazy import lazy_names

_NAMES = {
    "calibrated": "METHODS Calibrated calibrate load",
    "conformal": "SCORES Conformal rows_needed threshold",
    "recalibration": "RECALIBRATIONS",
    "shift": "Adaptive Verdict likelihood_ratio martingale monitor",
}
__all__, __getattr__, __dir__ = lazy_names(__name__, _NAMES)
