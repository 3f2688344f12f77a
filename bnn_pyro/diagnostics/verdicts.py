"""What a diagnosis is: numbers, sentences that need no statistician, and the arrays that figures are drawn from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["LEVELS", "Diagnosis", "Verdict"]

#: From good to bad.
LEVELS = ("good", "caution", "bad")


@dataclass(frozen=True)
class Verdict:
    """One sentence, or a few. level: a key of ``LEVELS``.   about: what it judges, in a word or two."""

    level: str
    about: str
    sentence: str


@dataclass(frozen=True)
class Diagnosis:
    """All that could be found out about one posterior.

    statistics  numbers by name, only those that apply: rhat_max, rhat_p (where that is above 1.01: how often the
                largest of as many would be as large by chance), rhat_share (of outputs below 1.01), ess_bulk_min,
                ess_tail_min, mcse_max (in posterior standard deviations of the output), nested (1 where R-hat is
                nested), points (inputs looked at), weight_rhat_max, weight_rhat_p, weight_ess_min, weights_shown,
                divergences, divergent_chains, stuck_chains, acceptance_mean, bfmi_min, max_tree_share (of trajectories
                that were cut at their longest), elpd_loo, elpd_loo_se, p_loo, loo_rows, pareto_k_max, pareto_k_bad
                (rows above 0.7), pit_p, ppc_p, khat, elbo_rise, draws, chains
    verdicts    the overall one first
    series      arrays for the figures, by name
    weights     rows of a bounded table: name, mean, sd, and for chains rhat, ess_bulk, ess_tail, mcse
    """

    statistics: Mapping[str, float]
    verdicts: tuple[Verdict, ...]
    series: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    weights: list[dict[str, Any]] = field(default_factory=list)

    @property
    def level(self) -> str:
        """That of the overall verdict."""
        return self.verdicts[0].level

    def to_dict(self) -> dict[str, Any]:
        """Without the series; JSON-able, a number that is not finite as None."""
        return {
            "statistics": {name: _plain(value) for name, value in self.statistics.items()},
            "verdicts": [vars(verdict).copy() for verdict in self.verdicts],
            "weights": [{k: _plain(v) for k, v in row.items()} for row in self.weights],
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Diagnosis:
        """The inverse of :meth:`to_dict`; the series are not there."""
        return cls(
            {name: _number(value) for name, value in plain["statistics"].items()},
            tuple(Verdict(**verdict) for verdict in plain["verdicts"]),
            weights=[{k: _number(v) for k, v in row.items()} for row in plain.get("weights", ())],
        )


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value
    value = value.item() if isinstance(value, np.generic) else value
    return value if math.isfinite(value) else None


def _number(value: Any) -> Any:
    return float("nan") if value is None else value
