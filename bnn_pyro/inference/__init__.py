"""Ways to infer a posterior, each a frozen dataclass of settings with the verb ``run``."""

from bnn_pyro.inference.chees import ChEES
from bnn_pyro.inference.dropout import MCDropout
from bnn_pyro.inference.ensemble import Ensemble
from bnn_pyro.inference.hmc import HMC, NUTS
from bnn_pyro.inference.laplace import Laplace
from bnn_pyro.inference.method import Method
from bnn_pyro.inference.point import MAP, MLE
from bnn_pyro.inference.sghmc import SGHMC, SGLD
from bnn_pyro.inference.svi import SVI

#: Every method by its name on the command line.
METHODS: dict[str, type[Method]] = {
    "svi": SVI,
    "laplace": Laplace,
    "map": MAP,
    "mle": MLE,
    "mc-dropout": MCDropout,
    "ensemble": Ensemble,
    "hmc": HMC,
    "nuts": NUTS,
    "chees": ChEES,
    "sghmc": SGHMC,
    "sgld": SGLD,
}

__all__ = [
    "HMC",
    "MAP",
    "METHODS",
    "MLE",
    "NUTS",
    "SGHMC",
    "SGLD",
    "SVI",
    "ChEES",
    "Ensemble",
    "Laplace",
    "MCDropout",
    "Method",
]
