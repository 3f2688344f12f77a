"""Evaluate a posterior: write the metrics, figures, report and model card of a run folder."""

import dataclasses
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from bnn_pyro import diagnostics, metrics
from bnn_pyro.calibration.calibrated import with_calibration
from bnn_pyro.datasets import DATASETS, Dataset, Schema, load_data, load_inputs, read_rows
from bnn_pyro.datasets.in_memory import archive
from bnn_pyro.datasets.prepare import standardised
from bnn_pyro.datasets.rows import row_digests
from bnn_pyro.diagnostics.draws import settled
from bnn_pyro.diagnostics.failures import failure, way_out
from bnn_pyro.distributed import choose_device
from bnn_pyro.errors import UserError
from bnn_pyro.files import TABLES, resolve
from bnn_pyro.loading import load
from bnn_pyro.posterior import Posterior
from bnn_pyro.predictive import Prediction, knows_nothing, predict
from bnn_pyro.progress import announce, progress_bar
from bnn_pyro.pruning import LOG_ALPHA, SHARES, pruning_curve, share_removed
from bnn_pyro.reports.page import run_pages
from bnn_pyro.reports.summary import TOO_FEW, guarantees_section, of_new_rows
from bnn_pyro.reports.tables import AGAINST, HEADLINE, NOTHING, RunFacts, as_text, difference, estimate, metric_table
from bnn_pyro.runs.baselines import against_mean_weights, boosted, paired_differences, uneven_errors
from bnn_pyro.runs.coverage import LEVEL, coverage_table, if_calibrated
from bnn_pyro.runs.figures import Scored, draw_all, figures_of, read_pruning, rows_to_look_at, sites_of
from bnn_pyro.runs.folder import BOOSTING, CONVERGENCE, GUARANTEES, REPLICATES, ROWS, SITES, RunFolder
from bnn_pyro.runs.recipe import Recipe

#: {name of noise in --ood: names of ``load_inputs``}.
NOISE = {"noise": ("uniform-noise", "gaussian-noise"), "uniform": ("uniform-noise",), "gaussian": ("gaussian-noise",)}


def load_posterior(folder: RunFolder, device: str, module: str | None = None) -> Posterior:
    """Load a run's posterior onto a device.   module: package.module:function (or several) of a user's own module."""
    then, named = getattr(folder.recipe.entry, "module", None), (module or "").split(",")
    chosen = None if not then else then if then in named else module
    if chosen and "," in chosen:
        raise UserError(f"{folder.path} was trained with the module {then}, and --module has {', '.join(named)}")
    posterior = load(folder.path, module=chosen)
    where = choose_device("cpu" if device == "auto" and posterior.provenance.get("device") == "cpu" else device)
    chains = posterior.chains and {site: value.to(where) for site, value in posterior.chains.items()}
    for module in filter(None, (posterior.model, posterior.guide)):
        module.to(where)
    return dataclasses.replace(posterior, chains=chains)


def predict_with_progress(posterior: Posterior, x: Tensor, num_draws: int, label: str) -> Prediction:
    """Call ``predict`` with a progress bar."""
    with progress_bar(f"predict {label}", unit="draw") as report:
        prediction = predict(posterior, x, num_draws=num_draws, progress=report)
        report(prediction.num_draws, prediction.num_draws)
        return prediction


