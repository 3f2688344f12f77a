"""Metrics of a Prediction, by task, each with a bootstrap interval over the test points.

``metrics.nll(prediction, y)`` returns a float, ``evaluate(prediction, y)`` every metric of the task. To add a metric,
define a :class:`Metric` and add a line to ``METRICS``. Log densities and entropies are in nats.
"""

from bnn_pyro.lazy import lazy_names

_NAMES = {
    "metric": "Estimate Evaluation Metric Undefined average_precision concordance label_brier label_error nrmse",
    "classification": "SCORES accuracy adaptive_ece aurc auroc brier classwise_ece confusion_matrix ece ece_floor "
    "error ood_auroc ood_table reliability rps selective_risk",
    "evaluation": "DISTANCES METRICS coverage_50 coverage_90 coverage_95 crps "
    "distances evaluate interval_verdict nll paired pit rmse width_95",
}
__all__, __getattr__, __dir__ = lazy_names(__name__, _NAMES)
