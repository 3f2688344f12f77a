"""``predict`` on the draws of a method, against the mixture that the same draws make, worked out by hand.

    p(y | x, D) = 1/S Σ_s p(y | x, w_s):   log p is the log of the mean, never the mean of the logs

Linear regression, logistic regression and three classes. The draws may be those of any method: what is compared are
two ways to use them, so that there is no Monte-Carlo error between them. The density that an exact sampler's draws make
is held against the posterior predictive itself too: in closed form, or by numerical integration.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import logsumexp, softmax
from scipy.stats import norm
from torch import Tensor

from bnn_pyro.checks.check import Finding, Outcome, worst
from bnn_pyro.checks.grid import Grid
from bnn_pyro.checks.known_answers import linear_settings
from bnn_pyro.checks.linear_regression import LinearGaussian, correlated, dataset
from bnn_pyro.checks.problems import PROBLEMS
from bnn_pyro.checks.quadrature import small_settings
from bnn_pyro.checks.reduction import irreducible, reduced
from bnn_pyro.checks.subject import Subject
from bnn_pyro.checks.z_tests import judge, of_chains
from bnn_pyro.datasets.dataset import Dataset, Schema
from bnn_pyro.fitting import fit
from bnn_pyro.inference.method import Report
from bnn_pyro.posterior import Posterior
from bnn_pyro.predictive import Prediction, predict
from bnn_pyro.settings import plain

__all__ = ["PredictiveCheck"]

#: What float32 may leave of a number near 1 after sums over the draws.
ROUNDING = 2e-4
QUANTILES = (0.05, 0.5, 0.95)


@dataclass(frozen=True)
class PredictiveCheck:
    """Settings of the check of predictions.

    rows    of linear regression and of three classes
    draws   S of every prediction
    points  new inputs B
    effort  length of runs and trainings, in those of the quick budget of the other checks
    """

    rows: int = 40
    draws: int = 2000
    points: int = 12
    effort: float = 1.0

    title: ClassVar[str] = "Predictions"
    idea: ClassVar[str] = (
        "Mean probabilities, log densities, entropies and quantiles of a prediction are worked out again from the same "
        "draws by hand; an exact sampler's are held against the exact posterior predictive."
    )
    quick: ClassVar[Mapping[str, Any]] = {"draws": 500, "effort": 0.4}

    def refuses(self, subject: Subject) -> str:
        """See ``Check``."""
        return irreducible(subject)

    def run(self, subject: Subject, *, seed: int = 0, report: Report | None = None) -> Outcome:
        """See ``Check``.

        ``evidence``: labels (M,) and difference (M,), the largest one of each quantity over the inputs, from the
        mixture of the same draws; of targets at the inputs of linear and of logistic regression, log densities in
        nats: log_density of ``predict``, log_of_mean by hand, mean_of_log, which a wrong average would give, and exact
        (the posterior's), each (2 B,).
        """
        start = time.perf_counter()
        findings: list[Finding] = []
        rows: list[tuple[str, Any, np.ndarray]] = []
        kept: dict[str, list[np.ndarray]] = {}
        problem = _regression(self.rows)
        logistic = PROBLEMS["logistic"]
        tasks = {
            "linear regression": (problem.data, {"noise": problem.noise, "prior": f"normal:{problem.prior_scale}"}),
            "logistic regression": (logistic.data, {"prior": f"normal:{logistic.prior_scale}"}),
            "three classes": (_three(self.rows), {"prior": "normal:2.0"}),
        }
        for k, (name, (data, settings)) in enumerate(tasks.items()):
            regression = not data.schema.has_classes
            below = (linear_settings(subject.inference, self.effort, self.rows) if regression
                     else small_settings(subject.inference, "logistic", self.effort))  # fmt: skip
            method = subject.method(below)
            entry = reduced(subject.entry, hidden=(), bias=True, **settings)
            posterior = fit(entry, data, method, seed=seed, device="cpu", progress=False)
            x, y = self._inputs(data, problem)
            prediction = predict(posterior, x, num_draws=self.draws, seed=seed)
            w = _weights(posterior, self.draws, seed)
            found, shown = (_regression_rows if regression else _class_rows)(prediction, w, x, y, problem.noise)
            rows += [(f"{what} ({name})", *pair) for what, *pair in found]
            tempered = getattr(method, "temperature", 1.0) != 1.0
            if name != "three classes":
                exact = _by_formula(problem, x, y) if regression else _by_integration(x, y)
                if subject.limit == "posterior" and not tempered:
                    findings += _against_exact(posterior, x, y, exact, name, seed)
                for what, values in {**shown, "exact": exact}.items():
                    kept.setdefault(what, []).append(values)
            if report is not None:
                report(k + 1, len(tasks), {"task": name})
        for what, found, by_hand in rows:
            off = np.abs(np.asarray(found, dtype=float) - by_hand)
            at = int(np.argmax(off))
            level = "bad" if not off.max() <= ROUNDING * max(1.0, float(np.abs(by_hand).max())) else "good"
            findings.append(Finding(what, float(np.ravel(found)[at]), float(np.ravel(by_hand)[at]), 0.0, level=level))
        densities = {what: np.concatenate(values) for what, values in kept.items()}
        loss = _loss(kept["exact"][1], kept["log_density"][1])
        level = worst(f.level for f in findings)
        return Outcome(
            "predictive",
            level,
            _sentence(findings, loss, subject.limit),
            {**subject.settings(method), "variant": plain(entry), "check": plain(self)},
            tuple(findings),
            {
                "labels": [what for what, *_ in rows],
                "difference": np.array([np.abs(np.asarray(a, dtype=float) - b).max() for _, a, b in rows]),
                **densities,
            },
            {"predictive_loss": loss},
            time.perf_counter() - start,
        )

    def _inputs(self, data: Dataset, problem: LinearGaussian) -> tuple[Tensor, Tensor]:
        """New inputs (B, D), and targets (B,): every class in turn, or from −2 to 2 predictive standard deviations."""
        size = data.schema.input_shape[0]
        x = torch.linspace(-2, 2, self.points)[:, None] * torch.tensor([1.0, -0.6, 0.3, 0.8][:size])
        if data.schema.has_classes:
            return x, torch.arange(self.points) % len(data.schema.classes)
        mean, sd = _predictive(problem, x)
        return x, (mean + torch.linspace(-2, 2, self.points) * sd).float()


def _predictive(problem: LinearGaussian, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of y at x (B, D): Normal(a·m, σ² + a Λ⁻¹ a)."""
    a = problem.design(x)
    return a @ problem.mean, (problem.noise**2 + ((a @ torch.linalg.inv(problem.precision)) * a).sum(1)).sqrt()


def _regression(rows: int) -> LinearGaussian:
    made = correlated(rows, 2, noise=0.7)
    x = (made.x / made.x.square().mean().sqrt()).float().double()
    return LinearGaussian(x, made.y, noise=0.7)


def _three(rows: int) -> Dataset:
    """Three classes that overlap, of two inputs."""
    x = correlated(rows, 2, seed=3).x
    x = (x / x.square().mean().sqrt()).float()
    score = torch.stack([x[:, 0], x[:, 1] - 0.5, -x[:, 0] - 0.3 * x[:, 1]], 1)
    y = (score + torch.sin(torch.arange(3 * rows) * 2.4).view(rows, 3)).argmax(1)
    return dataset(x, y, Schema("classification", (2,), classes=("a", "b", "c")))


def _weights(posterior: Posterior, num: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights (S, K, D) and biases (S, K) of the very draws that ``predict`` takes, float64."""
    drawn = posterior.draw(num, seed=seed)
    return drawn["layers.0.weight"].double().numpy(), drawn["layers.0.bias"].double().numpy()


def _regression_rows(
    p: Prediction, w: tuple[np.ndarray, np.ndarray], x: Tensor, y: Tensor, noise: float
) -> tuple[list[tuple[str, Any, np.ndarray]], dict[str, np.ndarray]]:
    f = np.einsum("skd,bd->sb", w[0], x.double().numpy()) + w[1]
    target = y.double().numpy()
    terms = norm.logpdf(target, f, noise)
    log = logsumexp(terms, 0) - math.log(len(f))

    def quantile(level: float, column: np.ndarray) -> float:
        ends = column.min() - 9 * noise, column.max() + 9 * noise
        return brentq(lambda t: norm.cdf(t, column, noise).mean() - level, *ends, xtol=1e-10)

    rows = [
        ("predictive mean", p.mean.numpy(), f.mean(0)),
        ("predictive variance", p.total.numpy(), noise**2 + f.var(0)),
        ("variance between draws", p.epistemic.numpy(), f.var(0)),
        ("log predictive density (nats)", p.log_prob(y).numpy(), log),
        ("P(y ≤ t)", p.cdf(y).numpy(), norm.cdf(target, f, noise).mean(0)),
        *((f"{100 * q:g} % quantile", p.quantile(q)[0].numpy(), np.array([quantile(q, c) for c in f.T]))
          for q in QUANTILES),
    ]  # fmt: skip
    return rows, {"log_density": p.log_prob(y).numpy(), "log_of_mean": log, "mean_of_log": terms.mean(0)}


def _class_rows(
    p: Prediction, w: tuple[np.ndarray, np.ndarray], x: Tensor, y: Tensor, noise: float
) -> tuple[list[tuple[str, Any, np.ndarray]], dict[str, np.ndarray]]:
    f = np.einsum("skd,bd->sbk", w[0], x.double().numpy()) + w[1][:, None]
    probs = softmax(np.concatenate([np.zeros_like(f), f], -1) if f.shape[-1] == 1 else f, -1)  # (S, B, K)
    mean = probs.mean(0)
    terms = np.log(probs[:, np.arange(len(y)), y.numpy()])
    log = logsumexp(terms, 0) - math.log(len(f))
    total, aleatoric = -(mean * np.log(mean)).sum(-1), -(probs * np.log(probs)).sum(-1).mean(0)
    rows = [
        ("mean probabilities", p.mean.numpy().ravel(), mean.ravel()),
        ("log predictive probability (nats)", p.log_prob(y).numpy(), log),
        ("entropy of the mean (nats)", p.total.numpy(), total),
        ("mean entropy (nats)", p.aleatoric.numpy(), aleatoric),
        ("mutual information (nats)", p.epistemic.numpy(), total - aleatoric),
    ]
    return rows, {"log_density": p.log_prob(y).numpy(), "log_of_mean": log, "mean_of_log": terms.mean(0)}


def _by_formula(problem: LinearGaussian, x: Tensor, y: Tensor) -> np.ndarray:
    """log p(y | x, D) of linear regression, nats (B,)."""
    mean, sd = _predictive(problem, x)
    return norm.logpdf(y.double().numpy(), mean.numpy(), sd.numpy())


def _by_integration(x: Tensor, y: Tensor) -> np.ndarray:
    """log P(y | x, D) of the logistic problem, nats (B,)."""
    made = PROBLEMS["logistic"]
    grid = Grid.of(made.log_joint, 8 * made.prior_scale)
    p = grid.expect(made.mean(grid.points, x[:, 0].double()))
    return torch.where(y == 1, p, 1 - p).log().numpy()


def _loss(exact: np.ndarray, found: np.ndarray) -> float:
    """KL of the exact probabilities from those found, each given as the log of that of one class; nats an input."""
    p, q = np.exp(exact), np.exp(found.astype(float))
    return float((p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))).mean())


def _against_exact(
    posterior: Posterior, x: Tensor, y: Tensor, exact: np.ndarray, name: str, seed: int
) -> tuple[Finding, ...]:
    """The density of every draw has the exact predictive density for its mean."""
    chains = next(iter(posterior.chains.values())).shape[:2]
    prediction = predict(posterior, x, num_draws=chains.numel(), seed=seed)
    log = prediction.log_prob(y).double().numpy()
    each = prediction.mixture.log_probs(y).double().numpy()
    relative = np.exp(each - exact).reshape(*chains, -1)
    found = of_chains(relative)
    found.mean[:] = np.exp(log - exact)
    labels = [f"predictive density at input {b + 1}, as a share of the exact one ({name})" for b in range(len(y))]
    return judge(labels, found, np.ones(len(y)))


def _sentence(findings: list[Finding], loss: float, limit: str) -> str:
    bad = [f for f in findings if f.level == "bad"]
    if bad:
        first = bad[0]
        return (
            f"Predictions are not those of the mixture of the draws: {len(bad)} of {len(findings)} quantities are off, "
            f"such as the {first.about}: {first.found:.4g} where {first.expected:.4g} is right."
        )
    said = (
        f"Predictions are the mixture of their draws: {len(findings)} probabilities, densities, entropies and "
        "quantiles are those worked out by hand."
    )
    if limit == "posterior":
        return said + " They agree with the exact posterior predictive within Monte-Carlo error."
    if limit == "points":
        return said + f" One point instead of a posterior costs {loss:.3f} nats a label in logistic regression."
    beside = f" Against the exact posterior predictive they lose {loss:.3f} nats a label in logistic regression."
    return said + beside
