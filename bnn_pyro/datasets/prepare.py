"""Make a Dataset of raw rows: split them once, and standardise all parts by the training part, chunk by chunk."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bnn_pyro.cells import TASKS, skewed, unfit
from bnn_pyro.datasets.dataset import Column, Dataset, Raw, Schema
from bnn_pyro.datasets.rows import NORMAL_RANGE, OnDisk, Rows, long_tails, standardised, taken
from bnn_pyro.datasets.splits import divide
from bnn_pyro.errors import UserError, check_known
from bnn_pyro.progress import announce

#: The values of a column are equal up to rounding if their range divided by the largest value is below this.
ROUNDING = {torch.float32: 5e-7, torch.float64: 1e-12}

#: {option of ``dataset``: its valid values}.
CHOICES = {"task": TASKS, "missing": ("refuse", "drop", "indicator"), "unseen": ("refuse", "ignore"),
           "target_scale": ("identity", "log"), "dates": ("refuse", "parts", "elapsed"),
           "scale": ("auto", "standard", "robust")}  # fmt: skip
#: How many doubts are printed; and with how few rows a target is not examined.
MAX_SAID, FEW = 3, 10


def check_options(**options: str | None) -> None:
    """Raise UserError for an option that is not one of ``CHOICES``; None means that it is not given."""
    for name, value in options.items():
        if value is not None:
            check_known(name.replace("_", " "), CHOICES[name], value)


def check_choice(features: Sequence[str], names: Sequence[str], where: str) -> None:
    """Raise UserError unless the features are among the names, each chosen once."""
    if not features:
        raise UserError(f"{where}: features=[] chooses no column; leave it out to take all")
    check_known(f"feature of {where}", names, *features)
    if twice := [name for name in features if features.count(name) > 1]:
        raise UserError(f"{where}: feature '{twice[0]}' is chosen twice")


def select_features(raw: Raw, features: Sequence[str] | None, where: str, exclude: Sequence[str] = ()) -> Raw:
    """Return ``raw`` with the chosen numeric columns only, in the given order."""
    if exclude:
        check_choice(exclude, raw.features, where)
        features = [name for name in features or raw.features if name not in exclude]
    if features is not None:
        if raw.is_image:
            raise UserError(f"{where} holds images, which have no columns to choose: leave features={features} out")
        check_choice(features, raw.features, where)
        raw = replace(raw, x=raw.x[:, [raw.features.index(name) for name in features]], features=tuple(features))
    return replace(raw, columns=tuple(Column(name) for name in raw.features))


def prepare(raw: Raw, *, limit: int | None = None, scale: str = "auto", **options: Any) -> Dataset:
    """Split with ``divide(raw, **how)`` and standardise by the training part.   limit, scale: see ``dataset``."""
    train, val, test, record = divide(raw, **options)
    if limit is not None:
        if limit < 1:
            raise UserError(f"limit={limit}: give the number of training rows to keep, 1 or more")
        train, record = train[:limit], {**record, "limit": limit}
    raw = _filled(raw, train)
    numbers = next(v for v in (raw.index, raw.rows, torch.arange(len(raw.y))) if v is not None)
    x_test, y_test = raw.test or (raw.x, raw.y)
    test, of_test = (test, numbers[test]) if raw.test is None else (torch.arange(len(y_test)),) * 2
    if raw.target_scale == "log":
        check_positive(raw, raw.y, numbers)
        check_positive(raw, y_test[test], of_test)
    schema = _schema(raw, train, scale)
    parts = ((raw.x, raw.y, train), (raw.x, raw.y, val), (x_test, y_test, test))
    record["rows"] = [len(rows) for _, _, rows in parts]
    record |= {k: v for k, v in {"dropped": raw.dropped, "doubts": _doubts(raw, numbers)}.items() if v}
    tensors: list[Tensor] = []
    for x, y, rows in parts:
        target = y[rows].to(torch.int64 if raw.has_classes else torch.float32)
        tensors += [Rows(x, schema, rows) if isinstance(x, OnDisk) else standardised(x, schema, rows), target]
    if scale == "auto" and len(schema.input_shape) == 1 and isinstance(tensors[0], Tensor) and not schema.input_parts:
        numeric = quantities(schema.columns, schema.input_shape[0])[: len(schema.x_scale) - schema.exposure]
        schema = replace(schema, x_tails=long_tails(tensors[0], numeric.nonzero()[:, 0].tolist()))
    return Dataset(raw.name, schema, *tensors, raw.source, record, numbers[train], numbers[val], of_test)


def check_positive(like: Schema, y: Tensor, index: Any, where: str = "") -> None:
    """Raise UserError for the first target (N,) that has no logarithm.   index: the row numbers in messages."""
    if like.task != "regression":
        raise UserError(f"target_scale={like.target_scale} is for the task regression, not {like.task}; leave it out")
    if bad := (y <= 0).nonzero()[:, 0].tolist():
        more = f", and {len(bad) - 1:,} more rows have none" if len(bad) > 1 else ""
        raise UserError(f"{where or like.source}: target '{like.target}', row {int(index[bad[0]])}: "
                        f"{y[bad[0]].item():g} has no logarithm{more}; leave such rows out, or leave out "
                        "target_scale=log (--target-scale)")  # fmt: skip


def mean_and_scale(parts: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation over the first axis of rows that come in parts, in float64.

    The standard deviation is replaced by 1 if all values are equal, and by their size if they differ only by rounding
    (as sums of shares do). Parts are combined as in Chan, Golub & LeVeque 1983, "Algorithms for computing the sample
    variance".
    """
    rounding, figures = 0.0, []
    for part in parts:
        rounding, x = ROUNDING.get(part.dtype, 0.0), part.double()
        figures.append((len(x), x.mean(0), x.std(0, correction=0), x.amin(0), x.amax(0)))
    _, mean, deviation, low, high = reduce(_pooled, figures)
    size = low.abs().maximum(high.abs())
    return mean, torch.where(low == high, 1.0, torch.where(high - low < rounding * size, size, deviation))


