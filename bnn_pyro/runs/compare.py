"""Several runs on the same test rows: who predicts best, by how much, and what they do not agree on."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch

from bnn_pyro import metrics, plots
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.diagnostics import failure
from bnn_pyro.diagnostics.draws import KINDS, kind
from bnn_pyro.diagnostics.importance import GOOD_K, MIN_TAIL, Loo, NoWeights, importance_weights, leave_one_out, psis
from bnn_pyro.errors import UserError
from bnn_pyro.plots.sweep import LABELS
from bnn_pyro.posterior import Posterior
from bnn_pyro.predictive import Prediction
from bnn_pyro.progress import progress_bar
from bnn_pyro.reports.page import Picture, draw_figures, facts_of, read_texts, render
from bnn_pyro.reports.ranking import CLEAR, SOURCES, Ranking, ranked
from bnn_pyro.reports.tables import (
    SHARES,
    RunFacts,
    difference,
    headline_differences,
    metric_rows,
    plain_table,
    verdict_lines,
)
from bnn_pyro.runs.baselines import paired_differences
from bnn_pyro.runs.evaluate import load_posterior, predict_with_progress
from bnn_pyro.runs.folder import RunFolder
from bnn_pyro.runs.recipe import Recipe

#: More methods than these share no panel that could be read.
MAX_RUNS = 8


def compare_runs(folders: Mapping[RunFolder, Recipe], module: str | None = None) -> tuple[str, str]:
    """Score runs on the same test rows, rank them there and by PSIS-LOO, and draw what they dispute.

    module: package.module:function of runs of a user's own module.

    Returns what was found as text for a terminal, and comparison.html.

    Raises UserError where test rows differ, or there are none.
    """
    first = next(iter(folders))
    truth, runs, posteriors, predictions = None, [], [], []
    left_out: dict[str, Loo | str] = {}
    for folder, recipe in folders.items():
        data, label = recipe.load(), str(folder.path)
        truth = truth or data
        _same_test_rows(truth, data, first, folder)
        posterior = load_posterior(folder, recipe.device, module)
        failed = failure(posterior, data, num_draws=recipe.num_draws)
        if failed and not failed.finite:
            raise UserError(f"{label} has nothing to compare: {failed}")
        predictions.append(predict_with_progress(posterior, data.x_test, recipe.num_draws, label))
        scores = metrics.evaluate(predictions[-1], data.y_test).flat() | ({"failed": str(failed)} if failed else {})
        runs.append(dataclasses.replace(folder.facts(label), metrics=scores))
        posteriors.append(posterior)
        with progress_bar(f"leave-one-out {label}", unit="run") as report:
            left_out[label] = _left_out(posterior, data, truth)
            report(1, 1)
    differences = {
        run.label: paired_differences(prediction, predictions[0], truth.y_test)
        for run, prediction in zip(runs[1:], predictions[1:], strict=True)
    }
    densities = {r.label: p.log_prob(truth.y_test).numpy() for r, p in zip(runs, predictions, strict=True)}
    title = f"Ranking by held-out log density, {len(truth.x_test):,} test rows"
    sentence = read_texts("statistics")["rankings"]["held_out"].format(sources=SOURCES, clear=CLEAR)
    notes = {run.label: "its fit failed" for run in runs if run.failed}
    rankings = [Ranking(title, sentence, ranked(densities, notes)), _loo_ranking(left_out, len(truth.x_train))]
    pictures = draw_comparison(runs, posteriors, predictions, truth, differences)
    return show_comparison(runs, differences, rankings, pictures)


def show_comparison(
    runs: Sequence[RunFacts],
    differences: Mapping[str, Mapping[str, float]],
    rankings: Sequence[Ranking],
    pictures: Sequence[Picture],
) -> tuple[str, str]:
    """(text, HTML). differences: {label: {metric, metric_low, metric_high}} to the first run."""
    first, columns = runs[0], [run.label for run in runs]
    metric_table = metric_rows(first.task, [run.metrics for run in runs])
    paired = metric_rows(first.task, [], list(differences.values()))
    failed = [{**run.worries[0], "about": run.label} for run in runs if run.failed]
    text = [
        *("\n" + verdict_lines([{**one, "sentence": f"{one['about']}: {one['sentence']}"}]) for one in failed),
        "\n" + plain_table(["", *columns], [[row.name, *row.cells] for row in metric_table]),
        f"\nPaired differences to {first.label}",
        plain_table(["", *differences], [[row.name, *row.cells] for row in paired]),
        *(f"\n{ranking.text}" for ranking in rankings),
    ]
    html = render(
        "comparison.html.j2",
        title=f"Comparison on {first.provenance['data']}",
        subtitle=f"{first.task.capitalize()} · {first.provenance['rows']['test']:,} test rows · {len(runs)} runs",
        summary=[line for k, d in differences.items() for line in headline_differences(k, first.label, d, first.task)],
        failed=failed,
        columns=columns,
        metrics=metric_table,
        differences=paired,
        rankings=rankings,
        figures=pictures,
        runs=[(run.label, facts_of(run)) for run in runs],
    )
    return "\n".join(text), html


def _left_out(posterior: Posterior, data: Dataset, truth: Dataset) -> Loo | str:
    """PSIS-LOO of one run, or the reason why it has none."""
    if len(data.y_train) != len(truth.y_train) or not torch.equal(data.y_train, truth.y_train):
        return "was trained on other rows than the first run, so that leaving them out compares nothing"
    what = kind(posterior)
    if what == "chains" and (num := len(next(iter(posterior.chains.values())).flatten(0, 1))) < MIN_TAIL:
        return f"its chains have {num} draws, too few to leave rows out by ({MIN_TAIL} are needed)"
    if what == "chains":
        return leave_one_out(posterior, data)
    if what != "approximation":
        return f"no chains, so nothing to leave rows out by: {KINDS[what]}"
    try:
        draws, log_weights = importance_weights(posterior, data)
        if not (k := float(psis(log_weights[None])[1][0])) <= GOOD_K:
            raise NoWeights(f"its k-hat is {k:.2f}, above {GOOD_K}")
    except NoWeights as reason:
        return f"an approximation whose draws cannot be reweighted: {reason}"
    return leave_one_out(draws, data, log_weights)


def _loo_ranking(results: Mapping[str, Loo | str], num: int) -> Ranking:
    """Over the rows that all who have a PSIS-LOO have in common: all of ``num``, or some of a large set."""
    reasons = [(label, reason) for label, reason in results.items() if isinstance(reason, str)]
    estimates = {label: loo for label, loo in results.items() if isinstance(loo, Loo)}
    rows = reduce(np.intersect1d, [loo.rows for loo in estimates.values()], np.arange(num))
    points, notes = {}, {}
    for label, loo in estimates.items() if len(rows) else ():
        mine = np.isin(loo.rows, rows)
        points[label], bad = loo.elpd[mine], int((~(loo.pareto_k[mine] <= GOOD_K)).sum())
        if bad:
            notes[label] = f"{bad:,} row{'s' if bad > 1 else ''} with k above {GOOD_K}"
    title = f"Ranking by PSIS-LOO, {len(rows):,} of {num:,} training rows"
    return Ranking(title, read_texts("statistics")["rankings"]["left_out"], ranked(points, notes), reasons)


def _same_test_rows(truth: Dataset, data: Dataset, first: RunFolder, other: RunFolder) -> None:
    """Refuse a paired comparison of different rows. Inputs are compared in their own units."""
    same = truth.schema.task == data.schema.task and torch.equal(truth.y_test, data.y_test)
    if same and truth.schema.features == data.schema.features and truth.x_test.shape == data.x_test.shape:
        a, b = truth.schema.unstandardise(truth.x_test[:]), data.schema.unstandardise(data.x_test[:])
        same = torch.allclose(a, b, rtol=1e-4, atol=1e-4 * float(a.std()))
    if not same:
        raise UserError(f"{first.path} and {other.path} have other test rows, so they cannot be compared in pairs")
    if not len(data.x_test):
        raise UserError(f"{first.path} has no test rows to compare on")


def draw_comparison(
    runs: Sequence[RunFacts],
    posteriors: Sequence[Posterior],
    predictions: Sequence[Prediction],
    data: Dataset,
    differences: Mapping[str, Mapping[str, float]],
) -> list[Picture]:
    """What applies: the scores with their intervals, the most disputed test row (classification), and weights of the
    runs that have the first's model.

    data: whose test rows the predictions are for; as the first run standardises them.
    differences: see :func:`show_comparison`.
    """
    labels = [f"{k}: {run.recipe['variant']} ({run.recipe['inference']})" for k, run in enumerate(runs, 1)]
    named = dict(list(zip(labels, predictions, strict=True))[:MAX_RUNS])
    pairs = list(zip(labels, posteriors, strict=True))[:MAX_RUNS]
    alike = {label: posterior for label, posterior in pairs if plots.unlike(posteriors[0], posterior) is None}
    scores = {
        words: {label: _scores(run, metric, differences) for label, run in zip(labels, runs, strict=True)}
        for metric, words in LABELS.items()
        if all(f"{metric}_low" in run.metrics for run in runs)
    }
    evidence: dict[str, Any] = {"rows": len(data.x_test), "alike": list(alike)[1:], "dispute": None}
    evidence["scored"] = list(scores)
    if data.schema.has_classes:
        evidence["row"] = plots.most_disputed(named)
        evidence["dispute"] = plots.dispute(named, evidence["row"])
    figures = {
        "forest": lambda e: plots.sweep_points(scores),
        "method-predictions": lambda e: plots.method_predictions(
            named, e["row"], x=data.x_test, y=data.y_test, schema=data.schema
        ),
        "weight-posteriors": lambda e: plots.weight_posteriors(alike),
    }
    return draw_figures("compare", figures, {name: name for name in figures}, evidence)


def _scores(run: RunFacts, metric: str, differences: Mapping[str, Mapping[str, float]]) -> plots.Scores:
    """A metric with its 95 % interval over the test rows, and how it differs from the first run's in pairs."""
    value, low, high = (run.metrics[metric + end] * (100 if metric in SHARES else 1) for end in ("", "_low", "_high"))
    paired = differences.get(run.label)
    cell = None if paired is None else difference(paired, metric, run.task)
    return plots.Scores([], value, (value - low, high - value), "first" if paired is None else cell.verdict)
