"""Point estimates: the most probable weights (MAP), the most likely ones (MLE), and MC dropout around the former.

    MAP: argmax_w log p(y | x, w) + log p(w)          MLE: argmax_w log p(y | x, w)

Both are SVI with a point mass for a guide, whose KL to the prior is −log p(w); MLE gives it the weight 0. Where the
network has dropout the likelihood is averaged over its masks, and the weights found are those of the network without:
the layers divide what they keep by its share, so that nothing needs to be scaled (Srivastava et al. 2014, section 10).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from bnn_pyro.checkpoint import Checkpoint
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.errors import UserError
from bnn_pyro.inference.early_stopping import EarlyStopping
from bnn_pyro.inference.method import Report
from bnn_pyro.inference.optimise import Optimisation
from bnn_pyro.parts.guides import DroppedInputs, PointMass
from bnn_pyro.posterior import Posterior
from bnn_pyro.settings import setting

__all__ = ["MAP", "MLE", "MCDropout"]


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

    def find(self, model: nn.Module, point: PointMass, data: Dataset, **how: Any) -> dict[str, list[float]]:
        """Move ``point`` in place and return the trace {epoch, log_likelihood, log_joint, log_prior}.

        how: seed, checkpoint and report, as of ``Method.run``.
        """
        self.check(data)
        watch = EarlyStopping(model, point, data.x_val, data.y_val, self.patience) if self.patience else None
        trace = self.minimise(
            model,
            point,
            data,
            latent=self.prior_weight,
            project=(lambda: point.shorten(self.max_norm)) if self.max_norm else None,
            watch=watch,
            **how,
        )
        trace["log_joint"], trace["log_prior"] = trace.pop("elbo"), [-kl for kl in trace.pop("kl")]
        return trace


@dataclass(frozen=True)
class MLE(MAP):
    """Settings of the maximum likelihood estimate: MAP with the prior left out."""

    prior_weight: ClassVar[float] = 0.0
    #: Without a prior, the way to the maximum is long.
    tiny: ClassVar[Mapping[str, Any]] = {**MAP.tiny, "epochs": 1200, "lr": 0.2}


@dataclass(frozen=True)
class MCDropout(MAP):
    """Settings of MC dropout: train with dropout and predict with it, averaging over masks as over draws of w.

        q(w): W_l = M_l · diag(z_l / (1 − p_l)),  z_l ~ Bernoulli(1 − p_l)          maximise over M
        E_z[log p(y | x, w)] + log p(M)

    Training is that of MAP with a mask for every row: an ELBO whose latent variables are the masks, with q(z) = p(z)
    and so a KL of 0, plus the log prior of M as weight decay (Gal & Ghahramani 2016, arXiv:1506.02142, equation 7 up
    to its scaling of the decay). The rates p are settings: the spread of the draws does not shrink with N.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"weights", "dropout"})

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
        """Find the weights as MAP does and put them into the guide; see ``Method.run``.

        Raises UserError for a variant whose guide is not that of a network with dropout.
        """
        if not isinstance(guide, DroppedInputs):
            raise UserError("mc-dropout needs a network with dropout; use the variant dropout-mlp")
        point = PointMass(model.initial).to(data.x_train.device)
        trace = self.find(model, point, data, seed=seed, checkpoint=checkpoint, report=report)
        with torch.no_grad():
            guide.loc.copy_(point.loc)
        return Posterior(model, data.schema, guide=guide, trace=trace)
