"""Self-contained HTML reports of one run or several, and the model card, from the files that a run wrote.

Reports are made of JSON and PNG only, so that they can be renewed without the posterior. They state that intervals are
over test rows and comparisons paired, and a temperature other than 1. The texts are in ``templates/``.
"""

import functools
import io
import re
import warnings
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from bnn_pyro import __version__
from bnn_pyro.metrics import METRICS
from bnn_pyro.progress import within
from bnn_pyro.reports import read_texts, tables
from bnn_pyro.reports.summary import guarantees_section, summary

DOTS_PER_INCH = 144
#: Pixels of a page per inch of a figure, so that the fonts of all figures have the same size.
PIXELS_PER_INCH = 110
#: Width in inches above which a figure does not fit half of a page.
WIDE = 7.5
#: In tables with more columns, the meaning of a row is below its name instead of in a column.
MAX_COLUMNS = 4
#: Replacements in cells that keep numbers with units, errors and intervals on one line, and turn hyphens into minus.
UNBROKEN = {r"(?<![\w.])-(?=\d)": "−", r"(?<=\de)-(?=\d)": "−", r" (%|±)": "\u00a0\\1", r"± ": "±\u00a0",
            r"\[(\S+), (\S+)\]": "[\\1,\u00a0\\2]", r"(\d) to ([−\d])": "\\1\u00a0to\u00a0\\2"}  # fmt: skip


@dataclass(frozen=True)
class Picture:
    """A figure as PNG, with its texts."""

    name: str
    png: bytes
    title: str
    sentence: str
    wide: bool = False

    @classmethod
    def of(cls, name: str, draw: Callable[[], object], title: str, sentence: str, wide: bool = False) -> Self | None:
        """The figure of the axes that ``draw`` returns, or None if it returns None."""
        from bnn_pyro.plots.layout import OUTSIDE

        blob = io.BytesIO()
        with within(OUTSIDE, True), warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"(?s)Glyph .* missing")  # one warning per letter and figure
            if (axes := draw()) is None:
                return None
            page = np.ravel(np.asarray(axes, dtype=object))[0].figure
            page.savefig(blob, format="png", dpi=DOTS_PER_INCH)
        return cls(name, blob.getvalue(), title, sentence, wide or page.get_figwidth() > WIDE)

    #: Width in pixels of a page.
    width = property(lambda self: int.from_bytes(self.png[16:20]) * PIXELS_PER_INCH // DOTS_PER_INCH)


def draw_figures(
    section: str, figures: Mapping[str, Callable[[Any], object]], evidence: Mapping[str, Any], prefix: str = ""
) -> list[Picture]:
    """Draw the figures {name: evidence -> axes or None} of a section of figures.toml whose ``needs`` are available.

    A figure such as "outside-NAME", which is not in the section, has the texts of "outside", with NAME in the title.
    """
    texts, pictures = read_texts("figures")[section], []
    for figure, draw in figures.items():
        kind, _, name = figure.partition("-")
        text = texts[figure if figure in texts or "{name}" not in texts[kind]["title"] else kind]
        if all(_has_number(evidence.get(key)) for key in text.get("needs", ())):
            about = text["title"].format(name=name), text["sentence"].format_map(evidence), text.get("wide", True)
            pictures.append(Picture.of(prefix + figure, functools.partial(draw, evidence), *about))
    return list(filter(None, pictures))


def _has_number(values: object) -> bool:
    if values is None or isinstance(values, list):  # labels
        return bool(values)
    return bool(np.isfinite(np.asarray(values, dtype=float)).any())


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("bnn_pyro.reports", "templates"), undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, autoescape=lambda name: name is not None and ".html" in name,
    )  # fmt: skip
    environment.globals |= {"version": __version__, "level_words": tables.WORDS, "in_words": in_words}
    environment.filters |= {"table": html_table, "unbroken": unbroken, "base64": lambda png: b64encode(png).decode()}
    environment.filters["markdown"] = functools.partial(tables.as_text, form="markdown")
    return environment


