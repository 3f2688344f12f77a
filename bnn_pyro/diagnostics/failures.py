"""Whether a fit has failed: predictions are not finite, a chain diverged, or a reference without inputs is better.

The reference is a Normal with the mean and standard deviation of the training targets, the frequencies of the training
classes, or for times the Weibull of maximal likelihood, of which only densities are compared. It is compared on the
validation rows if there are 30 or more, else on training rows; on 1,000 evenly spaced rows at most. The difference d of
a row to the reference is that of −log p(y), in nats; of the squared error of the mean, in variances of the training
targets; or of whether the class is wrong. Predictions are worse if Student's one-sided test of mean d > ``MARGINS`` has
p < 0.0001 for d clipped from above at 10 or at 1; without clipping, a few rows with huge errors would raise the
standard error so much that nothing is significant. If a model is of the logarithm of the targets, so is all of this.
"""

import math
from dataclasses import dataclass

import numpy as np
import pyro
import torch
from scipy.stats import ttest_1samp
from torch import Tensor

from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.diagnostics.draws import even
from bnn_pyro.inference import METHODS
from bnn_pyro.posterior import Posterior
from bnn_pyro.predictive import Prediction, knows_nothing, predict

#: Smallest number of validation rows that are compared, and largest number of rows.
MIN_ROWS, MAX_ROWS = 30, 1000
#: What mean d must exceed (nats, variances, a share of rows), the level of the test, and where d is clipped.
MARGINS, ALPHA, CUTS = {"nll": 0.1, "square": 0.1, "error": 0.02}, 1e-4, (1.0, 10.0)
#: A chain of at least so many draws has failed if it diverged in every transition.
MIN_DRAWS = 10

REMEDY = "try a smaller step size (--lr) or a narrower prior"
#: The advice if new rows are predicted worse than by the reference.
UNLIKE = ("unless the run's own report says so too, they are unlike the rows that trained: look for inputs in other "
          "units, or that mean something else")  # fmt: skip


@dataclass(frozen=True)
class Failure:
    """The cause and what to change, in one sentence.   finite: whether predictions are finite and can be scored."""

    sentence: str
    finite: bool = True

    def __str__(self) -> str:
        return self.sentence


def failure(
    posterior: Posterior, data: Dataset, *, num_draws: int = 100, new: tuple[Tensor, Tensor] | None = None
) -> Failure | None:
    """Why the fit has failed, or None.

    num_draws: of the predictions.   new: (x, y) of other rows, at least 14, which are compared instead.
    """
    if broken := _not_finite(posterior):
        return Failure(f"{broken}: the computation broke down, {REMEDY}", finite=False)
    part, x, y = ("new", *new) if new else ("validation", data.x_val, data.y_val)
    if len(y) < MIN_ROWS and not new:
        part, x, y = "training", data.x_train, data.y_train
    if not len(y):
        return None
    rows = torch.from_numpy(even(len(y), MAX_ROWS)).to(y.device)
    x, y = x[rows], y[rows].cpu()
    with pyro.validation_enabled(False):  # a draw may not be finite
        prediction = predict(posterior, x, num_draws=num_draws)
        nll = -prediction.log_prob(y).double()
    if bool((torch.isnan(nll) | (nll == -math.inf)).any()):
        return Failure(f"predictions of the {part} rows are not finite: {REMEDY}", finite=False)
    if diverged := posterior.provenance.get("failed") or _diverging(posterior):
        return Failure(diverged)
    log_density, errors, its_errors = _knows_nothing(data, prediction, x, y)
    classes, by, certain = posterior.schema.has_classes, "errors", False
    if bool(torch.isfinite(errors).all()) and is_worse(errors - its_errors, MARGINS["error" if classes else "square"]):
        if classes:
            measured = f"{errors.mean():.1%} are wrong, and {its_errors.mean():.1%} by the most frequent class"
        else:
            one = not data.schema.targets
            scale = prediction.transform.inv(data.y_train.cpu().double()).std(correction=0) if one else 1.0
            root, its_root = (e.mean().sqrt() * scale for e in (errors, its_errors))
            average = "rate" if data.schema.exposure else "mean"
            of = " of the logarithm" if data.schema.target_scale == "log" else "" if one else " in standard deviations"
            measured = f"the RMSE{of} is {root:.4g}, and {its_root:.4g} with the {average} of the training targets"
    elif is_worse(nll + log_density, MARGINS["nll"]):
        measured = f"the NLL is {nll.mean():.4g} nats a row, and {-log_density.mean():.4g} with the "
        of = {"survival": "Weibull of the training times", "counts": "negative binomial of the training counts"}
        others = of.get(data.schema.task, "mean and standard deviation of the training targets")
        measured += "class frequencies" if classes else others
        by, certain = "nll", bool(errors.mean() < its_errors.mean())
    else:
        return None
    advice = UNLIKE if new else way_out(posterior, data, by, certain, num_draws=num_draws)
    return Failure(f"predictions are worse than knowing nothing: on {len(y):,} {part} rows {measured}; {advice}")


