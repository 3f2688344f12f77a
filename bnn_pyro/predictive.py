"""The posterior predictive p(y | x, D): an equal mixture of S likelihoods, one per draw of the weights.

Nothing is averaged before scoring. The likelihood is the one that trained: it is read off the model's site "y".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import pyro.poutine as poutine
import torch
from pyro.distributions import Distribution
from torch import Tensor

from bnn_pyro.errors import UserError
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.likelihoods import ReadLikelihood
from bnn_pyro.parts.mixtures import MIXTURES, Mixture, make, parameters, rebuild
from bnn_pyro.parts.nets import in_mode
from bnn_pyro.parts.priors import widest_activation
from bnn_pyro.posterior import Posterior, once

__all__ = ["Prediction", "predict"]

#: Bytes that the largest intermediate of one chunk may take; a 10,000-image prediction stays well under 1 GB.
DEFAULT_MAX_MEMORY = 256 * 2**20


@dataclass(frozen=True)
class Prediction:
    """p(y | x, D) as S components. Shapes: S draws, B points, K classes; all tensors on the CPU.

    components  the model's own distribution at site "y", batch shape (S, B), in the target's own units
    kind        the class of mixture that its likelihood names; None takes that of the components' family
    """

    components: Distribution
    kind: type[Mixture] | None = None

    @cached_property
    def mixture(self) -> Mixture:
        """What the equal mixture of the components is asked."""
        return (self.kind or MIXTURES.get(type(self.components), Mixture))(self.components)

    @property
    def task(self) -> str:
        """ "regression" or "classification"."""
        return self.mixture.task

    @property
    def has_classes(self) -> bool:
        """Whether the targets are labels, not numbers."""
        return self.mixture.has_classes

    @property
    def num_draws(self) -> int:
        """S, the number of draws."""
        return self.components.batch_shape[0]

    def __len__(self) -> int:
        return self.components.batch_shape[1]

    def __getitem__(self, index: Tensor | slice | Sequence[int]) -> Prediction:
        """The prediction for some of the points: a slice, a mask (B,) or indices."""
        return Prediction(rebuild(self.components, lambda p, _: p[:, index]), self.kind)

    def of_draws(self, index: Tensor | slice | Sequence[int]) -> Prediction:
        """The prediction by some of the draws: a slice, a mask (S,) or indices."""
        return Prediction(rebuild(self.components, lambda p, _: p[index]), self.kind)

    # -- classification ------------------------------------------------------------------------------------------
    @property
    def probs(self) -> Tensor:
        """Class probabilities of every draw, (S, B, K); a Bernoulli's are those of K = 2 classes."""
        self._need("classification", "probs")
        return self.mixture.probs

    @cached_property
    def votes(self) -> Tensor:
        """Share of the draws whose most probable class is k, (B, K)."""
        top = self.probs.argmax(-1)
        return torch.nn.functional.one_hot(top, self.probs.shape[-1]).double().mean(0).float()

    # -- regression ----------------------------------------------------------------------------------------------
    @property
    def locs(self) -> Tensor:
        """Component means (S, B), target units."""
        self._need("regression", "locs")
        return self.components.mean

    @property
    def scales(self) -> Tensor:
        """Component standard deviations (S, B), target units."""
        self._need("regression", "scales")
        return self.components.stddev

    def cdf(self, y: Tensor) -> Tensor:
        """P(Y ≤ y) of the mixture; y broadcasts against (B,), any leading dimensions."""
        self._need("regression", "cdf")
        return self.mixture.cdf(y)

    def quantile(self, q: float | Sequence[float]) -> Tensor:
        """Quantiles of the mixture by bisection of its cdf, (len(q), B), to 1e-9 of the search bracket.

        Raises UserError unless 0 < q < 1.
        """
        self._need("regression", "quantile")
        levels = torch.as_tensor([q] if isinstance(q, float | int) else list(q), dtype=torch.float64)
        if not bool(((levels > 0) & (levels < 1)).all()):
            raise UserError(f"quantile levels must lie strictly between 0 and 1, got {levels.tolist()}")
        points = max(1, 2**21 // (self.num_draws * len(levels)))  # 16 MB in float64
        return torch.cat([self[i : i + points].mixture.quantile(levels) for i in range(0, len(self), points)], 1)

    # -- both ----------------------------------------------------------------------------------------------------
    @property
    def mean(self) -> Tensor:
        """Mean class probabilities (B, K), or the predictive mean (B,) in target units."""
        return self.mixture.mean

    @property
    def total(self) -> Tensor:
        """Total uncertainty (B,): entropy of the mean probabilities in nats, or the mixture's variance."""
        return self.mixture.total

    @property
    def aleatoric(self) -> Tensor:
        """What more data would not remove (B,): mean entropy of the draws in nats, or mean component variance."""
        return self.mixture.aleatoric

    @property
    def epistemic(self) -> Tensor:
        """What the draws disagree on (B,): mutual information I(y; w) in nats, or the variance of the means."""
        return self.mixture.epistemic

    def log_prob(self, y: Tensor) -> Tensor:
        """log p(y | x, D) = logsumexp_s log p_s(y) − log S, in nats, (B,). y: labels or targets, (B,)."""
        if y.shape != (len(self),):
            num = len(self)
            raise UserError(f"y has shape {tuple(y.shape)}, but the prediction is for {num} points: ({num},)")
        return self.mixture.log_prob(y.cpu())

    def _need(self, task: str, what: str) -> None:
        if self.task != task:
            raise UserError(f"'{what}' belongs to {task}, but this is a {self.task} prediction")


def predict(
    posterior: Posterior,
    x: Tensor,
    *,
    num_draws: int = 100,
    max_memory: int = DEFAULT_MAX_MEMORY,
    seed: int | None = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Prediction:
    """p(y | x, D) at standardised inputs, the forward pass vectorised over draws and chunked over draws and points.

    The model is out of training mode meanwhile: all randomness is the draws'.

    x: (B, *input_shape), standardised (``data.x_test``, or ``schema.standardise(raw)``).
    num_draws: S; a posterior of stored draws gives at most as many as it holds.
    max_memory: bytes that a chunk's widest activation may take. The result itself takes 4·S·B·K bytes besides.
    seed: for the draws; None takes the caller's generator.
    progress: called as progress(draws done, of how many) after each block of draws.

    Raises UserError where x has not the shape that the posterior was trained on, or memory does not suffice.
    """
    shape = posterior.schema.input_shape
    if tuple(x.shape[1:]) != tuple(shape):
        raise UserError(
            f"inputs have shape {tuple(x.shape[1:])}, but this posterior was trained on {tuple(shape)} "
            f"({posterior.provenance.get('data', 'its data')}); load the data with the run's own schema"
        )
    if len(x) == 0:
        raise UserError("there is no input to predict: x has 0 rows")
    blocks, done, enough = [], 0, _enough_memory(num_draws, len(x), max_memory)
    with enough, torch.no_grad(), isolated(seed), in_mode(posterior.model, training=False):
        model, x = once(posterior.model, x)
        per_point = 4 * widest_activation(model, x[:1].to(posterior.device))  # bytes of one draw
        for block in posterior.blocks(num_draws, x):
            drawn = next(iter(block.values())).shape[0]
            at_once = max(1, min(drawn, max_memory // (per_point * min(len(x), 512))))
            points = max(1, min(len(x), max_memory // (per_point * at_once)))
            values: dict[str, Tensor] = {}
            for start in range(0, len(x), points):
                part = x[start : start + points].to(posterior.device)
                for first in range(0, drawn, at_once):
                    some = {site: value[first : first + at_once] for site, value in block.items()}
                    with ReadLikelihood() as read, poutine.condition(data=some):
                        model(part)
                    corner = slice(first, first + at_once), slice(start, start + points)
                    _place(read.likelihood, values, (drawn, len(x)), corner)
            blocks.append(values)
            done += drawn
            if progress is not None:
                progress(done, num_draws)
        joined = blocks[0] if len(blocks) == 1 else {n: torch.cat([b[n] for b in blocks]) for n in blocks[0]}
        return Prediction(make(type(read.likelihood), joined), read.mixture)


@contextmanager
def _enough_memory(num_draws: int, num: int, max_memory: int) -> Iterator[None]:
    """Where memory does not suffice, say so and how to do with less."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error).lower():
            raise
        raise UserError(
            f"there is not enough memory to predict {num:,} points by {num_draws:,} draws; take fewer of either, or a "
            f"smaller max_memory than {max_memory:,} bytes"
        ) from None


def _place(piece: Distribution, values: dict[str, Tensor], shape: tuple[int, int], corner: tuple[slice, slice]) -> None:
    """Copy the parameters of a piece to its corner (draws, points) of ``shape``, on the CPU.

    Pieces that are kept as they are would lie between the activations and keep their memory from being used again.
    """
    for name, (value, event) in parameters(piece).items():
        if name not in values:
            values[name] = torch.empty(shape + value.shape[value.dim() - event :], dtype=value.dtype)
        there = values[name][corner]
        there.copy_(value.expand(there.shape))
