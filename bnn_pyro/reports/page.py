"""One run, or several, as self-contained HTML, and the model card: everything is read from what the run wrote.

A report is made of JSON and PNG only, so that it can be refreshed without the posterior, and it says what it does
not show: intervals are over test rows, a comparison is paired, a temperature other than 1 is named. Pages and the words
of figures and tables are in ``templates/``.
"""

from __future__ import annotations

import base64
import functools
import io
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from bnn_pyro import __version__
from bnn_pyro.metrics import METRICS
from bnn_pyro.reports.summary import summary
from bnn_pyro.reports.tables import (
    BOOSTING,
    GUARANTEE_COLUMNS,
    WORDS,
    RunFacts,
    guarantee_rows,
    outside_rows,
    run_rows,
    target_rows,
)

DOTS_PER_INCH = 144


# -- figures -----------------------------------------------------------------------------------------------------------
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


@functools.cache
def read_texts(name: str) -> dict[str, Any]:
    """templates/NAME.toml: the words of figures or tables."""
    return tomllib.loads(resources.files("bnn_pyro.reports").joinpath(f"templates/{name}.toml").read_text("utf-8"))


def draw_figures(
    section: str,
    figures: Mapping[str, Callable[[Mapping[str, Any]], object]],
    names: Mapping[str, str],
    evidence: Mapping[str, Any],
    optional: Collection[str] = (),
) -> list[Picture]:
    """The figures whose evidence is there, with a number in it.

    section: of figures.toml, where each figure's words are, and its ``needs``, the evidence that must be there.
    figures: {figure: evidence -> axes, or None where it does not apply}.   names: {figure: what its file is called}.
    optional: evidence that may be missing; any other that a figure needs is misnamed: KeyError.
    """
    pictures = []
    for figure, draw in figures.items():
        words = read_texts("figures")[section][figure]
        if misnamed := set(words["needs"]) - evidence.keys() - set(optional):
            raise KeyError(f"figure '{figure}' needs {sorted(misnamed)}, and there is no evidence of that name")
        complete = all(_has_number(evidence.get(key)) for key in words["needs"])
        axes = draw(evidence) if complete else None
        if axes is not None:
            about = (words["title"], words["sentence"].format_map(evidence), words.get("wide", True))
            pictures.append(Picture.of(names[figure], axes, *about))
    return pictures


def _has_number(values: object) -> bool:
    if values is None or isinstance(values, list):  # of labels
        return bool(values)
    return bool(np.isfinite(np.asarray(values, dtype=float)).any())


# -- pages -------------------------------------------------------------------------------------------------------------
@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("bnn_pyro.reports", "templates"),
        autoescape=lambda name: name is not None and ".html" in name,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"version": __version__, "level_words": WORDS, "spoken": spoken}
    return environment


def render(template: str, **context: Any) -> str:
    """A page or card. Pages have title and subtitle; a verdict is {level, about, sentence}, the overall first."""
    return _environment().get_template(template).render(**context)


def run_html(run: RunFacts, pictures: Iterable[Picture]) -> str:
    """report.html of one run beside its baseline."""
    return render("report.html.j2", **_context(run), outside=outside_rows(run.runs), figures=list(pictures))


def run_card(run: RunFacts) -> str:
    """README.md, the model card, with front matter that model hubs read."""
    values = {name: run.metrics[name] for name in METRICS[run.task] if name in run.metrics}
    return render("card.md.j2", **_context(run), values=values)


def _context(run: RunFacts) -> dict[str, Any]:
    columns, rows = run_rows(run)
    return {
        "run": run,
        "title": run.title,
        "subtitle": run.subtitle,
        "summary": summary(run),
        "metrics": rows,
        "columns": columns,
        "targets": target_rows(run),
        "facts": facts_of(run),
        "guarantees": guarantee_rows(run.guarantees) if run.guarantees else [],
        "guarantee_columns": GUARANTEE_COLUMNS,
        "reproduce": f"python -m bnn_pyro.run train --config {run.folder}/config.json --out {run.folder}-again",
    }


def facts_of(run: RunFacts) -> list[tuple[str, str]]:
    """What was run, as pairs of words."""
    recipe, environment, provenance = run.recipe, run.environment, run.provenance
    device = environment.get("device", provenance["device"])
    if "processes" in provenance:
        device += f", divided among {provenance['processes']} processes"
    facts = {
        "variant": f"{recipe['variant']}: {spoken(recipe['variant_settings'])}",
        "inference": f"{recipe['inference']}: {spoken(recipe['inference_settings'])}",
        "by rule": spoken(provenance.get("schedule", {})),
        "seed": str(recipe["seed"]),
        "data": f"{provenance['data']}: {provenance['source'] or recipe['data']['name']}",
        "target scale": recipe["data"].get("target_scale"),
        "rows": ", ".join(f"{count:,} {part}" for part, count in provenance["rows"].items()),
        "split": spoken({k: v for k, v in provenance["split"].items() if k != "rows"}),
        "fingerprint": f"{provenance['fingerprint']} (of the training rows)",
        "draws": f"{recipe['num_draws']} in every prediction",
        "early stopping": spoken(provenance.get("early_stopping", {})),
        "stopped early": provenance.get("stopped"),
        "training time": f"{provenance['seconds']:.1f} s on {device}",
    }
    if "module" in provenance:
        facts["module"] = spoken({k: v for k, v in provenance["module"].items() if k != "parameters"})
    if run.baseline is not None:
        base = run.baseline.recipe
        settings = spoken({**base["variant_settings"], **base["inference_settings"]})
        about = run.baseline.provenance
        facts["baseline"] = f"{base['variant']} by {base['inference']}: {settings}; "
        facts["baseline"] += about.get("member") or f"{about['seconds']:.1f} s"
    if run.boosting:
        facts[BOOSTING] = f"{run.boosting['about']}; {run.boosting['seconds']:.1f} s"
    if environment:
        versions = {"python": environment["python"], **environment["versions"]}
        facts["machine"] = f"{environment['machine']}, {environment['threads']} threads"
        facts["versions"] = ", ".join(f"{k} {v}" for k, v in versions.items() if v)
        facts["finished"] = environment["finished"]
        facts["commit"] = environment.get("commit")
    return [(name, text) for name, text in facts.items() if text]


def spoken(settings: Mapping[str, Any]) -> str:
    """ "hidden 50/50, lr 0.01", a mapping in brackets."""

    def text(value: Any) -> str:
        if isinstance(value, Mapping):
            return f"({spoken(value)})"
        return "/".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value)

    return ", ".join(f"{key.replace('_', ' ')} {text(value)}" for key, value in settings.items())
