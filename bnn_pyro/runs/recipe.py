"""Recipes: all that is needed to run a fit again (``config.json``), from defaults, then a config file, then flags."""

import csv
import json
import tomllib
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, get_args

from bnn_pyro.datasets import DATASETS, Dataset, Schema, load_data
from bnn_pyro.distributed import choose_device
from bnn_pyro.errors import UserError, check_known, refusing
from bnn_pyro.files import resolve as locate
from bnn_pyro.progress import quiet
from bnn_pyro.settings import Settings, setting
from bnn_pyro.zoo import ZOO
from bnn_pyro.zoo.auto import AUTO, Setup, make_setup, set_up

#: {argument of ``load_data``: its type}: the keys of a recipe's ``data``, and of "data" in a config file.
DATA_KEYS = {"name": str, "target": str, "features": list[str], "exclude": list[str], "categorical": list[str],
             "task": str, "classes": list[str], "target_scale": str, "dates": str, "scale": str, "missing": str,
             "drop_missing": bool, "unseen": str, "groups": str, "time": str, "exposure": str, "event": str,
             "fractions": list[float], "splits": str, "split": int, "validation": int, "limit": int,
             "seed": int}  # fmt: skip
#: The default data of `train`: few training rows, so that networks differ, and many test rows, to measure it.
EXAMPLE = {"name": "digits", "fractions": [0.15, 0.05, 0.8]}
#: (data option, its value in runs of earlier versions, in new runs): equivalent if ``Schema.x_tails`` is empty.
EARLIER = ("scale", "standard", "auto")
#: {key of a config file: its type}.
KEYS = {"variant": str, "variant_settings": dict, "inference": str, "inference_settings": dict, "data": dict,
        "seed": int, "num_draws": int, "device": str, "baseline": bool, "boosting": bool, "auto": dict,
        "conformal": float}  # fmt: skip
#: Keys that are represented by the objects ``entry`` and ``method`` of a recipe.
NAMES = ("variant", "variant_settings", "inference", "inference_settings")
#: The default variant if only a method is named.
VARIANT = "mean-field"
#: The variant of the baseline, unless a variant names another one; and the method (a point estimate) of all baselines.
BASELINE = ("mlp", "map")


