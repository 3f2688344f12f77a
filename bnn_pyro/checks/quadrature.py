"""A method on posteriors of two weights, one skewed and one of two modes, against numerical integration.

The problems are those of ``small_problems``, the integrals those of ``grid``. What is expected depends on the claim:
the posterior itself; the best Normal of the family near one mode, found by maximising the exact ELBO; the Normal at the
mode; the mode. A stochastic-gradient sampler may be off by the bias that its step size has at the mode's curvature.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from bnn_pyro.checks.check import Finding, Outcome, worst
from bnn_pyro.checks.grid import Grid, best_normal, climb, curvature, normal_grid
from bnn_pyro.checks.problems import PROBLEMS, SmallProblem
from bnn_pyro.checks.quadrature_words import sentence
from bnn_pyro.checks.reduction import irreducible, reduced
from bnn_pyro.checks.subject import Subject
from bnn_pyro.checks.z_tests import Estimate, bound, judge, of_chains, of_independent, of_runs, z_scores
from bnn_pyro.fitting import fit
from bnn_pyro.inference import Method
from bnn_pyro.inference.log_joint import log_joints
from bnn_pyro.inference.method import Report
from bnn_pyro.parts.backbone import once
from bnn_pyro.parts.guides import MeanFieldNormal
from bnn_pyro.parts.joint import FullNormal, LowRankNormal
from bnn_pyro.parts.local_net import WeightGuide
from bnn_pyro.posterior import Posterior
from bnn_pyro.predictive import predict
from bnn_pyro.settings import plain

__all__ = ["Quadrature", "small_settings"]

#: In posterior standard deviations: how far off an optimiser may stop, and the Monte-Carlo error that tells nothing.
STOPS, BLIND = 0.03, 0.1
#: Draws of a fitted guide; new inputs at which predictions are compared; draws that are kept for the picture.
DRAWS, POINTS, SHOWN = 4000, 6, 1000
REFITTED = ("best of a family", "points")


@dataclass(frozen=True)
class Quadrature:
    """Settings of the check against numerical integration.

    fits    independent fits of a method that gives a guide or points
    effort  length of runs and trainings, in those of the quick budget
    """

    fits: int = 24
    effort: float = 4.0

    title: ClassVar[str] = "Numerical integration"
    idea: ClassVar[str] = (
        "Logistic regression with two weights, and one tanh unit, whose posterior has two modes that differ in sign: "
        "means, variances, predictions and the masses of the modes are held against integrals over a grid."
    )
    quick: ClassVar[Mapping[str, Any]] = {"fits": 8, "effort": 1.0}

    def refuses(self, subject: Subject) -> str:
        """See ``Check``."""
        return irreducible(subject)

    def run(self, subject: Subject, *, seed: int = 0, report: Report | None = None) -> Outcome:
        """See ``Check``.

        ``evidence``, for each problem P in ``problems`` (names): P_names of its two weights; P_axis_1, P_axis_2 (n,)
        and P_density (n, n), the exact posterior; P_draws (S, 2) of the method; P_labels, P_found, P_error, P_low,
        P_high (what is claimed) and P_expected (what the posterior has), (M,), in units of the posterior's standard
        deviations, P_z (M,) and P_bound, by how many standard errors each is off, and the bound of an alarm; P_x,
        P_exact_mean and P_found_mean, E[y | x] at new inputs (B,).
        """
        start = time.perf_counter()
        findings: list[Finding] = []
        evidence: dict[str, Any] = {"problems": []}
        apart: list[float] = []
        chosen = [p for p, made in PROBLEMS.items() if self._suits(subject, made)]
        for k, name in enumerate(chosen):
            made = PROBLEMS[name]
            method = subject.method(small_settings(subject.inference, name, self.effort))
            made = replace(made, temperature=getattr(method, "temperature", 1.0))
            posteriors = []
            fits = self.fits if subject.limit in REFITTED else 1
            entry = reduced(subject.entry, **made.settings)
            for i in range(fits):
                posteriors.append(fit(entry, made.data, method, seed=seed + i, device="cpu", progress=False))
                if report is not None:
                    report(k * fits + i + 1, len(chosen) * fits, {"problem": made.title})
            judged, shown = self._problem(subject, made, method, posteriors)
            findings += judged
            evidence["problems"].append(name)
            evidence |= {f"{name}_{what}": value for what, value in shown.items()}
            scale = 1.0 if made.noise is None else made.noise
            apart.append(float(np.abs(shown["found_mean"] - shown["exact_mean"]).mean() / scale))
        level = worst(f.level for f in findings)
        return Outcome(
            "quadrature",
            level,
            sentence(findings, [PROBLEMS[name] for name in chosen], subject.limit, apart),
            {**subject.settings(method), "variant": plain(entry), "check": plain(self)},
            tuple(findings),
            evidence,
            {"quadrature": max(apart)},
            time.perf_counter() - start,
        )

    def _suits(self, subject: Subject, made: SmallProblem) -> bool:
        return not irreducible(subject, made.settings["hidden"]) and not (
            subject.inference == "laplace" and made.settings["hidden"]
        )

    def _problem(
        self, subject: Subject, made: SmallProblem, method: Method, posteriors: list[Posterior]
    ) -> tuple[list[Finding], dict[str, Any]]:
        """Findings about one problem, and its evidence."""
        exact = Grid.of(made.log_joint, 8 * made.prior_scale)
        x = torch.linspace(-1.5, 1.5, POINTS, dtype=torch.float64).float()
        folded = made.two_modes and subject.limit in ("best of a family", "normal at the mode", "points")
        claimed = _claimed(subject, made, method, exact, posteriors[0])
        labels = [f"{label} ({made.title})" for label in _labels(made, folded)]
        # Everything in standard deviations of the posterior.
        at_nodes = _quantities(made, exact.points, made.mean(exact.points, x.double()), folded)
        centre = exact.expect(at_nodes)
        unit = (exact.expect(at_nodes.square()) - centre.square()).sqrt()
        expected = (centre / unit).numpy()
        drawn = [self._drawn(p, x, k) for k, p in enumerate(posteriors)]
        if folded:
            drawn = [(w * torch.sign(w[..., 1].mean(1, keepdim=True))[..., None], f) for w, f in drawn]
        values = torch.cat([_quantities(made, w, f, folded) / unit for w, f in drawn]).numpy()
        if subject.limit == "posterior":
            found = of_chains(values)
        elif subject.limit == "normal at the mode":
            found = of_independent(values[0])
        else:
            found = of_runs(values.mean(1))
        if claimed is None:
            findings = []
            low, tolerance = np.full(len(expected), np.nan), 0.0
        else:
            mean = made.mean(claimed.points, x.double())
            low = (claimed.expect(_quantities(made, claimed.points, mean, folded)) / unit).numpy()
            tolerance = STOPS if subject.limit in REFITTED else 0.0
            if subject.limit == "posterior at step size 0":
                tolerance = _bias(method, made, exact) * np.maximum(np.abs(expected), 1.0)
            findings = list(judge(labels, found, low, tolerance=tolerance))
        if subject.limit != "posterior":
            beside = [f"{label}, beside the posterior's" for label in labels]
            off = judge(beside, found, expected, tolerance=STOPS, level="caution")
            findings += [f for f in off if f.level == "caution"]
        noisy = float(found.error.max())
        if noisy > BLIND:
            about = f"Monte-Carlo error ({made.title}, posterior sd): too few independent draws to tell"
            findings.append(Finding(about, noisy, BLIND, level="caution"))
        findings.append(_own_density(made, posteriors[0], method))
        return findings, _shown(made, exact, x, drawn, found, low, expected, labels, unit) | {
            "z": z_scores(found, low, tolerance=tolerance),
            "bound": bound(found),
        }

    def _drawn(self, posterior: Posterior, x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Weights (C, D, 2) and the predictions' means at x (C, D, B), float64."""
        chains = None if posterior.chains is None else next(iter(posterior.chains.values())).shape[:2]
        lead = (1, DRAWS) if chains is None else tuple(chains)
        sites = posterior.draw(lead[0] * lead[1], seed=seed)
        w = torch.cat([sites[site].double().flatten(1) for site in posterior.model.initial], 1)
        prediction = predict(posterior, x[:, None], num_draws=len(w), seed=seed)
        f = prediction.probs[..., 1] if prediction.has_classes else prediction.locs
        return w.unflatten(0, lead), f.double().unflatten(0, lead)


