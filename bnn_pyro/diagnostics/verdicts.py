"""The result of a diagnosis, and its verdicts in sentences for readers who do not know the statistics of Markov chains.

The overall verdict depends on the network's outputs; if it is bad, statistics of the sampler identify the cause.
"""

import math
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bnn_pyro.diagnostics.convergence import MIN_CHAIN_DRAWS
from bnn_pyro.diagnostics.importance import GOOD_K
from bnn_pyro.errors import Introduced, counted

#: From good to bad.
LEVELS = ("good", "caution", "bad")
#: R-hat is good up to the first limit and bad above the second; effective sample sizes are bad below ESS_BAD.
RHAT, RHAT_BAD = 1.01, 1.05
ESS, ESS_BAD = 400, 100
#: Above this R-hat, longer chains did not converge in experiments (docs/which-method.md, the chains).
FAR_APART = 1.3
#: Level of p-values: of an R-hat above RHAT, which chance can explain from this p-value on, and of checks.
CHANCE = 0.01
#: Largest shares of stuck chains, of divergent transitions (RARE: in the overall verdict), and of cut trajectories.
STUCK, DIVERGENT, CUT, RARE = 0.05, 0.01, 0.05, 0.002
#: BFMI below which energies mix badly; mean acceptance below which the step size did not settle.
BFMI, ACCEPTED = 0.3, 0.4
#: Kinetic temperature above which the draws are not those of a posterior; mini-batches and short runs have up to 1.7.
HOT = 1.8
#: Predictive spread above which a sampler has run away, in standard deviations of the targets or nats of log-odds.
RUNAWAY = 1e4
#: Causes that make the draws useless.
FATAL = ("spread", "kinetic temperature")


@dataclass(frozen=True)
class Verdict(Introduced):
    """One or a few sentences.   level: one of ``LEVELS``.   about: what is judged, in a word or two."""

    level: str
    about: str
    sentence: str

    def __repr__(self) -> str:
        return f"<{self.level}: {self.about}: {self.sentence}>"


@dataclass(frozen=True)
class Diagnosis(Introduced):
    """The results of a diagnosis.

    statistics  numbers by name, as far as they apply: rhat_max, rhat_p (if rhat_max is above 1.01: the probability that
                the largest of as many would be as large by chance), rhat_share (of outputs below 1.01), ess_bulk_min,
                ess_tail_min, mcse_max (in posterior standard deviations of the output), nested (1 if R-hat is nested),
                points (number of inputs), weight_rhat_max, weight_rhat_p, weight_ess_min, weights_shown,
                divergences (number of draws with one), thin (transitions per draw, if more than one), divergent_chains,
                stuck_chains, acceptance_mean, bfmi_min, max_tree_share (of trajectories cut at their maximal length),
                kinetic_temperature (of a sampler without rejections: 1 if its step is small enough),
                spread_max (largest predictive standard deviation of a point, in standard deviations of the targets; for
                log-odds, over the draws), elpd_loo, elpd_loo_se, p_loo, loo_rows, pareto_k_max, pareto_k_bad (rows
                above 0.7), pit_p, ppc_p, khat, elbo_rise, elbo_rise_halfway, draws, chains
    verdicts    the overall verdict, then the others
    series      arrays for the figures, by name
    weights     rows of a table of some weights: name, mean, sd, and for chains rhat, ess_bulk, ess_tail, mcse
    """

    statistics: Mapping[str, float]
    verdicts: tuple[Verdict, ...]
    series: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    weights: list[dict[str, Any]] = field(default_factory=list)

    def __repr__(self) -> str:
        ways = "next: diagnosis.statistics; diagnosis.weights; bp.diagnostics.to_arviz(posterior, data)"
        return "\n".join([*map(repr, self.verdicts), ways])

    #: The level of the overall verdict.
    level = property(lambda self: self.verdicts[0].level)

    def to_dict(self) -> dict[str, Any]:
        """All but the series, JSON-able, with None for numbers that are not finite."""
        verdicts, weights = [vars(verdict).copy() for verdict in self.verdicts], [jsonable(row) for row in self.weights]
        return {"statistics": jsonable(self.statistics), "verdicts": verdicts, "weights": weights}


