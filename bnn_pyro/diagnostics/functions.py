"""Has a Markov chain converged, asked of what the network computes: function-space R-hat and effective sample size.

Weights are the wrong place to look: units of a network can be exchanged and signs flipped, so that chains which agree
on every prediction sit at different weights. The chains' own functions are compared instead, input by input.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bnn_pyro.diagnostics.chain_statistics import LEAST_DRAWS, chain_statistics
from bnn_pyro.errors import UserError
from bnn_pyro.posterior import Posterior
from bnn_pyro.predictive import Prediction, predict

__all__ = ["Convergence", "function_space", "function_space_rhat", "output_names", "output_values", "superchains"]

#: Function values held at once: C·D draws of some inputs, 64 MB in float64.
BLOCK = 2**23


@dataclass(frozen=True)
class Convergence:
    """Diagnostics of what the network computes at B inputs; K outputs (classes, or 1 in regression).

    rhat      (B, K) rank-normalised split R-hat (Vehtari et al. 2021, arXiv:1903.08008); 1 where chains agree, below
              1.01 is the usual demand. NaN where every draw gives the same value
    ess_bulk  (B, K) bulk effective sample size, of C·D draws
    ess_tail  (B, K) that of the 5 % and 95 % quantiles, the smaller one
    mcse      (B, K) Monte-Carlo standard error of the mean, in posterior standard deviations of the output
    nested    whether R-hat is the nested one (Margossian et al. 2022, arXiv:2110.13017), as for chains that shared
              their starting points
    """

    rhat: Tensor
    ess_bulk: Tensor
    ess_tail: Tensor
    mcse: Tensor
    nested: bool = False

    @property
    def worst(self) -> float:
        """The largest R-hat."""
        return float(np.nanmax(self.rhat.numpy())) if not self.rhat.isnan().all() else float("nan")

    @property
    def least(self) -> float:
        """The smallest effective sample size, of the bulk."""
        return float(np.nanmin(self.ess_bulk.numpy())) if not self.ess_bulk.isnan().all() else float("nan")


def function_space(posterior: Posterior, x: Tensor) -> Convergence:
    """R-hat and effective sample size of the network's outputs at inputs x (B, *input_shape), standardised.

    What is compared: class probabilities, on the scale of their log-odds (ranks, which is all that R-hat and the bulk
    look at, are the same), K = 2 for two classes; in regression the mean of every draw's likelihood. Where the
    sampler's ``stats`` name a superchain for every chain, R-hat is nested.

    Raises UserError for a guide, for fewer than two chains, or (but for nested R-hat) fewer than four draws a chain.
    """
    groups = superchains(posterior)
    chains = _chains(posterior, least=1 if groups is not None else LEAST_DRAWS)
    found = []
    for part in x.split(_points(posterior, chains)):
        values = output_values(predict(posterior, part, num_draws=chains[0] * chains[1]))  # (S, B, K)
        series = np.moveaxis(values, 0, -1).reshape(-1, *chains)
        statistics = chain_statistics(series, groups)
        found.append([getattr(statistics, n).reshape(len(part), -1) for n in ("rhat", "ess_bulk", "ess_tail", "mcse")])
    repeat = 2 if len(posterior.schema.classes) == 2 else 1  # both classes' log-odds are one number, but for its sign
    columns = [np.concatenate(column).repeat(repeat, 1) for column in zip(*found, strict=True)]
    return Convergence(*(torch.from_numpy(c) for c in columns), nested=groups is not None)


def function_space_rhat(posterior: Posterior, x: Tensor) -> Tensor:
    """The rank-normalised split R-hat of the network's outputs at x, (B, K); see :func:`function_space`."""
    return function_space(posterior, x).rhat


def superchains(posterior: Posterior) -> np.ndarray | None:
    """(C,) which starting point each chain shared with others; None where the sampler names none, or only one."""
    named = posterior.stats.get("superchain")
    if named is None or named.dim() != 2:
        return None
    groups = named[:, 0].cpu().numpy().astype(int)
    return groups if len(np.unique(groups)) > 1 else None


def output_values(prediction: Prediction) -> np.ndarray:
    """(S, B, K) float64: log-odds of every class, K = 1 for two of them (the second's); in regression the mean."""
    return prediction.mixture.output_values().numpy()


def output_names(posterior: Posterior) -> list[str]:
    """What the K numbers of :func:`output_values` are."""
    schema = posterior.schema
    if not schema.classes:
        return [f"mean of {schema.target}"]
    return [f"log-odds of {c}" for c in (schema.classes[1:] if len(schema.classes) == 2 else schema.classes)]


def _chains(posterior: Posterior, least: int) -> tuple[int, int]:
    if posterior.chains is None:
        raise UserError(
            "R-hat compares Markov chains, and this posterior is a guide: its draws are independent and show nothing "
            "of how well it was fitted"
        )
    chains, draws = next(iter(posterior.chains.values())).shape[:2]
    if chains < 2 or draws < least:
        raise UserError(
            f"R-hat compares at least 2 chains of at least 4 draws, and this posterior holds {chains} of {draws}; "
            "sample again with chains=4"
        )
    return chains, draws


def _points(posterior: Posterior, chains: tuple[int, int]) -> int:
    outputs = max(1, len(posterior.schema.classes))
    return max(1, BLOCK // (chains[0] * chains[1] * outputs))
