"""The Laplace approximation of a linear model: a Normal at the most probable weights, as wide as the curvature there.

    ŵ = argmax_w  log p(y | x, w)/T + log p(w)             q(w) = Normal(ŵ, Λ⁻¹)
    Λ = (1/T) Σ_n φ_n φ_nᵀ ⊗ I_n − ∂² log p(w)             φ_n = [x_n, 1]

I_n is the Fisher information of the likelihood in the network's output at row n: for labels, and for targets with one
noise, the very Hessian (MacKay 1992, doi:10.1162/neco.1992.4.5.720). For regression with a known noise and a Normal
prior nothing is approximate: q is the exact conjugate posterior in closed form, and the evidence is exact too. A
learned noise has the information 2N/T about its logarithm, and none in common with the weights.

    full   Λ as it is: K(K + 1)/2 weighted products of the inputs with themselves
    kron   Σ_n φ_n φ_nᵀ ⊗ mean_n I_n in the place of the sum (Ritter, Botev & Barber 2018, openreview Skdvd2xAZ)
    diag   the diagonal of Λ alone

Everything here is float64; the guide that comes out is of the model's type.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pyro.poutine as poutine
import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal

from bnn_pyro.checkpoint import Checkpoint, Interrupted
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.errors import UserError, unknown
from bnn_pyro.inference.method import Report
from bnn_pyro.parts.joint import FullNormal
from bnn_pyro.parts.likelihoods import OBSERVED
from bnn_pyro.parts.nets import MLP
from bnn_pyro.parts.priors import BayesianNet, IsotropicNormal
from bnn_pyro.posterior import Posterior

__all__ = ["Laplace"]

#: Weights whose (P, P) matrices are made: 5,000 take 0.2 GB each, in float64.
MOST_WEIGHTS = 5000
#: Rows whose weighted inputs are held at once: they stay in the processor's cache.
ROWS = 1024
#: Rows that count one by one in the curvature that the search for the mode goes by.
TELLING = 4096
#: Iterations of L-BFGS before it gets the curvature of the place that it has come to.
ROUND = 30
#: Posterior standard deviations between the mode and where the search ends, all directions together.
SMALL = 1e-3


@dataclass(frozen=True)
class Laplace:
    """Settings of the Laplace approximation, for linear models: last layers, and networks without hidden ones.

    structure       of the posterior precision: full, kron or diag
    temperature     T: the posterior of p(y | x, w)^(1/T); 1 is Bayes, less is a cold posterior
    max_iterations  of L-BFGS over all rows, in search of the most probable weights
    """

    converges_to: ClassVar[str] = "normal at the mode"
    needs: ClassVar[frozenset[str]] = frozenset({"linear model", "proper prior"})
    tiny: ClassVar[Mapping[str, Any]] = {}
    limit: ClassVar[str] = "normal at the mode"
    structure: str = "full"
    temperature: float = 1.0
    max_iterations: int = 1000

    #: Of the guide, which is not the variant's.
    family: ClassVar[str] = "full"

    def __post_init__(self) -> None:
        if self.structure not in STRUCTURES:
            raise unknown("structure", self.structure, STRUCTURES)
        if not 0 < self.temperature < math.inf:
            raise UserError(f"temperature must be positive (1 is the Bayesian posterior), got {self.temperature}")
        if self.max_iterations < 1:
            raise UserError(f"max_iterations must be at least 1, got {self.max_iterations}")

    def run(
        self,
        model: nn.Module,
        guide: nn.Module | None,
        data: Dataset,
        *,
        seed: int = 0,
        checkpoint: Checkpoint | None = None,
        report: Report | None = None,
    ) -> Posterior:
        """Find the mode and the curvature there; see ``Method.run``. The guide is a :class:`FullNormal` of its own.

        ``stats["log_evidence"]`` (1, 1) is log p(y | x) in nats as q has it: log p(y, ŵ) + ½ P log 2π − ½ log det Λ.
        Nothing is random, and what takes seconds is not saved half-way: after an interruption it starts again.

        Raises UserError for a model that is not linear, a prior that is not Normal, more weights than ``MOST_WEIGHTS``,
        or a mode that is not found.
        """
        problem = _Linear(model, data, self.temperature)
        mode, trace = self._mode(problem, checkpoint, report)
        with torch.no_grad():
            lower, log_det = _root_of_inverse(problem.precision(mode, STRUCTURES[self.structure]))
        if self.structure == "full":  # a Newton step: where the log joint is quadratic, it is exact
            gradient = problem.gradient(mode)
            mode = mode + lower @ (lower.mT @ gradient)
        evidence = sum(problem.log_joint(mode)).item() + 0.5 * (len(mode) * math.log(2 * math.pi) - log_det.item())
        q = FullNormal.of(problem.cut(mode), lower).to(data.x_train.dtype)
        stats = {"log_evidence": torch.tensor([[evidence]], dtype=torch.float64)}
        return Posterior(model, data.schema, guide=q, stats=stats, trace=trace)

    def _mode(
        self, problem: _Linear, checkpoint: Checkpoint | None, report: Report | None
    ) -> tuple[Tensor, dict[str, list[float]]]:
        """(ŵ, trace): L-BFGS in coordinates in which the curvature is about I, and the gradient is in posterior sd."""
        place, left, most = problem.start, self.max_iterations, 2 * self.max_iterations
        trace: dict[str, list[float]] = {"epoch": [], "log_joint": [], "log_likelihood": [], "log_prior": []}

        def loss() -> Tensor:
            if checkpoint is not None and checkpoint.stop:
                raise Interrupted("stopped in search of the most probable weights")
            optimiser.zero_grad()
            likelihood, prior = problem.log_joint(place + _solve(root.mT, z))
            (-(likelihood + prior)).backward()
            passes, log_joint = len(trace["epoch"]) + 1, (likelihood + prior).item()
            line = passes, log_joint, problem.temperature * likelihood.item(), prior.item()
            for name, value in zip(trace, line, strict=True):
                trace[name].append(value)
            if report is not None:
                report(min(passes, most), most, {"log joint/N": log_joint / problem.rows})
            return -(likelihood + prior)

        while left > 0:
            root = torch.linalg.cholesky(problem.precision(place, _near))
            z = torch.zeros_like(place).requires_grad_()
            optimiser = torch.optim.LBFGS(
                [z], max_iter=min(ROUND, left), history_size=ROUND, line_search_fn="strong_wolfe",
                tolerance_grad=0.01 * SMALL / math.sqrt(len(z)), tolerance_change=1e-13,
            )  # fmt: skip
            optimiser.step(loss)
            left -= ROUND
            loss()
            place = (place + _solve(root.mT, z)).detach()
            if z.grad.norm() < SMALL:
                return place, trace
        raise UserError(
            f"the most probable weights were not found in {self.max_iterations} iterations of L-BFGS; "
            "give more --set max_iterations, standardise the inputs, or take a narrower prior"
        )


# -- the log joint and its curvature -----------------------------------------------------------------------------
class _Linear:
    """The log joint of a linear model in float64, over the flat vector of its sites, in their order."""

    def __init__(self, model: nn.Module, data: Dataset, temperature: float) -> None:
        net = getattr(model, "net", None)
        if not (isinstance(model, BayesianNet) and isinstance(net, MLP) and len(net.layers) == 1):
            raise UserError(
                "the Laplace approximation here is for linear models: a last layer, or a network without hidden "
                "layers (--hidden ''); take --inference svi for this one"
            )
        self.shapes = {site: value.shape for site, value in model.initial.items()}
        self.start = torch.cat([value.detach().double().flatten() for value in model.initial.values()])
        if len(self.start) > MOST_WEIGHTS:
            raise UserError(
                f"the Laplace approximation here takes {MOST_WEIGHTS:,} weights at most, and this model has "
                f"{len(self.start):,}; take --inference svi with a low-rank guide, or fewer features"
            )
        self.own = list(model.likelihood.initial)
        self.likelihood = copy.deepcopy(model.likelihood).double()
        self.priors = {site: model.prior(p.detach().double()) for site, p in net.named_parameters()}
        x = net.enter(data.x_train).double()
        bias = net.layers[0].bias is not None
        self.phi = torch.cat([x, torch.ones_like(x[:, :1])], 1) if bias else x
        self.y = data.y_train.double() if data.y_train.is_floating_point() else data.y_train
        self.outputs, self.rows, self.temperature = net.layers[0].out_features, len(x), temperature
        # Weights by (output, input) with the bias as the last input, as numbers of the flat vector.
        size = x.shape[1] * self.outputs
        weights = torch.arange(size, device=x.device).view(self.outputs, -1)
        biases = torch.arange(size, size + self.outputs, device=x.device)[:, None]
        self.order = torch.cat([weights, biases], 1) if bias else weights
        self.prior_precision = torch.cat([v.flatten() for v in self._prior_precisions().values()])

    def cut(self, w: Tensor) -> dict[str, Tensor]:
        """{site: value}."""
        pieces = w.split([shape.numel() for shape in self.shapes.values()])
        return {site: piece.view(shape) for (site, shape), piece in zip(self.shapes.items(), pieces, strict=True)}

    def _given(self, sites: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {site: sites[site] for site in self.own}

    def _call(self, w: Tensor) -> poutine.Trace:
        """The likelihood's sites at w."""
        given = poutine.condition(self.likelihood, data=self._given(self.cut(w)))
        return poutine.trace(given).get_trace(self.output(w), self.y)

    def output(self, w: Tensor) -> Tensor:
        """f (N, K)."""
        return self.phi @ w[self.order].mT

    def log_joint(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """(log p(y | x, w)/T, log p(w)), in nats."""
        sites, call = self.cut(w), self._call(w)
        prior = sum(p.log_prob(sites[site]).sum() for site, p in self.priors.items())
        prior = prior + sum(call.nodes[site]["fn"].log_prob(sites[site]).sum() for site in self.own)
        observed = call.nodes[OBSERVED]
        return observed["fn"].log_prob(observed["value"]).sum() / self.temperature, prior

    def gradient(self, w: Tensor) -> Tensor:
        """Of the log joint (P,)."""
        w = w.detach().requires_grad_()
        return torch.autograd.grad(sum(self.log_joint(w)), w)[0]

    @property
    def _inverse(self) -> Tensor:
        """Where in (output, input) order a number of the flat vector stands."""
        rest = torch.arange(self.order.numel(), len(self.start), device=self.order.device)
        return torch.cat([self.order.flatten(), rest]).argsort()

    def _information(self, w: Tensor) -> Tensor:
        """I_n (N, K, K)."""
        return self.likelihood.information(self.output(w), self._given(self.cut(w)))

    @torch.no_grad()
    def precision(self, w: Tensor, structure: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Λ (P, P); structure: one of ``STRUCTURES``."""
        weights = structure(self.phi, self._information(w))
        own = self.rows * w.new_tensor([self.likelihood.own_information[site] for site in self.own])
        inverse = self._inverse
        found = torch.block_diag(weights, own.diag())[inverse][:, inverse] / self.temperature
        found.diagonal().add_(self.prior_precision)
        return found

    def _prior_precisions(self) -> dict[str, Tensor]:
        """{site: −∂² log p(w)}, of the site's shape."""
        call = self._call(self.start)
        priors = {**self.priors, **{site: call.nodes[site]["fn"] for site in self.own}}
        return {site: _precision(priors[site]).expand(shape) for site, shape in self.shapes.items()}


def _precision(prior: Distribution) -> Tensor:
    while isinstance(prior, Independent):
        prior = prior.base_dist
    if not isinstance(prior, IsotropicNormal | Normal):
        raise UserError(
            "the Laplace approximation here needs a Normal prior (another may have several modes, or none where its "
            "curvature is a width); take --set prior=normal:SCALE or fan-in:SCALE"
        )
    return prior.scale.double().pow(-2)


def _full(phi: Tensor, information: Tensor) -> Tensor:
    """Σ_n I_n ⊗ φ_n φ_nᵀ, by (output, input): the upper blocks, a row of them in one product, and their mirror."""
    outputs, inputs = information.shape[-1], phi.shape[-1]
    found = phi.new_zeros(outputs, inputs, outputs, inputs)
    for rows, weights in zip(phi.split(ROWS), information.split(ROWS), strict=True):
        for k in range(outputs):
            right = (weights[:, k, k:, None] * rows[:, None, :]).flatten(1)
            found[k, :, k:] += (rows.mT @ right).unflatten(1, (outputs - k, inputs))
    for k in range(outputs):
        found[k + 1 :, :, k] = found[k, :, k + 1 :].permute(1, 2, 0)
    return found.view(outputs * inputs, outputs * inputs)


def _kron(phi: Tensor, information: Tensor) -> Tensor:
    return torch.kron(information.mean(0), phi.mT @ phi)


def _diag(phi: Tensor, information: Tensor) -> Tensor:
    return torch.diag((information.diagonal(dim1=-2, dim2=-1).mT @ phi.square()).flatten())


def _near(phi: Tensor, information: Tensor) -> Tensor:
    """The full sum over the rows that tell most, and kron over the others: cheap, and a good guide to the mode.

    Where the labels are fitted well, a few rows make nearly all of the sum.
    """
    telling = information.diagonal(dim1=-2, dim2=-1).sum(-1) * phi.square().sum(-1)
    first, rest = telling.argsort(descending=True).tensor_split([TELLING])
    found = _full(phi[first], information[first])
    return found + _kron(phi[rest], information[rest]) if len(rest) else found


#: What stands for Σ_n φ_n φ_nᵀ ⊗ I_n: (φ (N, D), I (N, K, K)) -> (K·D, K·D), by (output, input).
STRUCTURES = {"full": _full, "kron": _kron, "diag": _diag}


def _solve(triangular: Tensor, z: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(triangular, z[:, None], upper=True)[:, 0]


def _root_of_inverse(precision: Tensor) -> tuple[Tensor, Tensor]:
    """(L lower triangular with LLᵀ = Λ⁻¹, log det Λ): from the Cholesky root of Λ with its rows in reverse."""
    upper = torch.linalg.cholesky(precision.flip(-2, -1)).flip(-2, -1)
    eye = torch.eye(len(upper), dtype=upper.dtype, device=upper.device)
    return torch.linalg.solve_triangular(upper.mT, eye, upper=False), 2 * upper.diagonal().log().sum()
