"""The TOML file of a sweep, read and checked: seeds, splits, data sets and recipes.

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
from bnn_pyro.fitting import tuned
from bnn_pyro.inference import METHODS
from bnn_pyro.runs.recipe import DATA_KEYS, KEYS, check_keys
from bnn_pyro.settings import defaults
from bnn_pyro.zoo import ZOO

__all__ = ["DatasetSpec", "RecipeSpec", "SweepConfig", "folder_name", "read_sweep_config", "setting_text"]

ALL = "all"
#: Characters of a recipe's or a data set's name in a folder's name; a file system takes 255 for all of it.
MAX_NAME = 100


@dataclass(frozen=True)
class RecipeSpec:
    """One recipe of the sweep.

    name    that of its table, and what the grid sets: "mlp prior=fan-in:1"
    table   the name of its table
    config  keys of a config file, without data and seed
    grid    the settings that the grid gives it
    """

    name: str
    table: str
    config: Mapping[str, Any]
    grid: Mapping[str, Any]


@dataclass(frozen=True)
class DatasetSpec:
    """One data set of the sweep and the splits of it that are run.

    config  keys of a recipe's ``data``, without the split
    key     what a split's number is called there: "split" of given ones, else "seed" of a random one
    """

    name: str
    config: Mapping[str, Any]
    key: str
    splits: tuple[int, ...]


@dataclass(frozen=True)
class SweepConfig:
    """Every recipe on every split of every data set with every seed.   text: of the file."""

    path: Path
    text: str
    seeds: tuple[int, ...]
    data: tuple[DatasetSpec, ...]
    recipes: tuple[RecipeSpec, ...]


def read_sweep_config(path: str | Path) -> SweepConfig:
    """The sweep that a file asks for.

    Raises UserError, one line that names the file, the table, the key and the way out, for whatever is wrong in it.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no sweep file {path}; `sweep --help` has an example")
    try:
        text = path.read_bytes().decode()
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None
    keys = ("seeds", "splits", "data", "recipes")
    for key in content:
        if key not in keys:
            raise unknown(f"key in {path}", key, keys)
    seeds = _numbers(path, "seeds", content.get("seeds", [0]))
    splits = _splits(path, "splits", content.get("splits"))
    data = tuple(_dataset(path, name, table, splits) for name, table in _tables(path, content, "data"))
    recipes = tuple(spec for name, table in _tables(path, content, "recipes") for spec in _recipes(path, name, table))
    for kind, specs in (("data", data), ("recipes", recipes)):
        _check_names(f"{path} [{kind}]", [spec.name for spec in specs])
    return SweepConfig(path, text, seeds, data, recipes)


def folder_name(name: str) -> str:
    """A name as a part of a folder's name: other characters than letters, digits and . , + = - _ become a hyphen."""
    return re.sub(r"[^\w.,+=-]+", "-", name).strip("-.") or "x"


