"""From a posterior to everything that a run folder shows of it: metrics, figures, report, model card."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bnn_pyro import metrics
from bnn_pyro.datasets import DATASETS, load_data, load_inputs, read_rows
from bnn_pyro.datasets.arrays import load_archive
from bnn_pyro.datasets.dataset import Dataset, Schema
from bnn_pyro.datasets.sources import resolve
from bnn_pyro.errors import UserError
from bnn_pyro.fitting import choose_device
from bnn_pyro.loading import load
from bnn_pyro.posterior import Posterior
from bnn_pyro.progress import progress_bar
from bnn_pyro.reports.page import run_card, run_html
from bnn_pyro.reports.tables import RunFacts
from bnn_pyro.runs.diagnose import judge_chains
from bnn_pyro.runs.figures import Outside, Scene, draw_all
from bnn_pyro.runs.folder import RunFolder
from bnn_pyro.runs.prune import read_pruning
from bnn_pyro.runs.recipe import Recipe
from bnn_pyro.runs.score import on_test_rows, predicted, scores, write_scores

__all__ = [
    "evaluate_run",
    "labelled",
    "load_posterior",
    "outside_inputs",
    "score_mean_weights",
    "score_other",
]

#: Names that --ood takes for noise, and what ``load_inputs`` calls them.
NOISE = {
    "noise": ("uniform-noise", "gaussian-noise"),
    "uniform": ("uniform-noise",),
    "gaussian": ("gaussian-noise",),
}
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
    chains = {site: value.to(where) for site, value in posterior.chains.items()}
    return Posterior(posterior.model, posterior.schema, None, chains, posterior.stats, posterior.trace,
                     posterior.provenance)  # fmt: skip


def evaluate_run(
    folder: RunFolder,
    recipe: Recipe,
    data: Dataset,
    posterior: Posterior,
    baseline: Posterior | None = None,
    *,
    outside: Mapping[str, Tensor] | None = None,
    show: bool = True,
) -> RunFacts:
    """Score a run on its test rows and on inputs from elsewhere; write metrics, figures, report and model card.

    outside: {name: standardised inputs}, classification only; None takes noise for a classifier of images.
    """
    folder.check_data(posterior, data)
    pruned = read_pruning(folder)
    for place in (folder, folder.baseline):
        place.check_files()  # before anything is written
    outside = _elsewhere(outside, data)
    posteriors = {folder: posterior} | ({folder.baseline: baseline} if baseline is not None else {})
    predictions = on_test_rows(posteriors, data, recipe.num_draws, show)
    elsewhere = [
        Outside(name, x, *(predicted(p, x, recipe.num_draws, name, show) for p in posteriors.values()))
        for name, x in outside.items()
    ]
    with _steps("evaluate", 3, show) as step:
        write_scores(posteriors, predictions, elsewhere, data, recipe.num_draws, show)
        judge_chains(folder, posterior, data)
        step()
        inside = predictions[folder], predictions.get(folder.baseline)
        scene = Scene(posterior, data, recipe.num_draws, *inside, elsewhere, pruned)
        pictures = draw_all(scene, folder.path / "figures")
        step()
        run = folder.facts()
        folder.write("report.html", run_html(run, pictures))
        folder.write("README.md", run_card(run))
        step()
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
    mean, num = posterior.at_mean_weights(), recipe.num_draws
    others = {name: predicted(mean, x, num, name, show) for name, x in _elsewhere(outside, data).items()}
    prediction = predicted(mean, data.x_test, num, "test rows (mean weights)", show) if len(data.x_test) else None
    return folder.write("metrics-mean-weights.json", scores(mean, data, num, prediction, others, show))


def score_other(
    folder: RunFolder, recipe: Recipe, posterior: Posterior, name: str, *, mean_weights: bool = False, show: bool = True
) -> Path:
    """Score on other data with labels, see :func:`labelled`; the file that it wrote, metrics-NAME.json."""
    stem, x, y = labelled(name, posterior.schema, recipe)
    if not len(x):
        raise UserError(f"{name}: no rows to score")
    posterior, stem = (posterior.at_mean_weights(), f"{stem}-mean-weights") if mean_weights else (posterior, stem)
    found = metrics.evaluate(predicted(posterior, x, recipe.num_draws, stem, show), y).flat()
    return folder.write(f"metrics-{stem}.json", found | {"test_rows": len(x)})


def outside_inputs(names: Sequence[str], schema: Schema, *, num: int, invert: bool = False) -> dict[str, Tensor]:
    """{name: standardised inputs} for the --ood arguments."""
    if names and not schema.has_classes:
        raise UserError("--ood scores class probabilities; this run is a regression, so look at its epistemic variance")
    wanted = [kind for name in names for kind in NOISE.get(name, (name,))]
    found = {}
    for text in wanted:
        name = text if text in DATASETS or text.endswith("-noise") else Path(text).stem
        found[name] = load_inputs(text, schema, num=num, invert=invert)
    return found


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
        raise UserError(f"{name}: class '{strange[0]}' is none of the run's: {_few(schema.classes)}")
    return Path(name).stem, x, torch.tensor([schema.classes.index(c) for c in classes])[y]


# -- pieces ------------------------------------------------------------------------------------------------------------
def _elsewhere(outside: Mapping[str, Tensor] | None, data: Dataset) -> Mapping[str, Tensor]:
    """Inputs from elsewhere: those given, or noise for a classifier of images where None are."""
    if outside is None and data.schema.is_image and data.schema.has_classes:
        outside = outside_inputs(["noise"], data.schema, num=NOISE_IMAGES)
    if outside and not len(data.x_test):
        raise UserError(f"{data.name} has no test rows that inputs from elsewhere could be told from")
    return outside or {}


def _few(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


@contextmanager
def _steps(description: str, of: int, show: bool) -> Iterator[Any]:
    with progress_bar(description, show) as report:
        done = 0

        def step() -> None:
            nonlocal done
            done += 1
            report(done, of, {})

        yield step
