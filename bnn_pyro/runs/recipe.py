"""A recipe is everything needed to run something again: what ``config.json`` holds and ``train`` starts from.

It is resolved from layers, later ones over earlier ones: the zoo's tuned settings, a config file, flags.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bnn_pyro.datasets import DATASETS, load_data
from bnn_pyro.datasets.dataset import Dataset, Schema
from bnn_pyro.datasets.sources import resolve as locate
from bnn_pyro.errors import UserError, unknown
from bnn_pyro.fitting import choose_device, tuned
from bnn_pyro.inference import METHODS, Method
from bnn_pyro.settings import build, defaults, parse_value, plain, whole_number
from bnn_pyro.zoo import ZOO, Entry

__all__ = [
    "DATA_KEYS",
    "KEYS",
    "Recipe",
    "check_keys",
    "check_numbers",
    "given_settings",
    "read_config",
    "resolve",
    "resolve_config",
]

#: How data can be loaded: the keys of a recipe's ``data``, and the arguments of ``load_data`` that they become; with
#: what a config file may say of them.
DATA_KEYS = {"name": str, "target": str, "features": list, "task": str, "drop_missing": bool, "splits": str,
             "split": int, "validation": int, "limit": int, "seed": int}  # fmt: skip
#: The other keys of a config file.
KEYS = {"variant": str, "variant_settings": dict, "inference": str, "inference_settings": dict, "data": dict,
        "seed": int, "num_draws": int, "device": str, "baseline": bool}  # fmt: skip
#: The baseline: one point estimate of the same network.
BASELINE = ("mlp", "map")


@dataclass(frozen=True)
class Recipe:
    """A variant, a method and data, each with its settings; JSON-able by ``dataclasses.asdict``.

    data       ``name`` (a name in ``DATASETS``, or an absolute path) and arguments of ``load_data``
    num_draws  S of every prediction
    baseline   whether the deterministic network is trained beside it
    """

    variant: str = "mean-field"
    variant_settings: Mapping[str, Any] = field(default_factory=dict)
    inference: str | None = None
    inference_settings: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=lambda: {"name": "digits"})
    seed: int = 0
    num_draws: int = 100
    device: str = "auto"
    baseline: bool = True

    def entry(self) -> Entry:
        """The variant with its settings."""
        return build(ZOO[self.variant], self.variant_settings)

    def method(self) -> Method:
        """The inference method with its settings."""
        return build(METHODS[self.inference], self.inference_settings)

    def load(self) -> Dataset:
        """The data."""
        return load_data(self.data["name"], **{k: v for k, v in self.data.items() if k != "name"})

    @property
    def data_name(self) -> str:
        """The name of the data set, or a file's stem."""
        name = self.data["name"]
        return name if name in DATASETS else Path(name).stem

    def difference(self, other: Recipe) -> tuple[str, Any, Any] | None:
        """(what, here, there) of the first thing that would make another posterior; None where there is none."""
        for name in ("variant", "inference", "seed", "variant_settings", "inference_settings", "data"):
            here, there = getattr(self, name), getattr(other, name)
            if isinstance(here, Mapping):
                for key in {**there, **here}:
                    if here.get(key) != there.get(key):
                        return key.replace("_", " "), here.get(key), there.get(key)
            elif here != there:
                return name, here, there
        return None

    def stands_on(self, schema: Schema) -> str | None:
        """The variant whose point estimate this one stands on, and which is then the baseline; None for most."""
        entry = self.entry()
        return entry.foundation(schema) if hasattr(entry, "foundation") else None

    def for_baseline(self, schema: Schema) -> Recipe | None:
        """What to compare with: a deterministic network on the same data, or None.

        It is the network that the variant stands on, as tuned for the data; else one of the same architecture, with the
        same epochs and batches.
        """
        below = self.stands_on(schema)
        if below is not None:
            method, best = tuned(below, self.data_name)
            return self._with(below, method, best.entry, best.method)
        if not self.baseline or hasattr(self.entry(), "foundation"):
            return None
        variant, method = BASELINE
        _, best = tuned(variant, self.data_name, method)
        shared = {k: v for k, v in self.variant_settings.items() if k in defaults(ZOO[variant])}
        schedule = {k: v for k, v in self.inference_settings.items() if k in ("epochs", "batch_size")}
        if "prior" in shared and str(shared["prior"]).startswith("scale-mixture"):
            del shared["prior"]  # a point mass in its narrow peak is another model, not a baseline
        shared |= {k: v for k, v in best.entry.items() if k == "prior"}
        return self._with(variant, method, shared, {**best.method, **schedule})

    def _with(self, variant: str, method: str, entry: Mapping[str, Any], settings: Mapping[str, Any]) -> Recipe:
        """Another variant and method on the same data, without a baseline."""
        return dataclasses.replace(
            self,
            variant=variant,
            variant_settings=plain(build(ZOO[variant], entry)),
            inference=method,
            inference_settings=plain(build(METHODS[method], settings)),
            baseline=False,
        )


