"""Recalibration and conformal prediction with a posterior, and tests of whether their guarantees still hold.

``calibrate(posterior, x, y, method=…)`` takes rows that were not used in training; its result is used as a posterior.
"""

from bnn_pyro.lazy import lazy_names

_NAMES = {
    "calibrated": "METHODS Calibrated calibrate load",
    "conformal": "SCORES Conformal rows_needed threshold",
    "recalibration": "RECALIBRATIONS",
    "shift": "Adaptive Verdict likelihood_ratio martingale monitor",
}
__all__, __getattr__, __dir__ = lazy_names(__name__, _NAMES)
