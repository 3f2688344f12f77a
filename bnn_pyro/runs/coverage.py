"""Coverage and size of a run's intervals or sets on its test rows, uncalibrated and calibrated."""

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

#: Thirds of the test rows, by the predicted uncertainty.
THIRDS = ("least uncertain third", "middle third", "most uncertain third")
#: The level of intervals and sets that show what calibration would change.
LEVEL = 0.9
#: The smallest number of calibration rows for a figure of the recalibrated prediction, and its method by task.
MIN_ROWS = 50
MAPS = {"regression": "isotonic", "classification": "temperature"}


def coverage_table(
    predictions: Mapping[str, Prediction], y: Tensor, level: float, groups: Mapping[str, Tensor], every: str
) -> list[dict[str, Any]]:
    """Return the lines of a table of coverage: of all rows for every prediction, of parts for the first two.

    Parts are the groups, and thirds by the uncertainty of the first prediction, unless it is the same for all rows. A
    line has the coverage with its exact (Clopper-Pearson) 95 % interval, the mean width or set size (None: infinite),
    and the NLL in nats.   every: the name of all rows.
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
    """Return (whether all of y is covered, set size or geometric mean of widths, NLL in nats) of each row, (B,)."""
    if prediction.has_classes:
        members = prediction.set(level).members
        covered, size = members.gather(1, y.long()[:, None])[:, 0], members.double().sum(1)
    else:
        low, high, *_ = prediction.interval(level)
        covered, size = ((low <= y) & (y <= high)).view(len(y), -1).all(1), one_number(high - low)
    return covered, torch.as_tensor(size), -prediction.log_prob(y).double()


def if_calibrated(run: Scored) -> tuple[dict[str, Any], tuple[Prediction, Tensor] | None]:
    """Show what calibration would change in a run that is not calibrated.

    Returns (the content of guarantees.json, or {} if there are too few rows; a recalibrated prediction with its targets
    for a figure, or None). The validation rows calibrate if they had no part in the training; else every second test
    row does, and the other test rows are scored.
    """
    data, task = run.data, KINDS.get(run.data.schema.task, run.data.schema.task)
    if task not in DEFAULTS or run.prediction is None or run.scores.get("failed"):
        return {}, None
    test, calibration, needed = (run.prediction, data.y_test), (run.validation, data.y_val), rows_needed(LEVEL)
    source, every, why = "validation rows, which had no part in its training", "all test rows", ""
    if len(data.y_val) < needed:
        why = f"there are {len(data.y_val)} validation rows"
    elif run.posterior.rows is None:
        why = "it is not known which rows trained it"
    elif fitted_rows(run.posterior, row_digests(data.x_val, data.y_val)):
        why = "the validation rows stopped its training"
    if why and run.data.split.get("kind") in ("time", "groups"):
        return {}, None  # rows of the same time or group are alike: coverage of later rows or new groups is lower
    if why:
        source, every = f"test rows, every second one, as {why}", "the other test rows"
        calibration, test = (tuple(part[start::2] for part in test) for start in (0, 1))
    (before, y), (prediction, target) = calibration, test
    if len(y) < needed or not len(target):
        return {}, None
    conformal, after = Conformal.fit(DEFAULTS[task], before, y), prediction[:]
    after.guarantee = conformal.at(len(target))
    note = (after.set if after.has_classes else after.interval)(LEVEL).note
    lines, figure = {"predictive": prediction, f"conformal: {conformal.method}": after}, None
    if task in MAPS and len(y) >= MIN_ROWS:
        figure = RECALIBRATIONS[MAPS[task]][1](before, y).apply(prediction), target
        lines[f"recalibrated: {MAPS[task]}"] = figure[0]
    content = {"level": LEVEL, "method": conformal.method, "data": source, "calibration_rows": len(y), "note": note}
    return content | {"table": coverage_table(lines, target, LEVEL, {}, every)}, figure
