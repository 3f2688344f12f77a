"""Comparisons of a run, as paired differences: with its own mean weights, gradient boosting, or a file of predictions.

Boosting is scikit-learn's HistGradientBoosting with its defaults, except that leaves may have as few rows as 5 % of a
small table, and that the number of iterations is chosen by five-fold cross-validation (with more rows than
``MAX_STAGED`` by its own early stopping). A number is predicted by a Normal whose scale is the RMSE of the folds, a
count by a negative binomial, with an exposure by its rate. The module also examines whether errors depend on a column.
"""

import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from pyro.distributions import Normal
from scipy.stats import norm, rankdata
from torch import Tensor

from bnn_pyro import metrics
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.diagnostics.draws import even
from bnn_pyro.errors import UserError, counted, refusing
from bnn_pyro.files import existing
from bnn_pyro.parts.components import spread_counts
from bnn_pyro.posterior import Posterior
from bnn_pyro.predictive import FLOOR, Prediction, of_classes, of_numbers, predict
from bnn_pyro.progress import progress_bar
from bnn_pyro.pruning import signal_to_noise

#: Boosting needs ``MIN_ROWS`` rows, and takes at most ``MAX_ROWS``; up to ``MAX_STAGED`` are cross-validated.
MIN_ROWS, MAX_ROWS, MAX_STAGED = 20, 100_000, 10_000
#: Tolerance of the sum of (rounded) probabilities in a file.
SUM = 1e-3
#: The dependence of errors is examined with at least ``MIN_ERRORS`` test rows, for at most ``MAX_COLUMNS`` columns.
MIN_ERRORS, MAX_COLUMNS = 30, 200


def paired_differences(
    prediction: Prediction, first: Prediction, y: Tensor, suffix: str = "", names: Collection[str] = ()
) -> dict[str, float]:
    """Return {metric + suffix, …_low, …_high}: prediction − first on the same rows, of these (or all) metrics."""
    differences = {}
    for name in names or metrics.METRICS[prediction.task]:
        with suppress(metrics.Undefined):
            differences |= metrics.paired(name, prediction, first, y).flat(name + suffix)
    return differences


def uneven_errors(prediction: Prediction, data: Dataset) -> dict[str, dict[str, float]]:
    """Return {errors_by: {name: ratio}} if standardised errors clearly depend on the prediction or a column, else {}.

    The name has the largest Spearman correlation of absolute values, if it is significant at the level 0.001 divided by
    their number; the ratio is that of the mean absolute errors in the outer thirds of the rows.
    prediction: of numbers, for the test rows.
    """
    plain, inverse = prediction.untransformed, prediction.transform.inv
    mean, sd = plain.mean.double(), plain.total.double().sqrt()
    errors = (inverse(data.y_test.double()) - mean).abs().numpy()
    sizes, by = errors / sd.numpy(), {f"the predicted {data.schema.target}": mean.numpy()}
    columns = [(c.name, place) for c, place in data.schema.column_places if c.categories is None]
    columns = columns if isinstance(data.x_test, Tensor) else []  # columns of a file are not read
    by |= {name: data.x_test[:, place.start].numpy() for name, place in columns[:MAX_COLUMNS]}
    by = {name: values for name, values in by.items() if values.min() < values.max()}
    if len(errors) < MIN_ERRORS or not by or not np.isfinite(sizes).all():
        return {}
    ranks = rankdata(sizes)
    scores = {name: abs(np.corrcoef(rankdata(values), ranks)[0, 1]) for name, values in by.items()}
    name = max(scores, key=scores.__getitem__)
    if np.arctanh(min(scores[name], 1 - 1e-9)) * np.sqrt((len(errors) - 3) / 1.06) < norm.isf(5e-4 / len(by)):
        return {}
    low, _, high = (part.mean() for part in np.array_split(errors[np.argsort(by[name], kind="stable")], 3))
    return {"errors_by": {name: float(high / max(low, 1e-12))}}


