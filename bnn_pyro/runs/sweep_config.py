"""The TOML file of a sweep, read and checked: every recipe on every split of every data set with every seed.

seeds = [0, 1]
splits = "all"                      # or numbers; of given splits, else the seeds of random ones

[data.energy]                       # keys as under `data` in a config file, name by default what it is called here
name = "uci/energy.csv"

[data.breast-cancer]
splits_to_run = [0, 1, 2]           # instead of those above

[recipes.mlp]                       # keys of a config file, without data and seed; a variant's name means that variant
grid = { prior = ["fan-in:1", "fan-in:3"] }     # one recipe each; several keys: all combinations
"""

from __future__ import annotations

import itertools
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bnn_pyro.errors import UserError, unknown
from bnn_pyro.files import read_archive
from bnn_pyro.fitting import tuned
from bnn_pyro.inference import METHODS
from bnn_pyro.runs.recipe import DATA_KEYS, KEYS, Recipe, check_keys, data_options, read_file, resolve
from bnn_pyro.settings import defaults
from bnn_pyro.zoo import ZOO

__all__ = ["BEGUN", "CHANGED", "FAILED", "FINISHED", "MISSING", "SEED_STEP", "RunTask", "SweepConfig",
           "read_sweep_config", "setting_text"]  # fmt: skip

ALL = "all"
#: Characters of a recipe's name in a folder's name; a file system takes 255 for all of it.
MAX_NAME = 100
#: A fit's own seed is that of the sweep + SEED_STEP · split. Fits of one seed would begin with the same weights on
#: every split, and what these do to the result (on a small set as much as the split) would be in no error over splits.
SEED_STEP = 1000
#: A fit has its scores; was cut off; was never begun; is one of other settings; ended in an error.
FINISHED, BEGUN, MISSING, CHANGED, FAILED = "finished", "begun", "missing", "changed", "failed"


@dataclass(frozen=True)
class RunTask:
    """One fit of a sweep.

    recipe_name  that of its table and what the grid sets: "mlp prior=fan-in:1"
    table, data  names of its tables
    grid         the settings that the grid gives it
    seed         the sweep's; the recipe's own, of initial weights, order of rows and noise, follows from it
    split        the number of a given split, or the seed of a random one
    """

    recipe_name: str
    table: str
    grid: Mapping[str, Any]
    data: str
    seed: int
    split: int
    recipe: Recipe

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{_folder_name(self.recipe_name)}-{_folder_name(self.data)}-seed{self.seed}-split{self.split}"

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class SweepConfig:
    """Every recipe on every split of every data set with every seed.   text: of the file."""

    path: Path
    text: str
    tasks: Sequence[RunTask]


def read_sweep_config(path: str | Path) -> SweepConfig:
    """The sweep that a file asks for; one that is stopped early has all recipes on the first splits.

    Tuned settings go before those of the variant, those of the file before tuned ones, as for `train`.

    Raises UserError, one line that names the file, the table, the key and the way out, for whatever is wrong in it.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no sweep file {path}; `sweep --help` has an example")
    text, content = read_file(path, "sweep file", "TOML")
    for key in content:
        if key not in ("seeds", "splits", "data", "recipes"):
            raise unknown(f"key in {path}", key, ("seeds", "splits", "data", "recipes"))
    seeds = _numbers(path, "seeds", content.get("seeds", [0]))
    splits = _splits(path, "splits", content.get("splits"))
    data = [_dataset(path, name, table, splits) for name, table in _tables(path, content, "data")]
    recipes = [found for name, table in _tables(path, content, "recipes") for found in _recipes(path, name, table)]
    folders: dict[str, RunTask] = {}
    in_order = [row for rows in itertools.zip_longest(*data) for row in rows if row is not None]
    for seed, (name, split, options), (label, table, grid, keys) in itertools.product(seeds, in_order, recipes):
        try:
            recipe = resolve(Namespace(), {**keys, "data": options, "seed": (seed + SEED_STEP * split) % 2**32})
        except UserError as error:
            raise UserError(f"{path} [recipes.{table}] ({label}): {error}") from None
        task = RunTask(label, table, grid, name, seed, split, recipe)
        long = next((part for part in (label, name) if len(_folder_name(part)) > MAX_NAME), None)
        if long is not None:
            raise UserError(f"{path}: '{long:.60}…' has more than {MAX_NAME} characters, too many for a folder's name; "
                            "give the table a shorter name, or fewer keys to its grid")  # fmt: skip
        other = folders.setdefault(task.name.lower(), task)
        if other is not task:
            first = f"'{other.recipe_name}' on '{other.data}'"
            raise UserError(f"{path}: {first} and '{label}' on '{name}' would share a folder; rename one of them")
    return SweepConfig(path, text, list(folders.values()))


def setting_text(value: Any) -> str:
    """A setting's value in a recipe's name."""
    if isinstance(value, list | tuple):
        return ",".join(map(setting_text, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _folder_name(name: str) -> str:
    """Other characters than letters, digits and . , + = - _ become a hyphen."""
    return re.sub(r"[^\w.,+=-]+", "-", name).strip("-.") or "x"


def _tables(path: Path, content: Mapping[str, Any], kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, table) of every [kind.NAME]; at least one."""
    tables = content.get(kind)
    if not isinstance(tables, dict) or not tables:
        raise UserError(f"{path} has no {kind}: add a table [{kind}.NAME]")
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise UserError(f"{path} [{kind}]: '{name}' must be a table [{kind}.{name}], got {table!r:.80}")
        yield name, dict(table)


