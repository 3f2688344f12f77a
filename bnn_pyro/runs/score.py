"""Scores of a run: on its test and validation rows, on inputs from elsewhere, and beside its baseline; metrics.json."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from bnn_pyro import metrics
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.posterior import Posterior
from bnn_pyro.predictive import Prediction, predict
from bnn_pyro.progress import progress_bar
from bnn_pyro.runs.diagnose import judge_chains
from bnn_pyro.runs.figures import Outside
from bnn_pyro.runs.folder import REPLICATES, RunFolder
from bnn_pyro.runs.recipe import Recipe

__all__ = ["on_test_rows", "paired_differences", "predicted", "score_run", "scores", "write_scores"]


def predicted(posterior: Posterior, x: Tensor, num_draws: int, what: str, show: bool) -> Prediction:
    """``predict`` with a progress bar."""
    with progress_bar(f"predict {what}", show, unit="draw") as report:
        prediction = predict(posterior, x, num_draws=num_draws, progress=report)
        report(prediction.num_draws, prediction.num_draws)
        return prediction


def score_run(
    folder: RunFolder,
    recipe: Recipe,
    data: Dataset,
    posterior: Posterior,
    baseline: Posterior | None = None,
    *,
    show: bool = True,
) -> None:
    """Score a run on its test rows alone: metrics.json. Figures and report are made by :func:`evaluate_run`, later."""
    folder.check_data(posterior, data)
    posteriors = {folder: posterior} | ({folder.baseline: baseline} if baseline is not None else {})
    judge_chains(folder, posterior, data)
    write_scores(posteriors, on_test_rows(posteriors, data, recipe.num_draws, show), [], data, recipe.num_draws, show)


def paired_differences(prediction: Prediction, first: Prediction, y: Tensor) -> dict[str, float]:
    """{metric, metric_low, metric_high}: prediction − first on the same rows, of every metric that both have."""
    found = {}
    for name, metric in metrics.METRICS[prediction.task].items():
        try:
            estimate = metrics.paired(metric, prediction, first, y)
        except metrics.Undefined:
            continue
        found |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    return found


def on_test_rows(
    posteriors: Mapping[RunFolder, Posterior], data: Dataset, num_draws: int, show: bool
) -> dict[RunFolder, Prediction | None]:
    """What each posterior says of the test rows; None where there are none."""
    return {
        place: predicted(p, data.x_test, num_draws, f"test rows ({_label(p)})", show) if len(data.x_test) else None
        for place, p in posteriors.items()
    }


def write_scores(
    posteriors: Mapping[RunFolder, Posterior],
    predictions: Mapping[RunFolder, Prediction | None],
    elsewhere: Sequence[Outside],
    data: Dataset,
    num_draws: int,
    show: bool,
) -> None:
    """metrics.json of a run and, where there is one, of its baseline, to which the run's differences are taken.

    The values on resampled test rows are kept beside it, for paired differences between runs without predicting again.
    """
    (folder, prediction), *beside = predictions.items()
    for place, mine in reversed(predictions.items()):  # the run's own last: where it is, all is
        others = {o.name: o.prediction if place is folder else o.baseline for o in elsewhere}
        tested = None if mine is None else metrics.evaluate(mine, data.y_test)
        found = _scores(posteriors[place], data, num_draws, mine, tested, others, show)
        if tested is not None:
            place.write(REPLICATES, _archive(tested.replicates))
        if place is folder and beside and prediction is not None:
            found |= _named(paired_differences(prediction, beside[0][1], data.y_test), "minus_baseline")
        place.write("metrics.json", found)


def scores(
    posterior: Posterior,
    data: Dataset,
    num_draws: int,
    prediction: Prediction | None,
    outside: Mapping[str, Prediction],
    show: bool,
) -> dict[str, float]:
    """Everything that metrics.json says of one posterior: on test rows, validation rows and inputs from elsewhere."""
    tested = None if prediction is None else metrics.evaluate(prediction, data.y_test)
    return _scores(posterior, data, num_draws, prediction, tested, outside, show)


def _scores(
    posterior: Posterior,
    data: Dataset,
    num_draws: int,
    prediction: Prediction | None,
    tested: metrics.Evaluation | None,
    outside: Mapping[str, Prediction],
    show: bool,
) -> dict[str, float]:
    found = _test_scores(prediction, tested) if prediction is not None and tested is not None else {}
    found |= _validation(posterior, data, num_draws, show)
    for name, other in outside.items():
        found |= {f"ood_{name}_{key}": value for key, value in metrics.ood_table(prediction, other).flat().items()}
        found[f"ood_{name}_mean_entropy"] = other.total.mean().item()
    return found


def _archive(arrays: Mapping[str, np.ndarray]) -> bytes:
    """An NPZ file."""
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def _test_scores(prediction: Prediction, tested: metrics.Evaluation) -> dict[str, float]:
    found = tested.flat()
    if prediction.has_classes:
        floor = metrics.ece_floor(prediction)
        found |= {"ece_floor": floor.mean, "ece_floor_95": floor.quantile_95}
        found["mean_entropy"] = prediction.total.mean().item()
    return found | {"num_draws": prediction.num_draws, "test_rows": len(prediction)}


def _validation(posterior: Posterior, data: Dataset, num_draws: int, show: bool) -> dict[str, float]:
    """{"validation_nll": …}, without intervals: what settings are chosen by, so that the test rows need not be."""
    if not len(data.x_val):
        return {}
    prediction = predicted(posterior, data.x_val, num_draws, f"validation rows ({_label(posterior)})", show)
    found = metrics.evaluate(prediction, data.y_val, bootstrap=2)
    return {f"validation_{name}": estimate.value for name, estimate in found.items()}


def _named(differences: Mapping[str, float], how: str) -> dict[str, float]:
    """{"nll_low": …} -> {"nll_minus_baseline_low": …}."""
    ends = ("_low", "_high")
    split = ((k, next((e for e in ends if k.endswith(e)), "")) for k in differences)
    return {f"{k.removesuffix(end)}_{how}{end}": differences[k] for k, end in split}


def _label(posterior: Posterior) -> str:
    return str(posterior.provenance.get("entry", "posterior"))
