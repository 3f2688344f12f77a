"""See ``checks.linear_regression``."""

from bnn_pyro.checks.linear_regression import correlated

__all__ = ["correlated"]
