"""The base class of checks, what they report, and the comparison of averages of draws with their expected values."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from scipy.stats import norm, t
from torch import nn

from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.diagnostics.convergence import ess_mean
from bnn_pyro.diagnostics.verdicts import LEVELS, jsonable
from bnn_pyro.errors import UserError
from bnn_pyro.inference import METHODS, Method
from bnn_pyro.progress import Report
from bnn_pyro.settings import build, defaults, plain
from bnn_pyro.zoo import Entry
from bnn_pyro.zoo.auto import name_of

#: Probability of a false alarm of one check, over all of its quantities together.
ALPHA = 1e-3
#: The effective sample size E = D/2τ of D draws is computed from autocorrelations up to about WINDOW · τ lags. Then the
#: estimated variance of a mean has a relative variance of 2 · WINDOW/E (Sokal 1997, doi:10.1007/978-1-4899-0319-8_6,
#: equation 3.19), like one of E/WINDOW degrees of freedom. Simulated in tests/test_checks_known_answers.py.
WINDOW = 5
#: Largest number of quantities that a sentence names.
NAMED = 4


@dataclass(frozen=True)
class Subject:
    """A variant and a method to be checked on inputs of ``data``.

    kind: class of the method.   given: settings of the method by the user, which override those of a check.
    """

    entry: Entry
    kind: type[Method]
    data: Dataset
    given: Mapping[str, Any] = field(default_factory=dict)

    #: The method's name.
    inference = property(lambda self: name_of(self.method({}), METHODS))
    #: What the draws converge to, according to the method with the user's settings; see ``Method``.
    converges_to = property(lambda self: self.method({}).converges_to)
    #: Whether that is the exact posterior, possibly in the limit of small steps.
    exact = property(lambda self: self.converges_to.startswith("exact"))
    #: Whether the network is a module of the user's own.
    own_module = property(lambda self: "module" in defaults(self.entry))

    @property
    def improper(self) -> bool:
        """Whether the prior, or that of some weights of a module, is improper and cannot be sampled."""
        improper = str(getattr(self.entry, "prior", "")).startswith("log-uniform")
        return improper or (self.own_module and "proper prior" not in self.entry.has)

    #: The temperature T in the user's settings.
    temperature = property(lambda self: float(self.given.get("temperature", 1.0)))

    def method(self, settings: Mapping[str, Any]) -> Method:
        """The method with these settings, without those that it does not have, overridden by the user's settings."""
        return build(self.kind, {k: v for k, v in settings.items() if k in defaults(self.kind)} | dict(self.given))

    def tiny_method(self, draws: float, epochs: float, /, **settings: Any) -> Method:
        """The method with its settings for tiny problems; draws, epochs: factors for samplers and for optimisers."""
        tiny = dict(self.kind.tiny)
        if "draws" in tiny:
            tiny["draws"] = max(1, round(tiny["draws"] * draws))
        if "burn_in" in tiny:
            burn_in = round(tiny["burn_in"] * max(1.0, draws))
            tiny |= {"burn_in": burn_in, "epochs": burn_in + max(1, round((tiny["epochs"] - tiny["burn_in"]) * draws))}
        elif "epochs" in tiny:
            tiny["epochs"] = max(1, round(tiny["epochs"] * epochs))
        return self.method(tiny | settings)

    def irreducible(self, hidden: tuple[int, ...] = ()) -> str:
        """Why the variant cannot be reduced to a fully connected network of these widths; "" if it can."""
        entry, names = self.entry, defaults(self.entry)
        if "dropout" in self.kind.needs:
            return "the rates of its masks are settings, not inferred: the limit of its draws is not known"
        if self.own_module:
            return "it is a module, which cannot be reduced: closed-form takes a module that is linear in its weights"
        if "channels" in names:
            return "its layers are convolutions, but exact results are known for fully connected networks only"
        if "prior" not in names or not {"hidden", "backbone"} & names.keys():
            return f"{type(entry).__name__} has no settings 'prior' and 'hidden' to make it small enough"
        if self.improper:
            return "its prior is improper: there is no posterior that a guide could approximate"
        if getattr(entry, "scale", "free") != "free":
            return f"its q has σ in proportion to the mean (scale={entry.scale}), and the best such q is not known"
        if hidden and "hidden" not in names:
            return "a last layer has no hidden units"
        return "the method is for linear models" if hidden and "linear model" in self.kind.needs else ""

    def reduced(self, **settings: Any) -> Entry:
        """The variant without dropout or backbone, with those of the settings that it has."""
        entry, names = self.entry, defaults(self.entry)
        # The initial σ of the weights of a guide is neither 0, like a point's, nor that of the prior.
        small = {"init_scale": 0.05, "input_dropout": 0.0, "hidden_dropout": 0.0, "backbone": nn.Flatten()}
        return replace(entry, **{k: v for k, v in {**small, **settings}.items() if k in names})

    def settings(self, method: Method, entry: Entry | None = None) -> dict[str, Any]:
        """The settings of variant and method for the report, JSON-able."""
        return {"variant": plain(entry or self.entry), "method": plain(method)}


