"""Is a posterior right? Checks of a variant and a method against what is known independently of both.

Each check is a frozen dataclass of settings, and holds a method to what it says that its draws converge to: an exact
sampler must be exact, an approximation must be off in the way that it is known for, by an amount that is reported.
"""

from bnn_pyro.checks.check import ALPHA, Check, Finding, Outcome, Subject, worst
from bnn_pyro.checks.estimators import Estimators
from bnn_pyro.checks.joint_distribution import JointDistribution
from bnn_pyro.checks.known_answers import ClosedForm, Logistic, Quadrature
from bnn_pyro.checks.predictive import PredictiveCheck
from bnn_pyro.checks.reference import Reference
from bnn_pyro.checks.sbc import Calibration
from bnn_pyro.checks.step_size import StepSize

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

__all__ = ["ALPHA", "CHECKS", "Check", "Finding", "Outcome", "Subject", "worst"]
