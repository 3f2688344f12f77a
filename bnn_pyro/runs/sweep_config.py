"""Read and check the TOML file of a sweep: every recipe on every split of every data set with every seed.

docs/sweeps.md has an example. A table [data.NAME] has the keys of `data` in a config file (``name`` is NAME by default)
and may have its own ``splits_to_run``; a table [recipes.NAME] has the other keys, except seed, and a grid of settings.
"""

import itertools
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bnn_pyro.errors import UserError, refusing
from bnn_pyro.files import read_archive
from bnn_pyro.runs.recipe import DATA_KEYS, KEYS, Recipe, check_keys, located, read_file, resolve
from bnn_pyro.zoo import ZOO

ALL = "all"
#: {key: its type} of the file, and of a recipe in it.
SWEEP_KEYS = {"seeds": list[int], "splits": list[int], "data": dict, "recipes": dict}
RECIPE_KEYS = {key: kind for key, kind in KEYS.items() if key not in ("data", "seed")} | {"grid": dict}
#: The longest name of a folder, in bytes.
MAX_NAME = 255
#: The seed of a fit is the sweep's seed + SEED_STEP · split. With one seed for all splits their fits would share the
#: initial weights, whose effect (on small data as large as the split's) the error over splits would not include.
SEED_STEP = 1000
#: States of a fit: it has scores; it was interrupted; it was not begun; it has other settings; it ended in an error.
FINISHED, BEGUN, MISSING, CHANGED, FAILED = "finished", "begun", "missing", "changed", "failed"


@dataclass(frozen=True, eq=False)
class RunTask:
    """One fit of a sweep.

    recipe_name  the name of its table and its settings of the grid: "mlp prior=fan-in:1"
    table, data  the names of its tables
    grid         its settings of the grid
    seed         the seed of the sweep, from which the recipe's own seed follows (see ``SEED_STEP``)
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
        """The name of its folder; characters other than letters, digits and . , + = - _ become a hyphen."""
        names = (re.sub(r"[^\w.,+=-]+", "-", name).strip("-.") or "x" for name in (self.recipe_name, self.data))
        return "-".join([*names, f"seed{self.seed}", f"split{self.split}"])


class SweepConfig(NamedTuple):
    """A sweep: its file, the text of the file, and its fits."""

    path: Path
    text: str
    tasks: Sequence[RunTask]


def read_sweep_config(path: str | Path) -> SweepConfig:
    """Read a sweep, with all recipes on the first splits first. Raises UserError with the file, table and key."""
    path = Path(path)
    text, content = read_file(path, "sweep file", "TOML")
    splits = _numbers(path, "splits", content, SWEEP_KEYS)
    seeds = _numbers(path, "seeds", content, SWEEP_KEYS) or [0]
    data = [_dataset(path, name, table, splits) for name, table in _tables(path, content, "data")]
    recipes = [recipe for name, table in _tables(path, content, "recipes") for recipe in _recipes(path, name, table)]
    folders: dict[str, RunTask] = {}
    in_order = [row for rows in itertools.zip_longest(*data) for row in rows if row is not None]
    for seed, (name, split, options), (label, table, grid, keys) in itertools.product(seeds, in_order, recipes):
        with refusing(f"{path} [recipes.{table}] ({label}): {{error}}", UserError):
            config = {**keys, "data": options, "seed": (seed + SEED_STEP * split) % 2**32}
            task = RunTask(label, table, grid, name, seed, split, resolve(Namespace(), config, grid))
            if len(task.name.encode()) > MAX_NAME:
                raise UserError(f"the name of its folder would have more than {MAX_NAME} characters; give the recipe "
                                "or the data a shorter name, or the grid fewer keys")  # fmt: skip
        if (other := folders.setdefault(task.name.lower(), task)) is not task:
            first = f"'{other.recipe_name}' on '{other.data}'"
            raise UserError(f"{path}: {first} and '{label}' on '{name}' would share a folder; rename one of them")
    return SweepConfig(path, text, list(folders.values()))


def setting_text(value: Any) -> str:
    """Return the text of a setting's value, for the name of a recipe."""
    if isinstance(value, list | tuple):
        return ",".join(map(setting_text, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _tables(path: Path, content: Mapping[str, Any], kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, table) for every table [kind.NAME]. Raises UserError if there is none."""
    tables = content.get(kind) or {}
    check_keys(f"{path} [{kind}]", "table", tables, dict.fromkeys(tables, dict))
    if not tables:
        raise UserError(f"{path} has no {kind}: add a table [{kind}.NAME]")
    return ((name, dict(table)) for name, table in tables.items())


def _numbers(place: str | Path, key: str, table: Mapping[str, Any], kinds: Mapping[str, Any]) -> list[int] | str | None:
    """Return different whole numbers, ``ALL``, or None, from one key of a table; all keys of the table are checked."""
    is_all = [k for k in ("splits", "splits_to_run") if table.get(k) == ALL]
    check_keys(place, "key", {k: v for k, v in table.items() if k not in is_all}, kinds)
    numbers = table.get(key)
    if numbers not in (None, ALL) and (not numbers or min(numbers) < 0 or len({*numbers}) < len(numbers)):
        raise UserError(f"{place}: '{key}' must be whole numbers from 0 on, as [0, 1, 2], none twice, got {numbers}")
    return numbers


def _dataset(
    path: Path, name: str, table: dict[str, Any], splits: list[int] | str | None
) -> list[tuple[str, int, dict[str, Any]]]:
    """Return (name, split, keys of a recipe's ``data``) for every split to run."""
    place = f"{path} [data.{name}]"
    own_splits = _numbers(place, "splits_to_run", table, {**DATA_KEYS, "splits_to_run": list[int]})
    options = located({"name": name, **table})
    options.pop("splits_to_run", None)
    key = "split" if "splits" in options else "seed"  # the key of a split's number in a recipe
    number = options.pop(key, None)
    chosen = splits if own_splits is None else own_splits
    if chosen is None:
        chosen = [number or 0]
    elif number is not None:
        raise UserError(f"{place}: '{key}' chooses a split, and a list of splits is given too; leave it out, or choose "
                        f"only that split by splits_to_run = [{number}] here")  # fmt: skip
    elif chosen == ALL and key == "seed":
        raise UserError(f'{place}: "{ALL}" splits are those of a file of given splits, and there is none; give '
                        "splits_to_run = [0, 1, 2] here (seeds of random splits), or splits = FILE.npz")  # fmt: skip
    elif key == "split":
        with refusing(f"{place}: 'splits' {{error}}", UserError):
            names = read_archive(options["splits"])
        valid = sorted(int(name[5:]) for name in names if re.fullmatch(r"test_\d+", name))
        chosen = valid if chosen == ALL else chosen
        if absent := [number for number in chosen if number not in valid]:
            raise UserError(f"{place}: there is no split {absent[0]} in {options['splits']}, which has {valid}")
    return [(name, split, {**options, key: split}) for split in chosen]


def _recipes(path: Path, name: str, table: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """Yield (name, the table's name, settings of the grid, keys of a config file) for each combination of the grid."""
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
