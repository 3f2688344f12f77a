"""Pruning as a part of a run: pruning.json, written, read, and as a table."""

from __future__ import annotations

from typing import Any, NamedTuple

from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.errors import UserError
from bnn_pyro.metrics.metric import Estimate
from bnn_pyro.posterior import Posterior
from bnn_pyro.progress import progress_bar
from bnn_pyro.pruning import LOG_ALPHA, SHARES, PrunedScore, Removed, pruning_curve, share_removed
from bnn_pyro.reports.tables import estimate, plain_table
from bnn_pyro.runs.folder import RunFolder

__all__ = ["FILE", "Pruning", "prune_run", "pruning_table", "read_pruning"]

FILE = "pruning.json"


class Pruning(NamedTuple):
    """The curve on the test rows, and the share of weights beyond log α = 3."""

    curve: list[PrunedScore]
    removed: Removed


def prune_run(folder: RunFolder, data: Dataset, posterior: Posterior, num_draws: int, *, show: bool = True) -> Pruning:
    """Score a run on its test rows after removing more and more weights, and write pruning.json.

    The curve has the usual shares, and the one beyond log α = 3 where that is some but not all of the weights.

    Raises UserError where there are no test rows, or a posterior that has no signal-to-noise ratio.
    """
    removed = share_removed(posterior)
    if not len(data.x_test):
        raise UserError(f"{data.name} has no test rows to score a pruned network on")
    shares = sorted({*SHARES, *((removed.share,) if 0 < removed.share < 1 else ())})
    with progress_bar("prune", show, unit="draw") as report:
        curve = pruning_curve(posterior, data.x_test, data.y_test, shares, num_draws=num_draws, progress=report)
    found = Pruning(curve, removed)
    folder.write(FILE, _plain(found) | {"num_draws": num_draws, "test_rows": len(data.x_test)})
    return found


def read_pruning(folder: RunFolder) -> Pruning | None:
    """What pruning.json holds; None where the run was not pruned."""
    held = folder.read(FILE)
    if not held:
        return None
    try:
        curve = [
            PrunedScore(
                point["share"],
                point["weights"],
                held["measure"],
                _estimate(point, held["measure"]),
                _estimate(point, "nll"),
            )
            for point in held["curve"]
        ]
        return Pruning(curve, Removed(held["share_removed"], held["share_removed_by_site"]))
    except (KeyError, TypeError):
        raise UserError(f"{folder.path / FILE} is damaged; remove it, or write it again: evaluate --prune") from None


def pruning_table(found: Pruning) -> str:
    """The curve and the share beyond the threshold, for a terminal."""
    rows = []
    for point in _plain(found)["curve"]:
        scores = [estimate(point, name) for name in (found.curve[0].measure, "nll")]
        rows.append([f"{100 * point['share']:.4g} %", f"{point['weights']:,}", *scores])
    table = plain_table(["weights removed", "left", found.curve[0].measure, "nll"], rows)
    layers = [[site, f"{100 * share:.1f} %"] for site, share in found.removed.layers.items()]
    layers.append(["all weights", f"{100 * found.removed.share:.1f} %"])
    return (
        f"\n\nWithout the weights of the lowest signal-to-noise ratio (biases stay)\n{table}\n\n"
        f"log α = log σ²/μ² above {LOG_ALPHA:g}\n{plain_table(['layer', 'share'], layers)}"
    )


def _plain(found: Pruning) -> dict[str, Any]:
    measure = found.curve[0].measure
    return {
        "log_alpha": LOG_ALPHA,
        "share_removed": found.removed.share,
        "share_removed_by_site": found.removed.layers,
        "measure": measure,
        "curve": [
            {"share": point.share, "weights": point.weights} | _flat(measure, point.loss) | _flat("nll", point.nll)
            for point in found.curve
        ],
    }


def _flat(name: str, found: Estimate) -> dict[str, float]:
    return {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}


def _estimate(point: dict[str, float], name: str) -> Estimate:
    return Estimate(point[name], point[f"{name}_low"], point[f"{name}_high"])
