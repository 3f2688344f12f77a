"""Small problems whose posterior is known, written out by hand: nothing here comes from the code that is checked.

What is compared are expectations over the draws of M functions of the weights (…, P) and of the outputs (…, B) at new
inputs, in standard deviations of the posterior. Here: linear regression, everything by formulas, and logistic
regression with six weights, by a long run of NUTS; in ``two_weights`` what can be integrated over a grid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.stats import norm
from torch import Tensor
from torch.distributions import Normal

from bnn_pyro.checks.check import Estimate
from bnn_pyro.checks.linear_regression import LinearGaussian, correlated, dataset, stationary
from bnn_pyro.datasets.dataset import Dataset, Schema
from bnn_pyro.fitting import fit
from bnn_pyro.inference import NUTS, Method
from bnn_pyro.posterior import Posterior
from bnn_pyro.predictive import Prediction, predict
from bnn_pyro.zoo import MeanField

__all__ = ["Amount", "LinearRegression", "Problem", "SixWeights", "drawn", "standardised"]

#: Draws of a guide that are compared; central intervals; σ of linear regression; τ of logistic regression.
DRAWS, LEVELS, NOISE, PRIOR = 4000, (0.5, 0.8, 0.95), 0.7, 1.5

#: How far a method is off the posterior: name of the figure, in words, of the method, of the posterior.
Amount = tuple[str, str, float, float]


class Problem:
    """A data set and the posterior given it; what is not known of it is None, or NaN.

    settings   of the variant whose posterior it is
    data, x    its rows, and new inputs (B, D), float32
    length     draws that it asks for, as a share of those of the easiest problem
    stops      how far off an optimiser may stop, in posterior standard deviations
    batches    mini-batches that optimisers divide the rows into
    sure       quantities whose Monte-Carlo error says whether there are enough draws
    posterior  expectations of the quantities (M,), with their errors where they are estimated

    Besides: ``labels()`` of the quantities; ``outputs(prediction)``, what is compared of a prediction at x, (S, B);
    ``quantities(w, f)``, (…, M) of weights (…, P) and outputs (…, B), float64. Where the mode is known,
    ``best_normal(mode, correlated)``, mean (P,) and covariance (P, P) of the closest Normal, and ``expect(mean,
    covariance)``, the quantities' expectations (M,) under a Normal. Elsewhere than in linear regression ``steepest()``,
    a curvature (P, P) that the log joint has, or does not exceed, where the posterior lies.
    """

    title: str
    settings: Mapping[str, Any]
    data: Dataset
    x: Tensor
    length: float = 1.0
    stops: float = 0.03
    batches: int = 1
    sure: slice = slice(None)
    posterior: Estimate

    def at(self, temperature: float, exact: bool) -> Problem:
        """At that temperature; exact: whether what is compared with it visits every mode."""
        return self

    def mode(self, prior_weight: float) -> Tensor | None:
        """Maximum of log p(y | w) + prior_weight · log p(w), (P,)."""
        return None

    def precisions(self, mode: Tensor) -> dict[str, Tensor]:
        """The curvature of the log joint at the mode (P, P), "full", and what may stand for it."""
        return {}

    def stationary(self, method: Method) -> tuple[np.ndarray, np.ndarray, Any]:
        """Of stochastic gradients at a finite step: low and high (M,), and what these may be off."""
        mean = self.posterior.mean
        largest = torch.linalg.eigvalsh(self.steepest()).max().item()
        relative = method.eta_share * method.lr / len(self.data.x_train) * largest / (4 - 2 * method.friction)
        return mean, mean, relative * np.maximum(np.abs(mean), 1.0)

    def log_joint(self, w: Tensor) -> Tensor | None:
        """log p(y | x, w)/T + log p(w) (S,), nats, w (S, P) in float64."""
        return None

    def elbo(self, mean: Tensor, covariance: Tensor) -> float | None:
        """log p(y) − KL(q ‖ posterior) of a q with these moments, nats."""
        return None

    def shown(self, w: Tensor, f: Tensor) -> tuple[list[Amount], dict[str, Any]]:
        """How far C approximations (C, D, P), (C, D, B) are off the posterior, and arrays for the figures."""
        return [], {}


def drawn(problem: Problem, posterior: Posterior, seed: int) -> tuple[Tensor, Tensor]:
    """Weights (C, D, P) and outputs (C, D, B) of chains, or of one "chain" of independent draws; float64."""
    chains = None if posterior.chains is None else next(iter(posterior.chains.values())).shape[:2]
    lead = (1, DRAWS) if chains is None else tuple(chains)
    sites = posterior.draw(lead[0] * lead[1], seed=seed)
    w = torch.cat([sites[site].double().flatten(1) for site in posterior.model.initial], 1)
    f = problem.outputs(predict(posterior, problem.x, num_draws=len(w), seed=seed)).double()
    return w.unflatten(0, lead), f.unflatten(0, lead)


def standardised(problem: LinearGaussian, x: Tensor) -> Tensor:
    """x in units of the root mean square of the problem's inputs: a last layer divides its features by just this."""
    return (x / problem.x.square().mean().sqrt()).float()


