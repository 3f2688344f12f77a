"""The only importer of ArviZ and xarray: both are slow to import, and ArviZ 0.23 and 1.x differ in nearly every name.

ArviZ 1.x needs Python 3.12; 0.23 is what Python 3.11 gets. A posterior is handed over as what the installed version
takes: an ``arviz.InferenceData`` in 0.23, an ``xarray.DataTree`` in 1.x. On disk both are the same netCDF file.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from bnn_pyro.errors import UserError

__all__ = ["Variables", "as_arviz", "load_netcdf", "psis", "save_netcdf"]

#: {variable: (names of its dimensions, values)}.
Variables = Mapping[str, tuple[tuple[str, ...], np.ndarray]]

#: Draws below which there is no tail to fit a Pareto distribution to.
LEAST_TAIL = 25


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """0.23 announces 1.0 once a day, at import; the libraries that it uses deprecate what it calls."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _first_series() -> bool:
    """Whether the installed ArviZ is 0.x."""
    return version("arviz").startswith("0.")


# -- Pareto-smoothed importance sampling ---------------------------------------------------------------------------
def psis(log_weights: np.ndarray, relative_efficiency: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """(smoothed log weights (N, S), each row normalised; Pareto k̂ (N,)) of importance weights (N, S), in nats.

    Vehtari, Simpson, Gelman, Yao & Gabry 2024 (arXiv:1507.02646): k̂ above 0.7 says that sums of these weights cannot
    be trusted. 0 where the largest weights are all the same; NaN for fewer than 25 draws, and where one is not finite.

    relative_efficiency: effective draws per draw, of Markov chains; 1 for independent draws.
    """
    log_weights = np.asarray(log_weights, dtype=np.float64)
    found = log_weights - _log_sum(log_weights)
    num, draws = log_weights.shape
    k = np.full(num, np.nan)
    if draws < LEAST_TAIL:
        return found, k
    finite = np.isfinite(log_weights).all(1)
    tail = -(-draws // 5) + 1
    top = np.partition(np.where(finite[:, None], log_weights, 0.0), -tail, axis=1)[:, -tail:]
    varied = np.ptp(top, axis=1) > 1e-10
    k[finite & ~varied] = 0.0
    efficiency = relative_efficiency if np.isfinite(relative_efficiency) and relative_efficiency > 0 else 1.0
    with _quiet(), np.errstate(all="ignore"):
        smooth = _smoother(efficiency)
        for row in np.flatnonzero(finite & varied):
            found[row], k[row] = smooth(log_weights[row].copy())
    return found, k


def _smoother(efficiency: float):
    """(S,) log weights -> (smoothed and normalised ones, k̂)."""
    if _first_series():
        import arviz

        return lambda row: arviz.psislw(row, reff=efficiency)
    from arviz_stats.base import array_stats

    def smooth(row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """ArviZ 1.x takes the log-likelihood that is left out: minus the log weight."""
        return array_stats.psislw(-row, r_eff=efficiency)

    return smooth


def _log_sum(log_weights: np.ndarray) -> np.ndarray:
    most = log_weights.max(1, keepdims=True)
    with np.errstate(all="ignore"):
        return most + np.log(np.exp(log_weights - most).sum(1, keepdims=True))


# -- groups of variables -------------------------------------------------------------------------------------------
def as_arviz(groups: Mapping[str, Variables], coords: Mapping[str, Any], attrs: Mapping[str, Any]) -> Any:
    """What the installed ArviZ takes, of {group: variables}; empty groups are left out.

    coords: {dimension: its labels}; a dimension of another length is numbered.
    attrs: of the whole and of every group; numbers and strings.
    """
    with _quiet():
        import xarray

        datasets = {}
        for group, variables in groups.items():
            if variables:
                sizes = {d: n for dims, v in variables.values() for d, n in zip(dims, v.shape, strict=True)}
                here = {d: coords[d] if len(coords.get(d, ())) == n else np.arange(n) for d, n in sizes.items()}
                datasets[group] = xarray.Dataset(dict(variables), coords=here, attrs=dict(attrs))
        tree = xarray.DataTree.from_dict({f"/{group}": dataset for group, dataset in datasets.items()})
        tree.attrs = dict(attrs)
        return _handed_over(tree)


def _handed_over(tree: Any) -> Any:
    if not _first_series():
        return tree
    import arviz

    return arviz.InferenceData(
        attrs=dict(tree.attrs), **{name: group.to_dataset() for name, group in tree.children.items()}
    )


def _tree(tree: Any) -> Any:
    """As an xarray.DataTree."""
    import xarray

    if isinstance(tree, xarray.DataTree):
        return tree
    found = xarray.DataTree.from_dict({f"/{name}": dataset for name, dataset in tree.items()})
    found.attrs = dict(tree.attrs)
    return found


# -- netCDF --------------------------------------------------------------------------------------------------------
def save_netcdf(tree: Any, path: str | os.PathLike) -> None:
    """Write what :func:`to_arviz` returned as a netCDF file, uncompressed: the whole of it, or nothing.

    The file is written beside and then renamed: one that was there before stays whole, whatever happens.

    Raises UserError where it cannot be written: no such folder, no permission, a full disk.
    """
    path = Path(path)
    beside = path.with_name(path.name + ".part")
    if path.is_dir():
        raise UserError(f"{path} is a folder; give the name of a file in it, such as {path / 'posterior.nc'}")
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent} to write {path.name} to; make it, or give another path")
    try:
        with _quiet():
            _tree(tree).to_netcdf(beside, engine="h5netcdf")
        with open(beside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    except (OSError, RuntimeError) as error:  # h5py raises both for a disk that is full
        with contextlib.suppress(OSError):
            beside.unlink()
        reason = getattr(error, "strerror", None) or str(error).strip().splitlines()[0]
        raise UserError(
            f"{path} could not be written ({reason}): free some space or give another path; nothing else was changed"
        ) from None
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def load_netcdf(path: str | os.PathLike) -> Any:
    """Read such a file back, whole, into memory: what the installed ArviZ takes.

    Raises UserError where there is none, or where it is no netCDF file.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no file {path}; write one with save_netcdf(to_arviz(posterior, data), path)")
    try:
        with _quiet():
            import xarray

            with xarray.open_datatree(path, engine="h5netcdf") as tree:
                return _handed_over(tree.load())
    except (OSError, ValueError, KeyError, RuntimeError):
        raise UserError(f"{path} is not a whole netCDF file; write it again") from None
