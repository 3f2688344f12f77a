"""All diagnostics of a posterior together: whether it can be used, and if not, what to change.

Convergence is judged by the network's outputs at each input, not by its weights: hidden units can be exchanged and
signs flipped, so that chains which agree on every prediction may have different weights.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.diagnostics import draws, importance
from bnn_pyro.diagnostics.convergence import MIN_CHAIN_DRAWS, ChainStatistics, chain_statistics
from bnn_pyro.diagnostics.failures import failure
from bnn_pyro.diagnostics.verdicts import RHAT, Diagnosis, Findings, verdicts
from bnn_pyro.errors import UserError
from bnn_pyro.posterior import Posterior
from bnn_pyro.predictive import Prediction

#: (largest number of test points and of single weights, largest number of outputs at these points in all draws) of a
#: full diagnosis, and of one that takes a second or two.
WHOLE, QUICK = (200, 5e7), (50, 5e6)
#: The verdicts that a quick diagnosis of chains can contain.
CHAINS_ALONE = ("overall", "stuck chains", "spread", "kinetic temperature", "divergences", "trajectories", "acceptance")
#: {statistic of outputs: the name of the same statistic of weights}.
WEIGHT_NAMES = {"rhat_max": "weight_rhat_max", "rhat_p": "weight_rhat_p", "ess_bulk_min": "weight_ess_min"}
#: Number of points and of weights that figures show.
SHOWN = 6
#: Largest numbers of draws of a guide, and of values that are drawn for the table of its weights.
GUIDE_DRAWS, WEIGHT_DRAWS = 1000, 1e8


@dataclass(frozen=True)
class Convergence(ChainStatistics):
    """Statistics of the network's outputs at B inputs, each a Tensor (B, K) of K outputs: classes, or the mean.

    NaN where every draw gives the same value.   nested: whether R-hat is nested, as chains shared starting points.
    """

    nested: bool = False

    #: The largest R-hat.
    worst = property(lambda self: float(np.fmax.reduce(self.rhat.numpy(), axis=None)))
    #: The smallest effective sample size, of the bulk.
    least = property(lambda self: float(np.fmin.reduce(self.ess_bulk.numpy(), axis=None)))


def function_space(posterior: Posterior, x: Tensor) -> Convergence:
    """R-hat and effective sample size of the network's outputs at inputs x (B, *input_shape), standardised.

    The outputs are the log-odds of class probabilities (R-hat and bulk ESS, which use ranks, are those of the
    probabilities), K = 2 for two classes, and in regression the mean of every draw's likelihood. R-hat is nested if the
    sampler's ``stats`` have a superchain for every chain.
    Raises UserError for a guide, for fewer than two chains, or fewer than four draws a chain (unless R-hat is nested).
    """
    if posterior.chains is None:
        raise UserError("R-hat compares Markov chains, and this posterior is a guide: its draws are independent "
                        "and do not show how well it was fitted")  # fmt: skip
    groups, shape = _superchains(posterior), draws.sized(posterior)
    if shape[0] < 2 or (groups is None and shape[1] < MIN_CHAIN_DRAWS):
        raise UserError("R-hat compares at least 2 chains of at least 4 draws, and this posterior holds "
                        f"{shape[0]} of {shape[1]}; sample again with chains=4")  # fmt: skip
    parts = [chain_statistics(values.reshape(-1, *shape), groups) for _, _, values in _outputs(posterior, x, shape)]
    columns = (np.concatenate(column).reshape(len(x), -1) for column in zip(*map(astuple, parts), strict=True))
    repeat = 2 if len(posterior.schema.classes) == 2 else 1  # the two log-odds differ only in sign
    return Convergence(*(torch.from_numpy(c.repeat(repeat, 1)) for c in columns), nested=groups is not None)


def _superchains(posterior: Posterior) -> np.ndarray | None:
    """(C,) the number of each chain's starting point; None unless the sampler stored several."""
    if (named := posterior.stats.get("superchain")) is None or named.dim() != 2:
        return None
    groups = named[:, 0].cpu().numpy().astype(int)
    return groups if len(np.unique(groups)) > 1 else None


