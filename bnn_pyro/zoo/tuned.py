"""Settings tuned for data sets, read from ``tuned.toml``; they go over the defaults and under the user's own."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["TUNED", "Fit"]


class Fit(NamedTuple):
    """Tuned settings: of the variant, and of the method."""

    entry: Mapping[str, Any] = {}
    method: Mapping[str, Any] = {}


def _fits(entry: Mapping[str, Any], default: Sequence[str] = (), **methods: Mapping[str, Any]) -> dict[str, Fit]:
    """{method: settings} of one variant and data set, a table of the file."""
    return {name: Fit(entry, settings) for name, settings in (methods | {name: {} for name in default}).items()}


#: {variant: {data set: {method: settings}}}.
TUNED: dict[str, dict[str, dict[str, Fit]]] = {
    variant: {data: _fits(**table) for data, table in by_data.items()}
    for variant, by_data in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()
}
for by_data in TUNED.values():
    if "mnist" in by_data:
        by_data["fashion-mnist"] = by_data["kmnist"] = by_data["mnist"]
