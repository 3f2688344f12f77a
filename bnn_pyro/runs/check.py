"""Run checks of variants and methods, and report their results, which are written after each check."""

import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from bnn_pyro import plots
from bnn_pyro.checks import CHECKS, DATA, IMAGES, Refused, Subject, worst
from bnn_pyro.errors import UserError
from bnn_pyro.fitting import check_setup, fit_setup
from bnn_pyro.inference import CONVERGES_TO, methods_for
from bnn_pyro.isolation import one_thread
from bnn_pyro.progress import progress_bar
from bnn_pyro.reports import read_texts
from bnn_pyro.reports.page import Picture, draw_figures, render
from bnn_pyro.reports.tables import WORDS, as_text, verdict_lines
from bnn_pyro.runs.folder import CheckFolder
from bnn_pyro.runs.recipe import Recipe, flag_settings, resolve
from bnn_pyro.runs.train import prepare_run
from bnn_pyro.settings import build, defaults, plain
from bnn_pyro.zoo import ZOO, Entry

#: Budgets of a check: its ``quick`` settings, or its defaults.
BUDGETS = ("quick", "full")
#: Settings of variants if the whole zoo is checked: networks so small that chains explore the whole posterior.
SMALL = {name: ["hidden=4", "activation=tanh"] for name in ("mean-field", "hidden-layer")}
#: Options that do not need a variant.
ZOO_OPTIONS = ("inference", "data", "seed", "budget", "only", "out", "resume", "quiet", "command", "executor")


@dataclass(frozen=True)
class SubjectSpec:
    """What is checked: a recipe, and the settings of its method that a user gave."""

    recipe: Recipe
    given: Mapping[str, Any]

    #: The data set, of which checks take some rows.
    data = cached_property(lambda self: self.recipe.load())

    @cached_property
    def entry(self) -> Entry:
        """The variant; the backbone of a last layer is trained first."""
        entry = check_setup(self.recipe, self.data).entry
        if not self.recipe.backbone_variant(self.data.schema):
            return entry
        backbone = self.recipe.for_baseline(self.data.schema)
        return replace(entry, backbone=fit_setup(backbone, self.data, seed=backbone.seed, device="cpu", progress=False))

    #: Variant, method and data, as text.
    label = property(lambda self: f"{self.recipe.variant} · {self.recipe.inference} · {self.recipe.data_name}")

    @property
    def key(self) -> dict[str, Any]:
        """What identifies the subject; JSON-able."""
        names = ("variant", "variant_settings", "inference", "data")
        return {name: getattr(self.recipe, name) for name in names} | {"given": self.given}

    def results(self) -> dict[str, Any]:
        """Return the results of this subject before any check."""
        target = self.recipe.method.converges_to
        about = self.key | {"label": self.label, "converges_to": target, "claim": CONVERGES_TO[target]}
        return about | {"outcomes": {}, "refused": {}, "failed": {}}


def one_subject(args: Namespace, prepare: bool = False) -> SubjectSpec:
    """Return the subject that the command line names.   prepare: load its data and build it too. Raises UserError."""
    recipe = resolve(args, {"data": {"name": IMAGES if getattr(ZOO[args.variant], "images_only", False) else DATA}})
    names = flag_settings(args)
    spec = SubjectSpec(recipe, {k: v for k, v in recipe.inference_settings.items() if k in names})
    if prepare:
        prepare_run(replace(recipe, baseline=False), spec.data)
    return spec


def zoo_subjects(args: Namespace) -> list[SubjectSpec]:
    """Return every variant with each of its methods, or the named method. Raises UserError for options of a variant."""
    for name, value in vars(args).items():
        if name not in ZOO_OPTIONS and value not in (None, [], False):
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option} needs a variant: check VARIANT {option} …")
    subjects = [
        {"variant": variant, "inference": method, "set": SMALL.get(variant, [])}
        for variant, kind in ZOO.items()
        for method in methods_for(kind)
        if "module" not in defaults(kind) and args.inference in (None, method)  # a module is the user's own
    ]
    return [one_subject(Namespace(**{**vars(args), **subject})) for subject in subjects]


def check_subjects(
    specs: Sequence[SubjectSpec], checks: Sequence[str], place: CheckFolder, budget: str, seed: int, facts: Mapping
) -> dict[str, Any]:
    """Run every check that applies to each subject, and write the outcomes into ``place``.

    checks: keys of ``CHECKS``.   facts: about the machine and the command, saved with the results.
    Checks whose outcome ``place`` has already are not repeated. A UserError of a check is recorded, and the next check
    follows. Returns the content of check.json.
    Raises UserError if ``place`` has results of another budget, seed or other subjects.
    """
    key = {"budget": budget, "seed": seed, "plans": [spec.key for spec in specs]}
    results = place.read(place.main)
    if not results:
        results = {"key": key, "facts": dict(facts), "subjects": [spec.results() for spec in specs]}
    elif results["key"] != key:
        other = next(name for name in key if results["key"].get(name) != key[name])
        value = f"{other} {results['key'].get(other)}"
        kind = value if other != "plans" else "other variants, methods, data or settings"
        raise UserError(f"the results in {place.path} are of {kind}; go on with the same, or choose another --out")
    place.write(place.main, results)
    for spec, subject in zip(specs, results["subjects"], strict=True):
        for name in checks:
            if name not in subject["refused"] and name not in subject["outcomes"]:
                _check(spec, name, subject, place, budget, seed)
                place.write(place.main, results)
                place.write(place.page, check_html(results, place.path))
    return results


