"""Which columns of a table, or regions of an image, a posterior's predictions depend on, with the spread over draws.

Permutation importance (Breiman 2001, Machine Learning 45:5-32; Fisher, Rudin & Dominici 2019, arXiv:1801.01489): the
increase of −log p(y | x, w), or for numbers of the squared error, when a column's values are permuted among the rows.
Partial dependence (Friedman 2001, Annals of Statistics 29:1189-1232): the mean output over the rows when a column has
the same value in all of them. Both are computed for each draw; for one draw they equal scikit-learn's. If columns are
correlated, a column may have a low importance because another one carries the same information. For images, one window
after the other is replaced by the median pixel (Zeiler & Fergus 2014, arXiv:1311.2901, section 4.2).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from bnn_pyro.datasets.dataset import Column, Dataset
from bnn_pyro.datasets.prepare import inputs_of
from bnn_pyro.diagnostics.draws import even
from bnn_pyro.errors import UserError
from bnn_pyro.posterior import Posterior
from bnn_pyro.predictive import predict

#: Most columns, most rows, number of test rows below which training rows are used, permutations of each column.
MAX_COLUMNS, MAX_ROWS, MIN_ROWS, REPEATS = 200, 200, 20, 5
#: Number of values of a column at which its effect is computed, between these quantiles of the training rows. Half of
#: them are quantiles, half are equally spaced, as the outer quantiles of a long tail may lie far apart.
PLACES, ENDS = 20, (0.01, 0.99)


class Dependence(NamedTuple):
    """G values of a column (numbers in its own units, or categories) and each draw's mean outputs (S, G, K)."""

    values: list[float] | list[str]
    outputs: np.ndarray


class Explanation(NamedTuple):
    """The result of :func:`explain` for a table.

    importance  a row per column (a date counts as one column), the largest importance first: the median over the draws,
                and low and high, their central 90 % interval. An unused column has 0, a misleading one less than 0
    loss        the loss whose increase is the importance, with its unit
    dependence  {column: its effect} of the most important columns, the largest importance first
    outputs     names of the K outputs: the probability of the second of two classes, or of each of more; else the mean
                of the target in its own units; on a log scale its median, with the geometric mean over the rows
    rows        which rows were used, in words
    """

    importance: pd.DataFrame
    dependence: Mapping[str, Dependence]
    outputs: list[str]
    rows: str
    loss: str


class PixelMaps(NamedTuple):
    """The result of :func:`explain` for M images, ordered from the lowest to the highest uncertainty.

    rows    (M,) their numbers among the test rows, or among the training rows if there are no test rows
    images  (M, *input_shape), standardised     classes  (M,) the most probable class
    falls   (M, height, width) decrease of the log odds of that class, in nats, when a pixel is covered: mean over the
            draws and the windows that cover it; below 0 is evidence against the class    spreads  its sd over the draws
    """

    rows: np.ndarray
    images: Tensor
    classes: np.ndarray
    falls: np.ndarray
    spreads: np.ndarray