def against_mean_weights(posterior: Posterior, prediction: Prediction, data: Dataset) -> dict[str, Any]:
    """Compare a run with a prediction by its mean weights.

    Returns nll_over_mean_weights (with _low and _high, in nats per test row); kl_share, the share of the KL in −ELBO;
    signal_to_noise, the median |μ|/σ of all weights; and signal_to_noise_of_sites. What does not apply is left out; {}
    for stored draws, and for a q whose weights have no mean.
    Draws that predict worse than their mean are mostly noise: if there are many weights for the rows, the KL keeps q
    near the prior, which the last three numbers show.

    prediction: of the test rows.
    """
    try:
        alone = predict(posterior.at_mean_weights(), data.x_test)
        scores = metrics.paired("nll", prediction, alone, data.y_test).flat("nll_over_mean_weights")
    except UserError:  # also if the metric is undefined
        return {}
    kl, fit = (posterior.trace.get(key) or [0.0] for key in ("kl", "log_likelihood"))
    if kl[-1] > 0 > fit[-1]:
        scores["kl_share"] = kl[-1] / (kl[-1] - fit[-1])
    with suppress(UserError):
        ratios = signal_to_noise(posterior)
        scores["signal_to_noise"] = torch.cat([ratio.flatten() for ratio in ratios.values()]).median().item()
        scores["signal_to_noise_of_sites"] = {site: ratio.median().item() for site, ratio in ratios.items()}
    return scores


