"""A posterior with what calibration rows taught of it: ``calibrate``, prediction, and its file beside the archive."""

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
#: Fields of :class:`Calibrated` that the file has under their names.
AS_THEY_ARE = ("column", "epistemic", "borders", "num_draws", "seed")
#: Every method: the task that it is for.
METHODS = {name: task for name, (*_, task) in RECALIBRATIONS.items()} | {n: s.task for n, s in SCORES.items()}
#: The task in ``DEFAULTS`` that another one is a kind of.
KINDS = {"ordinal": "classification", "counts": "regression"}
DEFAULTS = {"regression": "normalised", "classification": "lac", "targets": "joint"}
#: In place of a column's name: thirds of the rows by their predicted uncertainty.
UNCERTAINTY = "uncertainty"
#: A column of numbers makes so many groups at most.
MOST_GROUPS = 20
#: More calibration rows that equal training rows than chance has duplicates, with this probability, are refused.
DUPLICATES = 1e-3


def calibrate(
    posterior: "Posterior | Calibrated", x: Tensor | Any, y: Tensor, method: str | None = None, *, level: float = 0.9,
    groups: str | Sequence[Any] | None = None, per_class: bool = False, num_draws: int = NUM_DRAWS, seed: int = 0,
) -> "Calibrated":  # fmt: skip
    """Correct a posterior's predictions, or give them a guarantee, by rows that had no part in its training.

    x, y: (n, *input_shape) and (n,) or (n, T), such as ``data.x_val`` and ``data.y_val``; names of classes too.
    method: a name in ``METHODS``. Recalibration changes the predictive distribution: temperature, vector, dirichlet
        of classes, beta, isotonic-classes of two; isotonic, distribution, variance of numbers. Conformal prediction
        changes intervals and sets alone: normalised (default), local, cqr, pit, absolute of numbers; joint of several
        targets; lac (default), aps, raps of classes. One after the other takes other rows for each.
    level: the one that ``cqr`` is made for; intervals of any level can be asked for afterwards.
    groups: a column, or a label for each row: the guarantee then holds in each group by itself. "uncertainty": in
        thirds of the rows by the total uncertainty that is predicted, with borders of the calibration rows.
    per_class: the same for each true class, as ``groups`` with the target's name does.
    num_draws, seed: of all predictions; they must be the same for calibration and new rows.
    Raises UserError for rows that trained or calibrated before, bad targets or level, and a method of the other task.
    """
    posterior.schema.need_uncensored("calibrate")
    made = posterior if isinstance(posterior, Calibrated) else Calibrated(posterior, num_draws=num_draws, seed=seed)
    schema, classes = made.schema, len(made.schema.classes)
    task = KINDS.get(schema.task, schema.task)
    method = DEFAULTS[task] if method is None else method
    names = [name for name, of in METHODS.items() if of == task or (of == "two classes" and classes == 2)]
    check_known(f"calibration method for {f'{classes} classes' if classes else task}", names, method)
    if made.conformal is not None:
        raise UserError("this posterior is conformal already: recalibrate first, then make that conformal")
    if classes and isinstance(groups, str) and groups == schema.target != UNCERTAINTY:
        groups, per_class = None, True
    if (groups is not None or per_class) and method not in SCORES:
        raise UserError(f"groups are for conformal prediction, and '{method}' is a recalibration")
    if per_class and (groups is not None or task != "classification"):
        raise UserError("per_class is for class labels, and takes no other groups")
    check_level(level)
    column = groups if isinstance(groups, str) else None
    if column == UNCERTAINTY and column in (known.name for known, _ in schema.column_places):
        raise UserError(f"'{column}' means thirds by predicted uncertainty, and is a column here: rename the column")
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
        if column is not None and len(set(groups)) > MOST_GROUPS:
            raise UserError(f"column '{column}' has {len(set(groups))} values, too many for groups: cut it into "
                            f"{MOST_GROUPS} at most, and give their labels")  # fmt: skip
        how = dict(x=x, groups=groups, per_class=per_class, level=level)
        made = replace(made, conformal=Conformal.fit(method, prediction, y, **how))
    else:
        made = replace(made, maps=(*made.maps, (method, RECALIBRATIONS[method][1](prediction, y))))
        prediction = made.maps[-1][1].apply(prediction)
    return replace(made, rows=torch.cat([made.rows, digests]), epistemic=one_number(prediction.epistemic).tolist())