def explain(
    posterior: Posterior | Any, data: Dataset, *, num: int = 6, num_draws: int | None = None, seed: int = 0
) -> Explanation | PixelMaps:
    """Permutation importance of every column of a table, and the partial dependence on the ``num`` most important ones.

    For images with classes, maps of how covering a part of an image changes the odds of its class, for ``num`` images.

    posterior: also a calibrated one.   data: at most 200 of its test rows are used, or of its training rows if there
        are fewer than 20 test rows; not censored times.   num_draws: S, as in ``predict``.   seed: of the permutations.
    Raises UserError for images without classes, other inputs than the posterior's, and more than 200 columns.
    """
    schema, columns = data.schema, inputs_of(data.schema)
    schema.need_one_target("explain")
    if schema.is_image and schema.has_classes and schema.input_shape == posterior.schema.input_shape:
        return _pixel_maps(posterior, data.x_test if len(data.x_test) else data.x_train, num, num_draws)
    if not columns:
        raise UserError(f"explain takes tables, and images with classes; '{data.name}' is neither")
    if tuple(schema.input_shape) != tuple(posterior.schema.input_shape):
        shapes = tuple(schema.input_shape), tuple(posterior.schema.input_shape)
        raise UserError("explain takes the posterior's table; '{}' has inputs {}, not {}".format(data.name, *shapes))
    if len(columns) > MAX_COLUMNS:
        raise UserError(f"explain takes at most {MAX_COLUMNS} columns, not {len(columns):,}; leave some out: exclude=")
    targets = {part: getattr(data, f"y_{part}").cpu() for part in ("test", "train")}
    of_times = schema.task == "survival"  # the error at a censored time is unknown
    candidates = {part: np.flatnonzero(y > 0) if of_times else np.arange(len(y)) for part, y in targets.items()}
    rows_used = "test" if len(candidates["test"]) >= MIN_ROWS else "train"
    rows = candidates[rows_used][even(len(candidates[rows_used]), MAX_ROWS)]
    x, y = (getattr(data, f"{part}_{rows_used}")[rows].cpu() for part in "xy")

    def losses(x: Tensor) -> np.ndarray:
        """Mean loss of each draw, (S,): for numbers the squared error, as −log p of permuted rows has no bound."""
        prediction, at = predict(posterior, x, num_draws=num_draws), y.repeat(len(x) // len(y))
        if schema.has_classes:
            return -prediction.log_probs(at).double().mean(1).numpy()
        inverse = prediction.transform.inv  # on a log scale the errors are those of log y
        errors = prediction.untransformed.locs - inverse(at)
        return (errors.double().square().mean(1) / inverse(y.double()).var(correction=0)).numpy()

    generator, unchanged, rises = torch.Generator().manual_seed(seed), losses(x), []
    for _, _, place in columns:
        moved = x.repeat(REPEATS, 1)
        moved[:, place] = x[torch.cat([torch.randperm(len(x), generator=generator) for _ in range(REPEATS)])][:, place]
        rises.append(losses(moved) - unchanged)
    low, middle, high = np.quantile(np.array(rises), (0.05, 0.5, 0.95), axis=1)
    names = pd.Index([name for name, *_ in columns], name="column")
    table = pd.DataFrame({"importance": middle, "low": low, "high": high}, index=names)
    first = np.argsort(-middle, kind="stable")
    effects, classes = {}, schema.classes[1:] if len(schema.classes) == 2 else schema.classes
    some = slice(None) if isinstance(data.x_train, Tensor) else even(len(data.x_train), 10_000)  # of rows in a file
    candidates = data.schema.unstandardise(data.x_train[some].cpu().double())
    for name, parts, place in (columns[i] for i in first[:num]):
        values, settings = _places(parts, candidates[:, place])
        raw = schema.unstandardise(x.double()).repeat(len(values), 1, 1)  # (G, N, F)
        raw[:, :, place.start : place.start + settings.shape[1]] = settings[:, None]
        prediction = predict(posterior, schema.standardise(raw.flatten(0, 1)), num_draws=num_draws)
        outputs = prediction.probs[..., -len(classes) :] if classes else prediction.untransformed.locs[..., None]
        means = outputs.double().unflatten(1, (len(values), len(x))).mean(2)
        effects[name] = Dependence(values, prediction.transform(means).numpy())
    log = of_times or schema.target_scale == "log"
    centre = "geometric mean" if of_times else "median" if log else "mean"
    outputs = [f"P({schema.target} = {name})" for name in classes] or [f"{centre} of {schema.target}"]
    rows_text = f"{len(x):,} {'test' if rows_used == 'test' else 'training'} rows{' that are not censored' * of_times}"
    errors = f"squared error, in variances of {'log ' * log}{schema.target}"
    loss = "−log p, nats per row" if schema.has_classes else errors
    return Explanation(table.iloc[first], effects, outputs, rows_text, loss)


def _pixel_maps(posterior: Posterior | Any, x: Tensor, num: int, num_draws: int | None) -> PixelMaps:
    """The sides of a window are a seventh of the image's, at least two pixels; windows overlap by half."""
    rows = even(len(x), MAX_ROWS)
    prediction = predict(posterior, x[rows], num_draws=num_draws)
    chosen = prediction.total.argsort()[even(len(rows), num)].numpy()
    sides = [max(2, side // 7) for side in x.shape[-2:]]
    starts = [np.unique([*range(0, side - k, k // 2), side - k]) for side, k in zip(x.shape[-2:], sides, strict=True)]
    offsets = [np.arange(n) - start[:, None] for start, n in zip(starts, x.shape[-2:], strict=True)]
    down, across = ((at >= 0) & (at < side) for at, side in zip(offsets, sides, strict=True))
    windows = torch.from_numpy(down[:, None, :, None] & across[:, None]).flatten(0, 1)
    classes, maps = prediction.mean.argmax(-1).numpy()[chosen], []
    for row, k in zip(chosen, classes, strict=True):
        image = x[rows[row]].cpu()
        covered = torch.cat([image[None], torch.where(windows[:, None], 0.0, image)])  # 0: the median training pixel
        probs = predict(posterior, covered, num_draws=num_draws).probs.double()
        odds = probs[..., k].log() - probs[..., np.arange(probs.shape[-1]) != k].sum(-1).log()
        falls = (odds[:, :1] - odds[:, 1:]) @ windows.flatten(1).double()
        maps.append((falls / windows.flatten(1).sum(0)).unflatten(1, x.shape[-2:]))
    falls = torch.stack([m.mean(0) for m in maps]).numpy()
    spreads = torch.stack([m.std(0, correction=min(1, len(m) - 1)) for m in maps]).numpy()  # 0 of a point
    return PixelMaps(rows[chosen], x[rows[chosen]].cpu(), classes, falls, spreads)


def _places(columns: list[Column], raw: Tensor) -> tuple[list[Any], Tensor]:
    """G values of a column and their features (G, F'), from training rows (N, width) in their own units.

    The values of a date are years with a fraction, and its features are taken from training rows.
    """
    column, *others = columns
    raw = raw if column.fill is None else raw[raw[:, 1] == 0]  # the second feature marks missing values
    if others:
        starts = np.cumsum([len(one.features) for one in columns])[:-1]  # of sines and cosines of year and day
        turns = torch.atan2(raw[:, starts[::2]], raw[:, starts[1::2]]).double() / (2 * torch.pi)
        turns = (turns + 1e-4).remainder(1.0)  # float32 rounding may put January 1 or midnight before it
        moments = raw[:, 0].double().round() + turns[:, 0] + turns[:, 1:].sum(1) / 365.25
        order = moments.argsort()[torch.linspace(0, len(raw) - 1, min(PLACES, len(raw))).round().long()]
        return moments[order].tolist(), raw[order]
    if column.categories is not None:
        return list(column.categories), torch.eye(len(column.categories), dtype=raw.dtype)
    values = raw[:, 0].unique()
    if len(values) > PLACES:
        are_whole = bool((values == values.round()).all())  # whole numbers have no values in between
        values = raw[:, 0].quantile(torch.linspace(*ENDS, PLACES // 2, dtype=raw.dtype))
        between = torch.linspace(values[0], values[-1], PLACES // 2 + 2, dtype=raw.dtype)[1:-1]
        values = torch.cat([values, between]).round(decimals=0 if are_whole else 15).unique()
    return values.tolist(), F.pad(values[:, None], (0, raw.shape[1] - 1))
