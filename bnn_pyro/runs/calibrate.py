"""A run's posterior calibrated by rows that did not train, and what coverage its intervals or sets then reach."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from bnn_pyro.calibration import Calibrated, calibrate, monitor
from bnn_pyro.datasets.dataset import Dataset, Schema
from bnn_pyro.diagnostics import failure
from bnn_pyro.errors import FitFailed, UserError
from bnn_pyro.metrics import nll
from bnn_pyro.metrics.metric import share_of
from bnn_pyro.posterior import Posterior
from bnn_pyro.predictive import Prediction, predict
from bnn_pyro.runs.evaluate import labelled
from bnn_pyro.runs.folder import GUARANTEES, RunFolder
from bnn_pyro.runs.recipe import Recipe, located

__all__ = ["calibrate_run", "calibration_rows", "guarantee_columns", "interval_columns", "monitor_lines"]

#: Parts of the test rows, by the uncertainty that the posterior predicts.
THIRDS = ("least uncertain third", "middle third", "most uncertain third")


def calibration_rows(data: Dataset, recipe: Recipe, name: str | None) -> tuple[Tensor, Tensor]:
    """(x, y) of the rows that calibrate: other data with labels, those set aside, or the validation rows."""
    x, y = labelled(name, data.schema, recipe) if name else data.set_aside or (data.x_val, data.y_val)
    if not len(x):
        raise UserError(f"{data.name} has no validation rows to calibrate by: give --data FILE with rows that did not "
                        "train, or train with --validation ROWS")  # fmt: skip
    return x, y


def calibrate_run(
    folder: RunFolder, recipe: Recipe, data: Dataset, posterior: Posterior, *, name: str | None = None,
    method: str | None = None, level: float = 0.9,
) -> dict[str, Any]:  # fmt: skip
    """Write calibration.json and guarantees.json; the latter's content.

    name: other data with labels, whose rows calibrate instead of the run's validation rows.

    Raises FitFailed where predictions are not finite.
    """
    x, y = calibration_rows(data, recipe, name)
    folder.check_data(posterior, data)
    failed = failure(posterior, data, num_draws=recipe.num_draws)
    if failed and not failed.finite:
        raise FitFailed(f"there is nothing to calibrate: {failed}")
    made = calibrate(posterior, x, y, method, level=level, num_draws=recipe.num_draws)
    done = made.provenance["calibration"]["methods"][-1]
    rows, note = [], "there are no test rows to see it on"
    if len(data.x_test):
        pair = predict(posterior, data.x_test, num_draws=made.num_draws, seed=made.seed), made.predict(data.x_test)
        order = pair[0].total.argsort()
        parts = {"all test rows": torch.arange(len(order)), **dict(zip(THIRDS, order.tensor_split(3), strict=True))}
        kinds = "predictive", ("conformal: " if made.conformal else "recalibrated: ") + done
        for part, index in parts.items() if len(order) >= 3 else list(parts.items())[:1]:
            for kind, p in zip(kinds, pair, strict=True):
                rows.append({"rows": part, "prediction": kind} | _scores(p[index], data.y_test[index], level))
        note = (pair[1].set if pair[1].has_classes else pair[1].interval)(level).note
    source = located({"name": name or ""})["name"]
    content = {"level": level, "method": done, "data": source, "calibration_rows": len(x), "note": note}
    made.write(folder.path)
    folder.write(GUARANTEES, content | {"table": rows})
    return content | {"table": rows}


def _scores(prediction: Prediction, y: Tensor, level: float) -> dict[str, float | None]:
    """Coverage with its exact (Clopper-Pearson) 95 % interval, mean width or set size, and NLL in nats."""
    if prediction.has_classes:
        shown = prediction.set(level)
        covered, size = shown.members.gather(1, y.long()[:, None])[:, 0], shown.members.double().sum(1).mean()
    else:
        shown = prediction.interval(level)
        covered, size = (shown.low <= y) & (y <= shown.high), (shown.high - shown.low).mean()
    numbers = dict(zip(("covered", "covered_low", "covered_high"), share_of(covered.numpy()), strict=True))
    return numbers | {"size": size.item() if math.isfinite(size) else None, "nll": nll(prediction, y)}


def guarantee_columns(calibrated: Calibrated, prediction: Prediction, level: float) -> pd.DataFrame:
    """Columns of the CSV of predictions: interval or set, and how unusual each row's uncertainty is."""
    columns = interval_columns(prediction, calibrated.schema, level)
    return pd.DataFrame({**columns, "share_as_uncertain": calibrated.unusual(prediction)})


def interval_columns(
    prediction: Prediction, schema: Schema, level: float, names: Sequence[str] = ("low", "high", "set")
) -> dict[str, Any]:
    """The ends of an interval, or a set of classes, conformal where the prediction is, by their names."""
    if prediction.has_classes:
        classes = np.array(schema.classes, dtype=object)
        return {names[2]: ["|".join(classes[row.numpy()]) for row in prediction.set(level).members]}
    low, high, *_ = prediction.interval(level)
    return {names[0]: low.numpy(), names[1]: high.numpy()}


def monitor_lines(calibrated: Calibrated, x: Tensor, x_new: Tensor, y_new: Tensor | None) -> str:
    """What ``predict --monitor`` says."""
    verdicts = monitor(calibrated, x, x_new, y_new)
    return "\n".join(f"{'ALARM' if v.alarm else 'ok':<7}{v.test:<11}{v.sentence}" for v in verdicts)
