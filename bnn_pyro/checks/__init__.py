"""Is a posterior right? Checks of a variant and a method against what is known independently of both.

Each check is a frozen dataclass of settings, and holds a method to what it says that its draws converge to: an exact
sampler must be exact, an approximation must be off in the way that it is known for, by an amount that is reported.
"""

from collections.abc import Collection
from typing import Any

from torch import nn

from bnn_pyro.checks.check import ALPHA, Check, Finding, Outcome, Subject, worst
from bnn_pyro.checks.estimators import Estimators
from bnn_pyro.checks.joint_distribution import JointDistribution
from bnn_pyro.checks.known_answers import ClosedForm, Logistic, Quadrature
from bnn_pyro.checks.predictive import PredictiveCheck
from bnn_pyro.checks.reference import Reference
from bnn_pyro.checks.sbc import Calibration
from bnn_pyro.checks.step_size import StepSize
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.settings import build
from bnn_pyro.zoo import Entry
from bnn_pyro.zoo.auto import make_setup

#: Every check by its name on the command line, in the order of their power per second.
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
    entry: Entry | nn.Module, data: Dataset, method: str | None = None, only: Collection[str] = (), **settings: Any
) -> dict[str, Outcome | str]:
    """{check: its outcome with the quick budget, or why it is not made} of a variant, or a module of the user's own.

    method: a key of ``METHODS``, with ``settings``; by default the first.   only: keys of ``CHECKS``, else all.
    """
    setup = make_setup(entry, method)
    subject = Subject(setup.variant, setup.entry, setup.inference, data, settings)
    checks = {name: build(CHECKS[name], CHECKS[name].quick) for name in only or CHECKS}
    return {name: check.refuses(subject) or check.run(subject) for name, check in checks.items()}


__all__ = ["ALPHA", "CHECKS", "Check", "Finding", "Outcome", "Subject", "run", "worst"]
