"""A recipe is everything needed to run something again: what ``config.json`` holds and ``train`` starts from.

It is resolved from layers, later ones over earlier ones: defaults, a config file, flags.
"""

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

#: How data can be loaded: the keys of a recipe's ``data``, arguments of ``load_data``, and what a config file may say.
DATA_KEYS = {"name": str, "target": str, "features": list[str], "exclude": list[str], "categorical": list[str],
             "task": str, "classes": list[str], "target_scale": str, "dates": str, "scale": str, "missing": str,
             "drop_missing": bool, "unseen": str, "groups": str, "time": str, "exposure": str, "event": str,
             "fractions": list[float], "splits": str, "split": int, "validation": int, "limit": int,
             "seed": int}  # fmt: skip
#: What `train` takes without data: few training rows, where networks differ most, and enough to tell them apart by.
EXAMPLE = {"name": "digits", "fractions": [0.15, 0.05, 0.8]}
#: A data option as of earlier runs, and now: it makes a difference where ``Schema.x_tails`` has any.
EARLIER = ("scale", "standard", "auto")
#: The other keys of a config file.
KEYS = {"variant": str, "variant_settings": dict, "inference": str, "inference_settings": dict, "data": dict,
        "seed": int, "num_draws": int, "device": str, "baseline": bool, "boosting": bool, "auto": dict,
        "conformal": float}  # fmt: skip
#: Those that become objects of a recipe.
NAMES = ("variant", "variant_settings", "inference", "inference_settings")
#: The variant where a file names a method alone.
VARIANT = "mean-field"
#: The baseline of variants that name none, and how all are fitted: one point estimate.
BASELINE = ("mlp", "map")


@dataclass(frozen=True)
class Recipe(Setup, Settings):
    """A variant, a method and data, each with its settings.

    data       ``name`` (a name in ``DATASETS``, or an absolute path) and arguments of ``load_data``
    num_draws  S of every prediction
    baseline   whether the deterministic network is trained beside it
    boosting   whether gradient boosting is, where the data are a table
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
        """Of what config.json holds, ``KEYS``. Raises UserError for names, settings or values that there are not."""
        setup = make_setup(config.get("variant", VARIANT), config.get("inference"))
        setup = setup.changed(*(config.get(name, {}) for name in ("variant_settings", "inference_settings")))
        return cls(setup.entry, setup.method, **{k: v for k, v in config.items() if k not in NAMES})

    def to_dict(self) -> dict[str, Any]:
        """What config.json holds, all of ``KEYS``."""
        return {key: getattr(self, key) for key in KEYS}

    def load(self) -> Dataset:
        """The data, for ``conformal`` with half of the validation rows set aside."""
        data = _load(self.data)
        if not self.conformal:
            return data
        data.schema.need_uncensored("conformal")
        if not (half := len(data.x_val) // 2):
            raise UserError(f"conformal takes half of the validation rows, and {data.name} has {len(data.x_val)}: give "
                            "--validation ROWS")  # fmt: skip
        left = {f"{part}_val": getattr(data, f"{part}_val")[half:] for part in ("x", "y", "index")}
        return replace(data, **left, set_aside=(data.x_val[:half], data.y_val[:half]))

    @property
    def data_name(self) -> str:
        """The name of the data set, or a file's stem."""
        name = self.data["name"]
        return name if name in DATASETS else Path(name).stem

    def difference(self, other: Self) -> tuple[str, Any, Any] | None:
        """(name, value, the other's) of the first thing that would make another posterior; None where there is none."""
        for name in ("variant", "inference", "seed", "conformal"):
            if getattr(self, name) != getattr(other, name):
                return name, getattr(self, name), getattr(other, name)
        for name in ("variant_settings", "inference_settings", "data"):
            now, then = (located(getattr(recipe, name)) for recipe in (self, other))  # earlier versions' may not be
            for key in {**then, **now}:
                if now.get(key) != then.get(key) and (key, then.get(key), now.get(key)) != EARLIER:
                    return key.replace("_", " "), now.get(key), then.get(key)
        return None

    #: The variant and the method that the variant is compared with.
    own_baseline = property(lambda self: (getattr(self.entry, "baseline", BASELINE[0]), BASELINE[1]))

    def for_baseline(self, schema: Schema) -> Self | None:
        """What to compare with: a deterministic network on the same data, or None.

        It is the backbone of a last layer; else one of the same architecture, with its epochs, batches and patience.
        """
        if (backbone := self.backbone_variant(schema)) is not None:
            setup = make_setup(backbone)
        elif not self.baseline or hasattr(self.entry, "backbone_variant"):
            return None
        else:
            shared, decay = self.variant_settings, {}
            prior = shared.pop("prior", None)
            # No baseline: a point mass in a scale mixture's narrow peak, at gamma's or ard's mode 0, or without decay.
            if prior is not None and not str(prior).startswith(("scale-mixture", "gamma", "ard", "by-target")):
                decay = {"prior": prior}
            length = {k: v for k, v in self.inference_settings.items() if k in ("epochs", "batch_size", "patience")}
            setup = make_setup(*self.own_baseline).changed(decay, length, shared)
        return replace(self, entry=setup.entry, method=setup.method, auto={}, baseline=False, boosting=False)


