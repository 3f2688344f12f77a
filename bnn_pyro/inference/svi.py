"""Stochastic variational inference.

    argmax_φ ELBO(φ) = E_q[log p(y | x, w)] − KL(q_φ(w) ‖ p(w))

The ELBO is estimated with N/B-scaled mini-batches and reparametrised draws (Blundell et al. 2015; Ranganath et al.
2014). A mean-field q is narrower than the posterior wherever weights are correlated.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from bnn_pyro.checkpoint import Run
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.errors import UserError
from bnn_pyro.inference.early_stopping import GUIDE_STEPS, GuideStopping
from bnn_pyro.inference.optimise import Optimisation
from bnn_pyro.posterior import Posterior
from bnn_pyro.settings import setting


@dataclass(frozen=True)
class SVI(Optimisation):
    """Settings of stochastic variational inference: the guide of the highest ELBO.

    num_particles  draws of w that estimate the ELBO in a step
    temperature    T: the KL is charged T times; 1 is Bayes, less is a cold posterior and is reported as such
    """

    converges_to: ClassVar[str] = "best in family"
    needs: ClassVar[frozenset[str]] = frozenset({"guide"})
    starts_at: ClassVar[str] = "guide"
    former: ClassVar[Mapping[str, Any]] = {**Optimisation.former, "kl_warmup": 0}
    patient_steps: ClassVar[int] = GUIDE_STEPS
    num_particles: int = setting(1, low=1)
    temperature: float = setting(1.0, above=0)

    def stops_early(self, model: nn.Module) -> bool:
        """Of a network of one's own: of many weights the q of the highest ELBO may predict worse than others."""
        return getattr(model, "is_own_network", False)

    def run(self, model: nn.Module, guide: nn.Module | None, data: Dataset, **how: Any) -> Posterior:
        """Fit the guide; see ``Method.run``."""
        if guide is None:
            raise UserError("SVI needs a guide, and this variant has none; use --inference map")
        run, how = Run(**how), dict(latent=self.temperature, num_particles=self.num_particles)
        apart, patience = self.held_out(model, data, run.seed)
        if patience:
            how["watch"] = GuideStopping(model, guide, apart, patience)
        trace, over = self.minimise(model, guide, apart, run, **how)
        about = self.chosen(model, data, trace, over)
        if patience:
            about["early_stopping"] |= {"epoch": how["watch"].state["best_epoch"], "sd_factor": how["watch"].factor}
        return Posterior(model, data.schema, guide=guide, trace=trace, provenance=about)
