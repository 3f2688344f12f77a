"""What checks found: for a terminal and as one HTML page, made of check.json alone, and the figures of the evidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bnn_pyro import plots
from bnn_pyro.checks import CHECKS, Outcome, worst
from bnn_pyro.reports.page import Picture, draw_figures, read_texts, render
from bnn_pyro.reports.tables import WORDS, plain_table, verdict_lines

__all__ = ["FIGURES", "check_html", "check_table", "draw_outcome", "level_of", "overview"]


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


def check_html(results: Mapping[str, Any], folder: Path) -> str:
    """check.html, with the figures that are in the folder."""
    key, sections = results["key"], []
    for subject in results["subjects"]:
        pictures = {
            name: [
                Picture(**figure, png=(folder / "figures" / f"{figure['name']}.png").read_bytes())
                for figure in outcome["figures_drawn"]
            ]
            for name, outcome in subject["outcomes"].items()
        }
        sections.append({**subject, "verdicts": _verdicts(subject), "pictures": pictures})
    page = {"title": f"Checks of {sections[0]['label']}", "verdicts": sections[0]["verdicts"], "head": [], "rows": []}
    if len(sections) > 1:
        wrong = [subject["label"] for subject in sections if level_of(subject) == "bad"]
        form = read_texts("statistics")["checks"]["some_wrong" if wrong else "none_wrong"]
        sentence = form.format(wrong=len(wrong), all=len(sections), labels=", ".join(wrong))
        head, rows = overview(sections)
        verdict = {"level": worst(map(level_of, sections)), "about": "", "sentence": sentence}
        page = {"title": "Checks of the zoo", "verdicts": [verdict], "head": head, "rows": rows}
    subtitle = f"{key['budget'].capitalize()} budget · seed {key['seed']}"
    page |= {"subtitle": subtitle, "subjects": sections, "checks": CHECKS, "cells": _cells, "facts": results["facts"]}
    return render("check.html.j2", **page)


def _verdicts(subject: Mapping[str, Any]) -> list[dict[str, str]]:
    """The overall one and one a check; none where no check was made."""
    if not (subject["outcomes"] or subject["failed"]):
        return []
    level = level_of(subject)
    found = [("", level, read_texts("statistics")["checks"][level])]
    found += [(CHECKS[name].title, o["level"], o["sentence"]) for name, o in subject["outcomes"].items()]
    for name, reason in subject["failed"].items():
        found.append((CHECKS[name].title, "bad", f"The check could not be finished: {reason}"))
    return [{"level": level, "about": about, "sentence": sentence} for about, level, sentence in found]


def overview(subjects: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """One line a subject: the word for each check, the numbers that there are, and the seconds."""
    used = [name for name in CHECKS if any(name in s["outcomes"] or name in s["failed"] for s in subjects)]
    numbers = [{k: v for o in s["outcomes"].values() for k, v in o["figures"].items()} for s in subjects]
    columns = read_texts("statistics")["overview"]
    columns = {name: column for name, column in columns.items() if any(name in values for values in numbers)}
    rows = []
    for subject, values in zip(subjects, numbers, strict=True):
        words = dict.fromkeys(subject["refused"], "–") | dict.fromkeys(subject["failed"], "failed")
        words |= {name: WORDS[outcome["level"]] for name, outcome in subject["outcomes"].items()}
        cells = [words.get(name, "…") for name in used]
        cells += ["–" if values.get(n) is None else format(values[n], form) for n, (_, form) in columns.items()]
        seconds = sum(o["seconds"] for o in subject["outcomes"].values())
        rows.append([subject["variant"], subject["inference"], *cells, f"{seconds:.0f}"])
    titles = [*(CHECKS[name].title for name in used), *(title for title, _ in columns.values())]
    return ["variant", "inference", *titles, "seconds"], rows


def _cells(finding: Mapping[str, Any]) -> list[str]:
    """found, expected, standard error, p, verdict."""
    values = (finding[name] for name in ("found", "expected", "error"))
    numbers = ["–" if value is None else f"{value:.4g}" for value in values]
    p = "–" if finding["p"] is None else "< 0.001" if finding["p"] < 1e-3 else f"{finding['p']:.3f}"
    return [*numbers, p, WORDS[finding["level"]]]


# -- figures -----------------------------------------------------------------------------------------------------------
def _curve(evidence: Mapping[str, Any]) -> object:
    if evidence["task"] != "regression" or evidence["x"].shape[1:] != (1,):
        return None
    series = (evidence[name] for name in ("x", "reference_mean", "reference_sd", "mean", "sd"))
    return plots.reference_band(*series, names=("x", evidence["target"]))


#: Evidence that checks have of some methods and problems alone.
OPTIONAL = ("batch_sizes", "finite_difference", "logistic_density", "sign_density")
#: The figures of each check, in the order of the page: each is drawn of the evidence.
FIGURES: dict[str, dict[str, Callable[[Mapping[str, Any]], object]]] = {
    "closed-form": {"intervals": plots.exact_intervals, "errors": plots.standard_errors},
    "quadrature": {f"{name}-weights": partial(plots.two_weights, problem=name) for name in ("logistic", "sign")},
    "logistic": {"errors": plots.standard_errors},
    "predictive": {"densities": plots.mixture_densities},
    "estimator": {"objectives": plots.batch_objectives, "gradient": plots.finite_differences},
    "calibration": {
        "rank-ecdfs": plots.rank_ecdfs,
        "rank-histograms": plots.rank_histograms,
        "rank-coverage": plots.interval_coverage,
    },
    "joint-distribution": {"z-scores": plots.joint_z_scores, "quantiles": plots.joint_quantiles},
    "step-size": {"bias": plots.step_size_bias},
    "reference": {"outputs": plots.reference_outputs, "curve": _curve, "coverage": plots.reference_coverage},
}


def draw_outcome(outcome: Outcome, label: str) -> list[Picture]:
    """The figures of a check whose evidence is there, named after what was checked."""
    figures = FIGURES.get(outcome.check, {}) if outcome.evidence else {}
    start = "-".join(label.replace("·", " ").split())
    names = {figure: f"{start}-{outcome.check}-{k}" for k, figure in enumerate(figures, 1)}
    return draw_figures("check", figures, names, outcome.evidence, OPTIONAL)
