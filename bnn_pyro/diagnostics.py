"""Has a Markov chain converged, asked of what the network computes: function-space R-hat and effective sample size.

Weights are the wrong place to look: units of a network can be exchanged and signs flipped, so that chains which agree
on every prediction sit at different weights. The chains' own functions are compared instead, input by input. This is
the only file that imports ArviZ.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bnn_pyro.errors import UserError
from bnn_pyro.posterior import Posterior
from bnn_pyro.predictive import Prediction, predict

__all__ = ["Convergence", "function_space", "function_space_rhat"]

#: Function values held at once: C·D draws of some inputs, 64 MB in float64.
BLOCK = 2**23


@dataclass(frozen=True)
class Convergence:
    """Diagnostics of what the network computes at B inputs; K outputs (classes, or 1 in regression).

    rhat      (B, K) rank-normalised split R-hat (Vehtari et al. 2021, arXiv:1903.08008); 1 where chains agree, below
              1.01 is the usual demand. NaN where every draw gives the same value
    ess_bulk  (B, K) bulk effective sample size, of C·D draws
    """

    rhat: Tensor
    ess_bulk: Tensor

    @property
    def worst(self) -> float:
        """The largest R-hat."""
        return float(np.nanmax(self.rhat.numpy())) if not self.rhat.isnan().all() else float("nan")

    @property
    def least(self) -> float:
        """The smallest effective sample size."""
        return float(np.nanmin(self.ess_bulk.numpy())) if not self.ess_bulk.isnan().all() else float("nan")


def function_space(posterior: Posterior, x: Tensor) -> Convergence:
    """R-hat and effective sample size of the network's outputs at inputs x (B, *input_shape), standardised.

    What is compared: class probabilities, on the scale of their log-odds (ranks, which is all that both diagnostics
    look at, are the same), K = 2 for two classes; in regression the mean of every draw's likelihood.

    Raises UserError for a guide, for fewer than two chains, or for fewer than four draws a chain.
    """
    rhat, ess = _arviz()
    chains = _chains(posterior)
    values = []
    for part in x.split(_points(posterior, chains)):
        prediction = predict(posterior, part, num_draws=chains[0] * chains[1])
        values.append(_values(prediction).reshape(*chains, len(part), -1))
    split = [(_each(rhat, v), _each(ess, v)) for v in values]
    return Convergence(*(torch.from_numpy(np.concatenate(column)) for column in zip(*split, strict=True)))


def function_space_rhat(posterior: Posterior, x: Tensor) -> Tensor:
    """The rank-normalised split R-hat of the network's outputs at x, (B, K); see :func:`function_space`."""
    return function_space(posterior, x).rhat


def _chains(posterior: Posterior) -> tuple[int, int]:
    if posterior.chains is None:
        raise UserError(
            "R-hat compares Markov chains, and this posterior is a guide: its draws are independent and show nothing "
            "of how well it was fitted"
        )
    chains, draws = next(iter(posterior.chains.values())).shape[:2]
    if chains < 2 or draws < 4:
        raise UserError(
            f"R-hat compares at least 2 chains of at least 4 draws, and this posterior holds {chains} of {draws}; "
            "sample again with chains=4"
        )
    return chains, draws


def _points(posterior: Posterior, chains: tuple[int, int]) -> int:
    outputs = max(2, len(posterior.schema.classes))
    return max(1, BLOCK // (chains[0] * chains[1] * outputs))


def _values(prediction: Prediction) -> np.ndarray:
    """(S, B, K) float64."""
    if prediction.task == "regression":
        return prediction.locs.double().numpy()[..., None]
    logits = prediction.components.logits.double()
    if logits.dim() == 2:  # Bernoulli
        return torch.stack([-logits, logits], -1).numpy()
    # log p/(1 − p): probabilities that round to 1 would tie in rank.
    others = [torch.cat([logits[..., :k], logits[..., k + 1 :]], -1).logsumexp(-1) for k in range(logits.shape[-1])]
    return (logits - torch.stack(others, -1)).numpy()


def _each(statistic: Callable[[np.ndarray], float], values: np.ndarray) -> np.ndarray:
    """The statistic of every (C, D) series: (C, D, B, K) -> (B, K)."""
    series = np.moveaxis(values, (2, 3), (0, 1))
    flat = [statistic(s) if np.ptp(s) > 0 else np.nan for s in series.reshape(-1, *series.shape[2:])]
    return np.array(flat).reshape(series.shape[:2])


def _arviz() -> tuple[Callable[[np.ndarray], float], Callable[[np.ndarray], float]]:
    """(rank-normalised split R-hat, bulk effective sample size) of a (C, D) array."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 0.23 announces 1.0, once a day
        import arviz

    def rhat(series: np.ndarray) -> float:
        return float(arviz.rhat(series, method="rank"))

    def ess(series: np.ndarray) -> float:
        return float(arviz.ess(series, method="bulk"))

    return rhat, ess
