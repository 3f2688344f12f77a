"""Estimators with the interface of scikit-learn, for pipelines and searches.

>>> from bnn_pyro.sklearn import BayesianRegressor
>>> model = BayesianRegressor("mlp", epochs=50).fit([[0.0], [1.0], [2.0], [3.0]], [0.0, 1.1, 1.9, 3.2])
>>> model.predict_interval([[1.5]], level=0.9).shape
(1, 2)
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import pandas as pd
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import Tags, assert_all_finite
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from bnn_pyro.datasets.frames import as_table, check_order
from bnn_pyro.datasets.in_memory import dataset
from bnn_pyro.errors import UserError, check_known, refusing, unknown
from bnn_pyro.fitting import fit
from bnn_pyro.inference import Method
from bnn_pyro.loading import load
from bnn_pyro.parts.decisions import check_level
from bnn_pyro.predictive import Prediction, predict
from bnn_pyro.zoo import Entry
from bnn_pyro.zoo.auto import AUTO, set_up

#: Parameters that are settings of the variant or of the method; None keeps the default.
SETTINGS = ("hidden", "activation", "prior", "noise", "likelihood", "epochs", "batch_size", "lr")


@dataclass(eq=False, repr=False)
class _Bayesian(BaseEstimator):
    """The base of both estimators. All rows are training rows unless ``validation`` is set."""

    variant: str | Entry | torch.nn.Module = "hidden-layer"
    inference: str | Method | None = None
    _: KW_ONLY
    hidden: Sequence[int] | None = None
    activation: str | None = None
    prior: str | None = None
    epochs: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    settings: Mapping[str, Any] | None = None
    validation: int | float = 0
    missing: str = "refuse"
    unseen: str = "refuse"
    dates: str = "refuse"
    num_draws: int = 100
    device: str = "auto"
    random_state: int | np.random.RandomState | None = None

    def _fit(self, x: Any, y: np.ndarray, classes: np.ndarray | None = None) -> None:
        state = self.random_state or 0
        seed = int(state.randint(2**31) if isinstance(state, np.random.RandomState) else state)
        if len(y) < 2:
            raise UserError(f"X has n_samples = {len(y)}; a fit needs two rows or more")
        options = dict(missing=self.missing, unseen=self.unseen, dates=self.dates)
        options |= dict(validation=self.validation, target_scale=getattr(self, "target_scale", "identity"))
        data = dataset(x, y, task=self._task, split=0.0, **options)
        if classes is not None:
            self.classes_ = classes[[*map(int, data.schema.classes)]]  # dropping rows may remove a class
            data = replace(data, schema=replace(data.schema, classes=tuple(map(str, self.classes_))))
        settings = {name: getattr(self, name) for name in SETTINGS if getattr(self, name, None) is not None}
        settings |= dict(self.settings or {})
        minutes = settings.pop("minutes", None) if self.variant == AUTO else None
        setup = set_up(self.variant, self.inference, lambda: data, settings=settings, minutes=minutes)
        self.posterior_ = fit(setup, data, seed=seed, device=self.device, progress=False)

    def _checked(self, x: Any, reset: bool = False, y: Any = None) -> Any:
        """x after scikit-learn's checks; a frame is returned as a frame, to keep text columns and names."""
        check_order("y", y, x)
        table = as_table("X", x) if hasattr(x, "__dataframe__") or hasattr(x, "iloc") else None
        if table is not None and not all(dtype.kind in "biuf" for dtype in table.dtypes):
            validate_data(self, x, reset=reset, skip_check_array=True)
            return x
        finite = True if self.missing == "refuse" else "allow-nan"
        array = validate_data(self, x, reset=reset, dtype="numeric", ensure_all_finite=finite)
        return array if table is None else x

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self.missing != "refuse"
        return tags

    def _prediction(self, x: Any) -> Prediction:
        check_is_fitted(self)
        return predict(self.posterior_, self._checked(x), num_draws=self.num_draws)

    def log_prob(self, X: Any, y: Any) -> np.ndarray:
        """log p(y | x, D) of each row, (N,), nats."""
        return self._prediction(X).log_prob(torch.as_tensor(self._codes(y))).numpy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if isinstance(files := state.get("posterior_"), dict):  # earlier versions pickled the files of the archive
            with tempfile.TemporaryDirectory() as folder:
                for name, content in files.items():
                    Path(folder, name).write_bytes(content)
                state = {**state, "posterior_": load(folder, state["_entry"])}
        super().__setstate__(state)


