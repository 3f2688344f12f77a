"""``calibrate`` a posterior with rows that were not used in training; predict with the result, save and load it."""

import base64
import json
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import binom, poisson
from torch import Tensor

from bnn_pyro.calibration.conformal import SCORES, Conformal
from bnn_pyro.calibration.recalibration import RECALIBRATIONS
from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.datasets.in_memory import inputs
from bnn_pyro.datasets.rows import Rows, row_digests
from bnn_pyro.errors import UserError, check_known, refusing
from bnn_pyro.files import write_whole
from bnn_pyro.loading import load as load_posterior
from bnn_pyro.metrics.metric import targets
from bnn_pyro.parts.decisions import check_level
from bnn_pyro.posterior import Posterior
from bnn_pyro.predictive import NUM_DRAWS, Prediction, predict
from bnn_pyro.zoo import Entry

FILE, FORMAT = "calibration.json", 1
#: Fields of :class:`Calibrated` that the file stores unchanged, under the same names.
STORED_FIELDS = ("column", "epistemic", "borders", "num_draws", "seed")
#: {method: the task that it is for}.
METHODS = {name: task for name, (*_, task) in RECALIBRATIONS.items()} | {n: s.task for n, s in SCORES.items()}
#: Tasks that are treated like another one.
KINDS = {"ordinal": "classification", "counts": "regression"}
#: {task: the default method}.
DEFAULTS = {"regression": "normalised", "classification": "lac", "targets": "joint"}
#: Value of ``groups`` that is no column's name: the groups are thirds of the rows by predicted uncertainty.
UNCERTAINTY = "uncertainty"
#: Largest number of groups that a column may have.
MAX_GROUPS = 20
#: Calibration rows that equal training rows are refused if so many duplicates have a probability below this.
DUPLICATES = 1e-3


def calibrate(
    posterior: "Posterior | Calibrated", x: Tensor | Any, y: Tensor, method: str | None = None, *, level: float = 0.9,
    groups: str | Sequence[Any] | None = None, per_class: bool = False, num_draws: int = NUM_DRAWS, seed: int = 0,
) -> "Calibrated":  # fmt: skip
    """Correct a posterior's predictions, or give them a guarantee, with rows that were not used in its training.

    x, y: (n, *input_shape) and (n,) or (n, T), such as ``data.x_val`` and ``data.y_val``; y may hold class names.
    method: a name in ``METHODS``. Recalibration changes the predictive distribution: temperature, vector, dirichlet
        (classes), beta, isotonic-classes (two classes), isotonic, distribution, variance (numbers). Conformal
        prediction changes only intervals and sets: normalised (default), local, cqr, pit, absolute (numbers), joint
        (several targets), lac (default), aps, raps (classes). A second calibration needs other rows than the first.
    level: the level that ``cqr`` is optimised for; intervals of any level can be requested afterwards.
    groups: a column name, or a label for each row: the guarantee then holds in each group separately. "uncertainty":
        the groups are thirds of the calibration rows by predicted total uncertainty.
    per_class: the guarantee holds in each true class separately, as with the target's name as ``groups``.
    num_draws, seed: of all predictions; they must be the same for calibration and new rows.
    Raises UserError for rows already used in training or calibration, bad targets or level, or another task's method.
    """
    posterior.schema.need_uncensored("calibrate")
    made = posterior if isinstance(posterior, Calibrated) else Calibrated(posterior, num_draws=num_draws, seed=seed)
    schema, classes = made.schema, len(made.schema.classes)
    task = KINDS.get(schema.task, schema.task)
    method = DEFAULTS[task] if method is None else method
    names = [name for name, of in METHODS.items() if of == task or (of == "two classes" and classes == 2)]
    check_known(f"calibration method for {f'{classes} classes' if classes else task}", names, method)
    if made.conformal is not None:
        raise UserError("this posterior is conformal already: recalibrate the original one, then make that conformal")
    if classes and isinstance(groups, str) and groups == schema.target != UNCERTAINTY:
        groups, per_class = None, True
    if (groups is not None or per_class) and method not in SCORES:
        raise UserError(f"groups are for conformal prediction, but '{method}' is a recalibration")
    if per_class and (groups is not None or task != "classification"):
        raise UserError("per_class is for class labels, and takes no other groups")
    check_level(level)
    column = groups if isinstance(groups, str) else None
    if column == UNCERTAINTY and column in (column_spec.name for column_spec, _ in schema.column_places):
        raise UserError(f"'{column}' means thirds by predicted uncertainty, but is a column here: rename the column")
    x = as_inputs(x, schema)
    prediction = made.predict(x)
    if schema.classes and not isinstance(y, Tensor) and np.asarray(y).dtype.kind in "OU":
        check_known("class", schema.classes, *sorted({*map(str, y)}))
        y = [schema.classes.index(str(name)) for name in y]
    checked = torch.as_tensor(targets(prediction, y))
    y = y.detach().cpu() if isinstance(y, Tensor) and not classes else checked
    digests = _unused(made, x, y)
    if method in SCORES:
        borders = np.quantile(one_number(prediction.total), [1 / 3, 2 / 3]).tolist() if column == UNCERTAINTY else []
        made = replace(made, column=column, borders=borders)
        groups = made.groups_of(x, prediction, groups)
        if column is not None and len(set(groups)) > MAX_GROUPS:
            raise UserError(f"column '{column}' has {len(set(groups))} values, too many for groups: cut it into "
                            f"{MAX_GROUPS} at most, and give their labels")  # fmt: skip
        options = dict(x=x, groups=groups, per_class=per_class, level=level)
        made = replace(made, conformal=Conformal.fit(method, prediction, y, **options))
    else:
        made = replace(made, maps=(*made.maps, (method, RECALIBRATIONS[method][1](prediction, y))))
        prediction = made.maps[-1][1].apply(prediction)
    return replace(made, rows=torch.cat([made.rows, digests]), epistemic=one_number(prediction.epistemic).tolist())


