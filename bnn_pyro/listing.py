"""What `list` shows: variants, methods, data sets and checks, from their tables."""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from bnn_pyro.checks import CHECKS
from bnn_pyro.datasets import DATASETS
from bnn_pyro.inference import METHODS, methods_for
from bnn_pyro.reports.tables import plain_table
from bnn_pyro.zoo import ZOO

__all__ = ["list_"]


def list_(args: Namespace) -> None:
    """The tables: variants with their methods and tuned data sets, methods, data sets."""
    first_line = lambda thing: (thing.__doc__ or "").strip().splitlines()[0]  # noqa: E731
    variants = {
        name: {
            "idea": kind.summary,
            "paper": kind.paper,
            "methods": list(methods_for(kind)),
            "tuned": {data: list(methods) for data, methods in kind.fits.items()},
            "settings": _defaults(kind),
        }
        for name, kind in ZOO.items()
    }
    methods = {
        name: {"idea": first_line(kind).removeprefix("Settings of ").removeprefix("the "), "settings": _defaults(kind)}
        for name, kind in METHODS.items()
    }
    data = {name: first_line(loader) for name, loader in DATASETS.items()}
    checks = {name: kind.idea for name, kind in CHECKS.items()}
    if args.json:
        tables = {"variants": variants, "methods": methods, "data": data, "checks": checks}
        print(json.dumps(tables, indent=2, ensure_ascii=False))
        return
    rows = [
        [name, v["idea"], ", ".join(v["methods"]), ", ".join(v["tuned"]) or "–", v["paper"]]
        for name, v in variants.items()
    ]
    print(plain_table(["variant", "idea", "inference", "tuned for", "paper"], rows))
    print()
    print(plain_table(["method", "", "settings"], [[n, m["idea"], _spoken(m["settings"])] for n, m in methods.items()]))
    print()
    print(plain_table(["data set", ""], [[name, line] for name, line in data.items()]))
    print()
    print(plain_table(["check", ""], list(checks.items())))
    print("\nor the path of a CSV, TSV or NPZ file. Settings of a variant (--set KEY=VALUE):")
    print(plain_table(["variant", "settings"], [[n, _spoken(v["settings"])] for n, v in variants.items()]))


def _defaults(kind: type) -> dict[str, Any]:
    """The settings of a variant or method with their defaults."""
    return {f.name: list(f.default) if isinstance(f.default, tuple) else f.default for f in dataclasses.fields(kind)}


def _spoken(settings: Mapping[str, Any]) -> str:
    return " ".join(f"{k}={','.join(map(str, v)) if isinstance(v, list) else v}" for k, v in settings.items())
