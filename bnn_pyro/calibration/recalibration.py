"""Maps that correct class probabilities, or the cdf of a number, fitted to rows that were not used in training.

Each map except ``ConformalCdf`` is fitted by the log score of the calibration rows, and cannot make that score worse,
because the identity is among its values. The map is applied to the log of the mean probabilities over the draws. The
epistemic uncertainty of a corrected prediction is that of the uncorrected draws.
"""

import math
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, ClassVar, Self

import numpy as np
import torch
from pyro.distributions import Categorical
from scipy.optimize import minimize, minimize_scalar
from sklearn.isotonic import IsotonicRegression
from torch import Tensor
from torch.distributions import Distribution
from torch.nn.functional import cross_entropy

from bnn_pyro.errors import UserError
from bnn_pyro.metrics.evaluation import pit
from bnn_pyro.parts.components import make, parameters
from bnn_pyro.parts.mixtures import ClassMixture, Mixture


def log_mean_probs(prediction: Mixture) -> Tensor:
    """log of the mean class probabilities, (B, K) float64."""
    labels = torch.arange(prediction.mean.shape[-1])
    each = [torch.logsumexp(prediction.log_probs(k.expand(len(prediction))).double(), 0) for k in labels]
    return torch.stack(each, -1).clamp_min(-1e4).log_softmax(-1)


class Map:
    """A correction of class probabilities, or of the cdf of numbers."""

    def apply(self, prediction: Mixture) -> Mixture:
        """The corrected prediction."""
        return (RecalibratedClasses if prediction.has_classes else RecalibratedNumbers)(prediction, self)


class LogitMap(Map):
    """p ∝ exp(W log p̄ + b).

    Temperature scaling: W = I / T (Guo et al. 2017, arXiv:1706.04599, here of the mixture). ``vector``: a diagonal W
    and b; ``dirichlet``: any W and b (Kull et al. 2019, arXiv:1910.12656); ``beta``, for two classes: a diagonal W ≥ 0
    and b (Kull, Silva Filho & Flach 2017). log T, or W − I and b, have a Normal(0, 1) prior: without it, labels that p̄
    separates would have no finite optimum, and p would become 0 or 1.
    """

    def __init__(self, weight: list[list[float]], bias: list[float]) -> None:
        self.weight, self.bias = torch.tensor(weight, dtype=torch.float64), torch.tensor(bias, dtype=torch.float64)

    def __call__(self, logs: Tensor) -> Tensor:
        """Map log p̄ to log p, both (B, K)."""
        return (logs @ self.weight.mT + self.bias).log_softmax(-1)

    @classmethod
    def temperature(cls, prediction: Mixture, y: Tensor) -> Self:
        """Fit the temperature to labels y (B,) by the log score."""
        logs, classes = log_mean_probs(prediction), prediction.mean.shape[-1]
        loss = lambda beta: -(beta * logs).log_softmax(-1).gather(1, y[:, None]).sum().item()  # noqa: E731
        inverse = _best_factor(lambda beta: loss(beta) + 0.5 * math.log(beta) ** 2)
        return cls((inverse * torch.eye(classes)).double().tolist(), [0.0] * classes)

    @classmethod
    def linear(cls, prediction: Mixture, y: Tensor, *, full: bool = False, positive: bool = False) -> Self:
        """Fit a diagonal or full W (``positive``: ≥ 0), and b, to labels y (B,) by the log score and the prior."""
        logs, classes = log_mean_probs(prediction), prediction.mean.shape[-1]
        eye = torch.eye(classes, dtype=torch.float64)
        mask = torch.ones_like(eye) if full else eye

        def objective(values: np.ndarray) -> tuple[float, np.ndarray]:
            theta = torch.from_numpy(values).reshape(classes + 1, classes).requires_grad_()  # W − I above b
            shift, bias = theta[:-1] * mask, theta[-1]
            loss = cross_entropy(logs @ (eye + shift).mT + bias, y, reduction="sum")
            loss = loss + 0.5 * (shift.square().sum() + bias.square().sum())
            return loss.item(), torch.autograd.grad(loss, theta)[0].numpy().ravel()

        bounds = [(-1, None)] * classes**2 + [(None, None)] * classes if positive else None
        best = minimize(objective, np.zeros(classes * (classes + 1)), jac=True, method="L-BFGS-B", bounds=bounds).x
        best = torch.from_numpy(best).view(classes + 1, classes)
        return cls((eye + best[:-1] * mask).tolist(), best[-1].tolist())


