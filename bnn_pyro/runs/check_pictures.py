"""Which picture shows which evidence of a check: one table, and the drawing of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from bnn_pyro import plots
from bnn_pyro.checks import Outcome
from bnn_pyro.reports.page import Picture

__all__ = ["SHOWN", "draw_outcome"]


class Shown(NamedTuple):
    """A figure: title, sentence, the evidence that it needs, and how it is drawn of it."""

    title: str
    sentence: str
    needs: tuple[str, ...]
    draw: Callable[[Mapping[str, Any]], object]
    wide: bool = True
    applies: Callable[[Mapping[str, Any]], bool] = lambda evidence: True


# -- how ---------------------------------------------------------------------------------------------------------------
def _unit(e: Mapping[str, Any]) -> str:
    return "log-odds" if e["task"] == "classification" else f"mean of {e['target']}"


def _outputs(e: Mapping[str, Any]) -> object:
    floors = {"mean_floor": e["mean_floor"], "sd_floor": e["sd_floor"], "unit": _unit(e)}
    return plots.reference_outputs(e["reference_mean"], e["mean"], e["reference_sd"], e["sd"], **floors)


def _line(e: Mapping[str, Any]) -> object:
    across = np.argsort(e["x"][:, 0])
    series = [np.ravel(e[name])[across] for name in ("reference_mean", "reference_sd", "mean", "sd")]
    return plots.reference_band(e["x"][across, 0], *series, names=("x", e["target"]))


def _bias(e: Mapping[str, Any]) -> object:
    own = {"largest_lr": float(e["largest_lr"]), "own_lr": float(e["own_lr"]), "own_bias": float(e["own_bias"])}
    order = (float(e["order"]), float(e["order_error"]))
    return plots.step_size_bias(e["lr"], e["bias"], e["error"], e["grid_lr"], e["grid_exact"], order=order, **own)


def _intervals(e: Mapping[str, Any]) -> object:
    names = ("exact_mean", "exact_sd", "mean", "sd", "levels", "coverage", "weight_coverage")
    return plots.exact_intervals(*(e[name] for name in names))


def _weights(problem: str) -> Callable[[Mapping[str, Any]], object]:
    def draw(e: Mapping[str, Any]) -> object:
        axes = (e[f"{problem}_axis_1"], e[f"{problem}_axis_2"])
        return plots.two_weights(*axes, e[f"{problem}_density"], e[f"{problem}_draws"], e[f"{problem}_names"])

    return draw


def _densities(e: Mapping[str, Any]) -> object:
    return plots.mixture_densities(e["log_density"], e["log_of_mean"], e["mean_of_log"], e["exact"])


def _objectives(e: Mapping[str, Any]) -> object:
    more = (e[name] for name in ("estimators", "variance", "variance_error")) if "estimators" in e else ()
    return plots.batch_objectives(e["batch_sizes"], e["elbo"], e["elbo_error"], *more)


def _is_a_line(e: Mapping[str, Any]) -> bool:
    return e["task"] == "regression" and e["x"].ndim == 2 and e["x"].shape[1] == 1


_ERRORS = Shown(
    "How far off is each quantity?",
    "Averages over the draws in standard errors from what the method claims, or from the exact posterior; 0 where an "
    "optimiser is as near as it may stop, 0.02 posterior standard deviations.",
    ("z", "bound"),
    lambda e: plots.standard_errors(e["labels"], e["z"], float(e["bound"])),
)

#: The figures of each check, in the order of the page.
SHOWN: dict[str, tuple[Shown, ...]] = {
    "closed-form": (
        Shown(
            "Outputs of linear regression, and what intervals hold of them",
            "At new inputs, the exact posterior of the network's output and the method's; right, the share of the "
            "exact posterior that the method's central intervals hold.",
            ("exact_sd",),
            _intervals,
        ),
        _ERRORS,
    ),
    "quadrature": (
        *(
            Shown(
                f"{title} with two weights",
                "The exact posterior by numerical integration (lines hold 50, 80 and 95 % of it), and draws of the "
                "method.",
                (f"{problem}_density",),
                _weights(problem),
                wide=False,
            )
            for problem, title in (("logistic", "Logistic regression"), ("sign", "One tanh unit"))
        ),
    ),
    "logistic": (_ERRORS,),
    "predictive": (
        Shown(
            "Is the density of a target that of the mixture?",
            "The logarithm of the mean over the draws is right; the mean of the logarithms is a common mistake.",
            ("log_density",),
            _densities,
            wide=False,
        ),
    ),
    "estimator": (
        Shown(
            "Is the objective the same for every size of mini-batch?",
            "Left, the ELBO as training estimates it; right, the variance of its gradient by the way it is estimated.",
            ("batch_sizes",),
            _objectives,
        ),
        Shown(
            "Is the gradient that of the density?",
            "Each entry of the gradient beside a central difference of the log joint density.",
            ("finite_difference",),
            lambda e: plots.finite_differences(e["gradient"], e["finite_difference"]),
            wide=False,
        ),
    ),
    "calibration": (
        Shown(
            "Are the ranks of the truth uniform?",
            "The rank of each simulated truth among the draws, as the difference of its distribution function from the "
            "uniform one: outside the outer band is more than chance.",
            ("ranks", "draws"),
            lambda e: plots.rank_ecdfs(e["ranks"], int(e["draws"]), e["labels"], shown=float(e["shown"]), p=e["p"]),
        ),
        Shown(
            "How often are the ranks what they are?",
            "A valley is a posterior too narrow, a hill one too wide, a slope one that is off to one side.",
            ("ranks", "draws"),
            lambda e: plots.rank_histograms(e["ranks"], int(e["draws"]), e["labels"]),
        ),
        Shown(
            "Do intervals hold the truth as often as they should?",
            "Central intervals of the draws over all simulated data sets, with 95 % intervals for the number of them.",
            ("coverage",),
            lambda e: plots.interval_coverage(e["levels"], e["coverage"], e["coverage_error"], e["labels"]),
            wide=False,
        ),
    ),
    "joint-distribution": (
        Shown(
            "Do weights and data stay a pair?",
            "Means and variances of every quantity after the sweeps, in standard errors from those of the joint "
            "distribution; the shaded band holds all of them with probability 0.999 where the sampler is right.",
            ("z", "bound"),
            lambda e: plots.joint_z_scores(e["z"], float(e["bound"]), e["quantities"]),
            wide=False,
        ),
        Shown(
            "The quantities that are furthest off",
            "Left, quantiles against those that they should have; right, how far they drift with every sweep.",
            ("drift",),
            lambda e: plots.joint_quantiles(
                e["levels"], e["scores"], e["z"], e["drift"], e["drift_error"], e["quantities"]
            ),
        ),
    ),
    "step-size": (
        Shown(
            "How does the bias fall with the step size?",
            "The excess of the variances on linear regression, measured at three step sizes, beside what is exact for "
            "each of them; and where the method's own step size lies.",
            ("grid_lr",),
            _bias,
            wide=False,
        ),
    ),
    "reference": (
        Shown(
            "Where the network's outputs lie, and how sure it is",
            "Each output at each test point: the method's mean and standard deviation over its draws against those of "
            "the reference. Bars are Monte-Carlo errors.",
            ("reference_mean",),
            _outputs,
        ),
        Shown(
            "The posterior of the curve",
            "The network's mean ± 2 standard deviations over its draws.",
            ("reference_mean",),
            _line,
            applies=_is_a_line,
        ),
        Shown(
            "How much of the posterior do its intervals hold?",
            "Central intervals of the method's draws over the draws of the reference, mean over the outputs.",
            ("coverage",),
            lambda e: plots.reference_coverage(e["levels"], e["coverage"], e["coverage_error"]),
            wide=False,
        ),
    ),
}


def draw_outcome(outcome: Outcome, label: str) -> list[Picture]:
    """The figures of a check whose evidence is there, named after what was checked."""
    place = "-".join(label.replace("·", " ").split())
    return [
        Picture.of(
            f"{place}-{outcome.check}-{k}", shown.draw(outcome.evidence), shown.title, shown.sentence, shown.wide
        )
        for k, shown in enumerate(SHOWN.get(outcome.check, ()), 1)
        if all(name in outcome.evidence for name in shown.needs) and shown.applies(outcome.evidence)
    ]
