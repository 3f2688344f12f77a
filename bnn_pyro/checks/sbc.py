"""Simulation-based calibration: over data sets from the prior, the truth is distributed like a posterior draw.

    w* ~ p(w)    y ~ p(y | x, w*)    w_s ~ q(w | y), s = 1 … L          rank of f(w*, y) among f(w_s, y): uniform

Talts et al. 2018, arXiv:1804.06788; Modrák et al. 2023, arXiv:2211.02383. Every replication calls ``fit``, as a user
would, with the variant, simulated data and the method. Three tests of every quantity (``sbc_ranks``) are corrected for
the number of all tests. A method that converges to the posterior must pass all tests. For an approximation the width is
reported; its predictions must not be biased, and its draws must have a higher likelihood than the prior's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
from scipy.stats import ttest_1samp, wilcoxon

from bnn_pyro.checks.check import ALPHA, Check, Finding, Outcome, Subject, concluded
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

#: Settings of a fit: factors of the draws and epochs in the method's tiny settings; transitions of the warm-up.
DRAWS, EPOCHS, WARMUP = 0.1, 4.0, 200
#: Divisor of the number of replications for slow methods, and the smallest number of replications.
SLOW, MIN_REPLICATIONS = 4, 20
#: Smallest effective sample size of a replication, and the share of replications that may have a smaller one.
MIN_DRAWS, SHARE = 19, 0.05
#: Largest ratio of the number of draws that are ranked to their effective sample size, whose estimate is noisy.
NEARLY = 1.25
#: Share of fits that may fail without a caution, as missing ranks change an ECDF by at most this.
FEW = 0.01


@dataclass(frozen=True)
class Calibration(Check, Settings):
    """Data are simulated with weights from the prior. Given the data, posterior draws must be distributed like these
    weights: ranks of the truth are uniform, and central 95 % intervals contain it in 95 of 100 data sets.

    replications  number of data sets; a quarter of them for methods that take a second for each fit
    rows          largest number of rows of a data set, taken from the subject's training inputs
    points        number of inputs at which predictions are compared, the first half of them training rows
    draws         largest number of draws of each fit; fewer if they would be correlated
    effort        length of chains relative to the quick budget
    cores         number of processes; 0: the number of cores

    ``Outcome.figures``: calibration_p; coverage_50, coverage_80, coverage_95 and calibration_width of predictions.
    """

    replications: int = setting(500, low=MIN_REPLICATIONS)
    rows: int = setting(20, low=1)
    points: int = setting(4, low=1)
    draws: int = setting(159, low=MIN_DRAWS)
    effort: float = setting(2.0, above=0)
    cores: int = setting(0, low=0)

    title: ClassVar[str] = "Simulation-based calibration"
    quick: ClassVar[Mapping[str, Any]] = {"replications": 80, "effort": 1.0}

    def _refuses(self, subject: Subject) -> str:
        if subject.converges_to == "point":
            return f"{subject.inference} returns points, which have no spread to be checked"
        if subject.temperature != 1.0:
            return "at a temperature other than 1, the posterior is not that of the prior which simulates the data"
        if Setup(subject.entry, subject.method({})).backbone_variant(subject.data.schema) is not None:
            return "its backbone has to be trained first: data are simulated from the prior of the last layer"
        with isolated(0):
            Simulator(subject.entry, design(subject.data, self.rows, self.points, 0))  # raises an error with the reason
        return ""

    def _run(self, subject: Subject, seed: int, report: Report) -> Outcome:
        entry, inputs = subject.entry, design(subject.data, self.rows, self.points, seed)
        with isolated(0):
            size = Simulator(entry, inputs).potential.size  # raises if no data can be simulated
        compiled = "yes" if size * len(inputs.x_train) <= LARGE else "no"  # one compiled gradient serves all fits
        draws = DRAWS * self.effort if subject.exact else DRAWS
        method = subject.tiny_method(draws, EPOCHS, warmup=WARMUP, compiled=compiled)
        number = max(MIN_REPLICATIONS, self.replications // (1 if hasattr(method, "compiled") else SLOW))
        one = partial(replicate, entry, inputs, method, seed, self.draws)
        results = map_tasks(one, range(number), cores=self.cores, report=report)
        judged = judge_ranks(subject.converges_to, results, self.draws, seed)
        return replace(judged, settings=subject.settings(method, entry))


def judge_ranks(converges_to: str, results: Sequence[Replication | UserError], draws: int, seed: int) -> Outcome:
    """The outcome, without settings.   draws: largest number of draws of each posterior."""
    done = [r for r in results if isinstance(r, Replication)]
    failed = [r for r in results if isinstance(r, UserError)]
    if len(done) < MIN_DRAWS:
        sentence = f"{len(failed)} of {len(results)} fits to simulated data failed: {failed[0]}"
        return Outcome("calibration", "bad", sentence)
    enough, usual = (float(np.quantile([r.ess for r in done], share, 0).min()) for share in (SHARE, 0.5))
    # Ranks are among the largest number of 19, 39, 59, … draws that are nearly independent: the variance of a rank
    # among L draws, in units of L, is 1/12 + 1/(6E) instead of 1/12 + 1/(6L) if their effective sample size is E.
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
    cover, off = inside[predictions].mean((0, 1)), bool(p.min() < ALPHA)
    findings, wrong = [], "bad" if exact and not few else "caution"
    for q, (label, wide) in enumerate(zip(labels, evidence["width"].tolist(), strict=True)):
        about = f"{label}: {_description(wide, normal_scores(order[q], num).mean(), p[q])}, as a share of what is right"
        error, least = wide / np.sqrt(2 * len(done)), float(p[q].min())
        findings.append(Finding(about, wide, 1.0, error, least, wrong if least < ALPHA else "good"))
    shares = f"{', '.join(f'{100 * c:.0f}' for c in cover[:-1])} and {100 * cover[-1]:.0f} %"
    remark = f"Central 50, 80 and 95 % intervals of predictions hold {shares} of the truths."
    right = f"In {len(done)} simulated data sets it converges to {CONVERGES_TO[converges_to]}"
    if few:
        right = "Too few effective draws to tell"
        about = f"effective draws of some quantity in {100 * SHARE:.0f} of 100 data sets, at most"
        findings.append(Finding(about, enough, MIN_DRAWS, level="caution"))
    elif not off:
        right = f"In {len(done)} simulated data sets the weights that made the data could not be told from the draws"
        narrow, wide = seen(len(done), num, ALPHA / p.size)
        remark += f" Draws of less than {narrow:.0%} or more than {wide:.0%} of the right width would have been seen."
    if not (exact or few):
        findings += _faults(done, order, num)
    if failed:
        findings += [Finding("fits that failed", len(failed), 0, level="caution")] * (len(failed) > FEW * len(results))
        remark += f" {len(failed)} of {len(results)} fits failed, and do not count: {failed[0]}"
    if warned := [r for r in done if r.warned]:
        remark += f" {len(warned)} of {len(done)} fits warned: {warned[0].warned[0]}"
    figures = {f"coverage_{100 * share:.0f}": float(c) for share, c in zip(LEVELS, cover, strict=True)}
    figures |= {"calibration_p": float(p.min()), "calibration_width": float(np.median(evidence["width"][predictions]))}
    wrong = f"This is not {CONVERGES_TO[converges_to]}"
    return concluded("calibration", findings, {}, right, wrong, remark, evidence=evidence, figures=figures)


def _description(wide: float, side: float, p: np.ndarray) -> str:
    """A description of the deviation of a quantity, by the p-values of the tests of ECDF, location and width."""
    if p[1:].min() >= ALPHA:
        return f"{'ranks are not uniform; ' * bool(p[0] < ALPHA)}width of the draws"
    if p[1] < p[2]:
        return f"the truth lies too often {'above' if side > 0 else 'below'} the draws; their width"
    return f"draws too {'narrow' if wide < 1 else 'wide'}"


def _faults(done: Sequence[Replication], order: np.ndarray, num: int) -> list[Finding]:
    """Errors that are bad even for an approximation: biased predictions or weights, draws no better than the prior."""
    sided, faults = [i for i, (_, kind) in enumerate(done[0].questions) if kind in ("prediction", "weight")], []
    for i in sided:  # a t-test, as the width may be wrong
        z = normal_scores(order[i], num)
        p = min(1.0, len(sided) * float(ttest_1samp(z, 0.0).pvalue))
        if p < ALPHA:
            about = f"{done[0].questions[i][0]} lies to one side of the truth, whose normal score among draws it is"
            faults.append(Finding(about, float(z.mean()), 0.0, float(z.std() / np.sqrt(len(z))), p, "bad"))
    learned = np.array([r.learned for r in done])
    p = float(wilcoxon(learned, alternative="greater").pvalue) if learned.any() else 1.0
    if p > ALPHA:
        about = "draws are no likelier than those of the prior: log-likelihood less that under these, median, in nats"
        faults.append(Finding(about, float(np.median(learned)), None, None, p, "bad"))
    return faults
