"""Networks with local reparametrization: a model and a guide over activations, and their versions over weights.

    model   h₀ = x,  hₗ ~ layer(hₗ₋₁; prior of Wₗ),  y ~ likelihood(h_L)
    guide   h₀ = x,  hₗ ~ layer(hₗ₋₁; q(Wₗ))

The model and guide over activations are for training. Both have an attribute ``weight_space``, a version over the
weights with the same parameters, whose draws are functions of all inputs: for predictions, pruning and diagnostics.
"""

from collections.abc import Callable, Mapping

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn

from bnn_pyro.errors import UserError
from bnn_pyro.parts.guides import NUMBERS, MeanFieldNormal, register
from bnn_pyro.parts.local_layer import Conv2dLayer, LinearLayer
from bnn_pyro.parts.nets import Stage
from bnn_pyro.parts.priors import BayesianNet
from bnn_pyro.parts.weights import CentredNormal, DropoutWeights, FreeWeights, LogUniform, NormalWeights


def _cut(A: Tensor, layer: nn.Module) -> dict[str, Tensor]:
    """Split A (fan-in + 1, out) into {"weight", "bias"} with the shapes of the layer."""
    weight = (A if layer.bias is None else A[:-1]).mT.reshape(layer.weight.shape)
    return {"weight": weight} if layer.bias is None else {"weight": weight, "bias": A[-1]}


class _FreeScale(nn.Module):
    """q(A) with a mean and a variance for every weight. start: (D, H) initial means.   init: initial σ."""

    def __init__(self, start: Tensor, init: float) -> None:
        super().__init__()
        self.loc = nn.Parameter(start)
        self.log_variance = nn.Parameter(torch.full_like(start, init).log_().mul_(2))

    def forward(self) -> FreeWeights:
        return FreeWeights(self.loc, self.log_variance)


class _DropoutScale(nn.Module):
    """q(A) = Normal(μ, αμ²), α = sigmoid(·) < 1 (Kingma et al. 2015, section 3), with α of this ``shape``."""

    def __init__(self, start: Tensor, init: float, shape: torch.Size) -> None:
        super().__init__()
        self.loc = nn.Parameter(start)
        self.logit_alpha = nn.Parameter(start.new_full(shape, init).logit())

    def forward(self) -> DropoutWeights:
        return DropoutWeights(self.loc, self.logit_alpha.sigmoid())


#: How σ depends on the mean, by name: (initial means (D, H), initial σ or α) -> module.
SCALES: dict[str, Callable[[Tensor, float], nn.Module]] = {
    "free": _FreeScale,
    "layer": lambda start, init: _DropoutScale(start, init, torch.Size()),
    "unit": lambda start, init: _DropoutScale(start, init, torch.Size((start.shape[0], 1))),
    "weight": lambda start, init: _DropoutScale(start, init, start.shape),
}


class LocalNet(nn.Module):
    """p(y, h | x): activations of each layer under the prior of its weights, then the likelihood.

    weight_space: the same network over its weights, with the layers, their priors and the likelihood.
    Raises UserError for a prior without a closed-form KL.
    """

    def __init__(self, weight_space: BayesianNet) -> None:
        super().__init__()
        self.weight_space = weight_space
        self.priors = nn.ModuleList(_LayerPrior(weight_space, *stage[:2]) for stage in self.net.stages())

    #: The deterministic network, and {site: initial value} of the weights; see ``BayesianNet.initial``.
    net = property(lambda self: self.weight_space.net)
    initial = property(lambda self: self.weight_space.initial)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Draw the activations, then the site "y" for inputs x (B, *input_shape); y (B,) observes it."""
        f = _activations(self.net.enter, self.net.stages(), [prior() for prior in self.priors], x)
        return self.weight_space.likelihood(self.net.add_exposure(f, x), y)


def _activations(enter: Callable, stages: list[Stage], weights: list[dist.TorchDistribution], x: Tensor) -> Tensor:
    """Sample every layer's activations in a plate over the rows, and return those of the last layer."""
    h = enter(x)
    with pyro.plate("rows", dim=-1):  # its size is that of the activations
        for (name, layer, after), A in zip(stages, weights, strict=True):
            if isinstance(layer, nn.Conv2d):
                h = pyro.sample(name, Conv2dLayer(h, A, layer, after))
            else:
                h = pyro.sample(name, LinearLayer(h, A, after, adjoin_one=layer.bias is not None))
    return h


