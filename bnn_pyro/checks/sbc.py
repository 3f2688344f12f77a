"""Simulation-based calibration: over data sets from the prior, the truth is one more draw of the posterior.

    w* ~ p(w)    y ~ p(y | x, w*)    w_s ~ q(w | y), s = 1 … L          rank of f(w*, y) among f(w_s, y): uniform

Talts et al. 2018, arXiv:1804.06788; Modrák et al. 2023, arXiv:2211.02383. Every replication is what a user would run:
``fit`` with the variant, simulated data and the method. Three tests of every quantity (``sbc_ranks``) are corrected for
all of them together. Of a method that converges to the posterior all must hold. The spread of an approximation is
reported; it must not lie to one side of predictions, or be no likelier than the prior.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
from scipy.stats import ttest_1samp, wilcoxon

from bnn_pyro.checks.check import ALPHA, Check, Finding, Outcome, Subject
from bnn_pyro.checks.sbc_ranks import LEVELS, covered, normal_scores, p_location, p_uniform, p_width, ranks, seen, width
from bnn_pyro.checks.simulation import Replication, Simulator, design, replicate
from bnn_pyro.errors import UserError
from bnn_pyro.inference import CONVERGES_TO
from bnn_pyro.inference.cost import LARGE
from bnn_pyro.isolation import isolated
from bnn_pyro.parallel.map import map_tasks
from bnn_pyro.progress import Report
from bnn_pyro.settings import Settings, setting
from bnn_pyro.zoo.auto import Setup

#: A fit to one small data set: draws and epochs as shares of a method's tiny settings; transitions of a warm-up.
DRAWS, EPOCHS, WARMUP = 0.1, 4.0, 200
#: How many times fewer replications of what takes a second each; and the fewest.
SLOW, FEWEST = 4, 20
#: Fewer draws that are worth an independent one tell nothing; so many replications may have fewer.
MIN_DRAWS, SHARE = 19, 0.05
#: Draws that are ranked among, as a share of what they are worth: estimates of the latter scatter about it.
NEARLY = 1.25
#: Share of the fits that may fail and alter no verdict: ranks that are not there move an ECDF by no more.
FEW = 0.01
#: Quantities that are named where they are off.
NAMED = 4


@dataclass(frozen=True)
class Calibration(Check, Settings):
    """Weights drawn from the prior make data. Given these, the posterior's draws must look as the weights that made
    them do: ranks of the truth are uniform, and central 95 % intervals hold it 95 times in 100.

    replications  data sets, each drawn and fitted; of methods that take a second for each, a quarter of them
    rows          of each, at most: taken from the subject's training inputs
    points        inputs at which predictions are compared, the first half of them rows of the data
    draws         of each fit, at most; fewer where they would depend on one another
    effort        length of chains, in those of the quick budget
    cores         processes; 0: as many as there are cores

    ``Outcome.figures``: calibration_p; coverage_50, coverage_80, coverage_95 and calibration_width of predictions.
    """

    replications: int = setting(500, low=FEWEST)
    rows: int = setting(20, low=1)
    points: int = setting(4, low=1)
    draws: int = setting(159, low=MIN_DRAWS)
    effort: float = setting(2.0, above=0)
    cores: int = setting(0, low=0)

    title: ClassVar[str] = "Simulation-based calibration"
    quick: ClassVar[Mapping[str, Any]] = {"replications": 80, "effort": 1.0}

    def _refuses(self, subject: Subject) -> str:
        if subject.converges_to == "point":
            return f"{subject.inference} gives points, and these have no spread that could be right or wrong"
        if subject.temperature != 1.0:
            return "at a temperature other than 1, the posterior is not that of the prior that the data come from"
        if Setup(subject.entry, subject.method({})).backbone_variant(subject.data.schema) is not None:
            return "its backbone has to be trained first: data are simulated from the prior of the last layer"
        with isolated(0):
            Simulator(subject.entry, design(subject.data, self.rows, self.points, 0))  # or says why it cannot
        return ""

    def _run(self, subject: Subject, seed: int, report: Report) -> Outcome:
        entry, inputs = subject.entry, design(subject.data, self.rows, self.points, seed)
        with isolated(0):
            size = Simulator(entry, inputs).potential.size  # raises where no data can be simulated
        compiled = "yes" if size * len(inputs.x_train) <= LARGE else "no"  # one compiled gradient serves all fits
        draws = DRAWS * self.effort if subject.exact else DRAWS
        method = subject.tiny_method(draws, EPOCHS, warmup=WARMUP, compiled=compiled)
        number = max(FEWEST, self.replications // (1 if hasattr(method, "compiled") else SLOW))
        one = partial(replicate, entry, inputs, method, seed, self.draws)
        results = map_tasks(one, range(number), cores=self.cores, report=report)
        judged = judge_ranks(subject.converges_to, results, self.draws, seed)
        return replace(judged, settings=subject.settings(method, entry))


def judge_ranks(converges_to: str, results: Sequence[Replication | UserError], draws: int, seed: int) -> Outcome:
    """The outcome, without settings.   draws: of each posterior, at most."""
    done = [r for r in results if isinstance(r, Replication)]
    failed = [r for r in results if isinstance(r, UserError)]
    if len(done) < MIN_DRAWS:
        sentence = f"{len(failed)} of {len(results)} fits to simulated data failed: {failed[0]}"
        return Outcome("calibration", "bad", sentence)
    enough, usual = (float(np.quantile([r.ess for r in done], share, 0).min()) for share in (SHARE, 0.5))
    # Ranks are among the largest of 19, 39, 59, … draws that are nearly independent: of L draws worth E, the variance
    # of a rank in units of L is 1/12 + 1/(6E) instead of 1/12 + 1/(6L).
    most = min(draws, *(r.draws.shape[1] for r in done), NEARLY * usual)  # a chain may be lost
    few, num = enough < MIN_DRAWS, max(MIN_DRAWS, 20 * int((most + 1) // 20) - 1)
    lots, places = np.random.default_rng([seed, 1]), np.linspace(0, 1, num)
    chosen = [r.draws[:, (places * (r.draws.shape[1] - 1)).round().astype(int)] for r in done]
    order = np.stack([ranks(r.truth, some, lots) for r, some in zip(done, chosen, strict=True)], 1)  # (Q, R)
    p = np.array([[test(q, num) for test in (p_uniform, p_location, p_width)] for q in order])
    p = np.minimum(1.0, p.size * p)
    labels, kinds = map(list, zip(*done[0].questions, strict=True))
    inside = np.stack([covered(order, num, level) for level in LEVELS], -1)  # (Q, R, 3)
    evidence = {"labels": labels, "kinds": kinds, "ranks": order, "draws": num, "p": p}
    evidence |= {"width": width(order, num), "shown": ALPHA / p.size}
    exact, predictions = converges_to == "exact", [kind == "prediction" for kind in kinds]
    cover, faults = inside[predictions].mean((0, 1)), [] if exact else _faults(done, order, num)
    off = bool(p.min() < ALPHA)
    level = "caution" if few else "bad" if faults or (off and exact) else "caution" if off else "good"
    sentence = _sentence(level, "" if exact else converges_to, enough if few else None, evidence, faults, cover)
    if failed:
        level = "caution" if level == "good" and len(failed) > FEW * len(results) else level
        sentence += f" {len(failed)} of {len(results)} fits failed, and do not count: {failed[0]}"
    if warned := [r for r in done if r.warned]:
        sentence += f" {len(warned)} of {len(done)} fits warned: {warned[0].warned[0]}"
    findings, wrong = [], "bad" if exact and not few else "caution"
    for label, wide, least in zip(labels, evidence["width"], p.min(1), strict=True):
        about, error = f"{label}: width of the draws, as a share of what is right", float(wide / np.sqrt(2 * len(done)))
        findings.append(Finding(about, float(wide), 1.0, error, float(least), wrong if least < ALPHA else "good"))
    figures = {f"coverage_{100 * share:.0f}": float(c) for share, c in zip(LEVELS, cover, strict=True)}
    figures |= {"calibration_p": float(p.min()), "calibration_width": float(np.median(evidence["width"][predictions]))}
    return Outcome("calibration", level, sentence, {}, [*findings, *faults], evidence, figures)


def _faults(done: Sequence[Replication], order: np.ndarray, num: int) -> list[Finding]:
    """What no approximation is known for."""
    sided, faults = [i for i, (_, kind) in enumerate(done[0].questions) if kind in ("prediction", "weight")], []
    for i in sided:  # their spread may be wrong: by its own standard error
        z = normal_scores(order[i], num)
        p = min(1.0, len(sided) * float(ttest_1samp(z, 0.0).pvalue))
        if p < ALPHA:
            about = f"{done[0].questions[i][0]}: normal score of the truth among the draws, on average"
            faults.append(Finding(about, float(z.mean()), 0.0, float(z.std() / np.sqrt(len(z))), p, "bad"))
    learned = np.array([r.learned for r in done])
    p = float(wilcoxon(learned, alternative="greater").pvalue) if learned.any() else 1.0
    if p > ALPHA:
        about = "log-likelihood of the data under the draws less that under the prior's, median, in nats"
        faults.append(Finding(about, float(np.median(learned)), None, None, p, "bad"))
    return faults


def _sentence(
    level: str, known: str, few: float | None, evidence: Mapping[str, Any], faults: Sequence[Finding], cover: np.ndarray
) -> str:
    """known: a key of ``CONVERGES_TO``, or empty where ranks must be uniform.   few: effective draws, where too few."""
    shares = f"{', '.join(f'{100 * c:.0f}' for c in cover[:-1])} and {100 * cover[-1]:.0f} %"
    intervals = f"Central 50, 80 and 95 % intervals of predictions hold {shares} of the truths."
    if few is not None:
        words = f"Too few effective draws to tell: in {100 * SHARE:.0f} of 100 data sets the chains have fewer than "
        return f"{words}{max(1.0, few):.0f} of some quantity, and {MIN_DRAWS} are needed; give more draws. {intervals}"
    if level == "good":
        total, p = evidence["ranks"].shape[1], evidence["p"]
        narrow, wide = seen(total, evidence["draws"], ALPHA / p.size)
        words = f"In {total} simulated data sets the weights that made the data could not be told from the posterior's "
        words += f"draws (smallest corrected p-value {p.min():.2g}). {intervals} Draws of less than "
        return f"{words}{narrow:.0%} or more than {wide:.0%} of the right width would have been noticed."
    if not known:
        return f"The draws are not those of the posterior. {_off(evidence)} {intervals}"
    wrong = ""
    for fault in faults:
        what = f"{fault.about.partition(':')[0]} lies to one side of the truth (p = {fault.p:.1g})"
        what = "draws are no likelier than those of the prior" if fault.expected is None else what
        wrong += f" That {what} cannot come of it: look for an error."
    return f"{intervals} It converges to {CONVERGES_TO[known]}. {_off(evidence)}{wrong}"


def _off(evidence: Mapping[str, Any]) -> str:
    """The quantities that are off, the surest first."""
    p, words = evidence["p"], []
    for q in p.min(1).argsort():
        wide, side = evidence["width"][q], normal_scores(evidence["ranks"][q], evidence["draws"]).mean()
        what = f"draws too {'narrow' if wide < 1 else 'wide'}, {wide:.0%} of the right width"
        if p[q, 1] < p[q, 2]:
            what = f"the truth lies too often {'above' if side > 0 else 'below'} the draws"
        what = what if p[q, 1:].min() < ALPHA else "ranks are not uniform"
        if p[q].min() < ALPHA:
            words.append(f"{evidence['labels'][q]}: {what}")
    return "; ".join(words[:NAMED]) + (f"; and {len(words) - NAMED} more." if len(words) > NAMED else ".")
