"""Can the posterior be trusted? Convergence, distance from the exact posterior, calibration; and the way to ArviZ.

Only ``arviz_bridge`` imports ArviZ, and only when something of it is called.
"""

from bnn_pyro.diagnostics.arviz_bridge import load_netcdf, save_netcdf
from bnn_pyro.diagnostics.chain_statistics import ChainStatistics, bfmi, chain_statistics, nested_rhat
from bnn_pyro.diagnostics.conversion import to_arviz
from bnn_pyro.diagnostics.diagnosis import diagnose, diagnose_chains
from bnn_pyro.diagnostics.functions import Convergence, function_space, function_space_rhat
from bnn_pyro.diagnostics.importance import leave_one_out
from bnn_pyro.diagnostics.verdicts import Diagnosis, Verdict

__all__ = [
    "ChainStatistics",
    "Convergence",
    "Diagnosis",
    "Verdict",
    "bfmi",
    "chain_statistics",
    "diagnose",
    "diagnose_chains",
    "function_space",
    "function_space_rhat",
    "leave_one_out",
    "load_netcdf",
    "nested_rhat",
    "save_netcdf",
    "to_arviz",
]


def __dir__() -> list[str]:
    return sorted(__all__)
