"""What a check is made of, what it reports, and variants made so small that their posterior is known."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from torch import nn

from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.diagnostics.verdicts import LEVELS
from bnn_pyro.inference import METHODS, Method
from bnn_pyro.inference.method import Report
from bnn_pyro.settings import build, plain
from bnn_pyro.zoo import Entry

__all__ = ["ALPHA", "Check", "Finding", "Outcome", "Subject", "fields_of", "irreducible", "lengthened", "most_off",
           "reduced", "worst"]  # fmt: skip

#: Chance of a false alarm of one check, over all of its quantities together.
ALPHA = 1e-3
#: σ of every weight where a guide starts: neither a point nor a prior.
INIT_SCALE = 0.05


@dataclass(frozen=True)
class Subject:
    """What is checked: a variant and a method, with the settings that a user gave, and data whose inputs are used.

    variant, inference  their names in ``ZOO`` and ``METHODS``
    entry               the variant with its settings
    given               the user's settings of the method; they go above those of a check
    """

    variant: str
    entry: Entry
    inference: str
    data: Dataset
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> type[Method]:
        """The method's class."""
        return METHODS[self.inference]

    @property
    def converges_to(self) -> str:
        """What the method says that its draws converge to; see ``Method``."""
        return self.kind.converges_to

    @property
    def exact(self) -> bool:
        """Whether that is the posterior itself, in the limit of small steps or without one."""
        return self.converges_to.startswith("exact")

    @property
    def improper(self) -> bool:
        """Whether the prior has no draws."""
        return str(getattr(self.entry, "prior", "")).startswith("log-uniform")

    @property
    def temperature(self) -> float:
        """T that the user asked for."""
        return float(self.given.get("temperature", 1.0))

    def method(self, settings: Mapping[str, Any]) -> Method:
        """The method: the user's settings above these, of which those that it does not have are left out."""
        own = fields_of(self.kind)
        return build(self.kind, {**{k: v for k, v in settings.items() if k in own}, **self.given})

    def tiny_method(self, *, draws: float = 1.0, epochs: float = 1.0, **settings: Any) -> Method:
        """The method with settings that suffice on a tiny problem, lengthened as :func:`lengthened` does."""
        return self.method({**lengthened(self.kind.tiny, draws, epochs), **settings})

    def settings(self, method: Method, entry: Entry | None = None) -> dict[str, Any]:
        """Of variant and method, for the report; JSON-able."""
        return {"variant": plain(entry or self.entry), "method": plain(method)}


@dataclass(frozen=True)
class Finding:
    """One quantity.

    about     what it is, in the field's words, with its unit
    estimate  its value
    expected  what it should be; None where there is nothing to compare with
    error     standard error of the difference; 0 where both are exact; None where it is not known
    p         two-sided p-value, corrected for the number of quantities of the check; None where no chance is involved
    level     a key of ``LEVELS``: good; caution, off in the way that the method is known for; bad
    """

    about: str
    estimate: float
    expected: float | None = None
    error: float | None = None
    p: float | None = None
    level: str = "good"

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; a number that is not finite as None. The estimate is called ``found`` in the file."""
        values = {k: _plain(v) for k, v in vars(self).items()}
        return {"found" if k == "estimate" else k: v for k, v in values.items()}


@dataclass(frozen=True)
class Outcome:
    """One check of one subject.

    check      a key of ``CHECKS``
    level      the verdict: a key of ``LEVELS``
    sentence   the verdict in words that need no statistician
    settings   of variant and method, JSON-able
    findings   what was compared
    evidence   arrays for the figures, by name
    figures    numbers for the table of variants and methods: {column: number}
    """

    check: str
    level: str
    sentence: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    findings: Sequence[Finding] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    figures: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Without the evidence; JSON-able."""
        return {
            "check": self.check,
            "level": self.level,
            "sentence": self.sentence,
            "settings": dict(self.settings),
            "findings": [finding.to_dict() for finding in self.findings],
            "figures": {k: _plain(v) for k, v in self.figures.items()},
        }