class _LayerPrior(nn.Module):
    """The prior of a layer's A: Normal(0, scale) with scale (D, 1), or log-uniform if scale is None."""

    def __init__(self, weight_space: BayesianNet, name: str, layer: nn.Module) -> None:
        super().__init__()
        prior = weight_space.prior()
        sites = [prior[f"{name}.{part}"] for part, _ in layer.named_parameters()]
        rows, scale = [layer.weight[0].numel(), 1][: len(sites)], None
        if all(isinstance(p, CentredNormal) for p in sites):
            scale = torch.cat([p.scale.expand(n, 1) for p, n in zip(sites, rows, strict=True)])
        elif not all(isinstance(p, LogUniform) for p in sites):
            raise UserError("local reparametrization needs a KL in closed form: prior normal, fan-in or log-uniform")
        self.shape = torch.Size((sum(rows), len(layer.weight)))
        self.register_buffer("scale", scale, persistent=False)

    def forward(self) -> CentredNormal | LogUniform:
        return LogUniform(self.shape) if self.scale is None else CentredNormal(self.scale, self.shape)


class LocalGuide(nn.Module):
    """q(h | x): activations of each layer under q of its weights, and a mean-field q of the likelihood's latent sites.

    scale: a key of ``SCALES``.   init: initial value of σ, or of α, of every weight.
    """

    def __init__(self, model: LocalNet, scale: str, init: float) -> None:
        super().__init__()
        q = []
        for _, layer, _ in model.net.stages():  # the bias is the last row of A
            rows = layer.weight.detach().flatten(1).mT
            q.append(SCALES[scale](rows.clone() if layer.bias is None else torch.cat([rows, layer.bias[None]]), init))
        self.weight_space = WeightGuide(model.net, q, model.weight_space.likelihood.initial)
        self.priors = model.priors  # the same modules, so that the scales are the same tensors on any device

    def forward(self, x: Tensor, y: Tensor | None = None) -> None:
        """Sample every site for inputs x (B, *input_shape); targets are not used."""
        space = self.weight_space
        register(space)
        weights = [q() for q in space.layers]
        for q, prior in zip(weights, self.priors, strict=True):
            q.prior_scale = prior.scale
        _activations(space.enter, space.stages, weights, x)
        if space.noise is not None:
            space.noise()


class WeightGuide(nn.Module):
    """q(W) over the sites "LAYER.weight" and "LAYER.bias" of a network, and over the likelihood's latent sites.

    layers: one module per layer, which returns q of the layer's A.
    noise: {site: initial value} of the likelihood's latent sites, whose q is mean-field Normal.
    """

    def __init__(self, net: nn.Module, layers: list[nn.Module], noise: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.name = f"{type(self).__name__}{next(NUMBERS)}"
        self.enter, self.stages = net.enter, net.stages()  # not as a submodule: the net has no parameters of q
        self.layers = nn.ModuleList(layers)
        self.noise = MeanFieldNormal(noise, 0.01) if noise else None

    def forward(self, x: Tensor | None = None, y: Tensor | None = None) -> None:
        """Sample every site; inputs and targets are not used."""
        register(self)
        for (name, layer, _), q in zip(self.stages, self.layers, strict=True):
            locs, scales = _cut(q().loc, layer), _cut(q().scale, layer)
            for part in locs:
                pyro.sample(f"{name}.{part}", NormalWeights(locs[part], scales[part]))
        if self.noise is not None:
            self.noise()
