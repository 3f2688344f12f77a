"""A method against a stored reference posterior: 10,000 verified draws of the very posterior that it is to find.

The variant gets the data of a reference, that of the subject's own data where there is one, and the settings that its
posterior depends on (widths, activation, prior, noise): the same class, guide and method on a network whose posterior
is known. Whether the model is the reference's, its density tells. What is compared are means of :func:`bounded`
functions of every output.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from scipy.stats import t

import bnn_pyro.checks.reference_posterior as reference_posterior
from bnn_pyro.checks.check import ALPHA, Check, Estimate, Finding, Outcome, Subject, judge, lengthened, worst
from bnn_pyro.checks.reference_posterior import ReferencePosterior, effective_draws
from bnn_pyro.checks.sbc_ranks import LEVELS
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.diagnostics.convergence import LEAST_DRAWS
from bnn_pyro.errors import UserError
from bnn_pyro.fitting import fit
from bnn_pyro.progress import Report
from bnn_pyro.zoo import Entry

#: Where neither model nor data tell; the curve's posterior asks for steps too small for stochastic gradients.
DEFAULT, STOCHASTIC, ON_FEATURES = "toy-curve", "breast-cancer", "digits-last-layer"
#: A shift of the mean, in posterior standard deviations, that has to be visible; d E tanh(z + δ) / dδ at δ = 0.
BLIND, SLOPE = 0.5, 0.606
#: How many times the epochs of a tiny problem an optimiser takes.
EPOCHS = 5.0


@dataclass(frozen=True)
class Reference(Check):
    """Predictions are compared with those of a posterior that is known: 10,000 draws of Hamiltonian Monte Carlo,
    checked by a second sampler. Samplers must agree within their Monte-Carlo error; for approximations the report
    says how far off their means are, how much too narrow they are, and what their intervals hold.

    draws   of a guide; of Markov chains, all chains together
    rows    rows · weights of the largest reference on which a sampler of whole data sets is run

    ``Outcome.figures``: sd_ratio; posterior_coverage_50, _80 and _95, shares of the posterior that intervals hold.
    """

    draws: int = 4000
    rows: float = 1e9

    title: ClassVar[str] = "Reference posterior"
    quick: ClassVar[Mapping[str, Any]] = {"draws": 2000, "rows": 1e5}

    def _refuses(self, subject: Subject) -> str:
        reference, _, data = self.pose(subject)
        if subject.temperature != 1:
            return f"references are of temperature 1, and this is of {subject.temperature:g}"
        if subject.converges_to == "exact" and len(data.x_train) * reference.about["weights"] > self.rows:
            return f"to sample {reference.about['title']} takes minutes; take the full budget"
        return ""

    def _run(self, subject: Subject, seed: int, report: Report) -> Outcome:
        reference, entry, data = self.pose(subject)
        tiny, known = subject.kind.tiny, reference.about.get("settings", {}).get(subject.inference, {})
        suffices = {"chains": 4, "max_draws": self.draws} if subject.exact else lengthened(tiny, epochs=EPOCHS)
        suffices = {**tiny, "draws": max(1, self.draws // tiny.get("chains", 1))} if "warmup" in tiny else suffices
        method = subject.method({**suffices, **known})
        report(0, 1, {"fitting": reference.name})
        posterior = fit(entry, data, method, seed=seed, device="cpu", progress=False)
        settings = subject.settings(method, entry) | {"reference": reference.name}
        try:
            outputs = reference_posterior.outputs_of(posterior, reference, self.draws)
        except ValueError:  # a distribution refuses parameters that are not finite
            outputs = None
        if outputs is None or not np.isfinite(outputs).all():
            return Outcome("reference", "bad", f"On {reference.about['title']}: predictions are not finite.", settings)
        (p, largest, visible), exact = compared(outputs, reference), subject.converges_to == "exact"
        flat = outputs.reshape(-1, *outputs.shape[2:])
        point = len(flat) == 1 or subject.converges_to == "point"
        off = not point and p < ALPHA
        level = "bad" if off and exact else "caution" if off or point else "good"
        few = not off and visible >= BLIND
        covered = coverage(outputs, reference)
        centre, spread = flat.mean(0, dtype=np.float64), flat.std(0, dtype=np.float64)
        shift = float(np.sqrt(np.square((centre - reference.centre) / reference.spread).mean()))
        ratio = float(np.median(spread / reference.spread))
        about = "largest difference of an output's mean or width from the reference's, in standard errors"
        findings = [Finding(about, largest, 0.0, 1.0, None if point else p, level)]
        about = "shift of a mean that would have been seen, in posterior standard deviations"
        findings.append(Finding(about, visible, level="caution" if few else "good"))
        for nominal, (share, error) in covered.items():
            about, far = f"share of the posterior inside its {nominal:.0%} intervals", abs(share - nominal) > 4 * error
            findings.append(Finding(about, share, nominal, error, level=level if far else "good"))
        figures = {"sd_ratio": ratio}
        figures |= {f"posterior_coverage_{nominal * 100:.0f}": share for nominal, (share, _) in covered.items()}
        words = f"On {reference.about['title']} ({reference.about['draws']:,} verified draws of the posterior)"
        if off and exact:
            words += f" it does not sample the posterior that it claims (p = {p:.1g})"
        if off or point:
            words += f": means are off by {shift:.2g} posterior standard deviations (root mean square), its spread is "
            words += f"{ratio:.2g} times the posterior's, and its 95 % intervals hold {covered[0.95][0]:.0%} of it."
        else:
            words += " there are too few draws to tell" if few else " it cannot be told from the posterior"
            words += f": a mean off by {visible:.2g} posterior standard deviations would have been seen."
        return Outcome("reference", worst(f.level for f in findings), words, settings, findings, figures=figures)

    def pose(self, subject: Subject) -> tuple[ReferencePosterior, Entry, Dataset]:
        """A reference, the variant made to have its posterior, and its data. Raises UserError where there is none."""
        on_features, stochastic = hasattr(subject.entry, "backbone"), subject.converges_to == "exact as lr → 0"
        if reason := subject.irreducible(hidden=() if on_features else (1,)):
            raise UserError(reason)
        # A last layer on the network of the reference: every other would have other features.
        known = map(reference_posterior.load_reference, reference_posterior.references())
        suits = [r for r in known if bool(r.backbone) == on_features]
        name = ON_FEATURES if on_features else STOCHASTIC if stochastic else DEFAULT
        reference = min(suits, key=lambda r: (stochastic or r.about["dataset"] != subject.data.name, r.name != name))
        entry, data = subject.reduced(bias=True, **reference.settings()), reference.data()
        if reason := reference.unlike(entry, data):
            raise UserError(reason)
        return reference, entry, data


def compared(outputs: np.ndarray, reference: ReferencePosterior) -> tuple[float, float, float]:
    """Mean and width of every output (C, D, B, J) against the reference's, within the Monte-Carlo errors of both.

    (p-value of the output that is furthest off, corrected for how many there are; the largest difference in standard
    errors; the shift of a mean, in posterior standard deviations, that would have been seen at the median output.)
    """
    values = reference_posterior.bounded(outputs.astype(np.float64), reference.centre, reference.spread)
    values = np.moveaxis(values, 0, 2).reshape(*outputs.shape[:2], -1)  # (C, D, M)
    markov = outputs.shape[1] >= LEAST_DRAWS
    own = Estimate.of_chains(values) if markov else Estimate.of_independent(values.reshape(-1, values.shape[-1]))
    estimate = Estimate(own.mean, np.hypot(own.error, reference.error.ravel()), own.freedom)
    expected = reference.expected.ravel()
    findings = judge([""] * len(expected), estimate, expected)
    shifts = t.isf(ALPHA / (2 * len(expected)), estimate.freedom) * estimate.error / SLOPE
    visible = math.inf if values[..., 0].size == 1 else float(np.median(shifts[: reference.centre.size]))
    return min(f.p for f in findings), float(np.abs((own.mean - expected) / estimate.error).max()), visible


def coverage(outputs: np.ndarray, reference: ReferencePosterior) -> dict[float, tuple[float, float]]:
    """{level: (share of the reference's draws inside the draws' central intervals, its error at one of the points)}."""
    mine, draws = outputs[:, :, reference.points], reference.outputs()
    number = 1 / effective_draws(outputs) + 1 / len(draws)
    shares = {}
    for level in LEVELS:
        low, high = np.quantile(mine, [(1 - level) / 2, (1 + level) / 2], axis=(0, 1))
        shares[level] = float(((draws >= low) & (draws <= high)).mean()), math.sqrt(level * (1 - level) * number)
    return shares
