"""Simulation-based calibration: over data sets from the prior, the truth is one more draw of the posterior.

    w* ~ p(w)    y ~ p(y | x, w*)    w_s ~ q(w | y), s = 1 … L          rank of f(w*, y) among f(w_s, y): uniform

Talts et al. 2018, arXiv:1804.06788; Modrák et al. 2023, arXiv:2211.02383. Every replication is what a user would run:
``fit`` with the variant, simulated data and the method. Of exact methods the ranks must be uniform. What approximations
are known for is told in amounts, and what cannot come of it is a fault: draws that lie to one side of the truth, draws
that know nothing of the data (see ``miscalibration``).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from bnn_pyro.checks.check import Outcome
from bnn_pyro.checks.miscalibration import judge
from bnn_pyro.checks.replicas import Plan, replications, why_not_together
from bnn_pyro.checks.simulation import Design, design, linear_part, why_not
from bnn_pyro.checks.subject import Subject
from bnn_pyro.errors import UserError
from bnn_pyro.fitting import at_hand, fit
from bnn_pyro.inference import METHODS, SVI
from bnn_pyro.inference.budget import LARGE
from bnn_pyro.inference.method import Report
from bnn_pyro.isolation import isolated
from bnn_pyro.settings import plain
from bnn_pyro.zoo import Entry

__all__ = ["Calibration"]

#: Settings of methods for one small data set, below those of the user: enough nearly independent draws, in a fraction
#: of a second where chains are compiled.
SETTINGS: dict[str, dict[str, Any]] = {
    "svi": {"epochs": 1500, "lr": 0.02},
    "hmc": {"chains": 2, "draws": 80, "warmup": 200, "thin": 2, "target_accept": 0.9, "cores": 1},
    "nuts": {"chains": 2, "draws": 80, "warmup": 200, "thin": 2, "target_accept": 0.9, "cores": 1},
    "chees": {"chains": 16, "superchains": 16, "draws": 20, "warmup": 200, "thin": 3},
    "sghmc": {"chains": 16, "epochs": 800, "burn_in": 300, "max_draws": 20},
    "sgld": {"chains": 16, "epochs": 1000, "burn_in": 300, "max_draws": 20},
}
#: How many times fewer replications: of linear models, whose whitened gradient is traced anew for every data set, and
#: of what takes a second each.
WHITENED, SLOW, FEWEST = 2, 4, 20
#: Those that are multiplied by the effort, of methods that come closer to the posterior with it.
LENGTHS = ("warmup", "thin", "epochs", "burn_in")


@dataclass(frozen=True)
class Calibration:
    """Settings of simulation-based calibration.

    replications  data sets, each drawn and fitted; of methods that take a second for each, a quarter of them
    rows          of each, at most: taken from the subject's training inputs
    points        inputs at which predictions are asked for, half of them rows of the data
    draws         of each fit, at most; fewer where they would depend on one another
    effort        length of chains, in those of the quick budget
    cores         processes; 0: as many as there are cores
    """

    replications: int = 500
    rows: int = 20
    points: int = 4
    draws: int = 159
    effort: float = 2.0
    cores: int = 0

    title: ClassVar[str] = "Simulation-based calibration"
    idea: ClassVar[str] = (
        "Weights drawn from the prior make data. Given these, the posterior's draws must look as the weights that made "
        "them do: ranks of the truth are uniform, and central 95 % intervals hold it 95 times in 100."
    )
    quick: ClassVar[Mapping[str, Any]] = {"replications": 80, "effort": 1.0}

    def __post_init__(self) -> None:
        for name, low in dict(replications=FEWEST, rows=1, points=1, draws=19, cores=0).items():
            if getattr(self, name) < low:
                raise UserError(f"{name} must be at least {low}, got {getattr(self, name)}")

    def refuses(self, subject: Subject) -> str:
        """See ``Check``."""
        if subject.limit == "points":
            return f"{subject.inference} gives points, and these have no spread that could be right or wrong"
        if subject.given.get("temperature", 1.0) != 1.0:
            return "at a temperature other than 1, the posterior is not that of the prior that the data come from"
        if _foundation(subject) is not None:  # the prior is that of the last layer, which comes after what it stands on
            return ""
        return why_not(subject.entry, self._design(subject, 0))

    def run(self, subject: Subject, *, seed: int = 0, report: Report | None = None) -> Outcome:
        """See ``Check``.

        ``evidence``: labels and kinds (Q,) of the quantities; ranks (Q, R), whole numbers 0 … draws; draws, which is L;
        p (Q, 3), of the tests of the ECDF, location and width, corrected for all of them; chi_square (Q,), as it is;
        levels (3,); coverage and coverage_error (Q, 3); width (Q,), of the draws as a share of what is right; ess
        (Q,), effective draws that 95 % of the replications exceed; shown, the chance that a uniform ECDF leaves the
        bands of the picture.

        ``figures``: calibration_p; coverage_50, coverage_80, coverage_95 and calibration_width of predictions.
        """
        start = time.perf_counter()
        entry, given = _entry(subject, seed), self._design(subject, seed)
        if reason := why_not(entry, given):
            raise UserError(reason)
        method = subject.method(self._below(subject, entry, given))
        plan = Plan(entry, given, method, seed, self.draws)
        found = replications(plan, self._number(plan), self.cores, report)
        judged = judge(subject.limit, plan, found)
        settings = {**subject.settings(method), "variant": plain(entry), "check": plain(self)}
        return replace(judged, settings=settings, seconds=time.perf_counter() - start)

    def _design(self, subject: Subject, seed: int) -> Design:
        return design(subject.data, self.rows, self.points, seed)

    def _number(self, plan: Plan) -> int:
        """How many replications, so that those of all methods take about as long."""
        method = plan.method
        if isinstance(method, SVI):
            share = SLOW if why_not_together(plan.entry, method, plan.given) else 1
        elif hasattr(method, "compiled"):
            share = 1 if linear_part(plan.entry, plan.given) is None else WHITENED
        else:
            share = SLOW if hasattr(method, "epochs") else 1
        return max(FEWEST, self.replications // share)

    def _below(self, subject: Subject, entry: Entry, given: Design) -> dict[str, Any]:
        """Settings of the method for one fit."""
        below = dict(SETTINGS.get(subject.inference, {}))
        if subject.limit.startswith("posterior"):
            below |= {name: round(below[name] * self.effort) for name in LENGTHS if name in below}
        if "compiled" in {field.name for field in dataclasses.fields(METHODS[subject.inference])}:
            with isolated(0):
                size = sum(value.numel() for value in entry.model(given.schema).initial.values())
            below["compiled"] = "yes" if size * len(given.x) <= LARGE else "no"
        return below


def _foundation(subject: Subject) -> str | None:
    """The name of the variant that has to be fitted first."""
    return subject.entry.foundation(subject.data.schema) if hasattr(subject.entry, "foundation") else None


def _entry(subject: Subject, seed: int) -> Entry:
    """The variant: a last layer on a network that the subject's own data trained, once for all replications."""
    entry = at_hand(subject.entry, subject.data)
    below = _foundation(subject)
    return entry if below is None else entry.on(fit(below, subject.data, seed=seed, device="cpu", progress=False))
