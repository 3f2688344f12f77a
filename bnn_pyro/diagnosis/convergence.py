"""Have the chains of a run converged? Asked cheaply of every run with chains, and kept as convergence.json."""

from __future__ import annotations

import numpy as np
import torch

from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.diagnostics import Diagnosis, chain_statistics
from bnn_pyro.diagnostics.draws import chosen_weights, even, kind, sized, walk
from bnn_pyro.diagnostics.functions import output_names, output_values, superchains
from bnn_pyro.diagnostics.overall import Findings
from bnn_pyro.diagnostics.sampler import sampler_series, sampler_statistics, stuck_chains
from bnn_pyro.diagnostics.sentences import verdicts
from bnn_pyro.posterior import Posterior
from bnn_pyro.rundir import RunFolder

__all__ = ["FILE", "convergence_of", "judge_chains"]

FILE = "convergence.json"
#: Test points, single weights, and function values that are looked at: a second or two.
POINTS, WEIGHTS, VALUES = 50, 50, 5e6
#: What is said at the top of a report; the rest is for `diagnose`.
SAID = ("overall", "stuck chains", "divergences", "trajectories", "acceptance")


def judge_chains(folder: RunFolder, posterior: Posterior, data: Dataset) -> None:
    """Write convergence.json, or remove it where the draws are not those of Markov chains."""
    found = convergence_of(posterior, data)
    if found is None:
        (folder.path / FILE).unlink(missing_ok=True)
    else:
        folder.write(FILE, found.to_dict())


def convergence_of(posterior: Posterior, data: Dataset) -> Diagnosis | None:
    """The part of a diagnosis that tells whether chains have converged, at up to 50 test points; None without chains.

    It rests on function space, divergences and stuck chains, by the same thresholds as ``diagnostics.diagnose``.
    """
    if kind(posterior) != "chains":
        return None
    shape, names, groups = sized(posterior, 0), output_names(posterior), superchains(posterior)
    num, x = shape[0] * shape[1], data.x_test if len(data.x_test) else data.x_train
    points = even(len(x), int(min(POINTS, max(1, VALUES / (num * len(names))))))
    values = [
        np.moveaxis(output_values(prediction), 0, -1).reshape(-1, *shape)
        for _, prediction in walk(posterior, x[torch.from_numpy(points).to(x.device)], num)
    ]
    outputs = np.concatenate(values)
    of_outputs = chain_statistics(outputs, groups)
    series = sampler_series(posterior)
    stuck = stuck_chains(series.get("lp"), chosen_weights(posterior, WEIGHTS, shape[1])[1])
    found = Findings(
        kind="chains",
        statistics={"chains": float(shape[0]), "draws": float(shape[1]), "points": float(len(points))}
        | sampler_statistics(series, posterior.provenance.get("method_settings", {}))
        | {"stuck_chains": float(stuck.sum())}
        | ({"nested": 1.0} if groups is not None else {}),
        tested=len(data.x_test) > 0,
        temperature=1.0,  # told elsewhere in every report
        stochastic="kinetic_temperature" in posterior.trace,
        rows=len(data.x_train),
        constant=not (outputs.max((1, 2)) > outputs.min((1, 2))).any(),
        broken=int((~np.isfinite(outputs).all(0)).sum()),
    )
    for name, column, pick in (
        ("rhat_max", of_outputs.rhat, np.nanmax),
        ("ess_bulk_min", of_outputs.ess_bulk, np.nanmin),
        ("ess_tail_min", of_outputs.ess_tail, np.nanmin),
    ):
        if np.isfinite(column).any():
            found.statistics[name] = float(pick(column))
    return Diagnosis(found.statistics, tuple(v for v in verdicts(found) if v.about in SAID))
