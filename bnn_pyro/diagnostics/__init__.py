"""Diagnostics of a posterior: convergence, distance from the exact posterior, calibration; conversion to ArviZ."""

from bnn_pyro.lazy import lazy_names

_NAMES = {
    "convergence": "ChainStatistics bfmi chain_statistics nested_rhat",
    "conversion": "save_netcdf to_arviz",
    "failures": "Failure failure",
    "diagnosis": "Convergence diagnose diagnose_briefly function_space",
    "importance": "leave_one_out",
    "verdicts": "Diagnosis Verdict",
}
__all__, __getattr__, __dir__ = lazy_names(__name__, _NAMES)
