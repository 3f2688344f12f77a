"""A recipe is everything needed to run something again: what ``config.json`` holds and ``train`` starts from.

It is resolved from layers, later ones over earlier ones: the zoo's tuned settings, a config file, flags.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import tomllib
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from torch import Tensor

from bnn_pyro.datasets import DATASETS, Dataset, Schema, load_data
from bnn_pyro.distributed import choose_device
from bnn_pyro.errors import UserError, unknown
from bnn_pyro.files import resolve as locate
from bnn_pyro.fitting import backbone_variant, tuned
from bnn_pyro.inference import METHODS, Method
from bnn_pyro.settings import Settings, build, defaults, parse_value, plain, setting
from bnn_pyro.zoo import ZOO, Entry
from bnn_pyro.zoo.auto import AUTO, MINUTES, choose

__all__ = ["DATA_KEYS", "KEYS", "Recipe", "check_keys", "given_settings", "located", "read_config", "read_file",
           "resolve"]  # fmt: skip

#: How data can be loaded: the keys of a recipe's ``data``, and the arguments of ``load_data`` that they become; with
#: what a config file may say of them.
DATA_KEYS = {"name": str, "target": str, "features": list[str], "exclude": list[str], "categorical": list[str],
             "task": str, "drop_missing": bool, "splits": str, "split": int, "validation": int, "limit": int,
             "seed": int}  # fmt: skip
#: The other keys of a config file.
KEYS = {"variant": str, "variant_settings": dict, "inference": str, "inference_settings": dict, "data": dict,
        "seed": int, "num_draws": int, "device": str, "baseline": bool, "auto": dict,
        "conformal": float}  # fmt: skip
#: The baseline of variants that name none, and how all are fitted: one point estimate.
BASELINE = ("mlp", "map")


@dataclass(frozen=True)
class Recipe(Settings):
    """A variant, a method and data, each with its settings; JSON-able by ``dataclasses.asdict``.

    data       ``name`` (a name in ``DATASETS``, or an absolute path) and arguments of ``load_data``
    num_draws  S of every prediction
    baseline   whether the deterministic network is trained beside it
    auto       where variant and method were chosen by size: reason, minutes and expected_seconds
    conformal  level of conformal intervals or sets, for which half of the validation rows are set aside; 0: none
    """

    variant: str = "mean-field"
    variant_settings: Mapping[str, Any] = field(default_factory=dict)
    inference: str | None = None
    inference_settings: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=lambda: {"name": "digits"})
    seed: int = setting(0, low=0, high=2**32 - 1)
    num_draws: int = setting(100, low=1)
    device: str = setting("auto", choices=("auto", "cpu", "cuda"))
    baseline: bool = True
    auto: Mapping[str, Any] = field(default_factory=dict)
    conformal: float = setting(0.0, low=0, below=1)

    def entry(self) -> Entry:
        """The variant with its settings."""
        return build(ZOO[self.variant], self.variant_settings)

    def method(self) -> Method:
        """The inference method with its settings."""
        return build(METHODS[self.inference], self.inference_settings)

    def load(self) -> Dataset:
        """The data, without the rows that are set aside to calibrate."""
        return self.load_calibration()[0]

    def load_calibration(self) -> tuple[Dataset, Tensor, Tensor]:
        """(the data, x and y of its validation rows), or of the half of them that is set aside and no longer in it."""
        data = load_data(self.data["name"], **{k: v for k, v in self.data.items() if k != "name"})
        if not self.conformal:
            return data, data.x_val, data.y_val
        half = len(data.x_val) // 2
        if not half:
            raise UserError(f"conformal takes half of the validation rows, and {data.name} has {len(data.x_val)}: give "
                            "--validation ROWS")  # fmt: skip
        left = dataclasses.replace(data, x_val=data.x_val[half:], y_val=data.y_val[half:])
        return left, data.x_val[:half], data.y_val[:half]

    @property
    def data_name(self) -> str:
        """The name of the data set, or a file's stem."""
        name = self.data["name"]
        return name if name in DATASETS else Path(name).stem

    def difference(self, other: Recipe) -> tuple[str, Any, Any] | None:
        """(what, here, there) of the first thing that would make another posterior; None where there is none."""
        for name in ("variant", "inference", "seed", "conformal"):
            if getattr(self, name) != getattr(other, name):
                return name, getattr(self, name), getattr(other, name)
        for name in ("variant_settings", "inference_settings", "data"):
            here, there = (located(getattr(recipe, name)) for recipe in (self, other))  # earlier versions' may not be
            for key in {**there, **here}:
                if here.get(key) != there.get(key):
                    return key.replace("_", " "), here.get(key), there.get(key)
        return None

    def backbone_variant(self, schema: Schema) -> str | None:
        """The variant of the backbone that this one is the last layer of, and its baseline; None for most."""
        return backbone_variant(self.entry(), schema)

    @property
    def own_module(self) -> str | None:
        """package.module:function of a network of the user's own; None for other variants."""
        return self.variant_settings.get("module") or None

    def for_baseline(self, schema: Schema) -> Recipe | None:
        """What to compare with: a deterministic network on the same data, or None.

        It is the backbone of a last layer, as tuned for the data; else one of the same architecture, with the
        same epochs and batches.
        """
        variant, method = self.backbone_variant(schema), None
        same_architecture = variant is None
        if same_architecture:
            if not self.baseline or hasattr(self.entry(), "backbone_variant"):
                return None
            variant, method = _baseline(self.variant)
        method, best = tuned(variant, self.data_name, method)
        settings, schedule = best.entry, best.method
        if same_architecture:
            shared = {k: v for k, v in self.variant_settings.items() if k in defaults(ZOO[variant])}
            if str(shared.get("prior", "")).startswith(("scale-mixture", "by-target")):
                del shared["prior"]  # a point mass in the former's narrow peak, or without weight decay, is no baseline
            settings = {**best.entry, **shared} | {k: v for k, v in best.entry.items() if k == "prior"}
            length = {k: v for k, v in self.inference_settings.items() if k in ("epochs", "batch_size")}
            schedule = {**best.method, **length}
        return dataclasses.replace(
            self,
            variant=variant,
            variant_settings=plain(build(ZOO[variant], settings)),
            inference=method,
            inference_settings=plain(build(METHODS[method], schedule)),
            baseline=False,
            auto={},
        )


