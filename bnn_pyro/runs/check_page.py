"""What was found, for a terminal and as one HTML page; both are made of check.json alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from bnn_pyro.checks import CHECKS, worst
from bnn_pyro.reports.page import Picture, checks_html
from bnn_pyro.reports.tables import WORDS, plain_table, verdict_lines

__all__ = ["check_html", "check_table", "level_of", "overview"]

#: Numbers of the overview, by their key in an outcome's figures: heading, and how they are written.
COLUMNS: dict[str, tuple[str, str]] = {
    "closed_form": ("sd / exact sd", ".2f"),
    "joint_p": ("joint p", ".2g"),
    "calibration_p": ("calibration p", ".2g"),
    "coverage_50": ("covers 50 %", ".0%"),
    "coverage_80": ("covers 80 %", ".0%"),
    "coverage_95": ("covers 95 %", ".0%"),
    "agreement": ("agreement", ".1%"),
    "total_variation": ("total variation", ".2g"),
    "wasserstein2": ("Wasserstein-2", ".2g"),
}
#: The verdict on a subject, by its worst level.
OVERALL = {
    "good": "It does what it claims, as far as these checks can see.",
    "caution": "It does what it claims. As an approximation it is off in the ways below, or a check saw too little.",
    "bad": "It does not do what it claims.",
}
#: How the level of a check is written in a table, where it could not be made or was not.
FAILED, REFUSED, OPEN = "failed", "–", "…"


def level_of(found: Mapping[str, Any]) -> str:
    """The worst level of a subject's checks; one that ended in an error counts as bad."""
    return worst([*(o["level"] for o in found["outcomes"].values()), *("bad" for _ in found["failed"])])


def check_table(results: Mapping[str, Any]) -> str:
    """Verdicts of every subject, and the overview where there are several, for a terminal."""
    parts = []
    subjects = results["subjects"]
    for found in subjects if len(subjects) == 1 else [s for s in subjects if level_of(s) == "bad"]:
        parts.append(f"\n{found['label']}: claims {found['claim']}\n")
        lines = [v | {"sentence": ": ".join(p for p in (v["about"], v["sentence"]) if p)} for v in _verdicts(found)]
        parts.append(verdict_lines(lines))
        parts += [f"\nNot checked: {name}: {reason}" for name, reason in found["refused"].items()]
    if len(subjects) > 1:
        parts.append("\n" + plain_table(*overview(subjects)))
    return "\n".join(parts)


def check_html(results: Mapping[str, Any], png: Callable[[str], bytes]) -> str:
    """check.html. png: gives the figure of a name."""
    subjects, key = results["subjects"], results["key"]
    many = len(subjects) > 1
    head, rows = overview(subjects)
    return checks_html(
        title="Checks of the zoo" if many else f"Checks of {subjects[0]['label']}",
        subtitle=f"{key['budget'].capitalize()} budget · seed {key['seed']}",
        verdicts=[_overall(subjects)] if many else _verdicts(subjects[0]),
        head=head,
        rows=rows if many else [],
        subjects=[_section(found, png) for found in subjects],
        ideas=[(kind.title, kind.idea) for kind in CHECKS.values()],
        facts=[(name, str(value)) for name, value in results["facts"].items() if value],
    )


def _overall(subjects: list[Mapping[str, Any]]) -> dict[str, str]:
    wrong = [found["label"] for found in subjects if level_of(found) == "bad"]
    level = worst(level_of(found) for found in subjects)
    if wrong:
        sentence = f"{len(wrong)} of {len(subjects)} do not do what they claim: {', '.join(wrong)}."
    else:
        sentence = (
            f"All {len(subjects)} do what they claim; what the approximations among them get wrong is told below."
        )
    return {"level": level, "about": "", "sentence": sentence}


def _verdicts(found: Mapping[str, Any]) -> list[dict[str, str]]:
    level = level_of(found)
    overall = {"level": level, "about": "", "sentence": OVERALL[level]}
    made = [
        {"level": o["level"], "about": CHECKS[name].title, "sentence": o["sentence"]}
        for name, o in found["outcomes"].items()
    ]
    failed = [
        {"level": "bad", "about": CHECKS[name].title, "sentence": f"The check could not be finished: {reason}"}
        for name, reason in found["failed"].items()
    ]
    return [overall, *made, *failed] if made or failed else []


def overview(subjects: list[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """One line a subject: the word for each check, the numbers that there are, and the seconds."""
    used = [name for name in CHECKS if any(name in s["outcomes"] or name in s["failed"] for s in subjects)]
    figures = [_figures(found) for found in subjects]
    columns = [name for name in COLUMNS if any(name in f for f in figures)]
    head = [
        "variant",
        "inference",
        *(CHECKS[name].title for name in used),
        *(COLUMNS[c][0] for c in columns),
        "seconds",
    ]
    rows = []
    for found, numbers in zip(subjects, figures, strict=True):
        words = [_word(found, name) for name in used]
        values = [_number(numbers.get(c), COLUMNS[c][1]) for c in columns]
        seconds = sum(o["seconds"] for o in found["outcomes"].values())
        rows.append([found["variant"], found["inference"], *words, *values, f"{seconds:.0f}"])
    return head, rows


def _figures(found: Mapping[str, Any]) -> dict[str, float]:
    return {k: v for outcome in found["outcomes"].values() for k, v in outcome["figures"].items()}


def _word(found: Mapping[str, Any], name: str) -> str:
    if name in found["outcomes"]:
        return WORDS[found["outcomes"][name]["level"]]
    return FAILED if name in found["failed"] else REFUSED if name in found["refused"] else OPEN


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _section(found: Mapping[str, Any], png: Callable[[str], bytes]) -> dict[str, Any]:
    """What the page says of one subject."""
    parts = []
    for name, outcome in found["outcomes"].items():
        figures = [
            Picture(f["name"], png(f["name"]), f["title"], f["sentence"], f["wide"]) for f in outcome["figures_drawn"]
        ]
        parts.append(
            {
                "title": CHECKS[name].title,
                "idea": CHECKS[name].idea,
                "level": outcome["level"],
                "word": WORDS[outcome["level"]],
                "sentence": outcome["sentence"],
                "findings": [_cells(finding) for finding in outcome["findings"]],
                "figures": figures,
                "settings": _spoken({"check": outcome["check_settings"], **outcome["settings"]}),
                "seconds": f"{outcome['seconds']:.1f}",
            }
        )
    return {
        "label": found["label"],
        "claim": found["claim"],
        "level": level_of(found),
        "word": WORDS[level_of(found)],
        "verdicts": _verdicts(found),
        "parts": parts,
        "refused": [(CHECKS[name].title, reason) for name, reason in found["refused"].items()],
    }


def _cells(finding: Mapping[str, Any]) -> list[str]:
    """quantity, found, expected, standard error, p, verdict."""
    numbers = [_plain(finding[name]) for name in ("found", "expected", "error")]
    p = "–" if finding["p"] is None else "< 0.001" if finding["p"] < 1e-3 else f"{finding['p']:.3f}"
    return [finding["about"], *numbers, p, WORDS[finding["level"]]]


def _plain(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if math.isfinite(value) else str(value)


def _spoken(settings: Mapping[str, Any]) -> str:
    parts = []
    for key, value in settings.items():
        value = f"({_spoken(value)})" if isinstance(value, Mapping) else value
        value = "/".join(map(str, value)) or "none" if isinstance(value, list | tuple) else value
        parts.append(f"{key.replace('_', ' ')} {value}")
    return ", ".join(parts)