def setting_text(value: Any) -> str:
    """A setting's value in a recipe's name."""
    if isinstance(value, list | tuple):
        return ",".join(map(setting_text, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _tables(path: Path, content: Mapping[str, Any], kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, table) of every [kind.NAME]; at least one."""
    tables = content.get(kind)
    if not isinstance(tables, dict) or not tables:
        raise UserError(f"{path} has no {kind}: add a table [{kind}.NAME]")
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise UserError(f"{path} [{kind}]: '{name}' must be a table [{kind}.{name}], got {table!r:.80}")
        yield name, dict(table)


def _numbers(place: str | Path, key: str, values: Any) -> tuple[int, ...]:
    """Whole numbers, each once."""
    if not (isinstance(values, list) and values and all(type(v) is int and 0 <= v < 2**32 for v in values)):
        also = "" if key == "seeds" else f', or "{ALL}"'
        raise UserError(f"{place}: '{key}' must be a list of whole numbers from 0 on, such as [0, 1, 2]{also}, "
                        f"got {values!r:.80}")  # fmt: skip
    _check_distinct(place, key, values)
    return tuple(values)


def _splits(place: str | Path, key: str, value: Any) -> tuple[int, ...] | str | None:
    return value if value is None or value == ALL else _numbers(place, key, value)


def _check_distinct(place: str | Path, key: str, values: list[Any]) -> None:
    twice = next((value for value in values if values.count(value) > 1), None)
    if twice is not None:
        raise UserError(f"{place}: '{key}' has {twice} twice; a fit that is the same tells nothing new")


# -- data --------------------------------------------------------------------------------------------------------------
def _dataset(path: Path, name: str, table: dict[str, Any], splits: tuple[int, ...] | str | None) -> DatasetSpec:
    place = f"{path} [data.{name}]"
    own_splits = _splits(place, "splits_to_run", table.pop("splits_to_run", None))
    check_keys(place, "key", table, {**DATA_KEYS, "splits_to_run": list})
    config = {"name": name, **table}
    if config["name"] not in DATASETS and locate(config["name"]).exists():
        config["name"] = str(locate(config["name"]).resolve())
    given = "splits" in config
    if given:
        config["splits"] = str(locate(config["splits"]).resolve())
    key = "split" if given else "seed"
    number = config.pop(key, None)
    chosen = splits if own_splits is None else own_splits
    if chosen is None:
        return DatasetSpec(name, config, key, (number or 0,))
    if number is not None:
        raise UserError(f"{place}: '{key}' is which split to take, and a list of splits is given too; leave it out, "
                        f"or take that one alone by splits_to_run = [{number}] here")  # fmt: skip
    if not given and chosen == ALL:
        raise UserError(f'{place}: "{ALL}" splits are those of a file of given ones, and this has none; give '
                        "splits_to_run = [0, 1, 2] here (seeds of random splits), or splits = FILE.npz")  # fmt: skip
    return DatasetSpec(name, config, key, _given_splits(place, config["splits"], chosen) if given else chosen)


def _given_splits(place: str, file: str, chosen: tuple[int, ...] | str) -> tuple[int, ...]:
    """Which of the splits in an NPZ file."""
    try:
        names = [re.fullmatch(r"test_(\d+)", name) for name in read_archive(file)]
    except UserError as error:
        raise UserError(f"{place}: 'splits' {error}") from None
    valid = sorted(int(match[1]) for match in names if match)
    if not valid:
        raise UserError(f"{place}: 'splits' {file} has no arrays test_0, test_1, … of row numbers")
    if chosen == ALL:
        return tuple(valid)
    absent = next((number for number in chosen if number not in valid), None)
    if absent is not None:
        raise UserError(f"{place}: there is no split {absent} in {file}; it has {valid[0]} to {valid[-1]}")
    return chosen


# -- recipes -----------------------------------------------------------------------------------------------------------
def _recipes(path: Path, name: str, table: dict[str, Any]) -> Iterator[RecipeSpec]:
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
    parts = {"variant_settings": defaults(ZOO[variant]), "inference_settings": defaults(METHODS[method])}
    for key in table:
        part = next((part for part, fields in parts.items() if key in fields), None)
        if part is not None:
            raise UserError(f"{place}: '{key}' is a setting; write {part} = {{ {key} = … }}, or [recipes.{name}.grid]")
    check_keys(place, "key", table, kinds)
    for part, whose in zip(parts, (variant, method), strict=True):
        for key in table.get(part, {}):
            if key not in parts[part]:
                raise unknown(f"setting of {whose} in {place}", key, parts[part])
    config = {"baseline": False, **table}
    backbone = config.get("variant_settings", {}).get("backbone")
    if isinstance(backbone, str) and Path(backbone).exists():
        config["variant_settings"] = {**config["variant_settings"], "backbone": str(Path(backbone).resolve())}
    for key, values in grid.items():
        _check_grid(f"{path} [recipes.{name}.grid]", key, values, table, parts, f"{variant} or {method}")
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        settings = {
            part: {**config.get(part, {}), **{k: v for k, v in chosen.items() if k in fields}}
            for part, fields in parts.items()
        }
        label = " ".join([name, *(f"{key}={setting_text(value)}" for key, value in chosen.items())])
        yield RecipeSpec(label, name, {**config, **settings}, chosen)


def _check_grid(
    place: str, key: str, values: Any, table: Mapping[str, Any], parts: Mapping[str, Mapping[str, Any]], whose: str
) -> None:
    if not any(key in fields for fields in parts.values()):
        raise unknown(f"setting of {whose} in {place}", key, [name for fields in parts.values() for name in fields])
    if not isinstance(values, list) or not values:
        raise UserError(f"{place}: '{key}' must be a list of values, such as [1, 2], got {values!r:.80}")
    _check_distinct(place, key, [setting_text(value) for value in values])
    for part in parts:
        if key in table.get(part, {}):
            raise UserError(f"{place}: '{key}' is in {part} too; leave it out there")


def _check_names(place: str, names: list[str]) -> None:
    """Refuse names that would share a folder, also where capitals are not told from others, or are too long for one."""
    first: dict[str, str] = {}
    for name in names:
        if len(folder_name(name)) > MAX_NAME:
            raise UserError(f"{place}: '{name:.60}…' has more than {MAX_NAME} characters, too many for a "
                            "folder's name; give the table a shorter name, or fewer keys to its grid")  # fmt: skip
        other = first.setdefault(folder_name(name).lower(), name)
        if other is not name:
            raise UserError(f"{place}: '{other}' and '{name}' would share a folder; rename one of them")
