"""Everything at once: can this posterior be trusted, and if not, what to try."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.diagnostics.arviz_bridge import psis
from bnn_pyro.diagnostics.chain_statistics import ChainStatistics, autocorrelation, chain_statistics
from bnn_pyro.diagnostics.draws import (
    WORK,
    chosen_weights,
    even,
    kind,
    rows_at_hand,
    sized,
    thinned,
    walk,
    weight_count,
)
from bnn_pyro.diagnostics.functions import output_names, output_values, superchains
from bnn_pyro.diagnostics.importance import (
    GOOD_K,
    NoWeights,
    importance_weights,
    leave_one_out,
    temperature_of,
    uniformity,
)
from bnn_pyro.diagnostics.sampler import sampler_series, sampler_statistics, settled, stuck_chains
from bnn_pyro.diagnostics.sentences import verdicts
from bnn_pyro.diagnostics.verdicts import RHAT, Diagnosis, Findings
from bnn_pyro.errors import UserError
from bnn_pyro.isolation import isolated
from bnn_pyro.posterior import Posterior

__all__ = ["diagnose", "diagnose_chains", "replicate"]


class Bounds(NamedTuple):
    """How much is looked at, at most.

    points, weights  test points, and single weights
    values           numbers that the network computes there, in all draws; where they are more, fewer points are taken
    """

    points: int
    weights: int
    values: float


#: Of a whole diagnosis, and of one that takes a second or two.
WHOLE, QUICK = Bounds(200, 200, 5e7), Bounds(50, 50, 5e6)
#: What a quick one tells.
CHAINS_ALONE = ("overall", "stuck chains", "spread", "kinetic temperature", "divergences", "trajectories", "acceptance")
#: Points and weights that figures show, and lags.
SHOWN, LAGS = 6, 100
#: Fresh draws of a guide.
GUIDE_DRAWS = 1000
#: Rows and draws of the predictive check, the fewest data sets that it makes, and those kept for the figure.
ROWS, DRAWS, FEWEST, KEPT = 2000, 400, 100, 50
#: Numbers that are drawn of a guide for the table of its weights.
WEIGHT_DRAWS = 1e8


def diagnose(posterior: Posterior, data: Dataset, *, progress: Callable[[int, int], None] | None = None) -> Diagnosis:
    """Diagnose any posterior with the data that it was fitted to.

    The overall verdict rests on what the network computes at up to 200 test points (training points where there are no
    test rows); weights are listed, a few hundred at most. Numbers and arrays are those that the class
    :class:`Diagnosis` lists. Costs seconds: of large networks and data sets, fewer draws, rows and points are taken.

    progress: called as progress(steps done, of how many).

    Raises UserError for data of other inputs than the posterior's.
    """
    if tuple(data.schema.input_shape) != tuple(posterior.schema.input_shape):
        raise UserError(
            f"the data have inputs of shape {tuple(data.schema.input_shape)}, and the posterior was fitted to "
            f"{tuple(posterior.schema.input_shape)}; give the data of its own run"
        )
    work = _Work(posterior, data, WHOLE)
    steps = (work.functions, work.weights, work.sampler, work.approximation, work.held_out, work.replication)
    for done, step in enumerate(steps):
        if progress is not None:
            progress(done, len(steps))
        step()
    if progress is not None:
        progress(len(steps), len(steps))
    return Diagnosis(work.found.statistics, verdicts(work.found), work.series, work.table)


def diagnose_chains(posterior: Posterior, data: Dataset) -> Diagnosis | None:
    """The part of a diagnosis that tells whether chains have converged, at fewer points; None without chains.

    By the same rules as :func:`diagnose`, in a second or two.
    """
    work = _Work(posterior, data, QUICK)
    if not work.is_chain:
        return None
    for step in (work.functions, work.weights, work.sampler):
        step()
    return Diagnosis(work.found.statistics, tuple(v for v in verdicts(work.found) if v.about in CHAINS_ALONE))


class _Work:
    """One diagnosis in the making; every step adds its statistics and its series."""

    def __init__(self, posterior: Posterior, data: Dataset, bounds: Bounds) -> None:
        self.posterior, self.data, self.bounds = posterior, data, bounds
        self.settings = posterior.provenance.get("method_settings", {})
        points = min(bounds.points, len(data.x_test) or len(data.x_train))
        affordable = int(WORK / (weight_count(posterior) * points))
        self.shape = sized(posterior, max(50, min(GUIDE_DRAWS, affordable)))
        self.found = Findings(
            kind=kind(posterior),
            statistics={"chains": float(self.shape[0]), "draws": float(self.shape[1])},
            tested=len(data.x_test) > 0,
            temperature=temperature_of(posterior),
            stochastic="kinetic_temperature" in posterior.trace,
            rows=len(data.x_train),
            unit="a nat of log-odds" if posterior.schema.has_classes else "the targets' own spread",
        )
        self.series: dict[str, Any] = {}
        self.table: list[dict[str, Any]] = []
        self.is_chain = self.found.kind == "chains"
        self.groups = superchains(posterior) if self.is_chain else None

    def functions(self) -> None:
        """What the network computes at test points: R-hat and its kin, and the series that figures show."""
        x = self.data.x_test if len(self.data.x_test) else self.data.x_train
        names, num = output_names(self.posterior), self.shape[0] * self.shape[1]
        points = even(len(x), int(min(self.bounds.points, max(1, self.bounds.values / (num * len(names))))))
        self.found.statistics["points"] = float(len(points))
        outputs = np.empty((len(points), len(names), *self.shape), dtype=np.float32)
        spread = 0.0
        for part, prediction in walk(self.posterior, x[torch.from_numpy(points).to(x.device)], num):
            values = output_values(prediction)
            wide = (
                values.std(0) if prediction.has_classes else prediction.total.sqrt().numpy() / self.data.schema.y_scale
            )
            spread = max(spread, float(wide.max()))
            outputs[part] = np.moveaxis(values, 0, -1).reshape(*values.shape[1:], *self.shape)
        flat = outputs.reshape(-1, *self.shape)
        shown = even(len(flat), SHOWN)
        self.found.constant = num > 1 and not (flat.max((1, 2)) > flat.min((1, 2))).any()
        self.found.broken = int((~np.isfinite(flat).all(0)).sum())
        if self.is_chain:
            self.found.statistics["spread_max"] = spread
            found = chain_statistics(flat, self.groups)
            self._summarise(found)
            self.series |= {"rhat": found.rhat, "ess_bulk": found.ess_bulk, "ess_tail": found.ess_tail}
            worst = np.argsort(np.where(np.isnan(found.rhat), np.inf, -found.rhat))[:1]
            shown = np.unique([*worst, *even(len(flat), SHOWN - 1)])
            self.series["autocorrelation"] = autocorrelation(flat[shown], min(LAGS, self.shape[1]))
        part = "test" if self.found.tested else "training"
        self.series["outputs"] = np.moveaxis(flat[shown], 0, -1)
        self.series["output_labels"] = [
            f"{names[i % len(names)]}, {part} point {points[i // len(names)] + 1}" for i in shown
        ]

    def _summarise(self, found: ChainStatistics) -> None:
        s = self.found.statistics
        s |= _largest(found)
        if np.isfinite(found.rhat).any():
            s["rhat_share"] = float((found.rhat[np.isfinite(found.rhat)] < RHAT).mean())
        if np.isfinite(found.ess_bulk).any():
            s["ess_bulk_min"], s["ess_tail_min"] = float(np.nanmin(found.ess_bulk)), float(np.nanmin(found.ess_tail))
            s["mcse_max"] = float(np.nanmax(found.mcse))
        if self.groups is not None:
            s["nested"] = 1.0

    def weights(self) -> None:
        """A bounded table of single weights, and a few of their series."""
        num = min(self.shape[1], max(50, int(WEIGHT_DRAWS / weight_count(self.posterior))))
        names, values = chosen_weights(self.posterior, self.bounds.weights, num)
        self.found.statistics["weights_shown"] = float(len(names))
        columns: dict[str, np.ndarray] = {"mean": values.mean((1, 2)), "sd": values.std((1, 2))}
        if self.is_chain:
            found = chain_statistics(values, self.groups)
            columns |= {n: getattr(found, n) for n in ("rhat", "ess_bulk", "ess_tail", "mcse")}
            self.found.statistics |= {f"weight_{name}": value for name, value in _largest(found).items()}
            if np.isfinite(found.ess_bulk).any():
                self.found.statistics["weight_ess_min"] = float(np.nanmin(found.ess_bulk))
        self.table = [
            {"name": name, **{k: float(column[i]) for k, column in columns.items()}} for i, name in enumerate(names)
        ]
        shown = even(len(names), SHOWN)
        self.series["weights"] = np.moveaxis(values[shown], 0, -1)
        self.series["weight_labels"] = [names[i] for i in shown]
        self.chosen = values

    def sampler(self) -> None:
        """Energies, divergences, depth of trees, stuck chains."""
        series = sampler_series(self.posterior)
        self.series |= {n: series[n] for n in ("energy", "diverging", "lp") if n in series}
        if not self.is_chain:
            return
        self.found.statistics |= sampler_statistics(series, self.settings, self.posterior.trace)
        stuck = stuck_chains(series.get("lp"), self.chosen)
        self.found.statistics["stuck_chains"] = float(stuck.sum())
        self.series["stuck"] = stuck

    def approximation(self) -> None:
        """Of a guide: k̂ of its importance weights, and whether its training had settled."""
        if not self.is_chain and np.isfinite(rise := settled(self.posterior.trace)):
            self.found.statistics["elbo_rise"] = rise
        objective = self.posterior.trace.get("elbo")
        if objective:
            self.series["elbo"] = np.asarray(objective, dtype=np.float64)
        self.own, self.log_weights = self.posterior, None
        if self.found.kind != "approximation":
            return
        try:
            self.own, self.log_weights = importance_weights(self.posterior, self.data)
        except NoWeights as reason:
            self.found.no_khat = str(reason)
            return
        self.series["log_weights"] = self.log_weights
        self.found.statistics["khat"] = float(psis(self.log_weights[None])[1][0])

    def held_out(self) -> None:
        """Leave-one-out cross-validation and its calibration, where importance sampling can tell them."""
        statistics = self.found.statistics
        num = self.shape[0] * self.shape[1]
        if self.found.broken or num < 25 or not (self.is_chain or statistics.get("khat", np.inf) <= GOOD_K):
            return
        loo = leave_one_out(self.own, self.data, self.log_weights)
        statistics |= {
            "elpd_loo": float(loo.elpd.sum()),
            "elpd_loo_se": loo.standard_error,
            "p_loo": float(loo.p_loo.sum()),
            "loo_rows": float(len(loo.rows)),
            "pareto_k_max": float(np.nanmax(loo.pareto_k)) if np.isfinite(loo.pareto_k).any() else float("nan"),
            "pareto_k_bad": float((~(loo.pareto_k <= GOOD_K)).sum()),
            "pit_p": uniformity(loo.pit),
        }
        self.found.spread = float(np.abs(loo.pit - 0.5).mean() - 0.25)
        self.series |= {
            "pareto_k": loo.pareto_k,
            "loo_pit": loo.pit,
            "elpd_rows": loo.elpd,
            "loo_row_numbers": loo.rows,
        }

    def replication(self) -> None:
        """Data sets that the fitted model makes, beside the observed one."""
        if self.found.broken:
            return
        replicated, observed, self.found.statistics["ppc_p"] = replicate(self.posterior, self.data)
        self.series |= {"replicated": replicated, "observed": observed}


def _largest(found: ChainStatistics) -> dict[str, float]:
    """rhat_max, and where it is too large rhat_p: how often the largest of as many would be by chance (Bonferroni)."""
    held = np.isfinite(found.rhat)
    if not held.any():
        return {}
    large = held & (found.rhat > RHAT)
    chance = {"rhat_p": min(1.0, float(held.sum() * np.nan_to_num(found.rhat_p[large]).min()))} if large.any() else {}
    return {"rhat_max": float(found.rhat[held].max()), **chance}


def replicate(posterior: Posterior, data: Dataset, seed: int = 0) -> tuple[np.ndarray, np.ndarray, float]:
    """Posterior-predictive check by a realised discrepancy T(y, w) (Gelman, Meng & Stern 1996, Stat. Sinica 6:733).

    (data sets made by the fitted model (R, M) at M training rows, the observed one (M,), share of the former that fit
    worse: near 0, the data are stranger than the model would make them; near 1, they fit better than its own).

    T is −log p(y | x, w) for labels; in regression, where a learned noise always makes that fit, the largest
    |y − mean| / noise: are there outliers that the noise does not know of?
    """
    posterior = thinned(posterior, DRAWS)
    shape = sized(posterior, DRAWS)
    num = shape[0] * shape[1]
    rows = even(len(data.x_train), min(ROWS, len(rows_at_hand(posterior, len(data.x_train), num, 1e7))))
    index = torch.from_numpy(rows).to(data.x_train.device)
    y, repeats = data.y_train[index].cpu(), max(1, -(-FEWEST // num))
    seen, made, shown = torch.zeros(num), torch.zeros(repeats, num), []
    with isolated(seed):
        for part, prediction in walk(posterior, data.x_train[index], num, seed):
            seen = prediction.mixture.discrepancy(y[part], seen)
            parts = []
            for r in range(repeats):
                new = prediction.components.sample()
                made[r] = prediction.mixture.discrepancy(new, made[r])
                parts.append(new)
            shown.append(torch.cat(parts)[even(num * repeats, KEPT)])
    p_value = (made > seen).double().mean() + 0.5 * (made == seen).double().mean()
    return torch.cat(shown, 1).numpy(), y.numpy(), float(p_value)