@dataclass(frozen=True)
class Calibrated:
    """A posterior with maps of its predictive distribution and conformal scores; ``bp.predict`` accepts it.

    maps, conformal  (name, map) pairs, applied in this order; scores of the calibration rows, or None
    column, borders  the column that determines the groups, or "uncertainty"; the borders of its thirds
    rows, epistemic  digests of all calibration rows (n,); the epistemic uncertainty of the most recent ones
    num_draws, seed  of every prediction
    """

    posterior: Posterior
    maps: tuple[tuple[str, Any], ...] = ()
    conformal: Conformal | None = None
    column: str | None = None
    rows: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64), repr=False)
    epistemic: Sequence[float] = field(default=(), repr=False)
    num_draws: int = NUM_DRAWS
    seed: int = 0
    borders: Sequence[float] = ()

    schema = property(lambda self: self.posterior.schema)

    @property
    def label(self) -> str:
        """The name of its predictions in tables."""
        return f"{'conformal' if self.conformal else 'recalibrated'}: {self.provenance['calibration']['methods'][-1]}"

    @property
    def provenance(self) -> dict[str, Any]:
        """The provenance of the posterior, with the methods and number of rows under ``calibration``."""
        methods = [name for name, _ in self.maps] + ([self.conformal.method] if self.conformal else [])
        return {**self.posterior.provenance, "calibration": {"methods": methods, "rows": len(self.rows)}}

    def predict(
        self, x: Tensor | Any, *, groups: Sequence[Any] | None = None,
        weights: tuple[np.ndarray, np.ndarray] | None = None, level: float | None = None, num_draws: int | None = None,
        seed: int | None = 0, **options: Any,
    ) -> Prediction:  # fmt: skip
        """``bp.predict`` with the draws that were used for calibration.

        groups: (B,) labels, if calibration was given labels and no column.   weights: see ``Conformal.at``.
        level: a level that replaces the one of all intervals and sets.
        """
        if num_draws not in (None, self.num_draws) or seed not in (0, self.seed):
            warnings.warn(f"calibrated with {self.num_draws} draws of seed {self.seed}, which are taken", stacklevel=2)
        x = as_inputs(x, self.schema)
        if self.conformal is None and not (groups is weights is level is None):
            raise UserError("groups, weights and level are for conformal intervals, but this posterior is recalibrated")
        prediction = predict(self.posterior, x, num_draws=self.num_draws, seed=self.seed, **options)
        for _, map in self.maps:
            prediction = map.apply(prediction)
        if self.conformal is not None:
            groups = self.groups_of(x, prediction, groups)
            if (groups is None) != (self.conformal.groups is None or self.conformal.per_class):
                raise UserError("give groups=, a label for each row, if and only if calibration was given labels")
            prediction.guarantee = self.conformal.at(len(x), groups, weights, level, x)
        return prediction

    def groups_of(self, x: Tensor, prediction: Prediction, labels: Sequence[Any] | None = None) -> list[str] | None:
        """The group of each row, by ``borders``, ``column`` or else ``labels``; None if there are no groups."""
        if self.borders:
            return [f"third {k + 1}" for k in np.digitize(one_number(prediction.total), self.borders)]
        if self.column is None:
            if labels is not None and len(labels) != len(x):
                raise UserError(f"groups has {len(labels)} labels for {len(x)} rows; give one each")
            return labels if labels is None else [str(g) for g in getattr(labels, "tolist", lambda: labels)()]
        places = {column.name: (column.categories, place) for column, place in self.schema.column_places}
        check_known("column for groups", places, self.column)
        categories, place = places[self.column]
        raw = self.schema.unstandardise(x[:].cpu().double())[:, place]
        if categories is None:
            raw = torch.where(raw.abs() < 1e-6 * self.schema.x_scale[place.start], 0.0, raw)  # rounding errors of 0
            return [f"{value:{'.0f' if abs(value) >= 1e6 else '.6g'}}" for value in raw[:, 0].tolist()]
        valid = raw.amax(1) > 0.5  # all indicators are 0 for a category that was not in the training data
        return [categories[k] if is_known else "(unknown)" for is_known, k in zip(valid, raw.argmax(1), strict=True)]

    def unusual(self, prediction: Prediction) -> np.ndarray:
        """p-value of each new row (B,): the share of calibration rows with at least its epistemic uncertainty."""
        calibration = np.sort(self.epistemic)
        above = len(calibration) - np.searchsorted(calibration, one_number(prediction.epistemic), side="left")
        return (1 + above) / (1 + len(calibration))

    def save(self, folder: str | os.PathLike) -> None:
        """Write the posterior's archive and ``calibration.json``."""
        self.posterior.save(folder)
        self.write(folder)

    def write(self, folder: str | os.PathLike) -> None:
        """Write only ``calibration.json``, beside this posterior's archive."""
        content = {"format": FORMAT, "posterior": _checksum(folder), **self.provenance["calibration"]}
        maps = [[name, {key: np.asarray(v).tolist() for key, v in vars(map).items()}] for name, map in self.maps]
        content |= {"maps": maps, "conformal": self.conformal and asdict(self.conformal)}
        content |= {"digests": base64.b64encode(self.rows.numpy().tobytes()).decode()}
        content |= {name: getattr(self, name) for name in STORED_FIELDS}
        write_whole(Path(folder) / FILE, json.dumps(content, indent=1).encode())


