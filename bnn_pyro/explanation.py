"""Which columns of a table, or places of an image, a posterior's predictions rest on: with the spread over its draws.

Permutation importance (Breiman 2001, Machine Learning 45:5-32; Fisher, Rudin & Dominici 2019, arXiv:1801.01489): by how
much −log p(y | x, w), or of numbers the squared error, rises where the values of a column are shuffled among the rows.
Partial dependence (Friedman 2001, Annals of Statistics 29:1189-1232): the mean output over the rows where a column has
one value in all of them. Both are taken draw by draw; for one draw they are scikit-learn's own. Where columns depend on
one another a column may count for little because another tells the same. Of an image, windows are covered one after
the other (Zeiler & Fergus 2014, arXiv:1311.2901, section 4.2) by what a pixel has on average.
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

#: Columns of a table at most; rows at most, fewer than which training rows are taken; how often a column is permuted.
MAX_COLUMNS, MAX_ROWS, MIN_ROWS, REPEATS = 200, 200, 20, 5
#: Values of a column at which its effect is seen, between these quantiles of the training rows: half of them quantiles,
#: half at equal distances, as the last quantile of a long tail may be far from the one before.
PLACES, ENDS = 20, (0.01, 0.99)


class Dependence(NamedTuple):
    """Of one column: G values, numbers in its own units or categories, and the mean output of each draw (S, G, K)."""

    values: list[float] | list[str]
    outputs: np.ndarray


class Explanation(NamedTuple):
    """What :func:`explain` found on N rows.

    importance  a line a column (a date is one, whatever numbers it became), the largest first: median over the draws,
                and low and high, their central 90 %. 0 is a column that is not used, below 0 one that misleads
    loss        whose rise that is, with its unit
    dependence  {column: its effect} of the most important ones, the largest first
    outputs     names of the K outputs: of two classes the probability of the second, of more that of each; else the
                mean of the target, in its own units; on a log scale its median, the geometric mean over the rows
    rows        which rows, in words
    """

    importance: pd.DataFrame
    dependence: Mapping[str, Dependence]
    outputs: list[str]
    rows: str
    loss: str


class PixelMaps(NamedTuple):
    """What :func:`explain` found of M images, from the most certain to the most uncertain.

    rows    (M,) their numbers among the test rows, or where there are none the training rows
    images  (M, *input_shape), standardised     classes  (M,) the most probable class, whose log odds are mapped
    falls   (M, height, width) how far they fall, in nats, where a pixel is covered: mean over the draws, and over the
            windows that cover it; below 0 the pixel speaks against the class     spreads  its standard deviation
    """

    rows: np.ndarray
    images: Tensor
    classes: np.ndarray
    falls: np.ndarray
    spreads: np.ndarray


def explain(
    posterior: Posterior | Any, data: Dataset, *, num: int = 6, num_draws: int | None = None, seed: int = 0
) -> Explanation | PixelMaps:
    """Permutation importance of every column of a table, and the effect of the ``num`` most important ones.

    Of images of classes, how far covering a part of one changes the odds of its class: maps of ``num`` of them.

    posterior: also one that was calibrated.   data: whose test rows are taken, 200 at most; training rows where there
        are fewer than 20. Censored times are left out.   num_draws: S, as of ``predict``.   seed: of the permutations.
    Raises UserError for images without classes, other inputs than the posterior's, and more than 200 columns.
    """
    schema, columns = data.schema, inputs_of(data.schema)
    schema.need_one_target("explain")
    if schema.is_image and schema.has_classes and schema.input_shape == posterior.schema.input_shape:
        return _pixel_maps(posterior, data.x_test if len(data.x_test) else data.x_train, num, num_draws)
    if not columns or tuple(schema.input_shape) != tuple(posterior.schema.input_shape):
        shapes = tuple(schema.input_shape), tuple(posterior.schema.input_shape)
        raise UserError("explain takes the table that a posterior was fitted to; '{}' has inputs of shape {}, and the "
                        "posterior takes {}".format(data.name, *shapes))  # fmt: skip
    if len(columns) > MAX_COLUMNS:
        raise UserError(f"explain takes at most {MAX_COLUMNS} columns, and '{data.name}' has {len(columns):,}; leave "
                        "some out with exclude=")  # fmt: skip
    targets = {part: getattr(data, f"y_{part}").cpu() for part in ("test", "train")}
    of_times = schema.task == "survival"  # how far off a censored one is is not known
    known = {part: np.flatnonzero(y > 0) if of_times else np.arange(len(y)) for part, y in targets.items()}
    which = "test" if len(known["test"]) >= MIN_ROWS else "train"
    rows = known[which][even(len(known[which]), MAX_ROWS)]
    x, y = (getattr(data, f"{part}_{which}")[rows].cpu() for part in "xy")

    def losses(x: Tensor) -> np.ndarray:
        """Of each draw, mean over the rows, (S,); of numbers not −log p, which has no bound where rows are shuffled."""
        prediction, at = predict(posterior, x, num_draws=num_draws), y.repeat(len(x) // len(y))
        if schema.has_classes:
            return -prediction.log_probs(at).double().mean(1).numpy()
        inverse = prediction.transform.inv  # on a log scale the errors are those of log y
        errors = prediction.untransformed.locs - inverse(at)
        return (errors.double().square().mean(1) / inverse(y.double()).var(correction=0)).numpy()

    generator, whole, rises = torch.Generator().manual_seed(seed), losses(x), []
    for _, _, place in columns:
        moved = x.repeat(REPEATS, 1)
        moved[:, place] = x[torch.cat([torch.randperm(len(x), generator=generator) for _ in range(REPEATS)])][:, place]
        rises.append(losses(moved) - whole)
    low, middle, high = np.quantile(np.array(rises), (0.05, 0.5, 0.95), axis=1)
    names = pd.Index([name for name, *_ in columns], name="column")
    table = pd.DataFrame({"importance": middle, "low": low, "high": high}, index=names)
    first = np.argsort(-middle, kind="stable")
    effects, classes = {}, schema.classes[1:] if len(schema.classes) == 2 else schema.classes
    some = slice(None) if isinstance(data.x_train, Tensor) else even(len(data.x_train), 10_000)  # of rows in a file
    known = data.schema.unstandardise(data.x_train[some].cpu().double())
    for name, parts, place in (columns[i] for i in first[:num]):
        values, settings = _places(parts, known[:, place])
        raw = schema.unstandardise(x.double()).repeat(len(values), 1, 1)  # (G, N, F)
        raw[:, :, place.start : place.start + settings.shape[1]] = settings[:, None]
        prediction = predict(posterior, schema.standardise(raw.flatten(0, 1)), num_draws=num_draws)
        outputs = prediction.probs[..., -len(classes) :] if classes else prediction.untransformed.locs[..., None]
        means = outputs.double().unflatten(1, (len(values), len(x))).mean(2)
        effects[name] = Dependence(values, prediction.transform(means).numpy())
    log = of_times or schema.target_scale == "log"
    centre = "geometric mean" if of_times else "median" if log else "mean"
    outputs = [f"P({schema.target} = {name})" for name in classes] or [f"{centre} of {schema.target}"]
    words = f"{len(x):,} {'test' if which == 'test' else 'training'} rows{' that are not censored' * of_times}"
    errors = f"squared error, in variances of {'log ' * log}{schema.target}"
    loss = "−log p, nats per row" if schema.has_classes else errors
    return Explanation(table.iloc[first], effects, outputs, words, loss)


def _pixel_maps(posterior: Posterior | Any, x: Tensor, num: int, num_draws: int | None) -> PixelMaps:
    """Windows have a seventh of the image's sides, at least two pixels, and lie half of that apart."""
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
    """(G values, the features that they become (G, F')) by training rows (N, width) in their own units.

    The values of a date are years, with their fraction, and its features those of training rows.
    """
    column, *others = columns
    raw = raw if column.fill is None else raw[raw[:, 1] == 0]  # where it is known, as its second feature says
    if others:
        starts = np.cumsum([len(one.features) for one in columns])[:-1]  # of sines and cosines: of the year, of the day
        turns = torch.atan2(raw[:, starts[::2]], raw[:, starts[1::2]]).double() / (2 * torch.pi)
        turns = (turns + 1e-4).remainder(1.0)  # 32 bits may put January 1, or midnight, before it
        moments = raw[:, 0].double().round() + turns[:, 0] + turns[:, 1:].sum(1) / 365.25
        order = moments.argsort()[torch.linspace(0, len(raw) - 1, min(PLACES, len(raw))).round().long()]
        return moments[order].tolist(), raw[order]
    if column.categories is not None:
        return list(column.categories), torch.eye(len(column.categories), dtype=raw.dtype)
    values = raw[:, 0].unique()
    if len(values) > PLACES:
        are_whole = bool((values == values.round()).all())  # a code has no value in between
        values = raw[:, 0].quantile(torch.linspace(*ENDS, PLACES // 2, dtype=raw.dtype))
        between = torch.linspace(values[0], values[-1], PLACES // 2 + 2, dtype=raw.dtype)[1:-1]
        values = torch.cat([values, between]).round(decimals=0 if are_whole else 15).unique()
    return values.tolist(), F.pad(values[:, None], (0, raw.shape[1] - 1))
