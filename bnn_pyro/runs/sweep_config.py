"""The TOML file of a sweep, read and checked: every recipe on every split of every data set with every seed.

docs/sweeps.md has one. A table of data has keys as under `data` in a config file (its name by default the table's), and
``splits_to_run`` instead of the splits of all; a table of a recipe has the other keys but seed, and a grid of settings.
"""

import itertools
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bnn_pyro.errors import UserError
from bnn_pyro.files import read_archive
from bnn_pyro.runs.recipe import DATA_KEYS, KEYS, Recipe, check_keys, located, read_file, resolve
from bnn_pyro.zoo import ZOO

ALL = "all"
#: The keys of the file, and of a recipe in it.
SWEEP_KEYS = {"seeds": list[int], "splits": list[int], "data": dict, "recipes": dict}
RECIPE_KEYS = {key: kind for key, kind in KEYS.items() if key not in ("data", "seed")} | {"grid": dict}
#: How long a folder's name may be, in bytes.
MAX_NAME = 255
#: A fit's own seed is that of the sweep + SEED_STEP · split. Fits of one seed would begin with the same weights on
#: every split, and what these do to the result (on a small set as much as the split) would be in no error over splits.
SEED_STEP = 1000
#: A fit has its scores; was cut off; was never begun; is one of other settings; ended in an error.
FINISHED, BEGUN, MISSING, CHANGED, FAILED = "finished", "begun", "missing", "changed", "failed"


@dataclass(frozen=True, eq=False)
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


class SweepConfig(NamedTuple):
    """Every recipe on every split of every data set with every seed.   text: of the file."""

    path: Path
    text: str
    tasks: Sequence[RunTask]


def read_sweep_config(path: str | Path) -> SweepConfig:
    """The sweep that a file asks for; one that is stopped early has all recipes on the first splits.

    Raises UserError, one line that names the file, the table, the key and the way out, for whatever is wrong in it.
    """
    path = Path(path)
    text, content = read_file(path, "sweep file", "TOML")
    splits = _numbers(path, "splits", content, SWEEP_KEYS)
    seeds = _numbers(path, "seeds", content, SWEEP_KEYS) or [0]
    data = [_dataset(path, name, table, splits) for name, table in _tables(path, content, "data")]
    recipes = [recipe for name, table in _tables(path, content, "recipes") for recipe in _recipes(path, name, table)]
    folders: dict[str, RunTask] = {}
    in_order = [row for rows in itertools.zip_longest(*data) for row in rows if row is not None]
    for seed, (name, split, options), (label, table, grid, keys) in itertools.product(seeds, in_order, recipes):
        try:
            config = {**keys, "data": options, "seed": (seed + SEED_STEP * split) % 2**32}
            task = RunTask(label, table, grid, name, seed, split, resolve(Namespace(), config, grid))
            if len(task.name.encode()) > MAX_NAME:
                raise UserError(f"the name of its folder would have more than {MAX_NAME} characters; give the recipe "
                                "or the data a shorter name, or the grid fewer keys")  # fmt: skip
        except UserError as error:
            raise UserError(f"{path} [recipes.{table}] ({label}): {error}") from None
        if (other := folders.setdefault(task.name.lower(), task)) is not task:
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
    tables = content.get(kind) or {}
    check_keys(f"{path} [{kind}]", "table", tables, dict.fromkeys(tables, dict))
    if not tables:
        raise UserError(f"{path} has no {kind}: add a table [{kind}.NAME]")
    return ((name, dict(table)) for name, table in tables.items())


def _numbers(place: str | Path, key: str, table: Mapping[str, Any], kinds: Mapping[str, Any]) -> list[int] | str | None:
    """Whole numbers, each once, of one key of a table, all of whose keys are checked; ``ALL``, or None without it."""
    is_all = [k for k in ("splits", "splits_to_run") if table.get(k) == ALL]
    check_keys(place, "key", {k: v for k, v in table.items() if k not in is_all}, kinds)
    numbers = table.get(key)
    if numbers not in (None, ALL) and (not numbers or min(numbers) < 0 or len({*numbers}) < len(numbers)):
        raise UserError(f"{place}: '{key}' must be whole numbers from 0 on, as [0, 1, 2], none twice, got {numbers}")
    return numbers


def _dataset(
    path: Path, name: str, table: dict[str, Any], splits: list[int] | str | None
) -> list[tuple[str, int, dict[str, Any]]]:
    """(name, split, keys of a recipe's ``data``) of every split that is run."""
    place = f"{path} [data.{name}]"
    own_splits = _numbers(place, "splits_to_run", table, {**DATA_KEYS, "splits_to_run": list[int]})
    options = located({"name": name, **table})
    options.pop("splits_to_run", None)
    key = "split" if "splits" in options else "seed"  # what a split's number is called in a recipe
    number = options.pop(key, None)
    chosen = splits if own_splits is None else own_splits
    if chosen is None:
        chosen = [number or 0]
    elif number is not None:
        raise UserError(f"{place}: '{key}' is which split to take, and a list of splits is given too; leave it out, "
                        f"or take that one alone by splits_to_run = [{number}] here")  # fmt: skip
    elif chosen == ALL and key == "seed":
        raise UserError(f'{place}: "{ALL}" splits are those of a file of given ones, and this has none; give '
                        "splits_to_run = [0, 1, 2] here (seeds of random splits), or splits = FILE.npz")  # fmt: skip
    elif key == "split":
        try:
            names = read_archive(options["splits"])
        except UserError as error:
            raise UserError(f"{place}: 'splits' {error}") from None
        valid = sorted(int(name[5:]) for name in names if re.fullmatch(r"test_\d+", name))
        chosen = valid if chosen == ALL else chosen
        if absent := [number for number in chosen if number not in valid]:
            raise UserError(f"{place}: there is no split {absent[0]} in {options['splits']}, which has {valid}")
    return [(name, split, {**options, key: split}) for split in chosen]


def _recipes(path: Path, name: str, table: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """(name, the table's name, settings of the grid, keys of a config file) for each combination of a grid's values."""
    place = f"{path} [recipes.{name}]"
    check_keys(place, "key", table, RECIPE_KEYS)
    if "variant" not in table and name not in ZOO:
        raise UserError(f"{place} has no 'variant', and '{name}' is none; add variant = one of {', '.join(ZOO)}")
    grid = table.pop("grid", {})
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"{place}: '{key}' of the grid must be a list of values, as [1, 2], got {values!r:.80}")
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        label = " ".join([name, *(f"{key}={setting_text(value)}" for key, value in chosen.items())])
        yield label, name, chosen, {"variant": name, "baseline": False, **table}
