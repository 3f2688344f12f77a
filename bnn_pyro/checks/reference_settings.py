"""With which settings a method is held against a reference posterior: the tuned ones, or what a long run takes."""

from __future__ import annotations

from typing import Any

from bnn_pyro.checks.reference_posterior import ReferencePosterior
from bnn_pyro.checks.subject import Subject
from bnn_pyro.errors import UserError
from bnn_pyro.fitting import tuned

__all__ = ["below"]

_CHAINS = {"chains": 4, "warmup": 500, "cores": 1}
#: Method -> reference -> settings; "" is any reference on which the method was not tuned.
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "nuts": {"": _CHAINS},
    "hmc": {"": _CHAINS},
    "chees": {"": {"superchains": 16, "warmup": 300}},
    "svi": {
        "": {"epochs": 2000, "lr": 0.01},
        "boston": {"epochs": 400, "batch_size": 64, "lr": 0.01},
        "mnist-160": {"epochs": 2000, "batch_size": 0, "lr": 0.01},
    },
    **{
        name: {
            "": {"epochs": 600, "lr": 0.02},
            "toy-curve": {"epochs": 3000, "lr": 0.01},
            "boston": {"epochs": 200, "batch_size": 64, "lr": 0.003},
            "mnist-160": {"epochs": 500, "batch_size": 0, "lr": 0.01},
        }
        for name in ("map", "mle", "ensemble")
    },
    "sghmc": {
        "": {"chains": 4, "max_draws": 2000},
        "breast-cancer": {"lr": 0.3},
        "toy-curve": {"lr": 3e-5, "epochs": 8000},
        "digits-last-layer": {"epochs": 2500},
    },
    "sgld": {
        "": {"chains": 4, "max_draws": 2000},
        "breast-cancer": {"lr": 1.0},
        "toy-curve": {"lr": 3e-5, "epochs": 8000},
        "digits-last-layer": {"epochs": 2500},
    },
}


def below(subject: Subject, reference: ReferencePosterior, draws: int) -> dict[str, Any]:
    """What the check sets of the subject's method; the user's settings go above.

    draws: of Markov chains that visit the posterior, all chains together.
    """
    name, known = subject.inference, SETTINGS.get(subject.inference, {})
    try:
        best = dict(tuned(subject.variant, reference.about["dataset"], name)[1].method)
    except UserError:  # a variant or a method of the user's own
        best = {}
    general = known.get("", {})
    if name == "chees":
        general = {**general, "chains": 32, "draws": max(1, draws // 32)}
    elif subject.limit == "posterior":
        general = {**general, "draws": max(1, draws // _CHAINS["chains"])}
    # A tuned optimisation is one whole; samplers are asked for so many draws, whatever was tuned.
    found = best or general if subject.limit not in ("posterior", "posterior at step size 0") else {**best, **general}
    return {**found, **known.get(reference.name, {})}
