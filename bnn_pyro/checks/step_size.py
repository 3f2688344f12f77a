"""The order at which the bias of SGHMC and SGLD falls with the step size, on linear regression.

    bias(η) = mean over directions i of Var(u_i) − 1,  u_i = √λ_i e_iᵀ(w − m)        order = d log bias / d log η

In a direction of posterior variance 1/λ the variance of draws is too large by the factor 1/(1 − ηλ/(4 − 2α)) where all
rows take part in every step: of the first order in η, for the semi-implicit form that is used (its momenta are then
Normal with the same factor). Three step sizes are run, h, h/2 and h/4, large enough for a bias that is seen; each is
held against the exact covariance at that step, from the recursion itself, and their slope against that of the exact
biases, which is a little above 1 at finite steps.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from bnn_pyro.checks.check import ALPHA, Finding, Outcome, worst
from bnn_pyro.checks.linear_regression import LinearGaussian, correlated
from bnn_pyro.checks.recursion import eta_of, largest_lr, sample, stationary_covariance
from bnn_pyro.checks.subject import Subject
from bnn_pyro.checks.z_tests import Estimate, judge, of_runs
from bnn_pyro.errors import UserError
from bnn_pyro.inference.method import Report
from bnn_pyro.inference.sghmc import SGHMC

__all__ = ["StepSize"]

#: Of the momentum's share in a step, ηλ/(4 − 2α) in the narrowest direction: the largest step, and the limit of what
#: may be asked for. 0.25 makes variances a third too large there.
LARGEST, LIMIT = 0.25, 0.2

#: A bias of the variances that need not be spoken of.
SMALL = 0.01

#: An order that is known no better than this is not known.
PRECISE = 0.3


@dataclass(frozen=True)
class StepSize:
    """Settings: chains, and how long each runs, in units of the time in which the slowest direction is forgotten.

    ``evidence``: lr (3,), bias, error (3,), relative bias of the variances as it was measured, mean over directions;
    exact (3,), what the recursion has at these step sizes; order, order_error, expected_order, of the fitted line;
    grid_lr, grid_exact (50,), the exact bias as a function of the step size; largest_lr, where it explodes;
    own_lr, own_bias, those of the method's settings. Biases are shares of the posterior variance.
    """

    title: ClassVar[str] = "Order of the step-size bias"
    idea: ClassVar[str] = (
        "On linear regression the covariance that SGHMC and SGLD sample is known exactly at every step size; measured "
        "at three of them, the bias must be that one, and fall in proportion to the step."
    )
    quick: ClassVar[dict[str, float]] = {"chains": 400, "times": 25.0}

    chains: int = 1000
    times: float = 400.0

    def refuses(self, subject: Subject) -> str:
        """See ``Check``."""
        if subject.limit != "posterior at step size 0":
            return f"{subject.inference} has no bias of the step size; take sghmc or sgld"
        return ""

    def run(self, subject: Subject, *, seed: int = 0, report: Report | None = None) -> Outcome:
        """See ``Check``."""
        begun, problem, own = time.perf_counter(), correlated(num=60, inputs=2), subject.method({})
        whole: dict[str, Any] = dict(batch_size=0, schedule="constant", temperature=1.0)
        whole |= {"resample_momentum": 0} if isinstance(own, SGHMC) else {}
        method, rows, precision = replace(own, **whole), len(problem.x), problem.precision
        top = LARGEST * largest_lr(method, precision, rows)
        rates = [top, top / 2, top / 4]
        runs, covariances, findings = [], [], []
        try:
            for i, lr in enumerate(rates):
                found = sample(method, problem, lr, chains=self.chains, times=self.times, seed=seed)
                runs.append(found.draws)
                exact = stationary_covariance(precision, eta_of(method, lr, rows), method.friction)
                covariances.append(exact)
                findings += _covariance(problem, found.draws, exact, lr)
                if report is not None:
                    report(i + 1, len(rates), {"lr": lr})
        except UserError as error:
            sentence = f"at lr {lr:.3g}, a fourth of the largest stable one or less, chains diverge: {error}"
            finding = Finding("step size, as lr", lr, level="bad")
            return self._outcome(subject, own, "bad", sentence, (*findings, finding), {}, begun)
        unit = [_unit(problem, draws) for draws in runs]  # (C,) each, mean of u² over draws and directions
        bias = np.array([u.mean() - 1 for u in unit])
        error = np.array([u.std(ddof=1) / np.sqrt(len(u)) for u in unit])
        exact = np.array([_excess(precision, c) for c in covariances])
        order, order_error = _order(rates, bias, error)
        expected, _ = _order(rates, exact, error * exact / bias)
        judged = judge(
            ["order of the bias in the step size"],
            Estimate(np.array([order]), np.array([order_error]), np.array([np.inf])),
            np.array([expected]),
        )
        findings = [*_corrected(findings), *judged]
        here = _own(method, precision, rows, own.lr)
        findings.append(Finding(f"excess variance at lr {own.lr:g}, by the recursion", here, level=_level(here)))
        grid = np.geomspace(min(rates[-1], own.lr) / 2, 0.9 * largest_lr(method, precision, rows), 50)
        evidence = {
            "lr": np.array(rates),
            "bias": bias,
            "error": error,
            "exact": exact,
            "order": order,
            "order_error": order_error,
            "expected_order": expected,
            "grid_lr": grid,
            "grid_exact": np.array([_own(method, precision, rows, lr) for lr in grid]),
            "largest_lr": largest_lr(method, precision, rows),
            "own_lr": own.lr,
            "own_bias": here,
        }
        level, sentence = _verdict(findings, order, order_error, own.lr, here)
        return self._outcome(subject, own, level, sentence, tuple(findings), evidence, begun)

    def _outcome(
        self, subject: Subject, own: Any, level: str, sentence: str, findings: tuple, evidence: dict, begun: float
    ) -> Outcome:
        return Outcome(
            check="step-size",
            level=level,
            sentence=sentence,
            settings=subject.settings(own) | {"check": vars(self)},
            findings=findings,
            evidence=evidence,
            figures={"step_order": evidence["order"]} if evidence else {},
            seconds=time.perf_counter() - begun,
        )


def _verdict(findings: list[Finding], order: float, error: float, lr: float, here: float) -> tuple[str, str]:
    level = worst(f.level for f in findings)
    wrong = [f for f in findings if f.level == "bad" and f.p is not None]
    measured = f"the bias falls as the step size to the power of {order:.2f} ± {error:.2f}"
    if wrong:
        w = max(wrong, key=lambda f: abs(f.found - f.expected) / f.error)
        sentence = f"the bias is not that of the step size: {w.about} is {w.found:.3g}, not {w.expected:.3g}"
    elif level == "bad":
        how = "explodes" if not np.isfinite(here) else f"makes variances {here:.0%} too large"
        sentence = f"lr {lr:g} is too large: on linear regression with standardised inputs it {how}"
    elif not error < PRECISE:
        level, sentence = "caution", f"too few draws to tell: {measured}"
    elif level == "caution":
        sentence = f"{measured}, as it should; at lr {lr:g} variances are {here:.1%} too large on linear regression"
    else:
        sentence = f"{measured}, as it should; at lr {lr:g} it is {here:.2%} of the variance on linear regression"
    return level, sentence


def _level(bias: float) -> str:
    return "good" if bias < SMALL else "caution" if bias < LIMIT else "bad"


def _own(method: Any, precision: Tensor, rows: int, lr: float) -> float:
    """Relative excess of the variances at this step size, mean over directions; infinite where it explodes."""
    if lr >= largest_lr(method, precision, rows):
        return float("inf")
    return _excess(precision, stationary_covariance(precision, eta_of(method, lr, rows), method.friction))


def _excess(precision: Tensor, covariance: Tensor) -> float:
    """tr(Λ Σ)/P − 1."""
    return (precision * covariance).sum().item() / len(precision) - 1


def _unit(problem: LinearGaussian, draws: Tensor) -> np.ndarray:
    """(w − m)ᵀ Λ (w − m) / P, mean over the draws of each chain, (C,)."""
    off = draws - problem.mean
    return (torch.einsum("cdi,ij,cdj->c", off, problem.precision, off) / draws[0].numel()).numpy()


def _covariance(problem: LinearGaussian, draws: Tensor, exact: Tensor, lr: float) -> list[Finding]:
    """Every mean, and every entry of the covariance, against the exact ones at this step, in standard deviations."""
    scale = exact.diagonal().sqrt()
    unit = (draws - problem.mean) / scale
    i, j = torch.triu_indices(len(scale), len(scale))
    products = torch.einsum("cdi,cdj->cij", unit, unit)[:, i, j] / unit.shape[1]
    expected = torch.cat([torch.zeros_like(scale), (exact / torch.outer(scale, scale))[i, j]])
    names = [f"mean of weight {k + 1}" for k in range(len(scale))]
    names += [f"covariance of weights {a + 1} and {b + 1}" for a, b in zip(i.tolist(), j.tolist(), strict=True)]
    values = torch.cat([unit.mean(1), products], 1).numpy()
    return list(judge([f"{name} at lr {lr:.3g}" for name in names], of_runs(values), expected.numpy()))


def _corrected(findings: list[Finding]) -> list[Finding]:
    """p-values of three runs, each corrected within itself, for all three and the order."""
    wider = [replace(f, p=min(1.0, 4 * f.p)) for f in findings]
    return [replace(f, level="bad" if f.p < ALPHA else "good") for f in wider]


def _order(rates: list[float], bias: np.ndarray, error: np.ndarray) -> tuple[float, float]:
    """(slope of log bias on log step, its standard error), by weighted least squares; NaN where a bias is negative."""
    if not (bias > 0).all():
        return float("nan"), float("inf")
    x, y, weight = np.log(rates), np.log(bias), (bias / error) ** 2
    x = x - (weight * x).sum() / weight.sum()
    information = (weight * x**2).sum()
    return float((weight * x * y).sum() / information), float(information**-0.5)