# -- files -------------------------------------------------------------------------------------------------------------
def read_file(path: Path, what: str, form: str) -> tuple[str, dict[str, Any]]:
    """(the text of a "TOML" or "JSON" file, its content). Raises UserError where it is absent or is no such table."""
    if not path.is_file():
        raise UserError(f"no {what} {path}")
    try:
        text = path.read_bytes().decode()
        content = tomllib.loads(text) if form == "TOML" else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid {form}: {error}") from None
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
    return {k: v for k, v in config.items() if v is not None}


def check_keys(place: str | Path, what: str, values: Mapping[str, Any], kinds: Mapping[str, type]) -> None:
    """Refuse keys that there are not, and values of another kind; None is a value that is not given.

    place: the file, and the table in it.   what: what a key is called.
    kinds: {key: a type, or list[a type]}.
    """
    for key, value in values.items():
        if key not in kinds:
            raise unknown(f"{what} in {place}", key, kinds)
        items, kind = ([value], kinds[key]) if not get_args(kinds[key]) else (value, *get_args(kinds[key]))
        types = (int, float) if kind is float else kind
        fits = isinstance(items, list) and all(
            isinstance(v, types) and isinstance(v, bool) <= (kind is bool) for v in items
        )
        if (value is not None and not fits) or "\0" in str(value):
            name = {str: "a text", int: "a whole number", float: "a number", bool: "true or false",
                    list[str]: "a list of texts", list[int]: "a list of whole numbers, such as [0, 1, 2]",
                    }.get(kinds[key], "a table")  # fmt: skip
            raise UserError(f"{place}: '{key}' must be {name}, got {value!r:.80}")


