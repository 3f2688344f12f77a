"""One run, or several, as self-contained HTML, and the model card: everything is read from what the run wrote.

A report is made of JSON and PNG only, so that it can be refreshed without the posterior, and it says what it does
not show: intervals are over test rows, a comparison is paired, a temperature other than 1 is named.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from bnn_pyro import __version__
from bnn_pyro.metrics import METRICS
from bnn_pyro.reports.ranking import Ranking
from bnn_pyro.reports.tables import (
    HEADLINE,
    WORDS,
    RunFacts,
    difference,
    difference_rows,
    estimate,
    metric_rows,
    outside_rows,
    told,
)

__all__ = ["Picture", "checks_html", "comparison_html", "diagnosis_html", "run_card", "run_html", "sweep_html"]

DOTS_PER_INCH = 144
INTERVALS = (
    "In brackets: 95 % bootstrap intervals over the test rows, that is, what another test set of this size would have "
    "changed. They say nothing of another seed or another training set."
)
DIAGNOSIS_LIMITS = (
    "Diagnostics find some faults and prove no virtue: chains that agree may all have missed the same mode.",
    "They judge the draws as a sample of the posterior of the stated model, not the model: whether it predicts well is "
    "in report.html.",
    "Only some test points, rows, draws and weights are looked at where there are many; the tables say how many.",
)
PAIRED = " The difference is run minus baseline on the same resampled rows, which is sharper than two intervals."


@dataclass(frozen=True)
class Picture:
    """A PNG with its name and what it shows."""

    name: str
    png: bytes
    title: str
    sentence: str
    wide: bool = False

    @classmethod
    def of(cls, name: str, axes: object, title: str, sentence: str, wide: bool = False) -> Picture:
        """The page that these axes are on."""
        page = np.ravel(np.asarray(axes, dtype=object))[0].figure
        blob = io.BytesIO()
        page.savefig(blob, format="png", dpi=DOTS_PER_INCH)
        return cls(name, blob.getvalue(), title, sentence, wide)

    @property
    def base64(self) -> str:
        """The PNG, for a data URI."""
        return base64.b64encode(self.png).decode()


def run_html(run: RunFacts, pictures: Iterable[Picture]) -> str:
    """report.html of one run beside its baseline."""
    return _render("report.html.j2", **_context(run), figures=list(pictures))


def run_card(run: RunFacts) -> str:
    """README.md, the model card, with front matter that model hubs read."""
    return _render(
        "card.md.j2",
        **_context(run),
        recipe=run.recipe,
        values={name: run.metrics[name] for name in METRICS[run.task] if name in run.metrics},
        task=run.task,
        data_name=run.provenance["data"],
        folder=run.folder,
    )


def comparison_html(
    runs: Sequence[RunFacts],
    differences: Mapping[str, Mapping[str, float]],
    pictures: Iterable[Picture] = (),
    rankings: Iterable[Ranking] = (),
) -> str:
    """Several runs side by side. differences: {label: {metric, metric_low, metric_high}} to the first run."""
    first = runs[0]
    return _render(
        "comparison.html.j2",
        title=f"Comparison on {first.provenance['data']}",
        subtitle=f"{first.task.capitalize()} · {first.provenance['rows']['test']:,} test rows · {len(runs)} runs",
        summary=[
            told(label, first.label, found, name, first.task)
            for label, found in differences.items()
            for name in HEADLINE[first.task]
            if name in found
        ],
        rankings=list(rankings),
        metrics=metric_rows(runs),
        columns=[run.label for run in runs],
        note=INTERVALS,
        differences=difference_rows(first.task, differences),
        figures=list(pictures),
        runs=[{"name": run.label, "facts": _facts(run)} for run in runs],
    )


def diagnosis_html(
    run: RunFacts, verdicts: Iterable[Any], tables: Iterable[Any], pictures: Iterable[Picture], note: str = ""
) -> str:
    """diagnosis.html: verdicts (level, about, sentence), the overall one first, tables (title, sentence, columns,
    rows), pictures; note: what went wrong in the writing."""
    return _render(
        "diagnosis.html.j2",
        title=f"Diagnosis: {run.title}",
        subtitle=run.subtitle,
        temperature=run.temperature,
        verdicts=_worded(vars(verdict) for verdict in verdicts),
        tables=list(tables),
        figures=list(pictures),
        note=note,
        facts=_facts(run),
        limits=DIAGNOSIS_LIMITS,
    )


def checks_html(*, verdicts: Iterable[Mapping[str, str]], subjects: Iterable[Mapping[str, Any]], **context: Any) -> str:
    """check.html: verdicts; one section a subject, with its own verdicts; context: title, subtitle, the overview's
    head and rows (none for a single subject), ideas of the checks and facts of the run, as pairs."""
    worded = [{**subject, "verdicts": _worded(subject["verdicts"])} for subject in subjects]
    return _render("check.html.j2", verdicts=_worded(verdicts), subjects=worded, **context)


def sweep_html(**context: Any) -> str:
    """sweep.html; context: title, subtitle, summary (sentences), failures and facts as pairs, overviews and sections
    (tables whose rows are ``reports.tables.Row``), figures, reading (sentences), spec (a text)."""
    return _render("sweep.html.j2", **context)


def _render(template: str, **context: Any) -> str:
    environment = Environment(
        loader=PackageLoader("bnn_pyro.reports", "templates"),
        autoescape=lambda name: name is not None and ".html" in name,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**context, version=__version__)


def _context(run: RunFacts) -> dict[str, Any]:
    rows, columns, note = metric_rows(run.runs), [r.label for r in run.runs], INTERVALS
    if run.differences:
        rows = [row._replace(cells=[*row.cells, difference(run.differences, row.name, run.task)]) for row in rows]
        columns, note = [*columns, "difference"], note + PAIRED
    return {
        "title": run.title,
        "subtitle": run.subtitle,
        "temperature": run.temperature,
        "summary": _summary(run),
        "worries": _worded(run.worries),
        "converged": run.converged,
        "diagnose": f"python -m bnn_pyro.run diagnose {run.folder}",
        "metrics": rows,
        "columns": columns,
        "note": note,
        "outside": outside_rows(run.runs),
        "outside_columns": [r.label for r in run.runs],
        "facts": _facts(run),
        "reproduce": f"python -m bnn_pyro.run train --config {run.folder}/config.json --out {run.folder}-again",
        "command": run.environment.get("command"),
        "limits": _limits(run),
    }


def _summary(run: RunFacts) -> list[str]:
    names = [name for name in HEADLINE[run.task] if name in run.metrics]
    if not names:
        return ["There are no test rows, so nothing was scored."]
    spoken = ", ".join(f"{name} {estimate(run.metrics, name)}" for name in names)
    sentences = [f"On {run.provenance['rows']['test']:,} test rows: {spoken}."]
    if run.baseline is not None:
        sentences += [
            told(run.label, run.baseline.label, run.differences, name, run.task)
            for name in names
            if name in run.differences
        ]
    if "ece_floor_95" in run.metrics and "ece" in run.metrics:
        floor, ece = run.metrics["ece_floor_95"], run.metrics["ece"]
        sentences.append(
            f"ECE {ece:.4f} is {'above' if ece > floor else 'within'} what a perfectly calibrated model shows on so "
            f"many rows (mean {run.metrics['ece_floor']:.4f}, below {floor:.4f} in 95 % of test sets)."
        )
    return sentences


def _worded(verdicts: Iterable[Mapping[str, str]]) -> list[dict[str, str]]:
    """Each with its level as a word, which a print without colour shows as well."""
    return [{**verdict, "word": WORDS[verdict["level"]]} for verdict in verdicts]


def _facts(run: RunFacts) -> list[tuple[str, str]]:
    """What was run, as pairs of words."""
    recipe, environment, provenance = run.recipe, run.environment, run.provenance
    split = {k: v for k, v in provenance["split"].items() if k != "rows"}
    where = environment.get("device", provenance["device"])
    if "processes" in provenance:
        where += f", divided among {provenance['processes']} processes"
    facts = [
        ("variant", f"{recipe['variant']}: {_spoken(recipe['variant_settings'])}"),
        ("inference", f"{recipe['inference']}: {_spoken(recipe['inference_settings'])}"),
        ("seed", str(recipe["seed"])),
        ("data", f"{provenance['data']}: {provenance['source'] or recipe['data']['name']}"),
        ("rows", ", ".join(f"{count:,} {part}" for part, count in provenance["rows"].items())),
        ("split", _spoken(split)),
        ("fingerprint", f"{provenance['fingerprint']} (of the training rows)"),
        ("draws", f"{recipe['num_draws']} in every prediction"),
        *([("stopped early", provenance["stopped"])] if "stopped" in provenance else []),
        ("training time", f"{provenance['seconds']:.1f} s on {where}"),
    ]
    if run.baseline is not None:
        base = run.baseline.recipe
        settings = _spoken({**base["variant_settings"], **base["inference_settings"]})
        seconds = run.baseline.provenance["seconds"]
        facts.append(("baseline", f"{base['variant']} by {base['inference']}: {settings}; {seconds:.1f} s"))
    if environment:
        versions = {"python": environment["python"], **environment["versions"]}
        facts += [
            ("machine", f"{environment['machine']}, {environment['threads']} threads"),
            ("versions", ", ".join(f"{k} {v}" for k, v in versions.items() if v)),
            ("finished", environment["finished"]),
        ]
        facts += [("commit", environment["commit"])] if environment.get("commit") else []
    return facts


def _spoken(settings: Mapping[str, Any]) -> str:
    def one(value: Any) -> str:
        return "/".join(map(str, value)) if isinstance(value, list | tuple) else str(value)

    return ", ".join(f"{key.replace('_', ' ')} {one(value)}" for key, value in settings.items())


def _limits(run: RunFacts) -> list[str]:
    rows = run.provenance["rows"]["test"]
    limits = [
        f"One seed and one split. The intervals come from resampling {rows:,} test rows; another seed or another split "
        "moves the numbers as well.",
        f"The posterior is the approximation that {run.recipe['inference']} makes to that of the stated model and "
        "prior. “Epistemic” means what its draws disagree on, which can be too little far from the training data.",
        "Nothing is claimed for inputs unlike the training rows, unless a table or figure shows them.",
    ]
    if rows < 200:
        limits.insert(0, f"With {rows} test rows, every number here is rough.")
    if run.baseline is not None:
        limits.append(
            "The baseline has the same architecture and as many epochs; it is one network, not the best to be had."
        )
    return limits
