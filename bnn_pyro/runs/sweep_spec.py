"""The SPEC of a sweep: a TOML file of seeds, splits, data and recipes, read, checked and written out.

seeds = [0, 1]
splits = "all"                      # or numbers; of given splits, else the seeds of random ones

[data.energy]                       # keys as under `data` in a config file, name by default what it is called here
name = "uci/energy.csv"
target = "y"
splits = "uci/energy.splits.npz"

[data.breast-cancer]
splits_to_run = [0, 1, 2]           # instead of those above

[recipes.mean-field]                # keys of a config file, without data and seed; a variant's name means that variant
inference_settings = { epochs = 100 }

[recipes.net]
variant = "mlp"                     # any other name needs one
grid = { prior = ["fan-in:1", "fan-in:3"] }     # one recipe each; several keys: all combinations
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bnn_pyro.datasets import DATASETS
from bnn_pyro.datasets.sources import read_archive
from bnn_pyro.datasets.sources import resolve as locate
from bnn_pyro.errors import UserError, unknown
from bnn_pyro.inference import METHODS
from bnn_pyro.runs.recipe import DATA_KEYS, KEYS, check_keys
from bnn_pyro.fitting import tuned
from bnn_pyro.zoo import ZOO

__all__ = ["Candidate", "Material", "Spec", "read_spec"]

ALL = "all"
#: What a name becomes in a folder's name: anything else is a hyphen.
PLAIN = r"[^\w.,+=-]+"
#: Characters of a recipe's or a data set's name in a folder's name; a file system takes 255 for all of it.
LONGEST = 100


@dataclass(frozen=True)
class Candidate:
    """One recipe of the sweep: the keys of a config file, without data and seed.

    name   that of its table, and what the grid sets: "mlp prior=fan-in:1"
    table  the name of its table
    grid   the settings that the grid gives it
    """

    name: str
    table: str
    config: Mapping[str, Any]
    grid: Mapping[str, Any]


@dataclass(frozen=True)
class Material:
    """One data set of the sweep and the splits of it that are run.

    config  keys of a recipe's ``data``, without the split
    key     what a split's number is called there: "split" of given ones, else "seed" of a random one
    """

    name: str
    config: Mapping[str, Any]
    key: str
    splits: tuple[int, ...]

    def config_of(self, split: int) -> dict[str, Any]:
        """A recipe's ``data``."""
        return {**self.config, self.key: split}


@dataclass(frozen=True)
class Spec:
    """A sweep: every recipe on every split of every data set with every seed."""

    path: Path
    text: str
    seeds: tuple[int, ...]
    data: tuple[Material, ...]
    recipes: tuple[Candidate, ...]


def read_spec(path: str | Path) -> Spec:
    """The sweep that a file asks for.

    Raises UserError, one line that names the file, the table, the key and the way out, for whatever is wrong in it.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no sweep file {path}; `sweep --help` has an example")
    try:
        text = path.read_bytes().decode()
        held = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None
    kinds = {"seeds": list, "splits": list, "data": dict, "recipes": dict}
    for key in held:
        if key not in kinds:
            raise unknown(f"key in {path}", key, kinds)
    seeds = _numbers(path, "seeds", held.get("seeds", [0]))
    splits = held.get("splits")
    if splits is not None and splits != ALL:
        splits = _numbers(path, "splits", splits)
    data = tuple(_material(path, name, table, splits) for name, table in _tables(path, held, "data"))
    recipes = tuple(c for name, table in _tables(path, held, "recipes") for c in _candidates(path, name, table))
    _tell_apart(path, "data", [material.name for material in data])
    _tell_apart(path, "recipes", [candidate.name for candidate in recipes])
    return Spec(path, text, seeds, data, recipes)


def slug(name: str) -> str:
    """A name as a part of a folder's name."""
    return re.sub(PLAIN, "-", name).strip("-.") or "x"