def _outputs(posterior: Posterior, x: Tensor, shape: tuple[int, int]) -> Iterator[tuple[slice, Prediction, np.ndarray]]:
    """(rows, the prediction for them, its K outputs in every draw (B, K, C, D) float64), a few rows at a time."""
    for rows, prediction in draws.walk(posterior, x, shape[0] * shape[1]):
        values = np.moveaxis(prediction.output_values().numpy(), 0, -1)
        yield rows, prediction, values.reshape(*values.shape[:-1], *shape)


def diagnose(posterior: Posterior, data: Dataset, *, progress: Callable[[int, int], None] | None = None) -> Diagnosis:
    """Diagnose any posterior with the data that it was fitted to; see :class:`Diagnosis` for the results.

    The overall verdict depends on the outputs at up to 200 test points (training points if there are no test rows); up
    to 200 weights are listed. For large networks and data sets fewer draws, rows and points are used, so that a
    diagnosis takes seconds.

    progress: called as progress(steps done, number of steps).
    Raises UserError for data whose inputs have another shape than the posterior's.
    """
    if tuple(data.schema.input_shape) != tuple(posterior.schema.input_shape):
        raise UserError(f"the data have inputs of shape {tuple(data.schema.input_shape)}, and the posterior was fitted "
                        f"to {tuple(posterior.schema.input_shape)}; give the data of its own run")  # fmt: skip
    data.schema.need_one_target("diagnose", ", or take bp.diagnostics.function_space(posterior, x) of all")
    work = _Work(posterior, data, *WHOLE)
    work.findings.failed = str(failure(posterior, data) or "")
    steps = work.functions, work.weights, work.sampler, work.training, work.approximation, work.held_out
    steps = *steps, work.replication
    for done, step in enumerate((*steps, lambda: None)):
        if progress is not None:
            progress(done, len(steps))
        step()
    return Diagnosis(work.statistics, verdicts(work.findings), work.series, work.table)


def diagnose_briefly(posterior: Posterior, data: Dataset) -> Diagnosis | None:
    """Whether chains have converged, by the rules of :func:`diagnose`, at fewer points.

    For other posteriors, a caution if the objective still rose by more than √N nats (one standard error of the log
    density of N rows) in the last tenth of the training, or in the tenth before half of it, when the learning rate was
    still high; else None. A training that ended by early stopping, or after fewer than 20 epochs, has no caution.
    """
    work = _Work(posterior, data, *QUICK)
    if not work.is_chain:
        work.training()
        facts, keys = work.findings, {"elbo_rise": "training, rising", "elbo_rise_halfway": "training, unfinished"}
        if facts.has("stopping_rows") or not any(rose := [facts.get(name) > math.sqrt(facts.rows) for name in keys]):
            return None
        about = next(text for text, risen in zip(keys.values(), rose, strict=True) if risen)
        return Diagnosis(work.statistics, (facts.verdict("caution", about),))
    for step in (work.functions, work.weights, work.sampler):
        step()
    return Diagnosis(work.statistics, tuple(v for v in verdicts(work.findings) if v.about in CHAINS_ALONE))


