"""A method against a stored reference posterior: 10,000 verified draws of the very posterior that it is to find.

Where variant, settings and data are those of a reference, that posterior is what is compared. Elsewhere the variant
gets the data of one, and the settings that its posterior depends on (widths, activation, prior, noise): the same class,
guide and method on a network whose posterior is known. Whether the model is the reference's, its density tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from bnn_pyro.checks.check import ALPHA, Finding, Outcome, Subject, fields_of, lengthened, worst
from bnn_pyro.checks.reference_comparison import (
    Outputs,
    compared,
    coverage,
    distances_to,
    outputs_of,
    shift_and_ratio,
)
from bnn_pyro.checks.reference_posterior import ReferencePosterior, load_reference, references
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.errors import UserError
from bnn_pyro.fitting import fit, tuned
from bnn_pyro.parallel.task import Report
from bnn_pyro.zoo import Entry

__all__ = ["Reference"]

#: What is taken where neither model nor data tell: small enough for the method. A curve through six points has a
#: posterior that asks for steps too small for stochastic gradients.
DEFAULT, STOCHASTIC, ON_FEATURES = "toy-curve", "breast-cancer", "digits-last-layer"
#: R-hat above which chains have not converged; effective draws below which nothing can be told; a shift of the mean, in
#: posterior standard deviations, that has to be visible.
CONVERGED, MIN_EFFECTIVE, BLIND = 1.05, 100, 0.5
#: How many times the epochs of a tiny problem an optimiser takes that was not tuned.
EPOCHS = 5.0
#: Distances whose unit does not depend on the task, in words.
DISTANCES = {
    "agreement": "agreement with the reference in the most probable class; beside it, what chance would show",
    "total_variation": "total variation from the reference's mean probabilities; beside it, what chance would show",
    "wasserstein": "1-Wasserstein distance of the predictive distributions, {unit}; beside it, of chance alone",
    "wasserstein2": "2-Wasserstein distance of what single draws predict, {unit}; beside it, of chance alone",
}


class Posed(NamedTuple):
    """What is compared: a reference, the variant and data of its posterior, and whether these are the user's own."""

    reference: ReferencePosterior
    entry: Entry
    data: Dataset
    own: bool


