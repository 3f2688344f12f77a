"""Several runs on the same test rows: who predicts best, by how much, and what they do not agree on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch

from bnn_pyro import metrics, plots
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.diagnostics import Diagnosis
from bnn_pyro.diagnostics.arviz_bridge import LEAST_TAIL, psis
from bnn_pyro.diagnostics.draws import KINDS, kind
from bnn_pyro.diagnostics.importance import GOOD_K, Loo, NoWeights, importance_weights, leave_one_out
from bnn_pyro.errors import UserError
from bnn_pyro.posterior import Posterior
from bnn_pyro.predictive import Prediction
from bnn_pyro.progress import progress_bar
from bnn_pyro.reports.page import Picture, comparison_html
from bnn_pyro.reports.ranking import CLEAR, SOURCES, Ranking, ranked
from bnn_pyro.reports.tables import RunFacts, difference_rows, metric_rows, plain_table
from bnn_pyro.runs.diagnose import read_diagnosis
from bnn_pyro.runs.evaluate import load_posterior
from bnn_pyro.runs.folder import RunFolder
from bnn_pyro.runs.recipe import Recipe
from bnn_pyro.runs.score import paired_differences, predicted

__all__ = ["Comparison", "compare_runs", "draw_comparison", "short_labels"]

#: More methods than these share no panel that could be read.
MOST = 8
HELD_OUT = (
    "The log density that each run gives the test rows it was not trained on, summed. It rewards being right and being "
    f"as sure as one may be. {SOURCES} Here is one fit each, so that the standard errors are of the test rows alone: a "
    f"run is called worse where its difference is more than {CLEAR:.0f} of them. Another seed or split may change the "
    "order; `sweep` over several includes both sources."
)
LEFT_OUT = (
    "What each run would have said of every training row had it not seen that row, by Pareto-smoothed importance "
    "sampling from its draws (PSIS-LOO, Vehtari et al. 2017): it needs no test rows, but the draws of chains, or of an "
    "approximation that is close to the posterior. A row with a Pareto k above 0.7 is estimated badly; with more than "
    "a few of them the ranking on test rows is the one to believe."
)


@dataclass(frozen=True)
class Comparison:
    """What `compare` found: the runs' facts with their metrics, differences to the first, rankings, pictures."""

    runs: Sequence[RunFacts]
    differences: Mapping[str, Mapping[str, float]]
    rankings: Sequence[Ranking]
    pictures: Sequence[Picture]

    @property
    def text(self) -> str:
        """For a terminal."""
        first = self.runs[0]
        lines = [[row.name, *row.cells] for row in metric_rows(self.runs)]
        parts = ["\n" + plain_table(["", *(run.label for run in self.runs)], lines)]
        lines = [[row.name, *row.cells] for row in difference_rows(first.task, self.differences)]
        parts.append(f"\nPaired differences to {first.label}\n{plain_table(['', *self.differences], lines)}")
        return "\n".join([*parts, *(f"\n{ranking.text}" for ranking in self.rankings)])

    @property
    def html(self) -> str:
        """comparison.html."""
        return comparison_html(self.runs, self.differences, self.pictures, self.rankings)


def compare_runs(folders: Mapping[RunFolder, Recipe], *, show: bool = True) -> Comparison:
    """Score runs on the same test rows, rank them there and by PSIS-LOO, and draw what they dispute.

    Raises UserError where test rows differ, or there are none.
    """
    first = next(iter(folders))
    truth, runs, posteriors, predictions = None, [], [], []
    left_out: dict[str, Loo | str] = {}
    for folder, recipe in folders.items():
        data, label = recipe.load(), str(folder.path)
        truth = truth or data
        _same_test_rows(truth, data, first, folder)
        posterior = load_posterior(folder, recipe.device)
        predictions.append(predicted(posterior, data.x_test, recipe.num_draws, label, show))
        scores = metrics.evaluate(predictions[-1], data.y_test).flat()
        runs.append(dataclasses.replace(folder.facts(label), metrics=scores))
        posteriors.append(posterior)
        with progress_bar(f"leave-one-out {label}", show) as report:
            left_out[label] = _left_out(posterior, data, truth, read_diagnosis(folder))
            report(1, 1)
    differences = {
        run.label: paired_differences(prediction, predictions[0], truth.y_test)
        for run, prediction in zip(runs[1:], predictions[1:], strict=True)
    }
    densities = {r.label: p.log_prob(truth.y_test).numpy() for r, p in zip(runs, predictions, strict=True)}
    title = f"Ranking by held-out log density, {len(truth.x_test):,} test rows"
    rankings = [Ranking(title, HELD_OUT, ranked(densities)), _loo_ranking(left_out, len(truth.x_train))]
    return Comparison(runs, differences, rankings, draw_comparison(runs, posteriors, predictions, truth))


