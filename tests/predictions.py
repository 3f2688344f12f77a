"""Predictions of given components, for tests."""

import torch
from pyro.distributions import Categorical, Normal

from bnn_pyro.predictive import Prediction


def classes(probs):
    """A Prediction with these probabilities (S, B, K)."""
    return Prediction(Categorical(logits=torch.as_tensor(probs, dtype=torch.float32).log(), validate_args=False))


def gaussians(locs, scales):
    """A Prediction with these components (S, B)."""
    locs, scales = (torch.as_tensor(v, dtype=torch.float32) for v in (locs, scales))
    return Prediction(Normal(locs, scales, validate_args=False))


#: Three draws for three points, and the targets there.
MIXTURE = gaussians(
    [[0.0, 1.0, -3.0], [2.0, 1.5, -2.0], [5.0, 1.0, 4.0]], [[1.0, 0.5, 2.0], [0.3, 0.4, 1.0], [2, 1, 3]]
)
TARGETS = [0.7, 1.2, 6.0]
