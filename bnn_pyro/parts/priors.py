"""Priors of the parameters of a network, and the model p(y, w | x) with these priors.

A prior is a short text such as ``"fan-in:1"`` in settings, on the command line and in JSON files; :func:`parse_prior`
turns it into distributions. :class:`BayesianNet` samples each parameter of a network from its prior, calls the network
with the sample and passes the output to a likelihood. It does not depend on N.
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

import bnn_pyro.parts.several  # noqa: F401  registers its mixture, also in worker processes
from bnn_pyro.errors import UserError, refusing
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.components import NO_PREDICTION, select
from bnn_pyro.parts.nets import in_mode, outputs_seen
from bnn_pyro.parts.observed import OBSERVED, read_likelihood
from bnn_pyro.parts.own_module import call_with_draws, norm_layers
from bnn_pyro.parts.weights import ArrayDistribution, CentredNormal, LogUniform, cut
from bnn_pyro.settings import parse_named


class GammaNormal(ArrayDistribution):
    """w | τ ~ Normal(0, I/τ) with τ ~ Gamma(shape, rate) integrated out: P weights with one common τ.

    p(w) = Γ(shape + P/2) / Γ(shape) · rate^shape · (2π)^(−P/2) · (rate + ½ Σ w²)^−(shape + P/2)

    This is a multivariate Student t. With ``by_input``, each input of a layer (second dimension of w) has its own τ.
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
        """w (…, P) multiplied by the scales (…, groups)."""
        return (w.unflatten(-1, self.split) * scales[..., None, :, None]).flatten(-3)

    def sums(self, values: Tensor) -> Tensor:
        """Sums of values (…, P) over the weights of each τ: (…, groups)."""
        return values.unflatten(-1, self.split).sum((-3, -1))

    def given(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """(shape (), rate (…, groups)) of the gamma distribution of τ given w (…, P)."""
        return self.shape_ + 0.5 * self._size, self.rate + 0.5 * self.sums(w.square())

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of the whole array in nats."""
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
        """Log density of the whole array in nats."""
        # log(eᵃ + eᵇ) = a + softplus(b − a), and b − a is linear in w²: three passes over the weights instead of ten.
        square = value.square()
        gap = math.log1p(-self.weight) - math.log(self.weight) + (self.wide / self.narrow).log()
        slope = 0.5 / self.narrow.square() - 0.5 / self.wide.square()
        wide = math.log(self.weight) - self.wide.log() - 0.5 * math.log(2 * math.pi)
        return self._flat(wide - square * (0.5 / self.wide.square()) + F.softplus(gap - slope * square)).sum(-1)


#: (a parameter of the net, the number of inputs of a unit of its layer, 1 for a vector) -> the prior of the parameter.
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


def _gamma(shape: float = 1.0, rate: float = 1.0) -> Maker:
    """gamma:SHAPE,RATE — Normal(0, 1/√τ), each parameter with its own τ ~ Gamma(SHAPE, RATE); both > 0."""
    return lambda w, _: GammaNormal(w.new_tensor(shape), w.new_tensor(rate), w.shape)


def _ard(shape: float = 0.5, rate: float | None = None) -> Maker:
    """ard:SHAPE,RATE — gamma, but each input of a layer has a τ for its weights; both > 0 (Neal 1996, sec. 1.2.3).

    The default RATE is 0.01, and 2/fan-in² above 14 inputs: with SHAPE 0.5, w is Cauchy, and the sum over irrelevant
    inputs then does not grow with their number.
    """
    return lambda w, n: GammaNormal(w.new_tensor(shape), w.new_tensor(rate or min(0.01, 2 / n**2)), w.shape, w.ndim > 1)


def _flat(w: Tensor, _: int) -> dist.TorchDistribution:
    """p(w) ∝ 1, for weights of which a fit has a point estimate only."""
    return dist.ImproperUniform(dist.constraints.independent(dist.constraints.real, w.dim()), torch.Size(), w.shape)


def _scale_mixture(wide: float = 1.0, narrow: float = math.exp(-6), weight: float = 0.5) -> Maker:
    """scale-mixture:WIDE,NARROW,WEIGHT — Blundell et al. 2015, equation 7; positive, WEIGHT (of WIDE) < 1."""
    if not 0 < weight < 1:
        raise UserError(f"the weight of the wide component must lie between 0 and 1, got {weight}")
    return lambda w, _: ScaleMixture(w.new_tensor(wide), w.new_tensor(narrow), weight, w.shape)


#: Every prior by name; the numbers after the colon are the arguments of its function.
PRIORS: dict[str, Callable[..., Maker]] = {
    "normal": _normal,
    "fan-in": _fan_in,
    "pretrained": _pretrained,
    "gamma": _gamma,
    "ard": _ard,
    "scale-mixture": _scale_mixture,
    "log-uniform": lambda: lambda w, _: LogUniform(w.shape),
}

#: The prior "by-target" for classes and for numbers. Under narrower ones, q and the mode of a wide net underfit.
BY_TARGET = {True: "fan-in:8", False: "fan-in:2"}


@cache
def parse_prior(text: str, has_classes: bool = False) -> Maker:
    """``"fan-in:1.5"`` -> the prior; omitted numbers take their defaults. "by-target" depends on ``has_classes``.

    Raises UserError for an unknown name, or an argument that is not a positive number.
    """
    text = BY_TARGET[has_classes] if text == "by-target" else text
    return parse_named("prior", text, PRIORS)


class BayesianNet(nn.Module):
    """p(y, w | x): every parameter of ``net`` is a latent site with its name, followed by the likelihood.

    net: any module (B, *input_shape) -> (B, outputs), which is copied. Its parameters give the sites' names, shapes and
        initial values. The values are not part of the model, unless a prior is centred at them; buffers are part of the
        model and are stored with the posterior. If weights may have leading draw dimensions, the net has an attribute
        ``takes_draws = True``; any other net is mapped over the draws.
    likelihood: a callable (f, y) from ``parts.likelihoods``.
    prior: a text for :func:`parse_prior`; or FIRST/OTHERS, where FIRST is for the weights of the first layer and OTHERS
        for all other parameters; or {site: text}.   points: sites without a prior, p(w) ∝ 1.
    statistics: ``BatchStatistics`` for the net's batch normalisation; None: running averages.   frozen: whether these
        do not change in training.
    sampling: {site: "rows" or "flipout"} of ``row_noise.sampling_of``, for sites that training samples by row.
    still: names of parameters of the user's module that are buffers of the net.
    inputs: {name: number of inputs of a unit} of weights that are not (outputs, inputs, …), as w in x @ w.
    precision: "bfloat16" (set by an optimisation) if the net's passes in training use autocast.
    """

    precision: str | None = None
    still: Collection[str] = ()
    sampling: Mapping[str, str] = {}

    def __init__(
        self, net: nn.Module, likelihood: nn.Module, prior: str | Mapping[str, str] = "fan-in",
        points: Collection[str] = (), statistics: nn.Module | None = None, frozen: bool = False,
        inputs: Mapping[str, int] = {},
    ) -> None:  # fmt: skip
        super().__init__()
        self.net = copy.deepcopy(net).requires_grad_(False)
        self.likelihood = likelihood
        self.points, self.statistics, self.frozen = tuple(points), statistics, frozen
        names = dict(self.net.named_parameters())
        self._inputs = {name: w[0].numel() if w.dim() > 1 else 1 for name, w in names.items()}
        for path, layer in self.net.named_modules():
            if isinstance(layer, nn.modules.conv._ConvTransposeNd):  # weights (inputs, outputs / groups, …)
                inputs = {**inputs, f"{path}.weight".lstrip("."): layer.weight[:, 0].numel() // layer.groups}
        self._inputs |= inputs
        if ard := [n for n in inputs if str(prior if isinstance(prior, str) else prior.get(n)).startswith("ard")]:
            raise UserError(f"ard has a scale for each input of a layer, but not for '{ard[0]}', whose outputs are not "
                            "its first axis (as of a transposed convolution): take another, as fan-in:2")  # fmt: skip
        if not isinstance(prior, str) and not (isinstance(prior, Mapping) and names.keys() <= {*prior, *points}):
            raise UserError(f"prior= takes one text, such as 'fan-in:1', got {prior!r:.60}; priors of layers are "
                            "those of bp.Bayesian(net, prior={pattern: text})")  # fmt: skip
        if clashing := names.keys() & {OBSERVED, "data", "draws", *likelihood.initial}:
            raise UserError(f"the parameter '{min(clashing)}' has the name of another site of the model; rename it")
        if isinstance(prior, str):
            first, _, others = prior.partition("/")
            weights = [name for name, value in names.items() if value.dim() > 1][:1]
            prior = dict.fromkeys(names, others or first) | dict.fromkeys(weights, first)
        self.texts = texts = prior
        for text in texts.values():
            parse_prior(str(text))  # raises for an invalid text
        self._centred = [n for n, text in texts.items() if n not in points and text.partition(":")[0] == "pretrained"]
        if self._centred:
            self.register_buffer("centre", torch.cat([self.net.get_parameter(n).flatten() for n in self._centred]))

    #: {site: initial value} for guides and optimisers: the initial weights of the network and sites of the likelihood.
    initial = property(lambda self: {**dict(self.net.named_parameters()), **self.likelihood.initial})

    def prior(self) -> dict[str, dist.TorchDistribution]:
        """{site: p(w)} of the net's parameters."""
        named = dict(self.net.named_parameters())
        if self._centred:
            named |= cut(self.centre, {name: named[name].shape for name in self._centred})
        classes = getattr(self.likelihood, "has_classes", False)
        makers = {name: _flat if name in self.points else parse_prior(self.texts[name], classes) for name in named}
        return {name: make(named[name], self._inputs[name]) for name, make in makers.items()}

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Draw w, then the site "y" for inputs x (B, *input_shape); y (B,) or (B, T) observes it."""
        w = {name: pyro.sample(name, prior) for name, prior in self.prior().items()}
        dims = 2 + getattr(self.likelihood, "event_dim", 0)
        rows_of_each = y is not None and y.dim() == dims and x.shape[:2] == y.shape[:2]
        statistics = {} if self.statistics is None or self.training else self.statistics(self.net, w)
        with ExitStack() as modes:
            modes.enter_context(in_mode(*(norm_layers(self.net).values() if self.frozen else ()), training=False))
            if self.sampling and self.training:
                from bnn_pyro.parts.row_noise import RowNoise  # needed for a user's own network only

                modes.enter_context(RowNoise(w, len(x), self.sampling))
            if self.precision == "bfloat16" and self.training:
                modes.enter_context(torch.autocast(x.device.type, torch.bfloat16))
            f = call_with_draws(self.net, {**w, **statistics}, x, rows_of_each)
        return self.likelihood(f.float() if f.dtype.itemsize < 4 else f, y)


@torch.no_grad()
def widest_activation(model: nn.Module, x: Tensor) -> int:
    """The most numbers per point and draw that a module returns. UserError for a likelihood without a Prediction."""
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