def _left_out(posterior: Posterior, data: Dataset, truth: Dataset, known: Diagnosis | None = None) -> Loo | str:
    """PSIS-LOO of one run, or the reason why it has none, which its diagnosis may know already."""
    if len(data.y_train) != len(truth.y_train) or not torch.equal(data.y_train, truth.y_train):
        return "was trained on other rows than the first run, so that leaving them out compares nothing"
    what = kind(posterior)
    if what == "chains" and (num := len(next(iter(posterior.chains.values())).flatten(0, 1))) < LEAST_TAIL:
        return f"its chains have {num} draws, too few to leave rows out by ({LEAST_TAIL} are needed)"
    if what == "chains":
        return leave_one_out(posterior, data)
    if what != "approximation":
        return f"no chains, so nothing to leave rows out by: {KINDS[what]}"
    k, why = math.nan if known is None else known.statistics.get("khat", math.nan), ""
    if not k > GOOD_K:
        try:
            draws, log_weights = importance_weights(posterior, data)
            k = float(psis(log_weights[None])[1][0])
        except NoWeights as reason:
            why = str(reason)
    if k <= GOOD_K and not why:
        return leave_one_out(draws, data, log_weights)
    return f"an approximation whose draws cannot be reweighted: {why or f'its k-hat is {k:.2f}, above {GOOD_K}'}"


def _loo_ranking(found: Mapping[str, Loo | str], num: int) -> Ranking:
    """Over the rows that all who have a PSIS-LOO have in common: all, or some of a large set."""
    held = {label: loo for label, loo in found.items() if not isinstance(loo, str)}
    reasons = [(label, reason) for label, reason in found.items() if isinstance(reason, str)]
    rows = reduce(np.intersect1d, [loo.rows for loo in held.values()]) if held else np.arange(num)
    points, notes = {}, {}
    for label, loo in held.items():
        mine = np.isin(loo.rows, rows)
        points[label], bad = loo.elpd[mine], int((~(loo.pareto_k[mine] <= GOOD_K)).sum())
        if bad:
            notes[label] = f"{bad:,} row{'s' if bad > 1 else ''} with k above {GOOD_K}"
    some = f"{num:,}" if len(rows) == num else f"{len(rows):,} of {num:,}"
    standings = ranked(points, notes) if len(rows) and held else []
    return Ranking(f"Ranking by PSIS-LOO, {some} training rows", LEFT_OUT, standings, reasons)


def _same_test_rows(truth: Dataset, data: Dataset, first: RunFolder, other: RunFolder) -> None:
    """Refuse a paired comparison of different rows. Inputs are compared in their own units."""
    same = truth.schema.task == data.schema.task and torch.equal(truth.y_test, data.y_test)
    if same and truth.schema.features == data.schema.features and truth.x_test.shape == data.x_test.shape:
        a, b = truth.schema.unstandardise(truth.x_test), data.schema.unstandardise(data.x_test)
        same = torch.allclose(a, b, rtol=1e-4, atol=1e-4 * float(a.std()))
    if not same:
        raise UserError(f"{first.path} and {other.path} have other test rows, so they cannot be compared in pairs")
    if not len(data.x_test):
        raise UserError(f"{first.path} has no test rows to compare on")


def draw_comparison(
    runs: Sequence[RunFacts], posteriors: Sequence[Posterior], predictions: Sequence[Prediction], data: Dataset
) -> list[Picture]:
    """What applies: the most disputed test row (classification), and weights of the runs that have the first's model.

    data: whose test rows the predictions are for; as the first run standardises them.
    """
    labels, found = short_labels(runs), []
    said = dict(list(zip(labels, predictions, strict=True))[:MOST])
    if data.schema.has_classes:
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
