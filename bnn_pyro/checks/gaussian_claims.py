"""What a method claims of linear regression: the Normal that its draws should have, or bounds to its covariance."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.linalg import solve_discrete_lyapunov
from torch import Tensor

from bnn_pyro.checks.check import Finding
from bnn_pyro.checks.linear_regression import LinearGaussian
from bnn_pyro.checks.subject import Subject
from bnn_pyro.checks.z_tests import judge, of_runs
from bnn_pyro.inference import Method
from bnn_pyro.inference.elbo import ELBO
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.guides import MeanFieldNormal
from bnn_pyro.parts.joint import FullNormal, LowRankNormal
from bnn_pyro.parts.local_net import WeightGuide
from bnn_pyro.posterior import Posterior
from bnn_pyro.zoo import Entry

__all__ = ["Claim", "claim_of", "evidence_findings", "expected_of", "quantities", "stationary", "which_are_means"]

#: Draws that estimate the ELBO of a fitted q.
PARTICLES = 400


@dataclass(frozen=True)
class Claim:
    """name: in words.   low, high: (P, P) covariances between which every variance is right; None: nothing is known.

    shift: (P,) of the mean from the posterior's, 0 for all but maximum likelihood.   refitted: the runs are several
    approximations, each with a spread of its own.
    """

    name: str
    low: Tensor | None
    high: Tensor | None
    shift: Tensor | None = None
    refitted: bool = False

    @property
    def known(self) -> Tensor | None:
        """The covariance, where it is known."""
        return self.low


def claim_of(subject: Subject, entry: Entry, method: Method, exact: LinearGaussian, posterior: Posterior) -> Claim:
    """What is claimed of the posterior of ``exact``, which has the method's temperature already."""
    full = torch.linalg.inv(exact.precision)
    diagonal = torch.diag(exact.mean_field_scale.square())
    if subject.limit == "posterior":
        return Claim("the exact posterior", full, full)
    if subject.limit == "normal at the mode":
        kept = diagonal if getattr(method, "structure", "full") == "diag" else full
        return Claim(f"the Normal at the mode ({method.structure})", kept, kept)
    if subject.limit == "points":
        zero = torch.zeros_like(full)
        least = getattr(method, "prior_weight", 1.0) == 0
        name = "the most likely point (least squares)" if least else "the most probable point (ridge regression)"
        return Claim(name, zero, zero, _least_squares(exact) - exact.mean if least else None, True)
    if subject.limit == "posterior at step size 0":
        low, high = stationary(method, exact)
        return Claim("the posterior, but for the bias of a finite step", low, high)
    guide = posterior.guide
    if isinstance(guide, MeanFieldNormal | WeightGuide):
        return Claim("the best mean-field Normal", diagonal, diagonal, refitted=True)
    if isinstance(guide, FullNormal) or (isinstance(guide, LowRankNormal) and guide.factor.shape[1] >= len(full) - 1):
        return Claim("the best Normal, which is the posterior", full, full, refitted=True)
    return Claim(f"the best {type(guide).__name__}", None, None, refitted=True)


def _least_squares(exact: LinearGaussian) -> Tensor:
    a = exact.y_scale * exact.design(exact.x)
    return torch.linalg.lstsq(a, (exact.y - exact.y_shift)[:, None]).solution[:, 0]


