"""What to do with a prediction: intervals, sets of classes, the action of least expected cost, columns of a table.

One interface whether the prediction is conformal (``calibration/conformal.py``) or not: the answer says which, and why.
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

#: The action of :meth:`Decisions.decide` where every other one is too costly.
ABSTAIN = -1
#: Entries of the largest array of one block, 8 MB in float64.
BLOCK = 2**20
#: Points at which a cdf is integrated: of a continuous one (for a CRPS, half of them on either side of y); of counts.
GRID, COUNTS = 512, 4096


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


class Risk(NamedTuple):
    """Of each point: expected loss (B,), or of A actions (B, A), float64; kind and note as of an :class:`Interval`."""

    expected: Tensor
    kind: str
    note: str


class Decisions(Introduced):
    """The part of a prediction that acts on its probabilities. Shapes: B points, K classes, A actions.

    guarantee: of a conformal prediction, else None: ``interval(prediction, level)`` or ``set(prediction, level)``; an
        index gives that of some of its points.
    condition: under which intervals and sets that are not conformal cover what they promise, in words.
    transform: from what the network models to y: the exponential where that is log y, else the identity.
    schema, index: of what was predicted: its data, and the index of the frame that it was; None where not known.
    """

    guarantee: Any = None
    condition: str = "if the model is right"
    schema: Any = None
    index: Any = None
    transform: Transform = identity_transform

    def __repr__(self) -> str:
        what, own = "a number", "prediction.quantile([0.05, 0.95])"
        if self.has_classes:
            what, own = f"{self.mean.shape[-1]} classes", "prediction.probs; prediction.set(0.9)"
        elif self.task in ("targets", "labels"):
            what, own = f"{self.mean.shape[-1]} {self.task}", "prediction.target(0)"
        about = f"<Prediction of {what} for {len(self):,} points by {self.num_draws:,} draws>"
        return f"{about}\nnext: prediction.to_frame(); prediction.epistemic; {own}; bp.metrics.evaluate(prediction, y)"

    def to_frame(self, index: Any = None) -> Any:
        """A line a point, with the columns of a file that `predict` writes; see docs/command-line.md.

        index: of the frame, (B,); by default that of the inputs where they were a frame.
        Raises UserError for a prediction that ``predict`` did not make.
        """
        if self.schema is None:
            raise UserError("to_frame names columns by the data of a posterior: take a prediction of bp.predict")
        return pd.DataFrame(columns_of(self, self.schema), index=self.index if index is None else index)

    #: The prediction of what the network models; this one where the transform is the identity.
    untransformed = property(lambda self: self)

    def interval(self, level: float = 0.9) -> Interval:
        """The conformal interval, or else the central one of the predictive distribution; of T targets each, (B, T).

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
        """The conformal set of classes, or else the fewest classes whose mean probabilities sum to the level.

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

        loss: of classes (A, K), of action a where class k is true. Of numbers a function of targets (G, B), to (G, B)
            or, of several actions, (G, B, A); the integral is the sum over G values, see :meth:`cells`. That takes
            0.1 MB a point: of very many ask for some at a time, ``prediction[rows]``.
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
        """Values (G, B) and probabilities, float64: every count, up to 4,096 a point; else steps that grow from the
        median, of real numbers before the transform.

        They lie between the quantiles of 10⁻⁵ and 1 − 10⁻⁵; the outer ones have the tails. A loss that grows as y² is
        too small where its mean rests on them: by 3 % of Student's t with 3 degrees of freedom, by 25 % with 2.3.

        parts: of a step, as probable as one another. With 4 a loss that jumps where P(Y > y) is 0.01 is off by 1 %.
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

        cost: the loss of :meth:`risk`, of several actions; None: 0 for the right class and 1 for any other.
        abstain_cost: what it costs to leave a point to somebody else, which is ``ABSTAIN`` (−1); None: never.
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
        """``part``, these points of this prediction, with their guarantee."""
        part.guarantee = None if self.guarantee is None else self.guarantee[index]
        rows = index if isinstance(index, slice) else np.asarray(index)
        part.schema, part.index = self.schema, None if self.index is None else self.index[rows]
        return part


def growing(low: Tensor, middle: Tensor, high: Tensor, num: int) -> Tensor:
    """From low (B,) to high, (num, B) float64, in steps that grow with the distance from the middle."""
    share = torch.linspace(-1, 1, num, dtype=torch.float64)[:, None]
    return torch.lerp(middle, torch.where(share < 0, low, high), share.abs() ** 3)


def check_level(level: float) -> None:
    """Raise UserError unless the level lies in (0, 1)."""
    if isinstance(level, str) or not 0 < level < 1:
        raise UserError(f"level must lie strictly between 0 and 1, got {level!r}; 0.9 is usual")


def columns_of(prediction: Any, schema: Schema, threshold: float | None = None) -> dict[str, Any]:
    """What is said of each row, by names of columns; of several targets of each by itself, with its name before."""
    if schema.task == "labels":
        columns = {f"p({name})": prediction.mean[:, k].numpy() for k, name in enumerate(schema.targets)}
        parts = prediction.epistemic.unbind(1)
        return columns | {f"{name}_epistemic_nats": v.numpy() for name, v in zip(schema.targets, parts, strict=True)}
    if schema.targets:
        each = (columns_of(one, schema.of_target("")).items() for one in prediction.each)
        pairs = zip(schema.targets, each, strict=True)
        return {f"{name}_{what}": values for name, columns in pairs for what, values in columns}
    if prediction.has_classes:
        best = prediction.mean.argmax(-1) if threshold is None else (prediction.mean[:, 1] >= threshold).long()
        columns = {schema.target: np.array(schema.classes, dtype=object)[best.numpy()]}
        columns |= {f"p({name})": prediction.mean[:, k].numpy() for k, name in enumerate(schema.classes)}
        return columns | {f"{p}_nats": getattr(prediction, p).numpy() for p in ("total", "epistemic", "aleatoric")}
    law = prediction.untransformed if schema.task == "survival" else prediction  # of times of log t: means may be huge
    spreads = {"sd": law.total, "epistemic_sd": law.epistemic, "aleatoric_sd": law.aleatoric}
    log = "log_" * (law is not prediction)
    columns = {f"{log}mean": law.mean.numpy()} | {f"{log}{name}": v.sqrt().numpy() for name, v in spreads.items()}
    return columns | dict(zip(("q2.5", "q50", "q97.5"), prediction.quantile((0.025, 0.5, 0.975)).numpy(), strict=True))


def intervals_of(prediction: Any, schema: Schema, level: float, names: Sequence[str]) -> dict[str, Any]:
    """The ends of an interval, or a set of classes, conformal where the prediction is, by their names."""
    if schema.task == "labels":
        raise UserError("--levels asks for intervals, and labels have probabilities; leave it out")
    if schema.task == "targets":
        ends = [*zip(names, (v.unbind(1) for v in prediction.interval(level)[:2]), strict=False)]
        return {f"{name}_{what}": v[k].numpy() for k, name in enumerate(schema.targets) for what, v in ends}
    if prediction.has_classes:
        classes = np.array(schema.classes, dtype=object)
        return {names[2]: ["|".join(classes[row.numpy()]) for row in prediction.set(level).members]}
    low, high, *_ = prediction.interval(level)
    return {names[0]: low.numpy(), names[1]: high.numpy()}
