"""Settings tuned for data sets, read from ``tuned.toml``; they go over the defaults and under the user's own."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["TUNED", "Fit"]


class Fit(NamedTuple):
    """Tuned settings: of the variant, of the method, and of the way the data are loaded."""

    entry: Mapping[str, Any] = {}
    method: Mapping[str, Any] = {}
    data: Mapping[str, Any] = {}


def _fits(table: Mapping[str, Any]) -> dict[str, Fit]:
    """{method: settings} of one variant and data set."""
    entry = {k: tuple(v) if isinstance(v, list) else v for k, v in table["entry"].items()}
    by_method: dict[str, Fit] = {}
    for name, settings in table.items():
        if name == "default":
            by_method |= dict.fromkeys(settings, Fit(entry))
        elif name != "entry":
            by_method[name] = Fit(entry, settings)
    return by_method


#: {variant: {data set: {method: settings}}}.
TUNED: dict[str, dict[str, dict[str, Fit]]] = {
    variant: {data: _fits(table) for data, table in by_data.items()}
    for variant, by_data in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()
}
for by_data in TUNED.values():
    if "mnist" in by_data:
        by_data["fashion-mnist"] = by_data["kmnist"] = by_data["mnist"]
