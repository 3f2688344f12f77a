"""Which figures a run's report shows, by its task, the shape of its data and what its method left behind.

Their words are in reports/templates/figures.toml.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from bnn_pyro import plots
from bnn_pyro.datasets import curve
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.errors import UserError
from bnn_pyro.files import write_whole
from bnn_pyro.metrics.metric import Estimate
from bnn_pyro.posterior import Posterior
from bnn_pyro.predictive import Prediction, predict
from bnn_pyro.pruning import PrunedScore, signal_to_noise
from bnn_pyro.reports.page import Picture, read_texts
from bnn_pyro.runs.folder import RunFolder

__all__ = ["EvaluatedRun", "Outside", "Pruning", "draw_all", "figures_of", "read_pruning"]

#: The function behind a data set that was made from one.
TRUTHS = {"toy-curve": curve}
#: How far the zoomed-out band reaches on both sides, in ranges of the training inputs (±100 for toy-curve).
FAR = 25
#: Test rows at most on which an ensemble is watched as it grows: every stored draw predicts them once more.
GROWING_ROWS = 10_000
#: Where so many rows have such a confidence, errors are told by doubt on a log scale as well.
SURE, SURE_SHARE = 0.99, 0.5


@dataclass(frozen=True)
class Outside:
    """Out-of-distribution inputs (N, *input_shape), standardised, and what run and baseline say of them."""

    name: str
    x: Tensor
    prediction: Prediction
    baseline: Prediction | None = None


class Pruning(NamedTuple):
    """The curve on the test rows, and the share of weights beyond log α = 3."""

    curve: list[PrunedScore]
    removed: float


@dataclass(frozen=True)
class EvaluatedRun:
    """All that figures can be made of; predictions are for the test rows, None where there are none."""

    posterior: Posterior
    data: Dataset
    num_draws: int
    prediction: Prediction | None
    baseline: Prediction | None = None
    outside: Sequence[Outside] = ()
    pruning: Pruning | None = None

    def predict(self, x: Tensor) -> Prediction:
        """The run's prediction elsewhere."""
        return predict(self.posterior, x, num_draws=self.num_draws)


def figures_of(run: EvaluatedRun) -> dict[str, Callable[[], object]]:
    """How each of the figures that apply to a run is drawn, by its name; one more for each set of images outside."""
    data, schema, prediction = run.data, run.data.schema, run.prediction
    posterior, trace, y = run.posterior, run.posterior.trace, run.data.y_test
    figures: dict[str, Callable[[], object]] = {}
    if not schema.has_classes and schema.input_shape == (1,):
        figures |= {"predictive-band": lambda: _band(run), "predictive-band-far": lambda: _far_band(run)}
    if schema.has_classes and schema.input_shape == (2,):
        figures["decision-boundary"] = lambda: _map(run, plots.decision_boundary, 0.15)
        figures["epistemic-map"] = lambda: _map(run, plots.epistemic_map, 1.0)
    if prediction is not None and schema.has_classes:
        if schema.is_image:
            figures["uncertain-images"] = lambda: plots.uncertain_images(prediction, data.x_test, y, schema)
        elif prediction.num_draws > 1:
            rows = prediction.epistemic.argsort(descending=True)[:6]
            figures["softmax-draws"] = lambda: plots.softmax_draws(prediction, rows, y, schema)
        figures["reliability"] = lambda: plots.reliability(prediction, y)
        if (prediction.mean.amax(1) > SURE).float().mean().item() > SURE_SHARE:
            figures["doubt-calibration"] = lambda: plots.doubt_calibration(prediction, y)
        figures["confidence-histogram"] = lambda: plots.confidence_histogram(prediction, y)
        figures["selective-risk"] = lambda: plots.selective_risk(prediction, y, baseline=run.baseline)
        figures["confusion-matrix"] = lambda: plots.confusion_matrix(prediction, y, schema)
        if run.outside:
            outside = {other.name: other.prediction for other in run.outside[:4]}
            name = f"{data.name} (test)"
            figures["entropy-histograms"] = lambda: plots.entropy_histograms(prediction, outside, name=name)
    elif prediction is not None:
        figures["predicted-observed"] = lambda: plots.predicted_observed(prediction, y, schema)
        figures["calibration"] = lambda: plots.regression_calibration(prediction, y)
    chains = posterior.chains
    if prediction is not None and chains is not None and next(iter(chains.values())).shape[:2].numel() > 1:
        figures["growing-ensemble"] = lambda: _growing(run)
    if run.pruning is not None:
        figures["pruning"] = lambda: plots.pruning_curve(run.pruning.curve, removed=run.pruning.removed)
        figures["signal-to-noise"] = lambda: plots.signal_to_noise(signal_to_noise(posterior))
    for other in run.outside if schema.is_image else ():
        if other.baseline is not None:
            figures[f"outside-{other.name}"] = lambda o=other: plots.ood_bars(o.prediction, o.baseline, o.x, schema)
    sampled = any(trace.get(name) for name in ("kinetic_temperature", "step_size"))
    if not sampled and any(trace.get(name) for name in ("elbo", "log_joint")):
        figures["training-curves"] = lambda: plots.training_curves(trace)
    if "lp" in posterior.stats:
        figures["transitions"] = lambda: plots.chain_traces(posterior.stats)
    if sampled:
        figures["sampler-trace"] = lambda: plots.sampler_trace(trace)
    return figures


