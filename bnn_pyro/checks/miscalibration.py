"""What ranks say of a method: whether it is calibrated, and if not, in which way and by how much.

Three tests of every quantity (``ranks``), corrected for all of them together by Holm's method. Of a method whose limit
is the posterior all must hold. An approximation has a spread that is not the posterior's, a mean-field one of weights
too narrow a spread; it is told how much. It has no way to lie to one side of predictions, for prior and network are
symmetric, or to be no likelier than the prior: these are faults of it, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.stats import norm, ttest_1samp, wilcoxon

from bnn_pyro.checks.check import ALPHA, Finding, Outcome
from bnn_pyro.checks.replicas import Failure, Plan, Replication
from bnn_pyro.checks.sbc_ranks import LEVELS, chi_square, covered, holm, normal_scores, p_location, p_uniform, p_width
from bnn_pyro.checks.sbc_ranks import width as relative_width
from bnn_pyro.checks.simulation import linear_part
from bnn_pyro.parts.priors import IsotropicNormal

__all__ = ["judge"]

NAME = "calibration"

#: Fewer draws that are worth an independent one tell nothing; so many replications may have fewer.
LEAST, SHARE = 19, 0.05

#: Draws that are ranked among, as a share of what they are worth: estimates of the latter scatter about it.
NEARLY = 1.25

#: Share of the fits that may fail and alter no verdict: ranks that are not there move an ECDF by no more.
FEW = 0.01

#: What is known of approximations.
KNOWN = {
    "best of a family": "The best of a family is known to be off, with independent weights to be too narrow in these",
    "normal at the mode": "A Normal at the mode is known to miss what is skewed",
    "posterior at step size 0": "A chain of finite step is known for a bias that falls with the step",
}


def judge(limit: str, plan: Plan, found: Sequence[Replication | Failure]) -> Outcome:
    """The outcome, without settings and seconds.   limit: what the method claims, a key of ``LIMITS``."""
    done = [r for r in found if isinstance(r, Replication)]
    failed = [r for r in found if isinstance(r, Failure)]
    if len(done) < LEAST:
        return Outcome(NAME, "bad", f"{len(failed)} of {len(found)} fits to simulated data failed: {failed[0].reason}")
    ess = np.stack([r.ess for r in done])  # (R, Q)
    enough, usual = (float(np.quantile(ess, share, 0).min()) for share in (SHARE, 0.5))
    few, num = enough < LEAST, _thinned(min(plan.draws, done[0].draws.shape[1]), usual)
    lots = np.random.default_rng([plan.seed, 1])
    order = np.stack([r.ranks(num, lots) for r in done], 1)  # (Q, R)
    tests = (p_uniform, p_location, p_width)
    p = holm(np.array([[test(q, num) for test in tests] for q in order]).ravel()).reshape(-1, 3)
    evidence = _evidence(done, order, num, p, ess)
    claim = "posterior" if limit == "posterior" or _is_exact(plan) else limit
    faults = [] if claim == "posterior" else _faults(done, order, num)
    off = bool(p.min() < ALPHA)
    level = "caution" if few else "bad" if faults or (off and claim == "posterior") else "caution" if off else "good"
    sentence = _sentence(level, claim, few, enough, evidence, faults, p)
    if failed:
        level = "caution" if level == "good" and len(failed) > FEW * len(found) else level
        sentence += f" {len(failed)} of {len(found)} fits failed, and do not count: {failed[0].reason}"
    warned = [r for r in done if r.warned]
    if warned:
        sentence += f" {len(warned)} of {len(done)} fits warned: {warned[0].warned[0]}"
    told = "caution" if claim != "posterior" or few else "bad"
    return Outcome(NAME, level, sentence, {}, (*_findings(evidence, p, told), *faults), evidence, _figures(evidence, p))


def _thinned(most: int, effective: float) -> int:
    """How many draws are ranked among: the largest of 19, 39, 59, … that are nearly independent.

    Of L draws worth E, the variance of a rank in units of L is 1/12 + 1/(6E) instead of 1/12 + 1/(6L).
    """
    return max(LEAST, 20 * int((min(most, NEARLY * effective) + 1) // 20) - 1)


def _is_exact(plan: Plan) -> bool:
    """Whether a Normal at the mode is the posterior: linear regression with a known noise and a Normal prior."""
    if plan.method.limit != "normal at the mode" or getattr(plan.method, "structure", "") != "full":
        return False
    model = linear_part(plan.entry, plan.given)
    if model is None or not model.likelihood.quadratic:
        return False
    return all(isinstance(model.prior(w), IsotropicNormal) for w in model.net.parameters())


def _faults(done: Sequence[Replication], order: np.ndarray, num: int) -> list[Finding]:
    """What no approximation is known for."""
    questions = done[0].questions
    sided = [i for i, q in enumerate(questions) if q.kind in ("prediction", "weight")]
    found = []
    for i in sided:  # their spread may be wrong: by its own standard error
        z = normal_scores(order[i], num)
        p = min(1.0, len(sided) * float(ttest_1samp(z, 0.0).pvalue))
        if p < ALPHA:
            about = f"{questions[i].about}: normal score of the truth among the draws, on average"
            found.append(Finding(about, float(z.mean()), 0.0, float(z.std() / np.sqrt(len(z))), p, "bad"))
    learned = np.array([r.learned for r in done])
    p = float(wilcoxon(learned, alternative="greater").pvalue) if learned.any() else 1.0
    if p > ALPHA:
        about = "log-likelihood of the data under the draws less that under the prior's, median, in nats"
        found.append(Finding(about, float(np.median(learned)), None, None, p, "bad"))
    return found


def _evidence(done: Sequence[Replication], order: np.ndarray, num: int, p: np.ndarray, ess: np.ndarray) -> dict:
    total = order.shape[1]
    inside = np.stack([covered(order, num, level) for level in LEVELS], -1)  # (Q, R, 3)
    smooth = (inside.sum(1) + 2) / (total + 4)  # Agresti & Coull 1998: no error of 0 where all are covered
    return {
        "labels": [q.about for q in done[0].questions],
        "kinds": [q.kind for q in done[0].questions],
        "ranks": order,
        "draws": num,
        "p": p,
        "chi_square": np.array([chi_square(q, num) for q in order]),
        "levels": np.array(LEVELS),
        "coverage": inside.mean(1),
        "coverage_error": np.sqrt(smooth * (1 - smooth) / total),
        "width": relative_width(order, num),
        "ess": np.quantile(ess, SHARE, 0),
        "shown": ALPHA / p.size,
    }


def _predictions(evidence: dict) -> np.ndarray:
    return np.array([kind == "prediction" for kind in evidence["kinds"]])


def _coverage(evidence: dict) -> tuple[np.ndarray, np.ndarray]:
    """Of all predictions, and its standard error, (3,) each: those of one data set count as one."""
    order = evidence["ranks"][_predictions(evidence)]
    each = np.stack([covered(order, evidence["draws"], level).mean(0) for level in LEVELS])
    return each.mean(1), np.maximum(each.std(1, ddof=1), 0.5 / each.shape[1]) / np.sqrt(each.shape[1])


def _findings(evidence: dict, p: np.ndarray, told: str) -> list[Finding]:
    found = []
    total = evidence["ranks"].shape[1]
    for label, width, least in zip(evidence["labels"], evidence["width"], p.min(1), strict=True):
        level = told if least < ALPHA else "good"
        about = f"{label}: width of the draws, as a share of what is right"
        found.append(Finding(about, float(width), 1.0, float(width / np.sqrt(2 * total)), float(least), level))
    for level, cover, error in zip(LEVELS, *_coverage(evidence), strict=True):
        off = abs(cover - level) > norm.isf(ALPHA / 6) * error
        about = f"share of predictions inside central {100 * level:.0f} % intervals"
        found.append(Finding(about, float(cover), level, float(error), None, told if off else "good"))
    return found


def _figures(evidence: dict, p: np.ndarray) -> dict[str, float]:
    cover, _ = _coverage(evidence)
    figures = {f"coverage_{100 * level:.0f}": float(c) for level, c in zip(LEVELS, cover, strict=True)}
    wide = float(np.median(evidence["width"][_predictions(evidence)]))
    return {"calibration_p": float(p.min()), **figures, "calibration_width": wide}


# -- in words --------------------------------------------------------------------------------------------------------
def _detectable(total: int, tests: int) -> float:
    """By what share draws must be too narrow or too wide for 80 % of such checks to notice, about."""
    return float((norm.isf(ALPHA / tests / 2) + norm.isf(0.2)) / np.sqrt(2 * total))


def _sentence(
    level: str, claim: str, few: bool, enough: float, evidence: dict, faults: Sequence[Finding], p: np.ndarray
) -> str:
    total, cover = evidence["ranks"].shape[1], _coverage(evidence)[0]
    held = (
        "Central 50, 80 and 95 % intervals of predictions hold "
        f"{', '.join(f'{100 * c:.0f}' for c in cover[:-1])} and {100 * cover[-1]:.0f} % of the truths."
    )
    if few:
        return (
            f"Too few effective draws to tell: in {100 * SHARE:.0f} of 100 data sets the chains have fewer than "
            f"{max(1.0, enough):.0f} of some quantity, and {LEAST} are needed; give more draws, or a higher thin. "
            + held
        )
    if level == "good":
        return (
            f"In {total} simulated data sets the weights that made the data could not be told from the posterior's "
            f"draws (smallest corrected p-value {p.min():.2g}). {held} Draws too narrow or too wide by "
            f"{100 * _detectable(total, p.size):.0f} % would have been noticed."
        )
    off = _off(evidence, p)
    if claim == "posterior":
        return f"The draws are not those of the posterior. {off} {held}"
    wrong = "".join(f" That {_accused(f)} cannot come of it: look for an error." for f in faults)
    return f"{held} {KNOWN[claim]}. {off}{wrong}"


def _off(evidence: dict, p: np.ndarray) -> str:
    """What is off, by the way it is, the surest first."""
    kinds: dict[str, list[str]] = {}
    for q in p.min(1).argsort():
        label, width, num = evidence["labels"][q], evidence["width"][q], evidence["draws"]
        score = normal_scores(evidence["ranks"][q], num).mean()
        if p[q, 2] < ALPHA:
            what = "too narrow" if width < 1 else "too wide"
            kinds.setdefault(f"Draws are {what}, with this share of the right width:", []).append(
                f"{label} {100 * width:.0f} %"
            )
        elif p[q, 1] < ALPHA:
            kinds.setdefault(f"The truth lies too often {'above' if score > 0 else 'below'} the draws:", []).append(
                label
            )
        elif p[q, 0] < ALPHA:
            kinds.setdefault("Ranks are not uniform:", []).append(label)
    return " ".join(
        f"{what} {', '.join(labels[:4])}{f', and {len(labels) - 4} more' if len(labels) > 4 else ''}."
        for what, labels in kinds.items()
    )


def _accused(fault: Finding) -> str:
    if fault.about.startswith("log-likelihood of the data under"):
        return "draws are no likelier than those of the prior"
    return f"{fault.about.partition(':')[0]} lies to one side of the truth (p = {fault.p:.1g})"
