"""Creation of a variant and a method with their settings from names; all other modules take the objects.

``auto`` chooses them for the data, and the length of the fit, by one table, which is read from the top:

    kind of inputs, rows N, multiplications of the network per row M, minutes  →  variant, method, settings, reason

The first rule applies that matches the kind of inputs and the number of rows, and whose fit ends within the minutes if
shortened to no less than the share ``least`` of its default length. Evidence, also of times: docs/which-method.md.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from bnn_pyro.datasets.dataset import Dataset, Schema
from bnn_pyro.errors import UserError, check_known, counted, unknown
from bnn_pyro.inference import METHODS, NEEDS, Method, cost, methods_for
from bnn_pyro.inference.optimise import MIN_EPOCHS, schedule
from bnn_pyro.isolation import isolated
from bnn_pyro.parallel.executor import usable_cores
from bnn_pyro.progress import announce, duration
from bnn_pyro.settings import build, defaults, meant_for, plain
from bnn_pyro.zoo import ZOO, Bayesian, Entry

#: The name in place of a variant that is chosen by the data, and the default time of a fit in minutes.
AUTO, MINUTES = "auto", 5.0
#: Bounds of the length of a fit, as a share of its default; the upper one is for chains with few rows in ``MINUTES``.
#: Even after the minutes every chain takes ``MIN_DRAWN`` of its draws, as the agreement of shorter chains is unknown.
MIN_SHARE, LONGER, MIN_DRAWN = 0.01, 5.0, 0.2
#: With more inputs the prior is fan-in:4, Normal(0, 4/√inputs), as Normal(0, 1) would allow too steep functions.
WIDE = 16
#: Each input has a scale in the prior below ``FEW`` rows per input, from ``SEVERAL`` inputs on (2 below ``TINY`` rows).
FEW, SEVERAL, TINY = 40, 4, 30
#: Targets are nearly linear if ridge regression leaves less than this share of their variance, and kernel regression
#: leaves more than ``CURVED`` times the variance that ridge regression leaves.
LEFT, CURVED = 0.2, 0.85
#: Kernel regression is skipped for fewer rows than these (in total, per input), or if ridge leaves less than ``EXACT``.
MIN_CURVED, EXACT = (50, 2), 1e-3
#: Targets are tested for linearity from MIN_LINEAR rows on, up to MAX_LINEAR numbers (rows × inputs); by kernel
#: regression up to MAX_ROWS rows and MAX_EACH rows for each of inputs + SEVERAL.
MIN_LINEAR, MAX_LINEAR, MAX_ROWS, MAX_EACH = 10, 1_000_000, 1000, 10
#: Settings that are compatible with the rule for nearly linear targets.
LINEAR_TAKES = {"prior", "noise", "bias", "draws", "warmup", "chains", "thin", "target_accept", "cores", "compiled"}
#: Noise that depends on the input: see ``Rule.noise``.
BY_INPUT = {"noise": "heteroscedastic", "likelihood": "student-t"}
#: A sampled network has a third hidden layer above ``MANY`` rows; the noise is Student's t from ``MIN_STUDENT_T`` on.
MANY, MIN_STUDENT_T = 1000, 100


@dataclass(frozen=True)
class Rule:
    """A rule of the table.

    inputs    "table", "image", or "linear", a table whose targets are nearly linear in them (see :func:`is_linear`)
    settings  settings of the variant that replace defaults; ``method_settings`` are those of the method
    over      {condition: settings that replace these}. "wide": more than ``WIDE`` inputs; "many": more than ``MANY``
              training rows; "few": numbers as targets, and few rows per input (see ``FEW``); "classes": classes as
              targets; "few of classes": classes as targets, and few rows per input
    noise     settings for numbers as targets, unless the user chose another ``likelihood`` than these or "normal", or
              another ``noise``; the user's settings take precedence
    steps     number of mini-batch steps, but at least ``MIN_EPOCHS`` epochs; 0: the default of the method
    lengths   {setting of the method for the length of a fit: its minimum}; all are shortened by the same factor
    longer    the lengths that may also be up to ``LONGER`` times their default, if the minutes allow it
    least     the smallest factor of the lengths; 0: the rule applies for any minutes
    most      the most rows
    seconds   function that predicts the time of a fit
    reason    the reason for the rule, a clause
    """

    inputs: str
    variant: str
    method: str
    reason: str
    seconds: cost.Cost
    lengths: Mapping[str, int]
    least: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    method_settings: Mapping[str, Any] = field(default_factory=dict)
    over: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    noise: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 0
    longer: tuple[str, ...] = ()
    most: float = math.inf


RULES = (
    Rule("linear", "mean-field", "nuts", "targets nearly linear in the inputs, and too few rows to learn what is not",
         cost.trees, {"warmup": 200, "draws": 100}, 0.0, {"hidden": (), "prior": "gamma:1,0.1", "noise": "learned"}),
    Rule("table", "mean-field", "mile", "few enough rows to sample the posterior, all of them in every step",
         cost.sampling, {"warmup": 1, "thin": 1, "epochs": 20}, 0.08,
         {"hidden": (16, 16), "activation": "gelu", "prior": "normal:1"},
         over={"wide": {"prior": "fan-in:4"}, "many": {"hidden": (16, 16, 16)}, "classes": {"prior": "gamma:1,1"},
               "few": {"prior": "ard:0.5/fan-in:2"}, "few of classes": {"prior": "ard:0.5/gamma:1,1"}},
         noise=BY_INPUT, longer=("thin",), most=20_000),
    Rule("table", "mlp", "ensemble", "so many rows teach larger networks more than small ones that are sampled",
         cost.optimisation, {"members": 2, "epochs": 1}, 0.25, {"hidden": (100,) * 4, "prior": "normal:1"},
         {"members": 6, "batch_size": 256}, noise=BY_INPUT, steps=10_000),
    Rule("table", "hidden-layer", "svi", "too few minutes for several networks: one q from mini-batches",
         cost.optimisation, {"epochs": 1}, 0.0, {"hidden": (50,) * 4}, noise=BY_INPUT),
    Rule("image", "convnet", "ensemble", "images: networks with convolutions, each from a start of its own",
         cost.optimisation, {"members": 1}, 1 / 3, method_settings={"members": 6, "batch_size": 128, "patience": 0},
         steps=600),
    Rule("image", "bayesian-convnet", "svi", "images, and no time for several", cost.optimisation, {"epochs": 1}),
)  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """A variant and a method.

    entry   the variant with its settings     method  the inference method with its settings
    auto    of a choice by ``auto``: reason, minutes and expected_seconds; "limited" if the user gave the minutes
    """

    entry: Entry
    method: Method
    auto: Mapping[str, Any] = field(default_factory=dict)

    #: The names of the variant and of the method, and their settings as JSON values.
    variant = property(lambda self: name_of(self.entry, ZOO))
    inference = property(lambda self: name_of(self.method, METHODS))
    variant_settings = property(lambda self: plain(self.entry))
    inference_settings = property(lambda self: plain(self.method))

    def backbone_variant(self, schema: Schema) -> str | None:
        """The name of the variant that must be fitted first, as the backbone of a last layer; None if there is none."""
        return self.entry.backbone_variant(schema) if hasattr(self.entry, "backbone_variant") else None

    def changed(
        self, variant: Mapping[str, Any] = {}, method: Mapping[str, Any] = {}, settings: Mapping[str, Any] = {}
    ) -> Self:
        """A copy with other settings of the variant and the method; ``settings`` are for either, with precedence."""
        of_entry, of_method = meant_for(self.entry, self.method, settings), meant_for(self.method, self.entry, settings)
        entry = build(self.entry, {**variant, **of_entry})
        return replace(self, entry=entry, method=build(self.method, {**method, **of_method}))


def make_setup(variant: str | Entry | nn.Module, method: str | Method | None = None) -> Setup:
    """A setup from names, which stand for default settings, or from objects.

    variant: a user's own module becomes ``Bayesian(module)``.   method: by default the variant's first.
    Raises UserError for an unknown variant, or a method that does not suit it.
    """
    entry = Bayesian(variant) if isinstance(variant, nn.Module) else variant
    entry, method = (v() if isinstance(v, type) and not issubclass(v, nn.Module) else v for v in (entry, method))
    kinds = {"variant, such as bp.MeanField(hidden=(50,))": entry, "method, such as bp.SVI(lr=0.01)": method}
    for role, value in kinds.items():
        if not (value is None or isinstance(value, str) or is_dataclass(value)):
            function = "; of a function give bp.Bayesian(function)" * (callable(value) and value is entry)
            way = f"; of a class give an instance, {value.__name__}(...)" if isinstance(value, type) else function
            raise UserError(f"{value!r:.60} is neither a name nor a dataclass with the settings of a {role}{way}")
    if isinstance(entry, str) and entry not in ZOO:
        raise unknown("variant", entry, [*ZOO, AUTO])
    entry = ZOO[entry]() if isinstance(entry, str) else entry
    inference = method if isinstance(method, str) else name_of(method, METHODS) if method else methods_for(entry)[0]
    if isinstance(method, str) or inference in METHODS:  # a user's own method suits any variant
        suit, name = methods_for(entry), name_of(entry, ZOO)
        if inference not in METHODS:
            raise unknown(f"inference method for {name}", inference, suit)
        if missing := METHODS[inference].needs - entry.has:
            missing = " and ".join(NEEDS.get(need, need) for need in sorted(missing))
            raise UserError(f"{inference} needs {missing}, which {name} has not; take one of {', '.join(suit)}")
    return Setup(entry, METHODS[inference]() if isinstance(method, str | None) else method)


def name_of(settings: object, table: Mapping[str, type]) -> str:
    """The name of a variant or method in its table, or the class's name for a user's own."""
    return next((name for name, kind in table.items() if type(settings) is kind), type(settings).__name__)


def say(setup: Setup) -> None:
    """Print the choice of ``auto`` to standard error."""
    time = duration(setup.auto.get("expected_seconds", 0.0))
    announce(f"auto: {setup.variant} by {setup.inference}, about {time}: {setup.auto.get('reason')}")


def set_up(
    variant: str | Entry | nn.Module, method: str | Method | None, load: Callable[[], Dataset], *,
    settings: Mapping[str, Any] = {}, of_variant: Mapping[str, Any] = {}, of_method: Mapping[str, Any] = {},
    minutes: float | None = None,
) -> Setup:  # fmt: skip
    """A variant and a method with settings: for ``AUTO`` by :func:`choose`, else by :func:`make_setup`.

    load: returns the data set; called for ``AUTO`` only.   of_variant, of_method: settings that replace defaults or
    those of a rule.   settings: settings of either, which take precedence over these.
    minutes: time for the choice of ``AUTO``, and its limit; by default ``MINUTES``, without a limit.
    Raises UserError for unknown names and settings, and for invalid values.
    """
    if isinstance(variant, str) and variant == AUTO:
        data, fixed = load(), None if isinstance(method, str | None) else method
        named = method if fixed is None else name_of(fixed, METHODS)
        every = {**of_variant, **of_method, **settings, **(plain(fixed) if fixed else {})}
        # If targets repeat a few values, noise by input gives high densities there, and any loss at other values.
        few = data.schema.task == "regression" and len(data.y_train.unique()) ** 2 < len(data.y_train)
        every = ({"noise": "learned"} if few else {}) | every
        linear = named is None and every.keys() <= LINEAR_TAKES and is_linear(data)
        within, limited = (MINUTES, {}) if minutes is None else (minutes, {"limited": True})
        setup = choose(data.schema, len(data.x_train), minutes=within, method=named, settings=every, linear=linear)
        setup = replace(setup, method=fixed or setup.method, auto={**setup.auto, **limited})
    else:
        setup = make_setup(variant, method)
    setup = setup.changed(of_variant, of_method, settings)
    names = [*defaults(setup.entry), *defaults(setup.method)]
    for key in settings:
        if key not in names:
            chosen = f"{setup.variant} or {setup.inference}" + (", which auto chose" if setup.auto else "")
            raise unknown(f"setting of {chosen}", key, names)
    return setup


def is_linear(data: Dataset) -> bool:
    """Whether ridge regression leaves little variance in leave-one-out cross-validation, and a kernel hardly less."""
    schema, rows, inputs = data.schema, len(data.x_train), math.prod(data.schema.input_shape)
    small = MIN_LINEAR <= rows <= FEW * inputs and rows * inputs <= MAX_LINEAR
    if schema.task != "regression" or schema.is_image or not small or not isinstance(data.x_train, torch.Tensor):
        return False
    from sklearn.linear_model import RidgeCV
    from sklearn.metrics.pairwise import rbf_kernel

    x, y = (part.detach().cpu().double().numpy() for part in (data.x_train.flatten(1), data.y_train))
    y = np.log(y) if schema.target_scale == "log" else y

    def left(features: np.ndarray) -> float:
        return -RidgeCV([10.0**k for k in range(-6, 5)]).fit(features, y).best_score_ / y.var()

    linear, each = left(x), rows / (inputs + SEVERAL)
    if linear < EXACT or rows < max(MIN_CURVED[0], MIN_CURVED[1] * inputs):
        return bool(linear < LEFT / max(1.0, each) ** 2)
    kernels = (rbf_kernel(x, gamma=0.5 / (inputs * width**2)) for width in (1, 2, 4, 8))
    curved = (left(np.linalg.cholesky(kernel + 1e-8 * np.eye(rows))) for kernel in kernels)
    return bool(linear < LEFT and each <= MAX_EACH and rows <= MAX_ROWS and min(curved) > CURVED * linear)


def limit_of(setup: Setup, max_minutes: float | None) -> dict[str, float]:
    """The arguments of a method for its time limit (see ``Run``): ``max_minutes``, or the minutes of ``auto``."""
    if max_minutes is None and setup.auto.get("limited"):
        return {"max_minutes": setup.auto["minutes"], "least": MIN_DRAWN}
    return {} if max_minutes is None else {"max_minutes": max_minutes}


def choose(
    schema: Schema, rows: int, *, minutes: float = MINUTES, method: str | None = None,
    settings: Mapping[str, Any] = {}, linear: bool = False,
) -> Setup:  # fmt: skip
    """The setup of the first rule that applies.

    rows: number of training rows.   method: consider rules of this method only.   settings: settings of the variant or
    the method, which take precedence over the rule's.   linear: see :func:`is_linear`.
    Raises UserError for minutes that are not above 0 and below a million, or a method without a rule for such inputs.
    """
    if not (isinstance(minutes, int | float) and 0 < minutes < 1e6):
        raise UserError(f"minutes must be a number above 0 and below a million, got {minutes!r:.40}")
    kind = "linear" if linear else "image" if schema.is_image else "table"
    cores, rows, inputs = usable_cores(), max(1, rows), math.prod(schema.input_shape)
    rules = [rule for rule in RULES if rule.inputs == kind and method in (None, rule.method)]
    if not rules:
        check_known("inference method", METHODS, method)
        methods = ", ".join(rule.method for rule in RULES if rule.inputs == kind)
        raise UserError(f"auto takes {methods} for a {kind}, not {method}; name a variant that takes {method} (`list`)")
    by_input = settings.get("noise", "heteroscedastic") == "heteroscedastic"
    by_input = by_input and settings.get("likelihood", "normal") in ("normal", "student-t")
    are_numbers = schema.task in ("regression", "targets")
    few, classes = inputs >= (SEVERAL if rows >= TINY else 2) and rows < FEW * inputs, schema.task == "classification"
    holds = dict(wide=inputs > WIDE, many=rows > MANY, few=few and are_numbers, classes=classes)
    holds["few of classes"] = few and classes
    for rule in rules:
        chosen = dict(rule.settings)
        for condition, more in rule.over.items():
            chosen |= more if holds[condition] else {}
        if by_input and are_numbers:
            student_t = schema.target_scale != "log" and rows >= MIN_STUDENT_T
            chosen |= {k: v for k, v in rule.noise.items() if k == "noise" or student_t}
        of_method = dict(rule.method_settings)
        if rule.steps:
            of_method["epochs"] = max(MIN_EPOCHS, math.ceil(rule.steps / math.ceil(rows / of_method["batch_size"])))
        setup = make_setup(rule.variant, rule.method).changed(chosen, of_method, settings)
        with isolated(0):
            net = setup.entry.net(schema, len(schema.classes) or 2)
            macs = cost.multiplications(net, torch.zeros(1, *schema.input_shape))
        full_lengths = schedule(rows, macs) | {k: v for k, v in vars(setup.method).items() if v is not None}
        share = LONGER * max(1.0, minutes / MINUTES) if rule.longer else 1.0
        while True:
            times = {key: share if key in rule.longer else min(1.0, share) for key in rule.lengths.keys() - settings}
            lengths = {key: max(rule.lengths[key], int(t * full_lengths[key])) for key, t in times.items() if t != 1}
            seconds = rule.seconds({**full_lengths, **lengths}, rows, macs, cores)
            if seconds <= 60 * minutes or share <= MIN_SHARE:
                break
            share *= max(0.5, 0.99 * 60 * minutes / seconds)
        if (share >= rule.least and rows <= rule.most) or rule is rules[-1]:
            break
    slow = [earlier.method for earlier in rules[: rules.index(rule)] if rows <= earlier.most]
    cause = f"too few minutes for {slow[0]}, for which more --minutes leave time" if slow else rule.reason
    reason = f"{counted(rows, 'row')} × {counted(inputs - schema.exposure, 'input')} in {minutes:g} minutes, {cause}"
    about = {"reason": reason, "minutes": minutes, "expected_seconds": float(f"{seconds:.2g}")}
    return replace(setup.changed(method=lengths), auto=about)
