"""Predictions of ``predict``, against those computed by separate formulas from the same draws.

    p(y | x, D) = 1/S Σ_s p(y | x, w_s):   log p is the log of the mean, never the mean of the logs

The problems are linear regression, logistic regression and three classes. Between two predictions from the same draws
there is no Monte-Carlo error. The exact posterior predictive is known in closed form, or by numerical integration.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import logsumexp, softmax
from scipy.stats import norm
from torch import Tensor

from bnn_pyro.checks.check import Check, Estimate, Finding, Outcome, Subject, close, concluded, judge
from bnn_pyro.checks.known_answers import problem_method
from bnn_pyro.checks.problems import NOISE, TWO_WEIGHTS, Problem, linear_regression, softmax_regression
from bnn_pyro.checks.user_module import few_rows, fixed_noise, plain_outputs
from bnn_pyro.fitting import fit
from bnn_pyro.predictive import Prediction, predict
from bnn_pyro.progress import Report

#: Number of new inputs B of every problem; number of rows for a user's module.
POINTS, ROWS = 12, 60
#: Settings for a user's module, whose fit need not be good, as only predictions from the same draws are compared.
SHORT = {"warmup": 20, "max_tree_depth": 4}
#: Relative tolerance for sums over draws in float32.
ROUNDING = 2e-4
QUANTILES = (0.05, 0.5, 0.95)

Rows = dict[str, tuple[Tensor, np.ndarray]]  # quantity -> (by ``predict``, by the formula)


@dataclass(frozen=True)
class PredictiveCheck(Check):
    """Mean probabilities, log densities, entropies and quantiles of a prediction are compared with separate formulas
    for the same draws; those of an exact sampler also with the exact posterior predictive.

    draws   number of draws S of every prediction
    effort  length of runs and trainings relative to the quick budget of the other checks
    """

    draws: int = 2000
    effort: float = 1.0

    title: ClassVar[str] = "Predictions"
    quick: ClassVar[Mapping[str, Any]] = {"draws": 500, "effort": 0.4}

    def _refuses(self, subject: Subject) -> str:
        if not subject.own_module or subject.data.schema.has_classes:
            return "" if subject.own_module else subject.irreducible()
        normal = subject.entry.likelihood in (None, "normal") and subject.entry.noise != "heteroscedastic"
        one = normal and subject.data.schema.task == "regression"
        return "" if one else "the formulas are for a single target with Normal noise of constant width"

    def _run(self, subject: Subject, seed: int, report: Report) -> Outcome:
        findings: list[Finding] = []
        labels, shares, lost = [], [], 0.0
        problems = (linear_regression(40, 2, 1), TWO_WEIGHTS["logistic"], softmax_regression(40, 2, 1))
        if subject.own_module:
            fields = dict(data=few_rows(subject.data, ROWS), settings=fixed_noise(subject), batches=1, length=0.1)
            problems = (SimpleNamespace(title="your module", **fields),)
        for k, problem in enumerate(problems):
            method = problem_method(problem, subject, self.effort, **(SHORT if subject.own_module else {}))
            entry, data, noise = subject.reduced(**problem.settings), problem.data, problem.settings.get("noise")
            posterior = fit(entry, data, method, seed=seed, device="cpu", progress=False)
            sites = posterior.draw(self.draws, seed=seed)  # the draws that ``predict`` takes
            if subject.own_module:
                x, y, exact = data.x_train[:POINTS], data.y_train[:POINTS], None
                f = plain_outputs(subject, sites, posterior.model, data)[:, :POINTS].double().numpy()
            else:
                x = torch.linspace(-2, 2, POINTS)[:, None] * torch.tensor([1.0, -0.6])[: problem.inputs.shape[1]]
                y, exact = _targets(problem, x.double())
                w, bias = (sites[f"layers.0.{name}"].double().numpy() for name in ("weight", "bias"))
                f = np.einsum("skd,bd->sbk", w, x.double().numpy()) + bias[:, None]
            prediction = predict(posterior, x, num_draws=self.draws, seed=seed)
            rows, terms = _classes(prediction, f, y) if noise is None else _regression(prediction, f, y, noise)
            density, by_hand = prediction.log_prob(y), logsumexp(terms, 0) - math.log(len(f))
            rows["log predictive density (nats)"] = density, by_hand
            for figure, (values, right) in rows.items():  # the largest difference
                values, right = np.ravel(values.double().numpy()), np.ravel(right)
                at, about = int(np.argmax(np.abs(values - right))), f"{figure} ({problem.title})"
                findings.append(close(about, values[at], right[at], ROUNDING * max(1.0, float(np.abs(right).max()))))
            if exact is None:
                continue
            if data.schema.has_classes and len(data.schema.classes) == 2:
                p, q = np.exp(exact), np.exp(density.double().numpy())
                lost = (p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))).mean()
            if subject.converges_to == "exact" and getattr(method, "temperature", 1.0) == 1.0:
                chains = next(iter(posterior.chains.values())).shape[:2]
                every = predict(posterior, x, num_draws=chains.numel(), seed=seed).log_probs(y).double().numpy()
                shares.append(np.exp(every - exact).reshape(*chains, -1))
                about = f"predictive density at input {{}}, of the exact one ({problem.title})"
                labels += [about.format(b + 1) for b in range(len(y))]
            report(k + 1, len(problems), {"task": problem.title})
        sentence, remark = "Predictions are the mixture of their draws, by hand", ""
        if shares:  # their mean over all draws of the chains must be 1
            findings += judge(labels, Estimate.of_chains(np.concatenate(shares, 2)), np.ones(len(labels)))
            sentence += ", and agree with the exact posterior predictive"
        elif not subject.own_module:
            remark = f"In logistic regression they lose {lost:.3f} nats a label against the exact predictive."
        settings = subject.settings(method, entry)
        return concluded("predictive", findings, settings, sentence, "Predictions are wrong", remark)


def _targets(problem: Problem, x: Tensor) -> tuple[Tensor, np.ndarray]:
    """Targets (B,) at new inputs (B, D), and their exact log p(y | x, D) in nats (B,)."""
    if problem.is_linear:
        a, (weights, precision) = problem.design(x), problem.gaussian
        mean, sd = a @ weights, (NOISE**2 + ((a @ torch.linalg.inv(precision)) * a).sum(1)).sqrt()
        y = (mean + torch.linspace(-2, 2, len(x)) * sd).float()
        return y, norm.logpdf(y.double().numpy(), mean.numpy(), sd.numpy())
    y, nodes = torch.arange(len(x)) % problem.classes, problem.posterior
    return y, (nodes.mass @ problem.log_probs(nodes.w, x, y).exp()).log().numpy()


def _regression(p: Prediction, f: np.ndarray, y: Tensor, noise: float) -> tuple[Rows, np.ndarray]:
    """Quantities of a regression, from means f (S, B, 1), and log p(y | x, w) (S, B)."""
    f, target = f[..., 0], y.double().numpy()

    def quantile(level: float, column: np.ndarray) -> float:
        ends = column.min() - 9 * noise, column.max() + 9 * noise
        return brentq(lambda t: norm.cdf(t, column, noise).mean() - level, *ends, xtol=1e-10)

    rows: Rows = {
        "predictive mean": (p.mean, f.mean(0)),
        "predictive variance": (p.total, noise**2 + f.var(0)),
        "variance between draws": (p.epistemic, f.var(0)),
        "P(y ≤ t)": (p.cdf(y), norm.cdf(target, f, noise).mean(0)),
    }
    rows |= {f"{100 * q:g} % quantile": (p.quantile(q)[0], np.array([quantile(q, c) for c in f.T])) for q in QUANTILES}
    return rows, norm.logpdf(target, f, noise)


def _classes(p: Prediction, f: np.ndarray, y: Tensor) -> tuple[Rows, np.ndarray]:
    """Quantities of a classification, from scores f (S, B, K) or log-odds (S, B, 1), and log p(y | x, w) (S, B)."""
    probs = softmax(np.concatenate([np.zeros_like(f), f], -1) if f.shape[-1] == 1 else f, -1)
    mean = probs.mean(0)
    total, aleatoric = -(mean * np.log(mean)).sum(-1), -(probs * np.log(probs)).sum(-1).mean(0)
    rows: Rows = {
        "mean probabilities": (p.mean, mean),
        "entropy of the mean (nats)": (p.total, total),
        "mean entropy (nats)": (p.aleatoric, aleatoric),
        "mutual information (nats)": (p.epistemic, total - aleatoric),
    }
    return rows, np.log(probs[:, np.arange(len(y)), y.numpy()])
