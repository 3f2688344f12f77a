"""Approximate posteriors q(w) beyond Pyro's autoguides."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["MeanFieldNormal", "PointMass", "new_name", "register"]


_numbers = itertools.count()


def new_name(guide: nn.Module) -> str:
    """A name that no other guide has: two of one name would share their parameters in a user's global store."""
    return f"{type(guide).__name__}{next(_numbers)}"


def register(guide: nn.Module) -> None:
    """Tell Pyro of a guide's parameters, so that its own ``SVI`` finds them; nothing to do where they are local."""
    if not pyro.settings.get("module_local_params"):
        pyro.module(guide.name, guide)


class _Flat(nn.Module):
    """Sites cut from one flat vector: one optimiser tensor and one elementwise kernel, however many layers.

    Every call registers the parameters under a name of the guide's own. (As a ``PyroModule`` it could not be called
    under ``isolated()`` unless it was made there.)
    """

    def __init__(self, initial: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.name = new_name(self)
        self.shapes = {name: value.shape for name, value in initial.items()}
        self.loc = nn.Parameter(torch.cat([value.detach().flatten() for value in initial.values()]).clone())

    def _cut(self, flat: Tensor) -> dict[str, Tensor]:
        pieces = flat.split([shape.numel() for shape in self.shapes.values()])
        return {name: p.view(shape) for (name, shape), p in zip(self.shapes.items(), pieces, strict=True)}

    def sites(self) -> dict[str, Tensor]:
        """{site: location}."""
        return self._cut(self.loc)


class MeanFieldNormal(_Flat):
    """q(w) = ∏ᵢ Normal(wᵢ; μᵢ, σᵢ), σ = softplus(ρ) (Blundell et al. 2015, section 3.2).

    initial: {site: value} where μ starts.   init_scale: σ at the start, for all weights: small, so that training
        begins like that of a deterministic network.
    """

    def __init__(self, initial: Mapping[str, Tensor], init_scale: float = 0.01) -> None:
        super().__init__(initial)
        self.rho = nn.Parameter(torch.full_like(self.loc, init_scale + math.log(-math.expm1(-init_scale))))

    @property
    def scale(self) -> Tensor:
        """σ of every weight, flat, in the order of the sites."""
        return F.softplus(self.rho)

    def forward(self, x: Tensor | None = None, y: Tensor | None = None) -> dict[str, Tensor]:
        """Sample every site; inputs and targets are taken for the sake of Pyro's calls and not used."""
        register(self)
        scales = self._cut(self.scale)
        return {
            name: pyro.sample(name, dist.Normal(loc, scales[name], validate_args=False).to_event(loc.dim()))
            for name, loc in self._cut(self.loc).items()
        }


class PointMass(_Flat):
    """q(w) = δ(w − μ): a point estimate as a guide."""

    def forward(self, x: Tensor | None = None, y: Tensor | None = None) -> dict[str, Tensor]:
        """Sample every site: its value."""
        register(self)
        return {name: pyro.sample(name, self._site(name, loc)) for name, loc in self._cut(self.loc).items()}

    def _site(self, name: str, loc: Tensor) -> dist.TorchDistribution:
        return dist.Delta(loc, validate_args=False).to_event(loc.dim())

    @torch.no_grad()
    def shorten(self, length: float) -> None:
        """Shorten every row of a weight matrix, a unit's incoming weights, to ``length`` at most; biases stay.

        Max-norm regularisation (Srivastava, Hinton, Krizhevsky, Sutskever & Salakhutdinov 2014, section 5.1).
        """
        for weight in self._cut(self.loc.detach()).values():
            if weight.dim() > 1:
                weight.renorm_(2, 0, length)