def evaluate_run(
    folder: RunFolder, recipe: Recipe, data: Dataset, posterior: Posterior, baseline: Posterior | None = None, *,
    outside: Mapping[str, Tensor] | None = None, report: bool = True,
) -> RunFacts:  # fmt: skip
    """Score a run on its test rows and on out-of-distribution inputs; write metrics, figures, report and model card.

    outside: {name: standardised inputs}, for classification only; None takes noise if a classifier takes images.
    report: False writes no figures, report and model card; a later evaluation may.
    """
    folder.check_data(posterior, data)
    pruning = read_pruning(folder)
    for place in (folder, folder.baseline) if folder.baseline.is_trained else (folder,):
        place.recipe, place.read("environment.json")  # damaged files raise before anything is written
    if outside is None and data.schema.is_image and data.schema.has_classes:
        outside = outside_inputs(["noise"], data.schema, num=1000)
    if outside and not len(data.x_test):
        raise UserError(f"{data.name} has no test rows to compare out-of-distribution inputs with")
    inputs, num = outside or {}, recipe.num_draws
    scored = _score(posterior, data, inputs, num)
    baseline_score = None if baseline is None else _score(baseline, data, inputs, num)
    for former in (CONVERGENCE, BOOSTING):
        (folder.path / former).unlink(missing_ok=True)
    can_diagnose = posterior.chains is not None or any(settled(posterior.trace, part) > 0 for part in (0.5, 1.0))
    if can_diagnose and (diagnosis := diagnostics.diagnose_briefly(posterior, data)) is not None:
        folder.write(CONVERGENCE, diagnosis.to_dict())
    if baseline_score is not None:
        _write_scores(folder.baseline, baseline_score)
        if scored.prediction is not None and baseline_score.prediction is not None:
            scored.scores.update(paired_differences(scored.prediction, baseline_score.prediction, data.y_test, AGAINST))
    if scored.prediction is not None and not data.schema.is_image:
        folder.write(ROWS, rows_to_look_at(data, scored.prediction))
    folder.write(SITES, sites_of(posterior) if scored.finite else {"sites": []})
    if recipe.boosting and scored.prediction is not None and (made := boosted(data)) is not None:
        paired = paired_differences(scored.prediction, made[0], data.y_test)
        scores = metrics.evaluate(made[0], data.y_test).flat()
        folder.write(BOOSTING, made[1] | {"metrics": scores, "differences": paired})
    after, is_calibrated = None, (folder.path / "calibration.json").is_file()
    if not is_calibrated:
        change, after = if_calibrated(scored)
        scored.scores.update({"if_calibrated": change} if change else {})
    _write_scores(folder, scored)  # last: metrics.json shows that the scores are complete
    run = folder.facts()
    if report:
        if is_calibrated and scored.prediction is not None:
            calibrated = with_calibration(posterior, folder.path)
            after = (calibrated.predict(data.x_test), data.y_test) if calibrated.maps else None
        baseline_score = baseline_score if baseline_score and baseline_score.finite else None
        figures = figures_of(scored, baseline_score, pruning, after) if scored.finite else {}
        html, card = run_pages(run, draw_all(figures, folder))
        folder.write("report.html", html)
        folder.write("README.md", card)
    return run


def _score(posterior: Posterior, data: Dataset, outside: Mapping[str, Tensor], num_draws: int) -> Scored:
    """Score a posterior on test rows, validation rows (without intervals) and out-of-distribution inputs."""
    name, prediction, validation = posterior.provenance.get("entry", "posterior"), None, None
    failed = failure(posterior, data, num_draws=num_draws)
    scores, replicates = {"failed": str(failed)} if failed else {}, {}
    if failed and not failed.finite:
        return Scored(posterior, data, num_draws, None, scores=scores, finite=False)
    if len(data.x_test):
        prediction = predict_with_progress(posterior, data.x_test, num_draws, f"test rows ({name})")
        valid, broken = _finite(prediction, data, "test")
        if broken:  # scores and figures of the remaining rows would hide the failure
            return Scored(posterior, data, num_draws, None, scores=broken | scores, finite=False)
        evaluation = metrics.evaluate(prediction, data.y_test)
        scores, replicates = scores | evaluation.flat(), evaluation.replicates
        if data.schema.targets:
            pairs = zip(data.schema.targets, prediction.each, data.y_test.unbind(1), strict=True)
            scores["targets"] = {target: metrics.evaluate(one, y).flat() for target, one, y in pairs}
        if prediction.has_classes:
            scores |= dict(zip(("ece_floor", "ece_floor_95"), metrics.ece_floor(prediction), strict=True))
            means = {"mean_entropy": prediction.total, "mean_confidence": prediction.mean.amax(-1)}
            scores |= {name: values.mean().item() for name, values in means.items()}
            for part, labels in (("rows", data.y_test), ("predictions", prediction.mean.argmax(-1))):
                counts = labels.bincount(minlength=len(data.schema.classes)).tolist()
                scores[f"class_{part}"] = dict(zip(data.schema.classes, counts, strict=True))
        elif data.schema.task in ("regression", "counts"):
            noise = posterior.provenance.get("entry_settings", {}).get("noise")
            if data.schema.task != "counts" and noise not in (None, "heteroscedastic"):
                scores |= uneven_errors(prediction, data)
            scores["means_outside"] = int(means_outside(prediction).sum())
        elif data.schema.task == "survival":
            scores["censored_rows"] = int((data.y_test < 0).sum())
        names = HEADLINE[data.schema.task]
        scores |= paired_differences(prediction, knows_nothing(data, data.x_test), data.y_test, NOTHING, names)
        against = {k.replace(NOTHING, ""): v for k, v in scores.items() if NOTHING in k}
        verdicts = {name: getattr(difference(against, name, data.schema.task), "verdict", "") for name in names}
        if not failed and len(prediction) >= TOO_FEW and "worse" in verdicts.values() and verdicts["nll"] != "better":
            by = "nll" if verdicts["nll"] == "worse" else "errors"
            advice = way_out(posterior, data, by, verdicts[names[0]] == "better", num_draws=num_draws)
            scores["worse"] = f"Predictions of the test rows are worse than knowing nothing: {advice}."
        scores |= {"num_draws": prediction.num_draws, "test_rows": len(prediction)}
        scores["rows_that_trained"] = _known_rows(posterior.rows, data.x_test, data.y_test)
        if scores["rows_that_trained"]:
            pairs = (data.x_train, data.y_train), (data.x_test, data.y_test)
            scores["different_inputs"] = len(torch.cat([row_digests(x, 0 * y) for x, y in pairs]).unique())
        scores |= against_mean_weights(posterior, prediction, data)
    if len(data.x_val):
        validation = predict_with_progress(posterior, data.x_val, num_draws, f"validation rows ({name})")
        valid, broken = _finite(validation, data, "val")
        scores = broken | scores
        estimates = metrics.evaluate(validation[valid], data.y_val[valid], bootstrap=10) if valid.any() else {}
        scores |= {f"validation_{metric}": estimate.value for metric, estimate in estimates.items()}
    others = {name: predict_with_progress(posterior, x, num_draws, name) for name, x in outside.items()}
    for name, other in others.items():
        scores |= {f"ood_{name}_{key}": value for key, value in metrics.ood_table(prediction, other).flat().items()}
        scores[f"ood_{name}_mean_entropy"] = other.total.mean().item()
    return Scored(posterior, data, num_draws, prediction, outside, others, scores, replicates, validation=validation)


