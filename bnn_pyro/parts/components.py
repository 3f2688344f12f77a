"""Distributions by their parameters: how components are cut, put together and selected, whatever their family."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from pyro.distributions import Categorical, Distribution, NegativeBinomial, Poisson, StudentT
from scipy import special
from torch import Tensor

from bnn_pyro.errors import UserError

#: P(Y ≤ y) of a family without a cdf in PyTorch, by y and its parameters; of counts, a step function of real y.
CDFS: dict[type, Callable[..., np.ndarray]] = {
    Poisson: lambda y, rate: np.where(y < 0, 0.0, special.gammaincc(np.floor(y).clip(0) + 1, rate)),
    NegativeBinomial: lambda y, total_count, logits: np.where(
        y < 0, 0.0, special.betainc(total_count, np.floor(y).clip(0) + 1, special.expit(-logits))
    ),
    StudentT: lambda y, df, loc, scale: special.stdtr(df, (y - loc) / scale),
}


def parameters(d: Distribution) -> dict[str, tuple[Tensor, int]]:
    """{name: (value, its number of event dimensions)} of what makes a distribution; as logits where it has them.

    Raises UserError for a distribution that is not made of tensors, or of an event that is not one number.
    """
    constraints = {} if d.event_shape else d.arg_constraints
    values = {
        name: (getattr(d, name), constraint.event_dim)
        for name, constraint in constraints.items()
        if name != "probs" or "logits" not in constraints
    }
    if not values:
        raise UserError(f"a likelihood of type {type(d).__name__} has no Prediction; use a univariate one, such as "
                        "Categorical, Bernoulli, Normal or Poisson")  # fmt: skip
    return values


def make(kind: type, values: dict[str, Tensor]) -> Distribution:
    """A distribution of parameters that were read off others of its kind.

    Their logits are normalised; the constructor would do it again, in the time of the product that they came from.
    """
    if kind is not Categorical:
        return kind(**values, validate_args=False)
    logits = values["logits"]
    made = Categorical(logits=logits[:1, :1], validate_args=False).expand(logits.shape[:-1])
    made.logits = made._param = logits
    return made


def select(d: Distribution, index: Any) -> Distribution:
    """Some of a batch of distributions, by an index of their batch shape."""
    return make(type(d), {name: value[index] for name, (value, _) in parameters(d).items()})


def dtype_of(d: Distribution) -> torch.dtype:
    """That of its parameters."""
    return next(iter(parameters(d).values()))[0].dtype
