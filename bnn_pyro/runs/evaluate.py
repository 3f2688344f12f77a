"""From a posterior to everything that a run folder shows of it: metrics, figures, report, model card."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bnn_pyro import metrics
from bnn_pyro.datasets import DATASETS, load_data, load_inputs, read_rows
from bnn_pyro.datasets.arrays import load_archive
from bnn_pyro.datasets.dataset import Dataset, Schema
from bnn_pyro.distributed import choose_device
from bnn_pyro.errors import UserError
from bnn_pyro.files import resolve
from bnn_pyro.fitting import load
from bnn_pyro.posterior import Posterior
from bnn_pyro.predictive import Prediction, predict
from bnn_pyro.progress import progress_bar
from bnn_pyro.reports.page import run_card, run_html
from bnn_pyro.reports.tables import RunFacts
from bnn_pyro.runs.diagnose import judge_chains
from bnn_pyro.runs.figures import EvaluatedRun, Outside, draw_all
from bnn_pyro.runs.folder import REPLICATES, RunFolder
from bnn_pyro.runs.prune import read_pruning
from bnn_pyro.runs.recipe import Recipe

__all__ = ["evaluate_run", "labelled", "load_posterior", "outside_inputs", "paired_differences",
           "predict_with_progress", "score_mean_weights", "score_other"]  # fmt: skip

#: Names that --ood takes for noise, and what ``load_inputs`` calls them.
NOISE = {"noise": ("uniform-noise", "gaussian-noise"), "uniform": ("uniform-noise",), "gaussian": ("gaussian-noise",)}
#: How many noise images of each kind a run is shown without being asked.
NOISE_IMAGES = 1000


def load_posterior(folder: RunFolder, device: str) -> Posterior:
    """The run's posterior, on the device asked for."""
    posterior, where = load(folder.path), choose_device(device)
    if where.type == "cpu":
        return posterior
    posterior.model.to(where)
    if posterior.guide is not None:
        posterior.guide.to(where)
        return posterior
    return dataclasses.replace(posterior, chains={site: value.to(where) for site, value in posterior.chains.items()})


def predict_with_progress(posterior: Posterior, x: Tensor, num_draws: int, what: str, show: bool) -> Prediction:
    """``predict`` with a progress bar."""
    with progress_bar(f"predict {what}", show, unit="draw") as report:
        prediction = predict(posterior, x, num_draws=num_draws, progress=report)
        report(prediction.num_draws, prediction.num_draws)
        return prediction


# -- a run's own test rows ---------------------------------------------------------------------------------------------
def evaluate_run(
    folder: RunFolder,
    recipe: Recipe,
    data: Dataset,
    posterior: Posterior,
    baseline: Posterior | None = None,
    *,
    outside: Mapping[str, Tensor] | None = None,
    report: bool = True,
    show: bool = True,
) -> RunFacts:
    """Score a run on its test rows and on out-of-distribution inputs; write metrics, figures, report and model card.

    outside: {name: standardised inputs}, classification only; None takes noise for a classifier of images.
    report: False leaves figures, report and card to a later evaluation.
    """
    folder.check_data(posterior, data)
    pruned = read_pruning(folder)
    for place in (folder, folder.baseline):
        place.check_files()  # before anything is written
    outside, num = _outside(outside, data), recipe.num_draws
    posteriors = {folder: posterior} | ({} if baseline is None else {folder.baseline: baseline})
    predicted = {
        place: _predict(p, data, outside, num, f"test rows ({_entry(p)})", show) for place, p in posteriors.items()
    }
    tested = [prediction for prediction, _ in predicted.values()]
    with progress_bar("evaluate", show) as progress:
        judge_chains(folder, posterior, data)
        for place in reversed(posteriors):  # the run's own metrics.json last: where it is, all scores are
            scores, replicates = _scores(posteriors[place], data, num, *predicted[place], show)
            if replicates:  # kept for paired differences between runs without predicting again
                archive = io.BytesIO()
                np.savez(archive, **replicates)
                place.write(REPLICATES, archive.getvalue())
            if place is folder and baseline is not None and replicates:
                scores |= paired_differences(*tested, data.y_test, "_minus_baseline")
            place.write("metrics.json", scores)
        progress(1, 3)
        run = folder.facts()
        if report:
            others = [Outside(name, x, *(ood[name] for _, ood in predicted.values())) for name, x in outside.items()]
            evaluated = EvaluatedRun(posterior, data, num, *tested, outside=others, pruning=pruned)
            pictures = draw_all(evaluated, folder.path / "figures")
            progress(2, 3)
            folder.write("report.html", run_html(run, pictures))
            folder.write("README.md", run_card(run))
        progress(3, 3)
    return run


