"""What the settings of HMC, NUTS and ChEES have in common, and what is refused of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bnn_pyro.errors import UserError, unknown

__all__ = ["COMPILED", "check_settings"]

#: When the gradient is compiled.
COMPILED = ("auto", "yes", "no")


def check_settings(settings: Any, least: Mapping[str, int], usual_accept: float, **choices: Sequence[str]) -> None:
    """Raises UserError for a number out of range, or an unknown choice.

    least: {whole number: its smallest value}.   usual_accept: what ``target_accept`` is by default.
    choices: {setting: its valid values}.
    """
    for name, low in least.items():
        if getattr(settings, name) < low:
            raise UserError(f"{name} must be at least {low}, got {getattr(settings, name)}")
    if not 0 < settings.target_accept < 1:
        raise UserError(
            f"target_accept must lie between 0 and 1, got {settings.target_accept}; {usual_accept} is usual"
        )
    if not 0 <= settings.jitter < math.inf:
        raise UserError(f"jitter must be 0 or positive, got {settings.jitter}")
    if not 0 < settings.temperature < math.inf:
        raise UserError(f"temperature must be positive (1 is the Bayesian posterior), got {settings.temperature}")
    for name, valid in choices.items():
        if getattr(settings, name) not in valid:
            raise unknown(name, getattr(settings, name), valid)
