"""Data sets: tensors on one device, with inputs standardised by the statistics of the training rows.

A :class:`Schema` is all that a model, a prediction or a saved run needs to know about a data set, without its size; a
:class:`Dataset` adds the rows. Targets keep their own units: the likelihood contains their shift and scale (see
``parts/likelihoods.py``), so that densities and errors are in the user's units.
"""

import hashlib
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor

from bnn_pyro.errors import Introduced, UserError

if TYPE_CHECKING:
    from bnn_pyro.dates import Dates

#: Names of the tensors of a data set.
PARTS = ("x_train", "y_train", "x_val", "y_val", "x_test", "y_test")


@dataclass(frozen=True)
class Column:
    """One input column of a table: numeric, or categorical with one feature (0 or 1) per category.

    fill      the value that replaces a missing number, while a second feature marks it with 1. It is the median of the
              training rows (NaN until it is computed); None: missing values are refused
    exposure  whether the target, a count, is proportional to this column (hours, persons). It is positive, in units of
              its mean, and the last column; the network does not get it, and its output is the logarithm of a rate
    """

    name: str
    categories: tuple[str, ...] | None = None
    fill: float | None = None
    exposure: bool = False

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the column's features."""
        if self.categories is not None:
            return tuple(f"{self.name}={category}" for category in self.categories)
        return (self.name,) if self.fill is None else (self.name, f"{self.name} missing")


class InputPart(NamedTuple):
    """One of several inputs of a network, (N, *shape); whole numbers and booleans are not standardised."""

    name: str
    shape: tuple[int, ...]
    is_whole: bool
    is_bool: bool = False