def html_table(rows: pd.DataFrame | Sequence[Mapping[str, str]]) -> Markup:
    """HTML of a table of texts; a sequence of rows has no row names."""
    table = pd.DataFrame(rows, dtype=object).fillna("–").replace(UNBROKEN, regex=True)
    if tables.MEANING in table:
        table.index = table.index.str.replace("_", " ")
        if len(table.columns) > MAX_COLUMNS:
            table.index += "\n" + table.pop(tables.MEANING)
    with pd.option_context("display.max_colwidth", None):
        html = table.to_html(classes="metrics", border=0, justify="left", index=isinstance(rows, pd.DataFrame))
    html = re.sub(r"<th>([^<\n]+?)\\n([^<\n]+)</th>", r"<th>\1<small>\2</small></th>", html)  # as pandas writes it
    return Markup(f'<div class="wide">{html}</div>')


def unbroken(text: str) -> str:
    """The text with the replacements of ``UNBROKEN``."""
    return functools.reduce(lambda text, pair: re.sub(*pair, text), UNBROKEN.items(), text)


def render(template: str, **context: Any) -> str:
    """An HTML page, whose context has title and subtitle, or a model card. Verdicts are {level, about, sentence}."""
    page = _environment().get_template(template).render(**context)
    return re.sub(r"`([^`\n]+)`", r"<code>\1</code>", page) if ".html" in template else page


def run_pages(run: tables.RunFacts, pictures: Iterable[Picture]) -> tuple[str, str]:
    """(report.html of one run and its baseline; README.md, the model card, with the front matter of model hubs)."""
    context = {
        "run": run,
        "title": run.title,
        "subtitle": run.subtitle,
        "summary": summary(run),
        "metrics": tables.run_metrics(run),
        "targets": tables.target_table(run),
        "facts": facts_of(run),
        "coverage": guarantees_section(run.coverage).table if run.coverage else None,
        "outside": tables.outside_table(run.runs),
        "figures": list(pictures),
        "values": {name: run.metrics[name] for name in METRICS[run.task] if name in run.metrics},
        "reproduce": f"python -m bnn_pyro.run train --config {run.folder}/config.json --out {run.folder}-again",
    }
    return render("report.html.j2", **context), render("card.md.j2", **context)


#: Keys of a posterior's provenance and of environment.json that are not listed, as they are elsewhere in the report.
NO_FACTS = ("key", "entry", "entry_settings", "method", "method_settings", "auto", "data", "seconds", "command",
            "training_seconds", "stored_chains", "stored_draws")  # fmt: skip


def facts_of(run: tables.RunFacts) -> list[tuple[str, str]]:
    """What was run, as (name, text)."""
    recipe, provenance = run.recipe, run.provenance
    inference, chains = recipe["inference_settings"], provenance.get("stored_chains")  # the setting may be 0
    inference = inference | ({"chains": chains} if chains and "chains" in inference else {})
    facts = {
        "variant": f"{recipe['variant']}: {in_words(recipe['variant_settings'])}",
        "inference": f"{recipe['inference']}: {in_words(inference)}",
        "data": f"{provenance['data']}: {in_words(recipe['data'])}",
        "draws": f"{run.num_draws} in every prediction",
        "training time": f"{provenance['seconds']:.1f} s",
    }
    if run.baseline is not None:
        base, seconds = run.baseline.recipe, run.baseline.provenance["seconds"]
        settings = in_words({**base["variant_settings"], **base["inference_settings"]})
        facts["baseline"] = f"{base['variant']} by {base['inference']}: {settings}; {seconds:.1f} s"
    if run.boosting:
        facts[tables.BOOSTING] = f"{run.boosting['about']}; {run.boosting['seconds']:.1f} s"
    module = {k: v for k, v in provenance.get("module", {}).items() if k not in ("parameters", "layers", "constants")}
    split = {k: v for k, v in provenance["split"].items() if k != "doubts"}  # they are in the summary
    others = {**provenance, "module": module, "split": split, **run.environment}
    others = {k.replace("_", " "): in_words(v) for k, v in others.items() if k not in NO_FACTS and (v or v == 0)}
    return [*facts.items(), *others.items()]


def in_words(value: Any) -> str:
    """Settings as text, such as "hidden 50/50, lr 0.01", with nested mappings in brackets."""
    if isinstance(value, Mapping):
        texts = {key: f"({in_words(v)})" if isinstance(v, Mapping) else in_words(v) for key, v in value.items()}
        return ", ".join(f"{key.replace('_', ' ')} {text}" for key, text in texts.items())
    return "/".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value)