class StepMap(Map):
    """For two classes, p = (1 − share) R(p̄) + share p̄. R is linear between ``edges`` (M,) with ``values`` (M,).

    R, the isotonic regression of the labels, has the best log score of all increasing maps, but it is 0 or 1 at its
    ends (Zadrozny & Elkan 2002, KDD). The share is that of one pseudo-observation of p̄ per step, which makes p
    increasing and never 0 or 1. As the score is convex in the share, it is no worse than that of p̄.
    """

    def __init__(self, edges: list[float], values: list[float], share: float) -> None:
        self.edges, self.values, self.share = edges, values, share

    @classmethod
    def fit(cls, prediction: Mixture, y: Tensor) -> Self:
        """Fit the map to labels y (B,)."""
        steps = IsotonicRegression().fit(log_mean_probs(prediction)[:, 1].exp().numpy(), y.double().numpy())
        num = len(np.unique(steps.y_thresholds_))
        return cls(steps.X_thresholds_.tolist(), steps.y_thresholds_.tolist(), num / (len(y) + num))

    def __call__(self, logs: Tensor) -> Tensor:
        """See :meth:`LogitMap.__call__`."""
        second = torch.from_numpy(np.interp(logs[:, 1].exp().numpy(), self.edges, self.values))
        steps = torch.stack([1 - second, second], -1).log()
        return torch.logaddexp(steps + np.log1p(-self.share), logs + np.log(self.share))


class Recalibrated:
    """Base class of corrected predictions: ``base`` is the uncorrected prediction, ``map`` the correction."""

    condition = "if the recalibrated model is right"

    def __new__(cls, base: Mixture, map: Map) -> Self:
        """The single component, which stands for all draws, is ``cls.one(base, map)``."""
        new = super().__new__(cls, cls.one(base, map))
        new.base, new.map, new.transform = base, map, base.transform
        new.condition = getattr(map, "condition", cls.condition)
        return new

    def __getitem__(self, index: Any) -> Mixture:
        return self._carry(self.map.apply(self.base[index]), index)

    def of_draws(self, index: Any) -> Mixture:
        """See :meth:`Mixture.of_draws`: these draws, corrected."""
        return self.map.apply(self.base.of_draws(index))

    #: Epistemic uncertainty of ``base``, but at most the total; nats or squared target units.
    epistemic = cached_property(lambda self: torch.minimum(self.base.epistemic, self.total))
    aleatoric = cached_property(lambda self: self.total - self.epistemic)


class RecalibratedClasses(Recalibrated, ClassMixture):
    """A prediction with corrected class probabilities, as a mixture of one component."""

    one = staticmethod(lambda base, map: make(Categorical, {"logits": map(log_mean_probs(base))[None].float()}))


class Affine:
    """Variance scaling, y ↦ mean + factor · (y − mean) of every component (of log y, if that is modelled)."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    @classmethod
    def fit(cls, prediction: Mixture, y: Tensor) -> Self:
        """Fit the factor to targets y (B,) by the log score."""
        return cls(_best_factor(lambda factor: -cls(factor).apply(prediction).log_prob(y).double().mean().item()))

    def apply(self, prediction: Mixture) -> Mixture:
        """The corrected prediction, of the same family. Raises UserError if it has no location and scale."""
        d = prediction.components
        values = {} if hasattr(prediction, "base") else {name: v for name, (v, _) in parameters(d).items()}
        if not {"loc", "scale"} <= values.keys():
            raise UserError(f"variance scaling needs location and scale; {type(d).__name__} has none; take isotonic")
        mean = prediction.untransformed.mean
        values |= {"loc": mean + self.factor * (values["loc"] - mean), "scale": self.factor * values["scale"]}
        return type(prediction)(make(type(d), values))


class CdfMap(Map):
    """P(Y ≤ y) = R(F(y)). R increases from (0, 0) to (1, 1), linear between ``edges`` (M,) with ``values`` (M,).

    In isotonic recalibration (Kuleshov, Fenner & Ermon 2018, arXiv:1807.00263) R is the empirical cdf of F(y) on the
    calibration rows, which has no density. Here R is the cdf of a histogram with about 2 n^⅓ bins of equal counts, plus
    one uniform pseudo-observation per bin, so that R′(F(y)) f(y) is a density everywhere.
    """

    def __init__(self, edges: list[float], values: list[float]) -> None:
        self.edges, self.values = np.asarray(edges), np.asarray(values)

    @classmethod
    def fit(cls, prediction: Mixture, y: Tensor) -> Self:
        """Fit R to targets y (B,). The pseudo-observations keep the log score between the optimum's and that of F."""
        level = pit(prediction, y)
        bins = int(np.ceil(2 * len(level) ** (1 / 3)))
        edges = np.quantile(level, np.arange(1, bins) / bins)
        edges = np.concatenate([[0.0], edges[(edges > 1e-9) & (edges < 1 - 1e-9)], [1.0]])
        edges = edges[np.concatenate([[True], np.diff(edges) > 1e-9])]
        widths, counts = np.diff(edges), np.bincount(_bins(edges, level), minlength=len(edges) - 1)
        values = np.concatenate([[0.0], ((counts + bins * widths) / (len(level) + bins)).cumsum()])
        return cls(edges.tolist(), (values / values[-1]).tolist())

    def __call__(self, level: Tensor) -> Tensor:
        """R(level)."""
        return torch.from_numpy(np.interp(level.numpy(), self.edges, self.values))

    def inverse(self, level: np.ndarray) -> np.ndarray:
        """R⁻¹(level), strictly between 0 and 1 if the level is."""
        inside = np.interp(level, self.values, self.edges).clip(1e-12, 1 - 1e-12)
        return np.where((level > 0) & (level < 1), inside, level)

    def slope(self, level: Tensor) -> Tensor:
        """R′(level)."""
        return torch.from_numpy((np.diff(self.values) / np.diff(self.edges))[_bins(self.edges, level.numpy())])


