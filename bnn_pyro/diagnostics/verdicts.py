"""What a diagnosis is, and its overall verdict: one sentence that needs no statistician, and what to try next.

The verdict rests on what the network computes. Where that is wrong, the sampler's own numbers name the cause.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bnn_pyro.diagnostics.importance import GOOD_K
from bnn_pyro.diagnostics.sampler import Cause, causes

__all__ = ["LEVELS", "RHAT", "Diagnosis", "Findings", "Verdict", "overall", "times"]

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
                that were cut at their longest), kinetic_temperature (of a sampler that rejects nothing: 1 where its
                step is small enough), spread_max (the largest predictive standard deviation of the points, in
                those of the targets; of log-odds, over the draws), elpd_loo, elpd_loo_se, p_loo, loo_rows,
                pareto_k_max, pareto_k_bad (rows above 0.7), pit_p, ppc_p, khat, elbo_rise, draws, chains
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


# -- the overall verdict ---------------------------------------------------------------------------------------------
#: R-hat: what is usually demanded, and what no longer passes for nearly converged. Effective draws likewise.
RHAT, RHAT_BAD = 1.01, 1.05
ESS, ESS_BAD = 400, 100
#: p-value from which on an R-hat above that is what the largest of so many comes to by chance.
CHANCE = 0.01
LONGER = "more draws and a longer warm-up (--set draws=…, --set warmup=…; of sghmc and sgld: epochs=…, burn_in=…)"


@dataclass
class Findings:
    """What the sentences are made of: ``Diagnosis.statistics``, and what is no number."""

    kind: str
    statistics: dict[str, float]
    tested: bool
    temperature: float
    stochastic: bool
    rows: int
    no_khat: str = ""
    constant: bool = False
    broken: int = 0
    spread: float = 0.0
    unit: str = "the targets' own spread"

    def get(self, name: str) -> float:
        """The number, NaN where it does not apply."""
        return self.statistics.get(name, math.nan)

    def has(self, name: str) -> bool:
        """Whether the number is there and finite."""
        return math.isfinite(self.get(name))

    def apart(self, prefix: str = "") -> bool:
        """Whether an R-hat is too large, and larger than chance makes the largest of as many."""
        return self.get(f"{prefix}rhat_max") > RHAT and not self.get(f"{prefix}rhat_p") >= CHANCE

    @property
    def causes(self) -> list[Cause]:
        """Why the sampler does not reach the posterior, by its own numbers."""
        return causes(self.statistics, self.stochastic, self.unit)

    @property
    def where(self) -> str:
        """ "200 test points"."""
        num = int(self.get("points"))
        return f"{num:,} {'test' if self.tested else 'training'} point{'s' if num != 1 else ''}"


def _broken(f: Findings) -> Verdict:
    total = f.get("chains") * f.get("draws")
    return Verdict(
        "bad",
        "overall",
        f"{times(f.broken, 'draw')} of {int(total):,} predict numbers that are not finite: the computation broke down "
        "and nothing here can be trusted. Try a smaller step size, standardised inputs or a narrower prior.",
    )


def _chains(f: Findings) -> Verdict:
    chains, draws = int(f.get("chains")), int(f.get("draws"))
    retry = "sample again with at least 4 chains of 250 draws (--set chains=4 --set draws=250)"
    known = f.causes
    if fatal := [cause for cause in known if cause.fatal]:
        clauses, remedies = ("; ".join(dict.fromkeys(c[i] for c in fatal)) for i in (1, 2))
        return Verdict(
            "bad",
            "overall",
            f"The sampler does not sample the posterior: {clauses}. More draws do not mend that, and nothing here can "
            f"be trusted. Try {remedies}.",
        )
    if f.constant and draws > 1:
        return Verdict("bad", "overall", "No draw changes any prediction: the chains did not move. " + _MOVE)
    if not f.has("ess_bulk_min"):
        return Verdict(
            "bad",
            "overall",
            f"{times(chains, 'chain')} of {times(draws, 'draw')} are too few to tell whether the sampler has "
            f"converged; {retry}.",
        )
    ess = f"{math.floor(f.get('ess_bulk_min')):,} effective draws of {chains * draws:,}"
    if not f.has("rhat_max"):
        return Verdict(
            "caution",
            "overall",
            f"One chain alone cannot show whether another would find the same predictions; within it there are at "
            f"least {ess} at {f.where}. To be sure, {retry}.",
        )
    rhat, low = f.get("rhat_max"), min(f.get("ess_bulk_min"), f.get("ess_tail_min"))
    name = "nested R-hat" if f.get("nested") == 1 else "R-hat"
    asked = f"it should be below {RHAT}"
    if rhat > RHAT and not f.apart():
        asked += f", but chance alone may bring the largest of so many there, p = {f.get('rhat_p'):.1g}"
    measured = f"at {f.where} {name} is at most {rhat:.3f} ({asked}), with at least {ess}"
    stuck = f.get("stuck_chains") if f.has("stuck_chains") else 0.0
    if rhat > RHAT_BAD or low < ESS_BAD or stuck > 0.05 * chains:
        disagree = rhat > RHAT_BAD and f.apart()
        because = " and ".join(
            reason
            for reason, holds in (
                *((cause.clause, True) for cause in known),
                (f"{times(int(stuck), 'chain')} got stuck", stuck > 0.05 * chains),
                ("the chains disagree about what the network predicts", disagree),
                ("there are too few effective draws", not disagree and (rhat > RHAT_BAD or low < ESS_BAD)),
            )
            if holds
        )
        return Verdict(
            "bad",
            "overall",
            f"Not converged: {because}; {measured}. Do not trust this run's uncertainty yet. Try "
            + "; ".join(cause.remedy for cause in known)
            + (f"; then {LONGER}" if known else LONGER)
            + ", a smaller network, a narrower prior, or start the chains from a fit.",
        )
    hampered = [cause for cause in known if cause.about == "divergences"]
    if f.apart() or low < ESS or stuck or hampered:
        more = f"{max(2, math.ceil(ESS / max(low, 1.0)))} times as many draws would make sure"
        if hampered:
            more = f"{hampered[0].clause}: try {hampered[0].remedy}"
        elif not (low < ESS or f.apart()):
            more = "what follows says what to look at"
        return Verdict(
            "caution",
            "overall",
            f"Nearly converged: {measured}. Mean predictions can be used, their far tails less so; {more}.",
        )
    return Verdict(
        "good",
        "overall",
        f"The chains agree about what the network predicts: {measured}. These draws can be used as the posterior.",
    )


def _approximation(f: Findings) -> Verdict:
    compare = "To see what it misses, fit the same variant with --inference nuts where that is affordable and compare"
    if f.has("khat"):
        k = f.get("khat")
        if k <= GOOD_K:
            return Verdict(
                "good",
                "overall",
                f"The approximation is close to the exact posterior: the Pareto k-hat of its importance weights is "
                f"{k:.2f} (below {GOOD_K} is good), so that what it predicts is what exact inference would.",
            )
        return Verdict(
            "caution",
            "overall",
            f"The approximation is not close to the exact posterior over the weights: the Pareto k-hat of its "
            f"importance weights is {k:.2f} (above {GOOD_K}). Its predictions may be good all the same, but their "
            f"uncertainty is the approximation's, often too small. {compare}.",
        )
    return Verdict(
        "caution",
        "overall",
        "This is an approximation of the posterior, and how close it is could not be measured"
        f"{': ' + f.no_khat if f.no_khat else ''}. Its draws are independent, so that there is no convergence of "
        f"chains to judge; calibration on test rows is what to look at. {compare}.",
    )


def _members(f: Findings) -> Verdict:
    return Verdict(
        "caution",
        "overall",
        f"{int(f.get('chains'))} networks, each trained on its own: where they disagree the data leave the answer "
        "open, but they are no draws of a posterior, so that there is nothing to converge to and no share of them is "
        "a probability. For draws of the posterior take --inference nuts or svi of a Bayesian variant.",
    )


def _point(f: Findings) -> Verdict:
    return Verdict(
        "caution",
        "overall",
        "One network, a point estimate: it knows of the noise in the data and nothing of how unsure its own weights "
        "are. For that take an ensemble, or a Bayesian variant (--inference svi or nuts).",
    )


_OVERALL: dict[str, Callable[[Findings], Verdict]] = {
    "chains": _chains,
    "approximation": _approximation,
    "members": _members,
    "point": _point,
}
_MOVE = "Try a smaller step size or another starting point, and look at the acceptance rate."


def overall(f: Findings) -> Verdict:
    """What to make of this posterior."""
    return _broken(f) if f.broken else _OVERALL[f.kind](f)


def times(num: int, what: str) -> str:
    """ "1 chain", "2 chains"."""
    return f"{num:,} {what}{'' if num == 1 else 's'}"