@dataclass(frozen=True)
class Recipe(Setup, Settings):
    """A variant, a method and data, each with its settings.

    data       ``name`` (a name in ``DATASETS``, or an absolute path) and arguments of ``load_data``
    num_draws  number of draws S of every prediction
    baseline   whether a deterministic network is trained for comparison
    boosting   whether gradient boosting is trained for comparison, if the data are a table
    conformal  level of conformal intervals or sets, for which half of the validation rows are set aside; 0: none
    """

    data: Mapping[str, Any] = field(default_factory=lambda: {"name": "digits"})
    seed: int = setting(0, low=0, high=2**32 - 1)
    num_draws: int = setting(100, low=1)
    device: str = setting("auto", choices=("auto", "cpu", "cuda"))
    baseline: bool = True
    boosting: bool = False
    conformal: float = setting(0.0, low=0, below=1)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Make a recipe of the ``KEYS`` of a config.json. Raises UserError for unknown names, settings or values."""
        setup = make_setup(config.get("variant", VARIANT), config.get("inference"))
        setup = setup.changed(*(config.get(name, {}) for name in ("variant_settings", "inference_settings")))
        return cls(setup.entry, setup.method, **{k: v for k, v in config.items() if k not in NAMES})

    def to_dict(self) -> dict[str, Any]:
        """Return the content of config.json, all of ``KEYS``."""
        return {key: getattr(self, key) for key in KEYS}

    def load(self) -> Dataset:
        """Load the data; for ``conformal`` half of the validation rows are set aside."""
        data = _load(self.data)
        if not self.conformal:
            return data
        data.schema.need_uncensored("conformal")
        if not (half := len(data.x_val) // 2):
            raise UserError(f"conformal takes half of the validation rows, and {data.name} has {len(data.x_val)}: give "
                            "--validation ROWS")  # fmt: skip
        used = {f"{part}_val": getattr(data, f"{part}_val")[half:] for part in ("x", "y", "index")}
        return replace(data, **used, set_aside=(data.x_val[:half], data.y_val[:half]))

    @property
    def data_name(self) -> str:
        """The name of the data set, or the stem of the file."""
        name = self.data["name"]
        return name if name in DATASETS else Path(name).stem

    def difference(self, other: Self) -> tuple[str, Any, Any] | None:
        """Return (name, value, the other's value) of the first difference that changes the posterior, or None."""
        for name in ("variant", "inference", "seed", "conformal"):
            if getattr(self, name) != getattr(other, name):
                return name, getattr(self, name), getattr(other, name)
        for name in ("variant_settings", "inference_settings", "data"):
            now, then = (located(getattr(recipe, name)) for recipe in (self, other))  # for recipes of earlier versions
            for key in {**then, **now}:
                if now.get(key) != then.get(key) and (key, then.get(key), now.get(key)) != EARLIER:
                    return key.replace("_", " "), now.get(key), then.get(key)
        return None

    #: The variant and method of the baseline.
    own_baseline = property(lambda self: (getattr(self.entry, "baseline", BASELINE[0]), BASELINE[1]))

    def for_baseline(self, schema: Schema) -> Self | None:
        """Return the recipe of a deterministic network on the same data to compare with, or None.

        It is the backbone of a last layer; else a network of the same architecture, epochs, batch size and patience.
        """
        if (backbone := self.backbone_variant(schema)) is not None:
            setup = make_setup(backbone)
        elif not self.baseline or hasattr(self.entry, "backbone_variant"):
            return None
        else:
            shared, decay = self.variant_settings, {}
            prior = shared.pop("prior", None)
            # With these priors a point estimate is in a narrow peak, at the mode 0 of scales, or without weight decay.
            if prior is not None and not str(prior).startswith(("scale-mixture", "gamma", "ard", "by-target")):
                decay = {"prior": prior}
            length = {k: v for k, v in self.inference_settings.items() if k in ("epochs", "batch_size", "patience")}
            setup = make_setup(*self.own_baseline).changed(decay, length, shared)
        return replace(self, entry=setup.entry, method=setup.method, auto={}, baseline=False, boosting=False)


def read_file(path: Path, kind: str, form: str) -> tuple[str, dict[str, Any]]:
    """Return (text, content) of a "TOML" or "JSON" file. Raises UserError if it is absent or not a valid table."""
    if not path.is_file():
        raise UserError(f"no {kind} {path}")
    with refusing(f"{path} is not valid {form}: {{error}}", ValueError, RecursionError):
        text = path.read_bytes().decode()
        content = tomllib.loads(text) if form == "TOML" else json.loads(text)
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, not the settings of a run")
    return text, content


def read_config(path: str | Path) -> dict[str, Any]:
    """Read a JSON or TOML config file. Raises UserError if it is absent, unreadable, or has unknown keys."""
    path = Path(path)
    _, config = read_file(path, "config file", "TOML" if path.suffix == ".toml" else "JSON")
    check_keys(path, "key", config, KEYS)
    if config.get("data") is not None:
        check_keys(path, "key of 'data'", config["data"], DATA_KEYS)
        config["data"] = {k: v for k, v in config["data"].items() if v is not None}
        if path.name == "config.json":  # runs of earlier versions did not write the only scale that they had
            config["data"].setdefault("scale", "standard")
    return {k: v for k, v in config.items() if v is not None}


def check_keys(place: str | Path, label: str, values: Mapping[str, Any], kinds: Mapping[str, type]) -> None:
    """Raise UserError for unknown keys of a table, and for values other than None that are not of their kind."""
    for key, value in values.items():
        check_known(f"{label} in {place}", kinds, key)
        items, kind = ([value], kinds[key]) if not get_args(kinds[key]) else (value, *get_args(kinds[key]))
        types = (int, float) if kind is float else (kind,)
        fits = isinstance(items, list) and all(type(v) in types for v in items)
        if (value is not None and not fits) or "\0" in str(value):
            name = {str: "a text", int: "a whole number", float: "a number", bool: "true or false",
                    list[str]: "a list of texts", list[int]: "a list of whole numbers, such as [0, 1, 2]",
                    list[float]: "a list of numbers"}.get(kinds[key], "a table")  # fmt: skip
            raise UserError(f"{place}: '{key}' must be {name}, got {value!r:.80}")


def resolve(args: Namespace, config: Mapping[str, Any], settings: Mapping[str, Any] | None = None) -> Recipe:
    """Make a recipe from the flags, else the config, else defaults. Raises UserError for unknown names or wrong types.

    settings: {name: value} of settings of the variant or the method; None takes those of the flags.
    """
    flags = {k: v for k, v in vars(args).items() if v is not None}
    named = flags.get("inference") or config.get("inference")
    usual = "my-network" if flags.get("module") else VARIANT if named else AUTO
    of_config, auto = config.get("variant") or usual, config.get("auto") or {}
    variant, minutes = flags.get("variant") or of_config, flags.get("minutes", auto.get("minutes"))
    if variant == AUTO and "reason" in auto and minutes == auto["minutes"]:
        variant = of_config  # chosen before
    elif variant != AUTO and "minutes" in flags:
        raise UserError(f"--minutes is for auto; leave it out, or take train {AUTO} instead of {variant}")
    data = {"scale": "auto"} | _data_options(flags, config.get("data") or {})
    stored = config if variant == of_config else {}  # settings of another variant do not apply
    method = flags.get("inference") or stored.get("inference")
    same_method = method == (stored.get("inference") or method)
    of_variant = located(stored.get("variant_settings") or {})
    of_method = (stored.get("inference_settings") or {}) if same_method else {}
    options = dict(settings=located(flag_settings(args) if settings is None else settings), minutes=minutes)
    setup = set_up(variant, method, lambda: _load(data), of_variant=of_variant, of_method=of_method, **options)
    if not setup.auto and (setup.variant, setup.inference) == (stored.get("variant"), stored.get("inference")):
        setup = replace(setup, auto=auto)
    if (baseline := flags.get("baseline")) is not None:
        flags |= {"baseline": baseline in ("all", "network"), "boosting": baseline in ("all", "boosting")}
    names = ("seed", "num_draws", "device", "baseline", "boosting", "conformal")
    others = {k: v for k in names if (v := flags.get(k, config.get(k))) is not None}
    others.setdefault("boosting", others.get("baseline", True))
    recipe = Recipe(setup.entry, setup.method, setup.auto, data, **others)
    choose_device(recipe.device)
    return replace(recipe, baseline=recipe.baseline and (recipe.variant, recipe.inference) != recipe.own_baseline)


def _load(data: Mapping[str, Any]) -> Dataset:
    with quiet():  # each command reads the data again, but only `train` prints the doubts about them
        return load_data(data["name"], **{k: v for k, v in data.items() if k != "name"})


def flag_settings(args: Namespace) -> dict[str, Any]:
    """Return the settings of variant and method among the flags, --set last; texts are not converted."""
    names = "hidden activation prior noise likelihood bias module epochs batch_size lr"
    settings = {name: getattr(args, name) for name in names.split() if getattr(args, name, None) is not None}
    for text in getattr(args, "set", None) or ():
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UserError(f"--set takes KEY=VALUE, got '{text}'")
        settings[key.strip().replace("-", "_")] = value.strip()
    return settings


def located(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a variant, or data options, with absolute paths for files and folders that exist."""
    absolute = dict(options)
    for key in ("name", "splits", "backbone"):
        text = options.get(key)
        if isinstance(text, str) and text not in ("", *DATASETS, *ZOO):
            path = Path(text) if key == "backbone" else locate(text)
            absolute[key] = str(path.resolve()) if path.exists() else text
    return absolute


def _data_options(flags: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data options of the flags, and those of the config if they are for the same data set."""
    name = located({"name": flags["data"]})["name"] if "data" in flags else None
    data = {"name": "digits", **located(data)}
    data = data if name in (None, data["name"]) else {"name": name}
    special = ("name", "features", "classes", "exclude", "categorical", "seed")
    data |= {k: flags[k] for k in DATA_KEYS if k in flags and k not in special}
    lists = {key: [flags[key]] for key in ("features", "classes") if key in flags}
    lists |= {key: flags[key] for key in ("exclude", "categorical") if flags.get(key)}
    for key, texts in lists.items():
        data[key] = [name for names in csv.reader(texts, skipinitialspace=True) for name in names]
    if "data_seed" in flags:
        data["seed"] = flags["data_seed"]
    return located(data)
