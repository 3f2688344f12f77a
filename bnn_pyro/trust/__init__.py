"""Is a posterior right? Checks of a variant and a method against what is known independently of both.

Each check is a frozen dataclass of settings in a file of its own, and holds a method to what it claims
(``inference.method.LIMITS``): an exact sampler must be exact, an approximation must be off in the way that it is known
for, by an amount that is told.
"""

from bnn_pyro.trust.exact.closed_form import ClosedForm
from bnn_pyro.trust.exact.logistic import Logistic
from bnn_pyro.trust.exact.predictive_check import PredictiveCheck
from bnn_pyro.trust.exact.quadrature import Quadrature
from bnn_pyro.trust.kernels.joint_distribution import JointDistribution
from bnn_pyro.trust.kernels.step_size import StepSize
from bnn_pyro.trust.known.reference import Reference
from bnn_pyro.trust.objective.estimators import Estimators
from bnn_pyro.trust.outcome import ALPHA, Check, Finding, Outcome, worst
from bnn_pyro.trust.simulated.calibration import Calibration
from bnn_pyro.trust.subject import Subject

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
