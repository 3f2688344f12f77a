"""Which variants, methods and data are checked: what the command line asks for, or the whole zoo."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.errors import UserError, unknown
from bnn_pyro.inference import METHODS
from bnn_pyro.inference.method import LIMITS
from bnn_pyro.recipe import Recipe, given_settings, resolve
from bnn_pyro.training import at_hand, fit
from bnn_pyro.trust import Subject
from bnn_pyro.zoo import ZOO, Entry

__all__ = ["DATA", "Checked", "bench_subjects", "one_subject"]

#: Data whose inputs are used where none are named: small enough for every method, and embedded.
DATA, IMAGES = "toy-curve", "digits"
#: Settings of variants in the bench of the whole zoo: small networks, of which chains can visit all there is.
SMALL: dict[str, dict[str, Any]] = {
    "mean-field": {"hidden": (4,), "activation": "tanh"},
    "hidden-layer": {"hidden": (4,), "activation": "tanh"},
}


@dataclass(frozen=True)
class Checked:
    """A subject to be: its recipe, and the settings of the method that a user gave."""

    recipe: Recipe
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Variant, method and data, for a person."""
        return f"{self.recipe.variant} · {self.recipe.inference} · {self.recipe.data_name}"

    @property
    def key(self) -> dict[str, Any]:
        """What makes it another subject; JSON-able."""
        recipe = self.recipe
        return {
            "variant": recipe.variant,
            "variant_settings": dict(recipe.variant_settings),
            "inference": recipe.inference,
            "data": dict(recipe.data),
            "given": {k: list(v) if isinstance(v, tuple) else v for k, v in self.given.items()},
        }

    def results(self) -> dict[str, Any]:
        """The empty results of this subject."""
        limit = METHODS[self.recipe.inference].limit
        about = self.key | {"label": self.label, "limit": limit, "claim": LIMITS[limit]}
        return about | {"outcomes": {}, "refused": {}, "failed": {}}

    def subject(self) -> Subject:
        """With the data loaded; the network that a last layer stands on is trained first, once."""
        return Subject(self.recipe.variant, self._entry, self.recipe.inference, self._data, self.given)

    @cached_property
    def _data(self) -> Dataset:
        return self.recipe.load()

    @cached_property
    def _entry(self) -> Entry:
        entry = at_hand(self.recipe.entry(), self._data)
        below = self.recipe.for_baseline(self._data.schema) if hasattr(entry, "foundation") else None
        if below is None or entry.foundation(self._data.schema) is None:
            return entry
        how = dict(seed=self.recipe.seed, device="cpu", progress=False)
        return entry.on(fit(below.entry(), self._data, below.method(), **how))


def one_subject(args: Namespace) -> Checked:
    """What the command line names. Raises UserError for unknown names, or values of the wrong kind."""
    if args.variant not in ZOO:
        raise unknown("variant", args.variant, ZOO)
    images = getattr(ZOO[args.variant], "images_only", False)
    recipe = resolve(args, {"data": {"name": IMAGES if images else DATA}})
    return Checked(recipe, given_settings(args, METHODS[recipe.inference]))


def bench_subjects(args: Namespace) -> list[Checked]:
    """Every variant with each of its methods, or with the one that is named.

    Raises UserError for an option that needs a variant.
    """
    alone = ("inference", "data", "seed", "budget", "only", "out", "resume", "quiet", "command", "cores")
    for name, value in vars(args).items():
        if name not in alone and value not in (None, [], False):
            raise UserError(f"--{name.replace('_', '-')} needs a variant: check VARIANT --{name.replace('_', '-')} …")
    plans = []
    for variant, kind in ZOO.items():
        for method in kind.methods:
            if args.inference in (None, method):
                small = [
                    f"{k}={','.join(map(str, v)) if isinstance(v, tuple) else v}"
                    for k, v in SMALL.get(variant, {}).items()
                ]
                plans.append(
                    one_subject(Namespace(**{**vars(args), "variant": variant, "inference": method, "set": small}))
                )
    if not plans:
        raise unknown("inference method", args.inference, METHODS)
    return plans
