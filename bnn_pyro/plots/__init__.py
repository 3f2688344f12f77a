"""One function per figure: each takes a Prediction (or a trace) and returns the axes that it drew on.

A function draws on pyplot's current figure if that is empty, else on a new one, so that ``plt.savefig`` and
``plt.show`` work; functions for a single panel take other axes as ``ax``. Reports draw outside of pyplot. A module is
imported when one of its names is used. Entropies are in nats, targets and inputs in their original units.
"""

from bnn_pyro.lazy import lazy_names

_NAMES = {
    "checks": "rank_ecdfs standard_errors",
    "classification": "confidence_histogram confusion_matrix entropy_histograms reliability selective_risk "
    "threshold_curves",
    "diagnostics": "convergence loo_pit pareto_k posterior_predictive trace_ranks",
    "effects": "Grid decision_boundary epistemic_map grid line partial_dependence permutation_importance pixel_maps",
    "points": "ood_bars uncertain_images",
    "regression": "predicted_observed predictive_band regression_calibration rootogram",
    "sweep": "Scores sweep_points",
    "training": "growing_ensemble pruning_curve training_curves",
}
__all__, __getattr__, __dir__ = lazy_names(__name__, _NAMES)