@dataclass(frozen=True)
class Schema:
    """What a model needs to know about its data; :meth:`to_dict` converts it to JSON.

    task         one of ``cells.TASKS`` (two classes are classification with K = 2)
    input_shape  shape of one standardised input: (features,) for tables, (channels, height, width) for images
    classes      names of the K classes, in the order of the labels 0 … K−1; () for regression
    features     name of each input feature after encoding; () for images
    target       name of the target; the names of several targets, with commas between
    targets      names of several targets; () for one target
    input_parts  the inputs of a network that takes several, in their order within a row; () for one input
    x_shift, x_scale  one value for all features (as for images) or one per feature
    x_tails      (feature, a, b, c, d) of every feature with long tails; see ``datasets.rows.long_tails``
    y_shift, y_scale  mean and standard deviation of the training targets, or of their logarithms (for times, or with
                 target_scale "log"); 0 and 1 for classes; (T,) values for several numeric targets
    columns      how the columns of a table become features; () if there is no table
    unseen       how a category is treated that was absent in training: "refuse" it, or "ignore" it: all features are 0
    event        for times: (the column that says which times are not censored, its value for those (if left out: 1))
    target_scale "log" if the logarithm of the (positive) targets is modelled, else "identity"
    dates        which columns of a table are dates, and how they become some of ``columns``
    """

    task: str
    input_shape: tuple[int, ...]
    classes: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    target: str = "y"
    x_shift: tuple[float, ...] = (0.0,)
    x_scale: tuple[float, ...] = (1.0,)
    y_shift: float | tuple[float, ...] = 0.0
    y_scale: float | tuple[float, ...] = 1.0
    columns: tuple[Column, ...] = ()
    unseen: str = "refuse"
    target_scale: str = "identity"
    targets: tuple[str, ...] = ()
    input_parts: tuple[InputPart, ...] = ()
    event: tuple[str, ...] = ()
    dates: tuple["Dates", ...] = ()
    x_tails: tuple[tuple[int, float, float, float, float], ...] = ()

    #: Whether the targets are labels of classes.
    has_classes = property(lambda self: self.task in ("classification", "ordinal"))
    #: The column names of the target, of a time and its event, or of several targets.
    target_names = property(lambda self: self.targets or (self.target, *self.event[:1]))

    @property
    def table_columns(self) -> list[str]:
        """The names of the input columns of a table before encoding."""
        made = {part: date.name for date in self.dates for part in date.parts}
        return list(dict.fromkeys(made.get(column.name, column.name) for column in self.columns))

    @property
    def column_places(self) -> list[tuple[Column, slice]]:
        """Each column of a table with the slice of its features; empty for images."""
        names = self.features or [f"feature {i}" for i in range(self.input_shape[0])]
        columns = (self.columns or tuple(map(Column, names))) if len(self.input_shape) == 1 else ()
        borders = itertools.accumulate((len(column.features) for column in columns), initial=0)
        return [(column, slice(*ends)) for column, ends in zip(columns, itertools.pairwise(borders), strict=True)]

    def of_target(self, name: str) -> Self:
        """Return the schema of one of several targets; a label (0 or 1) becomes classification with two classes."""
        task, classes = ("classification", (f"no {name}", name)) if self.task == "labels" else ("regression", ())
        return replace(self, task=task, classes=classes, target=name, targets=(), y_shift=0.0, y_scale=1.0)

    #: The names of the features with long tails, with commas between.
    tail_names = property(lambda self: ", ".join(str((self.features or range(k + 1))[k]) for k, *_ in self.x_tails))
    #: Whether the last column is an exposure; see :class:`Column`.
    exposure = property(lambda self: bool(self.columns) and self.columns[-1].exposure)
    #: Whether inputs are images of shape (channels, height, width).
    is_image = property(lambda self: len(self.input_shape) == 3)

    def refuse_exposure(self, name: str) -> None:
        """Raise UserError if there is an exposure."""
        if self.exposure:
            raise UserError(f"{name} takes no exposure; leave it out, or take a fully connected network, as mean-field")

    def need_one_target(self, name: str, way: str = "") -> None:
        """Raise UserError if there are several targets.   way: an alternative to one run per target."""
        if self.targets:
            raise UserError(f"{name} takes one target a row, and there are {len(self.targets)} ({self.target:.60}); "
                            f"train a run for each of them{way}")  # fmt: skip

    def need_uncensored(self, name: str) -> None:
        """Raise UserError if there are several labels, or times, some of which may be censored."""
        if self.task != "targets":
            self.need_one_target(name)
        if self.task == "survival":
            raise UserError(f"{name} takes no censored times, as whether an interval holds one is not known; leave "
                            "it out: the coverage in the report allows for censoring")  # fmt: skip

    def standardise(self, x: Tensor) -> Tensor:
        """Standardise raw inputs (…, *input_shape) to float32; float64 is converted last, as timestamps need it."""
        x = torch.as_tensor(x)
        x = x if x.dtype == torch.float64 else x.to(torch.float32)
        shift, scale = self._affine(x)
        return (x - shift).div_(scale).to(torch.float32)

    def unstandardise(self, x: Tensor) -> Tensor:
        """Invert :meth:`standardise`: return inputs (…, *input_shape) in the user's units."""
        shift, scale = self._affine(x)
        return x * scale + shift

    def _affine(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(torch.tensor(v, dtype=x.dtype, device=x.device) for v in (self.x_shift, self.x_scale))

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain lists, strings and numbers, for JSON."""
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}
        fills = [[c.fill, True] if c.exposure else [] if c.fill is None else [c.fill] for c in self.columns]
        kinds = [None if c.categories is None else list(c.categories) for c in self.columns]
        plain["columns"] = [[c.name, k, *fill] for c, k, fill in zip(self.columns, kinds, fills, strict=True)]
        later = ("targets", "input_parts", "event", "dates", "x_tails")  # left out if empty, as in earlier versions
        return {name: value for name, value in plain.items() if value or name not in later}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """Invert :meth:`to_dict`."""
        fields = {k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()}
        columns = plain.get("columns", ())
        fields["columns"] = tuple(Column(n, None if c is None else tuple(c), *fill) for n, c, *fill in columns)
        fields["x_tails"] = tuple(map(tuple, plain.get("x_tails", ())))
        parts = plain.get("input_parts", ())
        fields["input_parts"] = tuple(InputPart(name, tuple(shape), *kind) for name, shape, *kind in parts)
        if plain.get("dates"):
            from bnn_pyro.dates import Dates

            fields["dates"] = tuple(Dates(*date) for date in plain["dates"])
        return cls(**fields)


@dataclass(frozen=True)
class Dataset(Introduced):
    """Inputs and targets for training, validation and test.

    x_*  (N, *input_shape) float32, standardised with the statistics of x_train; or ``Rows`` of a file
    y_*  (N,) float32 in the target's own units, or int64 labels (classification); a censored time is negative; several
         targets are (N, T) float32
    name      the name given to ``load_data`` (a file's stem for a user's file)
    source    where the data came from, for the report and the model card
    split     how the rows were divided: seed, fractions or the given split; JSON-able
    index_*   (N,) row numbers in the user's data, from 0; in the file of a table the header is row 1
    set_aside (x, y) of calibration rows that are in no other part; None: the validation rows calibrate

    The validation and test parts may be empty (shape (0, …)), never None.
    """

    name: str
    schema: Schema
    x_train: Tensor
    y_train: Tensor
    x_val: Tensor
    y_val: Tensor
    x_test: Tensor
    y_test: Tensor
    source: str = ""
    split: Mapping[str, Any] = field(default_factory=dict)
    index_train: Tensor | None = field(default=None, repr=False)
    index_val: Tensor | None = field(default=None, repr=False)
    index_test: Tensor | None = field(default=None, repr=False)
    set_aside: tuple[Tensor, Tensor] | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        schema = self.schema
        inputs = f"images {schema.input_shape}" if schema.is_image else f"{math.prod(schema.input_shape):,} features"
        target = f"{len(schema.classes)} classes" if schema.has_classes else "numbers"
        target = f"{len(schema.targets)} columns" if schema.targets else target
        rows = ", ".join(f"{len(getattr(self, f'x_{part}')):,} {part}" for part in ("train", "val", "test"))
        return (
            f"<Dataset {self.name}: {schema.task} of {schema.target} ({target}) from {inputs}; rows: {rows}>\n"
            + f"long tails, their asinh beside them: {schema.tail_names:.200}\n" * bool(schema.x_tails)
            + "".join(f"to look at: {line}\n" for line in self.split.get("doubts", ()))
            + f"next: posterior = bp.fit({'net' if schema.input_parts else repr('auto')}, data); "
            + "bp.predict(posterior, data.x_test); data.schema"
        )

    def to(self, device: torch.device | str) -> Self:
        """Return the data set with every tensor on ``device``; inference tensors are cloned, as autograd needs it."""
        moved = {name: rows.to(device) for name, rows in self.parts().items()}
        return replace(self, **{k: v.clone() if getattr(v, "is_inference", bool)() else v for k, v in moved.items()})

    def parts(self) -> dict[str, Tensor]:
        """Return the tensors by their names."""
        return {name: getattr(self, name) for name in PARTS}

    @property
    def fingerprint(self) -> str:
        """The first 16 hex digits of a SHA-256 hash of the training rows and the target scale."""
        digest = hashlib.sha256(b"log" if self.schema.target_scale == "log" else b"")
        for part in (self.x_train, self.y_train):
            for rows in part.split(max(1, 2**20 // max(1, math.prod(part.shape[1:])))):
                digest.update(rows.detach().cpu().contiguous().numpy())
        return digest.hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Raw(Schema):
    """Rows as they were read, neither split nor standardised, and their schema without shifts and scales.

    x      (N, F) numbers of any type, or (N, channels, height, width): uint8, or float32 in [0, 1]
    y      (N,) float64, or int64 labels 0 … K−1 (classification); several targets are (N, T) float64
    test   x and y of the data set's own test part; None: it has none
    rows   (N,) row numbers in the file, from 0, if rows were dropped; None: no row was dropped
    index  (N,) row numbers in the file of a table, whose header is row 1; None: those of ``rows``, or 0 … N−1
    doubts      sentences about data that are probably not read as they are meant
    dropped     number of rows of the file that were left out because of a missing value
    validation  number of validation rows if there is a test part; None: a sixth of the training rows (10,000 of MNIST)
    inferred    whether the task was inferred from the targets
    """

    input_shape: tuple[int, ...] = field(init=False)
    name: str
    x: Tensor
    y: Tensor
    source: str = ""
    test: tuple[Tensor, Tensor] | None = None
    rows: Tensor | None = None
    validation: int | None = None
    dropped: int = 0
    inferred: bool = False
    index: Tensor | None = None
    doubts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "input_shape", tuple(self.x.shape[1:]))
