"""One function per picture: each takes a Prediction (or a trace) and returns the axes that it drew on.

``ax=None`` (``axes=None`` where there are several panels) makes a new figure, which is ``ax.figure``:
``plots.reliability(prediction, y)[0].figure.savefig("reliability.png")``. Nothing is left behind in pyplot, except in
a notebook, which shows its figures through pyplot. A module is imported when one of
its names is used. Entropies are in nats, targets and inputs in the user's own units.
"""

from __future__ import annotations

from bnn_pyro.lazy import lazy_names

_NAMES = {
    "calibration": "doubt_calibration regression_calibration reliability",
    "chains": "autocorrelation chain_traces energy forest trace_ranks",
    "classification": "confidence_histogram confusion_matrix selective_risk softmax_draws",
    "diagnostics": "convergence importance_weights loo_pit objective pareto_k posterior_predictive",
    "ensembles": "dispute growing_ensemble method_predictions most_disputed",
    "exact": "batch_objectives exact_intervals finite_differences mixture_densities standard_errors two_weights",
    "images": "uncertain_images",
    "joint": "joint_quantiles joint_z_scores step_size_bias",
    "maps": "decision_boundary epistemic_map",
    "mesh": "Grid grid line",
    "ood": "entropy_histograms ood_bars",
    "pruning": "pruning_curve signal_to_noise",
    "ranks": "interval_coverage rank_ecdfs rank_histograms",
    "reference": "reference_band reference_coverage reference_outputs",
    "regression": "predicted_observed predictive_band",
    "sweep": "Scores sweep_points sweep_settings",
    "training": "sampler_trace training_curves",
    "weights": "unlike weight_posteriors",
}
__all__, __getattr__, __dir__ = lazy_names(__name__, _NAMES)
