"""What to do with a prediction: intervals, sets of classes, and the action of least expected cost.

One interface whether the prediction is conformal (``calibration/conformal.py``) or not: the answer says which, and
what its guarantee rests on.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions.transforms import Transform, identity_transform

from bnn_pyro.errors import UserError

#: The action of :meth:`Decisions.decide` where every other one is too costly.
ABSTAIN = -1


class Interval(NamedTuple):
    """Of each point: low, high (B,) float64, target units, infinite where nothing can be excluded.

    kind: "predictive", or "conformal" with its method.   note: what the coverage rests on, in words.
    """

    low: Tensor
    high: Tensor
    level: float
    kind: str
    note: str


class ClassSet(NamedTuple):
    """Of each point the classes that are not excluded: members (B, K) bool; kind and note as of an :class:`Interval`.

    A conformal set may be empty: no class is as probable as the true classes of the calibration rows were.
    """

    members: Tensor
    level: float
    kind: str
    note: str


class Decisions:
    """The part of a prediction that acts on its probabilities. Shapes: B points, K classes, A actions.

    guarantee: of a conformal prediction, else None: ``interval(prediction, level)`` or ``set(prediction, level)``; an
        index gives that of some of its points.
    transform: from what the network models to y: the exponential where that is log y, else the identity.
    """

    guarantee: Any = None
    transform: Transform = identity_transform

    def __repr__(self) -> str:
        what, own = "a number", "prediction.quantile([0.05, 0.95])"
        if self.has_classes:
            what, own = f"{self.mean.shape[-1]} classes", "prediction.probs; prediction.set(0.9)"
        elif self.task in ("targets", "labels"):
            what, own = f"{self.mean.shape[-1]} {self.task}", "prediction.target(0)"
        return (
            f"<Prediction of {what} for {len(self):,} points by {self.num_draws:,} draws>\n"
            f"next: prediction.mean; prediction.epistemic; {own}; bp.metrics.evaluate(prediction, y)"
        )

    @property
    def untransformed(self) -> Any:
        """The prediction of what the network models; this one where the transform is the identity."""
        return self

    def interval(self, level: float = 0.9) -> Interval:
        """The conformal interval, or else the central one of the predictive distribution.

        Raises UserError for class probabilities, or a level outside (0, 1).
        """
        self._need("regression", "interval")
        check_level(level)
        if self.guarantee is not None:
            return self.guarantee.interval(self, level)
        low, high = self.quantile([(1 - level) / 2, (1 + level) / 2]).double()
        return Interval(low, high, level, "predictive", f"covers {level:.4g} of new rows if the model is right")

    def set(self, level: float = 0.9) -> ClassSet:
        """The conformal set of classes, or else the fewest classes whose mean probabilities sum to the level.

        Raises UserError for a regression, or a level outside (0, 1).
        """
        self._need("classification", "set")
        check_level(level)
        if self.guarantee is not None:
            return self.guarantee.set(self, level)
        probs, order = self.probs.mean(0, dtype=torch.float64).sort(dim=-1, descending=True, stable=True)
        members = torch.zeros(probs.shape, dtype=torch.bool).scatter(-1, order, probs.cumsum(-1) - probs < level)
        return ClassSet(members, level, "predictive", f"covers {level:.4g} of new rows if the model is right")

    def decide(self, cost: Tensor | Sequence[Sequence[float]] | None = None, *,
               abstain_cost: float | None = None) -> Tensor:  # fmt: skip
        """The action of least expected cost under the mean probabilities (Bayes action), (B,) int64.

        cost: (A, K), of action a where class k is true; None: 0 for the right class and 1 for any other.
        abstain_cost: what it costs to leave a point to somebody else, which is ``ABSTAIN`` (−1); None: never.

        Raises UserError for a regression, or costs of another shape or that are not finite.
        """
        self._need("classification", "decide")
        probs = self.probs.mean(0, dtype=torch.float64)
        classes = probs.shape[1]
        cost = 1 - torch.eye(classes) if cost is None else torch.as_tensor(cost)
        if cost.dim() != 2 or cost.shape[1] != classes or not len(cost) or not bool(cost.isfinite().all()):
            raise UserError(f"cost must be finite, of shape (actions, {classes}), got {tuple(cost.shape)}")
        least, action = (probs @ cost.double().mT).min(-1)
        return action if abstain_cost is None else torch.where(least > abstain_cost, ABSTAIN, action)

    def _carry(self, part: Any, index: Any) -> Any:
        """``part``, these points of this prediction, with their guarantee."""
        part.guarantee = None if self.guarantee is None else self.guarantee[index]
        return part


def check_level(level: float) -> None:
    """Raise UserError unless the level lies in (0, 1)."""
    if not 0 < level < 1:
        raise UserError(f"level must lie strictly between 0 and 1, got {level}; 0.9 is usual")
