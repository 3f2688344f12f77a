"""A guide with some weights removed: exactly 0 in every draw, the others as they were, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping

import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn

from bnn_pyro.parts.weights import ArrayDistribution

__all__ = ["PrunedGuide", "PrunedWeights", "weight_sites"]


def weight_sites(model: nn.Module) -> list[str]:
    """The sites that can be pruned: matrices and kernels of the network; not biases, nor what the likelihood learns."""
    likelihood = getattr(getattr(model, "likelihood", None), "initial", {})
    return [site for site, value in model.initial.items() if value.dim() > 1 and site not in likelihood]


class PrunedWeights(ArrayDistribution):
    """m ⊙ w, w ~ q: the draws of q, with 0 where the mask says so; mean and variance follow.

    whole: q, its event the whole array.   kept: (*event shape) bool.
    It has neither a density (a removed weight is a point) nor gradients: what is pruned has been trained.
    """

    def __init__(self, whole: dist.TorchDistribution, kept: Tensor) -> None:
        super().__init__(whole.event_shape)
        self.whole, self.kept, self._batch_shape = whole, kept, whole.batch_shape

    @property
    def mean(self) -> Tensor:
        """That of q, and 0."""
        return self._masked(self.whole.mean)

    @property
    def variance(self) -> Tensor:
        """That of q, and 0."""
        return self._masked(self.whole.variance)

    def expand(self, batch_shape: torch.Size, _instance: object = None) -> PrunedWeights:
        """Independent draws with the same mask."""
        return PrunedWeights(self.whole.expand(batch_shape), self.kept)

    def rsample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008 (torch's own signature)
        """Draws of shape sample_shape + batch_shape + event_shape."""
        return self._masked(self.whole(sample_shape))

    def _masked(self, value: Tensor) -> Tensor:
        return torch.where(self.kept, value, 0.0)  # not a product: −0 and NaN would stay


class PrunedGuide(nn.Module):
    """q with masks. whole: the guide, whose parameters are shared and not changed.   kept: {site: bool mask}."""

    def __init__(self, whole: nn.Module, kept: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.whole = whole
        self.sites = tuple(kept)
        for number, mask in enumerate(kept.values()):  # buffers: they are saved and moved along; names have no dots
            self.register_buffer(f"kept_{number}", mask)

    @property
    def kept(self) -> dict[str, Tensor]:
        """{site: mask}, True where a weight is left."""
        return {site: getattr(self, f"kept_{number}") for number, site in enumerate(self.sites)}

    def forward(self, x: Tensor | None = None, y: Tensor | None = None) -> object:
        """Sample every site."""
        with _Mask(self.kept):
            return self.whole(x, y)


class _Mask(Messenger):
    """Sites of these names become ``PrunedWeights``."""

    def __init__(self, kept: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.kept = kept

    def _pyro_sample(self, message: dict) -> None:
        if message["name"] in self.kept:
            message["fn"] = PrunedWeights(message["fn"], self.kept[message["name"]])
