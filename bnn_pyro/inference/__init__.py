"""Inference methods: each is a frozen dataclass of settings with a method ``run``."""

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from torch import nn

from bnn_pyro.checkpoint import Checkpoint
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.errors import UserError
from bnn_pyro.inference.chees import ChEES
from bnn_pyro.inference.hmc import HMC, NUTS
from bnn_pyro.inference.laplace import Laplace
from bnn_pyro.inference.mile import MILE
from bnn_pyro.inference.sghmc import SGHMC, SGLD
from bnn_pyro.inference.svi import MAP, MLE, SVI, Ensemble, MCDropout
from bnn_pyro.posterior import Posterior
from bnn_pyro.progress import Report

#: What the result of a method converges to as it is given more time.
CONVERGES_TO: dict[str, str] = {
    "exact": "the exact posterior",
    "exact as lr → 0": "the exact posterior, but for a bias that falls with the step size",
    "best in family": "the member of a family that is closest to the posterior",
    "normal at the mode": "a Normal at a mode of the posterior, exact where the log joint is quadratic",
    "point": "one set of weights, or a few, with nothing said of what lies between them",
}
#: What a method may require of a variant. A variant declares in its attribute ``has`` what it provides.
NEEDS: dict[str, str] = {
    "guide": "a guide that is trained by the ELBO",
    "weights": "a model p(y, w | x) of the network's own weights",
    "proper prior": "a prior over all weights that can be sampled (of a module, where='*', or frozen='*' beside it)",
    "linear model": "a last layer on fixed features (LastLayer(backbone=net), net up to these), or on the inputs "
    "(LastLayer(backbone=torch.nn.Identity()))",
    "dropout": "a network with dropout",
    "deterministic": "a network that is used with one set of weights",
}


class Method(Protocol):
    """An inference method: a frozen dataclass whose fields are its settings.

    converges_to  a key of ``CONVERGES_TO``: what the method claims, which ``checks`` compare with exact answers
    needs         keys of ``NEEDS``: what a variant must provide
    tiny          settings that suffice for a few weights and a few dozen rows
    timed         (optional, False) whether ``run`` takes ``max_minutes`` and then returns what it has so far
    starts_at     (optional) "guide" or "point": the part of an earlier posterior at which ``run`` can start
    """

    converges_to: ClassVar[str]
    needs: ClassVar[frozenset[str]]
    tiny: ClassVar[Mapping[str, Any]]

    def run(
        self, model: nn.Module, guide: nn.Module | None, data: Dataset, *, seed: int = 0,
        checkpoint: Checkpoint | None = None, report: Report | None = None,
    ) -> Posterior:  # fmt: skip
        """Infer the posterior of ``model`` given ``data``'s training rows; called inside ``isolated(seed)``.

        seed: determines the order of mini-batches.   report: called with (steps done, total steps, figures to show).
        checkpoint: where the state is saved at intervals; if it holds a state already, the run resumes from it.
        """


#: Methods by their name on the command line. The default of a variant is the first one that it supports.
METHODS: dict[str, type[Method]] = {
    "svi": SVI,
    "laplace": Laplace,
    "mc-dropout": MCDropout,
    "map": MAP,
    "mle": MLE,
    "ensemble": Ensemble,
    "hmc": HMC,
    "nuts": NUTS,
    "chees": ChEES,
    "mile": MILE,
    "sghmc": SGHMC,
    "sgld": SGLD,
}


def methods_for(variant: Any) -> tuple[str, ...]:
    """Names of the methods that a variant supports, its default first. Raises UserError if it lacks ``has``."""
    if not hasattr(variant, "has"):
        name = getattr(variant, "__name__", type(variant).__name__)
        raise UserError(f"{name} has no class attribute 'has', which says what methods can use of a variant; a "
                        "torch.nn.Module, or a function that makes one, is a variant as bp.Bayesian(…)")  # fmt: skip
    return tuple(name for name, method in METHODS.items() if method.needs <= variant.has)