def stationary(method: Method, exact: LinearGaussian) -> tuple[Tensor | None, Tensor | None]:
    """Covariances of the weights under stochastic-gradient HMC at its finite step, from discrete Lyapunov equations.

    (Σ, Σ) for all rows in every step; for mini-batches (Σ without their noise, Σ with that of independent batches):
    batches that take every row once an epoch lie between. (None, None) where neither is known.
    """
    if method.schedule != "constant":
        return None, None
    num, size = len(exact.x), method.batch_size
    eta, alpha = method.eta_share * method.lr / num, method.friction
    precision, one = exact.precision.numpy(), np.eye(len(exact.mean))
    kick = np.hstack([-eta * precision, (1 - alpha) * one])
    move = np.hstack([one, 0 * one]) + kick
    both = np.vstack([one, one])

    def covariance(extra: Any) -> Tensor:
        solved = solve_discrete_lyapunov(np.vstack([move, kick]), both @ (2 * alpha * eta * one + extra) @ both.T)
        return torch.from_numpy(solved[: len(one), : len(one)])

    low = covariance(0.0)
    if not 0 < size < num:
        return low, low
    if method.gradient_noise == "subtracted":
        return None, None
    # Gradients of rows, a r / σ², at weights of the posterior: E r² = (r at the mean)² + its variance.
    a = exact.y_scale * exact.design(exact.x)
    square = (exact.y - exact.y_shift - a @ exact.mean).square() + ((a @ torch.linalg.inv(exact.precision)) * a).sum(1)
    rows = (a.T * square) @ a / exact.noise**4 / num
    blocks = math.ceil(num / size)
    noise = eta**2 * num**2 / (num // blocks) * (1 - (num // blocks) / num) * rows * num / (num - 1)
    return low, covariance(noise.numpy())


# -- quantities ------------------------------------------------------------------------------------------------------
def quantities(weights: int, points: int, run: str = "") -> list[str]:
    """What is compared: P means, P(P + 1)/2 products, B means of predictions and B of their squares."""
    pairs = zip(*torch.triu_indices(weights, weights).tolist(), strict=True)
    return [
        *(f"mean of weight {i + 1}{run} (posterior sd)" for i in range(weights)),
        *(f"variance of weight {i + 1}{run} (posterior variance)" if i == j else
          f"covariance of weights {i + 1} and {j + 1}{run} (posterior sd)" for i, j in pairs),
        *(f"mean prediction at input {b + 1}{run} (posterior sd)" for b in range(points)),
        *(f"variance of the prediction at input {b + 1}{run} (posterior variance)" for b in range(points)),
    ]  # fmt: skip


def which_are_means(weights: int, points: int) -> list[int]:
    """Which of these are means."""
    first = weights + weights * (weights + 1) // 2
    return [*range(weights), *range(first, first + points)]


def expected_of(covariance: Tensor | None, exact: LinearGaussian, x: Tensor, shift: Tensor | None = None) -> np.ndarray:
    """All of these for Normal(m + shift, covariance), in standard units of the exact posterior; NaN where unknown."""
    posterior = torch.linalg.inv(exact.precision)
    sd, a = posterior.diagonal().sqrt(), exact.design(x)
    covariance = torch.full_like(posterior, math.nan) if covariance is None else covariance
    shift = torch.zeros_like(sd) if shift is None else shift
    second = covariance + torch.outer(shift, shift)
    upper = torch.triu_indices(len(sd), len(sd))
    f_variance = ((a @ posterior) * a).sum(1)
    parts = [
        shift / sd,
        (second / torch.outer(sd, sd))[upper[0], upper[1]],
        a @ shift / f_variance.sqrt(),
        ((a @ second) * a).sum(1) / f_variance,
    ]
    return torch.cat(parts).numpy()


# -- the evidence ----------------------------------------------------------------------------------------------------
def evidence_findings(problem: LinearGaussian, posteriors: list[Posterior], method: Method) -> list[Finding]:
    """The log evidence that a method tells, and its ELBO, which must be the evidence less KL(q ‖ posterior)."""
    if getattr(method, "temperature", 1.0) != 1.0:
        return []
    told = posteriors[0].stats.get("log_evidence")
    if told is not None:
        diagonal = getattr(method, "structure", "full") == "diag"
        exact = problem.log_evidence - (problem.gap if diagonal else 0.0)
        off = abs(told.item() - exact) > 1e-5 * abs(exact)
        return [Finding("log evidence (nats)", told.item(), exact, 0.0, level="bad" if off else "good")]
    if posteriors[0].guide is None:
        return []
    pairs = [_elbo(problem, posterior, seed) for seed, posterior in enumerate(posteriors)]
    differences = of_runs(np.array([[found - exact] for found, exact in pairs]))
    found, exact = np.mean(pairs, axis=0)
    about = "ELBO of the fitted q (nats), beside the evidence less KL(q ‖ posterior)"
    (judged,) = judge([about], differences, np.zeros(1))
    return [replace(judged, found=float(found), expected=float(exact))]


def _elbo(problem: LinearGaussian, posterior: Posterior, seed: int) -> tuple[float, float]:
    """(as the library estimates it, log p(y) − KL(q ‖ posterior) by the moments of q), nats."""
    x, y = problem.data.x_train, problem.data.y_train
    with isolated(seed), torch.no_grad():
        one = [ELBO().parts(posterior.model, posterior.guide, x, y)[0] for _ in range(PARTICLES)]
    drawn = posterior.draw(20 * PARTICLES, seed=seed)
    w = torch.cat([drawn[site].double().flatten(1) for site in posterior.model.initial], 1)
    off, covariance = w.mean(0) - problem.mean, w.T.cov()
    precision = problem.precision
    kl = 0.5 * (
        (precision @ covariance).trace() + off @ precision @ off - len(off) - torch.logdet(precision @ covariance)
    )
    return torch.stack(one).double().mean().item(), problem.log_evidence - kl.item()