def small_settings(name: str, problem: str, effort: float) -> dict[str, Any]:
    """What the check sets of each method; the user's settings go above."""
    sign = problem == "sign"
    many = lambda num: max(1, round(num * effort))  # noqa: E731
    optimiser = {"epochs": many(400), "lr": 0.05, "final_lr": 0.0, "batch_size": 0}
    chains = {"draws": many(8000 if sign else 1000), "warmup": 500, "chains": 4, "cores": 1}
    stochastic = {"chains": 128, "friction": 0.1, "lr": 0.02 if sign else 0.1, "jitter": 1.0}
    slow = {"chains": 128, "lr": 0.15 if sign else 0.5, "jitter": 1.0}
    return {
        "svi": optimiser,
        "map": optimiser,
        "mle": {**optimiser, "epochs": many(1200), "lr": 0.2},  # without a prior, the way to the maximum is long
        "ensemble": {**optimiser, "members": 2},
        "nuts": chains,
        "hmc": chains,
        "chees": {"chains": 64, "superchains": 16, "draws": many(1500 if sign else 200), "warmup": 200},
        "sghmc": {**stochastic, "epochs": many(6000 if sign else 2000), "burn_in": 2000 if sign else 500},
        "sgld": {**slow, "epochs": many(6000 if sign else 3000), "burn_in": 2000 if sign else 1000},
    }.get(name, {})


