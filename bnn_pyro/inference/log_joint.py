"""log p(y, w | x) of a model on all of its rows as a function of w: what the samplers of whole data sets follow."""

from __future__ import annotations

from collections.abc import Mapping

import pyro
import torch
from pyro.distributions import constraints
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn

from bnn_pyro.errors import UserError
from bnn_pyro.inference.density import Rescale
from bnn_pyro.parts.nets import in_mode

__all__ = ["LogJoint", "Sites"]


class LogJoint:
    """The log joint density in nats, at temperature T: log p(y | x, w) / T + log p(w).

    The terms are evaluated in the model's own precision and added up in float64: at 50,000 rows a float32 sum is off
    by a hundredth of a nat, which is noise in every Metropolis step.

    Raises UserError for a prior without samples (it has no posterior to speak of), for a latent site that is not
    on the whole real line, and where the density at the model's initial values is not finite.
    """

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, temperature: float = 1.0) -> None:
        self.model, self.x, self.y = model, x, y
        self._scaled = Rescale(likelihood=1.0 / temperature)(model)
        self.calls = 0
        self.initial = {site: value.detach().to(x.device) for site, value in model.initial.items()}
        # Once with Pyro's checks of shapes and supports, which then stay off: a trajectory may meet infinities.
        with torch.no_grad(), Sites(self.initial) as first:
            self._run()
        self.priors = first.priors
        for site, prior in self.priors.items():
            support = prior.support
            while isinstance(support, constraints.independent):
                support = support.base_constraint
            if support is not constraints.real:
                raise UserError(f"the latent site '{site}' is not on the whole real line; sample its logarithm instead")
        try:
            self.prior_draw()
        except NotImplementedError:
            raise UserError(
                "HMC and NUTS need a proper prior, and this variant's has no samples; take another, such as fan-in:1"
            ) from None
        if not torch.isfinite(first.total):
            raise UserError(f"the log joint density is {first.total.item()} at the initial weights")

    def __call__(self, w: Mapping[str, Tensor]) -> Tensor:
        """The log joint of one set of weights of any floating type, a float64 scalar with its gradient."""
        self.calls += 1
        with pyro.validation_enabled(False), Sites({s: v.to(self.initial[s].dtype) for s, v in w.items()}) as sites:
            self._run()
        return sites.total

    def prior_draw(self) -> dict[str, Tensor]:
        """One draw of every latent site from its prior."""
        return {site: prior.sample() for site, prior in self.priors.items()}

    def _run(self) -> None:
        with in_mode(self.model, training=False):
            self._scaled(self.x, self.y)


class Sites(Messenger):
    """Gives the latent sites their values, adds up log-densities and keeps the priors."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.values = values
        self.total: Tensor = torch.zeros((), dtype=torch.float64)
        self.priors: dict[str, pyro.distributions.TorchDistribution] = {}

    def _pyro_sample(self, msg: dict) -> None:
        if msg["name"] in self.values and not msg["is_observed"]:
            msg["value"], msg["done"] = self.values[msg["name"]], True

    def _pyro_post_sample(self, msg: dict) -> None:
        if site_is_subsample(msg):
            return
        if not msg["is_observed"]:
            self.priors[msg["name"]] = msg["fn"]
        term = scale_and_mask(msg["fn"].log_prob(msg["value"]), msg["scale"], msg["mask"])
        self.total = self.total.to(term.device) + term.sum(dtype=torch.float64)