@dataclass(frozen=True)
class Reference:
    """Settings of the check against reference posteriors.

    on      name of a reference; "" takes the one whose posterior the subject's is, else one that suits the variant
    draws   of a guide; of Markov chains, all chains together
    rows    rows · weights of the largest reference on which a sampler of whole data sets is run
    """

    on: str = ""
    draws: int = 4000
    rows: float = 1e9

    title: ClassVar[str] = "Reference posterior"
    idea: ClassVar[str] = (
        "Predictions are held against those of a posterior that is known: 10,000 draws of Hamiltonian Monte Carlo, "
        "checked by a second sampler. Samplers must agree within their Monte-Carlo error; of approximations it is told "
        "how far off their means are, how much too narrow they are, and what their intervals hold."
    )
    quick: ClassVar[Mapping[str, Any]] = {"draws": 2000, "rows": 1e5}

    def refuses(self, subject: Subject) -> str:
        """See ``Check``."""
        try:
            posed = self.pose(subject)
        except UserError as reason:
            return str(reason)
        if subject.temperature != 1:
            return f"references are of temperature 1, and this is of {subject.temperature:g}"
        size = len(posed.data.x_train) * posed.reference.about["weights"]
        if subject.converges_to == "exact" and size > self.rows:
            return f"to sample {posed.reference.title} takes minutes; take the full budget"
        return ""

    def run(self, subject: Subject, *, seed: int = 0, report: Report | None = None) -> Outcome:
        """See ``Check``.

        ``evidence``: task, title, target; x (B, …) inputs in their own units; of the outputs, log-odds or means in
        target units, reference_mean, reference_sd, mean, sd (B, J), and mean_floor, sd_floor (B, J), two standard
        errors of their differences; levels, coverage and coverage_error (3,).

        ``figures``: the distances, each with its floor, as :func:`distances_to` names them; posterior_coverage_50, _80
        and _95, shares of the posterior (not of the truth) that intervals hold; shift and sd_ratio.
        """
        posed = self.pose(subject)
        reference = posed.reference
        method = subject.method(self._settings(subject, reference))
        if report is not None:
            report(0, 2, {"fitting": reference.name})
        posterior = fit(posed.entry, posed.data, method, seed=seed, device="cpu", progress=False)
        if report is not None:
            report(1, 2, {"comparing": reference.name})
        settings = subject.settings(method, posed.entry) | {"reference": reference.name, "own": posed.own}
        try:
            outputs = outputs_of(posterior, reference, self.draws)
        except ValueError:  # a distribution refuses parameters that are not finite
            outputs = None
        if outputs is None or not (np.isfinite(outputs.values).all() and np.isfinite(outputs.mean).all()):
            return Outcome("reference", "bad", f"On {reference.title}: predictions are not finite.", settings)
        claims, sentence = _claims(subject, posed, outputs)
        level = claims[0].level
        covered, apart = coverage(outputs, reference), distances_to(outputs, reference, seed)
        shift, ratio = shift_and_ratio(outputs, reference)
        findings = _distances(apart, reference, level)
        for nominal, (share, error) in covered.items():
            far = level if abs(share - nominal) > 4 * error else "good"
            about = f"share of the posterior inside its {nominal:.0%} intervals"
            findings.append(Finding(about, share, nominal, error, level=far))
        about = "shift of the means, posterior standard deviations, root mean square"
        findings.append(Finding(about, shift, 0.0, level=level))
        about = "its standard deviations as shares of the posterior's, median"
        findings += [Finding(about, ratio, 1.0, level=level), *claims]
        figures = {name: value for name, (value, _) in apart.items()}
        figures |= {f"{name}_floor": floor for name, (_, floor) in apart.items()}
        figures |= {f"posterior_coverage_{nominal * 100:.0f}": share for nominal, (share, _) in covered.items()}
        off = f"means are off by {shift:.2g} posterior standard deviations (root mean square), its spread is "
        off += f"{ratio:.2g} times the posterior's, and its 95 % intervals hold {covered[0.95][0]:.0%} of it"
        evidence, level = _evidence(posed, outputs, covered), worst(f.level for f in findings)
        figures |= {"shift": shift, "sd_ratio": ratio}
        return Outcome("reference", level, sentence.format(off=off), settings, findings, evidence, figures)

    def pose(self, subject: Subject) -> Posed:
        """What the subject is compared with. Raises UserError where there is nothing."""
        known = [load_reference(name) for name in ([self.on] if self.on else references())]
        on_features = hasattr(subject.entry, "backbone")
        for reference in known:
            # A last layer on the network of the reference: every other would have other features.
            stored = reference.stored_backbone() if on_features else {}
            entry = replace(subject.entry, **stored)
            if not reference.unlike(entry, subject.data):
                return Posed(reference, entry, subject.data, True)
        if reason := subject.irreducible(hidden=() if on_features else (1,)):
            raise UserError(reason)
        if self.on:
            reference = known[0]
        else:
            stochastic = subject.converges_to == "exact as lr → 0"
            name = ON_FEATURES if on_features else STOCHASTIC if stochastic else DEFAULT
            suits = [r for r in known if bool(r.backbone) == on_features]
            same_data = [r for r in suits if r.about["dataset"] == subject.data.name and not stochastic]
            if not (suits := same_data + [r for r in suits if r.name == name]):
                raise UserError("no reference posterior is stored for such a variant")
            reference = suits[0]
        names = fields_of(subject.entry)
        if lacking := [k for k in reference.settings() if k not in names]:
            raise UserError(f"{reference.title} is of a variant with '{lacking[0]}', which this one has not")
        settings = {"bias": True, "input_dropout": 0.0, "hidden_dropout": 0.0, **reference.settings()}
        entry = replace(subject.entry, **{k: v for k, v in settings.items() if k in names})
        data = reference.data()
        if reason := reference.unlike(entry, data):
            raise UserError(reason)
        return Posed(reference, entry, data, False)

    def _settings(self, subject: Subject, reference: ReferencePosterior) -> dict[str, Any]:
        """Those that were tuned for the data, or what suffices on a small problem; what the reference says, above."""
        try:
            settings = dict(tuned(subject.variant, reference.about["dataset"], subject.inference)[1].method)
        except UserError:  # a variant or a method of the user's own
            settings = {}
        if subject.converges_to == "exact":
            tiny = subject.kind.tiny
            settings |= {**tiny, "draws": max(1, self.draws // tiny.get("chains", 1))}
        elif subject.exact:
            settings |= {"chains": 4, "max_draws": self.draws}
        elif not settings:  # a tuned optimisation is one whole
            settings = lengthened(subject.kind.tiny, epochs=EPOCHS)
        return {**settings, **reference.about.get("settings", {}).get(subject.inference, {})}


def _claims(subject: Subject, posed: Posed, outputs: Outputs) -> tuple[list[Finding], str]:
    """Whether the draws are of the posterior, and whether that could be told; in words, {off} for the amounts."""
    test, exact = compared(outputs, posed.reference), subject.converges_to == "exact"
    whose = "your own model and data" if posed.own else "a model of its kind with a known posterior"
    place = f"On {posed.reference.title} ({whose}; {posed.reference.about['draws']:,} verified draws)"
    largest = float(np.abs(test.z).max())
    if len(outputs.flat) == 1 or subject.converges_to == "point":
        about = "outputs of a point: nothing is said of what lies around it"
        return [Finding(about, largest, level="caution")], f"{place}, {{off}}."
    off, rhat = test.p < ALPHA, outputs.rhat()
    unsettled = outputs.markov and not (rhat < CONVERGED and outputs.effective > MIN_EFFECTIVE)
    about = "every output's mean and width are the reference's (largest difference, in standard errors)"
    findings = [Finding(about, largest, 0.0, 1.0, test.p, "good" if not off else "bad" if exact else "caution")]
    if outputs.markov:
        about = "largest R-hat of the outputs of its own chains"
        findings.append(Finding(about, rhat, 1.0, level="caution" if unsettled else "good"))
    about = "shift of a mean that would have been seen, in posterior standard deviations"
    findings.append(Finding(about, test.visible, level="good" if off or test.visible < BLIND else "caution"))
    still = f"its chains have not converged (R-hat {rhat:.2f}, {outputs.effective:,.0f} effective draws)"
    if off and exact:
        why = f"{still}, and " if unsettled else ""
        words = f"{place}: {why}it does not sample the posterior that it claims (p = {test.p:.1g}): {{off}}."
    elif off:
        words = f"{place}, {{off}}{f'; {still}' if unsettled else ''}."
    elif unsettled:
        words = f"{place}: too few draws to tell; {still}. As far as they go, {{off}}."
    else:
        seen = f"mean off by {test.visible:.2g} posterior standard deviations would have been seen"
        told = f"{place}: too few draws to tell; only a {seen}." if test.visible >= BLIND else ""
        words = told or f"{place} it cannot be told from the posterior: a {seen}."
    return findings, words


def _distances(apart: Mapping[str, tuple[float, float]], reference: ReferencePosterior, level: str) -> list[Finding]:
    """level: of those that are more than twice what chance would show."""
    unit = reference.about["unit"] if not reference.has_classes else "probability"
    findings = []
    for name, (value, floor) in apart.items():
        far = (1 - value > 2 * (1 - floor)) if name == "agreement" else value > 2 * floor
        findings.append(Finding(DISTANCES[name].format(unit=unit), value, floor, level=level if far else "good"))
    return findings


def _evidence(posed: Posed, outputs: Outputs, covered: Mapping[float, tuple[float, float]]) -> dict[str, Any]:
    reference, schema = posed.reference, posed.data.schema
    number = 1 / outputs.effective + 1 / reference.about["draws"]
    return {
        "task": reference.about["task"],
        "title": reference.title,
        "target": schema.target,
        "x": schema.unstandardise(torch.from_numpy(reference.x)).numpy(),
        "reference_mean": reference.centre,
        "reference_sd": reference.spread,
        "mean": outputs.flat.mean(0, dtype=np.float64),
        "sd": outputs.flat.std(0, dtype=np.float64),
        "mean_floor": 2 * reference.spread * number**0.5,
        "sd_floor": 2 * reference.spread * (number / 2) ** 0.5,
        "levels": np.array(list(covered)),
        "coverage": np.array([share for share, _ in covered.values()]),
        "coverage_error": np.array([error for _, error in covered.values()]),
    }
