"""Checks of a variant and a method against results that are known independently of both.

Each check is a frozen dataclass of settings. It tests what a method claims that its draws converge to: an exact sampler
must be exact; an approximation may only have its known kind of error, whose size is reported.
"""

from collections.abc import Collection
from typing import Any

from torch import nn

from bnn_pyro.checks.check import ALPHA, Check, Finding, Outcome, Refused, Subject, worst
from bnn_pyro.checks.estimators import Estimators
from bnn_pyro.checks.joint_distribution import JointDistribution
from bnn_pyro.checks.known_answers import ClosedForm, Logistic, Quadrature
from bnn_pyro.checks.predictive import PredictiveCheck
from bnn_pyro.checks.reference import Reference
from bnn_pyro.checks.sbc import Calibration
from bnn_pyro.checks.step_size import StepSize
from bnn_pyro.datasets import Dataset, load_data
from bnn_pyro.errors import UserError, check_known
from bnn_pyro.inference import Method
from bnn_pyro.settings import build, defaults
from bnn_pyro.zoo import ZOO, Entry
from bnn_pyro.zoo.auto import make_setup

#: Data sets whose inputs are used by default: small enough for every method, and contained in the package.
DATA, IMAGES = "toy-curve", "digits"
#: {name on the command line: check}, in descending order of statistical power per second.
CHECKS: dict[str, type[Check]] = {
    "closed-form": ClosedForm,
    "quadrature": Quadrature,
    "logistic": Logistic,
    "predictive": PredictiveCheck,
    "estimator": Estimators,
    "joint-distribution": JointDistribution,
    "step-size": StepSize,
    "reference": Reference,
    "calibration": Calibration,
}


def run(
    entry: str | Entry | nn.Module, data: Dataset | None = None, method: str | Method | None = None,
    only: str | Collection[str] = (), **settings: Any,
) -> dict[str, Outcome | str]:  # fmt: skip
    """{check: its outcome with the quick budget, or why it does not apply} for a variant, or a module of the user's.

    data: provides the inputs; optional for a variant of the zoo.   method: a key of ``METHODS`` or an object, also of
    the user's own class; by default the first method.   settings: of the method.   only: key(s) of ``CHECKS``.
    Raises UserError for unknown names, a module without data, and settings that the method does not have.
    """
    setup = make_setup(entry, method)
    if data is None and (setup.variant not in ZOO or "module" in defaults(setup.entry)):
        raise UserError("data is missing: give a Dataset for your own network")
    data = data or load_data(IMAGES if "channels" in defaults(setup.entry) else DATA)
    usual = defaults(setup.method)
    given = {name: value for name, value in vars(setup.method).items() if value != usual[name]} | settings
    subject = Subject(setup.entry, type(setup.method), data, given)
    only = [only] if isinstance(only, str) else only
    check_known("check", CHECKS, *only)
    outcomes: dict[str, Outcome | str] = {}
    for name in only or CHECKS:
        try:
            outcomes[name] = build(CHECKS[name], CHECKS[name].quick).run(subject)
        except Refused as reason:
            outcomes[name] = str(reason)
    return outcomes


__all__ = ["ALPHA", "CHECKS", "Check", "Finding", "Outcome", "Refused", "Subject", "run", "worst"]
