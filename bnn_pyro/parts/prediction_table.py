"""A prediction as columns, a value a row: what `predict` writes and ``Prediction.to_frame`` has."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.errors import UserError


def columns_of(prediction: Any, schema: Schema, threshold: float | None = None) -> dict[str, Any]:
    """What is said of each row, by names of columns; of several targets of each by itself, with its name before."""
    if schema.task == "labels":
        columns = {f"p({name})": prediction.mean[:, k].numpy() for k, name in enumerate(schema.targets)}
        parts = prediction.epistemic.unbind(1)
        return columns | {f"{name}_epistemic_nats": v.numpy() for name, v in zip(schema.targets, parts, strict=True)}
    if schema.targets:
        each = (columns_of(one, schema.of_target("")).items() for one in prediction.each)
        pairs = zip(schema.targets, each, strict=True)
        return {f"{name}_{what}": values for name, columns in pairs for what, values in columns}
    if prediction.has_classes:
        best = prediction.mean.argmax(-1) if threshold is None else (prediction.mean[:, 1] >= threshold).long()
        columns = {schema.target: np.array(schema.classes, dtype=object)[best.numpy()]}
        columns |= {f"p({name})": prediction.mean[:, k].numpy() for k, name in enumerate(schema.classes)}
        return columns | {f"{p}_nats": getattr(prediction, p).numpy() for p in ("total", "epistemic", "aleatoric")}
    law = prediction.untransformed if schema.task == "survival" else prediction  # of times of log t: means may be huge
    spreads = {"sd": law.total, "epistemic_sd": law.epistemic, "aleatoric_sd": law.aleatoric}
    log = "log_" * (law is not prediction)
    columns = {f"{log}mean": law.mean.numpy()} | {f"{log}{name}": v.sqrt().numpy() for name, v in spreads.items()}
    quantiles = prediction.quantile((0.025, 0.5, 0.975)).numpy()
    return columns | dict(zip(("q2.5", "q50", "q97.5"), quantiles, strict=True))


def intervals_of(prediction: Any, schema: Schema, level: float, names: Sequence[str]) -> dict[str, Any]:
    """The ends of an interval, or a set of classes, conformal where the prediction is, by their names."""
    if schema.task == "labels":
        raise UserError("--levels asks for intervals, and labels have probabilities; leave it out")
    if schema.task == "targets":
        ends = [*zip(names, (v.unbind(1) for v in prediction.interval(level)[:2]), strict=False)]
        return {f"{name}_{what}": v[k].numpy() for k, name in enumerate(schema.targets) for what, v in ends}
    if prediction.has_classes:
        classes = np.array(schema.classes, dtype=object)
        return {names[2]: ["|".join(classes[row.numpy()]) for row in prediction.set(level).members]}
    low, high, *_ = prediction.interval(level)
    return {names[0]: low.numpy(), names[1]: high.numpy()}
