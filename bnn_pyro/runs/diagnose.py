"""What is left of a diagnosis in a run: diagnosis.json, diagnosis.html, figures/diagnose-*.png, posterior.nc.

Every run with chains is asked the first question, whether they have converged, when it is evaluated: convergence.json.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from bnn_pyro import diagnostics
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.diagnostics import Diagnosis
from bnn_pyro.errors import UserError
from bnn_pyro.posterior import Posterior
from bnn_pyro.progress import progress_bar
from bnn_pyro.reports.page import Picture, diagnosis_html
from bnn_pyro.reports.tables import RunFacts, plain_table, verdict_lines
from bnn_pyro.runs.diagnose_figures import PREFIX, draw_diagnosis
from bnn_pyro.runs.diagnose_statistics import tables_of
from bnn_pyro.runs.folder import RunFolder
from bnn_pyro.runs.recipe import Recipe

__all__ = ["FILE", "Diagnosed", "diagnose_run", "diagnosis_table", "judge_chains", "read_diagnosis"]

FILE = "diagnosis.json"
CONVERGENCE = "convergence.json"
NETCDF = "posterior.nc"


class Diagnosed(NamedTuple):
    """What was found, of which run, and why posterior.nc is missing ("" where it is not)."""

    found: Diagnosis
    run: RunFacts
    missing: str


def diagnose_run(
    folder: RunFolder,
    recipe: Recipe,
    data: Dataset,
    posterior: Posterior,
    *,
    out: Path | None = None,
    netcdf: bool = True,
    show: bool = True,
) -> Diagnosed:
    """Diagnose a run and write what was found, into the run or another folder; its draws too, as netCDF for ArviZ.

    A netCDF file that cannot be written is told in ``diagnosis.json`` ("netcdf"), on the page and in the terminal, and
    everything else is kept.

    Raises UserError where the data are not those that the run was trained on.
    """
    folder.check_data(posterior, data)
    place, start = RunFolder(folder.path if out is None else out), time.perf_counter()
    with progress_bar("diagnose", show) as report:
        found = diagnostics.diagnose(posterior, data, progress=report)
    held = found.to_dict() | {"seconds": round(time.perf_counter() - start, 1), "num_draws": recipe.num_draws}
    place.write(FILE, held)  # before what can still fail
    pictures = draw_diagnosis(found, posterior.schema)
    _write_figures(place, pictures)
    missing = _write_netcdf(place, posterior, data) if netcdf else ""
    place.write(FILE, held | {"netcdf": NETCDF if netcdf and not missing else missing})
    run = folder.facts()
    place.write("diagnosis.html", diagnosis_html(run, found.verdicts, tables_of(found), pictures, _note(missing)))
    return Diagnosed(found, run, missing)


def judge_chains(folder: RunFolder, posterior: Posterior, data: Dataset) -> None:
    """Write convergence.json, or remove it where the draws are not those of Markov chains."""
    found = diagnostics.diagnose_chains(posterior, data)
    if found is None:
        (folder.path / CONVERGENCE).unlink(missing_ok=True)
    else:
        folder.write(CONVERGENCE, found.to_dict())


def read_diagnosis(folder: RunFolder) -> Diagnosis | None:
    """What diagnosis.json holds, without the series of its figures; None where the run was not diagnosed."""
    held = folder.read(FILE)
    if not held:
        return None
    try:
        return Diagnosis.from_dict(held)
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{folder.path / FILE} is damaged; write it again: diagnose {folder.path}") from None


def diagnosis_table(diagnosed: Diagnosed) -> str:
    """Verdicts and tables, for a terminal."""
    found, run, missing = diagnosed
    parts = [f"\n{run.title}: {run.subtitle}\n", verdict_lines([vars(verdict) for verdict in found.verdicts])]
    for table in tables_of(found):
        if table.columns[0] == "value":  # weights one by one are for the page
            parts.append(f"\n{table.title}")
            parts.append(plain_table(["", *table.columns], [[row[0], *row[2:]] for row in table.rows]))
    parts += [f"\n{_note(missing)}"] if missing else []
    return "\n".join(parts)


# -- pieces ------------------------------------------------------------------------------------------------------------
def _write_figures(place: RunFolder, pictures: list[Picture]) -> None:
    """Every picture as a file, and those of an earlier diagnosis that no longer apply removed."""
    names = {picture.name for picture in pictures}
    for old in (place.path / "figures").glob(f"{PREFIX}*.png"):
        if old.stem not in names:
            old.unlink()
    for picture in pictures:
        place.write(f"figures/{picture.name}.png", picture.png)


def _note(missing: str) -> str:
    return f"{NETCDF}, the draws for ArviZ, is missing: {missing}. Everything else was written." if missing else ""


def _write_netcdf(place: RunFolder, posterior: Posterior, data: Dataset) -> str:
    """Why the file could not be written; "" where it was."""
    try:
        diagnostics.save_netcdf(diagnostics.to_arviz(posterior, data), place.path / NETCDF)
    except UserError as reason:
        return str(reason)
    except MemoryError:
        return "there is not enough memory for all draws"
    return ""
