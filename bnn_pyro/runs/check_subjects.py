"""Which variants, methods and data are checked: what the command line asks for, or the whole zoo."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from bnn_pyro.checks import Subject
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.errors import UserError, unknown
from bnn_pyro.fitting import at_hand, fit
from bnn_pyro.inference import METHODS, methods_for
from bnn_pyro.inference.method import CONVERGES_TO
from bnn_pyro.isolation import isolated
from bnn_pyro.runs.recipe import Recipe, given_settings, resolve
from bnn_pyro.settings import build
from bnn_pyro.zoo import ZOO, Entry

__all__ = ["DATA", "Checked", "bench_subjects", "one_subject"]

#: Data whose inputs are used where none are named: small enough for every method, and embedded.
DATA, IMAGES = "toy-curve", "digits"
#: Settings of variants in the bench of the whole zoo: small networks, of which chains can visit all there is.
SMALL = {name: ["hidden=4", "activation=tanh"] for name in ("mean-field", "hidden-layer")}


@dataclass(frozen=True)
class Grounds:
    """A variant and data, loaded and made when first asked for; shared by the methods that are checked on them."""

    recipe: Recipe

    @cached_property
    def data(self) -> Dataset:
        """All of its rows; checks take some."""
        return self.recipe.load()

    @cached_property
    def entry(self) -> Entry:
        """The variant; the network that a last layer stands on is trained first."""
        entry = at_hand(self.recipe.entry(), self.data)
        below = self.recipe.for_baseline(self.data.schema) if self.recipe.stands_on(self.data.schema) else None
        if below is None:
            return entry
        how = dict(seed=self.recipe.seed, device="cpu", progress=False)
        return entry.on(fit(below.entry(), self.data, below.method(), **how))


@dataclass(frozen=True)
class Checked:
    """A subject to be: its recipe, the settings of the method that a user gave, and what it stands on."""

    recipe: Recipe
    given: Mapping[str, Any]
    grounds: Grounds

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
        target = METHODS[self.recipe.inference].converges_to
        about = self.key | {"label": self.label, "converges_to": target, "claim": CONVERGES_TO[target]}
        return about | {"outcomes": {}, "refused": {}, "failed": {}}

    def prepare(self) -> Checked:
        """Itself, after loading the data and building variant and method once, so that bad input is told early."""
        build(METHODS[self.recipe.inference], self.given)
        entry = at_hand(self.recipe.entry(), self.grounds.data)
        with isolated(0):
            entry.guide(entry.model(self.grounds.data.schema))
        return self

    def subject(self) -> Subject:
        """What a check is made of."""
        return Subject(self.recipe.variant, self.grounds.entry, self.recipe.inference, self.grounds.data, self.given)


def one_subject(args: Namespace) -> Checked:
    """What the command line names. Raises UserError for unknown names, or values of the wrong kind."""
    if args.variant not in ZOO:
        raise unknown("variant", args.variant, ZOO)
    images = getattr(ZOO[args.variant], "images_only", False)
    recipe = resolve(args, {"data": {"name": IMAGES if images else DATA}})
    return Checked(recipe, given_settings(args, METHODS[recipe.inference]), Grounds(recipe))


def bench_subjects(args: Namespace) -> list[Checked]:
    """Every variant with each of its methods, or with the one that is named.

    Raises UserError for an option that needs a variant.
    """
    alone = ("inference", "data", "seed", "budget", "only", "out", "resume", "quiet", "command", "cores")
    for name, value in vars(args).items():
        if name not in alone and value not in (None, [], False):
            raise UserError(f"--{name.replace('_', '-')} needs a variant: check VARIANT --{name.replace('_', '-')} …")
    plans: list[Checked] = []
    for variant, kind in ZOO.items():
        for method in methods_for(kind):
            if args.inference in (None, method):
                asked = {"variant": variant, "inference": method, "set": SMALL.get(variant, [])}
                plan = one_subject(Namespace(**{**vars(args), **asked}))
                same = (p.grounds for p in plans if {**p.key, "inference": 0} == {**plan.key, "inference": 0})
                plans.append(replace(plan, grounds=next(same, plan.grounds)))
    if not plans:
        raise unknown("inference method", args.inference, METHODS)
    return plans