class _Work:
    """A diagnosis in progress, whose steps add statistics and series.   most, values: limits, see ``WHOLE``."""

    def __init__(self, posterior: Posterior, data: Dataset, most: int, values: float) -> None:
        self.posterior, self.data, self.most, self.values = posterior, data, most, values
        self.x = data.x_test if len(data.x_test) else data.x_train
        affordable = int(draws.WORK / (posterior.num_weights * min(most, len(self.x))))
        self.shape = draws.sized(posterior, max(50, min(GUIDE_DRAWS, affordable)))
        self.findings = Findings(
            kind=draws.kind(posterior), statistics={"chains": float(self.shape[0]), "draws": float(self.shape[1])},
            tested=len(data.x_test) > 0, rows=len(data.x_train), temperature=importance.temperature_of(posterior),
            stochastic="kinetic_temperature" in posterior.trace,
            unit="a nat of log-odds" if posterior.schema.has_classes else "the targets' own spread",
        )  # fmt: skip
        self.statistics, self.series = self.findings.statistics, {}
        self.table: list[dict[str, Any]] = []
        self.is_chain = self.findings.kind == "chains"
        self.groups = _superchains(posterior) if self.is_chain else None

    def functions(self) -> None:
        """Statistics of the network's outputs at test points, and the series that figures show."""
        schema, num = self.posterior.schema, self.shape[0] * self.shape[1]
        names = [f"log-odds of {c}" for c in (schema.classes[1:] if len(schema.classes) == 2 else schema.classes)]
        quantity = {"labels": "log-odds of", "survival": "mean of log"}.get(schema.task, "mean of")
        names = names or [f"{quantity} {name}" for name in schema.targets or (schema.target,)]
        points = draws.even(len(self.x), int(min(self.most, max(1, self.values / (num * len(names))))))
        self.statistics["points"] = float(len(points))
        outputs, spread = np.empty((len(points), len(names), *self.shape), dtype=np.float32), 0.0
        for part, prediction, values in _outputs(self.posterior, self.x[points], self.shape):
            outputs[part], wide = values, values.std((2, 3))
            if schema.task not in ("classification", "labels"):
                wide = prediction.untransformed.total.sqrt().numpy() / np.asarray(self.data.schema.y_scale)
            spread = max(spread, float(wide.max()))
        flat = outputs.reshape(-1, *self.shape)
        picks = draws.even(len(flat), SHOWN)
        self.findings.constant = num > 1 and not (flat.max((1, 2)) > flat.min((1, 2))).any()
        self.findings.broken = int((~np.isfinite(flat).all(0)).sum())
        if self.is_chain:
            chains, nested = chain_statistics(flat, self.groups), {} if self.groups is None else {"nested": 1.0}
            self.statistics |= {"spread_max": spread, **_worst(chains), **nested}
            self.series |= {"rhat": chains.rhat, "ess_bulk": chains.ess_bulk, "ess_tail": chains.ess_tail}
            worst = np.argsort(np.where(np.isnan(chains.rhat), np.inf, -chains.rhat))[:1]
            picks = np.unique([*worst, *draws.even(len(flat), SHOWN - 1)])
        self.series["outputs"] = np.moveaxis(flat[picks], 0, -1)
        rows_used, of = "test" if self.findings.tested else "training", len(names)
        self.series["output_labels"] = [f"{names[i % of]}, {rows_used} point {points[i // of] + 1}" for i in picks]

    def weights(self) -> None:
        """A table of at most ``most`` weights, and a few of their series."""
        num = min(self.shape[1], max(50, int(WEIGHT_DRAWS / self.posterior.num_weights)))
        names, values = draws.even_weights(self.posterior, self.most, num)
        self.statistics["weights_shown"] = float(len(names))
        columns: dict[str, np.ndarray] = {"mean": values.mean((1, 2)), "sd": values.std((1, 2))}
        if self.is_chain:
            chains = chain_statistics(values, self.groups)
            columns |= {name: getattr(chains, name) for name in ("rhat", "ess_bulk", "ess_tail", "mcse")}
            self.statistics |= {WEIGHT_NAMES[n]: v for n, v in _worst(chains).items() if n in WEIGHT_NAMES}
        self.table = pd.DataFrame({"name": names, **columns}).to_dict("records")
        picks = draws.even(len(names), SHOWN)
        self.series["weights"] = np.moveaxis(values[picks], 0, -1)
        self.series["weight_labels"] = [names[i] for i in picks]
        self.chosen = values

    def sampler(self) -> None:
        """Statistics of the sampler, and stuck chains."""
        series = {name: values.astype(np.float64) for name, values in draws.sampler_series(self.posterior).items()}
        self.series |= {name: series[name] for name in ("diverging", "lp") if name in series}
        if self.is_chain:
            settings = self.posterior.provenance.get("method_settings", {})
            self.statistics |= draws.sampler_statistics(series, settings, self.posterior.trace)
            self.series["stuck"] = draws.stuck_chains(series.get("lp"), self.chosen)
            self.statistics["stuck_chains"] = float(self.series["stuck"].sum())

    def training(self) -> None:
        """By how much the objective of an optimisation still rose at its end."""
        trace = self.posterior.trace
        if not self.is_chain and np.isfinite(rise := draws.settled(trace)):
            self.statistics["elbo_rise"] = rise
            about = self.posterior.provenance
            plan = {"final_lr": 0.01, "epochs": None} | about.get("method_settings", {})
            if plan["epochs"] and plan["final_lr"] < 0.5 and "stopped" not in about:  # a schedule that falls to 0
                self.statistics["elbo_rise_halfway"] = draws.settled(trace, until=0.5)
            if (stopping := self.posterior.provenance.get("early_stopping")) is not None:
                if stopping.get("epoch") in (epochs := trace.get("epoch", [])[:-1]):  # q is that of an earlier epoch
                    self.statistics["elbo_rise"] = max(trace["elbo"]) - trace["elbo"][epochs.index(stopping["epoch"])]
                self.statistics["stopping_rows"] = float(stopping["rows"])
                self.statistics["sd_factor"] = stopping.get("sd_factor", 1.0)
        if trace.get("elbo"):
            self.series["elbo"] = np.asarray(trace["elbo"], dtype=np.float64)

    def approximation(self) -> None:
        """k̂ of the importance weights of a guide."""
        self.own, self.log_weights = self.posterior, None
        if self.findings.kind != "approximation":
            return
        try:
            self.own, self.log_weights = importance.importance_weights(self.posterior, self.data)
        except importance.NoWeights as reason:
            self.findings.no_khat = str(reason)
            return
        self.statistics["khat"] = float(importance.psis(self.log_weights[None])[1][0])

    def held_out(self) -> None:
        """Leave-one-out cross-validation and its calibration, if importance sampling is accurate enough."""
        few = self.shape[0] * self.shape[1] < importance.MIN_TAIL
        close = self.is_chain or self.statistics.get("khat", np.inf) <= importance.GOOD_K
        if self.findings.broken or few or not close:
            return
        loo = importance.leave_one_out(self.own, self.data, self.log_weights)
        self.statistics |= dict(
            elpd_loo=float(loo.elpd.sum()), elpd_loo_se=loo.standard_error, p_loo=float(loo.p_loo.sum()),
            loo_rows=float(len(loo.rows)), pareto_k_max=float(np.fmax.reduce(loo.pareto_k)),
            pareto_k_bad=float((~(loo.pareto_k <= importance.GOOD_K)).sum()), pit_p=importance.uniformity(loo.pit),
        )  # fmt: skip
        self.findings.spread = float(np.abs(loo.pit - 0.5).mean() - 0.25)
        index = self.data.index_train
        numbers = loo.rows if index is None or len(index) != len(self.data.x_train) else index.numpy()[loo.rows]
        self.series |= {"pareto_k": loo.pareto_k, "loo_pit": loo.pit, "loo_row_numbers": numbers}

    def replication(self) -> None:
        """Data sets drawn from the fitted model, and the observed one; not for times, as censoring is not modelled."""
        if not self.findings.broken and self.data.schema.task != "survival":
            made, observed, self.statistics["ppc_p"] = importance.replicate(self.posterior, self.data)
            self.series |= {"replicated": made, "observed": observed}


def _worst(statistics: ChainStatistics) -> dict[str, float]:
    """The worst statistics of all series, without NaN; the p-value of the largest R-hat is corrected (Bonferroni)."""
    numbers, finite = {}, np.isfinite(statistics.rhat)
    if finite.any():
        large = finite & (statistics.rhat > RHAT)
        numbers["rhat_max"] = float(statistics.rhat[finite].max())
        numbers["rhat_share"] = float((statistics.rhat[finite] < RHAT).mean())
        if large.any():
            numbers["rhat_p"] = min(1.0, float(finite.sum() * np.nan_to_num(statistics.rhat_p[large]).min()))
    if np.isfinite(statistics.ess_bulk).any():
        numbers |= {f"{name}_min": float(np.nanmin(getattr(statistics, name))) for name in ("ess_bulk", "ess_tail")}
        numbers["mcse_max"] = float(np.nanmax(statistics.mcse))
    return numbers
