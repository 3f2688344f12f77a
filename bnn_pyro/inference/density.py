"""Where N meets a mini-batch, and nowhere else: the scale of every site of a model or guide."""

from __future__ import annotations

from pyro.poutine.messenger import Messenger

from bnn_pyro.parts.likelihoods import OBSERVED

__all__ = ["Rescale"]


class Rescale(Messenger):
    """Multiply log p(y | x, w) by ``likelihood`` and the log-density of every latent site by ``latent``.

    With ``likelihood = N/B`` the log joint of B random rows estimates that of all N without bias. ``latent`` is the
    temperature T: T = 1 is Bayes, T < 1 a cold posterior (KL charged T times), 0 leaves the likelihood alone. A model
    and its guide must be given the same ``latent``.
    """

    def __init__(self, likelihood: float = 1.0, latent: float = 1.0) -> None:
        super().__init__()
        self.likelihood, self.latent = likelihood, latent

    def _pyro_sample(self, msg: dict) -> None:
        factor = self.likelihood if msg["name"] == OBSERVED else self.latent
        if factor != 1.0:
            msg["scale"] = msg["scale"] * factor