def read_file(path: Path, what: str, form: str) -> tuple[str, dict[str, Any]]:
    """(the text of a "TOML" or "JSON" file, its content). Raises UserError where it is absent or is no such table."""
    if not path.is_file():
        raise UserError(f"no {what} {path}")
    with refusing(f"{path} is not valid {form}: {{error}}", ValueError, RecursionError):
        text = path.read_bytes().decode()
        content = tomllib.loads(text) if form == "TOML" else json.loads(text)
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, not the settings of a run")
    return text, content


def read_config(path: str | Path) -> dict[str, Any]:
    """The keys of a JSON or TOML config file. Raises UserError where it is absent, unreadable, or has unknown keys."""
    path = Path(path)
    _, config = read_file(path, "config file", "TOML" if path.suffix == ".toml" else "JSON")
    check_keys(path, "key", config, KEYS)
    if config.get("data") is not None:
        check_keys(path, "key of 'data'", config["data"], DATA_KEYS)
        config["data"] = {k: v for k, v in config["data"].items() if v is not None}
        if path.name == "config.json":  # a run's: earlier versions had no other scale, and did not write it
            config["data"].setdefault("scale", "standard")
    return {k: v for k, v in config.items() if v is not None}


def check_keys(place: str | Path, what: str, values: Mapping[str, Any], kinds: Mapping[str, type]) -> None:
    """Refuse unknown keys, and values not of ``kinds`` (type or list[type]; None: not given); place: file and table."""
    for key, value in values.items():
        check_known(f"{what} in {place}", kinds, key)
        items, kind = ([value], kinds[key]) if not get_args(kinds[key]) else (value, *get_args(kinds[key]))
        types = (int, float) if kind is float else (kind,)
        fits = isinstance(items, list) and all(type(v) in types for v in items)
        if (value is not None and not fits) or "\0" in str(value):
            name = {str: "a text", int: "a whole number", float: "a number", bool: "true or false",
                    list[str]: "a list of texts", list[int]: "a list of whole numbers, such as [0, 1, 2]",
                    list[float]: "a list of numbers"}.get(kinds[key], "a table")  # fmt: skip
            raise UserError(f"{place}: '{key}' must be {name}, got {value!r:.80}")


def resolve(args: Namespace, config: Mapping[str, Any], settings: Mapping[str, Any] | None = None) -> Recipe:
    """Defaults < config < flags. Raises UserError for unknown names, or values of the wrong kind.

    settings: of the variant or the method, by their names; None takes those of the flags.
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
    stored = config if variant == of_config else {}  # settings are those of a variant
    method = flags.get("inference") or stored.get("inference")
    same_method = method == (stored.get("inference") or method)
    of_variant = located(stored.get("variant_settings") or {})
    of_method = (stored.get("inference_settings") or {}) if same_method else {}
    how = dict(settings=located(flag_settings(args) if settings is None else settings), minutes=minutes)
    setup = set_up(variant, method, lambda: _load(data), of_variant=of_variant, of_method=of_method, **how)
    if not setup.auto and (setup.variant, setup.inference) == (stored.get("variant"), stored.get("inference")):
        setup = replace(setup, auto=auto)
    if (which := flags.get("baseline")) is not None:
        flags |= {"baseline": which in ("all", "network"), "boosting": which in ("all", "boosting")}
    names = ("seed", "num_draws", "device", "baseline", "boosting", "conformal")
    others = {k: v for k in names if (v := flags.get(k, config.get(k))) is not None}
    others.setdefault("boosting", others.get("baseline", True))
    recipe = Recipe(setup.entry, setup.method, setup.auto, data, **others)
    choose_device(recipe.device)
    return replace(recipe, baseline=recipe.baseline and (recipe.variant, recipe.inference) != recipe.own_baseline)


def _load(data: Mapping[str, Any]) -> Dataset:
    with quiet():  # each command reads the data again; `train` says what is doubtful in them
        return load_data(data["name"], **{k: v for k, v in data.items() if k != "name"})


def flag_settings(args: Namespace) -> dict[str, Any]:
    """Settings of variant or method among the flags, --set last; texts as they were typed."""
    names = "hidden activation prior noise likelihood bias module epochs batch_size lr"
    settings = {name: getattr(args, name) for name in names.split() if getattr(args, name, None) is not None}
    for text in getattr(args, "set", None) or ():
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UserError(f"--set takes KEY=VALUE, got '{text}'")
        settings[key.strip().replace("-", "_")] = value.strip()
    return settings


def located(options: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a variant, or data options, with the files and folders that there are by their absolute paths."""
    absolute = dict(options)
    for key in ("name", "splits", "backbone"):
        text = options.get(key)
        if isinstance(text, str) and text not in ("", *DATASETS, *ZOO):
            path = Path(text) if key == "backbone" else locate(text)
            absolute[key] = str(path.resolve()) if path.exists() else text
    return absolute


def _data_options(flags: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """The data options of flags over those of a config; those of another data set are left out."""
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