def score_mean_weights(
    folder: RunFolder,
    recipe: Recipe,
    data: Dataset,
    posterior: Posterior,
    *,
    outside: Mapping[str, Tensor] | None = None,
    show: bool = True,
) -> Path:
    """Score the network at the mean weights as ``evaluate_run`` does; the file that it wrote, beside metrics.json."""
    folder.check_data(posterior, data)
    mean, num, what = posterior.at_mean_weights(), recipe.num_draws, "test rows (mean weights)"
    predicted = _predict(mean, data, _outside(outside, data), num, what, show)
    return folder.write("metrics-mean-weights.json", _scores(mean, data, num, *predicted, show)[0])


def paired_differences(prediction: Prediction, first: Prediction, y: Tensor, suffix: str = "") -> dict[str, float]:
    """{metric, metric_low, metric_high}: prediction − first on the same rows, of every metric that both have.

    suffix: behind the name of the metric.
    """
    found = {}
    for name, metric in metrics.METRICS[prediction.task].items():
        with suppress(metrics.Undefined):
            estimate, key = metrics.paired(metric, prediction, first, y), name + suffix
            found |= {key: estimate.value, f"{key}_low": estimate.low, f"{key}_high": estimate.high}
    return found


def _predict(
    posterior: Posterior, data: Dataset, outside: Mapping[str, Tensor], num_draws: int, what: str, show: bool
) -> tuple[Prediction | None, dict[str, Prediction]]:
    """Of the test rows, None where there are none; and of out-of-distribution inputs."""
    prediction = predict_with_progress(posterior, data.x_test, num_draws, what, show) if len(data.x_test) else None
    return prediction, {name: predict_with_progress(posterior, x, num_draws, name, show) for name, x in outside.items()}


def _scores(
    posterior: Posterior,
    data: Dataset,
    num_draws: int,
    prediction: Prediction | None,
    ood: Mapping[str, Prediction],
    show: bool,
) -> tuple[dict[str, float], Mapping[str, np.ndarray]]:
    """What metrics.json says of one posterior, and the metrics on resampled test rows.

    Validation rows have no intervals: settings are chosen by them, so that the test rows need not be.
    """
    scores, replicates = {}, {}
    if prediction is not None:
        evaluation = metrics.evaluate(prediction, data.y_test)
        scores, replicates = evaluation.flat(), evaluation.replicates
        if prediction.has_classes:
            floor = metrics.ece_floor(prediction)
            scores |= {"ece_floor": floor.mean, "ece_floor_95": floor.quantile_95}
            scores["mean_entropy"] = prediction.total.mean().item()
        scores |= {"num_draws": prediction.num_draws, "test_rows": len(prediction)}
    if len(data.x_val):
        what = f"validation rows ({_entry(posterior)})"
        validation = predict_with_progress(posterior, data.x_val, num_draws, what, show)
        estimates = metrics.evaluate(validation, data.y_val, bootstrap=2)
        scores |= {f"validation_{name}": estimate.value for name, estimate in estimates.items()}
    for name, other in ood.items():
        scores |= {f"ood_{name}_{key}": value for key, value in metrics.ood_table(prediction, other).flat().items()}
        scores[f"ood_{name}_mean_entropy"] = other.total.mean().item()
    return scores, replicates


