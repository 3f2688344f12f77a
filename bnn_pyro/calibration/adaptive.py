"""Conformal intervals and sets of rows in time, whose level follows what was covered."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bnn_pyro.calibration.calibrated import Calibrated
from bnn_pyro.errors import UserError
from bnn_pyro.metrics.metric import targets
from bnn_pyro.parts.decisions import check_level
from bnn_pyro.predictive import Prediction


class Adaptive:
    """Adaptive conformal inference: β ← β + rate · (missed − (1 − level)) after every row (Gibbs & Candès 2021).

    Over T rows the share that is covered is within about 1 / (rate · T) of the level, whatever happens to the data
    (arXiv:2106.00170, Proposition 4.1). Intervals of a level β ≥ 1 exclude nothing; those of β ≤ 0 cover nothing.
    """

    def __init__(self, calibrated: Calibrated, level: float = 0.9, rate: float = 0.01) -> None:
        check_level(level)
        if getattr(calibrated, "conformal", None) is None:
            raise UserError("adaptive intervals start from conformal ones: calibrate with such a method first")
        if not 0 < rate < 1:
            raise UserError(f"rate must lie strictly between 0 and 1, got {rate}; 0.01 is usual")
        self.calibrated, self.level, self.rate, self.now = calibrated, level, rate, level
        self._last: Prediction | None = None

    def predict(self, x: Tensor | Any, **how: Any) -> Prediction:
        """As ``Calibrated.predict``, with intervals or sets of the level as it is now."""
        self._last = self.calibrated.predict(x, level=self.now, **how)
        return self._last

    def update(self, y: Tensor | Sequence[float]) -> Tensor:
        """Whether each target of the rows predicted last, (B,), was covered; the level is adapted by it."""
        if self._last is None:
            raise UserError("update takes the targets of the rows that were predicted last, once")
        y = torch.as_tensor(targets(self._last, y))
        covered = self._last.guarantee.covers(self._last, y, self.now)
        self.now += self.rate * float((self.level - covered.double()).sum())
        self._last = None
        return covered