class LinearRegression(Problem):
    """Everything by formulas; neighbouring inputs correlate at 0.7, and there is a bias."""

    title, stops, batches = "linear regression", 0.02, 4

    def __init__(self, rows: int, inputs: int, points: int, temperature: float = 1.0) -> None:
        made = correlated(rows, inputs, noise=NOISE)
        self.sizes, self.temperature = (rows, inputs, points), temperature
        untempered = replace(made, x=standardised(made, made.x).double())
        self.known = known = replace(untempered, noise=NOISE * math.sqrt(temperature))
        self.settings = {"hidden": (), "bias": True, "noise": NOISE, "prior": f"normal:{made.prior_scale}"}
        self.data, self.x = untempered.data, standardised(made, correlated(points, inputs, seed=2).x)
        self.a, self.covariance = known.design(self.x), torch.linalg.inv(known.precision)
        self.sd, self.f_mean = self.covariance.diagonal().sqrt(), self.a @ known.mean
        self.f_sd = ((self.a @ self.covariance) * self.a).sum(1).sqrt()
        self.sure = slice(len(self.sd))
        self.upper = tuple(torch.triu_indices(len(self.sd), len(self.sd)))
        expected = self.expect(known.mean, self.covariance)
        self.posterior = Estimate(expected, np.zeros_like(expected))

    def at(self, temperature: float, exact: bool) -> LinearRegression:
        """See ``Problem``."""
        return LinearRegression(*self.sizes, temperature)

    def labels(self) -> list[str]:
        """See ``Problem``."""
        inputs = range(1, len(self.x) + 1)
        return [
            *(f"mean of weight {i + 1} (posterior sd)" for i in range(len(self.sd))),
            *(f"variance of weight {i + 1} (posterior variance)" if i == j else
              f"covariance of weights {i + 1} and {j + 1} (posterior sd)"
              for i, j in zip(*(u.tolist() for u in self.upper), strict=True)),
            *(f"mean prediction at input {b} (posterior sd)" for b in inputs),
            *(f"variance of the prediction at input {b} (posterior variance)" for b in inputs),
        ]  # fmt: skip

    def outputs(self, prediction: Prediction) -> Tensor:
        """See ``Problem``."""
        return prediction.locs

    def quantities(self, w: Tensor, f: Tensor) -> Tensor:
        """See ``Problem``."""
        unit, f = (w - self.known.mean) / self.sd, (f - self.f_mean) / self.f_sd
        i, j = self.upper
        return torch.cat([unit, unit[..., i] * unit[..., j], f, f.square()], -1)

    def mode(self, prior_weight: float) -> Tensor:
        """See ``Problem``."""
        if prior_weight:
            return self.known.mean
        return torch.linalg.lstsq(self.known.design(self.known.x), self.known.y[:, None]).solution[:, 0]

    def precisions(self, mode: Tensor) -> dict[str, Tensor]:
        """See ``Problem``."""
        full = self.known.precision
        return {"full": full, "diagonal": torch.diag(full.diagonal()), "Kronecker": full}  # of one output, equal to it

    def best_normal(self, mode: Tensor, correlated: bool) -> tuple[Tensor, Tensor]:
        """See ``Problem``."""
        return mode, self.covariance if correlated else torch.diag(self.known.mean_field_scale.square())

    def expect(self, mean: Tensor, covariance: Tensor | None) -> np.ndarray:
        """In the order of the labels; of an unknown covariance the means alone."""
        shift = mean - self.known.mean
        spread = torch.full_like(self.covariance, math.nan) if covariance is None else covariance
        second, (i, j) = spread + torch.outer(shift, shift), self.upper
        f_second = ((self.a @ second) * self.a).sum(1) / self.f_sd.square()
        products = (second / torch.outer(self.sd, self.sd))[i, j]
        return torch.cat([shift / self.sd, products, self.a @ shift / self.f_sd, f_second]).numpy()

    def stationary(self, method: Method) -> tuple[np.ndarray, np.ndarray, Any]:
        """From the recursion itself."""
        low, high = (self.expect(self.known.mean, c) for c in stationary(method, self.known))
        return low, high, 0.0

    def log_joint(self, w: Tensor) -> Tensor:
        """See ``Problem``."""
        residual = self.known.y - w @ self.known.design(self.known.x).mT
        normaliser = 0.5 * len(self.known.y) * math.log(2 * math.pi * NOISE**2) / self.temperature
        likelihood = -0.5 * residual.square().sum(1) / self.known.noise**2 - normaliser
        return likelihood + Normal(0.0, self.known.prior_scale).log_prob(w).sum(1)

    def elbo(self, mean: Tensor, covariance: Tensor) -> float:
        """See ``Problem``; of a Normal."""
        precision, off = self.known.precision, mean - self.known.mean
        gap = (precision @ covariance).trace() + off @ precision @ off - len(off) - torch.logdet(precision @ covariance)
        return self.known.log_evidence - 0.5 * gap.item()

    def shown(self, w: Tensor, f: Tensor) -> tuple[list[Amount], dict[str, Any]]:
        """Of the outputs at B new inputs, exact_mean, exact_sd, mean, sd (B,); of intervals: levels, coverage (3,)."""
        w_sd, f_sd = (v.std(1, correction=0).mean(0) for v in (w, f))
        w_mean, f_mean = (v.mean((0, 1)) for v in (w, f))
        coverage = _coverage((f_mean - self.f_mean) / self.f_sd, f_sd / self.f_sd)
        share = "standard deviation of the {} as a share of the posterior's, mean"
        inside = "share of the exact posterior of predictions inside central 95 % intervals"
        amounts = [
            ("closed_form", share.format("weights"), (w_sd / self.sd).mean().item(), 1.0),
            ("closed_form_predictions", share.format("predictions"), (f_sd / self.f_sd).mean().item(), 1.0),
            ("closed_form_coverage", inside, float(coverage[-1]), 0.95),
        ]
        outputs = {"exact_mean": self.f_mean, "exact_sd": self.f_sd, "mean": f_mean, "sd": f_sd}
        return amounts, {name: value.numpy() for name, value in outputs.items()} | {
            "levels": np.array(LEVELS),
            "coverage": coverage,
            "weight_coverage": _coverage((w_mean - self.known.mean) / self.sd, w_sd / self.sd),
        }


