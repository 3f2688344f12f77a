"""The posterior predictive p(y | x, D): an equal mixture of S likelihoods, one per draw of the weights.

Nothing is averaged before scoring: probabilities are averaged, never log-probabilities, and the moments and
quantiles are those of the mixture, not of a matched Gaussian. The likelihood is the one that trained: it is read
off the model's site "y".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import pyro.poutine as poutine
import torch
from pyro.distributions import Bernoulli, Categorical, Distribution, Independent, Normal
from torch import Tensor

from bnn_pyro.errors import UserError
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.backbone import once
from bnn_pyro.parts.likelihoods import ReadLikelihood
from bnn_pyro.parts.nets import in_mode
from bnn_pyro.parts.priors import widest_activation
from bnn_pyro.posterior import Posterior

__all__ = ["Prediction", "predict"]

#: Bytes that the largest intermediate of one chunk may take; a 10,000-image prediction stays well under 1 GB.
DEFAULT_MAX_MEMORY = 256 * 2**20


@dataclass(frozen=True)
class Prediction:
    """p(y | x, D) as S components. Shapes: S draws, B points, K classes; all tensors on the CPU.

    components  the model's own distribution at site "y", batch shape (S, B): Categorical, Bernoulli or Normal,
                the latter in the target's own units
    """

    components: Distribution

    @property
    def task(self) -> str:
        """ "regression" or "classification"."""
        return "regression" if isinstance(self.components, Normal) else "classification"

    @property
    def num_draws(self) -> int:
        """S, the number of draws."""
        return self.components.batch_shape[0]

    def __len__(self) -> int:
        return self.components.batch_shape[1]

    def __getitem__(self, index: Tensor | slice | Sequence[int]) -> Prediction:
        """The prediction for some of the points: a slice, a mask (B,) or indices."""
        return Prediction(_select(self.components, index))

    # -- classification ------------------------------------------------------------------------------------------
    @cached_property
    def probs(self) -> Tensor:
        """Class probabilities of every draw, (S, B, K); a Bernoulli's are those of K = 2 classes."""
        self._need("classification", "probs")
        if isinstance(self.components, Bernoulli):
            return torch.stack([torch.sigmoid(-self.components.logits), torch.sigmoid(self.components.logits)], -1)
        return self.components.logits.exp()  # they are normalised; a softmax would take eight times as long

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
        z = (y.unsqueeze(-2).double() - self.locs.double()) / self.scales.double()
        return torch.special.ndtr(z).mean(-2)

    def quantile(self, q: float | Sequence[float]) -> Tensor:
        """Quantiles of the mixture by bisection of its cdf, (len(q), B), to 1e-9 of the search bracket.

        Raises UserError unless 0 < q < 1.
        """
        self._need("regression", "quantile")
        levels = torch.as_tensor([q] if isinstance(q, float | int) else list(q), dtype=torch.float64)
        if not bool(((levels > 0) & (levels < 1)).all()):
            raise UserError(f"quantile levels must lie strictly between 0 and 1, got {levels.tolist()}")
        points = max(1, 2**21 // (self.num_draws * len(levels)))  # 16 MB in float64
        return torch.cat([self[i : i + points]._quantile(levels) for i in range(0, len(self), points)], 1)

    def _quantile(self, levels: Tensor) -> Tensor:
        z = torch.special.ndtri(levels)[:, None, None]  # (Q, 1, 1)
        ends = self.locs.double() + z * self.scales.double()  # (Q, S, B): every component's own quantile
        low, high = ends.amin(-2), ends.amax(-2)  # the mixture's lies between the extreme ones
        for _ in range(30):
            middle = (low + high) / 2
            below = self.cdf(middle) < levels[:, None]
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return ((low + high) / 2).float()

    # -- both ----------------------------------------------------------------------------------------------------
    @cached_property
    def mean(self) -> Tensor:
        """Mean class probabilities (B, K), or the predictive mean (B,) in target units."""
        return self.probs.mean(0) if self.task == "classification" else self.locs.mean(0)

    @cached_property
    def total(self) -> Tensor:
        """Total uncertainty (B,): entropy of the mean probabilities in nats, or the mixture's variance."""
        if self.task == "classification":
            return _entropy(self.mean)
        return self.aleatoric + self.epistemic

    @cached_property
    def aleatoric(self) -> Tensor:
        """What more data would not remove (B,): mean entropy of the draws in nats, or mean component variance."""
        if self.task == "classification":
            return torch.cat([_entropy(p).mean(0) for p in self.probs.split(1000, dim=1)])
        return self.scales.square().mean(0)

    @cached_property
    def epistemic(self) -> Tensor:
        """What the draws disagree on (B,): mutual information I(y; w) in nats, or the variance of the means."""
        if self.task == "classification":
            return (self.total - self.aleatoric).clamp_min(0.0)  # ≥ 0 by Jensen; the clamp removes rounding only
        return self.locs.double().var(0, unbiased=False).float()

    def log_prob(self, y: Tensor) -> Tensor:
        """log p(y | x, D) = logsumexp_s log p_s(y) − log S, in nats, (B,). y: labels or targets, (B,)."""
        if y.shape != (len(self),):
            raise UserError(
                f"y has shape {tuple(y.shape)}, but the prediction is for {len(self)} points: ({len(self)},)"
            )
        y = y.cpu()
        y = y.to(torch.float32) if isinstance(self.components, Bernoulli | Normal) else y.long()
        return torch.logsumexp(self.components.log_prob(y), 0) - math.log(self.num_draws)

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
            held: dict[str, Tensor] = {}
            for start in range(0, len(x), points):
                part = x[start : start + points].to(posterior.device)
                for first in range(0, drawn, at_once):
                    some = {site: value[first : first + at_once] for site, value in block.items()}
                    kind = _place(_likelihood(model, some, part), held, (drawn, len(x)), first, start)
            blocks.append(_make(kind, held))
            done += drawn
            if progress is not None:
                progress(done, num_draws)
        return Prediction(_join(blocks, 0))


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


def _place(piece: Distribution, held: dict[str, Tensor], shape: tuple[int, int], first: int, start: int) -> type:
    """Copy the parameters of a piece to where they belong among all draws and points; the piece's kind.

    Pieces that are kept as they are would lie between the activations and keep their memory from being used again.
    """
    kind = _kind(piece)
    for name in _PARAMETERS[kind]:
        value = getattr(piece, name)
        if name not in held:
            held[name] = value.new_empty(shape + value.shape[2:])
        held[name][first : first + value.shape[0], start : start + value.shape[1]] = value
    return kind


def _likelihood(model: Callable, draws: dict[str, Tensor], x: Tensor) -> Distribution:
    """The model's own distribution at "y", batch shape (draws, points), moved to the CPU."""
    with ReadLikelihood() as read, poutine.condition(data=draws):
        model(x)
    likelihood = read.likelihood
    while isinstance(likelihood, Independent):
        likelihood = likelihood.base_dist
    shape = (next(iter(draws.values())).shape[0], len(x))
    return _rebuild(likelihood, lambda p, event: p.expand(shape + p.shape[p.dim() - event :]).cpu())


# The parameters that make a component, by name, and how many event dimensions each has. Kept as logits: a
# probability that underflows would lose its log-density.
_PARAMETERS: dict[type, dict[str, int]] = {
    Categorical: {"logits": 1},
    Bernoulli: {"logits": 0},
    Normal: {"loc": 0, "scale": 0},
}


def _make(kind: type, parameters: dict[str, Tensor]) -> Distribution:
    """A distribution of parameters that were read off others of its kind.

    Their logits are normalised; the constructor would do it again, in the time of the product that they came from.
    """
    if kind is not Categorical:
        return kind(**parameters, validate_args=False)
    logits = parameters["logits"]
    made = Categorical(logits=logits[:1, :1], validate_args=False).expand(logits.shape[:-1])
    made.logits = made._param = logits
    return made


def _kind(d: Distribution) -> type:
    for kind in _PARAMETERS:
        if isinstance(d, kind):
            return kind
    raise UserError(
        f"a likelihood of type {type(d).__name__} has no Prediction yet; use Categorical, Bernoulli, Normal"
    )


def _rebuild(d: Distribution, change: Callable[[Tensor, int], Tensor]) -> Distribution:
    kind = _kind(d)
    parameters = {name: change(getattr(d, name), event) for name, event in _PARAMETERS[kind].items()}
    return _make(kind, parameters)


def _select(d: Distribution, index: Tensor | slice | Sequence[int]) -> Distribution:
    return _rebuild(d, lambda p, _: p[:, index])


def _join(pieces: list[Distribution], dim: int) -> Distribution:
    if len(pieces) == 1:
        return pieces[0]
    kind = _kind(pieces[0])
    parameters = {name: torch.cat([getattr(p, name) for p in pieces], dim) for name in _PARAMETERS[kind]}
    return _make(kind, parameters)


def _entropy(probs: Tensor) -> Tensor:
    """Entropy in nats over the last dimension; 0·log 0 = 0."""
    return -torch.special.xlogy(probs, probs).sum(-1)
