"""Which picture shows which evidence of a check: one table, and the drawing of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from bnn_pyro.report import Picture
from bnn_pyro.trust import Outcome

__all__ = ["SHOWN", "draw_outcome"]


class Shown(NamedTuple):
    """A figure: title, sentence, the evidence that it needs, and how it is drawn of it."""

    title: str
    sentence: str
    needs: tuple[str, ...]
    draw: Callable[[Mapping[str, Any]], object]
    wide: bool = True


#: The figures of each check, in the order of the page.
SHOWN: dict[str, tuple[Shown, ...]] = {}


def draw_outcome(outcome: Outcome, label: str) -> list[Picture]:
    """The figures of a check whose evidence is there, named after what was checked."""
    place = "-".join(label.replace("·", " ").split())
    return [
        Picture.of(
            f"{place}-{outcome.check}-{k}", shown.draw(outcome.evidence), shown.title, shown.sentence, shown.wide
        )
        for k, shown in enumerate(SHOWN.get(outcome.check, ()), 1)
        if all(name in outcome.evidence for name in shown.needs)
    ]
