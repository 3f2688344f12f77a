"""What checks found: for a terminal and as one HTML page, made of check.json alone, and the figures of the evidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bnn_pyro import plots
from bnn_pyro.checks import CHECKS, Outcome, worst
from bnn_pyro.reports.page import Picture, draw_figures, read_texts, render
from bnn_pyro.reports.tables import WORDS, plain_table, verdict_lines

__all__ = ["FIGURES", "check_html", "check_table", "draw_outcome", "level_of", "overview"]

#: How the level of a check is written in a table, where it could not be made or was not.
FAILED, REFUSED, OPEN = "failed", "–", "…"


def level_of(subject: Mapping[str, Any]) -> str:
    """The worst level of a subject's checks; one that ended in an error counts as bad."""
    return worst([*(o["level"] for o in subject["outcomes"].values()), *("bad" for _ in subject["failed"])])


def check_table(results: Mapping[str, Any]) -> str:
    """Verdicts of every subject, and the overview where there are several, for a terminal."""
    parts, subjects = [], results["subjects"]
    for subject in subjects if len(subjects) == 1 else [s for s in subjects if level_of(s) == "bad"]:
        parts.append(f"\n{subject['label']}: claims {subject['claim']}\n")
        lines = [v | {"sentence": ": ".join(filter(None, (v["about"], v["sentence"])))} for v in _verdicts(subject)]
        parts.append(verdict_lines(lines))
        parts += [f"\nNot checked: {name}: {reason}" for name, reason in subject["refused"].items()]
    if len(subjects) > 1:
        parts.append("\n" + plain_table(*overview(subjects)))
    return "\n".join(parts)


def check_html(results: Mapping[str, Any], png: Callable[[str], bytes]) -> str:
    """check.html. png: gives the figure of a name."""
    subjects, key = results["subjects"], results["key"]
    many = len(subjects) > 1
    head, rows = overview(subjects)
    sections = []
    for subject in subjects:
        pictures = {
            name: [Picture(**figure, png=png(figure["name"])) for figure in outcome["figures_drawn"]]
            for name, outcome in subject["outcomes"].items()
        }
        sections.append({**subject, "verdicts": _verdicts(subject), "pictures": pictures})
    return render(
        "check.html.j2",
        title="Checks of the zoo" if many else f"Checks of {subjects[0]['label']}",
        subtitle=f"{key['budget'].capitalize()} budget · seed {key['seed']}",
        verdicts=[_overall(subjects)] if many else sections[0]["verdicts"],
        head=head,
        rows=rows if many else [],
        subjects=sections,
        checks=CHECKS,
        cells=_cells,
        facts=results["facts"],
    )


def _overall(subjects: list[Mapping[str, Any]]) -> dict[str, str]:
    wrong = [subject["label"] for subject in subjects if level_of(subject) == "bad"]
    form = read_texts("statistics")["checks"]["some_wrong" if wrong else "none_wrong"]
    sentence = form.format(wrong=len(wrong), all=len(subjects), labels=", ".join(wrong))
    return {"level": worst(map(level_of, subjects)), "about": "", "sentence": sentence}


def _verdicts(subject: Mapping[str, Any]) -> list[dict[str, str]]:
    level = level_of(subject)
    found = [("", level, read_texts("statistics")["checks"][level])]
    found += [(CHECKS[name].title, o["level"], o["sentence"]) for name, o in subject["outcomes"].items()]
    for name, reason in subject["failed"].items():
        found.append((CHECKS[name].title, "bad", f"The check could not be finished: {reason}"))
    verdicts = [{"level": level, "about": about, "sentence": sentence} for about, level, sentence in found]
    return verdicts if len(verdicts) > 1 else []


