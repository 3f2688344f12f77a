"""The numbers of a diagnosis as tables: what each is, how it is written, and what is asked of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from bnn_pyro.diagnostics import Diagnosis

__all__ = ["TABLES", "Statistic", "Table", "tables_of"]

#: Counts, of which effective draws are rounded down.
WHOLE = "{:,.0f}"
#: Rows of the table of weights that are shown.
MOST_WEIGHTS = 20


class Statistic(NamedTuple):
    """How a number is called, what it is, how it is written, and what is asked of it."""

    name: str
    meaning: str
    form: str = "{:.3g}"
    asked: str = ""


class Table(NamedTuple):
    """A heading, a sentence, and rows: name, explanation, then one cell a column."""

    title: str
    sentence: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


#: Every table of a diagnosis: heading, sentence, and its statistics; rows of what a run has not are left out.
TABLES: tuple[tuple[str, str, dict[str, Statistic]], ...] = (
    (
        "Predictions: have the chains converged?",
        "Of what the network computes at test points. Weights of a network are not identified (units can be exchanged, "
        "signs flipped), so the verdict rests on this table and not on the one of the weights.",
        {
            "points": Statistic("points looked at", "test rows, or training rows where there are none", WHOLE),
            "rhat_max": Statistic(
                "largest R-hat", "how much more all chains vary than each does by itself; 1: not at all", "{:.3f}",
                "below 1.01",
            ),
            "rhat_p": Statistic(
                "its p-value", "how often the largest of so many would be above 1.01 and as large by chance", "{:.1g}",
                "above 0.01",
            ),
            "rhat_share": Statistic("outputs with R-hat below 1.01", "share of points and classes", "{:.1%}", "100 %"),
            "ess_bulk_min": Statistic(
                "fewest effective draws, bulk", "how many independent draws the centre of an output is worth",
                WHOLE, "400 or more",
            ),
            "ess_tail_min": Statistic(
                "fewest effective draws, tails", "the same of its 5 % and 95 % quantiles", WHOLE, "400 or more"
            ),
            "spread_max": Statistic(
                "largest predictive spread", "standard deviation at a point, in those of the targets or in log-odds"
            ),
            "mcse_max": Statistic(
                "largest Monte-Carlo error", "of an output's mean, in posterior standard deviations of it", "{:.3f}",
                "below 0.05",
            ),
        },
    ),
    (
        "The sampler at work",
        "What the transitions of the chains say of themselves.",
        {
            "kinetic_temperature": Statistic(
                "kinetic temperature", "mean squared momentum as a share of what is right, without rejections",
                "{:.2f}", "1",
            ),
            "chains": Statistic("chains", "", WHOLE),
            "draws": Statistic("kept draws of each", "", WHOLE),
            "divergences": Statistic(
                "divergent transitions", "trajectories that left the energy level: a region is not reached", WHOLE,
                "none",
            ),
            "divergent_chains": Statistic("chains with divergent transitions", "", WHOLE, "none"),
            "stuck_chains": Statistic(
                "stuck chains", "which hardly move, or stay at a far lower density than the others", WHOLE, "none"
            ),
            "acceptance_mean": Statistic("mean acceptance rate", "", "{:.2f}"),
            "bfmi_min": Statistic(
                "smallest BFMI", "how far one transition moves the energy, against its whole range", "{:.2f}",
                "above 0.3",
            ),
            "max_tree_share": Statistic(
                "trajectories of the largest length", "they may have been cut off before they turned", "{:.1%}", "few",
            ),
        },
    ),
    (
        "Rows left out: PSIS-LOO",
        "How each training row is predicted by the others, from the draws at hand (Vehtari et al. 2017).",
        {
            "loo_rows": Statistic("training rows", "all of them, or some evenly chosen", WHOLE),
            "elpd_loo": Statistic("log predictive density", "nats, summed over the rows; higher is better", "{:,.1f}"),
            "elpd_loo_se": Statistic("its standard error", "over other such rows, nats", "{:,.1f}"),
            "p_loo": Statistic("effective number of parameters", "what rows add to their own density", "{:,.1f}"),
            "pareto_k_max": Statistic(
                "largest Pareto k", "how much one row moves the posterior", "{:.2f}", "up to 0.7"
            ),
            "pareto_k_bad": Statistic("rows above 0.7", "whose estimate is unreliable", WHOLE, "none"),
            "pit_p": Statistic(
                "p-value of a uniform LOO-PIT", "small: not calibrated on rows left out", "{:.2g}", "above 0.01"
            ),
        },
    ),
    (
        "Data that the posterior would make",
        "Training targets beside new ones that it draws for the same inputs.",
        {
            "ppc_p": Statistic(
                "share of new data sets that fit worse", "near 0: the data are stranger than the model would make them",
                "{:.2g}", "above 0.01",
            ),
        },
    ),
    (
        "The approximation",
        "How far its draws are from the posterior's, by the weights p(w, D) / q(w) that would correct them "
        "(Yao et al. 2018).",
        {
            "khat": Statistic("k-hat", "shape of the tail of the importance weights", "{:.2f}", "below 0.7"),
            "elbo_rise": Statistic(
                "rise of the objective at the end", "nats in the last tenth of the training; 0: it had settled",
                "{:,.1f}", "0",
            ),
        },
    ),
    (
        "Weights",
        "Of some weights only, as many as can be read. Large values are no alarm where the predictions have converged: "
        "chains may sit at mirror images of one network.",
        {
            "weights_shown": Statistic("weights looked at", "evenly chosen", WHOLE),
            "weight_rhat_max": Statistic("largest R-hat", "", "{:.3f}"),
            "weight_rhat_p": Statistic("its p-value", "as above", "{:.1g}"),
            "weight_ess_min": Statistic("fewest effective draws", "", WHOLE),
        },
    ),
)  # fmt: skip


#: Heads of the columns of weights.
HEADS = {"rhat": "R-hat", "ess_bulk": "bulk ESS", "ess_tail": "tail ESS", "mcse": "error of the mean, sd"}
#: Counts that alone make no table.
COUNTS = ("points", "loo_rows", "weights_shown", "chains", "draws")


def tables_of(found: Diagnosis) -> list[Table]:
    """The tables that apply, function space first; the last has some weights one by one."""
    tables = []
    for title, sentence, statistics in TABLES:
        held = {key: s for key, s in statistics.items() if key in found.statistics}
        if any(key not in COUNTS for key in held):
            rows = [_row(s, found.statistics[key], found) for key, s in held.items()]
            tables.append(Table(title, sentence, ("value", "asked for"), rows))
    if found.weights:
        tables.append(_weights(found))
    return tables


def _row(statistic: Statistic, value: float, found: Diagnosis) -> list[str]:
    return [_named(statistic.name, found), statistic.meaning, _number(value, statistic.form), statistic.asked]


def _named(name: str, found: Diagnosis) -> str:
    return name.replace("R-hat", "nested R-hat") if found.statistics.get("nested") else name


def _weights(found: Diagnosis) -> Table:
    rows = found.weights
    names = [name for name in rows[0] if name != "name"]
    every = -(-len(rows) // MOST_WEIGHTS)
    shown = rows[::every]
    more = f" {len(shown)} of the {len(rows)} looked at are shown." if every > 1 else ""
    forms = {"rhat": "{:.3f}", "ess_bulk": WHOLE, "ess_tail": WHOLE}
    cells = [[str(row["name"]), "", *(_number(row[n], forms.get(n, "{:.3g}")) for n in names)] for row in shown]
    heads = [_named(HEADS.get(name, name.replace("_", " ")), found) for name in names]
    return Table("Some weights one by one", f"Evenly chosen over the network.{more}", heads, cells)


def _number(value: Any, form: str) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if not isinstance(value, int | float):
        return str(value)
    value = math.floor(value) if form == WHOLE and math.isfinite(value) else value
    return form.format(value).replace("-", "−").replace("%", " %")