# -- layers ------------------------------------------------------------------------------------------------------------
def resolve(args: Namespace, config: Mapping[str, Any], given: Mapping[str, Any] | None = None) -> Recipe:
    """Tuned settings < config < flags. Raises UserError for unknown names, or values of the wrong kind.

    given: settings of the variant or the method, by their names; None takes those of the flags.
    """
    flags = {k: v for k, v in vars(args).items() if v is not None}
    named = flags.get("inference") or config.get("inference")
    of_config, auto = config.get("variant") or (Recipe.variant if named else AUTO), config.get("auto") or {}
    variant, minutes = flags.get("variant") or of_config, flags.get("minutes", auto.get("minutes", MINUTES))
    if variant == AUTO and "reason" in auto and minutes == auto["minutes"]:
        variant = of_config  # chosen before
    data = _data_options(flags, config.get("data") or {})
    name = data["name"] if data["name"] in DATASETS else Path(data["name"]).stem + " (a file)"
    stored = config if variant == of_config else {}  # settings are those of a variant
    method, given = flags.get("inference") or stored.get("inference"), given_settings(args) if given is None else given
    stored_settings = [stored.get(f"{kind}_settings") or {} for kind in ("variant", "inference")]
    chosen = ""
    if variant == AUTO:
        rows = Recipe(data=data).load()
        given_to_both = {**stored_settings[0], **stored_settings[1], **given}
        choice = choose(rows.schema, len(rows.x_train), name=name, minutes=minutes, method=method, given=given_to_both)
        (variant, method, best, auto), chosen = choice, ", which auto chose"
    elif "minutes" in flags:
        raise UserError(f"--minutes is for auto; leave it out, or take train {AUTO} instead of {variant}")
    else:
        method, best = tuned(variant, name, method)
        if (variant, method) != (stored.get("variant"), stored.get("inference")):
            auto = {}
    if method != (stored.get("inference") or method):
        stored_settings[1] = {}
    kinds = (ZOO[variant], METHODS[method])
    known = [name for kind in kinds for name in defaults(kind)]
    for key in given:
        if key not in known:
            raise unknown(f"setting of {variant} or {method}{chosen}", key, known)

    def settings(kind: type, *layers: Mapping[str, Any]) -> dict[str, Any]:
        fields, values = defaults(kind), {k: v for layer in layers for k, v in layer.items()}
        values |= {k: v for k, v in given.items() if k in fields}
        return located(plain(build(kind, {k: parse_value(k, v, fields.get(k)) for k, v in values.items()})))

    others = {k: flags.get(k, config.get(k)) for k in ("seed", "num_draws", "device", "baseline", "conformal")}
    others = {k: v for k, v in others.items() if v is not None}
    recipe = Recipe(
        variant=variant,
        variant_settings=settings(kinds[0], best.entry, stored_settings[0]),
        inference=method,
        inference_settings=settings(kinds[1], best.method, stored_settings[1]),
        data=data,
        auto=auto,
        **others | {"baseline": (variant, method) != _baseline(variant) and others.get("baseline", True)},
    )
    choose_device(recipe.device)
    return recipe


def _baseline(variant: str) -> tuple[str, str]:
    """Variant and method of what a variant is compared with."""
    return getattr(ZOO[variant], "baseline", BASELINE[0]), BASELINE[1]


def given_settings(args: Namespace) -> dict[str, Any]:
    """Settings of variant or method that were given as flags, --set last; texts as they were typed."""
    names = ("hidden", "activation", "prior", "noise", "likelihood", "bias", "module", "epochs", "batch_size",
             "lr")  # fmt: skip
    given = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
    for text in getattr(args, "set", None) or ():
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UserError(f"--set takes KEY=VALUE, got '{text}'")
        given[key.strip().replace("-", "_")] = value.strip()
    return given


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
    data |= {k: flags[k] for k in ("target", "task", "drop_missing", "splits", "split", "validation", "limit")
             if k in flags}  # fmt: skip
    if "features" in flags:
        data["features"] = next(csv.reader([flags["features"]], skipinitialspace=True), [])
    data |= {k: flags[k] for k in ("exclude", "categorical") if flags.get(k)}
    if "data_seed" in flags:
        data["seed"] = flags["data_seed"]
    return located(data)