def means_outside(prediction: Prediction) -> Tensor:
    """Whether the mean of each row (N,) is outside its 95 % interval, as it is if a few draws carry it."""
    low, high = prediction.quantile((0.025, 0.975))
    if prediction.is_discrete:  # most counts may be 0 while their mean is right
        high = torch.maximum(high, torch.from_numpy(np.quantile(prediction.locs, 0.975, 0)))
    return (prediction.mean < low) | (prediction.mean > high)


def _finite(prediction: Prediction, data: Dataset, part: str) -> tuple[Tensor, dict[str, str]]:
    """Return (rows with finite predictions (B,), {"failed": a sentence} or {}); of log targets, their logarithms."""
    law = prediction.untransformed
    ends = prediction.mean if law is prediction else prediction.quantile((0.025, 0.975)).mT
    parts = (v.reshape(len(prediction), -1).isfinite().all(1) for v in (law.mean, law.total, ends))
    valid, rows = torch.stack([*parts]).all(0), getattr(data, f"index_{part}")
    if valid.all():
        return valid, {}
    first = int(valid.int().argmin()) if rows is None else int(rows[valid.int().argmin()])
    role = "validation" if part == "val" else part
    start = f"the prediction of {(~valid).sum():,} {role} rows, such as row {first} of {data.name}, is not finite: "
    advice = "correct outliers, in it or in training rows, or --scale robust; else a smaller --lr or a longer fit"
    return valid, {"failed": start + advice}


def _write_scores(place: RunFolder, scored: Scored) -> None:
    """Write metrics.json, and before it the replicates, from which sweeps compute paired differences."""
    archive = io.BytesIO()
    np.savez(archive, **scored.replicates)
    place.write(REPLICATES, archive.getvalue())
    place.write("metrics.json", scored.scores)


def prune_run(folder: RunFolder, data: Dataset, posterior: Posterior, num_draws: int) -> str:
    """Score a run on its test rows after removing more and more weights; write pruning.json and return a table.

    The curve has the shares ``SHARES``, and the share of weights with log α above 3, unless that is none or all.
    Raises UserError if there are no test rows, or the posterior has no signal-to-noise ratio.
    """
    removed = share_removed(posterior)
    if not len(data.x_test):
        raise UserError(f"{data.name} has no test rows to score a pruned network on")
    shares = sorted({*SHARES, *((removed.share,) if 0 < removed.share < 1 else ())})
    with progress_bar("prune", unit="draw") as report:
        curve = pruning_curve(posterior, data.x_test, data.y_test, shares, num_draws=num_draws, progress=report)
    points, measure = [point.flat() for point in curve], curve[0].measure
    content = {"log_alpha": LOG_ALPHA, "share_removed": removed.share, "share_removed_by_site": removed.layers}
    content |= {"measure": measure, "curve": points, "num_draws": num_draws, "test_rows": len(data.x_test)}
    folder.write("pruning.json", content)
    rows = [[f"{p['weights']:,}", str(estimate(p, measure)), str(estimate(p, "nll"))] for p in points]
    table = pd.DataFrame(rows, [f"{100 * p['share']:.4g} %" for p in points], ["left", measure, "nll"])
    layers = {name: f"{100 * share:.1f} %" for name, share in {**removed.layers, "all weights": removed.share}.items()}
    return (
        "\n\nWithout the weights of the lowest signal-to-noise ratio (biases stay)\n"
        f"{as_text(table)}\n\nlog α = log σ²/μ² above {LOG_ALPHA:g}\n{as_text(pd.DataFrame({'share': layers}))}"
    )