def _check(spec: SubjectSpec, name: str, results: dict[str, Any], place: CheckFolder, budget: str, seed: int) -> None:
    check, start = build(CHECKS[name], CHECKS[name].quick if budget == "quick" else {}), time.perf_counter()
    results["failed"].pop(name, None)
    try:
        with one_thread():  # several threads are slower on small problems
            subject = Subject(spec.entry, type(spec.recipe.method), spec.data, spec.given)
            with progress_bar(f"{spec.label} · {name}") as report:
                outcome = check.run(subject, seed=seed, report=report)
    except UserError as error:
        results["refused" if isinstance(error, Refused) else "failed"][name] = str(error)
        return
    stem = "-".join(spec.label.replace("·", " ").split())
    evidence = {"findings": [f for f in outcome.findings if f.z is not None], **outcome.evidence}
    pictures = draw_figures("check", FIGURES, evidence, f"{stem}-{name}-")
    place.write_figures(pictures)
    results["outcomes"][name] = outcome.to_dict() | {
        "seconds": round(time.perf_counter() - start, 2),
        "check_settings": plain(check),
        "figures_drawn": [{k: v for k, v in vars(picture).items() if k != "png"} for picture in pictures],
    }


def level_of(subject: Mapping[str, Any]) -> str:
    """Return the worst level of a subject's checks; a check that ended in an error counts as bad."""
    return worst([*(o["level"] for o in subject["outcomes"].values()), *("bad" for _ in subject["failed"])])


def check_table(results: Mapping[str, Any]) -> str:
    """Return the verdicts of a subject, or of the bad ones of several with an overview, for a terminal."""
    parts, subjects = [], results["subjects"]
    for subject in subjects if len(subjects) == 1 else [s for s in subjects if level_of(s) == "bad"]:
        parts += [f"\n{subject['label']}: claims {subject['claim']}\n", verdict_lines(_verdicts(subject), named=True)]
        parts += [f"\nNot checked: {name}: {reason}" for name, reason in subject["refused"].items()]
    if len(subjects) > 1:
        parts.append("\n" + as_text(overview(subjects)))
    return "\n".join(parts)


def check_html(results: Mapping[str, Any], folder: Path) -> str:
    """Return check.html, with the figures of the folder."""
    key, sections, files = results["key"], [], folder / "figures"
    for subject in results["subjects"]:
        pictures = {
            name: [Picture(**about, png=(files / f"{about['name']}.png").read_bytes()) for about in o["figures_drawn"]]
            for name, o in subject["outcomes"].items()
        }
        sections.append({**subject, "verdicts": _verdicts(subject), "pictures": pictures})
    title, verdicts, rows = sections[0]["label"], sections[0]["verdicts"], None
    if len(sections) > 1:
        wrong = [subject["label"] for subject in sections if level_of(subject) == "bad"]
        form = read_texts("statistics")["checks"]["some_wrong" if wrong else "none_wrong"]
        sentence = form.format(wrong=len(wrong), all=len(sections), labels=", ".join(wrong))
        title, verdicts = "the zoo", [{"level": worst(map(level_of, sections)), "about": "", "sentence": sentence}]
        rows = overview(sections)
    heads = {"title": f"Checks of {title}", "subtitle": f"{key['budget'].capitalize()} budget · seed {key['seed']}"}
    content = {"verdicts": verdicts, "rows": rows, "subjects": sections, "facts": results["facts"]}
    return render("check.html.j2", **heads, **content, checks=CHECKS, cells=_cells)


def _verdicts(subject: Mapping[str, Any]) -> list[dict[str, str]]:
    if not (subject["outcomes"] or subject["failed"]):
        return []
    level = level_of(subject)
    verdicts = [("", level, read_texts("statistics")["checks"][level])]
    verdicts += [(CHECKS[name].title, o["level"], o["sentence"]) for name, o in subject["outcomes"].items()]
    for name, reason in subject["failed"].items():
        verdicts.append((CHECKS[name].title, "bad", f"The check could not be finished: {reason}"))
    return [{"level": level, "about": about, "sentence": sentence} for about, level, sentence in verdicts]


def overview(subjects: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return a table with a line per subject: a word for each check, the available numbers, and the seconds."""
    used = [name for name in CHECKS if any(name in s["outcomes"] or name in s["failed"] for s in subjects)]
    numbers = [{k: v for o in s["outcomes"].values() for k, v in o["figures"].items()} for s in subjects]
    columns = read_texts("statistics")["overview"]
    columns = {name: column for name, column in columns.items() if any(name in values for values in numbers)}
    rows = []
    for subject, values in zip(subjects, numbers, strict=True):
        levels = dict.fromkeys(subject["refused"], "–") | dict.fromkeys(subject["failed"], "failed")
        levels |= {name: WORDS[outcome["level"]] for name, outcome in subject["outcomes"].items()}
        row = {CHECKS[name].title: levels.get(name, "…") for name in used}
        row |= {title: "–" if values.get(n) is None else f"{values[n]:{form}}" for n, (title, form) in columns.items()}
        rows.append(row | {"seconds": f"{sum(o['seconds'] for o in subject['outcomes'].values()):.0f}"})
    return pd.DataFrame(rows, [f"{subject['variant']} {subject['inference']}" for subject in subjects])


def _cells(finding: Mapping[str, Any]) -> list[str]:
    """Return estimate, expected value, standard error, p and verdict as texts."""
    numbers = ["–" if (v := finding[name]) is None else f"{v:.4g}" for name in ("found", "expected", "error")]
    p = "–" if finding["p"] is None else "< 0.001" if finding["p"] < 1e-3 else f"{finding['p']:.3f}"
    return [*numbers, p, WORDS[finding["level"]]]


#: {figure: function that draws it from a check's evidence and its findings that have a z}, in the order of the page.
FIGURES: dict[str, Callable[[Mapping[str, Any]], object]] = {
    "errors": lambda e: plots.standard_errors(e["findings"]),
    "rank-ecdfs": plots.rank_ecdfs,
}
