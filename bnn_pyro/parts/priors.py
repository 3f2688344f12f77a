"""Priors placed on every parameter of a network, and the model p(y, w | x) that follows.

A prior is written as a short text, ``"fan-in:1"``, so that a setting, a command line and a JSON file say it alike;
:func:`parse_prior` makes the distributions. :class:`BayesianNet` samples each parameter of a network from its prior,
calls the network with the sample and hands the output to a likelihood. It never learns N.
"""

import copy
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from functools import cache

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bnn_pyro.errors import UserError, refusing
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.components import NO_PREDICTION, select
from bnn_pyro.parts.nets import in_mode, outputs_seen
from bnn_pyro.parts.observed import OBSERVED, read_likelihood
from bnn_pyro.parts.own_module import call_with_draws, norm_layers
from bnn_pyro.parts.weights import ArrayDistribution, CentredNormal, LogUniform, cut
from bnn_pyro.settings import parse_named


class GammaNormal(ArrayDistribution):
    """w | τ ~ Normal(0, I/τ) with τ ~ Gamma(shape, rate) integrated out: P numbers of one parameter, one τ for all.

    p(w) = Γ(shape + P/2) / Γ(shape) · rate^shape · (2π)^(−P/2) · (rate + ½ Σ w²)^−(shape + P/2)

    A Student t, a density like any other. By input each of a layer's inputs, the second dimension of w, has its own τ.
    """

    def __init__(self, shape: Tensor, rate: Tensor, event_shape: torch.Size, by_input: bool = False) -> None:
        self.shape_, self.rate, self.groups = shape, rate, event_shape[1] if by_input else 1
        split = (event_shape[0], self.groups, event_shape[2:].numel()) if by_input else (event_shape.numel(), 1, 1)
        self.split, self._size = split, event_shape.numel() // self.groups
        super().__init__(event_shape)

    def _draw(self, shape: torch.Size) -> Tensor:
        lead = shape[: len(shape) - len(self.event_shape)]
        precision = dist.Gamma(self.shape_, self.rate).rsample((*lead, self.groups))
        noise = torch.randn((*lead, self.event_shape.numel()), device=self.rate.device, dtype=self.rate.dtype)
        return self.scaled(noise, precision.rsqrt()).reshape(shape)

    def scaled(self, w: Tensor, scales: Tensor) -> Tensor:
        """w (…, P) by the scales (…, groups)."""
        return (w.unflatten(-1, self.split) * scales[..., None, :, None]).flatten(-3)

    def sums(self, values: Tensor) -> Tensor:
        """(…, P) summed over the numbers of each τ: (…, groups)."""
        return values.unflatten(-1, self.split).sum((-3, -1))

    def given(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """(shape (), rate (…, groups)) of τ given w (…, P), which has a gamma distribution too."""
        return self.shape_ + 0.5 * self._size, self.rate + 0.5 * self.sums(w.square())

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density in nats, one a parameter."""
        power, rate = self.given(self._flat(value))
        constant = torch.lgamma(power) - torch.lgamma(self.shape_) + self.shape_ * self.rate.log()
        constant = constant - 0.5 * self._size * math.log(2 * math.pi)
        return (constant - power * rate.log()).sum(-1)


class ScaleMixture(ArrayDistribution):
    """wᵢ ~ π Normal(0, σ₁) + (1 − π) Normal(0, σ₂): Blundell et al. 2015, equation 7; its KL has no closed form."""

    has_rsample = False

    def __init__(self, wide: Tensor, narrow: Tensor, weight: float, shape: torch.Size) -> None:
        self.wide, self.narrow, self.weight = wide, narrow, weight
        super().__init__(shape)

    def _draw(self, shape: torch.Size) -> Tensor:
        choose = torch.rand(shape, device=self.wide.device) < self.weight
        return torch.where(choose, self.wide, self.narrow) * torch.randn(shape, device=self.wide.device)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density of the whole array in nats."""
        # log(eᵃ + eᵇ) = a + softplus(b − a), and b − a is linear in w²: three passes over the weights instead of ten.
        square = value.square()
        gap = math.log1p(-self.weight) - math.log(self.weight) + (self.wide / self.narrow).log()
        slope = 0.5 / self.narrow.square() - 0.5 / self.wide.square()
        wide = math.log(self.weight) - self.wide.log() - 0.5 * math.log(2 * math.pi)
        return self._flat(wide - square * (0.5 / self.wide.square()) + F.softplus(gap - slope * square)).sum(-1)


#: A parameter of the net and how many inputs a unit of its layer has, 1 of a vector -> its prior, of its event shape.
Maker = Callable[[Tensor, int], dist.TorchDistribution]


def _normal(scale: float = 1.0) -> Maker:
    """normal:SCALE — w ~ Normal(0, scale), the same for all parameters; SCALE > 0."""
    return lambda w, _: CentredNormal(scale, w.shape, like=w)


def _fan_in(scale: float = 1.0) -> Maker:
    """fan-in:SCALE — Normal(0, scale/√fan-in) for weights, Normal(0, scale) for biases; SCALE > 0 (Neal 1996)."""
    return lambda w, inputs: CentredNormal(scale / math.sqrt(inputs), w.shape, like=w)


def _pretrained(scale: float = 1.0) -> Maker:
    """pretrained:SCALE — Normal(w₀, SCALE/√fan-in), biases Normal(w₀, SCALE), w₀ the module's; SCALE > 0 (MOPED)."""
    return lambda w, inputs: dist.Normal(w, scale / math.sqrt(inputs), validate_args=False).to_event(w.dim())


def _log_uniform() -> Maker:
    """log-uniform — p(w) ∝ 1/|w|, improper: for variational dropout (Kingma et al. 2015)."""
    return lambda w, _: LogUniform(w.shape)


def _gamma(shape: float = 1.0, rate: float = 1.0) -> Maker:
    """gamma:SHAPE,RATE — Normal(0, 1/√τ), each parameter with its own τ ~ Gamma(SHAPE, RATE); both > 0."""
    return lambda w, _: GammaNormal(w.new_tensor(shape), w.new_tensor(rate), w.shape)


def _ard(shape: float = 0.5, rate: float | None = None) -> Maker:
    """ard:SHAPE,RATE — gamma, but each input of a layer has a τ for its weights; both > 0 (Neal 1996, sec. 1.2.3).

    RATE is by default 0.01, above 14 inputs 2/fan-in²: with SHAPE 0.5 w is Cauchy, and inputs that say nothing then add
    up to no more where they are many.
    """
    return lambda w, inputs: GammaNormal(
        w.new_tensor(shape), w.new_tensor(rate or min(0.01, 2 / inputs**2)), w.shape, by_input=w.dim() > 1
    )


def _flat(w: Tensor, _: int) -> dist.TorchDistribution:
    """p(w) ∝ 1: of weights that a fit only finds a value of."""
    return dist.ImproperUniform(dist.constraints.independent(dist.constraints.real, w.dim()), torch.Size(), w.shape)


def _scale_mixture(wide: float = 1.0, narrow: float = math.exp(-6), weight: float = 0.5) -> Maker:
    """scale-mixture:WIDE,NARROW,WEIGHT — Blundell et al. 2015, equation 7; positive, WEIGHT (of WIDE) < 1."""
    if not 0 < weight < 1:
        raise UserError(f"the weight of the wide component must lie between 0 and 1, got {weight}")
    return lambda w, _: ScaleMixture(w.new_tensor(wide), w.new_tensor(narrow), weight, w.shape)


#: Every prior by name; the numbers after the colon are its arguments.
PRIORS: dict[str, Callable[..., Maker]] = {
    "normal": _normal,
    "fan-in": _fan_in,
    "pretrained": _pretrained,
    "gamma": _gamma,
    "ard": _ard,
    "scale-mixture": _scale_mixture,
    "log-uniform": _log_uniform,
}

#: "by-target", of labels and of numbers: under narrower priors the best q, and a wide net's mode, predict too flat.
BY_TARGET = {True: "fan-in:8", False: "fan-in:2"}


@cache
def parse_prior(text: str, has_classes: bool = False) -> Maker:
    """``"fan-in:1.5"`` -> the prior; numbers left out take their defaults. "by-target" is that of the kind of target.

    Raises UserError for an unknown name, a number that is none, or a scale that is not positive.
    """
    text = BY_TARGET[has_classes] if text == "by-target" else text
    return parse_named("prior", text, PRIORS)


class BayesianNet(nn.Module):
    """p(y, w | x): every parameter of ``net`` is a latent site of its own name, then the likelihood.

    net: any module (B, *input_shape) -> (B, outputs), of which a copy is kept. It gives the sites' names and shapes
        and, by its initial values, a starting point; the values are no part of the model, but where a prior is centred
        at them. Its buffers are, and are kept with the posterior. A net that takes weights with leading draw dimensions
        says so by ``takes_draws = True``; any other is mapped over the draws.
    likelihood: a callable (f, y) from ``parts.likelihoods``.
    prior: as for :func:`parse_prior`; FIRST/OTHERS, the first for the first layer's weights, the second for all other
        parameters; or {site: text}.   points: sites without a prior, p(w) ∝ 1.
    statistics: a ``BatchStatistics`` of the net, which then normalises by them; None leaves it to torch, by running
        averages.   frozen: whether these stay as they are in training.
    sampling: of ``row_noise.sampling_of``: {site: how it is sampled in training, where that is by row}.
    still: parameters of the user's module that are buffers of the net.
    precision: "bfloat16", which an optimisation sets: the net's passes in training are then under autocast.
    """

    precision: str | None = None
    still: Collection[str] = ()
    sampling: Mapping[str, str] = {}

    def __init__(
        self, net: nn.Module, likelihood: nn.Module, prior: str | Mapping[str, str] = "fan-in",
        points: Collection[str] = (), statistics: nn.Module | None = None, frozen: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.net = copy.deepcopy(net).requires_grad_(False)
        self.likelihood = likelihood
        self.points, self.statistics, self.frozen = tuple(points), statistics, frozen
        names = dict(self.net.named_parameters())
        self._inputs = {name: w[0].numel() if w.dim() > 1 else 1 for name, w in names.items()}
        for path, layer in self.net.named_modules():
            if isinstance(layer, nn.modules.conv._ConvTransposeNd):  # whose weights (inputs, outputs / groups, …) are
                self._inputs[name := f"{path}.weight".lstrip(".")] = layer.weight[:, 0].numel() // layer.groups
                if str(prior if isinstance(prior, str) else prior.get(name)).startswith("ard"):
                    raise UserError(f"ard has a scale for each input of a layer, but not for '{name}' of a transposed "
                                    "convolution: give it another prior, such as fan-in:2")  # fmt: skip
        if not isinstance(prior, str) and not (isinstance(prior, Mapping) and names.keys() <= {*prior, *points}):
            raise UserError(f"prior= takes one text, such as 'fan-in:1', got {prior!r:.60}; priors of layers are "
                            "those of bp.Bayesian(net, prior={pattern: text})")  # fmt: skip
        if taken := names.keys() & {OBSERVED, "data", "draws", *likelihood.initial}:
            raise UserError(f"a parameter of the network is called '{min(taken)}', which is the name of something else "
                            "in the model, such as the targets 'y'; rename it")  # fmt: skip
        if isinstance(prior, str):
            first, _, others = prior.partition("/")
            weights = [name for name, value in names.items() if value.dim() > 1][:1]
            prior = dict.fromkeys(names, others or first) | dict.fromkeys(weights, first)
        self.texts = texts = prior
        for text in texts.values():
            parse_prior(str(text))  # raises for one that is none
        self._centred = [n for n, text in texts.items() if n not in points and text.partition(":")[0] == "pretrained"]
        if self._centred:
            self.register_buffer("centre", torch.cat([self.net.get_parameter(n).flatten() for n in self._centred]))

    #: {site: value} where guides and optimisers start: the network's own initial weights, the likelihood's own.
    initial = property(lambda self: {**dict(self.net.named_parameters()), **self.likelihood.initial})

    def prior(self) -> dict[str, dist.TorchDistribution]:
        """{site: p(w)} of the net's parameters."""
        own = dict(self.net.named_parameters())
        if self._centred:
            own |= cut(self.centre, {name: own[name].shape for name in self._centred})
        classes, flat = getattr(self.likelihood, "has_classes", False), dict.fromkeys(self.points, _flat)
        return {
            name: (flat.get(name) or parse_prior(self.texts[name], classes))(w, self._inputs[name])
            for name, w in own.items()
        }

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Draw w, then the site "y" for inputs x (B, *input_shape); y (B,) or (B, T) observes it."""
        w = {name: pyro.sample(name, prior) for name, prior in self.prior().items()}
        dims = 2 + getattr(self.likelihood, "event_dim", 0)
        rows_of_each = y is not None and y.dim() == dims and x.shape[:2] == y.shape[:2]  # not only targets
        statistics = {} if self.statistics is None or self.training else self.statistics(self.net, w)
        with ExitStack() as modes:
            modes.enter_context(in_mode(*(norm_layers(self.net).values() if self.frozen else ()), training=False))
            if self.sampling and self.training:
                from bnn_pyro.parts.row_noise import RowNoise  # of networks of one's own alone

                modes.enter_context(RowNoise(w, len(x), self.sampling))
            if self.precision == "bfloat16" and self.training:
                modes.enter_context(torch.autocast(x.device.type, torch.bfloat16))
            f = call_with_draws(self.net, {**w, **statistics}, x, rows_of_each)
        return self.likelihood(f.float() if f.dtype.itemsize < 4 else f, y)


@torch.no_grad()
def widest_activation(model: nn.Module, x: Tensor) -> int:
    """The most numbers per point and draw that a module of the model returns, by the first row of x (B, …).

    Raises UserError for a likelihood that has no Prediction.
    """
    widest = [1]

    def measure(_: str, output: object) -> None:
        parts = output if isinstance(output, tuple | list) else (output,)
        widest.extend(part.numel() for part in parts if isinstance(part, Tensor))

    initial = {site: value.detach().to(x.device) for site, value in model.initial.items()}
    with isolated(0), in_mode(model, training=False), poutine.condition(data=initial), outputs_seen(model, measure):
        d = read_likelihood(model, x[:1]).likelihood
        with refusing(f"a likelihood of type {type(d).__name__} {NO_PREDICTION}", TypeError, ValueError):
            select(d, ...)
    return max(widest)
