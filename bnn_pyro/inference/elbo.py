"""-ELBO as training minimises it: Pyro's TraceMeanField_ELBO (a closed-form KL wherever a pair has one), but faster."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pyro.distributions.util import scale_and_mask
from pyro.infer import TraceMeanField_ELBO
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn
from torch.distributions import kl_divergence

from bnn_pyro.inference.log_joint import Rescale

__all__ = ["ELBO", "Objective"]


class ELBO(TraceMeanField_ELBO):
    """Pyro's TraceMeanField_ELBO, the same number, without the densities that a closed-form KL makes superfluous.

    Pyro's own evaluates log q(w) and log p(w) of every draw even where it then uses KL(q ‖ p): at 784-400-400-10 that
    is more than half of a step. This one also keeps the likelihood part, so that a training curve can tell it from
    the KL. It is meant for models without subsampled or enumerated sites.
    """

    def parts(self, model: Callable, guide: Callable, *args: Tensor) -> tuple[Tensor, Tensor]:
        """(ELBO with its gradient, its likelihood part detached), scalars in nats, means over the particles."""
        elbo, likelihood = 0.0, 0.0
        for _ in range(self.num_particles):
            with _Record() as q:
                guide(*args)
            with _Record(given=q.sites) as p:
                model(*args)
            for name, site in p.sites.items():
                if site["is_observed"]:
                    term = _scaled(site["fn"].log_prob(site["value"]), site)
                    likelihood = likelihood + term.detach()
                    elbo = elbo + term
                else:
                    elbo = elbo - _kl(q.sites[name], site)
            for name, site in q.sites.items():
                if name not in p.sites:
                    elbo = elbo + _entropy(site)
        if self.num_particles == 1:
            return elbo, likelihood
        return elbo / self.num_particles, likelihood / self.num_particles

    def differentiable_loss(self, model: Callable, guide: Callable, *args: Tensor) -> Tensor:
        """-ELBO."""
        return -self.parts(model, guide, *args)[0]


class Objective(nn.Module):
    """(ELBO with its gradient, its likelihood part) of some rows: a module, as gradients are averaged by modules."""

    def __init__(self, model: nn.Module, guide: nn.Module, num_particles: int) -> None:
        super().__init__()
        self.guide, self.elbo = guide, ELBO(num_particles=num_particles)
        self._model = (model,)  # not as a submodule: its parameters are not trained

    def forward(self, x: Tensor, y: Tensor, likelihood: float, latent: float) -> tuple[Tensor, Tensor]:
        """x, y: rows whose log-likelihood counts ``likelihood`` times; the KL counts ``latent`` times."""
        scaled = Rescale(likelihood, latent)(self._model[0])
        return self.elbo.parts(scaled, Rescale(latent=latent)(self.guide), x, y)


class _Record(Messenger):
    """Keeps the sample sites of a call, after giving latent ones the values of a former call.

    What ``poutine.trace`` and ``poutine.replay`` do together, without copies of every message: a third of what Pyro
    adds to the step of a small network.
    """

    def __init__(self, given: Mapping[str, dict] | None = None) -> None:
        super().__init__()
        self.given = given
        self.sites: dict[str, dict] = {}

    def _pyro_sample(self, msg: dict) -> None:
        if self.given is not None and not msg["is_observed"] and msg["name"] in self.given:
            msg["value"], msg["done"] = self.given[msg["name"]]["value"], True

    def _pyro_post_sample(self, msg: dict) -> None:
        if not site_is_subsample(msg):
            self.sites[msg["name"]] = msg


def _kl(q: dict, p: dict) -> Tensor:
    """KL(q ‖ p) of one latent site, in closed form, else log q(w) − log p(w) at the draw."""
    try:
        return _scaled(kl_divergence(q["fn"], p["fn"]), q)
    except NotImplementedError:
        return _scaled(q["fn"].log_prob(q["value"]), q) - _scaled(p["fn"].log_prob(q["value"]), p)


def _entropy(q: dict) -> Tensor:
    """−E[log q] of a site that the guide alone has, in closed form, else at the draw.

    Raises ValueError unless the guide says that it is auxiliary, as the whole of a joint guide: a misspelt site would
    be rewarded for its entropy.
    """
    if not q["infer"].get("is_auxiliary"):
        raise ValueError(f"the guide's site '{q['name']}' is none of the model's, and is not marked as auxiliary")
    try:
        return _scaled(q["fn"].entropy(), q)
    except NotImplementedError:
        return -_scaled(q["fn"].log_prob(q["value"]), q)


def _scaled(term: Tensor, site: dict) -> Tensor:
    return scale_and_mask(term, site["scale"], site["mask"]).sum()
