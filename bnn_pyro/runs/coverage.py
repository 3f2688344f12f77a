"""Coverage and size of a run's intervals or sets on its test rows, as they are and calibrated."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bnn_pyro.calibration.calibrated import DEFAULTS, KINDS, fitted_rows, one_number
from bnn_pyro.calibration.conformal import Conformal, rows_needed
from bnn_pyro.calibration.recalibration import RECALIBRATIONS
from bnn_pyro.datasets.rows import row_digests
from bnn_pyro.metrics.metric import share_of
from bnn_pyro.predictive import Prediction
from bnn_pyro.runs.figures import Scored, differ

#: Parts of the test rows, by the uncertainty that the posterior predicts.
THIRDS = ("least uncertain third", "middle third", "most uncertain third")
#: The level of what a run is shown without being calibrated, and by how many rows its figure is corrected at least.
LEVEL, ENOUGH = 0.9, 50
#: What corrects that figure.
MAPS = {"regression": "isotonic", "classification": "temperature"}


def coverage_table(
    predictions: Mapping[str, Prediction], y: Tensor, level: float, groups: Mapping[str, Tensor], every: str
) -> list[dict[str, Any]]:
    """Lines of all rows by each prediction; of thirds, by how uncertain the first one is, and of groups by two of them.

    No thirds where it is equally uncertain of all. Coverage with its exact (Clopper-Pearson) 95 % interval, mean width
    or set size (None: infinite), and NLL in nats.
    """
    scores = {kind: _scores(prediction, y, level) for kind, prediction in predictions.items()}
    total = torch.as_tensor(one_number(next(iter(predictions.values())).total))
    order, parts = total.argsort(), {}
    if len(order) >= 3:
        parts = (dict(zip(THIRDS, order.tensor_split(3), strict=True)) if differ(total) else {}) | dict(groups)
    rows = []
    for part, index in {every: order, **parts}.items():
        for kind in list(scores)[: 2 if part in parts else None]:
            covered, sizes, nll = scores[kind]
            size = sizes[index].mean().item()
            scored = {"size": size if math.isfinite(size) else None, "nll": nll[index].mean().item()}
            rows.append({"rows": part, "prediction": kind} | share_of(covered[index].numpy()).flat("covered") | scored)
    return rows


def _scores(prediction: Prediction, y: Tensor, level: float) -> tuple[Tensor, Tensor, Tensor]:
    """(whether y is covered, width or number of classes, NLL in nats) of each row, (B,).

    Of several targets whether all are covered at once, and the geometric mean of their widths.
    """
    if prediction.has_classes:
        members = prediction.set(level).members
        covered, size = members.gather(1, y.long()[:, None])[:, 0], members.double().sum(1)
    else:
        low, high, *_ = prediction.interval(level)
        covered, size = ((low <= y) & (y <= high)).view(len(y), -1).all(1), one_number(high - low)
    return covered, torch.as_tensor(size), -prediction.log_prob(y).double()


def if_calibrated(run: Scored) -> tuple[dict[str, Any], tuple[Prediction, Tensor] | None]:
    """(what guarantees.json would say, (recalibrated prediction, its targets) for a figure or None); {} without rows.

    Validation rows calibrate that had no part in the training; else every second test row, and the others are scored.
    """
    data, task = run.data, KINDS.get(run.data.schema.task, run.data.schema.task)
    if task not in DEFAULTS or run.prediction is None or run.scores.get("failed"):
        return {}, None
    shown, known, needed = (run.prediction, data.y_test), (run.validation, data.y_val), rows_needed(LEVEL)
    source, every, why = "validation rows, which had no part in its training", "all test rows", ""
    if len(data.y_val) < needed:
        why = f"there are {len(data.y_val)} validation rows"
    elif run.posterior.rows is None:
        why = "it is not known which rows trained it"
    elif fitted_rows(run.posterior, row_digests(data.x_val, data.y_val)):
        why = "the validation rows stopped its training"
    if why and run.data.split.get("kind") in ("time", "groups"):
        return {}, None  # neighbours of a row in time, or of its group, promise more than later rows or groups keep
    if why:
        source, every = f"test rows, every second one, as {why}", "the other test rows"
        known, shown = (tuple(part[start::2] for part in shown) for start in (0, 1))
    (before, y), (prediction, target) = known, shown
    if len(y) < needed or not len(target):
        return {}, None
    conformal, after = Conformal.fit(DEFAULTS[task], before, y), prediction[:]
    after.guarantee = conformal.at(len(target))
    note = (after.set if after.has_classes else after.interval)(LEVEL).note
    lines, figure = {"predictive": prediction, f"conformal: {conformal.method}": after}, None
    if task in MAPS and len(y) >= ENOUGH:
        figure = RECALIBRATIONS[MAPS[task]][1](before, y).apply(prediction), target
        lines[f"recalibrated: {MAPS[task]}"] = figure[0]
    content = {"level": LEVEL, "method": conformal.method, "data": source, "calibration_rows": len(y), "note": note}
    return content | {"table": coverage_table(lines, target, LEVEL, {}, every)}, figure
