"""One function per picture: each takes a Prediction (or a trace) and returns the axes that it drew on.

``ax=None`` (``axes=None`` where there are several panels) makes a new figure, which is ``ax.figure``:
``plots.reliability(prediction, y)[0].figure.savefig("reliability.png")``. Nothing is left behind in pyplot, except in
a notebook, which shows its figures through pyplot. Entropies are in nats, targets and inputs in the user's own units.
"""

from bnn_pyro.plots.calibration import doubt_calibration, regression_calibration, reliability
from bnn_pyro.plots.chains import autocorrelation, chain_traces, energy, forest, trace_ranks
from bnn_pyro.plots.classification import confidence_histogram, confusion_matrix, selective_risk, softmax_draws
from bnn_pyro.plots.diagnostics import (
    convergence,
    importance_weights,
    loo_pit,
    objective,
    pareto_k,
    posterior_predictive,
)
from bnn_pyro.plots.ensembles import dispute, growing_ensemble, method_predictions, most_disputed
from bnn_pyro.plots.exact import (
    batch_objectives,
    exact_intervals,
    finite_differences,
    mixture_densities,
    standard_errors,
    two_weights,
)
from bnn_pyro.plots.images import uncertain_images
from bnn_pyro.plots.joint import joint_quantiles, joint_z_scores, step_size_bias
from bnn_pyro.plots.maps import decision_boundary, epistemic_map
from bnn_pyro.plots.mesh import Grid, grid, line
from bnn_pyro.plots.ood import entropy_histograms, ood_bars
from bnn_pyro.plots.pruning import pruning_curve, signal_to_noise
from bnn_pyro.plots.ranks import interval_coverage, rank_ecdfs, rank_histograms
from bnn_pyro.plots.reference import reference_band, reference_coverage, reference_outputs
from bnn_pyro.plots.regression import predicted_observed, predictive_band
from bnn_pyro.plots.sweep import Scores, sweep_points, sweep_settings
from bnn_pyro.plots.training import sampler_trace, training_curves
from bnn_pyro.plots.weights import unlike, weight_posteriors

__all__ = [
    "Grid",
    "Scores",
    "autocorrelation",
    "batch_objectives",
    "chain_traces",
    "confidence_histogram",
    "confusion_matrix",
    "convergence",
    "decision_boundary",
    "dispute",
    "doubt_calibration",
    "energy",
    "entropy_histograms",
    "epistemic_map",
    "exact_intervals",
    "finite_differences",
    "forest",
    "grid",
    "growing_ensemble",
    "importance_weights",
    "interval_coverage",
    "joint_quantiles",
    "joint_z_scores",
    "line",
    "loo_pit",
    "method_predictions",
    "mixture_densities",
    "most_disputed",
    "objective",
    "ood_bars",
    "pareto_k",
    "posterior_predictive",
    "predicted_observed",
    "predictive_band",
    "pruning_curve",
    "rank_ecdfs",
    "rank_histograms",
    "reference_band",
    "reference_coverage",
    "reference_outputs",
    "regression_calibration",
    "reliability",
    "sampler_trace",
    "selective_risk",
    "signal_to_noise",
    "softmax_draws",
    "standard_errors",
    "step_size_bias",
    "sweep_points",
    "sweep_settings",
    "trace_ranks",
    "training_curves",
    "two_weights",
    "uncertain_images",
    "unlike",
    "weight_posteriors",
]


def __dir__() -> list[str]:
    return sorted(__all__)
