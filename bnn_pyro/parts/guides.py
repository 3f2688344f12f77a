"""Approximations q(w) with independent weights: Normals, point masses, MC dropout, and pruned versions of a q."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn

from bnn_pyro.parts.weights import ArrayDistribution, FlatNormals, cut

#: Numbers in the names of guides: guides with the same name would share parameters in a user's global store.
NUMBERS = itertools.count()


def register(guide: nn.Module) -> None:
    """Register a guide's parameters in Pyro's store, where its own ``SVI`` finds them, unless parameters are local."""
    if not pyro.settings.get("module_local_params"):
        pyro.module(guide.name, guide)


class _Flat(nn.Module):
    """A guide whose sites are parts of one flat vector. A ``PyroModule`` could not be called inside ``isolated()``."""

    def __init__(self, initial: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.name = f"{type(self).__name__}{next(NUMBERS)}"
        self.shapes = {name: value.shape for name, value in initial.items()}
        self.loc = nn.Parameter(torch.cat([value.detach().flatten() for value in initial.values()]).clone())

    def sites(self) -> dict[str, Tensor]:
        """{site: location}."""
        return cut(self.loc, self.shapes)

    def forward(self, x: Tensor | None = None, y: Tensor | None = None) -> dict[str, Tensor]:
        """Sample every site; Pyro also passes inputs and targets, which are not used."""
        register(self)
        sites = {}
        for name, q in self._distributions():
            sites[name] = pyro.sample(name, q)
            if torch.is_grad_enabled():  # in training, ``RowNoise`` samples from q for each row
                sites[name].drawn_from = q
        return sites

    def _distributions(self) -> Iterable[tuple[str, dist.TorchDistribution]]:
        return ((name, self._site(name, loc)) for name, loc in self.sites().items())


@contextmanager
def in_one_memory(guide: nn.Module, net: nn.Module) -> Iterator[None]:
    """Within the block, the weights of the net share the memory of the locations of a guide's sites."""
    parts = [part.sites() for part in guide.modules() if isinstance(part, _Flat)]
    sites, named = {name: value for sites in parts for name, value in sites.items()}, dict(net.named_parameters())
    for name in named.keys() & sites.keys():
        named[name].data = sites[name].detach()
    try:
        yield
    finally:
        for weight in named.values():  # pickling a view would store the whole flat vector
            weight.data = weight.data.clone()


def inverse_softplus(scale: Tensor) -> Tensor:
    """ρ of σ = softplus(ρ)."""
    return scale + (-torch.expm1(-scale)).log()


class NormalGuide(_Flat):
    """μ and σ = softplus(ρ), where σ starts with the same value for every weight."""

    def __init__(self, initial: Mapping[str, Tensor], init_scale: float = 0.01) -> None:
        super().__init__(initial)
        self.rho = nn.Parameter(torch.full_like(self.loc, init_scale + math.log(-math.expm1(-init_scale))))
        self._spare: list[Tensor] = []

    #: σ of every weight, flat, in the order of the sites.
    scale = property(lambda self: F.softplus(self.rho))

    @torch.no_grad()
    def start_at(self, scales: Mapping[str, float]) -> None:
        """Set σ: one number for all weights of a site."""
        for name, rho in cut(self.rho.data, self.shapes).items():
            rho.copy_(inverse_softplus(torch.full_like(rho, scales[name])))


class MeanFieldNormal(NormalGuide):
    """q(w) = ∏ᵢ Normal(wᵢ; μᵢ, σᵢ), σ = softplus(ρ) (Blundell et al. 2015, section 3.2).

    initial: {site: initial value of μ}.   init_scale: initial σ; if small, training starts almost deterministically.
    """

    def _distributions(self) -> Iterable[tuple[str, dist.TorchDistribution]]:
        return FlatNormals(self.loc, self.rho, self.shapes, self._spare).arrays()

    def clear_gradients(self) -> None:
        """Remove the gradients; on a CPU the next draw overwrites them, even if they are referenced elsewhere."""
        self._spare[:] = [p.grad for p in (self.loc, self.rho) if p.grad is not None and not p.is_cuda]
        self.loc.grad = self.rho.grad = None


class PointMass(_Flat):
    """q(w) = δ(w − μ): a point estimate as a guide."""

    def _site(self, name: str, loc: Tensor) -> dist.TorchDistribution:
        return dist.Delta(loc, event_dim=loc.dim(), validate_args=False)  # whose KL Pyro has, unlike Independent's