def load(folder: str | os.PathLike, entry: Entry | None = None, *, module: Any = None) -> Posterior | Calibrated:
    """Load what ``save`` wrote: a posterior (see ``loading.load``), with its calibration if it has one."""
    return with_calibration(load_posterior(folder, entry, module=module), folder)


def with_calibration(posterior: Posterior, folder: str | os.PathLike) -> Posterior | Calibrated:
    """The posterior with the calibration in the folder, if any. UserError if it is damaged or of another posterior."""
    if not (path := Path(folder) / FILE).is_file():
        return posterior
    with refusing(f"{path} is damaged; remove it and calibrate again", ValueError, KeyError, TypeError):
        saved = {"borders": ()} | json.loads(path.read_text("utf-8"))  # files of older versions have no borders
        maps = tuple((name, RECALIBRATIONS[name][0](**values)) for name, values in saved["maps"])
        conformal = saved["conformal"] and Conformal(**saved["conformal"])
        rows = torch.from_numpy(np.frombuffer(base64.b64decode(saved["digests"]), np.int64).copy())
        others = {name: saved[name] for name in STORED_FIELDS}
        checksum, is_current = saved["posterior"], saved["format"] == FORMAT
    if not is_current or checksum != _checksum(folder):
        raise UserError(f"{path} belongs to another posterior or version; remove it and calibrate again")
    return Calibrated(posterior, maps, conformal or None, rows=rows, **others)