def _numbers(place: str | Path, key: str, values: Any) -> list[int]:
    """Whole numbers, each once."""
    if not (isinstance(values, list) and values and all(type(v) is int and 0 <= v < 2**32 for v in values)):
        also = "" if key == "seeds" else f', or "{ALL}"'
        raise UserError(f"{place}: '{key}' must be a list of whole numbers from 0 on, such as [0, 1, 2]{also}, "
                        f"got {values!r:.80}")  # fmt: skip
    _check_distinct(place, key, values)
    return values


def _splits(place: str | Path, key: str, value: Any) -> list[int] | str | None:
    return value if value is None or value == ALL else _numbers(place, key, value)


def _check_distinct(place: str | Path, key: str, values: list[Any]) -> None:
    twice = next((value for value in values if values.count(value) > 1), None)
    if twice is not None:
        raise UserError(f"{place}: '{key}' has {twice} twice; a fit that is the same tells nothing new")


def _dataset(
    path: Path, name: str, table: dict[str, Any], splits: list[int] | str | None
) -> list[tuple[str, int, dict[str, Any]]]:
    """(name, split, keys of a recipe's ``data``) of every split that is run."""
    place = f"{path} [data.{name}]"
    own_splits = _splits(place, "splits_to_run", table.pop("splits_to_run", None))
    check_keys(place, "key", table, {**DATA_KEYS, "splits_to_run": list})
    options = {"name": name, **table}
    options |= data_options({"data": options["name"], **{k: options[k] for k in ("splits",) if k in options}}, {})
    given = "splits" in options
    key = "split" if given else "seed"  # what a split's number is called in a recipe
    number = options.pop(key, None)
    chosen = splits if own_splits is None else own_splits
    if chosen is None:
        chosen = [number or 0]
    elif number is not None:
        raise UserError(f"{place}: '{key}' is which split to take, and a list of splits is given too; leave it out, "
                        f"or take that one alone by splits_to_run = [{number}] here")  # fmt: skip
    elif given:
        chosen = _given_splits(place, options["splits"], chosen)
    elif chosen == ALL:
        raise UserError(f'{place}: "{ALL}" splits are those of a file of given ones, and this has none; give '
                        "splits_to_run = [0, 1, 2] here (seeds of random splits), or splits = FILE.npz")  # fmt: skip
    return [(name, split, {**options, key: split}) for split in chosen]


def _given_splits(place: str, file: str, chosen: list[int] | str) -> list[int]:
    """Which of the splits in an NPZ file."""
    try:
        names = [re.fullmatch(r"test_(\d+)", name) for name in read_archive(file)]
    except UserError as error:
        raise UserError(f"{place}: 'splits' {error}") from None
    valid = sorted(int(match[1]) for match in names if match)
    if not valid:
        raise UserError(f"{place}: 'splits' {file} has no arrays test_0, test_1, … of row numbers")
    chosen = valid if chosen == ALL else chosen
    absent = next((number for number in chosen if number not in valid), None)
    if absent is not None:
        raise UserError(f"{place}: there is no split {absent} in {file}; it has {valid[0]} to {valid[-1]}")
    return chosen


def _recipes(path: Path, name: str, table: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """(name, the table's name, settings of the grid, keys of a config file) for each combination of a grid's values."""
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
    settings = {"variant_settings": defaults(ZOO[variant]), "inference_settings": defaults(METHODS[method])}
    part_of = {key: part for part, fields in settings.items() for key in fields}
    for key in table:
        if key in part_of:
            hint = f"write {part_of[key]} = {{ {key} = … }}, or [recipes.{name}.grid]"
            raise UserError(f"{place}: '{key}' is a setting; {hint}")
    check_keys(place, "key", table, kinds)
    for key, values in grid.items():
        there = f"{path} [recipes.{name}.grid]"
        if key not in part_of:
            raise unknown(f"setting of {variant} or {method} in {there}", key, part_of)
        if not isinstance(values, list) or not values:
            raise UserError(f"{there}: '{key}' must be a list of values, such as [1, 2], got {values!r:.80}")
        _check_distinct(there, key, [setting_text(value) for value in values])
        if any(key in table.get(part, {}) for part in settings):
            raise UserError(f"{there}: '{key}' is in {part_of[key]} too; leave it out there")
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        label = " ".join([name, *(f"{key}={setting_text(value)}" for key, value in chosen.items())])
        keys = {
            part: table.get(part, {}) | {k: v for k, v in chosen.items() if k in settings[part]} for part in settings
        }
        backbone = str(keys["variant_settings"].get("backbone", ""))
        if backbone and Path(backbone).exists():
            keys["variant_settings"]["backbone"] = str(Path(backbone).resolve())
        yield label, name, chosen, {"baseline": False, **table, **keys}