def draw_all(run: EvaluatedRun, folder: Path) -> list[Picture]:
    """Draw every figure that applies into ``folder``, and remove those of an earlier evaluation that no longer do."""
    figures, words = figures_of(run), read_texts("figures")["report"]
    for old in folder.glob("*.png"):
        if old.stem not in figures and (old.stem in words or old.stem.startswith("outside-")):
            old.unlink()
    pictures = []
    for name, draw in figures.items():
        said = words["outside" if name.startswith("outside-") else name]
        title = said["title"].format(name=name.removeprefix("outside-"))
        pictures.append(Picture.of(name, draw(), title, said["sentence"], said.get("wide", True)))
        write_whole(folder / f"{name}.png", pictures[-1].png)
    return pictures


def read_pruning(folder: RunFolder) -> Pruning | None:
    """What pruning.json holds; None where the run was not pruned."""
    table = folder.read("pruning.json")
    if not table:
        return None
    measure, curve = table["measure"], []
    try:
        for point in table["curve"]:
            scores = (Estimate(*(point[name + end] for end in ("", "_low", "_high"))) for name in (measure, "nll"))
            curve.append(PrunedScore(point["share"], point["weights"], measure, *scores))
    except KeyError:
        raise UserError(
            f"{folder.path}/pruning.json is damaged; remove it, and write it again: evaluate --prune"
        ) from None
    return Pruning(curve, table["share_removed"])


# -- how ---------------------------------------------------------------------------------------------------------------
def _band(run: EvaluatedRun) -> object:
    x = plots.line(run.data)
    return plots.predictive_band(run.predict(x), x, run.data, truth=TRUTHS.get(run.data.name))


def _far_band(run: EvaluatedRun) -> object:
    raw = run.data.schema.unstandardise(run.data.x_train)
    low, high = raw.amin().item(), raw.amax().item()
    middle, reach = (low + high) / 2, FAR * (high - low)
    x = plots.line(run.data, middle - reach, middle + reach)
    return plots.predictive_band(run.predict(x), x, run.data)


def _map(run: EvaluatedRun, draw: Callable, margin: float) -> object:
    mesh = plots.grid(run.data, margin=margin)
    return draw(run.predict(mesh.x), mesh, run.data.x_train, run.data.y_train)


def _growing(run: EvaluatedRun) -> object:
    x, y = run.data.x_test[:GROWING_ROWS], run.data.y_test[:GROWING_ROWS]
    baseline = None if run.baseline is None else run.baseline[:GROWING_ROWS]
    return plots.growing_ensemble(run.posterior, x, y, baseline=baseline)
