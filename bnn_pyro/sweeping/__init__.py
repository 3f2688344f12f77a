"""Grids of recipes × data × seeds × splits: each fit a run folder, made where it is missing, and one report of all."""

from bnn_pyro.sweeping.folder import SweepFolder
from bnn_pyro.sweeping.page import failures_of, sweep_text
from bnn_pyro.sweeping.spec import read_spec
from bnn_pyro.sweeping.sweep import planned_text, run_sweep

__all__ = ["SweepFolder", "failures_of", "planned_text", "read_spec", "run_sweep", "sweep_text"]