@dataclass(frozen=True)
class Calibrated:
    """A posterior with maps of its predictive distribution, and conformal scores; ``bp.predict`` takes it as one.

    maps       (name, map), applied one after the other     conformal  scores of calibration rows, or None
    column, borders  that groups are read from              rows       (n,) digests of all calibration rows
    epistemic  of the last calibration rows                 num_draws, seed  of every prediction
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
        """What tables call its predictions."""
        return f"{'conformal' if self.conformal else 'recalibrated'}: {self.provenance['calibration']['methods'][-1]}"

    @property
    def provenance(self) -> dict[str, Any]:
        """That of the posterior, with what was done to it under ``calibration``."""
        methods = [name for name, _ in self.maps] + ([self.conformal.method] if self.conformal else [])
        return {**self.posterior.provenance, "calibration": {"methods": methods, "rows": len(self.rows)}}

    def predict(
        self, x: Tensor | Any, *, groups: Sequence[Any] | None = None,
        weights: tuple[np.ndarray, np.ndarray] | None = None, level: float | None = None, num_draws: int | None = None,
        seed: int | None = 0, **how: Any,
    ) -> Prediction:  # fmt: skip
        """As ``bp.predict``, by the draws that calibrated.

        groups: (B,) labels, where calibration had labels and no column.   weights: see ``Conformal.at``.
        level: one that all intervals and sets then have.
        """
        if num_draws not in (None, self.num_draws) or seed not in (0, self.seed):
            warnings.warn(f"calibrated with {self.num_draws} draws of seed {self.seed}, which are taken", stacklevel=2)
        x = as_inputs(x, self.schema)
        if self.conformal is None and not (groups is weights is level is None):
            raise UserError("groups, weights and level are for conformal intervals, and this posterior is recalibrated")
        prediction = predict(self.posterior, x, num_draws=self.num_draws, seed=self.seed, **how)
        for _, map in self.maps:
            prediction = map.apply(prediction)
        if self.conformal is not None:
            groups = self.groups_of(x, prediction, groups)
            if (groups is None) != (self.conformal.groups is None or self.conformal.per_class):
                raise UserError("groups= takes a label for each row exactly where calibration had labels of groups")
            prediction.guarantee = self.conformal.at(len(x), groups, weights, level, x)
        return prediction

    def groups_of(self, x: Tensor, prediction: Prediction, labels: Sequence[Any] | None = None) -> list[str] | None:
        """The group of each row: by ``column`` a third, a category or a number, else as labels say; None: no groups."""
        if self.borders:
            return [f"third {k + 1}" for k in np.digitize(one_number(prediction.total), self.borders)]
        if self.column is None:
            if labels is not None and len(labels) != len(x):
                raise UserError(f"groups has {len(labels)} labels for {len(x)} rows; give one each")
            return labels if labels is None else [str(g) for g in getattr(labels, "tolist", lambda: labels)()]
        places = {known.name: (known.categories, place) for known, place in self.schema.column_places}
        check_known("column for groups", places, self.column)
        categories, place = places[self.column]
        raw = self.schema.unstandardise(x[:].cpu().double())[:, place]
        if categories is None:
            raw = torch.where(raw.abs() < 1e-6 * self.schema.x_scale[place.start], 0.0, raw)  # what 32 bits leave of 0
            return [f"{value:{'.0f' if abs(value) >= 1e6 else '.6g'}}" for value in raw[:, 0].tolist()]
        known = raw.amax(1) > 0.5  # others have a category that training did not have
        return [categories[k] if is_known else "(unknown)" for is_known, k in zip(known, raw.argmax(1), strict=True)]

    def unusual(self, prediction: Prediction) -> np.ndarray:
        """Share of the calibration rows whose epistemic uncertainty is at least a new row's, (B,): a p-value."""
        known = np.sort(self.epistemic)
        above = len(known) - np.searchsorted(known, one_number(prediction.epistemic), side="left")
        return (1 + above) / (1 + len(known))

    def save(self, folder: str | os.PathLike) -> None:
        """The posterior's archive, and ``calibration.json``."""
        self.posterior.save(folder)
        self.write(folder)

    def write(self, folder: str | os.PathLike) -> None:
        """``calibration.json`` alone, beside this posterior's archive."""
        content = {"format": FORMAT, "posterior": _checksum(folder), **self.provenance["calibration"]}
        maps = [[name, {key: np.asarray(v).tolist() for key, v in vars(map).items()}] for name, map in self.maps]
        content |= {"maps": maps, "conformal": self.conformal and asdict(self.conformal)}
        content |= {"digests": base64.b64encode(self.rows.numpy().tobytes()).decode()}
        content |= {name: getattr(self, name) for name in AS_THEY_ARE}
        write_whole(Path(folder) / FILE, json.dumps(content, indent=1).encode())


