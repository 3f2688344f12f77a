"""A method against a stored reference posterior: 10,000 verified draws of the very posterior that it is to find.

Where variant, settings and data are those of a reference, that posterior is what is compared. Elsewhere the variant
gets the settings that the posterior of a reference depends on (widths, activation, prior, noise), and its data: the
same class, guide and method on a network whose posterior is known. Whether the model is the reference's, its density
tells.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from bnn_pyro.checks.check import ALPHA, Finding, Outcome, worst
from bnn_pyro.checks.reduction import irreducible
from bnn_pyro.checks.reference_comparison import Compared, Found, amounts, compared, coverage, distances_to, found_by
from bnn_pyro.checks.reference_posterior import ReferencePosterior, load_reference, references
from bnn_pyro.checks.reference_settings import below
from bnn_pyro.checks.subject import Subject
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.errors import UserError
from bnn_pyro.fitting import fit
from bnn_pyro.inference.method import Report
from bnn_pyro.settings import plain
from bnn_pyro.zoo import Entry

__all__ = ["Reference"]

#: What is taken where neither model nor data tell: small enough for the method. A curve through six points has a
#: posterior that asks for steps too small for stochastic gradients.
DEFAULT, STOCHASTIC, ON_FEATURES = "toy-curve", "breast-cancer", "digits-last-layer"
#: R-hat above which chains have not converged; effective draws below which nothing can be told; a shift of the mean, in
#: posterior standard deviations, that has to be visible.
CONVERGED, FEWEST, BLIND = 1.05, 100, 0.5


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
            posed = self._posed(subject)
            method = subject.method(below(subject, posed.reference, self.draws))
        except UserError as reason:
            return str(reason)
        if getattr(method, "temperature", 1.0) != 1:
            return f"references are of temperature 1, and this is of {method.temperature:g}"
        size = len(posed.data.x_train) * posed.reference.about["weights"]
        if subject.limit == "posterior" and size > self.rows:
            return f"to sample {posed.reference.title} takes minutes; take the full budget"
        return ""

    def run(self, subject: Subject, *, seed: int = 0, report: Report | None = None) -> Outcome:
        """See ``Check``.

        ``evidence``: task, title, target; x (B, …) inputs in their own units; of the outputs, log-odds or means in
        target units, reference_mean, reference_sd, found_mean, found_sd (B, J), and mean_floor, sd_floor (B, J), two
        standard errors of their differences; reference_probability, found_probability (B, K) for classification;
        z (2, B, J); levels, coverage and coverage_error (3,).

        ``figures``: the distances, each with its floor, as :func:`distances_to` names them; posterior_coverage_50, _80
        and _95, shares of the posterior (not of the truth) that intervals hold; shift and sd_ratio.
        """
        start = time.perf_counter()
        posed = self._posed(subject)
        reference = posed.reference
        method = subject.method(below(subject, reference, self.draws))
        if report is not None:
            report(0, 2, {"fitting": reference.name})
        posterior = fit(posed.entry, posed.data, method, seed=seed, device="cpu", progress=False)
        if report is not None:
            report(1, 2, {"comparing": reference.name})
        settings = {"variant": plain(posed.entry), "method": plain(method), "check": plain(self)}
        settings |= {"reference": reference.name, "own": posed.own}
        try:
            found = found_by(posterior, reference, self.draws)
        except ValueError:  # a distribution refuses parameters that are not finite
            found = None
        if found is None or not (np.isfinite(found.outputs).all() and np.isfinite(found.mean).all()):
            sentence = f"On {reference.title}: predictions are not finite."
            return Outcome("reference", "bad", sentence, settings, seconds=time.perf_counter() - start)
        test = compared(found, reference, ALPHA)
        held, apart, off = coverage(found, reference), distances_to(found, reference, seed), amounts(found, reference)
        claims = self._claims(subject, found, test)
        findings = (*_distances(apart, reference, claims[0].level), *_amounts(held, off, claims[0].level), *claims)
        figures = {name: value for name, (value, _) in apart.items()}
        figures |= {f"{name}_floor": floor for name, (_, floor) in apart.items()}
        figures |= {f"posterior_coverage_{level * 100:.0f}": share for level, (share, _) in held.items()}
        figures |= {"shift": off["shift"], "sd_ratio": off["ratio"]}
        return Outcome(
            "reference",
            worst(f.level for f in findings),
            _sentence(subject, posed, found, test, held, off),
            settings,
            findings,
            _evidence(posed, found, test, held),
            figures,
            time.perf_counter() - start,
        )

    # -- the parts -----------------------------------------------------------------------------------------------
    def _posed(self, subject: Subject) -> Posed:
        """Raises UserError where there is none."""
        known = [load_reference(name) for name in ([self.on] if self.on else references())]
        for reference in known:
            entry = _on_stored_features(subject, reference)
            if not reference.unlike(entry, subject.data):
                return Posed(reference, entry, subject.data, True)
        on_features = hasattr(subject.entry, "backbone")
        if reason := irreducible(subject, hidden=() if on_features else (1,)):
            raise UserError(reason)
        if self.on:
            reference = known[0]
        else:
            suits = [r for r in known if bool(r.backbone) == on_features]
            stochastic = subject.limit == "posterior at step size 0"
            name = ON_FEATURES if on_features else STOCHASTIC if stochastic else DEFAULT
            usual = [r for r in suits if r.name == name]
            same_data = [r for r in suits if r.about["dataset"] == subject.data.name and not stochastic]
            if not (same_data or usual):
                raise UserError("no reference posterior is stored for such a variant")
            reference = (same_data or usual)[0]
        names = {field.name for field in fields(subject.entry)}
        settings = {"bias": True, "input_dropout": 0.0, "hidden_dropout": 0.0, **reference.settings()}
        if lacking := [k for k in reference.settings() if k not in names]:
            raise UserError(f"{reference.title} is of a variant with '{lacking[0]}', which this one has not")
        entry = replace(subject.entry, **{k: v for k, v in settings.items() if k in names})
        data = reference.data()
        if reason := reference.unlike(entry, data):
            raise UserError(reason)
        return Posed(reference, entry, data, False)

    def _claims(self, subject: Subject, found: Found, test: Compared) -> tuple[Finding, ...]:
        """Whether the draws are of the posterior, and whether that could be told."""
        about = "every output's mean and width are the reference's (largest difference, in standard errors)"
        largest = float(np.abs(test.z).max())
        off = test.p < ALPHA
        if found.draws == 1 or subject.limit == "points":
            return (Finding("outputs of a point: nothing is said of what lies around it", largest, level="caution"),)
        level = "good" if not off else "bad" if subject.limit == "posterior" else "caution"
        findings = [Finding(about, largest, 0.0, 1.0, test.p, level)]
        rhat = found.rhat()
        if found.markov:
            told = "good" if rhat < CONVERGED and found.effective > FEWEST else "caution"
            findings.append(Finding("largest R-hat of the outputs of its own chains", rhat, 1.0, level=told))
        told = "good" if off or test.visible < BLIND else "caution"
        visible = "shift of a mean that would have been seen, in posterior standard deviations"
        return (*findings, Finding(visible, test.visible, level=told))


def _on_stored_features(subject: Subject, reference: ReferencePosterior) -> Entry:
    """A last layer on the network of the reference: every other would have other features."""
    if reference.backbone and hasattr(subject.entry, "backbone"):
        return replace(subject.entry, backbone=reference.features())
    return subject.entry


def _distances(apart: Mapping[str, tuple[float, float]], reference: ReferencePosterior, off: str) -> list[Finding]:
    """off: the level of those that are more than twice what chance would show."""
    unit = reference.about["unit"] if not reference.has_classes else "probability"
    names = {
        "agreement": "agreement with the reference in the most probable class; beside it, what chance would show",
        "total_variation": "total variation from the reference's mean probabilities; beside it, what chance would show",
        "wasserstein": f"1-Wasserstein distance of the predictive distributions, {unit}; beside it, of chance alone",
        "wasserstein2": f"2-Wasserstein distance of what single draws predict, {unit}; beside it, of chance alone",
    }
    far = {k: (1 - v > 2 * (1 - floor)) if k == "agreement" else (v > 2 * floor) for k, (v, floor) in apart.items()}
    return [Finding(names[k], value, floor, level=off if far[k] else "good") for k, (value, floor) in apart.items()]


def _amounts(held: Mapping[float, tuple[float, float]], off: Mapping[str, float], level: str) -> list[Finding]:
    """level: that of shares that are more than four standard errors off."""
    shares = [
        Finding(
            f"share of the posterior inside its {nominal:.0%} intervals", share, nominal, error,
            level=level if abs(share - nominal) > 4 * error else "good",
        )
        for nominal, (share, error) in held.items()
    ]  # fmt: skip
    return [
        *shares,
        Finding("shift of the means, posterior standard deviations, root mean square", off["shift"], 0.0, level=level),
        Finding("its standard deviations as shares of the posterior's, median", off["ratio"], 1.0, level=level),
    ]


def _sentence(
    subject: Subject,
    posed: Posed,
    found: Found,
    test: Compared,
    held: Mapping[float, tuple[float, float]],
    off: Mapping[str, float],
) -> str:
    whose = "your own model and data" if posed.own else "a model of its kind with a known posterior"
    place = f"On {posed.reference.title} ({whose}; {posed.reference.about['draws']:,} verified draws)"
    off_words = (
        f"means are off by {off['shift']:.2g} posterior standard deviations (root mean square), its spread is "
        f"{off['ratio']:.2g} times the posterior's, and its 95 % intervals hold {held[0.95][0]:.0%} of it"
    )
    if found.draws == 1 or subject.limit == "points":
        return f"{place}, {off_words}."
    rhat = found.rhat()
    unsettled = found.markov and not (rhat < CONVERGED and found.effective > FEWEST)
    still = f"its chains have not converged (R-hat {rhat:.2f}, {found.effective:,.0f} effective draws)"
    if test.p < ALPHA and subject.limit == "posterior":
        why = f"{still}, and " if unsettled else ""
        return f"{place}: {why}it does not sample the posterior that it claims (p = {test.p:.1g}): {off_words}."
    if test.p < ALPHA:
        return f"{place}, {off_words}{f'; {still}' if unsettled else ''}."
    if unsettled:
        return f"{place}: too few draws to tell; {still}. As far as they go, {off_words}."
    seen = f"a mean off by {test.visible:.2g} posterior standard deviations would have been seen"
    if test.visible >= BLIND:
        return f"{place}: too few draws to tell; only {seen.removeprefix('a ')}."
    return f"{place} it cannot be told from the posterior: {seen}."


def _evidence(posed: Posed, found: Found, test: Compared, held: Mapping[float, tuple[float, float]]) -> dict[str, Any]:
    reference, schema = posed.reference, posed.data.schema
    mean, sd = (getattr(found.flat, name)(0, dtype=np.float64) for name in ("mean", "std"))
    number = 1 / found.effective + 1 / reference.about["draws"]
    evidence = {
        "task": reference.task,
        "title": reference.title,
        "target": schema.target,
        "x": schema.unstandardise(torch.from_numpy(reference.x)).numpy(),
        "reference_mean": reference.centre,
        "reference_sd": reference.spread,
        "found_mean": mean,
        "found_sd": sd,
        "mean_floor": 2 * reference.spread * number**0.5,
        "sd_floor": 2 * reference.spread * (number / 2) ** 0.5,
        "z": test.z,
        "levels": np.array(list(held)),
        "coverage": np.array([share for share, _ in held.values()]),
        "coverage_error": np.array([error for _, error in held.values()]),
    }
    if reference.has_classes:
        evidence |= {"reference_probability": reference.mean, "found_probability": found.mean}
    return evidence