def jsonable(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with Python numbers in place of numpy's, and None for those that are not finite."""
    values = {name: value.item() if isinstance(value, np.generic) else value for name, value in row.items()}
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


#: {"about, variant": sentence}.
SENTENCES = tomllib.loads((Path(__file__).parent / "sentences.toml").read_text(encoding="utf-8"))


@dataclass
class Findings:
    """What the verdicts are derived from."""

    kind: str  # a key of ``draws.KINDS``
    statistics: dict[str, float]  # those of ``Diagnosis``
    tested: bool  # whether there are test rows
    temperature: float
    stochastic: bool  # whether the sampler follows noisy gradients and rejects nothing
    rows: int  # number of training rows
    no_khat: str = ""  # why there is no k̂
    constant: bool = False  # whether no draw changes any output
    broken: int = 0  # number of draws with outputs that are not finite
    spread: float = 0.0  # mean |PIT − ½| − ¼ of leave-one-out: above 0, predictions are too narrow
    unit: str = "the targets' own spread"  # of ``spread_max``
    failed: str = ""  # see ``failures``

    def get(self, name: str) -> float:
        """The statistic, NaN if it does not apply."""
        return self.statistics.get(name, math.nan)

    def has(self, name: str) -> bool:
        """Whether the statistic applies and is finite."""
        return math.isfinite(self.get(name))

    def apart(self, prefix: str = "") -> bool:
        """Whether the largest R-hat is above its limit and chance does not explain it."""
        return self.get(f"{prefix}rhat_max") > RHAT and not self.get(f"{prefix}rhat_p") >= CHANCE

    #: Draws of all chains.
    total = property(lambda self: self.get("chains") * self.get("draws"))

    def fill(self, name: str, **values: Any) -> str:
        """A sentence of ``SENTENCES``, filled with the statistics, the fields and the given words."""
        numbers = {"GOOD_K": GOOD_K, "BFMI": BFMI, "total": self.total, **vars(self), **self.statistics, **values}
        return SENTENCES[name].format_map(defaultdict(lambda: math.nan, {**SENTENCES, **numbers}))

    def verdict(self, level: str, name: str, **values: Any) -> Verdict:
        """The filled sentence as a verdict."""
        return Verdict(level, name.partition(",")[0], self.fill(name, **values))

    #: Share of divergent transitions. The p of draws of ``thin`` transitions with a divergence is 1 − (1 − share)^thin.
    diverged = property(lambda f: 1 - (1 - f.get("divergences") / f.total) ** (1 / f.statistics.get("thin", 1)))

    @property
    def causes(self) -> dict[str, tuple[str, str]]:
        """{about: (clause, remedy)}: why the sampler does not reach the posterior, the most serious cause first."""
        kinetic = self.get("kinetic_temperature")
        signs = {
            "spread": self.get("spread_max") > RUNAWAY,
            "kinetic temperature": kinetic < 1 / HOT or kinetic > HOT,
            "divergences": self.diverged > RARE and self.has("acceptance_mean"),  # others undo such steps
            "trajectories": self.get("max_tree_share") > CUT,
            "acceptance": self.get("acceptance_mean") < ACCEPTED,
        }
        remedies = {about: about for about in signs} | ({"spread": "kinetic temperature"} if self.stochastic else {})
        return {
            about: (self.fill(f"{about}, clause", share=self.diverged), self.fill(f"{remedies[about]}, remedy"))
            for about, holds in signs.items()
            if holds
        }


def verdicts(f: Findings) -> tuple[Verdict, ...]:
    """The overall verdict, then those on details."""
    return (_overall(f), *_details(f))


def _overall(f: Findings) -> Verdict:
    if f.broken:
        return f.verdict("bad", "overall, broken", broken=counted(f.broken, "draw"))
    if f.failed:
        return Verdict("bad", "overall", f"The fit failed: {f.failed}")
    if f.kind == "chains":
        return _chains(f)
    if f.kind in ("members", "point"):
        return f.verdict("caution", f"overall, {f.kind}")
    if not f.has("khat"):
        return f.verdict("caution", "overall, unmeasured", why=f.no_khat and f": {f.no_khat}")
    close = f.get("khat") <= GOOD_K
    return f.verdict("good" if close else "caution", f"overall, {'close' if close else 'far'}")


def _chains(f: Findings) -> Verdict:
    chains, draws, causes = int(f.get("chains")), int(f.get("draws")), f.causes
    if fatal := [causes[about] for about in FATAL if about in causes]:
        clauses, remedies = ("; ".join(dict.fromkeys(texts)) for texts in zip(*fatal, strict=True))
        return f.verdict("bad", "overall, fatal", clauses=clauses, remedies=remedies)
    unknown = chains > 1 and not f.has("rhat_max")  # too few draws, or every chain is constant
    if (draws > 1 and f.constant) or (unknown and draws >= MIN_CHAIN_DRAWS):
        return f.verdict("bad", "overall, frozen")
    if unknown or not f.has("ess_bulk_min"):
        sizes = {"chains_of": counted(chains, "chain"), "draws_of": counted(draws, "draw")}
        return f.verdict("bad", "overall, short", **sizes)
    low = min(f.get("ess_bulk_min"), f.get("ess_tail_min"))
    ess = f"{math.floor(low):,} effective draws of {chains * draws:,} in {counted(chains, 'chain')}"
    where = counted(int(f.get("points")), f"{'test' if f.tested else 'training'} point")
    if not f.has("rhat_max"):
        return f.verdict("caution", "overall, single", ess=ess, where=where)
    rhat, demand = f.get("rhat_max"), f"it should be below {RHAT}"
    if rhat > RHAT and not f.apart():
        demand = f"chance alone makes the largest of so many as large, p = {f.get('rhat_p'):.1g}; {RHAT} is the limit"
    name = "nested R-hat" if f.get("nested") == 1 else "R-hat"
    measured = f"at {where} {name} is at most {rhat:.3f} ({demand}), with at least {ess}"
    stuck = f.get("stuck_chains") if f.has("stuck_chains") else 0.0
    few = rhat > RHAT_BAD or low < ESS_BAD
    if few or stuck > STUCK * chains:
        reasons = [clause for clause, _ in causes.values()]
        if stuck > STUCK * chains:
            reasons.append(f"{counted(int(stuck), 'chain')} got stuck")
        if few:
            reasons.append(SENTENCES["disagree" if rhat > RHAT_BAD and f.apart() else "few draws"])
        remedies = "; ".join(remedy for _, remedy in causes.values()) + "; then " * bool(causes)
        remedies += SENTENCES["longer, noisy" if f.stochastic else "longer"]
        of_mile = f.has("divergences") and not (causes or f.stochastic or f.has("acceptance_mean"))
        name = "overall, modes" if of_mile and rhat > FAR_APART else "overall, bad"
        return f.verdict("bad", name, because=" and ".join(reasons), measured=measured, remedies=remedies)
    hampered = causes.get("divergences")
    if not (f.apart() or low < ESS or stuck or hampered):
        return f.verdict("good", "overall, good", measured=measured)
    why = {f"{name} is too large": f.apart(), f"there are fewer than {ESS} effective draws": low < ESS,
           "chains got stuck": stuck, "transitions diverged": hampered}  # fmt: skip
    why = " and ".join(reason for reason, holds in why.items() if holds)
    if hampered:
        more = "{}: try {}".format(*hampered)
    elif low < ESS or f.apart():
        more = f"{max(2, math.ceil(ESS / max(low, 1.0)))} times as many draws would make sure"
    else:
        more = "what follows says what to look at"
    return f.verdict("caution", "overall, nearly", why=why, measured=measured, more=more)


def _details(f: Findings) -> Iterator[Verdict]:
    if f.temperature != 1:
        yield f.verdict("caution", "temperature", how="more" if f.temperature < 1 else "less")
    if f.stochastic:
        yield f.verdict("caution", "step size")
    if not f.tested:
        yield f.verdict("caution", "test rows")
    if (stuck := f.get("stuck_chains")) > 0:
        level = "bad" if stuck > STUCK * f.get("chains") else "caution"
        yield f.verdict(level, "stuck chains", stuck=counted(int(stuck), "chain"))
    if f.get("divergences") > 0:
        name, level = "divergences", "bad" if f.diverged > DIVERGENT else "caution"
        if not f.has("acceptance_mean"):
            name, level = "divergences, taken back", "caution"
        of = f"draws had among their {f.get('thin'):,.0f} transitions one that" if f.has("thin") else "transitions"
        yield f.verdict(level, name, of=of, chains_of=counted(int(f.get("divergent_chains")), "chain"))
    elif f.has("divergences"):
        yield f.verdict("good", "divergences, none")
    if f.get("bfmi_min") < BFMI:
        yield f.verdict("caution", "energy")
    for about, (clause, remedy) in f.causes.items():
        if about != "divergences":
            sentence = f"{clause[0].upper()}{clause[1:]}. Try {remedy}."
            yield Verdict("bad" if about in FATAL else "caution", about, sentence)
    if f.has("weight_rhat_max") and f.has("rhat_max"):
        name = "agree" if not f.apart("weight_") else "disagree" if f.apart() else "exchanged"
        yield f.verdict("caution" if name == "disagree" else "good", f"weights, {name}")
    if f.has("elbo_rise"):
        rising = "training, stopped" if f.has("stopping_rows") else "training, rising"
        other = f.get("elbo_rise") > 0 or f.get("sd_factor") < 1
        unfinished = not f.has("stopping_rows") and f.get("elbo_rise_halfway") > math.sqrt(f.rows) >= f.get("elbo_rise")
        about = "training, unfinished" if unfinished else rising if other else "training"
        narrowed = f", {f.get('sd_factor'):.2g} times as wide as it was trained" if f.get("sd_factor") < 1 else ""
        near = "" if f.has("stopping_rows") else ", where the learning rate is near 0"
        yield f.verdict("good" if about == "training" else "caution", about, narrowed=narrowed, near=near)
    if f.has("elpd_loo"):
        bad, rows = int(f.get("pareto_k_bad")), int(f.get("loo_rows"))
        level = "good" if not bad else "caution" if bad <= 0.1 * rows else "bad"
        but = f.fill(f"leave-one-out, {'bad' if bad else 'fine'}", bad=counted(bad, "row"), s="s" * (bad == 1))
        some = f"{rows:,}" if rows == f.rows else f"{rows:,} evenly chosen of {f.rows:,}"
        yield f.verdict(level, "leave-one-out", some=some, elpd=f"{f.get('elpd_loo'):,.1f}".replace("-", "−"), but=but)
        if f.get("pit_p") < CHANCE:
            error = "too certain" if f.spread > 0.01 else "too unsure" if f.spread < -0.01 else "shifted to one side"
            yield f.verdict("caution", "calibration, wrong", how=error)
        elif f.has("pit_p"):
            yield f.verdict("good", "calibration")
    elif f.kind == "approximation" and f.has("khat"):
        yield f.verdict("caution", "leave-one-out, none")
    if (p := f.get("ppc_p")) < CHANCE or p > 1 - CHANCE:
        yield f.verdict("caution", f"predictive check, {'worse' if p < CHANCE else 'better'}")
    elif f.has("ppc_p"):
        yield f.verdict("good", "predictive check")