def load(folder: str | os.PathLike, entry: Entry | None = None, *, module: Any = None) -> Posterior | Calibrated:
    """What ``save`` wrote: a posterior (see ``loading.load``), and where it was calibrated, with that."""
    return with_calibration(load_posterior(folder, entry, module=module), folder)


def with_calibration(posterior: Posterior, folder: str | os.PathLike) -> Posterior | Calibrated:
    """A posterior of this folder with its calibration, if any. Raises UserError where that is damaged or another's."""
    if not (path := Path(folder) / FILE).is_file():
        return posterior
    with refusing(f"{path} is damaged; remove it and calibrate again", ValueError, KeyError, TypeError):
        saved = {"borders": ()} | json.loads(path.read_text("utf-8"))  # which old ones lack
        maps = tuple((name, RECALIBRATIONS[name][0](**values)) for name, values in saved["maps"])
        conformal = saved["conformal"] and Conformal(**saved["conformal"])
        rows = torch.from_numpy(np.frombuffer(base64.b64decode(saved["digests"]), np.int64).copy())
        others = {name: saved[name] for name in AS_THEY_ARE}
        checksum, known = saved["posterior"], saved["format"] == FORMAT
    if not known or checksum != _checksum(folder):
        raise UserError(f"{path} is of another posterior or version; remove it and calibrate again")
    return Calibrated(posterior, maps, conformal or None, rows=rows, **others)


def _checksum(folder: str | os.PathLike) -> str:
    return json.loads((Path(folder) / "posterior.json").read_text("utf-8"))["sha256"]


def as_inputs(x: Any, schema: Schema) -> Tensor | Rows:
    """Inputs as of ``predict``, standardised. Raises UserError for a tensor with a row that is not finite."""
    x = x if isinstance(x, Tensor | Rows) else inputs(x, schema)
    if isinstance(x, Tensor) and not (finite := x.isfinite().flatten(1).all(1)).all():
        raise UserError(f"x is not finite at row {int(finite.int().argmin())}; leave such rows out")
    return x


def _unused(made: Calibrated, x: Tensor, y: Tensor) -> Tensor:
    """Digests of the calibration rows. Raises UserError where some calibrated before, or trained (duplicates may)."""
    if torch.isin(digests := row_digests(x, y), made.rows).any():
        raise UserError("some of these rows calibrated this posterior before; a second step takes other rows")
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
    """How many of these rows trained a posterior or stopped its training; 0 where duplicates explain them.

    They do not where each is there as often as it trained, which Poisson numbers have with a chance below DUPLICATES.
    """
    rows, times = posterior.rows.unique(return_counts=True)
    known = digests[torch.isin(digests, rows)]
    used, found = len(known), torch.bincount(torch.searchsorted(rows, known), minlength=len(rows))
    chance = poisson.logsf(times - 1, times * (len(digests) / len(posterior.rows))).sum()
    if bool((found >= times).all()) and chance < math.log(DUPLICATES):
        return used
    twice = int(times[times > 1].sum())
    twice = (twice + 3 * (2 * twice) ** 0.5 + 0.5) / (len(posterior.rows) + 1)  # with 3 standard errors, as of pairs
    return used if used and binom.sf(used - 1, len(digests), twice) < DUPLICATES else 0


def one_number(values: Tensor) -> np.ndarray:
    """Variances (B,) as they are, or of T targets (B, T) their geometric mean, whose order no unit changes; float64."""
    return (values.double() if values.dim() == 1 else values.double().log().mean(-1).exp()).numpy()