class ConformalCdf(CdfMap):
    """Conformal predictive distributions: R(F(y)) is k / (n + 1) at the k-th smallest F(y) of the calibration rows.

    Exchangeable rows lie below the quantile of k / (n + 1) with that probability, whatever the model (Vovk et al. 2019,
    Machine Learning 108:445-474). Between and beyond these F(y), mass is spread as in the model. For counts F(y) is
    randomised, see ``metrics.pit``.
    """

    condition = "to within 2 / (n + 1), if they are exchangeable with the n calibration rows"

    @classmethod
    def fit(cls, prediction: Mixture, y: Tensor) -> Self:
        """Fit R to targets y (B,)."""
        places = pit(prediction, y, seed=0).clip(1e-9, 1 - 1e-9).round(9)
        edges, counts = np.unique(places, return_counts=True)
        return cls([0.0, *edges.tolist(), 1.0], [0.0, *(counts.cumsum() / (len(places) + 1)).tolist(), 1.0])


def _bins(edges: np.ndarray, level: np.ndarray) -> np.ndarray:
    """The index of the bin (edge, next edge] that each level lies in."""
    return np.searchsorted(edges, level, side="left").clip(1, len(edges) - 1) - 1


class _Corrected(Distribution):
    """The distributions with the cdf R(F(y)), (1, B), as far as a mixture needs them as its components."""

    arg_constraints: ClassVar[dict] = {}

    def __init__(self, base: Mixture, map: CdfMap) -> None:
        self.base, self.map = base, map
        super().__init__(torch.Size((1, len(base))), validate_args=False)

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance, each (1, B), from the cells of the corrected cdf."""
        at, mass = self.map.apply(self.base).cells()
        mean = (mass * at).sum(0, keepdim=True)
        return mean.float(), (mass * (at - mean).square()).sum(0, keepdim=True).float()

    support = property(lambda self: self.base.components.support)
    mean = property(lambda self: self._moments[0])
    variance = property(lambda self: self._moments[1])


class RecalibratedNumbers(Recalibrated, Mixture):
    """A prediction with a corrected cdf, as a mixture of one component."""

    total = cached_property(lambda self: self.components.variance[0])
    one = _Corrected

    @cached_property
    def untransformed(self) -> Mixture:
        """See :meth:`Mixture.untransformed`; R acts on probabilities, which a transform does not change."""
        return self if self.base.untransformed is self.base else self.map.apply(self.base.untransformed)

    def log_probs(self, y: Tensor) -> Tensor:
        """log of the density R′(F(y)) f(y), or of the share R(F(y)) − R(F(y⁻)) of a count, (1, B), nats."""
        below, at = (share.mean(-2) for share in self.base.component_below(y))
        log_p = self.map.slope(below + at).log() + self.base.log_prob(y).double()
        if self.is_discrete:  # if R has an edge between the two; otherwise the difference would cancel
            edge = _bins(self.map.edges, below.numpy()) < _bins(self.map.edges, (below + at).numpy())
            share = self.map(below + at) - self.map(below)
            log_p = torch.where(torch.from_numpy(edge), share.log(), log_p)
        return log_p[None]

    def component_cdf(self, y: Tensor) -> Tensor:
        """R(F(y)), (…, 1, B) float64."""
        return self.map(self.base.cdf(y)).unsqueeze(-2)

    def quantile(self, q: Any) -> Tensor:
        """The quantiles of ``base`` at R⁻¹(q), (len(q), B). Raises UserError unless 0 < q < 1."""
        return self.base.quantile(self.map.inverse(np.atleast_1d(np.asarray(q, dtype=float))).tolist())


def _best_factor(loss: Callable[[float], float]) -> float:
    """The factor between e⁻⁵ and e⁵ that minimises the loss; 1 if no other is better."""
    best = minimize_scalar(lambda log: loss(float(np.exp(log))), bounds=(-5.0, 5.0), method="bounded",
                           options={"xatol": 1e-9})  # fmt: skip
    return float(np.exp(best.x)) if best.fun < loss(1.0) else 1.0


#: {method: (class, which is restored from its attributes; function that fits it; task)}.
RECALIBRATIONS: Mapping[str, tuple[type, Callable[[Mixture, Tensor], Any], str]] = {
    "temperature": (LogitMap, LogitMap.temperature, "classification"),
    "vector": (LogitMap, LogitMap.linear, "classification"),
    "dirichlet": (LogitMap, partial(LogitMap.linear, full=True), "classification"),
    "beta": (LogitMap, partial(LogitMap.linear, positive=True), "two classes"),
    "isotonic-classes": (StepMap, StepMap.fit, "two classes"),
    "isotonic": (CdfMap, CdfMap.fit, "regression"),
    "distribution": (ConformalCdf, ConformalCdf.fit, "regression"),
    "variance": (Affine, Affine.fit, "regression"),
}
