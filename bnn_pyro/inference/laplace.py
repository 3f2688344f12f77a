"""The Laplace approximation of a linear model: a Normal at the mode ŵ, whose covariance is the inverse curvature.

    ŵ = argmax_w  log p(y | x, w)/T + log p(w)             q(w) = Normal(ŵ, Λ⁻¹)

Λ is the curvature of ``inference.linear`` in float64 (MacKay 1992, doi:10.1162/neco.1992.4.5.720). For regression with
a known noise and a Normal prior, q is the exact conjugate posterior, and the evidence is exact too.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributions import Normal

from bnn_pyro.checkpoint import Interrupted, Run
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.errors import FitFailed, UserError
from bnn_pyro.inference.linear import ROWS, Curvature, Information, factored, linear_layer, summed
from bnn_pyro.inference.log_joint import LogJoint
from bnn_pyro.parts.correlated_normal import FullNormal
from bnn_pyro.parts.weights import CentredNormal, base_of
from bnn_pyro.posterior import Posterior
from bnn_pyro.settings import Settings, setting

MAX_WEIGHTS = 5000  # largest number of weights P: a (P, P) matrix of 5,000 takes 0.2 GB in float64
MAX_SINGLE_ROWS = 4096  # number of rows whose exact curvature is used in the search for the mode
MAX_ROUND = 30  # iterations of L-BFGS between two updates of the curvature that determines its coordinates
MAX_DISTANCE = 1e-3  # the search ends within this distance from the mode, in posterior standard deviations


@dataclass(frozen=True)
class Laplace(Settings):
    """Settings of the Laplace approximation, for last layers, of inputs too: LastLayer(backbone=torch.nn.Identity()).

    temperature     T: the posterior of p(y | x, w)^(1/T); 1 is Bayes, less is a cold posterior
    max_iterations  largest number of iterations of L-BFGS over all rows, which searches for the most probable weights
    """

    converges_to: ClassVar[str] = "normal at the mode"
    needs: ClassVar[frozenset[str]] = frozenset({"linear model", "proper prior"})
    tiny: ClassVar[Mapping[str, Any]] = {}
    temperature: float = setting(1.0, above=0)
    max_iterations: int = setting(1000, low=1)

    former: ClassVar[Mapping[str, Any]] = {"structure": "full"}
    family: ClassVar[str] = "full"  # of the resulting guide, whatever guide the variant has

    def run(self, model: nn.Module, guide: nn.Module | None, data: Dataset, **options: Any) -> Posterior:
        """Find the mode and the curvature there; see ``Method.run``. The posterior's guide is a :class:`FullNormal`.

        ``stats["log_evidence"]`` (1, 1) approximates log p(y | x) in nats: log p(y, ŵ) + ½ P log 2π − ½ log det Λ.
        Nothing is random. As it takes seconds, no checkpoint is written: after an interruption it starts again.
        Raises UserError for a model that is not linear, a prior that is not Normal, more than ``MAX_WEIGHTS`` weights,
        or a mode that is not found; FitFailed for a curvature that is numerically singular.
        """
        log_joint = _log_joint(model, data, self.temperature)
        curvature = Curvature(log_joint)
        try:
            mode, trace = self._mode(curvature, Run(**options))
            upper = torch.linalg.cholesky(curvature.precision(mode, summed).flip(-2, -1)).flip(-2, -1)  # Λ = U Uᵀ
        except torch.linalg.LinAlgError:  # for example if the features fit all rows, and a learned noise is about 0
            raise FitFailed("the curvature of the log joint is not positive definite in 64 bits: the features fit the "
                            "training rows all but exactly; set the noise (--noise), take a narrower prior, or "
                            "--inference svi") from None  # fmt: skip
        lower = torch.linalg.solve_triangular(upper.mT, torch.eye(len(upper)).to(upper), upper=False)  # L Lᵀ = Λ⁻¹
        # A Newton step, which is exact if the log joint is quadratic.
        mode = mode + lower @ (lower.mT @ log_joint.gradient(mode[None])[1][0])
        density = log_joint.log_density(mode[None]).item()
        evidence = density + 0.5 * (len(mode) * math.log(2 * math.pi) - 2 * upper.diagonal().log().sum().item())
        q = FullNormal.of(log_joint.sites(mode), lower).to(data.x_train.dtype)
        stats = {"log_evidence": torch.tensor([[evidence]], dtype=torch.float64)}
        return Posterior(model, data.schema, guide=q, stats=stats, trace=trace)

    def _mode(self, curvature: Curvature, run: Run) -> tuple[Tensor, dict[str, list[float]]]:
        """(ŵ, trace), by L-BFGS in coordinates in which the curvature is about I (the unit is a posterior sd)."""
        log_joint, remaining, most = curvature.log_joint, self.max_iterations, 2 * self.max_iterations
        place = log_joint.initial
        trace: dict[str, list[float]] = {"epoch": [], "log_joint": [], "log_likelihood": [], "log_prior": []}

        def at(z: Tensor) -> Tensor:
            return place + torch.linalg.solve_triangular(root.mT, z[:, None], upper=True)[:, 0]

        def loss() -> Tensor:
            if run.stop:
                raise Interrupted("stopped in search of the most probable weights")
            optimiser.zero_grad()
            prior, likelihood = log_joint.terms(at(z)[None])
            value = (likelihood + prior)[0]
            (-value).backward()
            passes = len(trace["epoch"]) + 1
            line = passes, value.item(), self.temperature * likelihood.item(), prior.item()
            for name, figure in zip(trace, line, strict=True):
                trace[name].append(figure)
            run.tell(min(passes, most), most, {"log joint/N": value.item() / len(log_joint.x)})
            return -value

        while remaining > 0:
            root = torch.linalg.cholesky(curvature.precision(place, _near_the_mode))
            z = torch.zeros_like(place).requires_grad_()
            optimiser = torch.optim.LBFGS(
                [z], max_iter=min(MAX_ROUND, remaining), history_size=MAX_ROUND, line_search_fn="strong_wolfe",
                tolerance_grad=0.01 * MAX_DISTANCE / math.sqrt(len(z)), tolerance_change=1e-13,
            )  # fmt: skip
            optimiser.step(loss)
            remaining -= MAX_ROUND
            loss()
            place = at(z).detach()
            if z.grad.norm() < MAX_DISTANCE:
                return place, trace
        raise UserError(f"the most probable weights were not found in {self.max_iterations} iterations of L-BFGS; give "
                        "more --set max_iterations, standardise the inputs, or take a narrower prior")  # fmt: skip


def _log_joint(model: nn.Module, data: Dataset, temperature: float) -> LogJoint:
    """The log joint in float64. Raises UserError if this file does not support the model."""
    if linear_layer(model) is None:
        raise UserError("the Laplace approximation here is for linear models: a last layer, which is one of the "
                        "inputs with backbone=torch.nn.Identity(); take --inference svi for this one")  # fmt: skip
    if (size := sum(value.numel() for value in model.initial.values())) > MAX_WEIGHTS:
        raise UserError(f"the Laplace approximation here takes {MAX_WEIGHTS:,} weights at most, and this model has "
                        f"{size:,}; take --inference svi with a low-rank guide, or fewer features")  # fmt: skip
    y = data.y_train.double() if data.y_train.is_floating_point() else data.y_train
    log_joint = LogJoint(copy.deepcopy(model).double(), data.x_train.double(), y, temperature)
    if not all(isinstance(base_of(prior), CentredNormal | Normal) for prior in log_joint.priors.values()):
        raise UserError("the Laplace approximation needs a Normal prior (another may have several modes, or none "
                        "whose curvature is a width); take --set prior=normal:SCALE or fan-in:SCALE")  # fmt: skip
    return log_joint


def _near_the_mode(features: Tensor, information: Information) -> Tensor:
    """:func:`summed` over the MAX_SINGLE_ROWS rows with the largest curvature, plus :func:`factored` over the rest."""
    traces = [torch.einsum("bkk->b", information(rows)) * rows.square().sum(-1) for rows in features.split(ROWS)]
    first, rest = torch.cat(traces).argsort(descending=True).tensor_split([MAX_SINGLE_ROWS])
    precision = summed(features[first], information)
    return precision + factored(features[rest], information) if len(rest) else precision