def _entry(posterior: Posterior) -> str:
    return str(posterior.provenance.get("entry", "posterior"))


def _outside(outside: Mapping[str, Tensor] | None, data: Dataset) -> Mapping[str, Tensor]:
    """Out-of-distribution inputs: those given, or noise for a classifier of images where None are."""
    if outside is None and data.schema.is_image and data.schema.has_classes:
        outside = outside_inputs(["noise"], data.schema, num=NOISE_IMAGES)
    if outside and not len(data.x_test):
        raise UserError(f"{data.name} has no test rows that out-of-distribution inputs could be told from")
    return outside or {}


# -- other data --------------------------------------------------------------------------------------------------------
def score_other(
    folder: RunFolder, recipe: Recipe, posterior: Posterior, name: str, *, mean_weights: bool = False, show: bool = True
) -> Path:
    """Score on other data with labels, see :func:`labelled`; the file that it wrote, metrics-NAME.json."""
    stem, x, y = labelled(name, posterior.schema, recipe)
    if not len(x):
        raise UserError(f"{name}: no rows to score")
    posterior, stem = (posterior.at_mean_weights(), f"{stem}-mean-weights") if mean_weights else (posterior, stem)
    found = metrics.evaluate(predict_with_progress(posterior, x, recipe.num_draws, stem, show), y).flat()
    return folder.write(f"metrics-{stem}.json", found | {"test_rows": len(x)})


def outside_inputs(names: Sequence[str], schema: Schema, *, num: int, invert: bool = False) -> dict[str, Tensor]:
    """{name: standardised inputs} for the --ood arguments."""
    if names and not schema.has_classes:
        raise UserError("--ood scores class probabilities; this run is a regression, so look at its epistemic variance")
    texts = [text for name in names for text in NOISE.get(name, (name,))]
    return {
        text if text in DATASETS or text.endswith("-noise") else Path(text).stem: load_inputs(
            text, schema, num=num, invert=invert
        )
        for text in texts
    }


def labelled(name: str, schema: Schema, recipe: Recipe) -> tuple[str, Tensor, Tensor]:
    """(name, x, y) of other data with labels for a trained model: x standardised by its schema.

    A file is taken whole; of a named data set, the test part. Labels are matched by the names of the classes.
    """
    if Path(name).suffix.lower() in (".csv", ".tsv"):
        x, y = read_rows(name, schema)
        if y is None:
            raise UserError(f"{name}: no column '{schema.target}', so there is nothing to score against; use predict")
        return Path(name).stem, x, y
    if name in DATASETS:
        options = {"features": recipe.data["features"]} if "features" in recipe.data else {}
        data = load_data(name, **options)
        task, classes, x, y = data.schema.task, data.schema.classes, data.x_test, data.y_test
        x = schema.standardise(data.schema.unstandardise(x)) if data.schema.input_shape == schema.input_shape else x
    else:
        raw = load_archive(resolve(name), task=schema.task)
        task, classes, x, y = raw.task, raw.classes, load_inputs(name, schema), raw.y
    if task != schema.task:
        raise UserError(f"{name}: is {task}, and this run is {schema.task}")
    if tuple(x.shape[1:]) != schema.input_shape:
        raise UserError(f"{name}: inputs of shape {tuple(x.shape[1:])}; this run takes {schema.input_shape}")
    if not schema.has_classes:
        return Path(name).stem, x, y.to(torch.float32)
    strange = [c for c in classes if c not in schema.classes]
    if strange:
        known = ", ".join([*schema.classes[:6], *(["…"] if len(schema.classes) > 6 else [])])
        raise UserError(f"{name}: class '{strange[0]}' is none of the run's: {known}")
    return Path(name).stem, x, torch.tensor([schema.classes.index(c) for c in classes])[y]
