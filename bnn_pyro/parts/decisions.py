"""Decisions from a prediction: intervals, sets of classes, the action of least expected cost, columns of a table.

The interface is the same for conformal predictions (``calibration/conformal.py``) and others; results say which it is.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.distributions.transforms import Transform, identity_transform

from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.errors import Introduced, UserError

#: The result of :meth:`Decisions.decide` if every action costs more than ``abstain_cost``.
ABSTAIN = -1
#: Number of entries of the largest array of one block, 8 MB in float64.
BLOCK = 2**20
#: Points at which the cdf of a continuous variable is integrated (for a CRPS half on each side of y), or counts summed.
GRID, COUNTS = 512, 4096


class Interval(NamedTuple):
    """An interval per point: low, high (B,) float64 in target units, infinite if no value can be excluded.

    kind: "predictive", or "conformal" with its method.   note: the condition for the coverage, in words.
    """

    low: Tensor
    high: Tensor
    level: float
    kind: str
    note: str


class ClassSet(NamedTuple):
    """A set of classes per point: members (B, K) bool; kind and note are those of :class:`Interval`.

    A conformal set may be empty, if no class is as probable as the true classes of the calibration rows were.
    """

    members: Tensor
    level: float
    kind: str
    note: str


class Risk(NamedTuple):
    """The expected loss per point, (B,) or of A actions (B, A), float64; kind and note as in :class:`Interval`."""

    expected: Tensor
    kind: str
    note: str


class Decisions(Introduced):
    """The methods of a prediction that use its probabilities. Shapes: B points, K classes, A actions.

    guarantee: None, or for a conformal prediction an object with ``interval(prediction, level)`` or
        ``set(prediction, level)``, which can be indexed by points.
    condition: the condition, in words, for the coverage of intervals and sets that are not conformal.
    transform: from the quantity that the network models to y: the exponential if that is log y, else the identity.
    schema, index: the schema of the data, and the index of the frame that was predicted; None if unknown.
    """

    guarantee: Any = None
    condition: str = "if the model is right"
    schema: Any = None
    index: Any = None
    transform: Transform = identity_transform

    def __repr__(self) -> str:
        kind, call = "a number", "prediction.quantile([0.05, 0.95])"
        if self.has_classes:
            kind, call = f"{self.mean.shape[-1]} classes", "prediction.probs; prediction.set(0.9)"
        elif self.task in ("targets", "labels"):
            kind, call = f"{self.mean.shape[-1]} {self.task}", "prediction.target(0)"
        about = f"<Prediction of {kind} for {len(self):,} points by {self.num_draws:,} draws>"
        return f"{about}\nnext: prediction.to_frame(); prediction.epistemic; {call}; bp.metrics.evaluate(prediction, y)"

    def to_frame(self, index: Any = None) -> Any:
        """A table with one row per point and the columns of a file written by `predict`; see docs/command-line.md.

        index: (B,), by default the index of the inputs if they were a frame.
        Raises UserError for a prediction that was not returned by ``predict``.
        """
        if self.schema is None:
            raise UserError("to_frame names columns by the data of a posterior: take a prediction of bp.predict")
        return pd.DataFrame(columns_of(self, self.schema), index=self.index if index is None else index)

    #: The prediction of the quantity that the network models; the same object if the transform is the identity.
    untransformed = property(lambda self: self)

    def interval(self, level: float = 0.9) -> Interval:
        """The conformal interval, or else the central predictive one; for T targets, one each (B, T).

        Raises UserError for class probabilities, or a level outside (0, 1).
        """
        several = self.task == "targets"
        self._need("targets" if several else "regression", "interval")
        check_level(level)
        if self.guarantee is not None:
            return self.guarantee.interval(self, level)
        low, high = self.quantile([(1 - level) / 2, (1 + level) / 2]).double()
        note = "each target's " * several + f"covers {level:.4g} of new rows {self.condition}"
        return Interval(low, high, level, "predictive", note)

    def set(self, level: float = 0.9) -> ClassSet:
        """The conformal set of classes, or else the smallest set whose mean probabilities sum to the level.

        Raises UserError for a regression, or a level outside (0, 1).
        """
        self._need("classification", "set")
        check_level(level)
        if self.guarantee is not None:
            return self.guarantee.set(self, level)
        probs, order = self.probs.mean(0, dtype=torch.float64).sort(dim=-1, descending=True, stable=True)
        members = torch.zeros(probs.shape, dtype=torch.bool).scatter(-1, order, probs.cumsum(-1) - probs < level)
        return ClassSet(members, level, "predictive", f"covers {level:.4g} of new rows {self.condition}")

    def risk(self, loss: Tensor | Sequence[Sequence[float]] | Callable[[Tensor], Tensor]) -> Risk:
        """The expected loss under the predictive distribution: ∑ₖ p(k) loss[a, k], or ∫ loss(y) p(y) dy.

        loss: for classes a matrix (A, K), the loss of action a if class k is true. For numbers a function of targets
            (G, B) that returns (G, B), or (G, B, A) for several actions; the integral is the sum over G values, see
            :meth:`cells`. This takes 0.1 MB per point: for very many points use parts, ``prediction[rows]``.
        Raises UserError for a loss of another shape or that is not finite.
        """
        if callable(loss) == self.has_classes:
            raise UserError("a loss is a matrix (actions, classes) of classes, and a function of targets of numbers")
        if self.has_classes:
            weights = self.probs.mean(0, dtype=torch.float64).mT[..., None]  # (K, B, 1)
            try:
                values = torch.as_tensor(loss).double()
            except (TypeError, ValueError):  # text, or rows of different lengths
                values = torch.empty(0)
            right = values.dim() == 2 and values.shape[1] == len(weights) and len(values) > 0
            values, shape = values.mT[:, None] if right else values, f"(actions, {len(weights)})"
        else:
            self._need("regression", "risk")
            at, weights = self.cells(parts=4)
            values, shape = torch.as_tensor(loss(at)).double(), f"{tuple(at.shape)} or {(*at.shape, 'actions')}"
            right = values.dim() in (2, 3) and values.shape[:2] == at.shape
            weights = weights if values.dim() == 2 else weights[..., None]
        if not right or not bool(values.isfinite().all()):
            raise UserError(f"a loss must be finite, of shape {shape}, got {tuple(values.shape)}")
        note = "is right if the predictive distribution is"
        if self.guarantee is not None:
            note += "; the conformal method changes intervals and sets alone, a recalibration would change it"
        return Risk((weights * values).sum(0), "predictive", note)

    def cells(self, parts: int = 1) -> tuple[Tensor, Tensor]:
        """Values (G, B) and probabilities, float64: all counts, up to 4,096 per point, or a grid that is densest at the
        median (before the transform).

        They lie between the quantiles of 10⁻⁵ and 1 − 10⁻⁵; the outer ones have the probabilities of the tails. The
        mean of a loss that grows as y² is too small: by 3 % for Student's t with 3 degrees of freedom, 25 % with 2.3.

        parts: number of equally probable parts of a step. With 4, a loss that jumps at P(Y > y) = 0.01 is off by 1 %.
        """
        low, middle, high = self.quantile([1e-5, 0.5, 1 - 1e-5]).double()
        if self.is_discrete:
            spans = high - low + 1
            num = int(spans.max().clamp_max(COUNTS)) + 1
            every = torch.minimum(low - 1 + torch.arange(num)[:, None], high)
            edges = torch.where(spans < num, every, growing(low - 1, middle, high, num).round())
            at = (edges[:-1] + 1 + edges[1:]) / 2
        else:
            both = self.transform(growing(*map(self.transform.inv, (low, middle, high)), 2 * parts * GRID + 1))
            edges, at = both[:: 2 * parts], both[1::2]
        points = max(1, 2 * BLOCK // (getattr(self, "base", self).num_draws * len(edges)))
        blocks = (slice(i, i + points) for i in range(0, len(self), points))
        below = torch.cat([self[rows].cdf(edges[:, rows]) for rows in blocks], 1)
        below[0], below[-1] = 0.0, 1.0
        parts = len(at) // (len(edges) - 1)
        return at, below.diff(dim=0).repeat_interleave(parts, 0) / parts

    def decide(self, cost: Any = None, *, abstain_cost: float | None = None) -> Tensor:
        """The action of least :meth:`risk` (Bayes action), (B,) int64.

        cost: the loss of :meth:`risk` for several actions; by default 0 for the true class and 1 for any other.
        abstain_cost: cost of not deciding on a point, which is returned as ``ABSTAIN`` (−1); by default never.
        Raises UserError as :meth:`risk`, for a regression without a cost, or a loss of one action.
        """
        if abstain_cost is not None and not abstain_cost >= 0:
            raise UserError(f"abstain_cost is at least 0, got {abstain_cost}")
        if cost is None:
            self._need("classification", "decide() without a cost")
            cost = 1 - torch.eye(self.mean.shape[1])
        if (expected := self.risk(cost).expected).dim() == 1:
            raise UserError("decide chooses among actions: let the loss return (values, points, actions)")
        least, action = expected.min(-1)
        return action if abstain_cost is None else torch.where(least > abstain_cost, ABSTAIN, action)

    def _carry(self, part: Any, index: Any) -> Any:
        """Set the guarantee, schema and index of ``part``, the prediction for the points of ``index``."""
        part.guarantee = None if self.guarantee is None else self.guarantee[index]
        rows = index if isinstance(index, slice) else np.asarray(index)
        part.schema, part.index = self.schema, None if self.index is None else self.index[rows]
        return part


def growing(low: Tensor, middle: Tensor, high: Tensor, num: int) -> Tensor:
    """A grid from low (B,) to high, (num, B) float64, whose steps grow with the distance from the middle."""
    share = torch.linspace(-1, 1, num, dtype=torch.float64)[:, None]
    return torch.lerp(middle, torch.where(share < 0, low, high), share.abs() ** 3)


def check_level(level: float) -> None:
    """Raise UserError unless the level lies in (0, 1)."""
    if isinstance(level, str) or not 0 < level < 1:
        raise UserError(f"level must lie strictly between 0 and 1, got {level!r}; 0.9 is usual")


def columns_of(prediction: Any, schema: Schema, threshold: float | None = None) -> dict[str, Any]:
    """{name of a column: values} of a prediction; with several targets, each has columns that begin with its name."""
    if schema.task == "labels":
        columns = {f"p({name})": prediction.mean[:, k].numpy() for k, name in enumerate(schema.targets)}
        parts = prediction.epistemic.unbind(1)
        return columns | {f"{name}_epistemic_nats": v.numpy() for name, v in zip(schema.targets, parts, strict=True)}
    if schema.targets:
        each = (columns_of(one, schema.of_target("")).items() for one in prediction.each)
        pairs = zip(schema.targets, each, strict=True)
        return {f"{name}_{suffix}": values for name, columns in pairs for suffix, values in columns}
    if prediction.has_classes:
        best = prediction.mean.argmax(-1) if threshold is None else (prediction.mean[:, 1] >= threshold).long()
        columns = {schema.target: np.array(schema.classes, dtype=object)[best.numpy()]}
        columns |= {f"p({name})": prediction.mean[:, k].numpy() for k, name in enumerate(schema.classes)}
        return columns | {f"{p}_nats": getattr(prediction, p).numpy() for p in ("total", "epistemic", "aleatoric")}
    law = prediction.untransformed if schema.task == "survival" else prediction  # log t: the mean of t may be huge
    spreads = {"sd": law.total, "epistemic_sd": law.epistemic, "aleatoric_sd": law.aleatoric}
    log = "log_" * (law is not prediction)
    columns = {f"{log}mean": law.mean.numpy()} | {f"{log}{name}": v.sqrt().numpy() for name, v in spreads.items()}
    return columns | dict(zip(("q2.5", "q50", "q97.5"), prediction.quantile((0.025, 0.5, 0.975)).numpy(), strict=True))


def intervals_of(prediction: Any, schema: Schema, level: float, names: Sequence[str]) -> dict[str, Any]:
    """{name of a column: values} of an interval's ends, or of a set of classes; conformal if the prediction is."""
    if schema.task == "labels":
        raise UserError("--levels asks for intervals, and labels have probabilities; leave it out")
    if schema.task == "targets":
        ends = [*zip(names, (v.unbind(1) for v in prediction.interval(level)[:2]), strict=False)]
        return {f"{name}_{suffix}": v[k].numpy() for k, name in enumerate(schema.targets) for suffix, v in ends}
    if prediction.has_classes:
        classes = np.array(schema.classes, dtype=object)
        return {names[2]: ["|".join(classes[row.numpy()]) for row in prediction.set(level).members]}
    low, high, *_ = prediction.interval(level)
    return {names[0]: low.numpy(), names[1]: high.numpy()}