def _pooled(a: tuple, b: tuple) -> tuple:
    """Combine (number, mean, standard deviation, smallest, largest) of two parts."""
    share, apart = b[0] / (a[0] + b[0]), b[1] - a[1]
    variance = (1 - share) * a[2].square() + share * b[2].square() + share * (1 - share) * apart.square()
    return a[0] + b[0], a[1] + share * apart, variance.sqrt(), a[3].minimum(b[3]), a[4].maximum(b[4])


def _filled(raw: Raw, rows: Tensor) -> Raw:
    """Replace missing numbers by the training rows' median, in columns where they are allowed."""
    parts, columns = [raw.x, *([] if raw.test is None else raw.test[:1])], []
    for column, place in raw.column_places:
        if column.fill is not None:
            column = replace(column, fill=raw.x[rows, place.start].nanquantile(0.5).item())
            if math.isnan(column.fill):
                raise UserError(f"{raw.name}: column '{column.name}' has no value in any training row; leave it out")
            for x in parts:
                x[:, place.start] = x[:, place.start].nan_to_num(nan=column.fill)
        columns.append(column)
    return replace(raw, columns=tuple(columns))


def _schema(raw: Raw, rows: Tensor, of_inputs: str) -> Schema:
    """Compute the schema from the training rows."""
    y, robust = raw.y[rows], of_inputs == "robust"
    if robust and (raw.is_image or isinstance(raw.x, OnDisk)):
        raise UserError(f"{raw.name}: scale=robust is for columns of numbers in memory; leave it out (--scale)")
    shift, scale = _pixel_statistics(raw, rows) if raw.is_image else _column_statistics(raw, rows, robust)
    mean, deviation = 0.0, 1.0
    if raw.task == "survival":
        if not (y > 0).any():
            value = (*raw.event, "1")[1]
            raise UserError(f"{raw.name}: all {len(y):,} training times of '{raw.target}' are censored: nothing tells "
                            f"when it happens; is '{raw.event[0]}' right, and {value} an event?")  # fmt: skip
        y = y.abs()
    if not raw.has_classes and raw.task != "labels":
        mean, deviation = mean_and_scale([y])
        for name, values in zip(raw.target_names, y.double().reshape(len(y), -1).T.numpy(), strict=False):
            if why := unfit(values):
                raise UserError(f"{raw.name}: the target '{name}' {why}")
        if raw.target_scale == "log" or raw.task == "survival":
            mean, deviation = mean_and_scale([y.double().log()])
        mean, deviation = (tuple(v.tolist()) if v.dim() else v.item() for v in (mean, deviation))
    if raw.targets and (same := (y == y[:1]).all(0)).any():
        name = raw.targets[int(same.int().argmax())]
        raise UserError(f"{raw.name}: the target '{name}' is the same in every training row; there is nothing to learn")
    settings = {part.name: getattr(raw, part.name) for part in fields(Schema)}
    return Schema(**settings | dict(x_shift=shift, x_scale=scale, y_shift=mean, y_scale=deviation))


