"""MC dropout: train with dropout, and predict with it too, averaging over masks as over draws of the weights.

    q(w): W_l = M_l · diag(z_l / (1 − p_l)),  z_l ~ Bernoulli(1 − p_l)          maximise over M
    E_z[log p(y | x, w)] + log p(M)

Training is that of MAP with a mask for every row: an ELBO whose latent variables are the masks, with q(z) = p(z) and
so a KL of 0, plus the log prior of M as weight decay (Gal & Ghahramani 2016, arXiv:1506.02142, equation 7 up to its
scaling of the decay). The rates p are settings and not learned: the spread of the draws does not shrink with N.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from bnn_pyro.checkpoint import Checkpoint
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.errors import UserError
from bnn_pyro.inference.method import Report
from bnn_pyro.inference.point import MAP
from bnn_pyro.parts.dropout import DroppedInputs
from bnn_pyro.parts.guides import PointMass
from bnn_pyro.posterior import Posterior

__all__ = ["MCDropout"]


@dataclass(frozen=True)
class MCDropout(MAP):
    """Settings of MC dropout: those of MAP; every draw of the posterior has a dropout mask of its own."""

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