def _coverage(off: Tensor, sd: Tensor) -> np.ndarray:
    """Share of a standard Normal inside central intervals of Normal(off, sd), for each level, mean; (3,)."""
    half = norm.ppf(0.5 + np.array(LEVELS) / 2)[:, None] * sd.numpy()
    return (norm.cdf(off.numpy() + half) - norm.cdf(off.numpy() - half)).mean(1)


class SixWeights(Problem):
    """Logistic regression with several weights: a log-concave posterior, by a long run of NUTS.

    Its NUTS is itself held to integrals where there are two weights. f are the log-odds.
    """

    title = "logistic regression with six weights"

    def __init__(self, rows: int, inputs: int, points: int, draws: int, seed: int) -> None:
        made = correlated(rows, inputs)
        self.inputs = standardised(made, made.x)
        self.x = standardised(made, correlated(points, inputs, seed=2).x)
        y = (made.y + torch.sin(torch.arange(rows) * 2.4) > 0.3).long()
        self.data = dataset(self.inputs, y, Schema("classification", (inputs,), classes=("no", "yes")))
        self.settings = {"hidden": (), "bias": True, "prior": f"normal:{PRIOR}"}
        self.sure = slice(points)
        long = NUTS(draws=draws, warmup=500, chains=4, cores=1)
        reference = fit(MeanField(**self.settings), self.data, long, seed=seed, device="cpu", progress=False)
        _, f = drawn(self, reference, seed)
        self.centre, self.sd = f.mean((0, 1)), f.std((0, 1))
        self.posterior = Estimate.of_chains(self.quantities(f, f).numpy())

    def labels(self) -> list[str]:
        """See ``Problem``."""
        words = ("mean log-odds at input {} (posterior sd)",
                 "mean square of the log-odds about their mean at input {} (posterior variance)",
                 "probability at input {}")  # fmt: skip
        return [what.format(k + 1) for what in words for k in range(len(self.x))]

    def outputs(self, prediction: Prediction) -> Tensor:
        """See ``Problem``."""
        return prediction.components.logits

    def quantities(self, w: Tensor, f: Tensor) -> Tensor:
        """See ``Problem``."""
        unit = (f - self.centre) / self.sd
        return torch.cat([unit, unit.square(), f.sigmoid()], -1)

    def steepest(self) -> Tensor:
        """¼ AᵀA + I/τ²: no log-odds have a larger curvature."""
        a = torch.cat([self.inputs, torch.ones_like(self.inputs[:, :1])], 1).double()
        return 0.25 * a.mT @ a + torch.eye(a.shape[1]).double() / PRIOR**2

    def shown(self, w: Tensor, f: Tensor) -> tuple[list[Amount], dict[str, Any]]:
        """See ``Problem``."""
        ratio = (f.std(1, correction=0).mean(0) / self.sd).mean().item()
        exact = torch.from_numpy(self.posterior.mean[-len(self.x) :])
        variation = (f.sigmoid().mean((0, 1)) - exact).abs().mean().item()
        return [
            ("logistic_sd", "standard deviation of the log-odds as a share of the posterior's, mean", ratio, 1.0),
            ("logistic_variation", "distance of the probabilities from the posterior's, mean", variation, 0.0),
        ], {}
