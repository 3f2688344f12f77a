"""The posterior predictive p(y | x, D): an equally weighted mixture of S likelihoods, one per draw of the weights.

Nothing is averaged before scoring. The likelihood is taken from the model's site "y", as in training.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.distributions import Bernoulli, Categorical, Distribution, LogNormal, Normal
from torch import Tensor

from bnn_pyro.datasets.dataset import Dataset, Schema
from bnn_pyro.datasets.in_memory import inputs
from bnn_pyro.datasets.rows import Rows
from bnn_pyro.errors import UserError, refusing
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.components import kind_of, make, parameters, spread_counts, without_inputs
from bnn_pyro.parts.mixtures import Mixture
from bnn_pyro.parts.nets import in_mode, keep_freed_memory
from bnn_pyro.parts.observed import LogNormalMixture, OrdinalMixture, TimeMixture, read_likelihood
from bnn_pyro.parts.priors import widest_activation
from bnn_pyro.parts.several import SeveralMixture
from bnn_pyro.posterior import Posterior, split_frozen

#: Default memory in bytes of the widest activation of a chunk; on a CPU less, as activations that do not fit into the
#: cache take up to twice the time, but enough for ``CPU_ROWS`` rows.
MAX_MEMORY, CPU_MEMORY, CPU_ROWS = 256 * 2**20, 16 * 2**20, 32
#: ``predict`` warns if the mean of a column is more than ``FAR_OFF`` standard deviations from 0 as it is given, but
#: would be within ``NEAR`` after standardisation.
FAR_OFF, NEAR = 10.0, 3.0
#: The default number of draws S.
NUM_DRAWS = 100
#: The lowest probability of a class or mean of counts, so that a class or count without training rows is possible.
FLOOR = 1e-6
#: What ``predict`` returns.
Prediction = Mixture


def predict(
    posterior: Posterior | Any, x: Tensor | Any, *, num_draws: int | None = None, max_memory: int | None = None,
    seed: int | None = 0, progress: Callable[[int, int], None] | None = None,
) -> Prediction:  # fmt: skip
    """p(y | x, D), computed by forward passes that are vectorised over draws and chunked over draws and points.

    The model is in evaluation mode, so that the draws of the weights are the only randomness.

    posterior: also a calibrated one, whose own ``predict`` is called.
    x: (B, *input_shape). A tensor must be standardised (``data.x_test``, or ``schema.standardise(raw)``); a frame,
        NumPy array or list of rows is in the units of the data and goes through ``load_inputs``.
    num_draws: S, by default 100; stored draws give at most as many as there are.
    max_memory: bytes for the widest activation of a chunk, by default 256 MiB, on a CPU 16 MiB or what 32 rows take,
        unless x is in a file, which each block of draws reads again. The result takes another 4·S·B·K bytes.
    seed: seed of the draws; None uses the caller's random generator.
    progress: called as progress(draws done, draws in total) after each block of draws.
    Raises UserError if x has another shape than in training or a value that is not finite, or if memory runs out.
    """
    index, x = getattr(x, "axes", [None])[0], x if isinstance(x, Tensor | Rows) else inputs(x, posterior.schema)
    if not isinstance(posterior, Posterior):
        made = posterior.predict(x, num_draws=num_draws, max_memory=max_memory, seed=seed, progress=progress)
        made.schema, made.index = posterior.schema, index
        return made
    num_draws, shape = NUM_DRAWS if num_draws is None else num_draws, posterior.schema.input_shape
    if tuple(x.shape) == tuple(shape):
        raise UserError(f"x of shape {tuple(shape)} is one row without its first axis; give x[None]")
    if tuple(x.shape[1:]) != tuple(shape):
        way = "give a tuple of all" if posterior.schema.input_parts else "load them with its schema"
        raise UserError(f"inputs have shape {tuple(x.shape[1:])}, but this posterior was trained on {tuple(shape)} "
                        f"({posterior.provenance.get('data', 'its data')}); {way}")  # fmt: skip
    if len(x) == 0:
        raise UserError("there is no input to predict: x has 0 rows")
    if isinstance(x, Tensor):
        x = x.float()
        if not (finite := x.isfinite().flatten(1).all(1)).all():
            raise UserError(f"x has a value that is nan or infinite in row {int(finite.long().argmin())} (from 0)")
        mean = x.mean(0)
        if ((mean.abs() > FAR_OFF) & (posterior.schema.standardise(mean).abs() < NEAR)).any():
            warnings.warn(f"a tensor is taken as standardised, and a column of x is {FAR_OFF:g} standard deviations off"
                          ", but not so in the units of the data; if it is in these, give x.numpy() or "
                          "posterior.schema.standardise(x)", stacklevel=2)  # fmt: skip
    keep_freed_memory()
    few = (f"there is not enough memory to predict {len(x):,} points by {num_draws:,} draws; take fewer of either, or "
           f"a smaller max_memory than {max_memory or MAX_MEMORY:,} bytes")  # fmt: skip
    blocks, done = [], 0
    with (
        refusing(few, MemoryError), refusing(few, RuntimeError, saying="memory"), torch.no_grad(), isolated(seed),
        in_mode(posterior.model, training=False),
    ):  # fmt: skip
        model, x = split_frozen(posterior.model, x)
        per_point = 4 * widest_activation(model, x[:1].to(posterior.device))  # bytes of one draw
        if max_memory is None:
            in_cache = posterior.device.type == "cpu" and isinstance(x, Tensor)
            max_memory = min(MAX_MEMORY, max(CPU_MEMORY, CPU_ROWS * per_point)) if in_cache else MAX_MEMORY
        for block in posterior.blocks(num_draws, x):
            drawn = next(iter(block.values())).shape[0]
            at_once = max(1, min(drawn, max_memory // (per_point * min(len(x), 512))))
            points = max(1, min(len(x), max_memory // (per_point * at_once)))
            values: dict[str, Tensor] = {}
            for first in range(0, drawn, at_once):
                some = {site: value[first : first + at_once] for site, value in block.items()}
                for start in range(0, len(x), points):  # batch statistics are cached by the identity of the draws
                    with poutine.condition(data=some):
                        read = read_likelihood(model, x[start : start + points].to(posterior.device), start)
                    corner = slice(first, first + at_once), slice(start, start + points)
                    _place(read.likelihood, values, (drawn, len(x)), corner)
            blocks.append(values)
            done += drawn
            if progress is not None:
                progress(done, num_draws)
        values = blocks[0] if len(blocks) == 1 else {n: torch.cat([b[n] for b in blocks]) for n in blocks[0]}
        made = read.mixture(make(kind_of(read.likelihood), values))
    made.schema, made.index = posterior.schema, index
    return made


def _place(piece: Distribution, values: dict[str, Tensor], shape: tuple[int, int], corner: tuple[slice, slice]) -> None:
    """Copy the parameters of a chunk to its place, ``corner``, in CPU tensors for all draws and points, ``shape``."""
    for name, (value, event) in parameters(piece).items():
        if name not in values:
            rest = piece.batch_shape[2:] + value.shape[value.dim() - event :]  # several targets: (S, B, T)
            values[name] = torch.empty(shape + rest, dtype=value.dtype)
        target = values[name][corner]
        target.copy_(value.expand(target.shape))


def knows_nothing(data: Dataset, x: Tensor) -> Prediction:
    """The baseline prediction for rows x (B, …), which uses the training targets and an exposure, but no other input.

    Classes: frequencies in the training rows, with one more row of each class. Numbers: a Normal with the targets' mean
    and standard deviation (of log y on a log scale), separately for several targets. Counts: the maximum-likelihood
    negative binomial with their mean, or with an exposure e the mean e Σy/Σe. Times: the maximum-likelihood Weibull.
    Labels: their frequencies, with one more row of 0 and of 1.
    """
    schema, num, y = data.schema, len(x), data.y_train.cpu()
    if schema.has_classes:
        return of_classes(schema.task, (y.bincount(minlength=len(schema.classes)) + 1.0).expand(1, num, -1))
    if schema.task == "survival":
        return TimeMixture(without_inputs(y).expand((1, num)))
    if schema.task == "counts":
        of = [v[:, -1].cpu().double() if schema.exposure else torch.ones(len(v)).double() for v in (x, data.x_train)]
        new, fitted = ((exposure * (y.double().sum() / of[1].sum())).clamp_min(FLOOR) for exposure in of)
        return Prediction(spread_counts(new.expand(1, num), y, fitted))
    if schema.task == "labels":
        return SeveralMixture(Bernoulli((y.sum(0) + 1) / (len(y) + 2)).expand((1, num, y.shape[1])))
    y = y.double().log() if schema.target_scale == "log" else y.double()
    loc, scale = y.mean(0), y.std(0, correction=0).clamp_min(torch.finfo(torch.float32).tiny)
    if schema.targets:
        return SeveralMixture(Normal(loc, scale).expand((1, num, y.shape[1])))
    return of_numbers(schema, loc.expand(1, num), scale.expand(1, num))


def of_classes(task: str, probs: Tensor) -> Prediction:
    """The prediction of classes from weights (S, B, K) proportional to probabilities; ``task`` may be "ordinal"."""
    return (OrdinalMixture if task == "ordinal" else Prediction)(Categorical(probs=probs))


def of_numbers(schema: Schema, loc: Tensor, scale: Tensor) -> Prediction:
    """The prediction of a number by Normals (S, B), or of its logarithm if the schema has a log scale."""
    return LogNormalMixture(LogNormal(loc, scale)) if schema.target_scale == "log" else Prediction(Normal(loc, scale))