def score_rows(folder: RunFolder, recipe: Recipe, posterior: Posterior, x: Tensor, y: Tensor, label: str) -> str:
    """Score other rows, calibrated too if the run is; write metrics-WHAT.json and return a table."""
    if not len(x):
        raise UserError(f"{label}: no rows to score")
    num_draws, failed = recipe.num_draws, None
    try:  # the comparison with a prediction without inputs needs the training rows, which may have been removed
        folder.check_data(posterior, data := recipe.load())
        failed = failure(posterior, data, num_draws=num_draws, new=(x, y))
    except UserError as error:
        announce(f"{label}: not compared with knowing nothing: {error}")
    prediction = predict_with_progress(posterior, x, num_draws, label)
    scores, every = metrics.evaluate(prediction, y).flat(), f"{len(x):,} rows"
    table, content = (f"Failed: {failed}\n\n", {"failed": str(failed)}) if failed else ("", {})
    table += of_new_rows(scores, folder.read("metrics.json"), posterior.schema.task, len(x))
    table += as_text(metric_table(posterior.schema.task, {every: scores}))
    if (calibrated := with_calibration(posterior, folder.path)) is not posterior:
        made = {"level": LEVEL, "note": "of a calibration in Python"} | folder.read(GUARANTEES)
        both = {"predictive": prediction, calibrated.label: calibrated.predict(x)}
        content["calibrated"] = made | {"table": coverage_table(both, y, made["level"], {}, every)}
        table += f"\n\nAbove without calibration, below both:{guarantees_section(content['calibrated']).text()}"
    if used := _known_rows(posterior.rows, x, y):
        table += f"\n\n{used:,} of these rows trained this run, or equal such: they fit better than new ones"
    if calibrated is not posterior and (used := _known_rows(calibrated.rows, x, y)):
        table += f"\n\n{used:,} of these rows calibrated it: what is said of new ones does not hold of them"
    path = folder.write(f"metrics-{label}.json", scores | {"test_rows": len(x)} | content)
    return f"{table}\n\n95 % intervals in brackets; written: {path}"


def _known_rows(digests: Tensor | None, x: Tensor, y: Tensor) -> int:
    return 0 if digests is None else int(torch.isin(row_digests(x, y), digests).sum())


def outside_inputs(names: Sequence[str], schema: Schema, *, num: int, invert: bool = False) -> dict[str, Tensor]:
    """Return {name: standardised inputs} for the arguments of --ood."""
    if names and not schema.has_classes:
        raise UserError("--ood scores class probabilities; this run is a regression, so look at its epistemic variance")
    texts = dict.fromkeys(text for name in names for text in NOISE.get(name, (name,)))
    if len({Path(text).stem for text in texts}) < len(texts):
        raise UserError(f"two of the --ood sets have one name, but for their folders: rename one of {', '.join(texts)}")
    return {Path(text).stem: load_inputs(text, schema, num=num, invert=invert) for text in texts}


def labelled(name: str, schema: Schema, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Load other labelled data (x standardised, y): a file, or a named set's test part; classes match by name."""
    if Path(name).suffix.lower() in TABLES:
        x, y = read_rows(name, schema)
        if y is None:
            raise UserError(f"{name}: no column '{schema.target}', so there is nothing to score against; use predict")
        return x, y
    if name in DATASETS:
        data = load_data(name, **{key: recipe.data.get(key) for key in ("features", "exclude")})
        like, x, y = data.schema, data.schema.unstandardise(data.x_test), data.y_test
    else:
        from bnn_pyro.datasets.images import load_folder

        of_folder = (path := resolve(name)).is_dir() and schema.is_image
        drop = recipe.data.get("drop_missing") or recipe.data.get("missing") == "drop"
        folder = of_folder and load_folder(path, schema.input_shape, drop_damaged=drop)
        x, y = (like := folder or archive(path, task=schema.task)).test or (like.x, like.y)
    if like.task != schema.task:
        raise UserError(f"{name}: is {like.task}, and this run is {schema.task}")
    if tuple(x.shape[1:]) != schema.input_shape:
        raise UserError(f"{name}: inputs of shape {tuple(x.shape[1:])}; this run takes {schema.input_shape}")
    x = schema.standardise(x) if name in DATASETS else standardised(x, schema)
    if not schema.has_classes:
        return x, y.to(torch.float32)
    if strange := [c for c in like.classes if c not in schema.classes]:
        raise UserError(f"{name}: class '{strange[0]}' is none of the run's: {', '.join(schema.classes):.60}")
    return x, torch.tensor([schema.classes.index(c) for c in like.classes])[y]
