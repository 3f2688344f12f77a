"""Variational dropout: Gaussian dropout whose rate is learned, and the sparse kind that removes weights.

    q(W) = ∏ᵢⱼ Normal(Wᵢⱼ; μᵢⱼ, α μᵢⱼ²),  α ≤ 1            p(W) ∝ ∏ᵢⱼ 1/|Wᵢⱼ|

α is one number for a layer, for each input unit of it, or for each weight (Kingma, Salimans & Welling 2015,
arXiv:1506.02557, section 3). In sparse variational dropout every weight has a σ of its own, and those that the data do
not need become noise around 0 (Molchanov, Ashukha & Vetrov 2017, arXiv:1701.05369). Both are hidden-layer networks
with other defaults. The prior is improper; see ``parts.weights`` for what that means for the ELBO.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bnn_pyro.parts.local_net import SCALES
from bnn_pyro.settings import setting
from bnn_pyro.zoo.hidden_layer import HiddenLayerNet

__all__ = ["SparseDropout", "VariationalDropout"]


@dataclass(frozen=True)
class VariationalDropout(HiddenLayerNet):
    """Settings of a network with variational dropout: those of ``HiddenLayerNet``; init_scale is the first α."""

    prior: str = "log-uniform"
    scale: str = setting("layer", choices=SCALES)
    init_scale: float = setting(0.5, above=0)

    summary: ClassVar[str] = "Gaussian dropout with a learned rate (variational dropout)"
    paper: ClassVar[str] = "Kingma, Salimans & Welling 2015, arXiv:1506.02557"


@dataclass(frozen=True)
class SparseDropout(HiddenLayerNet):
    """Settings of a network with sparse variational dropout: those of ``HiddenLayerNet``."""

    prior: str = "log-uniform"
    init_scale: float = setting(0.01, above=0)

    summary: ClassVar[str] = "A dropout rate for every weight, unbounded, which removes weights"
    paper: ClassVar[str] = "Molchanov, Ashukha & Vetrov 2017, arXiv:1701.05369"
