"""Choose the figures and test rows of a run's report; titles and captions are in reports/templates/figures.toml."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bnn_pyro import plots
from bnn_pyro.datasets import Dataset, Schema, curve
from bnn_pyro.datasets.prepare import row_texts
from bnn_pyro.diagnostics.draws import sampler_series, sized
from bnn_pyro.explanation import MAX_COLUMNS, explain
from bnn_pyro.metrics.metric import Estimate
from bnn_pyro.parts.priors import BayesianNet
from bnn_pyro.posterior import Posterior
from bnn_pyro.predictive import Prediction, predict
from bnn_pyro.pruning import PrunedScore
from bnn_pyro.reports import read_texts
from bnn_pyro.reports.page import Picture, draw_figures
from bnn_pyro.runs.folder import RunFolder

#: The report lists so many of the worst predicted, and of the most uncertain, test rows of a table.
ROWS_SHOWN = 5
#: The most test rows for the figure of a growing ensemble, which every stored draw predicts again.
GROWING_ROWS = 10_000


@dataclass(frozen=True)
class Scored:
    """A posterior that was evaluated on a data set.

    prediction, validation  of the test and of the validation rows; None if there are none
    inputs, outside  {name: standardised out-of-distribution inputs (N, *input_shape)}, and their predictions
    scores      the content of metrics.json     replicates  values of the metrics on resampled test rows
    finite      whether the predictions are finite
    """

    posterior: Posterior
    data: Dataset
    num_draws: int
    prediction: Prediction | None
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    outside: Mapping[str, Prediction] = field(default_factory=dict)
    scores: dict[str, Any] = field(default_factory=dict)
    replicates: Mapping[str, np.ndarray] = field(default_factory=dict)
    finite: bool = True
    validation: Prediction | None = None

    def predict(self, x: Tensor) -> Prediction:
        """Predict other inputs."""
        return predict(self.posterior, x, num_draws=self.num_draws)


def figures_of(
    run: Scored, baseline: Scored | None, pruning: Mapping[str, Any], recalibrated: tuple[Prediction, Tensor] | None
) -> dict[str, Callable[[], object]]:
    """Return {figure: function that draws it} for a run.   recalibrated: a prediction, and its targets."""
    data, schema, prediction = run.data, run.data.schema, run.prediction
    posterior, trace, y = run.posterior, run.posterior.trace, run.data.y_test
    figures: dict[str, Callable[[], object]] = {}
    baseline_prediction = None if baseline is None else baseline.prediction
    if schema.targets and prediction is not None:
        figures |= _of_targets(prediction, y, schema)
        prediction = None  # the following figures are for a single target
    in_memory = isinstance(data.x_train, Tensor)
    if in_memory and not (schema.has_classes or schema.targets) and schema.input_shape == (1,):
        figures |= {"predictive-band": lambda: _band(run), "predictive-band-far": lambda: _band(run, far=25)}
    if in_memory and schema.has_classes and schema.input_shape == (2,):
        figures["decision-boundary"] = lambda: _map(run, plots.decision_boundary)
        figures["epistemic-map"] = lambda: _map(run, plots.epistemic_map)
    if prediction is not None and schema.has_classes:
        if schema.is_image:
            maps = cache(lambda: explain(posterior, data, num_draws=min(run.num_draws, 20)))  # few draws, as it is slow
            figures["pixel-maps"] = lambda: plots.pixel_maps(maps(), schema)
            figures["uncertain-images"] = lambda: plots.uncertain_images(prediction, data.x_test, y, schema)
        figures["reliability"] = lambda: plots.reliability(prediction, y, schema)
        figures["confidence-histogram"] = lambda: plots.confidence_histogram(prediction, y)
        figures["selective-risk"] = lambda: plots.selective_risk(prediction, y, baseline=baseline_prediction)
        figures["confusion-matrix"] = lambda: plots.confusion_matrix(prediction, y, schema)
        if len(schema.classes) == 2 and "auroc" in run.scores:
            figures["threshold-curves"] = lambda: plots.threshold_curves(prediction, y, schema)
        if run.outside:
            outside, name = dict(list(run.outside.items())[:4]), f"{data.name} (test)"
            figures["entropy-histograms"] = lambda: plots.entropy_histograms(prediction, outside, name=name)
    elif prediction is not None:
        if schema.task != "survival":
            figures["predicted-observed"] = lambda: plots.predicted_observed(prediction, y, schema)
        figures["calibration"] = lambda: plots.regression_calibration(prediction, y)
        if schema.task == "counts":
            figures["rootogram"] = lambda: plots.rootogram(prediction, y, schema)
    if prediction is not None and 1 < len(schema.column_places) <= MAX_COLUMNS:
        explanation = cache(lambda: explain(posterior, data, num_draws=run.num_draws))
        figures["permutation-importance"] = lambda: plots.permutation_importance(explanation())
        figures["partial-dependence"] = lambda: plots.partial_dependence(explanation())
    if recalibrated is not None and schema.has_classes:
        figures["reliability-recalibrated"] = lambda: plots.reliability(*recalibrated, schema)
    elif recalibrated is not None:
        figures["calibration-recalibrated"] = lambda: plots.regression_calibration(*recalibrated)
    if run.prediction is not None and math.prod(sized(posterior)) > 1:
        rows = data.x_test[:GROWING_ROWS], y[:GROWING_ROWS]
        baseline_draws = None if baseline_prediction is None else baseline_prediction[:GROWING_ROWS]
        figures["growing-ensemble"] = lambda: plots.growing_ensemble(posterior, *rows, baseline=baseline_draws)
    if pruning:
        figures["pruning"] = lambda: plots.pruning_curve(**pruning)
    for name in run.outside if schema.is_image and baseline is not None else ():
        both = run.outside[name], baseline.outside[name]
        figures[f"outside-{name}"] = lambda both=both, x=run.inputs[name]: plots.ood_bars(*both, x, schema)
    if any(trace.get(name) for name in ("kinetic_temperature", "step_size")):
        figures["sampler-trace"] = lambda: plots.training_curves(trace)
    elif any(trace.get(name) for name in ("elbo", "log_joint")):
        figures["training-curves"] = lambda: plots.training_curves(trace)
    if "lp" in posterior.stats:
        series = sampler_series(posterior)
        options = dict(diverging=series.get("diverging"), unit="nats")
        figures["transitions"] = lambda: plots.trace_ranks(series["lp"][..., None], ["log joint density"], **options)
    return figures


def draw_all(figures: Mapping[str, Callable[[], object]], folder: RunFolder) -> list[Picture]:
    """Draw the figures into ``folder``, and remove figures of a former evaluation that no longer apply."""
    pictures = draw_figures("report", {name: lambda _, draw=draw: draw() for name, draw in figures.items()}, {})
    former = [*read_texts("figures")["report"], "outside-*", "signal-to-noise", "survival-curve"]  # of earlier versions
    folder.write_figures(pictures, former)
    return pictures


def read_pruning(folder: RunFolder) -> dict[str, Any]:
    """Return the arguments of ``plots.pruning_curve`` from pruning.json; {} if the run was not pruned."""
    if not (table := folder.read("pruning.json")):
        return {}
    measure, curve = table["measure"], []
    try:
        for point in table["curve"]:
            scores = (Estimate(*(point[name + end] for end in ("", "_low", "_high"))) for name in (measure, "nll"))
            curve.append(PrunedScore(point["share"], point["weights"], measure, *scores))
    except KeyError:
        raise folder.damaged("pruning.json") from None
    return {"curve": curve, "removed": table["share_removed"]}


def differ(uncertainty: Tensor) -> bool:
    """Return whether the uncertainty of rows (B,) differs by more than a thousandth: not with a single noise scale."""
    return bool(uncertainty.max() > 1.001 * uncertainty.min())


def rows_to_look_at(data: Dataset, prediction: Prediction) -> dict[str, Any]:
    """Return the content of rows.json: {note, worst, uncertain}; the last is empty if all rows are equally certain."""
    file = Path(data.source)
    is_table = file.suffix.lower() in (".csv", ".tsv")
    where = f"as in {file.name}, whose header is row 1" if is_table else "from 0, in the order of the data"
    density, spread = prediction.log_prob(data.y_test), prediction.untransformed.total
    if data.schema.targets:
        spread = (spread / torch.tensor(data.schema.y_scale).square()).mean(1)
    parts = {"worst": density.argsort()[:ROWS_SHOWN]}
    if differ(spread):
        parts["uncertain"] = spread.argsort(descending=True)[:ROWS_SHOWN]
    names = ("row", f"observed {data.schema.target}", "predicted", "inputs, the most unusual first")
    content: dict[str, Any] = {"note": f"Rows are numbered {where}.", "uncertain": []}
    for part, rows in parts.items():
        descriptions = _descriptions(data.schema, prediction[rows], data.y_test[rows])
        columns = map(str, data.index_test[rows].tolist()), *descriptions, row_texts(data.x_test[rows], data.schema)
        content[part] = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    return content


def sites_of(posterior: Posterior) -> dict[str, Any]:
    """Return the content of sites.json, {sites}: what the draws of a network have learned; empty for a single draw."""
    model = getattr(posterior.model, "head", posterior.model)
    if math.prod(sized(posterior)) == 1 or not isinstance(model, BayesianNet):
        return {"sites": []}
    table = posterior.describe()
    total, names = table["KL"].sum(), {"σ/prior": "σ / prior's", "KL": "KL, nats"}
    table["shape"] = ["×".join(map(str, shape)) or "1" for shape in table["shape"]]
    table = table.assign(**table[["σ/prior", "|μ|/σ"]].map("{:.2g}".format))
    table["KL"] = [f"{kl:,.1f} ({kl / total:.0%})" for kl in table["KL"]]
    table = table.replace({"nan": "–", "nan (nan%)": "–", "": "–"})
    return {"sites": table.rename(columns=names).to_dict("records")}


def _descriptions(schema: Schema, prediction: Prediction, y: Tensor) -> tuple[list[str], list[str]]:
    if schema.targets:
        pairs = zip(schema.targets, prediction.each, y.unbind(1), strict=True)
        each = [_descriptions(schema.of_target(name), *pair) for name, *pair in pairs]
        return tuple(["; ".join(texts) for texts in zip(*part, strict=True)] for part in zip(*each, strict=True))
    if prediction.has_classes:
        best = zip(*map(Tensor.tolist, prediction.mean.max(-1)), strict=True)
        return [schema.classes[int(k)] for k in y], [f"{schema.classes[k]} ({p:.1%})" for p, k in best]
    ends = prediction.quantile((0.5, 0.05, 0.95)).mT.tolist()
    texts = ([f"{v:,.0f}" if abs(v) >= 1000 else f"{v:.4g}" for v in each] for each in ends)
    censored = (y < 0).tolist() if schema.task == "survival" else [False] * len(y)
    pairs = zip(y.abs().tolist() if any(censored) else y.tolist(), censored, strict=True)
    observed = [f"{'> ' * later}{v:{',.0f' if abs(v) >= 1e6 else ',.7g'}}" for v, later in pairs]  # 32 bits
    return observed, ["{} (90 %: {} to {})".format(*each) for each in texts]


def _of_targets(prediction: Prediction, y: Tensor, schema: Schema) -> dict[str, Callable[[], object]]:
    """Return figures with one panel per target, side by side, for the first six targets."""
    from bnn_pyro.plots.layout import figure
    from bnn_pyro.plots.style import drawn

    each = [(prediction.target(k), y[:, k], schema.of_target(name)) for k, name in enumerate(schema.targets[:6])]

    @drawn
    def side_by_side(draw: Callable[..., object], rows: int, cell: tuple[float, float], **grid: Any) -> object:
        axes = figure(len(each) * cell[0], cell[1]).subplots(rows, len(each), squeeze=False, **grid)
        for one, column in zip(each, axes.T, strict=True):
            draw(*one, column)
            column[0].set_title(f"{one[2].target}: {column[0].get_title()}")
        return axes

    if schema.task == "labels":
        bars = partial(side_by_side, lambda p, y, s, axes: plots.reliability(p, y, s, axes=axes), 2, (4.4, 5.0))
        return {"reliability": partial(bars, sharex=True, height_ratios=(3, 1))}
    points = partial(side_by_side, lambda p, y, s, axes: plots.predicted_observed(p, y, s, ax=axes[0]), 1, (4.6, 4.4))
    curves = partial(side_by_side, lambda p, y, s, axes: plots.regression_calibration(p, y, axes=axes), 2, (3.8, 7.0))
    return {"predicted-observed": points, "calibration": curves}


def _band(run: Scored, far: float | None = None) -> object:
    x, truth = plots.line(run.data), curve if run.data.name == "toy-curve" else None
    if far is not None:  # extend by so many ranges of the training inputs on both sides (±100 for toy-curve)
        low, high = run.data.schema.unstandardise(run.data.x_train).aminmax()
        middle, reach = (low.item() + high.item()) / 2, far * (high.item() - low.item())
        x, truth = plots.line(run.data, middle - reach, middle + reach), None
    return plots.predictive_band(run.predict(x), x, run.data, truth=truth)


def _map(run: Scored, draw: Callable) -> object:
    mesh = plots.grid(run.data, margin=0.5)  # half of the data's range on each side
    return draw(run.predict(mesh.x), mesh, run.data.x_train, run.data.y_train)