def way_out(posterior: Posterior, data: Dataset, by: str, certain: bool, *, num_draws: int = 100) -> str:
    """What to change if rows that were not used in training are predicted worse than by the reference.

    by: the worse score, "nll" or "errors".   certain: whether the errors are smaller, so that the uncertainty is wrong.
    """
    if of_rows := {"time": "later", "groups": "of other groups"}.get(data.split.get("kind", "")):
        return (f"they are {of_rows} than the rows that trained, and may be unlike them, which longer training "
                "does not mend: look for inputs that mean the same in both")  # fmt: skip
    rows = torch.from_numpy(even(len(data.y_train), MAX_ROWS)).to(data.y_train.device)
    x, y = data.x_train[rows], data.y_train[rows].cpu()
    prediction, about = predict(posterior, x, num_draws=num_draws), posterior.provenance
    log_density, errors, its_errors = _knows_nothing(data, prediction, x, y)
    gain = its_errors - errors if by == "errors" else prediction.log_prob(y).double() - log_density
    start, settings = "what is predicted is better, but too certain: " * certain, about.get("method_settings", {})
    entry, stopped = about.get("entry_settings", {}), "early_stopping" in about
    # The epochs and the learning rate of a sampler are those of the fit that it starts from.
    used = {} if "warmup" in settings else {**about.get("schedule", {}), **settings}
    trains = "epochs" in used and not stopped and "chains" not in settings
    ended = stopped and (posterior.trace.get("epoch") or [0])[-1] < settings.get("epochs", math.inf)
    weight = getattr(METHODS.get(about.get("method")), "prior_weight", 1.0)
    prior = {"a stronger prior (--set prior=…, such as normal:0.1)": "prior" in entry and weight > 0}
    more = {"more --epochs": "epochs" in used and not ended, "a longer warm-up (--set warmup=…)": "warmup" in settings}
    if gain.mean() > 0:
        start += "it has learned the noise of the training rows, which it fits better: "
        width = max(entry.get("hidden") or [0])
        ways = {"early stopping (--set patience=50)": trains and settings.get("patience") == 0,
                "fewer --epochs": trains, f"fewer weights (--hidden {width // 3})": width > 2, **prior}  # fmt: skip
    elif certain:
        noise = {"more --noise": isinstance(entry.get("noise"), int | float)}
        ways = {"rows that validate (--validation)": trains, **prior, **noise, **more}
    else:
        ways = {**more, "a smaller --lr": "lr" in used}
    ways_left = [way for way, helps in ways.items() if helps] or ["another variant or method"]
    return f"{start}try {', '.join(ways_left[:-1])}{' or ' * (len(ways_left) > 1)}{ways_left[-1]}"


def is_worse(differences: Tensor | np.ndarray, margin: float) -> bool:
    """Whether the mean of the differences d (N,) exceeds the margin, by the test of the module's docstring."""
    values = np.asarray(differences, dtype=np.float64)
    if 0.5 ** len(values) >= ALPHA:  # even a sign test could not be significant with so few rows
        return False
    return any(
        d.mean() > margin if np.ptp(d) == 0 else ttest_1samp(d, margin, alternative="greater").pvalue < ALPHA
        for d in (np.minimum(values, cut) for cut in CUTS)
    )


def _knows_nothing(data: Dataset, prediction: Prediction, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(log density of the reference, errors of the fit's mean, errors of the reference), each (N,)."""
    schema, train, pair = data.schema, data.y_train.cpu(), (prediction, knows_nothing(data, x))
    density = pair[1].log_prob(y).double()
    if schema.has_classes:
        return density, *((p.mean.argmax(-1) != y).double() for p in pair)
    if schema.task == "survival":  # the error of a censored time is unknown
        return density, y.new_zeros(len(y)), y.new_zeros(len(y))
    train, at = (prediction.transform.inv(v.double()) for v in (train, y))
    sd = train.std(0, correction=0).clamp_min(torch.finfo(torch.float32).tiny)
    errors = (((p.untransformed.mean.double() - at) / sd).square() for p in pair)
    return density, *(error.mean(1) if schema.targets else error for error in errors)


def _not_finite(posterior: Posterior) -> str:
    """A description of the weights that are not finite; "" if all are."""
    if posterior.chains is None:
        lost = [name for name, value in posterior.guide.named_parameters() if not bool(torch.isfinite(value).all())]
        return f"{len(lost)} of the guide's parameters ({lost[0]}, …) are not finite" if lost else ""
    finite = [torch.isfinite(w).reshape(*w.shape[:2], -1).all(2).cpu() for w in posterior.chains.values()]
    lost = ~torch.stack(finite).all(0)
    return f"{lost.sum():,} of {lost.numel():,} draws have weights that are not finite" if lost.any() else ""


def _diverging(posterior: Posterior) -> str:
    """A description of the chains that diverged in every transition; "" if there are none."""
    flags = posterior.stats.get("diverging")
    thin = posterior.provenance.get("method_settings", {}).get("thin", 1)  # as any of its transitions may have
    if flags is None or flags.shape[1] < MIN_DRAWS or thin > 1:
        return ""
    lost = flags.bool().all(1).nonzero()[:, 0].tolist()
    if not lost:
        return ""
    start = f"chain {', '.join(str(chain + 1) for chain in lost[:5])} of {len(flags)} diverged in every transition, so "
    return start + "that its draws tell of its start alone: try another start, a smaller step size or a longer warm-up"