def _moments(x: Tensor | OnDisk, rows: Tensor, robust: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, shift and scale of features: mean and deviation, or robust ones (if the range is above 0)."""
    mean, scale = mean_and_scale(taken(x, rows))
    shift = mean.clone()
    if robust:
        low, shift, high = torch.from_numpy(np.quantile(x[rows].double().numpy(), (0.25, 0.5, 0.75), axis=0))
        scale = torch.where(low < high, (high - low) / NORMAL_RANGE, scale)
    return mean, shift, scale


def _column_statistics(raw: Raw, rows: Tensor, robust: bool) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return shift and scale of each feature, column of a series or channel of an image; of an exposure 0 and mean."""
    mean, shift, scale = _moments(raw.x, rows, robust)
    as_they_are, end = ~quantities(raw.columns, len(shift)), 0
    for part in raw.input_parts:
        place = slice(end, end := end + math.prod(part.shape))
        x = raw.x[:, place]
        as_they_are[place] = part.is_whole or bool(((x == 0) | (x == 1)).all())
        sizes = part.shape
        first = len(sizes) == 3 and sizes[0] < min(sizes[1:])
        if len(sizes) == 2 or first or (len(sizes) == 3 and sizes[2] < min(sizes[:2])):  # series, images
            values = x[rows].reshape(-1, *sizes).movedim(1 if first else -1, -1)
            _, *each = _moments(values.flatten(0, -2), torch.arange(values[..., 0].numel()), robust)
            shift[place], scale[place] = (v.expand(values.shape[1:]).movedim(-1, first - 1).flatten() for v in each)
    shift[as_they_are], scale[as_they_are] = 0.0, 1.0
    if raw.exposure:
        shift[-1], scale[-1] = 0.0, mean[-1]
    return tuple(shift.tolist()), tuple(scale.tolist())


def quantities(columns: Sequence[Column], num: int) -> Tensor:
    """Return which of the ``num`` features are quantities, (F,) bool; all others are 0 or 1."""
    numeric = [not place and column.categories is None for column in columns for place, _ in enumerate(column.features)]
    return torch.tensor(numeric or [True] * num)


def _doubts(raw: Raw, numbers: Tensor) -> list[str]:
    """Return the doubts about the inputs and about the targets.   numbers: the row numbers."""
    if raw.task == "labels" and raw.inferred and (raw.y.sum(1) == 1).all():
        return ["the targets: each row has exactly one 1; if they are classes, give the class of each row in one "
                "column, such as y.argmax(1)", *raw.doubts]  # fmt: skip
    if raw.task != "regression" or len(raw.y) <= FEW:
        return [*raw.doubts]
    from bnn_pyro.doubts import of_numbers, of_values  # not needed for the named data sets

    y = (raw.y.log() if raw.target_scale == "log" else raw.y).double().numpy()
    sentences = [doubt.sentence for doubt in of_numbers(y, raw.target, numbers.numpy(), is_target=True)]
    if raw.target_scale == "identity":
        sentences += [skewed(y), *of_values(y, numbers.numpy() if raw.inferred else None)]
    target = raw.target if raw.target_scale == "identity" else f"the logarithm of {raw.target}"
    return [*(f"{target}: {sentence}" for sentence in sentences if sentence), *raw.doubts]


def say_doubts(data: Dataset) -> Dataset:
    """Print the first doubts about the data on standard error; return the data."""
    doubts = data.split.get("doubts", [])
    for line in doubts[:MAX_SAID]:
        announce(f"{data.name}: {line}")
    announce(f"{data.name}: {len(doubts) - MAX_SAID} more, see print(data) or `inspect`", len(doubts) > MAX_SAID)
    return data


def inputs_of(schema: Schema) -> list[tuple[str, list[Column], slice]]:
    """Return (name, columns, features) for each column of the user's table; the parts of a date belong together."""
    dates, inputs = {part: date.name for date in schema.dates if not date.start for part in date.parts}, {}
    for column, place in schema.column_places:
        columns, places = inputs.setdefault(dates.get(column.name, column.name), ([], []))
        columns.append(column)
        places.append(place)
    return [(name, columns, slice(places[0].start, places[-1].stop)) for name, (columns, places) in inputs.items()]


def row_texts(x: Tensor, schema: Schema, most: int = 8) -> list[str]:
    """Describe rows of standardised inputs (N, F) by ``most`` values furthest from the mean, in the user's units."""
    numeric, parts, dates = quantities(schema.columns, x.shape[1]), [], {date.parts[0]: date for date in schema.dates}
    raw, scale = schema.unstandardise(x.double()), x.new_tensor(schema.x_scale, dtype=torch.float64)
    unit = 10 ** (1e-7 * scale).log10().ceil()  # the precision of float32
    raw = torch.where(raw.abs() < 1e-6 * scale, 0.0, (raw / unit).round() * unit)
    for name, (column, *_), place in inputs_of(schema):
        values, far = raw[:, place].numpy(), (x[:, place] * numeric[place]).abs().amax(1).tolist()
        if column.categories is not None:
            texts = [f"{name}={column.categories[row.argmax()]}" if row.any() else "" for row in values]
        else:
            date, texts_of = dates.get(column.name), (f"{value:.6g}" for value in values[:, 0])
            name, texts_of = (date.name, date.texts(values[:, :: len(column.features)])) if date else (name, texts_of)
            texts = [f"{name} {text}" for text in texts_of]
        if column.fill is not None:
            texts = [f"{name} missing" if gap == 1 else text for text, gap in zip(texts, values[:, 1], strict=True)]
        parts.append(zip(far, texts, strict=True))
    rows = (sorted(row, key=lambda part: -part[0])[:most] for row in zip(*parts, strict=True))
    return [", ".join(text for _, text in row if text) for row in rows]


def _pixel_statistics(raw: Raw, rows: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the median pixel, often the background, as shift, and one scale; weights of zero inputs have no effect."""
    if raw.x.dtype != torch.uint8:
        pixels = (chunk.double().flatten() for chunk in taken(raw.x, rows))
        return (_lower_median(raw.x, rows),), (mean_and_scale(pixels)[1].item(),)
    counts = sum(torch.bincount(chunk.flatten(), minlength=256) for chunk in taken(raw.x, rows)).double()  # exact
    values, share = torch.arange(256, dtype=torch.float64) / 255, counts / counts.sum()
    middle = values[int((share.cumsum(0) < 0.5).sum())]
    mean = (share * values).sum()
    deviation = (share * (values - mean).square()).sum().sqrt().item() if (counts > 0).sum() > 1 else 1.0
    return (middle.item(),), (deviation,)


def _lower_median(x: Tensor | OnDisk, rows: Tensor) -> float:
    """Return the lower median of values (float32, not negative) by their bits, of the same order, upper ones first."""
    upper = rank = 0
    for shift in (16, 0):
        counts = np.zeros(2**16, np.int64)
        for chunk in taken(x, rows):
            bits = (chunk.numpy().ravel() + np.float32(0)).view(np.uint32)  # + 0: no −0.0
            bits = bits >> 16 if shift else bits[bits >> 16 == upper] & 0xFFFF
            counts += np.bincount(bits, minlength=2**16)
        if shift:
            rank = (counts.sum() - 1) // 2
        place = int((counts.cumsum() <= rank).sum())
        rank -= counts[:place].sum()
        upper = upper << 16 | place
    return np.uint32(upper).view(np.float32).item()
