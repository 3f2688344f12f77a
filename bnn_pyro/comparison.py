"""Pictures of several runs on the same test rows: what their weights and their predictions do not agree on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bnn_pyro import plots
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.posterior import Posterior
from bnn_pyro.predictive import Prediction
from bnn_pyro.report import Picture
from bnn_pyro.tables import RunFacts

__all__ = ["draw_comparison", "short_labels"]

#: More methods than these share no panel that could be read.
MOST = 8


def draw_comparison(
    runs: Sequence[RunFacts], posteriors: Sequence[Posterior], predictions: Sequence[Prediction], data: Dataset
) -> list[Picture]:
    """What applies: the most disputed test row (classification), and weights of the runs that have the first's model.

    data: whose test rows the predictions are for; as the first run standardises them.
    """
    labels, found = short_labels(runs), []
    said = dict(list(zip(labels, predictions, strict=True))[:MOST])
    if data.schema.task == "classification":
        row = plots.most_disputed(said)
        axes = plots.method_predictions(said, row, x=data.x_test, y=data.y_test, schema=data.schema)
        sentence = (
            f"Of {len(data.x_test):,} test rows, the one at which two runs are furthest apart (total variation "
            f"{plots.dispute(said, row):.3f}): the largest disagreement, not a typical one."
        )
        found.append(Picture.of("method-predictions", axes, "The most disputed test row", sentence, wide=True))
    alike = {
        label: posterior
        for label, posterior in list(zip(labels, posteriors, strict=True))[:MOST]
        if plots.unlike(posteriors[0], posterior) is None
    }
    if len(alike) > 1:
        sentence = (
            "Marginal posteriors of the weights on which these runs differ most, in units of their spread; a vertical "
            "line is a point estimate. Predictions can agree where marginals do not, and the other way round."
        )
        axes = plots.weight_posteriors(alike)
        found.append(Picture.of("weight-posteriors", axes, "A few weights by method", sentence, wide=True))
    return found


def short_labels(runs: Sequence[RunFacts]) -> list[str]:
    """The shortest names that tell the runs apart: method, variant and method, or the run's own label."""
    ways: list[Callable[[RunFacts], str]] = [
        lambda run: run.recipe["inference"].upper() if len(run.recipe["inference"]) < 6 else run.recipe["inference"],
        lambda run: f"{run.recipe['variant']} ({run.recipe['inference']})",
        lambda run: f"{run.recipe['variant']} ({run.recipe['inference']}), seed {run.recipe['seed']}",
        lambda run: run.label,
    ]
    for way in ways:
        labels = [way(run) for run in runs]
        if len(set(labels)) == len(labels):
            return labels
    return [f"{k}: {run.label}" for k, run in enumerate(runs, 1)]
