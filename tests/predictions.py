"""Predictions of given components, for tests."""

import torch
from pyro.distributions import Categorical, Normal

import bnn_pyro as bp


def classes(probs):
    """A Prediction with these probabilities (S, B, K)."""
    return bp.Prediction(Categorical(logits=torch.as_tensor(probs, dtype=torch.float32).log(), validate_args=False))


def gaussians(locs, scales):
    """A Prediction with these components (S, B)."""
    locs, scales = (torch.as_tensor(v, dtype=torch.float32) for v in (locs, scales))
    return bp.Prediction(Normal(locs, scales, validate_args=False))
