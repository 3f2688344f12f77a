"""Pruning as a part of a run: pruning.json, written, read, and as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.errors import UserError
from bnn_pyro.metrics.metric import Estimate
from bnn_pyro.posterior import Posterior
from bnn_pyro.progress import progress_bar
from bnn_pyro.pruning import LOG_ALPHA, SHARES, PrunedScore, pruning_curve, share_removed
from bnn_pyro.reports.tables import estimate, plain_table
from bnn_pyro.runs.folder import RunFolder

__all__ = ["Pruning", "prune_run", "pruning_table", "read_pruning"]

FILE = "pruning.json"


class Pruning(NamedTuple):
    """The curve on the test rows, and the share of weights beyond log α = 3."""

    curve: list[PrunedScore]
    removed: float


def prune_run(
    folder: RunFolder, data: Dataset, posterior: Posterior, num_draws: int, *, show: bool = True
) -> dict[str, Any]:
    """Score a run on its test rows after removing more and more weights, and write pruning.json, which is returned.

    The curve has the usual shares, and the one beyond log α = 3 where that is some but not all of the weights.

    Raises UserError where there are no test rows, or a posterior that has no signal-to-noise ratio.
    """
    removed = share_removed(posterior)
    if not len(data.x_test):
        raise UserError(f"{data.name} has no test rows to score a pruned network on")
    shares = sorted({*SHARES, *((removed.share,) if 0 < removed.share < 1 else ())})
    with progress_bar("prune", show, unit="draw") as report:
        curve = pruning_curve(posterior, data.x_test, data.y_test, shares, num_draws=num_draws, progress=report)
    table = {
        "log_alpha": LOG_ALPHA,
        "share_removed": removed.share,
        "share_removed_by_site": removed.layers,
        "measure": curve[0].measure,
        "curve": [
            {"share": point.share, "weights": point.weights}
            | _flat(point.measure, point.loss)
            | _flat("nll", point.nll)
            for point in curve
        ],
        "num_draws": num_draws,
        "test_rows": len(data.x_test),
    }
    folder.write(FILE, table)
    return table


def read_pruning(folder: RunFolder) -> Pruning | None:
    """What pruning.json holds, for figures; None where the run was not pruned."""
    table = folder.read(FILE)
    if not table:
        return None
    measure = table["measure"]
    try:
        curve = [
            PrunedScore(point["share"], point["weights"], measure, _estimate(point, measure), _estimate(point, "nll"))
            for point in table["curve"]
        ]
    except (KeyError, TypeError):
        raise UserError(f"{folder.path / FILE} is damaged; remove it, or write it again: evaluate --prune") from None
    return Pruning(curve, table["share_removed"])


def pruning_table(table: Mapping[str, Any]) -> str:
    """The curve and the share beyond the threshold, for a terminal; ``table``: of pruning.json."""
    measure = table["measure"]
    rows = [
        [f"{100 * point['share']:.4g} %", f"{point['weights']:,}", estimate(point, measure), estimate(point, "nll")]
        for point in table["curve"]
    ]
    layers = table["share_removed_by_site"] | {"all weights": table["share_removed"]}
    return (
        "\n\nWithout the weights of the lowest signal-to-noise ratio (biases stay)\n"
        f"{plain_table(['weights removed', 'left', measure, 'nll'], rows)}\n\n"
        f"log α = log σ²/μ² above {LOG_ALPHA:g}\n"
        f"{plain_table(['layer', 'share'], [[name, f'{100 * share:.1f} %'] for name, share in layers.items()])}"
    )


def _flat(name: str, score: Estimate) -> dict[str, float]:
    return {name: score.value, f"{name}_low": score.low, f"{name}_high": score.high}


def _estimate(point: Mapping[str, float], name: str) -> Estimate:
    return Estimate(point[name], point[f"{name}_low"], point[f"{name}_high"])
