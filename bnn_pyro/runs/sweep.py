"""A sweep from its SPEC to its report: what is missing is made, everything that is finished is told."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from bnn_pyro.errors import UserError
from bnn_pyro.parallel.executor import executor as running_on
from bnn_pyro.runs.folder import environment
from bnn_pyro.runs.sweep_folder import CHANGED, FINISHED, Standing, SweepFolder
from bnn_pyro.runs.sweep_page import sweep_page
from bnn_pyro.runs.sweep_figures import draw_sweep
from bnn_pyro.runs.sweep_plan import Fit, check_fits, plan_fits
from bnn_pyro.runs.sweep_running import make_fits, missing_fits
from bnn_pyro.runs.sweep_spec import Spec
from bnn_pyro.runs.sweep_summary import OnData, summarise
from bnn_pyro.reports.tables import plain_table

__all__ = ["planned_text", "run_sweep"]


def run_sweep(
    spec: Spec,
    place: SweepFolder,
    *,
    executor: Any = None,
    cores: int = 0,
    overwrite: bool = False,
    show: bool = True,
) -> tuple[dict[str, Any], list[OnData]]:
    """Make the fits that are missing, then the report of all that there are; (what sweep.json holds, its summary).

    executor, cores: see ``parallel.executor.executor`` and ``parallel.map.map_tasks``.
    overwrite: fits of other settings, or other data, in the way of those of the SPEC are replaced.

    Raises UserError for what can be told before a fit is made, and KeyboardInterrupt after Ctrl-C or SIGTERM: what was
    finished is then kept.
    """
    start, fits = time.perf_counter(), plan_fits(spec)
    missing = missing_fits(fits, place, overwrite=overwrite)
    if missing:
        rows = check_fits(spec, [fit for fit, _ in missing], show=show)
        missing = _with_changed_data(fits, missing, rows, place, overwrite)
    facts = environment("cpu") | {"executor": str(executor or "")}
    results = _results(spec, place, fits, {}, facts)
    place.write(results)
    failures: dict[str, str] = {}
    if missing:
        try:
            with running_on(executor):
                failures = make_fits(missing, place, cores=cores, command=facts["command"], show=show)
        except KeyboardInterrupt:
            place.write(_results(spec, place, fits, {}, facts))
            raise
    facts["seconds"] = f"{time.perf_counter() - start:,.0f}, for {len(missing):,} of {len(fits):,} fits"
    results = _results(spec, place, fits, failures, facts)
    found = summarise(results["fits"], place.replicates(fits))
    results["summary"] = [on.to_dict() for on in found]
    place.write(results)
    pictures = draw_sweep(found, spec.recipes)
    place.write_page(sweep_page(results, found, pictures), pictures)
    return results, found


def planned_text(spec: Spec, place: SweepFolder, *, show: bool = True) -> str:
    """What `--dry-run` says: every fit and where it stands, after the checks that come before training.

    Raises UserError as :func:`run_sweep`, but for fits of other settings, which are listed.
    """
    standings = [(fit, place.standing(fit)) for fit in plan_fits(spec)]
    open_fits = [fit for fit, standing in standings if standing.state != FINISHED]
    if open_fits:
        check_fits(spec, open_fits, show=show)
    rows = [[fit.name, f"{standing.state} {standing.why}".strip()] for fit, standing in standings]
    counts = Counter(standing.state for _, standing in standings)
    told = ", ".join(f"{count:,} {state}" for state, count in counts.items())
    return f"{plain_table(['fit', ''], rows)}\n\n{len(standings):,} fits in {place.path}: {told}"


def _with_changed_data(
    fits: Sequence[Fit],
    missing: list[tuple[Fit, Standing]],
    rows: dict[tuple[str, int], str],
    place: SweepFolder,
    overwrite: bool,
) -> list[tuple[Fit, Standing]]:
    """The missing fits, and the finished ones of data sets whose rows have changed since."""
    known = {fit.name: standing for fit, standing in missing}
    finished = [fit for fit in fits if fit.name not in known]
    stale = {
        fit.data
        for fit in finished
        if (fit.data, fit.split) in rows and place.outcome(fit).get("fingerprint") != rows[fit.data, fit.split]
    }
    if not stale:
        return missing
    if not overwrite:
        raise UserError(
            f"the rows of data '{min(stale)}' are not those that finished fits in {place.path} were trained on: the "
            "file has changed; choose another --out, or add --overwrite to make them anew"
        )
    other = Standing(CHANGED, "was fitted to other rows")
    return [(fit, known.get(fit.name, other)) for fit in fits if fit.name in known or fit.data in stale]


def _results(
    spec: Spec, place: SweepFolder, fits: Sequence[Fit], failures: dict[str, str], facts: dict[str, Any]
) -> dict[str, Any]:
    """What sweep.json holds."""
    return {
        "name": spec.path.stem,
        "spec": spec.text,
        "facts": facts,
        "fits": [place.outcome(fit, failures.get(fit.name, "")) for fit in fits],
    }
