"""Ways to infer a posterior, each a frozen dataclass of settings with the verb ``run``."""

from __future__ import annotations

from typing import Any

from bnn_pyro.errors import UserError, unknown
from bnn_pyro.inference.chees import ChEES
from bnn_pyro.inference.ensemble import Ensemble
from bnn_pyro.inference.hmc import HMC, NUTS
from bnn_pyro.inference.laplace import Laplace
from bnn_pyro.inference.method import NEEDS, Method
from bnn_pyro.inference.point import MAP, MLE, MCDropout
from bnn_pyro.inference.sghmc import SGHMC, SGLD
from bnn_pyro.inference.svi import SVI

#: Every method by its name on the command line; the first that suits a variant is its default.
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
    "sghmc": SGHMC,
    "sgld": SGLD,
}


def methods_for(variant: Any) -> tuple[str, ...]:
    """The names of the methods whose needs a variant (settings or class) has, its default first."""
    return tuple(name for name, method in METHODS.items() if method.needs <= variant.has)


def unsuitable(method: str, variant: str, kind: Any) -> UserError:
    """The error for a method that is unknown, or needs what a variant has not."""
    if method not in METHODS:
        return unknown(f"inference method for {variant}", method, methods_for(kind))
    missing = " and ".join(NEEDS.get(need, need) for need in sorted(METHODS[method].needs - kind.has))
    return UserError(f"{method} needs {missing}, which {variant} has not; take one of {', '.join(methods_for(kind))}")


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
    "methods_for",
    "unsuitable",
]
