"""The order at which the bias of SGHMC and SGLD falls with the step size, on linear regression.

    bias(η) = mean over directions i of Var(u_i) − 1,  u_i = √λ_i e_iᵀ(w − m)        order = d log bias / d log η

With all rows in every step, the variance of draws in a direction of posterior variance 1/λ is too large by the factor
1/(1 − ηλ/(4 − 2α)). The sampler is run at two step sizes, h and h/2, and compared with the exact covariance at each.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from bnn_pyro.checks.check import Check, Estimate, Finding, Outcome, Subject, concluded, judge
from bnn_pyro.checks.known_answers import drawn
from bnn_pyro.checks.problems import Problem, linear_regression
from bnn_pyro.errors import UserError
from bnn_pyro.fitting import fit
from bnn_pyro.inference import Method
from bnn_pyro.inference.mini_batches import EXCESS
from bnn_pyro.progress import Report
from bnn_pyro.settings import defaults
from bnn_pyro.zoo import MeanField

#: The larger of the two step sizes as a share of the largest stable one, at which ηλ/(4 − 2α) = 1 for the largest λ.
LARGEST = 0.25
#: Relative bias of variances below which it is negligible, and above which the step is too large.
SMALL, TOO_LARGE = 0.02, 0.2
#: Largest standard error of the order for a conclusion.
PRECISE = 0.3


@dataclass(frozen=True)
class StepSize(Check):
    """On linear regression the covariance that SGHMC and SGLD sample is known exactly at every step size; at two step
    sizes, the draws must have this covariance, and its bias must fall in proportion to the step.
    """

    title: ClassVar[str] = "Order of the step-size bias"
    quick: ClassVar[dict[str, float]] = {"chains": 400, "times": 25.0}

    chains: int = 1000
    times: float = 400.0

    def _refuses(self, subject: Subject) -> str:
        has_bias_formula = subject.converges_to == "exact as lr → 0" and hasattr(subject.kind, "eta_share")
        return "" if has_bias_formula else f"{subject.inference} has no known bias of the step size"

    def _run(self, subject: Subject, seed: int, report: Report) -> Outcome:
        problem, usual = linear_regression(60, 2, 1), subject.method({})
        settings = dict(batch_size=0, temperature=1.0, chains=self.chains)
        method = replace(usual, max_draws=300, **{k: v for k, v in settings.items() if k in defaults(usual)})
        # ηλ/(4 − 2α) of every direction at lr 1: the recursion explodes where one of them is 1.
        mean, precision = problem.gaussian
        shares = method.eta_share / len(problem.inputs) * torch.linalg.eigvalsh(precision) / (4 - 2 * method.friction)
        largest = 1 / shares.max().item()
        rates = [LARGEST * largest, LARGEST * largest / 2]
        excess, findings = [], []
        for i, lr in enumerate(rates):
            try:
                w, f = self._draws(replace(method, lr=lr), problem, seed)
            except UserError as error:
                about = f"lr, a fourth of the largest stable one or less, at which chains diverge: {error}"
                findings.append(Finding(about, lr, level="bad"))
                return concluded("step-size", findings, subject.settings(usual), "", "the step, or its bias, is wrong")
            labels, estimate = problem.labels(), Estimate.of_independent(problem.quantities(w, f).mean(1).numpy())
            expected = problem.stationary(replace(method, lr=lr))["expected"]
            findings += judge([f"{one} at lr {lr:.3g}" for one in labels], estimate, expected, tests=len(rates))
            off = w - mean  # next: mean of u² over directions and draws of each chain
            excess.append(torch.einsum("cdi,ij,cdj->c", off, precision, off).numpy() / w[0].numel() - 1)
            report(i + 1, len(rates), {"lr": lr})
        order, error = order_of(Estimate.of_independent(np.stack(excess, 1)))
        lr = usual.lr or EXCESS / shares.max().item()  # as a fit with all rows in every step chooses it
        shares = shares * lr  # the relative excess of the variances; infinite where the recursion explodes
        at_own = (shares / (1 - shares)).mean().item() if shares.max() < 1 else math.inf
        if not error < PRECISE:
            about = "too few draws to tell: error of the power of the step size that the bias falls by"
            findings.append(Finding(about, error, PRECISE, level="caution"))
        level = "good" if at_own < SMALL else "caution" if at_own < TOO_LARGE else "bad"
        about = f"excess of variances at lr {lr:g}, which is too large above {TOO_LARGE:g}"
        findings.append(Finding(about, at_own, 0.0, level=level))
        sentence = f"the bias falls as the step size to the power of {order:.2f} ± {error:.2f}, and at lr {lr:g} "
        sentence += f"variances are {at_own:.2%} too large"
        return concluded("step-size", findings, subject.settings(usual), sentence, "the step, or its bias, is wrong")

    def _draws(self, method: Method, problem: Problem, seed: int) -> tuple[Tensor, Tensor]:
        """Weights (C, D, P) and outputs after a burn-in of a third of the steps. Raises UserError if they diverge."""
        eta = method.eta_share * method.lr / len(problem.inputs)
        slowest = 2 * method.friction / (eta * torch.linalg.eigvalsh(problem.gaussian[1])[0].item())
        steps = math.ceil(self.times * max(slowest, 2 / method.friction)) + 600
        method = replace(method, epochs=steps, burn_in=steps // 3)
        posterior = fit(MeanField(**problem.settings), problem.data, method, seed=seed, device="cpu", progress=False)
        return drawn(problem, posterior, seed)


def order_of(bias: Estimate) -> tuple[float, float]:
    """(log₂ of the ratio of the bias to that at half the step, its standard error); NaN if a bias is not positive."""
    if not (bias.mean > 0).all():
        return math.nan, math.inf
    return math.log2(bias.mean[0] / bias.mean[1]), float(np.hypot(*(bias.error / bias.mean)) / math.log(2))
