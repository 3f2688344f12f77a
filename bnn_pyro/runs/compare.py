"""Compare several runs on the same test rows: which one predicts best, and by how much."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path

import numpy as np
import torch

from bnn_pyro import metrics, plots
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.diagnostics import failure
from bnn_pyro.diagnostics.draws import KINDS, kind
from bnn_pyro.diagnostics.importance import GOOD_K, MIN_TAIL, Loo, NoWeights, importance_weights, leave_one_out, psis
from bnn_pyro.errors import UserError, counted
from bnn_pyro.posterior import Posterior
from bnn_pyro.predictive import Prediction
from bnn_pyro.reports import read_texts, tables
from bnn_pyro.reports.page import Picture, draw_figures, facts_of, render
from bnn_pyro.reports.ranking import ranked, ranking_table
from bnn_pyro.runs.baselines import paired_differences, read_predictions
from bnn_pyro.runs.evaluate import load_posterior, predict_with_progress
from bnn_pyro.runs.folder import RunFolder
from bnn_pyro.runs.recipe import Recipe


def compare_runs(
    folders: Mapping[RunFolder, Recipe], module: str | None = None, files: Sequence[Path] = (), form: str = "text"
) -> tuple[str, str]:
    """Score runs on the same test rows, and rank them by these scores and by PSIS-LOO.

    module: package.module:function of runs of a user's own module.
    files: with predictions of the same rows, see :func:`read_predictions`.   form: of tables, see ``as_text``.
    Returns a text for a terminal, and comparison.html.
    Raises UserError if test rows differ, or there are none.
    """
    modules = list(dict.fromkeys(filter(None, (getattr(r.entry, "module", None) for r in folders.values()))))
    if len(modules) > 1 and "," not in (module or ""):
        raise UserError(f"the runs are of {len(modules)} modules: --module {','.join(modules)} gives that of each")
    first, truth, runs = next(iter(folders)), None, []
    predictions: dict[str, Prediction] = {}
    left_out: dict[str, Loo | str] = {}
    names = Counter(folder.path.name for folder in folders)
    for folder, recipe in folders.items():
        data, label = recipe.load(), folder.path.name if names[folder.path.name] == 1 else str(folder.path)
        truth = truth or data
        same = truth.schema.task == data.schema.task and torch.equal(truth.y_test, data.y_test)
        if same and truth.schema.features == data.schema.features and truth.x_test.shape == data.x_test.shape:
            a, b = (d.schema.unstandardise(d.x_test[:]) for d in (truth, data))
            same = torch.allclose(a, b, rtol=1e-4, atol=1e-4 * float(a.std()))
        if not same:
            raise UserError(f"{first.path} and {folder.path} have other test rows, so they cannot be compared in pairs")
        if not len(data.x_test):
            raise UserError(f"{first.path} has no test rows to compare on")
        posterior = load_posterior(folder, recipe.device, module)
        if (failed := failure(posterior, data, num_draws=recipe.num_draws)) and not failed.finite:
            raise UserError(f"{folder.path} has nothing to compare: {failed}")
        predictions[label] = predict_with_progress(posterior, data.x_test, recipe.num_draws, label)
        scores, facts = metrics.evaluate(predictions[label], data.y_test).flat(), folder.facts(label)
        if reason := str(failed or facts.failed):
            scores["failed"] = reason
        runs.append(dataclasses.replace(facts, metrics=scores))
        left_out[label] = _left_out(posterior, data, truth)
    for path in files:
        predictions[str(path)] = made = read_predictions(path, truth)
        recipe = {"variant": path.stem, "inference": "predictions of a file"}
        scores, left_out[str(path)] = metrics.evaluate(made, truth.y_test).flat(), "a file has no posterior"
        runs.append(tables.RunFacts(str(path), "", runs[0].task, recipe, scores, {}, runs[0].provenance))
    base, *others = predictions
    differences = {k: paired_differences(predictions[k], predictions[base], truth.y_test) for k in others}
    densities = {label: prediction.log_prob(truth.y_test).numpy().round(4) for label, prediction in predictions.items()}
    failed = [{**run.problem, "about": run.label} for run in runs if run.problem]  # or chains that disagree
    notes = {w["about"]: "its fit failed" if w["level"] == "failed" else "not converged" for w in failed}
    task, label, texts = runs[0].task, runs[0].label, read_texts("statistics")
    title = f"Ranking by held-out log density, {len(truth.x_test):,} test rows"
    sentence, about = texts["rankings"]["held_out"].format(**texts["rankings"]), texts["comparison"]
    scores = tables.metric_table(task, {run.label: run.metrics for run in runs})
    paired = tables.metric_table(task, {}, differences)
    sections = [
        tables.Section(title, sentence, ranking_table(ranked(densities, notes))),
        _loo_ranking(left_out, len(truth.x_train)),
        tables.Section("Metrics on the same test rows", about["metrics"], scores),
        tables.Section(f"Paired differences to {label}", about["differences"], paired),
    ]
    text = ["\n" + tables.verdict_lines([one], named=True) for one in failed]
    text += [f"\n{section.text(form)}" for section in sections]
    html = render(
        "comparison.html.j2",
        title=f"Comparison on {runs[0].provenance['data']}",
        subtitle=f"{task.capitalize()} · {len(truth.x_test):,} test rows · {len(runs)} runs",
        summary=[line for k, d in differences.items() for line in tables.headline_differences(k, label, d, task)],
        failed=failed,
        sections=sections,
        figures=draw_scores(runs, differences),
        runs=[(run.folder, facts_of(run)) for run in runs if run.folder],
    )
    return "\n".join(text), html


def _left_out(posterior: Posterior, data: Dataset, truth: Dataset) -> Loo | str:
    if len(data.y_train) != len(truth.y_train) or not torch.equal(data.y_train, truth.y_train):
        return "was trained on other rows than the first run, so that leaving them out compares nothing"
    if data.schema.targets:
        return "has several targets a row, and leaving rows out takes one"
    draws_kind = kind(posterior)
    if draws_kind == "chains" and (num := len(next(iter(posterior.chains.values())).flatten(0, 1))) < MIN_TAIL:
        return f"its chains have {num} draws, too few to leave rows out by ({MIN_TAIL} are needed)"
    if draws_kind == "chains":
        return leave_one_out(posterior, data)
    if draws_kind != "approximation":
        return f"no chains, so nothing to leave rows out by: {KINDS[draws_kind]}"
    try:
        draws, log_weights = importance_weights(posterior, data)
        if not (k := float(psis(log_weights[None])[1][0])) <= GOOD_K:
            raise NoWeights(f"its k-hat is {k:.2f}, above {GOOD_K}")
    except NoWeights as reason:
        return f"an approximation whose draws cannot be reweighted: {reason}"
    return leave_one_out(draws, data, log_weights)


def _loo_ranking(results: Mapping[str, Loo | str], num: int) -> tables.Section:
    """Rank by PSIS-LOO over the rows that all runs with a PSIS-LOO have: all ``num`` rows, or some of a large set."""
    reasons = [f"{label}: {reason}" for label, reason in results.items() if isinstance(reason, str)]
    estimates = {label: loo for label, loo in results.items() if isinstance(loo, Loo)}
    rows = reduce(np.intersect1d, [loo.rows for loo in estimates.values()], np.arange(num))
    points, notes = {}, {}
    for label, loo in estimates.items() if len(rows) else ():
        mine = np.isin(loo.rows, rows)
        points[label], bad = loo.elpd[mine], int((~(loo.pareto_k[mine] <= GOOD_K)).sum())
        if bad:
            notes[label] = f"{counted(bad, 'row')} with k above {GOOD_K}"
    title = f"Ranking by PSIS-LOO, {len(rows):,} of {num:,} training rows"
    sentence = read_texts("statistics")["rankings"]["left_out"]
    return tables.Section(title, sentence, ranking_table(ranked(points, notes)), reasons)


def draw_scores(runs: Sequence[tables.RunFacts], differences: Mapping[str, Mapping[str, float]]) -> list[Picture]:
    """Draw a forest plot of the scores.   differences: {label: {metric, metric_low, metric_high}} to the first run."""
    names, scores = [f"{k}: {run.recipe['variant']} ({run.recipe['inference']})" for k, run in enumerate(runs, 1)], {}
    for metric, title in read_texts("figures")["scores"].items():
        if all(f"{metric}_low" in run.metrics for run in runs):
            scores[title] = {name: _scores(run, metric, differences) for name, run in zip(names, runs, strict=True)}
    evidence = {"rows": runs[0].provenance["rows"]["test"], "scored": list(scores)}
    return draw_figures("compare", {"forest": lambda e: plots.sweep_points(scores)}, evidence)


def _scores(run: tables.RunFacts, metric: str, differences: Mapping[str, Mapping[str, float]]) -> plots.Scores:
    """Return a metric with its 95 % interval over the test rows, and the verdict on its difference to the first run."""
    unit = 100 if metric in tables.SHARES else 1
    value, low, high = (unit * run.metrics[metric + end] for end in ("", "_low", "_high"))
    cell = tables.difference(differences.get(run.label, {}), metric, run.task)
    kind = "first" if run.label not in differences else cell.verdict if cell else ""
    return plots.Scores([], value, (value - low, high - value), kind)
