"""Diagnose a run: write diagnosis.json, diagnosis.html, figures/diagnose-*.png and posterior.nc."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from bnn_pyro import diagnostics, plots
from bnn_pyro.datasets.dataset import Dataset, Schema
from bnn_pyro.errors import UserError
from bnn_pyro.posterior import Posterior
from bnn_pyro.progress import progress_bar
from bnn_pyro.reports import read_texts
from bnn_pyro.reports.page import Picture, draw_figures, facts_of, render
from bnn_pyro.reports.tables import MEANING, Section, verdict_lines
from bnn_pyro.runs.folder import RunFolder
from bnn_pyro.runs.recipe import Recipe

#: Prefix of the names of figures, which distinguishes them from the figures of the report.
PREFIX = "diagnose-"
#: Format of counts, which are rounded down (numbers of effective draws need not be whole).
WHOLE = "{:,.0f}"
#: Counts; a table that would have nothing else is left out.
COUNTS = ("points", "loo_rows", "weights_shown", "chains", "draws")


def diagnose_run(folder: RunFolder, recipe: Recipe, data: Dataset, posterior: Posterior, place: RunFolder) -> str:
    """Diagnose a run into ``place``; return a text for a terminal. Raises UserError if the data are not the run's."""
    folder.check_data(posterior, data)
    start = time.perf_counter()
    with progress_bar("diagnose") as report:
        diagnosis = diagnostics.diagnose(posterior, data, progress=report)
    content = diagnosis.to_dict() | {"seconds": round(time.perf_counter() - start, 1), "num_draws": recipe.num_draws}
    place.write("diagnosis.json", content)  # first, because drawing may fail
    figures = draw_diagnosis(diagnosis, posterior.schema)
    place.write_figures(figures, [f"{PREFIX}*"])
    run, tables = folder.facts(), diagnosis_tables(diagnosis)
    about = {"title": f"Diagnosis: {run.title}", "subtitle": run.subtitle, "facts": facts_of(run)}
    summaries, weights = ([t for t in tables if (MEANING in t.table) == first] for first in (True, False))
    page = {"verdicts": diagnosis.verdicts, "tables": summaries, "figures": figures, "weights": weights}
    place.write("diagnosis.html", render("diagnosis.html.j2", **about, **page))
    parts = [f"\n{run.title}: {run.subtitle}\n", verdict_lines([vars(verdict) for verdict in diagnosis.verdicts])]
    parts += [f"\n{section.text()}" for section in summaries]  # without the table of weights
    return "\n".join(parts)


def write_draws(posterior: Posterior, data: Dataset, place: RunFolder) -> None:
    """Write the draws as netCDF for ArviZ. Raises UserError if that fails."""
    try:
        diagnostics.save_netcdf(diagnostics.to_arviz(posterior, data), place.path / "posterior.nc")
    except (UserError, MemoryError) as error:
        reason = str(error) or "there is not enough memory for all draws"
        raise UserError(f"the draws for ArviZ are missing, everything else was written: {reason}") from None


def diagnosis_tables(diagnosis: diagnostics.Diagnosis) -> list[Section]:
    """Return the tables that apply, those in function space first; the last one has some weights."""
    numbers, tables = diagnosis.statistics, []
    for texts in read_texts("statistics")["tables"]:
        used = {key: row for key, row in texts["statistics"].items() if key in numbers}
        if any(key not in COUNTS for key in used):
            of = "nested R-hat" if numbers.get("nested") else "R-hat"
            rows = {
                name.replace("R-hat", of): {"value": _number(numbers[key], form), "required": demand, MEANING: meaning}
                for key, (name, meaning, form, demand) in used.items()
            }
            tables.append(Section(texts["title"], texts["sentence"], pd.DataFrame.from_dict(rows, orient="index")))
    if diagnosis.weights:
        lines = diagnosis.weights[:: math.ceil(len(diagnosis.weights) / 20)]  # at most 20 of them
        sentence = f"{len(lines)} of the {len(diagnosis.weights)} looked at, evenly chosen over the network."
        table = pd.DataFrame(lines).set_index("name").map(lambda value: _number(value, "{:.4g}"))
        tables.append(Section("Some weights one by one", sentence, table.rename_axis(None)))
    return tables


def _number(value: Any, form: str) -> str:
    if value is None or math.isnan(value):
        return "–"
    value = math.floor(value) if form == WHOLE and math.isfinite(value) else value
    return form.format(value).replace("-", "−").replace("%", " %")


#: {figure: function that draws it from the diagnosis' statistics, series and their labels}, in the order of the page.
FIGURES: dict[str, Callable[[Mapping[str, Any]], object]] = {
    "convergence": lambda e: plots.convergence(
        e["rhat"], e["ess_bulk"], e["ess_tail"], draws=e["outputs"][..., 0].size, nested=bool(e.get("nested"))
    ),
    "outputs": lambda e: plots.trace_ranks(e["outputs"], e["labels"], diverging=e["diverging"], unit=e["unit"]),
    "log-joint": lambda e: plots.trace_ranks(
        e["lp"][..., None], ["log joint density"], diverging=e["diverging"], unit="nats"
    ),
    "elbo": lambda e: plots.training_curves({"elbo": e["elbo"]}),
    "pareto-k": lambda e: plots.pareto_k(e["pareto_k"], rows=e.get("loo_row_numbers")),
    "loo-pit": lambda e: None if math.isnan(e["loo_pit"].sum()) else plots.loo_pit(e["loo_pit"]),
    "replicated": lambda e: plots.posterior_predictive(
        e["replicated"], e["observed"], classes=e["classes"], label=e["target"]
    ),
    "weights": lambda e: plots.trace_ranks(e["weights"], e["weight_labels"], diverging=e["diverging"], unit="weight"),
}


def draw_diagnosis(diagnosis: diagnostics.Diagnosis, schema: Schema) -> list[Picture]:
    """Draw every figure for which the diagnosis has the data."""
    unit = "log-odds" if schema.has_classes else f"mean of {schema.target}"
    start = f"{unit} of " if schema.classes else f"{unit}, "  # part of the labels that the axis repeats
    prefix = "class " if schema.classes and all(name.isdigit() for name in schema.classes) else ""
    labels = [prefix + label.removeprefix(start) for label in diagnosis.series.get("output_labels", ())]
    about = {"unit": unit, "labels": labels, "classes": schema.classes, "target": schema.target or "target"}
    evidence = {"diverging": None, **diagnosis.statistics, **diagnosis.series, **about}
    return draw_figures("diagnose", FIGURES, evidence, PREFIX)