def _tables(path: Path, held: Mapping[str, Any], kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, table) of every [kind.NAME]; at least one."""
    tables = held.get(kind)
    if not isinstance(tables, dict) or not tables:
        raise UserError(f"{path} has no {'data' if kind == 'data' else 'recipes'}: add a table [{kind}.NAME]")
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise UserError(f"{path} [{kind}]: '{name}' must be a table [{kind}.{name}], got {table!r:.80}")
        yield name, dict(table)


def _numbers(place: str | Path, key: str, values: Any) -> tuple[int, ...]:
    """Whole numbers, each once."""
    whole = isinstance(values, list) and values and all(type(v) is int and 0 <= v < 2**32 for v in values)
    if not whole:
        also = f', or "{ALL}"' if key != "seeds" else ""
        raise UserError(f"{place}: '{key}' must be a list of whole numbers from 0 on, such as [0, 1, 2]{also}, "
                        f"got {values!r:.80}")  # fmt: skip
    if len(set(values)) < len(values):
        twice = next(v for v in values if values.count(v) > 1)
        raise UserError(f"{place}: '{key}' has {twice} twice; a fit that is the same tells nothing new")
    return tuple(values)


# -- data --------------------------------------------------------------------------------------------------------------
def _material(path: Path, name: str, table: dict[str, Any], splits: tuple[int, ...] | str | None) -> Material:
    place = f"{path} [data.{name}]"
    chosen = table.pop("splits_to_run", None)
    if chosen is not None and chosen != ALL:
        chosen = _numbers(place, "splits_to_run", chosen)
    check_keys(place, "key", table, {**DATA_KEYS, "splits_to_run": list})
    config = {"name": name, **table}
    if config["name"] not in DATASETS and locate(config["name"]).exists():
        config["name"] = str(locate(config["name"]).resolve())
    given = "splits" in config
    if given:
        config["splits"] = str(locate(config["splits"]).resolve())
    key = "split" if given else "seed"
    own = config.pop(key, None)
    chosen = splits if chosen is None else chosen
    if chosen is None:
        return Material(name, config, key, (own or 0,))
    if own is not None:
        raise UserError(f"{place}: '{key}' is which split to take, and a list of splits is given too; leave it out, "
                        f"or take that one alone by splits_to_run = [{own}] here")  # fmt: skip
    if not given and chosen == ALL:
        raise UserError(f'{place}: "{ALL}" splits are those of a file of given ones, and this has none; give '
                        "splits_to_run = [0, 1, 2] here (seeds of random splits), or splits = FILE.npz")  # fmt: skip
    return Material(name, config, key, _given(place, config["splits"], chosen) if given else chosen)


def _given(place: str, file: str, chosen: tuple[int, ...] | str) -> tuple[int, ...]:
    """Which of the splits in an NPZ file."""
    try:
        names = [re.fullmatch(r"test_(\d+)", name) for name in read_archive(file)]
    except UserError as error:
        raise UserError(f"{place}: 'splits' {error}") from None
    there = sorted(int(found[1]) for found in names if found)
    if not there:
        raise UserError(f"{place}: 'splits' {file} has no arrays test_0, test_1, … of row numbers")
    if chosen == ALL:
        return tuple(there)
    for number in chosen:
        if number not in there:
            raise UserError(f"{place}: there is no split {number} in {file}; it has {there[0]} to {there[-1]}")
    return chosen


# -- recipes -----------------------------------------------------------------------------------------------------------
def _candidates(path: Path, name: str, table: dict[str, Any]) -> Iterator[Candidate]:
    """The recipe of a table, or one for each combination of its grid's values."""
    place = f"{path} [recipes.{name}]"
    kinds = {key: kind for key, kind in KEYS.items() if key not in ("data", "seed")} | {"grid": dict}
    check_keys(place, "key", {key: value for key, value in table.items() if key in kinds}, kinds)
    if "variant" not in table and name not in ZOO:
        raise UserError(
            f"{place} has no 'variant', and '{name}' is not the name of one; add variant = one of {', '.join(ZOO)}"
        )
    grid, variant = table.pop("grid", {}), table.setdefault("variant", name)
    try:
        method, _ = tuned(variant, "", table.get("inference"))
    except UserError as error:
        raise UserError(f"{place}: {error}") from None
    parts = {"variant_settings": _fields(ZOO[variant]), "inference_settings": _fields(METHODS[method])}
    for key in table:
        part = next((part for part, fields in parts.items() if key in fields), None)
        if part is not None:
            raise UserError(f"{place}: '{key}' is a setting; write {part} = {{ {key} = … }}, or [recipes.{name}.grid]")
    check_keys(place, "key", table, kinds)
    for part, fields in parts.items():
        for key in table.get(part, {}):
            if key not in fields:
                raise unknown(f"setting of {variant if part[0] == 'v' else method} in {place}", key, fields)
    config = {"baseline": False, **table}
    backbone = config.get("variant_settings", {}).get("backbone")
    if isinstance(backbone, str) and Path(backbone).exists():
        config["variant_settings"] = {**config["variant_settings"], "backbone": str(Path(backbone).resolve())}
    _check_grid(f"{path} [recipes.{name}.grid]", grid, table, parts, f"{variant} or {method}")
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        settings = {
            part: {**config.get(part, {}), **{k: v for k, v in chosen.items() if k in fields}}
            for part, fields in parts.items()
        }
        label = " ".join([name, *(f"{key}={spoken(value)}" for key, value in chosen.items())])
        yield Candidate(label, name, {**config, **settings}, chosen)


def _check_grid(
    place: str, grid: Mapping[str, Any], table: Mapping[str, Any], parts: Mapping[str, list[str]], whose: str
) -> None:
    for key, values in grid.items():
        if not any(key in fields for fields in parts.values()):
            raise unknown(f"setting of {whose} in {place}", key, [name for fields in parts.values() for name in fields])
        if not isinstance(values, list) or not values:
            raise UserError(f"{place}: '{key}' must be a list of values, such as [1, 2], got {values!r:.80}")
        told = [spoken(value) for value in values]
        if len(set(told)) < len(told):
            raise UserError(f"{place}: '{key}' has {next(t for t in told if told.count(t) > 1)} twice")
        for part in parts:
            if key in table.get(part, {}):
                raise UserError(f"{place}: '{key}' is in {part} too; leave it out there")


def spoken(value: Any) -> str:
    """A setting's value in a recipe's name."""
    if isinstance(value, list | tuple):
        return ",".join(map(spoken, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _fields(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _tell_apart(path: Path, kind: str, names: list[str]) -> None:
    """Refuse names that would share a folder, also where capitals are not told from others, or are too long for one."""
    seen: dict[str, str] = {}
    for name in names:
        if len(slug(name)) > LONGEST:
            raise UserError(f"{path} [{kind}]: '{name:.60}…' has more than {LONGEST} characters, too many for a "
                            "folder's name; give the table a shorter name, or fewer keys to its grid")  # fmt: skip
        other = seen.setdefault(slug(name).lower(), name)
        if other is not name:
            raise UserError(f"{path} [{kind}]: '{other}' and '{name}' would share a folder; rename one of them")