@dataclass(frozen=True)
class Finding:
    """One quantity, compared with its correct value.

    about     description, with its unit
    expected  the correct value; None if there is none to compare with
    error     standard error of the difference; 0 if both are exact; None if it is unknown
    p         two-sided p-value, corrected for the quantities of the check; None without randomness
    level     one of ``LEVELS``: good; caution, a known error of the method; bad
    z         standard Normal score of the uncorrected p-value; None without randomness
    """

    about: str
    estimate: float
    expected: float | None = None
    error: float | None = None
    p: float | None = None
    level: str = "good"
    z: float | None = None


@dataclass(frozen=True)
class Outcome:
    """The result of one check (a key of ``CHECKS``) of one subject, with its verdict as a level and a sentence.

    settings   of variant and method, JSON-able
    findings   the compared quantities
    evidence   arrays by name, for more figures; see ``plots.checks``
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
        """All but the evidence, JSON-able, with None for non-finite numbers. Estimates have the key ``found``."""
        findings = [{"found" if k == "estimate" else k: v for k, v in jsonable(vars(f)).items()} for f in self.findings]
        entry = {"check": self.check, "level": self.level, "sentence": self.sentence, "settings": dict(self.settings)}
        return {**entry, "findings": findings, "figures": jsonable(self.figures)}


class Refused(UserError):
    """A check does not apply to a subject."""


class Check:
    """Base class of a test of whether a posterior is right: a frozen dataclass of settings with a method ``run``.

    Class attributes: ``title`` (a headline), ``idea`` (what is compared: the docstring's first paragraph), ``quick``
    (settings of the quick budget; the defaults are those of the full budget).
    """

    title: ClassVar[str]
    idea: ClassVar[str]
    quick: ClassVar[Mapping[str, Any]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.idea = " ".join((cls.__doc__ or "").partition("\n\n")[0].split())

    def _refuses(self, subject: Subject) -> str:
        return ""

    def refuses(self, subject: Subject) -> str:
        """Why this check does not apply to the subject; "" if it does."""
        try:
            return self._refuses(subject)
        except UserError as reason:
            return str(reason)

    def run(self, subject: Subject, *, seed: int = 0, report: Report | None = None) -> Outcome:
        """Run the check. Raises UserError for errors that the user can correct, and Refused if it does not apply."""
        if reason := self.refuses(subject):
            raise Refused(reason)
        with warnings.catch_warnings():  # about settings that the check chose
            warnings.filterwarnings("ignore", ".* tells of its start alone")
            return self._run(subject, seed, report or (lambda *_: None))


def worst(levels: Iterable[str]) -> str:
    """The worst of several levels; "good" if there are none."""
    return max(levels, key=LEVELS.index, default="good")


def concluded(
    check: str, findings: Sequence[Finding], settings: Mapping[str, Any], right: str, wrong: str, remark: str = "",
    **more: Any,
) -> Outcome:  # fmt: skip
    """The outcome of a check with these findings: the worst of their levels, and a sentence.

    right, wrong: start of the sentence if no finding is bad, or if one is.   remark: a further sentence.
    more: see ``Outcome``.
    """

    def described(f: Finding) -> str:
        return f"{f.about}: {f.estimate:.3g}" + ("" if f.expected is None else f", not {f.expected:.3g}")

    ordered = sorted(findings, key=lambda f: -1.0 if f.p is None else f.p)  # the most significant first
    bad, caution = ([described(f) for f in ordered if f.level == level] for level in ("bad", "caution"))
    p, num = [f.p for f in findings if f.p is not None], len(findings)
    chance = f" (smallest p {min(p):.2g}, alarm below {ALPHA:g})" if p else ""
    off = bad or caution
    named = "; ".join(off[:NAMED]) + (f"; and {len(off) - NAMED} more" if len(off) > NAMED else "")
    sentence = f"{right}: {num - len(caution)} of {num} quantities agree{chance}." + f" To know: {named}." * bool(off)
    sentence = f"{wrong}: {len(bad)} of {num} quantities are off: {named}." if bad else sentence
    return Outcome(check, worst(f.level for f in findings), f"{sentence} {remark}".strip(), settings, findings, **more)


class Estimate(NamedTuple):
    """Means of M quantities, their standard errors, and the degrees of freedom of the errors; each (M,)."""

    mean: np.ndarray
    error: np.ndarray
    freedom: np.ndarray | float = np.inf

    @classmethod
    def of_chains(cls, values: np.ndarray) -> Self:
        """Of series (C, D, M), with errors by effective sample sizes; degrees of freedom are these / ``WINDOW``."""
        values = np.asarray(values, dtype=np.float64)
        with np.errstate(invalid="ignore"):
            effective = np.nan_to_num(ess_mean(np.moveaxis(values, 2, 0)), nan=1.0)
        return cls(values.mean((0, 1)), values.std((0, 1)) / np.sqrt(effective), np.maximum(effective / WINDOW, 1.0))

    @classmethod
    def of_independent(cls, values: np.ndarray) -> Self:
        """Of independent draws (S, M), or means of independent runs or chains."""
        values = np.asarray(values, dtype=np.float64)
        freedom = max(len(values) - 1, 1)
        return cls(values.mean(0), values.std(0, ddof=min(1, len(values) - 1)) / np.sqrt(len(values)), freedom)


def judge(
    abouts: Sequence[str], estimate: Estimate, expected: np.ndarray, *, high: np.ndarray | None = None,
    tolerance: np.ndarray | float = 0.0, level: str | np.ndarray = "bad", tests: int = 1,
) -> list[Finding]:  # fmt: skip
    """A finding for each quantity, with ``level`` (one for all, or (M,)) if it differs significantly from the expected.

    high: if given, values from ``expected`` to ``high`` are correct.   tolerance: deviation that is no error.
    tests: p-values are corrected for ``tests`` · M comparisons.
    """
    top = expected if high is None else high
    off = np.where(estimate.mean > top, estimate.mean - top, np.minimum(estimate.mean - expected, 0.0))
    off = np.sign(off) * np.maximum(np.abs(off) - tolerance, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        z = np.where(off == 0, 0.0, off / estimate.error)
    alone = np.where(np.isfinite(z), 2 * t.sf(np.abs(z), estimate.freedom), 0.0)
    p = np.minimum(1.0, tests * len(z) * alone)
    off = np.copysign(norm.isf(alone / 2), z)
    near = expected if high is None else np.clip(estimate.mean, expected, high)
    levels = np.where(p < ALPHA, level, "good").tolist()
    numbers = zip(*(v.astype(float).tolist() for v in (estimate.mean, near, estimate.error, p)), levels, strict=True)
    return [Finding(about, *row, z) for about, row, z in zip(abouts, numbers, off.tolist(), strict=True)]


def close(about: str, estimate: float, expected: float, tolerance: float) -> Finding:
    """A finding without randomness, bad if the two differ by more than ``tolerance``, or one is not finite."""
    good = abs(estimate - expected) <= tolerance
    return Finding(about, float(estimate), float(expected), 0.0, level="good" if good else "bad")