def overview(subjects: list[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """One line a subject: the word for each check, the numbers that there are, and the seconds."""
    used = [name for name in CHECKS if any(name in s["outcomes"] or name in s["failed"] for s in subjects)]
    numbers = [{k: v for o in s["outcomes"].values() for k, v in o["figures"].items()} for s in subjects]
    columns = read_texts("statistics")["overview"]
    columns = {name: column for name, column in columns.items() if any(name in values for values in numbers)}
    titles = (CHECKS[name].title for name in used)
    rows = []
    for subject, values in zip(subjects, numbers, strict=True):
        cells = [_word(subject, name) for name in used]
        for name, (_, form) in columns.items():
            cells.append("–" if values.get(name) is None else format(values[name], form))
        seconds = sum(o["seconds"] for o in subject["outcomes"].values())
        rows.append([subject["variant"], subject["inference"], *cells, f"{seconds:.0f}"])
    return ["variant", "inference", *titles, *(title for title, _ in columns.values()), "seconds"], rows


def _word(subject: Mapping[str, Any], name: str) -> str:
    if name in subject["outcomes"]:
        return WORDS[subject["outcomes"][name]["level"]]
    return FAILED if name in subject["failed"] else REFUSED if name in subject["refused"] else OPEN


def _cells(finding: Mapping[str, Any]) -> list[str]:
    """found, expected, standard error, p, verdict."""
    values = (finding[name] for name in ("found", "expected", "error"))
    numbers = ["–" if value is None else f"{value:.4g}" for value in values]
    p = "–" if finding["p"] is None else "< 0.001" if finding["p"] < 1e-3 else f"{finding['p']:.3f}"
    return [*numbers, p, WORDS[finding["level"]]]


# -- figures -----------------------------------------------------------------------------------------------------------
Evidence = Mapping[str, Any]


def _of(plot: Callable[..., object], *names: str) -> Callable[[Evidence], object]:
    """The plot of these pieces of evidence."""
    return lambda e: plot(*(e[name] for name in names))


def _objectives(e: Evidence) -> object:
    more = (e[name] for name in ("estimators", "variance", "variance_error")) if "estimators" in e else ()
    return plots.batch_objectives(e["batch_sizes"], e["elbo"], e["elbo_error"], *more)


def _bias(e: Evidence) -> object:
    own = {name: e[name] for name in ("largest_lr", "own_lr", "own_bias")}
    order = (e["order"], e["order_error"])
    return plots.step_size_bias(e["lr"], e["bias"], e["error"], e["grid_lr"], e["grid_exact"], order=order, **own)


def _outputs(e: Evidence) -> object:
    unit = "log-odds" if e["task"] == "classification" else f"mean of {e['target']}"
    floors = {"mean_floor": e["mean_floor"], "sd_floor": e["sd_floor"], "unit": unit}
    return plots.reference_outputs(e["reference_mean"], e["mean"], e["reference_sd"], e["sd"], **floors)


def _curve(e: Evidence) -> object:
    if e["task"] != "regression" or e["x"].shape[1:] != (1,):
        return None
    across = np.argsort(e["x"][:, 0])
    series = [np.ravel(e[name])[across] for name in ("reference_mean", "reference_sd", "mean", "sd")]
    return plots.reference_band(e["x"][across, 0], *series, names=("x", e["target"]))


_ERRORS = _of(plots.standard_errors, "labels", "z", "bound")
_TWO_WEIGHTS = ("axis_1", "axis_2", "density", "draws", "names")
_INTERVALS = ("exact_mean", "exact_sd", "mean", "sd", "levels", "coverage", "weight_coverage")
#: The figures of each check, in the order of the page, and how each is drawn of the evidence.
FIGURES: dict[str, dict[str, Callable[[Evidence], object]]] = {
    "closed-form": {"intervals": _of(plots.exact_intervals, *_INTERVALS), "errors": _ERRORS},
    "quadrature": {
        f"{name}-weights": _of(plots.two_weights, *(f"{name}_{what}" for what in _TWO_WEIGHTS))
        for name in ("logistic", "sign")
    },
    "logistic": {"errors": _ERRORS},
    "predictive": {"densities": _of(plots.mixture_densities, "log_density", "log_of_mean", "mean_of_log", "exact")},
    "estimator": {
        "objectives": _objectives,
        "gradient": _of(plots.finite_differences, "gradient", "finite_difference"),
    },
    "calibration": {
        "rank-ecdfs": lambda e: plots.rank_ecdfs(e["ranks"], e["draws"], e["labels"], shown=e["shown"], p=e["p"]),
        "rank-histograms": _of(plots.rank_histograms, "ranks", "draws", "labels"),
        "rank-coverage": _of(plots.interval_coverage, "levels", "coverage", "coverage_error", "labels"),
    },
    "joint-distribution": {
        "z-scores": _of(plots.joint_z_scores, "z", "bound", "quantities"),
        "quantiles": _of(plots.joint_quantiles, "levels", "scores", "z", "drift", "drift_error", "quantities"),
    },
    "step-size": {"bias": _bias},
    "reference": {
        "outputs": _outputs,
        "curve": _curve,
        "coverage": _of(plots.reference_coverage, "levels", "coverage", "coverage_error"),
    },
}


def draw_outcome(outcome: Outcome, label: str) -> list[Picture]:
    """The figures of a check whose evidence is there, named after what was checked."""
    figures = FIGURES.get(outcome.check, {})
    start = "-".join(label.replace("·", " ").split())
    names = {figure: f"{start}-{outcome.check}-{k}" for k, figure in enumerate(figures, 1)}
    return draw_figures("check", figures, names, outcome.evidence)