def _claimed(subject: Subject, made: SmallProblem, method: Method, exact: Grid, posterior: Posterior) -> Grid | None:
    """What the draws should be spread like; None where that is not known."""
    if subject.limit.startswith("posterior"):
        return exact
    log_density = made.log_joint
    if getattr(method, "prior_weight", 1.0) == 0:
        log_density = made.log_likelihood
    start = exact.mode * (torch.sign(exact.mode[1]) if made.two_modes else 1.0)
    mode = climb(log_density, start)
    if subject.limit == "points":
        return Grid((mode[:1], mode[1:]), mode[None], torch.ones(1, dtype=torch.float64), 0.0)
    if subject.limit == "normal at the mode":
        precision = curvature(log_density, mode)
        structure = getattr(method, "structure", "full")
        if structure == "kron":
            return None
        precision = torch.diag(precision.diagonal()) if structure == "diag" else precision
        return normal_grid(mode, torch.linalg.cholesky(torch.linalg.inv(precision)))
    if not isinstance(posterior.guide, MeanFieldNormal | WeightGuide | FullNormal | LowRankNormal):
        return None
    correlated = isinstance(posterior.guide, FullNormal | LowRankNormal)
    return normal_grid(*best_normal(log_density, mode, correlated)[:2])


def _bias(method: Method, made: SmallProblem, exact: Grid) -> float:
    """Relative inflation of a variance at the mode by a finite step, full batch: ηλ/(4 − 2α) for the largest λ."""
    eta = method.eta_share * method.lr / len(made.x)
    largest = torch.linalg.eigvalsh(curvature(made.log_joint, climb(made.log_joint, exact.mode))).max().item()
    return eta * largest / (4 - 2 * method.friction)


def _labels(made: SmallProblem, folded: bool) -> list[str]:
    a, b = made.names
    what = "P(y = 1)" if made.noise is None else "E[y]"
    modes = [f"mass of the mode with {b} > 0"] if made.two_modes and not folded else []
    return [
        f"mean of {a}", f"mean of {b}", f"mean of {a}²", f"mean of {b}²", f"mean of {a}·{b}",
        *(f"{what} at input {k + 1}" for k in range(POINTS)), *modes,
    ]  # fmt: skip


def _quantities(made: SmallProblem, w: Tensor, f: Tensor, folded: bool) -> Tensor:
    """(…, M) of weights (…, 2) and predictions (…, B), in the order of the labels; folded: with the sign of v taken."""
    w = w * torch.where(w[..., 1:] < 0, -1.0, 1.0) if folded and w.dim() == 2 else w
    parts = [w, w.square(), w.prod(-1, keepdim=True), f]
    return torch.cat([*parts, (w[..., 1:] > 0).double()] if made.two_modes and not folded else parts, -1)


def _own_density(made: SmallProblem, posterior: Posterior, method: Method) -> Finding:
    """The log joint of the variant's own model beside the formula, at weights from the prior."""
    w = torch.linspace(-2, 2, 10, dtype=torch.float64)[:, None] * torch.tensor([[1.0, -0.7]]) * made.prior_scale
    model, x = once(posterior.model, made.data.x_train)
    shapes = {site: value.shape for site, value in posterior.model.initial.items()}
    pieces = w.float().split([shape.numel() for shape in shapes.values()], 1)
    sites = {site: piece.reshape(-1, *shape) for (site, shape), piece in zip(shapes.items(), pieces, strict=True)}
    prior, likelihood = log_joints(model, sites, x, made.data.y_train, 1.0 / made.temperature)
    off = ((prior + likelihood).double() - made.log_joint(w.float().double())).abs().max().item()
    level = "bad" if not off < 1e-3 else "good"
    return Finding(
        f"the model's log joint less the formula's, at most (nats, {made.title})", off, 0.0, 0.0, level=level
    )


def _shown(
    made: SmallProblem,
    exact: Grid,
    x: Tensor,
    drawn: list[tuple[Tensor, Tensor]],
    found: Estimate,
    low: np.ndarray,
    expected: np.ndarray,
    labels: list[str],
    unit: Tensor,
) -> dict[str, Any]:
    w = torch.cat([w.flatten(0, 1) for w, _ in drawn])
    keep = torch.linspace(0, len(w) - 1, min(SHOWN, len(w))).round().long()
    step = max(1, len(exact.axes[0]) // 200)
    part = slice(5, 5 + POINTS)
    return {
        "names": list(made.names),
        "axis_1": exact.axes[0][::step].numpy(),
        "axis_2": exact.axes[1][::step].numpy(),
        "density": exact.density[::step, ::step].numpy(),
        "draws": w[keep].numpy(),
        "labels": labels,
        "found": found.mean,
        "error": found.error,
        "low": low,
        "high": low,
        "expected": expected,
        "x": x.numpy(),
        "exact_mean": expected[part] * unit[part].numpy(),
        "found_mean": found.mean[part] * unit[part].numpy(),
    }
