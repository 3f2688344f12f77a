"""Point estimates, the baselines: the most probable weights (MAP) and the most likely ones (MLE).

    MAP: argmax_w log p(y | x, w) + log p(w)          MLE: argmax_w log p(y | x, w)

Both are SVI with a point mass for a guide, whose KL to the prior is −log p(w); MLE gives it the weight 0. Where the
network has dropout the likelihood is averaged over its masks, and the weights found are those of the network without:
the layers divide what they keep by its share, so that nothing needs to be scaled (Srivastava et al. 2014, section 10).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from bnn_pyro.checkpoint import Checkpoint
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.errors import UserError
from bnn_pyro.inference.early_stopping import EarlyStopping
from bnn_pyro.inference.method import Report
from bnn_pyro.inference.optimise import Optimisation
from bnn_pyro.parts.guides import PointMass
from bnn_pyro.posterior import Posterior
from bnn_pyro.settings import setting

__all__ = ["MAP", "MLE"]


@dataclass(frozen=True)
class MAP(Optimisation):
    """Settings of the maximum a posteriori estimate. The prior is the weight decay.

    patience  epochs without a better NLL of the validation rows after which training stops; the weights of the best
              epoch are kept. 0: train all epochs and keep the last
    max_norm  c: after every step the incoming weights of a unit that are longer than c are shortened to it; 0: not
    """

    converges_to: ClassVar[str] = "point"
    needs: ClassVar[frozenset[str]] = frozenset({"weights"})
    tiny: ClassVar[Mapping[str, Any]] = {"epochs": 400, "batch_size": 0, "lr": 0.05, "final_lr": 0.0}
    patience: int = setting(0, low=0)
    max_norm: float = setting(0.0, low=0)

    prior_weight: ClassVar[float] = 1.0

    def run(
        self,
        model: nn.Module,
        guide: nn.Module | None,
        data: Dataset,
        *,
        seed: int = 0,
        checkpoint: Checkpoint | None = None,
        report: Report | None = None,
    ) -> Posterior:
        """Find the point and return it as one chain of one draw; see ``Method.run``. The guide is not used."""
        point = PointMass(model.initial).to(data.x_train.device)
        trace = self.find(model, point, data, seed=seed, checkpoint=checkpoint, report=report)
        chains = {site: value.detach()[None, None] for site, value in point.sites().items()}
        return Posterior(model, data.schema, chains=chains, trace=trace)

    def check(self, data: Dataset) -> None:
        """Raises UserError where early stopping is asked for and there are no validation rows."""
        if self.patience and not len(data.x_val):
            raise UserError(
                f"early stopping (patience {self.patience}) needs validation rows, and {data.name} was loaded without "
                "any: give --validation ROWS, or train the network with patience 0"
            )

    def find(
        self,
        model: nn.Module,
        point: PointMass,
        data: Dataset,
        *,
        seed: int,
        checkpoint: Checkpoint | None = None,
        report: Report | None = None,
    ) -> dict[str, list[float]]:
        """Move ``point`` in place and return the trace {epoch, log_likelihood, log_joint, log_prior}."""
        self.check(data)
        watch = EarlyStopping(model, point, data.x_val, data.y_val, self.patience) if self.patience else None
        trace = self.minimise(
            model,
            point,
            data,
            seed=seed,
            latent=self.prior_weight,
            project=(lambda: point.shorten(self.max_norm)) if self.max_norm else None,
            watch=watch,
            checkpoint=checkpoint,
            report=report,
        )
        trace["log_joint"], trace["log_prior"] = trace.pop("elbo"), [-kl for kl in trace.pop("kl")]
        return trace


@dataclass(frozen=True)
class MLE(MAP):
    """Settings of the maximum likelihood estimate: MAP with the prior left out."""

    prior_weight: ClassVar[float] = 0.0
    #: Without a prior, the way to the maximum is long.
    tiny: ClassVar[Mapping[str, Any]] = {**MAP.tiny, "epochs": 1200, "lr": 0.2}