class WithPoints(nn.Module):
    """q(w) of some sites, and points for the others.   random: q.   initial: {site: initial value} of the points."""

    def __init__(self, random: nn.Module, initial: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.random, self.points = random, PointMass(initial)

    def forward(self, x: Tensor | None = None, y: Tensor | None = None) -> None:
        """Sample every site; inputs and targets are not used."""
        self.random(x, y)
        self.points(x, y)


class DroppedColumns(ArrayDistribution):
    """W · diag(z / (1 − p)), zⱼ ~ Bernoulli(1 − p): a whole column of W (out, in) is 0, or divided by 1 − p.

    The mean is W, and the variance W² p / (1 − p). All rows of a batch share z, so that a draw is one function of x.

    weight: W (out, in).   rate: p, in [0, 1).
    """

    def __init__(self, weight: Tensor, rate: float) -> None:
        self.weight, self.rate = weight, rate
        super().__init__(weight.shape)

    mean = property(lambda self: self.weight.expand(self.batch_shape + self.event_shape))

    def _draw(self, shape: torch.Size) -> Tensor:
        return self._masked(torch.rand(shape[:-2] + shape[-1:], device=self.weight.device) >= self.rate)

    def _masked(self, is_kept: Tensor) -> Tensor:
        return self.weight * (is_kept.to(self.weight.dtype) / (1 - self.rate)).unsqueeze(-2)

    def log_prob(self, value: Tensor) -> Tensor:
        """log P(W = value) in nats: not a density, but the probability of the masks that give ``value``."""
        is_kept = (value != 0).any(-2)
        chosen = (self.weight != 0).any(-2)  # a column of zeros is the same for every mask
        log_kept, log_dropped = math.log1p(-self.rate), math.log(self.rate) if self.rate else -math.inf
        mass = torch.where(chosen, torch.where(is_kept, log_kept, log_dropped), 0.0).sum(-1)
        return torch.where((value == self._masked(is_kept)).all(-1).all(-1), mass, -math.inf)


class DroppedInputs(PointMass):
    """q(w) of MC dropout: weight matrices with dropped columns; all other sites are points.

    initial: {site: initial value}.   rates: {weight matrix: dropout rate of its layer's inputs}.
    """

    def __init__(self, initial: Mapping[str, Tensor], rates: Mapping[str, float]) -> None:
        super().__init__(initial)
        self.rates = dict(rates)

    def _site(self, name: str, loc: Tensor) -> dist.TorchDistribution:
        rate = self.rates.get(name, 0.0)
        return DroppedColumns(loc, rate) if rate else super()._site(name, loc)


def weight_sites(model: nn.Module) -> list[str]:
    """The sites that can be pruned: matrices and kernels of the network, without biases and sites of the likelihood."""
    likelihood = getattr(getattr(model, "likelihood", None), "initial", {})
    return [site for site, value in model.initial.items() if value.dim() > 1 and site not in likelihood]


class PrunedWeights(ArrayDistribution):
    """m ⊙ w, w ~ q: draws of q whose removed entries are 0.

    whole: q, whose event is the whole array.   kept: (*event shape) bool, the mask m.
    It has no density, as removed weights are points, and is not for training.
    """

    def __init__(self, whole: dist.TorchDistribution, kept: Tensor) -> None:
        super().__init__(whole.event_shape)
        self.whole, self.kept, self._batch_shape = whole, kept, whole.batch_shape

    mean = property(lambda self: self._masked(self.whole.mean))

    def _draw(self, shape: torch.Size) -> Tensor:
        return self._masked(self.whole.expand(shape[: len(shape) - len(self.event_shape)])())

    def _masked(self, value: Tensor) -> Tensor:
        return torch.where(self.kept, value, 0.0)  # a product would keep −0 and NaN


class PrunedGuide(nn.Module):
    """A guide with masks. whole: the unmasked guide, which shares its parameters.   kept: {site: bool mask}."""

    def __init__(self, whole: nn.Module, kept: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.whole, self.sites = whole, tuple(kept)
        for number, mask in enumerate(kept.values()):  # names of buffers have no dots
            self.register_buffer(f"kept_{number}", mask)

    #: {site: mask}, True for weights that are not removed.
    kept = property(lambda self: {site: getattr(self, f"kept_{number}") for number, site in enumerate(self.sites)})

    def forward(self, x: Tensor | None = None, y: Tensor | None = None) -> object:
        """Sample every site."""
        with _Mask(self.kept):
            return self.whole(x, y)


class _Mask(Messenger):
    """Replaces the distributions of the sites in ``kept`` by ``PrunedWeights``."""

    def __init__(self, kept: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.kept = kept

    def _pyro_sample(self, message: dict) -> None:
        if message["name"] in self.kept:
            message["fn"] = PrunedWeights(message["fn"], self.kept[message["name"]])
