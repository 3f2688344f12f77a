"""Every fit that a sweep consists of, resolved to recipes, and what can be told of them before one is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bnn_pyro.errors import UserError
from bnn_pyro.runs.train import prepared
from bnn_pyro.progress import progress_bar
from bnn_pyro.runs.recipe import Recipe, resolve_config
from bnn_pyro.runs.sweep_spec import Candidate, Material, Spec, slug

__all__ = ["STRIDE", "Fit", "check_fits", "plan_fits"]

#: A fit's own seed is that of the SPEC + STRIDE · split. Fits of one seed would begin with the same weights on every
#: split, and what these do to the result (on a small set as much as the split) would be in no error over splits.
STRIDE = 1000


@dataclass(frozen=True)
class Fit:
    """One fit of a sweep.

    candidate, data  names in the SPEC
    seed             that of the SPEC; the recipe's own, of initial weights, order of rows and noise, follows from it
    split            the number of a given split, or the seed of a random one
    grid             the settings that the grid gives its recipe
    """

    candidate: str
    data: str
    seed: int
    split: int
    recipe: Recipe
    grid: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{slug(self.candidate)}-{slug(self.data)}-seed{self.seed}-split{self.split}"

    @property
    def unit(self) -> tuple[int, int]:
        """(split, seed): fits of several recipes with the same one are a pair."""
        return self.split, self.seed

    def __repr__(self) -> str:
        return self.name


def plan_fits(spec: Spec) -> list[Fit]:
    """Every combination, such that a sweep that is stopped early has all recipes on the first splits.

    Tuned settings go before those of the variant, those of the SPEC before tuned ones, as for `train`.

    Raises UserError for settings that variant or method refuse, and where two fits would share a folder.
    """
    rounds = [(seed, k) for seed in spec.seeds for k in range(max(len(material.splits) for material in spec.data))]
    fits = [
        Fit(
            candidate.name,
            material.name,
            seed,
            material.splits[k],
            _resolved(spec, candidate, material, seed, k),
            candidate.grid,
        )
        for seed, k in rounds
        for material in spec.data
        if k < len(material.splits)
        for candidate in spec.recipes
    ]
    seen: dict[str, Fit] = {}
    for fit in fits:
        other = seen.setdefault(fit.name.lower(), fit)
        if other is not fit:
            raise UserError(
                f"{spec.path}: '{other.candidate}' on '{other.data}' and '{fit.candidate}' on '{fit.data}' would share "
                f"the folder {fit.name}; rename one of them"
            )
    return fits


def _resolved(spec: Spec, candidate: Candidate, material: Material, seed: int, k: int) -> Recipe:
    split = material.splits[k]
    own_seed = (seed + STRIDE * split) % 2**32
    config = {**candidate.config, "data": material.config_of(split), "seed": own_seed}
    try:
        return resolve_config(config)
    except UserError as error:
        raise UserError(f"{spec.path} [recipes.{candidate.table}] ({candidate.name}): {error}") from None


def check_fits(spec: Spec, fits: Sequence[Fit], *, show: bool = True) -> dict[tuple[str, int], str]:
    """Load each data set once, and build on it every recipe that has a fit to be made there.

    Returns {(data set, split): fingerprint of its training rows} of the splits that were loaded, one a data set.

    Raises UserError where data cannot be loaded, or a recipe does not suit them.
    """
    first = {fit.data: fit for fit in reversed(fits)}
    found = {}
    tables = {candidate.name: candidate.table for candidate in spec.recipes}
    with progress_bar("check data and recipes", show, unit="data set") as report:
        for done, material in enumerate((m for m in spec.data if m.name in first), 1):
            one = first[material.name]
            try:
                data = one.recipe.load()
                if not len(data.x_train):
                    raise UserError("it has no training rows")
            except UserError as error:
                raise UserError(f"{spec.path} [data.{material.name}]: {error}") from None
            found[one.data, one.split] = data.fingerprint
            recipes = {fit.candidate: fit.recipe for fit in reversed(fits) if fit.data == material.name}
            for name, recipe in recipes.items():
                try:
                    prepared(recipe, data)
                except UserError as error:
                    raise UserError(
                        f"{spec.path} [recipes.{tables[name]}] ({name}) on data '{material.name}': {error}"
                    ) from None
            report(done, len(first))
    return found