class Check(Protocol):
    """One way to tell whether a posterior is right: a frozen dataclass of settings with the verb ``run``.

    Class attributes: ``title`` (a headline), ``idea`` (what is compared with what, in a sentence), ``quick``, the
    settings of the quick budget; the defaults are those of the full one.
    """

    def refuses(self, subject: Subject) -> str:
        """Why this check cannot be made of the subject, in words; "" where it can."""
        ...

    def run(self, subject: Subject, *, seed: int = 0, report: Report | None = None) -> Outcome:
        """Make the check. Raises UserError for what the user can mend."""
        ...


def worst(levels: Iterable[str]) -> str:
    """The worst of several levels; "good" of none."""
    return max(levels, key=LEVELS.index, default="good")


def most_off(findings: Sequence[Finding]) -> str:
    """How many findings are bad, and which of them most of all; "" where none is."""
    bad = [f for f in findings if f.level == "bad"]
    if not bad:
        return ""
    first = min(bad, key=lambda f: f.p if f.p is not None else 0.0)
    return (
        f"{len(bad)} of {len(findings)} quantities are off, most of all the {first.about}: {first.estimate:.4g}, and "
        f"{first.expected:.4g} is right."
    )


def fields_of(settings: Any) -> set[str]:
    """Names of the settings of a dataclass."""
    return {f.name for f in dataclasses.fields(settings)}


def lengthened(tiny: Mapping[str, Any], draws: float = 1.0, epochs: float = 1.0) -> dict[str, Any]:
    """Settings for so many times the draws of a sampler, or so many times the epochs of an optimiser."""
    settings = dict(tiny)
    if "draws" in tiny:
        settings["draws"] = max(1, round(tiny["draws"] * draws))
    if "burn_in" in tiny:
        settings["burn_in"] = round(tiny["burn_in"] * max(1.0, draws))
        settings["epochs"] = settings["burn_in"] + max(1, round((tiny["epochs"] - tiny["burn_in"]) * draws))
    elif "epochs" in tiny:
        settings["epochs"] = max(1, round(tiny["epochs"] * epochs))
    return settings


def irreducible(subject: Subject, hidden: tuple[int, ...] = ()) -> str:
    """Why the variant cannot be made a fully connected network of these widths, in words; "" where it can."""
    entry, names = subject.entry, fields_of(subject.entry)
    if "dropout" in subject.kind.needs:
        return "the rates of its masks are settings, not inferred: its draws tend to no posterior that is known"
    if "channels" in names:
        return "its layers are convolutions, and what is known exactly is a fully connected network"
    if "prior" not in names or not {"hidden", "backbone"} & names:
        return f"{type(entry).__name__} has no settings 'prior' and 'hidden' by which it could be made small enough"
    if subject.improper:
        return "its prior is improper: there is no posterior for a guide to come near to"
    if getattr(entry, "scale", "free") != "free":
        return f"its q has σ in proportion to the mean (scale={entry.scale}), and the best of these is not known"
    if hidden and "hidden" not in names:
        return "a last layer has no hidden units to be made small"
    if hidden and "linear model" in subject.kind.needs:
        return "the method is for linear models"
    return ""


def reduced(entry: Entry, **settings: Any) -> Entry:
    """The variant with those of the settings that it has, without dropout, on features that are the inputs.

    settings: hidden, activation, bias, prior, noise.
    """
    names = fields_of(entry)
    small: Mapping[str, Any] = {
        "init_scale": INIT_SCALE,
        "input_dropout": 0.0,
        "hidden_dropout": 0.0,
        "backbone": nn.Flatten(),
        **settings,
    }
    return dataclasses.replace(entry, **{k: v for k, v in small.items() if k in names})


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    value = value.item() if isinstance(value, np.generic) else value
    return value if math.isfinite(value) else None