def _checksum(folder: str | os.PathLike) -> str:
    return json.loads((Path(folder) / "posterior.json").read_text("utf-8"))["sha256"]


def as_inputs(x: Any, schema: Schema) -> Tensor | Rows:
    """Standardised inputs, from any that ``predict`` takes. Raises UserError for a tensor with non-finite rows."""
    x = x if isinstance(x, Tensor | Rows) else inputs(x, schema)
    if isinstance(x, Tensor) and not (finite := x.isfinite().flatten(1).all(1)).all():
        raise UserError(f"x is not finite at row {int(finite.int().argmin())}; leave such rows out")
    return x


def _unused(made: Calibrated, x: Tensor, y: Tensor) -> Tensor:
    """Digests of the calibration rows. Raises UserError if some were used before, in calibration or in training."""
    if torch.isin(digests := row_digests(x, y), made.rows).any():
        raise UserError("some of these rows calibrated this posterior before; use other rows for a second step")
    if made.posterior.rows is None:
        warnings.warn("this posterior was saved without fingerprints of its training rows, so it is up to you that "
                      "none of them calibrates it", stacklevel=3)  # fmt: skip
        return digests
    if used := fitted_rows(made.posterior, digests):
        raise UserError(f"{used:,} of {len(digests):,} calibration rows trained this posterior or stopped its "
                        "training: it fits them better than new ones; hold other rows back: --data FILE, or "
                        "train with --conformal 0.9; in Python every second test row, with the others to judge by, or "
                        "the validation rows after a fit with patience=0")  # fmt: skip
    return digests


def fitted_rows(posterior: Posterior, digests: Tensor) -> int:
    """Number of these rows that were used in training, early stopping included; 0 if duplicates explain them.

    Duplicates do not explain them if every training row occurs at least as often as in training, and Poisson counts
    would do so with a probability below DUPLICATES; or if there are more than the share of duplicates makes likely.
    """
    rows, times = posterior.rows.unique(return_counts=True)
    matched = digests[torch.isin(digests, rows)]
    used, counts = len(matched), torch.bincount(torch.searchsorted(rows, matched), minlength=len(rows))
    chance = poisson.logsf(times - 1, times * (len(digests) / len(posterior.rows))).sum()
    if bool((counts >= times).all()) and chance < math.log(DUPLICATES):
        return used
    repeated = int(times[times > 1].sum())  # their share among the training rows, plus 3 standard errors
    share = (repeated + 3 * (2 * repeated) ** 0.5 + 0.5) / (len(posterior.rows) + 1)
    return used if used and binom.sf(used - 1, len(digests), share) < DUPLICATES else 0


def one_number(values: Tensor) -> np.ndarray:
    """Variances (B,) unchanged, (B, T) as their geometric mean over targets, whose order no unit changes; float64."""
    return (values.double() if values.dim() == 1 else values.double().log().mean(-1).exp()).numpy()