@dataclass(eq=False, repr=False)
class BayesianRegressor(RegressorMixin, _Bayesian):
    """A Bayesian neural network for regression.

    variant, inference  names in ``ZOO`` and ``METHODS`` (by default the variant's first method), or settings
                  objects; or a module of your own, as in ``bp.fit``
    hidden, activation, prior, noise, likelihood, epochs, batch_size, lr  settings of the variant or the method, with
                  the names of the command line; None keeps the default
    settings      {name: value} of all other settings; with "auto" also ``minutes``
    task, target_scale  "regression" or "counts"; "log" for positive numbers, as in ``dataset``
    validation    number or share of the training rows that are held out for early stopping
    missing, unseen, dates  treatment of columns of a frame, as in ``dataset``
    num_draws     number of draws of the weights for a prediction
    random_state  the seed; None means 0, so that a fit can be repeated

    Fitted attributes: ``posterior_``, a ``Posterior``; ``n_features_in_``, ``feature_names_in_``. X: (N, F) numbers, or
    a frame with columns of numbers, text, categories and booleans. Raises UserError, a ValueError.
    """

    _: KW_ONLY
    noise: str | float | None = None
    likelihood: str | None = None
    task: str = "regression"
    target_scale: str = "identity"

    @property
    def _task(self) -> str:
        if self.task in ("survival", "targets", "labels", "ordinal"):
            raise UserError(f"task={self.task} is for bp.fit(variant, bp.dataset(X, y, task='{self.task}')), of times "
                            "with event=; estimators take y (N,) of numbers, counts or classes")  # fmt: skip
        check_known("task of a regressor", ("regression", "counts"), self.task)
        return self.task

    def fit(self, X: Any, y: Any) -> Self:
        """Train on all rows. y (N,) numbers."""
        self._fit(self._checked(X, True, y), self._codes(y))
        return self

    def predict(self, X: Any, return_std: bool = False) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """The predictive mean (N,), and with ``return_std`` also the predictive standard deviation (N,)."""
        prediction = self._prediction(X)
        mean = prediction.mean.numpy()
        return (mean, prediction.total.sqrt().numpy()) if return_std else mean

    def predict_quantiles(self, X: Any, quantiles: Sequence[float] = (0.05, 0.5, 0.95)) -> np.ndarray:
        """Quantiles of the posterior predictive, (N, len(quantiles))."""
        return self._prediction(X).quantile(quantiles).mT.numpy()

    def predict_interval(self, X: Any, level: float = 0.9) -> np.ndarray:
        """Central intervals that contain y with probability ``level``: (N, 2), lower and upper ends."""
        check_level(level)
        return self.predict_quantiles(X, ((1 - level) / 2, (1 + level) / 2))

    def _codes(self, y: Any) -> np.ndarray:
        y = column_or_1d(y, warn=True)
        with refusing(f"y holds text ({y.dtype}); a regressor needs numbers", TypeError, ValueError):
            return y.astype(np.float64)


class BayesianClassifier(ClassifierMixin, _Bayesian):
    """A Bayesian neural network for classification; see :class:`BayesianRegressor`. Once fitted it has ``classes_``."""

    _task: ClassVar[str] = "classification"

    def fit(self, X: Any, y: Any) -> Self:
        """Train on all rows. y (N,) labels of any type."""
        x, y = self._checked(X, True, y), column_or_1d(y, warn=True)
        is_labelled, codes = ~pd.isna(y) | (self.missing == "refuse"), np.full(len(y), np.nan)
        assert_all_finite(y[is_labelled], input_name="y")
        check_classification_targets(y[is_labelled])
        self.classes_, codes[is_labelled] = np.unique(y[is_labelled], return_inverse=True)
        if len(self.classes_) < 2:
            raise UserError(f"y has one class only, '{self.classes_[0]}'; classification needs two")
        self._fit(x, codes, self.classes_)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each row, (N,)."""
        best = self.predict_proba(X).argmax(1)  # raises where it is not fitted
        return self.classes_[best]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Class probabilities, averaged over the draws, (N, K)."""
        mean = self._prediction(X).mean.double()
        return (mean / mean.sum(1, keepdim=True)).numpy()

    def _codes(self, y: Any) -> np.ndarray:
        y = column_or_1d(y)
        if strange := set(y.tolist()) - set(self.classes_.tolist()):
            raise unknown("class", next(iter(strange)), map(str, self.classes_))
        return np.searchsorted(self.classes_, y)