def read_config(path: str | Path) -> dict[str, Any]:
    """The keys of a JSON or TOML config file. Raises UserError where it is absent, unreadable, or has unknown keys."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no config file {path}")
    try:
        text = path.read_text(encoding="utf-8")
        config = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid {'TOML' if path.suffix == '.toml' else 'JSON'}: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} holds a {type(config).__name__}, not the settings of a run")
    check_keys(path, "key", config, KEYS)
    if config.get("data") is not None:
        check_keys(path, "key of 'data'", config["data"], DATA_KEYS)
        config["data"] = {k: v for k, v in config["data"].items() if v is not None}
    return {k: v for k, v in config.items() if v is not None}


def check_keys(place: str | Path, what: str, values: Mapping[str, Any], kinds: Mapping[str, type]) -> None:
    """Refuse keys that there are not, and values of another kind; None is a value that is not given.

    place: the file, and the table in it.   what: what a key is called.
    """
    for key, value in values.items():
        if key not in kinds:
            raise unknown(f"{what} in {place}", key, kinds)
        fits = value is None or (isinstance(value, kinds[key]) and isinstance(value, bool) <= (kinds[key] is bool))
        if not fits or "\0" in str(value) or (kinds[key] is list and not all(isinstance(v, str) for v in value or ())):
            name = {str: "a text", int: "a whole number", bool: "true or false", list: "a list of texts"}
            what = name.get(kinds[key], "a table of settings")
            raise UserError(f"{place}: '{key}' must be {what}, got {value!r:.80}")


def resolve(args: Namespace, config: Mapping[str, Any]) -> Recipe:
    """Tuned settings < config < flags. Raises UserError for unknown names, or values of the wrong kind."""
    flags = {k: v for k, v in vars(args).items() if v is not None}
    base = {**{f.name: None for f in dataclasses.fields(Recipe)}, **config}
    variant = flags.get("variant") or base["variant"] or Recipe.variant
    if variant not in ZOO:
        raise unknown("variant", variant, ZOO)
    data = _data(flags, dict(base["data"] or {}))
    name = data["name"] if data["name"] in DATASETS else Path(data["name"]).stem + " (a file)"
    same_variant = variant == (base["variant"] or Recipe.variant)
    method, best = tuned(variant, name, flags.get("inference") or (base["inference"] if same_variant else None))
    same_method = same_variant and method == (base["inference"] or method)
    data = {**best.data, **data}

    given = _given(flags)
    kinds = {"variant": ZOO[variant], "inference": METHODS[method]}
    known = [name for kind in kinds.values() for name in defaults(kind)]
    for key in given:
        if key not in known:
            raise unknown(f"setting of {variant} or {method}", key, known)
    layers = {
        "variant": {**best.entry, **((base["variant_settings"] or {}) if same_variant else {})},
        "inference": {**best.method, **((base["inference_settings"] or {}) if same_method else {})},
    }
    settings = {}
    for part, kind in kinds.items():
        fields = defaults(kind)
        chosen = layers[part] | {k: v for k, v in given.items() if k in fields}
        settings[part] = plain(build(kind, {k: parse_value(k, v, fields.get(k)) for k, v in chosen.items()}))
    numbers = {k: flags.get(k, base[k]) for k in ("seed", "num_draws")}
    baseline = flags.get("baseline", base["baseline"])
    device = flags.get("device") or base["device"] or Recipe.device
    choose_device(device)
    recipe = Recipe(
        variant=variant,
        variant_settings=settings["variant"],
        inference=method,
        inference_settings=settings["inference"],
        data=data,
        device=device,
        baseline=variant != BASELINE[0] and (True if baseline is None else bool(baseline)),
        **{k: whole_number(k, v) for k, v in numbers.items() if v is not None},
    )
    check_numbers(recipe)
    return recipe


def check_numbers(recipe: Recipe) -> None:
    """Raise UserError for a number of draws, or a seed, that no run can have."""
    if recipe.num_draws < 1:
        raise UserError(f"num_draws must be at least 1, got {recipe.num_draws}")
    if not 0 <= recipe.seed < 2**32:
        raise UserError(f"seed must lie between 0 and 2³² - 1, got {recipe.seed}")


def resolve_config(config: Mapping[str, Any]) -> Recipe:
    """The same without flags."""
    return resolve(Namespace(), config)


def given_settings(args: Namespace, kind: type) -> dict[str, Any]:
    """The settings of a variant or method that the flags give, without tuned ones and defaults."""
    fields = defaults(kind)
    given = _given({k: v for k, v in vars(args).items() if v is not None})
    return {k: parse_value(k, v, fields[k]) for k, v in given.items() if k in fields}


def _data(flags: Mapping[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """The data options of flags over those of a config; those of another data set are left out."""
    name = flags.get("data")
    if name is not None and name not in DATASETS and locate(name).exists():
        name = str(locate(name).resolve())
    if name is not None and name != data.get("name"):
        data = {"name": name}
    data.setdefault("name", "digits")
    for key in ("target", "task", "drop_missing", "split", "validation", "limit"):
        if key in flags:
            data[key] = flags[key]
    if "features" in flags:
        data["features"] = [feature.strip() for feature in flags["features"].split(",")]
    if "splits" in flags:
        data["splits"] = str(locate(flags["splits"]).resolve())
    if "data_seed" in flags:
        data["seed"] = flags["data_seed"]
    return data


def _given(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of variant or method that were given as flags, --set last."""
    names = ("hidden", "activation", "prior", "noise", "bias", "epochs", "batch_size", "lr")
    given = {name: flags[name] for name in names if name in flags}
    for text in flags.get("set", ()):
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UserError(f"--set takes KEY=VALUE, got '{text}'")
        given[key.strip().replace("-", "_")] = value.strip()
    if "backbone" in given and Path(given["backbone"]).exists():
        given["backbone"] = str(Path(given["backbone"]).resolve())
    return given
