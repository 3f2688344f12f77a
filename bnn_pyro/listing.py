"""The command `list`: it parses the source code instead of importing it, because importing torch takes seconds.

``ZOO``, ``METHODS``, ``DATASETS`` and ``CHECKS`` are dict literals of names. Of every class or function in them the
docstring, the fields and the literal class attributes are read, inherited ones included.
"""

import ast
import json
import shutil
import sys
import textwrap
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bnn_pyro.errors import check_known
from bnn_pyro.settings import field_docs

PACKAGE = Path(__file__).parent
#: The registry in the ``__init__`` of each folder.
TABLES = {"zoo": "ZOO", "inference": "METHODS", "datasets": "DATASETS", "checks": "CHECKS"}
#: Class attributes that are read besides the fields.
ATTRIBUTES = ("summary", "paper", "has", "needs")
TITLES = {
    "variants": "Variants",
    "methods": "Methods (--inference)",
    "data": "Data sets (--data), or the path of a CSV, TSV, NPZ or NPY file, or of a folder of pictures",
    "checks": "Checks (check --only)",
}


def tables() -> dict[str, dict[str, Any]]:
    """Return {"variants" | "methods" | "data" | "checks": {name: description}}, as `list --json` prints it."""
    variants, methods, data, checks = map(_read_table, TABLES)
    listed: dict[str, dict[str, Any]] = {"variants": {}, "methods": {}}
    for name, kind in variants.items():
        ways = [method for method, other in methods.items() if other["needs"] <= kind["has"]]
        about = {"idea": kind["summary"], "paper": kind["paper"], "methods": ways}
        listed["variants"][name] = about | {"settings": kind["settings"]}
    for name, kind in methods.items():
        idea = kind["doc"].removeprefix("Settings of ").removeprefix("the ")
        listed["methods"][name] = {"idea": idea, "settings": kind["settings"]}
    others = {"data": data, "checks": checks}
    return listed | {table: {name: kind["doc"] for name, kind in kinds.items()} for table, kinds in others.items()}


def list_(args: Namespace) -> None:
    """Print the tables, or one variant or method in full; see :func:`help`."""
    if args.json:
        print(json.dumps(tables(), indent=2, ensure_ascii=False))
        return
    width = max(60, min(100, shutil.get_terminal_size().columns))
    listed = tables()
    if args.name is not None:
        entries = listed["variants"] | listed["methods"]
        check_known("variant or method", entries, args.name)
        print("\n".join(_about(args.name, entries[args.name], width)))
        return
    for kind, items in listed.items():
        print(textwrap.fill(TITLES[kind], width), end="\n\n")
        indent = 2 + max(map(len, items))
        wrap = dict(initial_indent=" " * indent, subsequent_indent=" " * (indent + 2), break_on_hyphens=False)
        for name, item in items.items():
            lines = [textwrap.fill(line, width, break_long_words=False, **wrap) for line in _lines(item)]
            print(name + "\n".join(lines)[len(name) :])
        print()
    last = "Settings of variants and methods: --set KEY=VALUE. Where neither is named, `train` chooses by size: auto."
    print(textwrap.fill(last, width))


def help(name: str | None = None) -> None:
    """Print variants, methods, data sets and checks, or one variant or method in full. UserError if it is unknown."""
    list_(Namespace(json=False, name=name))


def _about(name: str, item: Mapping[str, Any], width: int) -> list[str]:
    lines, meanings = [f"{name}: {item['idea']}"], (_read_table("zoo") | _read_table("inference"))[name]["meanings"]
    if "methods" in item:
        lines += [item["paper"], f"inference: {', '.join(item['methods'])} (the first where none is named)"]
    lines = [textwrap.fill(line, width, subsequent_indent="  ", break_on_hyphens=False) for line in lines]
    lines += ["", "settings, with their defaults (--set KEY=VALUE):"]
    for setting, value in item["settings"].items():
        default = ",".join(map(str, value)) if isinstance(value, list) else "by rule" if value is None else value
        indent = dict(initial_indent="      ", subsequent_indent="      ", break_on_hyphens=False)
        lines += [f"  {setting} = {default}", textwrap.fill(meanings.get(setting, "–"), width, **indent)]
    return lines


def check_names(variant: str | None, method: str | None) -> None:
    """Raise UserError for an unknown variant or method, before torch is imported."""
    for kind, name, folder in (("variant", variant, "zoo"), ("inference method", method, "inference")):
        if name is not None:
            module = sys.modules.get(f"bnn_pyro.{folder}")  # if imported, the user may have added entries
            check_known(kind, _read_table(folder) if module is None else getattr(module, TABLES[folder]), name)


def _lines(item: str | Mapping[str, Any]) -> list[str]:
    if isinstance(item, str):
        return [item]
    settings = {k: ",".join(map(str, v)) if isinstance(v, list) else v for k, v in item["settings"].items()}
    lines = [item["idea"], "settings: " + " ".join(f"{k}={v}" for k, v in settings.items())]
    if "methods" in item:
        lines.insert(1, f"inference: {', '.join(item['methods'])}")
        lines.append(item["paper"])
    return lines


def _read_table(folder: str) -> dict[str, dict[str, Any]]:
    """Return {name: facts of its class or function} for the registry in a folder's ``__init__``."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted((PACKAGE / folder).rglob("*.py"))}
    nodes = [node for tree in trees.values() for node in tree.body]
    defined = {node.name: node for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    assigned = [n for n in trees[PACKAGE / folder / "__init__.py"].body if isinstance(n, ast.AnnAssign)]
    table = next(node.value for node in assigned if node.target.id == TABLES[folder])
    return {key.value: _read(defined[value.id], defined) for key, value in zip(table.keys, table.values, strict=True)}


def _read(node: ast.ClassDef | ast.FunctionDef, defined: Mapping[str, ast.stmt]) -> dict[str, Any]:
    """Return "doc" (one paragraph), "settings" {field: default}, "meanings" {field: text}, and class attributes."""
    facts: dict[str, Any] = {"settings": {}, "meanings": {}}
    if isinstance(node, ast.ClassDef):
        for base in reversed(node.bases):
            if isinstance(base, ast.Name) and base.id in defined:
                inherited = _read(defined[base.id], defined)
                facts |= inherited | {key: facts[key] | inherited[key] for key in ("settings", "meanings")}
        for line in node.body:
            if isinstance(line, ast.AnnAssign) and line.value is not None:
                name, value = line.target.id, _value(line.value)
                if not ast.unparse(line.annotation).startswith("ClassVar"):
                    facts["settings"][name] = list(value) if isinstance(value, tuple) else value
                elif value is not ...:
                    facts[name] = value
            elif isinstance(line, ast.Assign):  # of a name, or of as many as there are values
                both = line.targets[0], line.value
                many = all(isinstance(part, ast.Tuple) for part in both)
                for target, value in zip(*(part.elts if many else [part] for part in both), strict=False):
                    if isinstance(target, ast.Name) and target.id in ATTRIBUTES and _value(value) is not ...:
                        facts[target.id] = _value(value)
    doc = ast.get_docstring(node) or ""
    facts["meanings"] |= field_docs(doc)
    facts["doc"] = " ".join(doc.partition("\n\n")[0].split())
    return facts


def _value(node: ast.expr) -> Any:
    """Evaluate a literal, the default in ``setting(…)`` or ``field(default=…)``, a ``frozenset(…)``; else ``...``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        default = next((k.value for k in node.keywords if k.arg == "default"), None)
        inner = _value(node.args[0]) if node.args else _value(default) if default is not None else ()
        return frozenset(inner) if node.func.id == "frozenset" else inner
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ...
