"""Checks of several subjects, one after the other; what was found is written after each, so that nothing is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bnn_pyro.checks import CHECKS, Check, Outcome
from bnn_pyro.errors import UserError
from bnn_pyro.parallel.task import one_thread
from bnn_pyro.progress import progress_bar
from bnn_pyro.runs.check_page import check_html
from bnn_pyro.runs.check_pictures import draw_outcome
from bnn_pyro.runs.check_subjects import Checked
from bnn_pyro.runs.folder import CheckFolder
from bnn_pyro.settings import build, plain

__all__ = ["BUDGETS", "check_subjects"]

#: How much is spent on a check, and what makes its settings.
BUDGETS: dict[str, Callable[[type[Check]], Mapping[str, Any]]] = {
    "quick": lambda kind: kind.quick,
    "full": lambda _: {},
}


def check_subjects(
    plans: Sequence[Checked],
    checks: Sequence[str],
    place: CheckFolder,
    *,
    budget: str = "quick",
    seed: int = 0,
    facts: Mapping[str, Any] | None = None,
    show: bool = True,
) -> dict[str, Any]:
    """Make every check that applies to each subject, and write what was found into ``place``.

    checks: keys of ``CHECKS``.   facts: of the machine and the command, kept beside the results.

    What ``place`` holds already is not done again; a check that ends in a UserError is told and the next one made.
    Returns what check.json holds.

    Raises UserError where ``place`` has results of another budget, seed or subjects.
    """
    key = {"budget": budget, "seed": seed, "plans": [plan.key for plan in plans]}
    held = place.read(place.main)
    if held and held["key"] != key:
        other = next(name for name in key if held["key"].get(name) != key[name])
        what = f"{other} {held['key'].get(other)}" if other != "plans" else "other variants, methods, data or settings"
        raise UserError(f"the results in {place.path} are of {what}; go on with the same, or choose another --out")
    results = held or {"key": key, "facts": dict(facts or {}), "subjects": [plan.results() for plan in plans]}
    place.write(place.main, results)
    for plan, found in zip(plans, results["subjects"], strict=True):
        for name in checks:
            if name in found["refused"] or name in found["outcomes"]:
                continue
            found["failed"].pop(name, None)
            _check(plan, name, found, place, budget=budget, seed=seed, show=show)
            place.write(place.main, results)
            place.write(place.page, check_html(results, place.png))
    return results


def _check(
    plan: Checked, name: str, found: dict[str, Any], place: CheckFolder, *, budget: str, seed: int, show: bool
) -> None:
    """One check of one subject; ``found`` is what check.json holds of the subject."""
    check, start = build(CHECKS[name], BUDGETS[budget](CHECKS[name])), time.perf_counter()
    try:
        with one_thread():  # what is checked is small, and threads would only wait for one another
            subject = plan.subject()
            if reason := check.refuses(subject):
                found["refused"][name] = reason
                return
            with progress_bar(f"{plan.label} · {name}", show) as report:
                outcome: Outcome = check.run(subject, seed=seed, report=report)
    except UserError as error:
        found["failed"][name] = str(error)
        return
    pictures = draw_outcome(outcome, plan.label)
    place.write_figures(pictures)
    found["outcomes"][name] = outcome.to_dict() | {
        "seconds": round(time.perf_counter() - start, 2),
        "check_settings": plain(check),
        "figures_drawn": [{"name": p.name, "title": p.title, "sentence": p.sentence, "wide": p.wide} for p in pictures],
    }
