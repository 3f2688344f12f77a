"""A variant made so small that its posterior is known: the same class, guide and code, with other settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from bnn_pyro.checks.subject import Subject
from bnn_pyro.zoo import Entry

__all__ = ["irreducible", "reduced"]

#: σ of every weight where a guide starts: neither a point nor a prior.
INIT_SCALE = 0.05


def irreducible(subject: Subject, hidden: tuple[int, ...] = ()) -> str:
    """Why the variant cannot be made a fully connected network of these widths, in words; "" where it can."""
    entry, names = subject.entry, _names(subject.entry)
    if subject.inference == "mc-dropout":
        return "the rates of its masks are settings, not inferred: its draws tend to no posterior that is known"
    if "channels" in names:
        return "its layers are convolutions, and what is known exactly is a fully connected network"
    if "prior" not in names or not {"hidden", "backbone"} & names:
        return f"{type(entry).__name__} has no settings 'prior' and 'hidden' by which it could be made small enough"
    if str(entry.prior).startswith("log-uniform"):
        return "its prior is improper: there is no posterior for a guide to come near to"
    if getattr(entry, "scale", "free") != "free":
        return f"its q has σ in proportion to the mean (scale={entry.scale}), and the best of these is not known"
    if hidden and "hidden" not in names:
        return "a last layer has no hidden units to be made small"
    return ""


def reduced(entry: Entry, **settings: Any) -> Entry:
    """The variant with those of the settings that it has, without dropout, on features that are the inputs.

    settings: hidden, activation, bias, prior, noise.
    """
    names = _names(entry)
    small: Mapping[str, Any] = {
        "init_scale": INIT_SCALE,
        "input_dropout": 0.0,
        "hidden_dropout": 0.0,
        "backbone": nn.Flatten(),
        **settings,
    }
    return dataclasses.replace(entry, **{k: v for k, v in small.items() if k in names})


def _names(entry: Entry) -> set[str]:
    return {field.name for field in dataclasses.fields(entry)}
