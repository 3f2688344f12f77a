"""Which picture a diagnosis shows for which series of numbers: one table, and the drawing of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from bnn_pyro import plots
from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.diagnostics import Diagnosis
from bnn_pyro.reports.page import Picture

__all__ = ["PREFIX", "SHOWN", "draw_diagnosis"]

#: How the names of the files begin, so that they are told from the report's own.
PREFIX = "diagnose-"


class Shown(NamedTuple):
    """A figure: title, sentence, the series that it needs, and how it is drawn of a diagnosis."""

    title: str
    sentence: str
    needs: tuple[str, ...]
    draw: Callable[[Diagnosis, Schema], object]
    wide: bool = True


# -- how ---------------------------------------------------------------------------------------------------------------
def _draws(found: Diagnosis) -> int:
    """C·D."""
    return int(found.series["outputs"][..., 0].size)


def _unit(schema: Schema) -> str:
    return "log-odds" if schema.has_classes else f"mean of {schema.target}"


def _labels(found: Diagnosis, schema: Schema) -> list[str]:
    """Of the outputs, without what the axis says."""
    unit = f"{_unit(schema)} of " if schema.classes else f"{_unit(schema)}, "
    word = "class " if schema.classes and all(name.isdigit() for name in schema.classes) else ""
    return [word + label.removeprefix(unit) for label in found.series["output_labels"]]


def _convergence(found: Diagnosis, schema: Schema) -> object:
    s = found.series
    nested = bool(found.statistics.get("nested"))
    return plots.convergence(s["rhat"], s["ess_bulk"], s.get("ess_tail"), draws=_draws(found), nested=nested)


def _outputs(found: Diagnosis, schema: Schema) -> object:
    s = found.series
    return plots.trace_ranks(s["outputs"], _labels(found, schema), diverging=s.get("diverging"), unit=_unit(schema))


def _weights(found: Diagnosis, schema: Schema) -> object:
    s = found.series
    return plots.trace_ranks(s["weights"], s["weight_labels"], diverging=s.get("diverging"), unit="weight")


def _log_joint(found: Diagnosis, schema: Schema) -> object:
    names = [name for name in ("lp", "diverging") if name in found.series]
    return plots.chain_traces({name: torch.as_tensor(found.series[name]) for name in names})


def _replicated(found: Diagnosis, schema: Schema) -> object:
    s, label = found.series, schema.target or "target"
    return plots.posterior_predictive(s["replicated"], s["observed"], classes=schema.classes, label=label)


SHOWN: dict[str, Shown] = {
    "convergence": Shown(
        "Do the chains agree on the predictions?",
        "R-hat compares how much all chains vary with how much each does by itself; effective draws are what is left "
        "of the draws once their dependence is counted. Both at test points, over all outputs.",
        ("rhat", "ess_bulk", "outputs"),
        _convergence,
    ),
    "outputs": Shown(
        "What single chains say of a few test points",
        "Chains that have converged wander over the same range, and each has low and high ranks as often as the "
        "others: flat bars, or a map without streaks. A chain on a level of its own sits in another mode.",
        ("outputs", "output_labels", "rhat"),
        _outputs,
    ),
    "intervals": Shown(
        "A few test points as intervals",
        "Where the draws say that the outputs are. Of several chains, the intervals should lie on one another.",
        ("outputs", "output_labels"),
        lambda f, schema: plots.forest(f.series["outputs"], _labels(f, schema), unit=_unit(schema)),
        wide=False,
    ),
    "autocorrelation": Shown(
        "How long a chain remembers",
        "Correlation of the outputs at those test points with themselves some draws earlier: slow decay means that "
        "many draws are worth few.",
        ("autocorrelation", "output_labels"),
        lambda f, schema: plots.autocorrelation(
            f.series["autocorrelation"], _labels(f, schema), draws=_draws(f) if "outputs" in f.series else None
        ),
        wide=False,
    ),
    "log-joint": Shown(
        "The density of the draws",
        "Log joint density of every kept draw. Chains on different levels, or one that drifts, have not converged; "
        "crosses below are divergent transitions.",
        ("lp",),
        _log_joint,
    ),
    "energy": Shown(
        "Energy",
        "One transition should be able to change the energy by about as much as it varies in all: where the line is "
        "much narrower than the filled histogram, tails are explored slowly.",
        ("energy",),
        lambda f, schema: plots.energy(f.series["energy"], bfmi=f.statistics.get("bfmi_min")),
        wide=False,
    ),
    "elbo": Shown(
        "The objective of the approximation",
        "ELBO over the training. A flat end says that the optimiser has come to rest, not that q is close to the "
        "posterior: that is what k-hat is for.",
        ("elbo",),
        lambda f, schema: plots.objective(f.series["elbo"]),
        wide=False,
    ),
    "importance-weights": Shown(
        "Could its draws be corrected?",
        "The largest importance weights of the draws of q. Where a few carry nearly all, q misses where the posterior "
        "is, in at least some directions; with many weights that is the rule, and predictions can still be good.",
        ("log_weights",),
        lambda f, schema: plots.importance_weights(f.series["log_weights"], khat=f.statistics.get("khat")),
        wide=False,
    ),
    "pareto-k": Shown(
        "Rows that the posterior leans on",
        "Pareto k of every training row. Rows above 0.7 surprise a posterior that has not seen them: outliers, wrong "
        "labels, or a network that bends to them. Their part of PSIS-LOO is unreliable.",
        ("pareto_k",),
        lambda f, schema: plots.pareto_k(f.series["pareto_k"], rows=f.series.get("loo_row_numbers")),
    ),
    "loo-pit": Shown(
        "Calibrated on rows left out?",
        "Where the training targets lie in predictions that did not see them. A U-shape is overconfident, a hill is "
        "too cautious. A curve inside the band could be that of a calibrated model.",
        ("loo_pit",),
        lambda f, schema: plots.loo_pit(f.series["loo_pit"]),
    ),
    "replicated": Shown(
        "Data that the posterior would make",
        "Training targets beside those that the posterior draws anew for the same inputs. What cannot be told apart "
        "here may still differ in what is not drawn.",
        ("replicated", "observed"),
        _replicated,
    ),
    "weights": Shown(
        "A few weights",
        "Chains that part here need not disagree: hidden units can be exchanged and signs flipped without any change "
        "of the prediction. The verdict does not rest on this picture.",
        ("weights", "weight_labels", "rhat"),
        _weights,
    ),
    "weight-intervals": Shown(
        "A few weights as intervals",
        "The marginals of a few weights, evenly chosen over the network.",
        ("weights", "weight_labels"),
        lambda f, schema: plots.forest(f.series["weights"], f.series["weight_labels"], unit="weight"),
        wide=False,
    ),
}


def draw_diagnosis(found: Diagnosis, schema: Schema) -> list[Picture]:
    """Every picture that the diagnosis has the series for, in the order of the table."""
    return [
        Picture.of(PREFIX + name, shown.draw(found, schema), shown.title, shown.sentence, shown.wide)
        for name, shown in SHOWN.items()
        if all(key in found.series and _varied(found.series[key]) for key in shown.needs)
    ]


def _varied(values: object) -> bool:
    """Whether there is a number to draw."""
    return isinstance(values, list) or bool(np.isfinite(np.asarray(values, dtype=float)).any())
