"""What `list` shows, read from the source of the tables without running it: importing torch takes seconds.

``ZOO``, ``METHODS``, ``DATASETS`` and ``CHECKS`` are dict literals of names; of every class or function that they name
the docstring, the fields and the literal class attributes are read, its bases' first.
"""

from __future__ import annotations

import ast
import json
import runpy
import shutil
import sys
import textwrap
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bnn_pyro.errors import unknown

__all__ = ["check_names", "list_", "tables"]

PACKAGE = Path(__file__).parent
WRAP = {"break_on_hyphens": False, "break_long_words": False}
#: The table that each folder's ``__init__`` holds.
TABLES = {"zoo": "ZOO", "inference": "METHODS", "datasets": "DATASETS", "checks": "CHECKS"}


def tables() -> dict[str, dict[str, dict[str, Any]]]:
    """{"variants", "methods", "data", "checks"}: {name: {"idea", …}}, as `list --json` prints it."""
    variants, methods, data, checks = (_read_table(folder, table) for folder, table in TABLES.items())
    tuned = runpy.run_path(str(PACKAGE / "zoo" / "tuned.py"))["TUNED"]
    return {
        "variants": {
            name: {
                "idea": kind["summary"],
                "paper": kind["paper"],
                "methods": [method for method, other in methods.items() if other["needs"] <= kind["has"]],
                "tuned": {data: list(by_method) for data, by_method in tuned.get(name, {}).items()},
                "settings": kind["settings"],
            }
            for name, kind in variants.items()
        },
        "methods": {
            name: {
                "idea": kind["doc"].removeprefix("Settings of ").removeprefix("the "),
                "settings": kind["settings"],
            }
            for name, kind in methods.items()
        },
        "data": {name: loader["doc"] for name, loader in data.items()},
        "checks": {name: kind["idea"] for name, kind in checks.items()},
    }


def list_(args: Namespace) -> None:
    """Print the tables: variants with their methods and settings, methods, data sets, checks."""
    shown = tables()
    if args.json:
        print(json.dumps(shown, indent=2, ensure_ascii=False))
        return
    _print_items("variants", [
        (name, (v["idea"], f"inference: {', '.join(v['methods'])}", f"settings: {_text(v['settings'])}",
                f"tuned for: {', '.join(v['tuned']) or 'no data set'}", v["paper"]))
        for name, v in shown["variants"].items()
    ])  # fmt: skip
    _print_items("methods (--inference)", [
        (name, (m["idea"], f"settings: {_text(m['settings'])}")) for name, m in shown["methods"].items()
    ])  # fmt: skip
    _print_items("data sets (--data), or the path of a CSV, TSV or NPZ file",
                 [(name, (line,)) for name, line in shown["data"].items()])  # fmt: skip
    _print_items("checks (check --only)", [(name, (line,)) for name, line in shown["checks"].items()])
    print("Settings of variants and methods: --set KEY=VALUE.")


def check_names(variant: str | None, method: str | None) -> None:
    """Raise UserError for a variant or method that there is not, before anything that takes seconds is imported."""
    for what, name, folder in (("variant", variant, "zoo"), ("inference method", method, "inference")):
        module, table = sys.modules.get(f"bnn_pyro.{folder}"), TABLES[folder]  # imported, it may have got entries
        names = _read_table(folder, table) if module is None else getattr(module, table)
        if name is not None and name not in names:
            raise unknown(what, name, names)


def _print_items(title: str, items: Sequence[tuple[str, Iterable[str]]]) -> None:
    """A title, and under it each name beside its lines, wrapped to the terminal."""
    indent = 2 + max(len(name) for name, _ in items)
    width = max(60, min(100, shutil.get_terminal_size().columns))
    print(f"{title[0].upper()}{title[1:]}\n")
    for name, lines in items:
        text = "\n".join(
            textwrap.fill(line, width, initial_indent=" " * indent, subsequent_indent=" " * (indent + 2), **WRAP)
            for line in lines
        )
        print(name + text[len(name) :])
    print()


def _text(settings: Mapping[str, Any]) -> str:
    return " ".join(f"{k}={','.join(map(str, v)) if isinstance(v, list) else v}" for k, v in settings.items())


def _read_table(folder: str, table: str) -> dict[str, dict[str, Any]]:
    """{name: what is read of its class or function} of a table in a folder's ``__init__``."""
    defined = {
        node.name: node
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }
    for node in ast.parse((PACKAGE / folder / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and node.target.id == table:
            names = zip(node.value.keys, node.value.values, strict=True)
            return {key.value: _read(defined[value.id], defined) for key, value in names}
    raise LookupError(f"{folder}/__init__.py holds no table {table}")


def _read(node: ast.ClassDef | ast.FunctionDef, defined: Mapping[str, ast.stmt]) -> dict[str, Any]:
    """The docstring's first line, "settings" {field: default} and the literal class attributes."""
    found: dict[str, Any] = {"settings": {}}
    if isinstance(node, ast.ClassDef):
        for base in reversed(node.bases):
            if isinstance(base, ast.Name) and base.id in defined:
                inherited = _read(defined[base.id], defined)
                found |= inherited | {"settings": found["settings"] | inherited["settings"]}
        for line in node.body:
            if isinstance(line, ast.AnnAssign) and line.value is not None:
                name, value = line.target.id, _value(line.value)
                if not ast.unparse(line.annotation).startswith("ClassVar"):
                    found["settings"][name] = list(value) if isinstance(value, tuple) else value
                elif value is not ...:
                    found[name] = value
    found["doc"] = (ast.get_docstring(node) or "").partition("\n")[0]
    return found


def _value(node: ast.expr) -> Any:
    """A literal, the default of ``setting(…)`` or ``field(default=…)``, a ``frozenset(…)``; else ..., the ellipsis."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        default = next((k.value for k in node.keywords if k.arg == "default"), None)
        inner = _value(node.args[0]) if node.args else _value(default) if default is not None else ()
        return frozenset(inner) if node.func.id == "frozenset" else inner
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ...