def boosted(data: Dataset) -> tuple[Prediction, dict[str, Any]] | None:
    """Return (prediction of the test rows, {about, seconds}), or None for other tasks, images, too few rows."""
    start, schema = time.perf_counter(), data.schema
    rows = even(len(data.x_train), MAX_ROWS)
    is_table = isinstance(data.x_test, Tensor) and len(schema.input_shape) == 1
    few = len(rows) < MIN_ROWS or len(data.y_train[rows].unique()) < 2 or schema.input_shape == (int(schema.exposure),)
    if not is_table or schema.targets or schema.task == "survival" or few:
        return None
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from sklearn.model_selection import KFold

    x, y, new = (v.double().cpu().numpy() for v in (data.x_train[rows], data.y_train[rows], data.x_test))
    exposure, new_exposure = (v[:, -1] if schema.exposure else np.ones(len(v)) for v in (x, new))
    x, new = (v[:, : v.shape[1] - schema.exposure] for v in (x, new))
    options = dict(min_samples_leaf=int(np.clip(len(x) // 20, 2, 20)), random_state=0)
    options |= dict(max_features=500 / x.shape[1]) if x.shape[1] > 500 else {}  # otherwise it takes minutes
    classes, counts, few = schema.has_classes, schema.task == "counts", len(x) <= MAX_STAGED
    y = np.log(y) if schema.target_scale == "log" else y
    loss = {} if classes else {"loss": "poisson" if counts else "squared_error"}
    model = (HistGradientBoostingClassifier if classes else HistGradientBoostingRegressor)(**loss, **options)
    arrays = (x, y / exposure, exposure) if schema.exposure else (x, y)  # rates, with the exposure as weight

    def predicted(inputs: np.ndarray, exposure: np.ndarray, every: bool) -> np.ndarray:
        """Predict after every iteration, or the last one: (T, B), or positive probabilities (T, B, K) of classes."""
        name = "predict_proba" if classes else "predict"
        made = np.stack([*getattr(model, f"staged_{name}")(inputs)] if every else [getattr(model, name)(inputs)])
        if not classes:
            return (made * exposure).clip(FLOOR) if counts else made
        probs = np.full((*made.shape[:2], len(schema.classes)), FLOOR)
        probs[..., model.classes_.astype(int)] += made
        return probs

    folds = [] if classes and not few else [*KFold(5, shuffle=True, random_state=0).split(x)]
    if counts and min(y[train].sum() for train, _ in folds) == 0:
        return None
    losses, left_out = 0.0, []
    with progress_bar("gradient boosting, for comparison", unit="fit") as report:
        for number, (train, out) in enumerate(folds, 1):
            if not classes or len(set(y[train])) > 1:
                model.fit(*(values[train] for values in arrays))
                left_out.append((out, made := predicted(x[out], exposure[out], few)))
                losses += _loss(made, y[out], schema.task).sum(1)
            report(number, len(folds))
    best = int(np.argmin(losses))
    if few and left_out:
        model.set_params(max_iter=best + 1)
    fitted = np.empty(len(y))
    for out, made in left_out if not classes else ():
        fitted[out] = made[best]
    model.fit(*arrays)
    made = torch.from_numpy(predicted(new, new_exposure, every=False)).float()
    if classes:
        made, uncertainty = of_classes(schema.task, made), "its own probabilities"
    elif counts:
        made = Prediction(spread_counts(made, torch.from_numpy(y), torch.from_numpy(fitted)))
        uncertainty = "a negative binomial of its mean, as dispersed as training rows left out"
    else:
        made = of_numbers(schema, made, torch.full_like(made, max(np.sqrt(losses[best] / len(y)), 1e-6 * y.std())))
        log = " of log y" if schema.target_scale == "log" else ""
        uncertainty = f"a Normal{log} whose scale is its error on training rows left out"
    long = counted(model.n_iter_, "iteration")
    about = f"scikit-learn's HistGradientBoosting on {len(x):,} training rows, {long}; {uncertainty}"
    return made, {"about": about, "seconds": round(time.perf_counter() - start, 3)}


def _loss(made: np.ndarray, y: np.ndarray, task: str) -> np.ndarray:
    """Return the loss (T, B) that chooses the number of iterations: −log p of classes, Poisson loss, squared errors."""
    if made.ndim > 2:
        return -np.log(made[:, np.arange(len(y)), y.astype(int)])
    return made - y * np.log(made) if task == "counts" else (made - y) ** 2


def read_predictions(path: Path, data: Dataset) -> Prediction:
    """Read predictions of the test rows from a CSV file: p(CLASS) for each class, or mean and sd of a Normal.

    The lines are in the order of the test rows, or have a column "row" with the numbers of ``data.index_test``.
    Raises UserError if a column, a row or a value is missing or invalid.
    """
    path, schema, rows = existing(path), data.schema, data.index_test.tolist()
    if not (schema.has_classes or schema.task == "regression"):
        raise UserError(f"{path}: a file has predictions of classes or of one number, and these data are {schema.task}")
    names = [f"p({name})" for name in schema.classes] if schema.has_classes else ["mean", "sd"]
    with refusing(f"{path}: not a CSV file ({{error}})", ValueError):
        frame = pd.read_csv(path)
    if absent := [name for name in names if name not in frame]:
        raise UserError(f"{path}: no column '{absent[0]}'; it needs {', '.join(names)}")
    if "row" in frame and frame["row"].duplicated().any():
        raise UserError(f"{path}: a number stands twice in the column 'row'")
    if "row" in frame:
        frame, has_header = frame.set_index("row"), Path(data.source).suffix.lower() in (".csv", ".tsv")
        absent = [row for row in rows if row not in frame.index]
        if absent or (has_header and frame.index.min() < 2):
            wrong = f"no row {absent[0]}" if absent else f"a row {frame.index.min()}"
            counting = "as in an editor: the header is row 1, the first row of data row 2" if has_header else "from 0"
            raise UserError(f"{path}: has {wrong} in its column 'row'; rows of these data are counted {counting}")
        frame = frame.loc[rows]
    elif len(frame) != len(rows):
        raise UserError(f"{path} has {len(frame):,} lines, and there are {len(rows):,} test rows: give one for each in "
                        "their order, or a column 'row'")  # fmt: skip
    else:
        frame.index += 2  # the header is row 1
    values = frame[names].apply(pd.to_numeric, errors="coerce").to_numpy(float)
    good = (values >= 0).all(1) & (abs(values.sum(1) - 1) < SUM) if schema.has_classes else values[:, 1] > 0
    if len(bad := np.flatnonzero(~(good & np.isfinite(values).all(1)))):
        row, cells = frame.index[bad[0]], values[bad[0]]
        problem = "probabilities must be at least 0 and add up to 1" if schema.has_classes else "sd must be above 0"
        problem = problem if np.isfinite(cells).all() else f"{', '.join(names)} must be numbers"
        raise UserError(f"{path}: row {row}: {problem}, not {cells.tolist()}")
    made = torch.tensor(values, dtype=torch.float32)[None]
    if schema.has_classes:
        return of_classes(schema.task, made.clamp_min(torch.finfo(made.dtype).eps))  # as torch clamps probabilities
    return Prediction(Normal(*made.unbind(-1)))
