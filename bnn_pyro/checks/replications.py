"""Data sets from the prior, each with its posterior: fitted one by one as a user would, or together.

Variational inference of R data sets is one run of the loop that fits one, ELBO(φ₁ … φ_R) = Σ_r ELBO(φ_r; y_r): no term
is common to two data sets, and Adam goes by each parameter's own gradients, so that every q_r takes the very steps that
it would take alone, but for its noise, and a hundred of them cost as many calls as one.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn

from bnn_pyro.checks.sbc_ranks import ranks
from bnn_pyro.checks.simulation import Design, Question, Simulated, answers, simulate
from bnn_pyro.diagnostics.convergence import ess_mean
from bnn_pyro.errors import UserError
from bnn_pyro.features import on_features
from bnn_pyro.fitting import fit
from bnn_pyro.inference import SVI, Method
from bnn_pyro.isolation import isolated
from bnn_pyro.parallel.map import map_tasks
from bnn_pyro.parallel.task import Report
from bnn_pyro.parts.guides import MeanFieldNormal, register
from bnn_pyro.parts.priors import BayesianNet
from bnn_pyro.posterior import Posterior
from bnn_pyro.zoo import Entry

__all__ = ["Plan", "Replication", "fit_together", "replications", "why_not_together"]

#: Weights of all the data sets that are fitted together: what a step holds is a few times as many numbers.
AT_ONCE = 2**23
#: Draws of the prior beside those of a posterior.
OF_PRIOR = 9


@dataclass(frozen=True)
class Plan:
    """What every replication has in common; draws: of the posterior, at most."""

    entry: Entry
    inputs: Design
    method: Method
    seed: int
    draws: int

    def seeds(self, number: int) -> tuple[int, int, int]:
        """Of the simulation, the fit, and the lots that break ties."""
        return tuple(int(s) for s in np.random.SeedSequence([self.seed, number]).generate_state(3))


@dataclass(frozen=True)
class Replication:
    """Of one data set: Q answers by the weights that made it, (Q,), and by S draws of its posterior, (Q, S).

    ess      effective draws of each quantity, (Q,)
    learned  median log-likelihood of the data over the draws, less that over a few of the prior; nats
    warned   what the fit was warned of
    """

    questions: list[Question]
    truth: np.ndarray
    draws: np.ndarray
    ess: np.ndarray
    learned: float = np.nan
    warned: tuple[str, ...] = ()

    def ranks(self, num: int, generator: np.random.Generator) -> np.ndarray:
        """Of the truth among ``num`` of the draws, evenly chosen; (Q,)."""
        chosen = np.linspace(0, self.draws.shape[1] - 1, num).round().astype(int)
        return ranks(self.truth, self.draws[:, chosen], generator)


def replications(
    plan: Plan, number: int, cores: int = 0, report: Report | None = None
) -> list[Replication | UserError]:
    """So many of them, or why a fit failed: in one run where that is the same, else side by side."""
    alone = partial(_alone, plan)
    if why_not_together(plan.entry, plan.method, plan.inputs):
        return map_tasks(alone, range(number), cores=cores, report=report)
    with isolated(0):
        weights = sum(value.numel() for value in plan.entry.model(plan.inputs.schema).initial.values())
    at_once, results = max(1, AT_ONCE // weights), []
    for first in range(0, number, at_once):
        some = range(first, min(number, first + at_once))
        seeds = [plan.seeds(r) for r in some]
        simulated = [simulate(plan.entry, plan.inputs, s[0]) for s in seeds]
        targets, starts = [s.data.y_train for s in simulated], [s[1] for s in seeds]

        def steps(done: int, total: int, figures: Mapping[str, float | str], some: range = some) -> None:
            report(some.start * total // len(some) + done, number * total // len(some), figures)

        try:
            told = None if report is None else steps
            posteriors = fit_together(plan.entry, plan.method, plan.inputs, targets, starts, told)
        except UserError:  # which of them failed, their own runs report
            results += map_tasks(alone, some, cores=cores)
            continue
        results += [_compared(plan, *both, seed) for *both, seed in zip(simulated, posteriors, starts, strict=True)]
    return results


def _alone(plan: Plan, number: int) -> Replication | UserError:
    """One replication by its number, as a user would fit it."""
    first, second, _ = plan.seeds(number)
    simulated = simulate(plan.entry, plan.inputs, first)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            posterior = fit(plan.entry, simulated.data, plan.method, seed=second, device="cpu", progress=False)
        except UserError as error:
            return UserError(str(error))  # without its traceback, which holds the fit
    warned = tuple(str(w.message) for w in caught if issubclass(w.category, UserWarning))
    return replace(_compared(plan, simulated, posterior, second), warned=warned)


def _compared(plan: Plan, simulated: Simulated, posterior: Posterior, seed: int) -> Replication:
    chains = posterior.chains
    shape = (1, plan.draws) if chains is None else next(iter(chains.values())).shape[:2]
    with isolated(seed):
        blocks = [
            answers(plan.entry, plan.inputs, simulated.data.y_train, block, simulated.w)
            for block in posterior.blocks(shape[0] * shape[1])
        ]
    questions, truth, _ = blocks[0]
    draws = np.concatenate([values for *_, values in blocks], 1)
    ess = np.full(len(truth), float(plan.draws))
    if chains is not None:
        ess = ess_mean(draws.reshape(-1, *shape)) if shape[1] >= 4 else np.full(len(truth), float(shape[0]))
    if plan.method.converges_to == "exact":  # whose ranks tell it
        return Replication(questions, truth, draws, ess)
    likelihood = [q.kind for q in questions].index("likelihood")
    seeds = np.random.SeedSequence([simulated.seed, 1]).generate_state(OF_PRIOR)
    prior = [simulate(plan.entry, plan.inputs, int(s)).w for s in seeds]
    stacked = {site: torch.stack([w[site] for w in prior]) for site in simulated.w}
    *_, before = answers(plan.entry, plan.inputs, simulated.data.y_train, stacked, simulated.w)
    learned = float(np.median(draws[likelihood]) - np.median(before[likelihood]))
    return Replication(questions, truth, draws, ess, learned)


# -- together ----------------------------------------------------------------------------------------------------------
def why_not_together(entry: Entry, method: Method, inputs: Design) -> str:
    """Why these data sets must be fitted one by one; "" where fitting them together is the same."""
    if type(method) is not SVI:
        return "only SVI is known to come out the same"
    if 0 < method.batch_size < len(inputs.x):
        return "every run has mini-batches of its own"
    with isolated(0):
        model = entry.model(inputs.schema)
        guide = entry.guide(model)
    head = getattr(model, "head", model)
    if type(guide) is not MeanFieldNormal or type(head) is not BayesianNet:
        return "the guide is not a Normal for every weight"
    return ""


def fit_together(
    entry: Entry,
    method: SVI,
    inputs: Design,
    targets: Sequence[Tensor],
    seeds: Sequence[int],
    report: Report | None = None,
) -> list[Posterior]:
    """The posteriors of R data sets with targets (N,) of the same inputs, each started as ``fit`` starts with its seed.

    Raises UserError where a loss is not finite.
    """
    models, guides, starts = [], [], []
    for seed in seeds:
        with isolated(seed):
            model = entry.model(inputs.schema)
            inferred, seen = on_features(model, inputs.data(targets[0]))
            guides.append(entry.guide(model))
        models.append(model)
        starts.append(guides[-1].sites())
    with isolated(seeds[0]):
        together = _Together(starts, guides[0].rho[0].item())
        data = replace(seen, y_train=torch.stack(list(targets), 1))
        how = dict(latent=method.temperature, warmup=method.kl_warmup, num_particles=method.num_particles)
        method.minimise(_Transposed(inferred), together, data, seed=seeds[0], report=report, **how)
    together.hand_out(guides)
    return [Posterior(m, inputs.schema, guide=g) for m, g in zip(models, guides, strict=True)]


class _Together(MeanFieldNormal):
    """R mean-field guides of the same sites as one: every site has a batch dimension (R,)."""

    def __init__(self, starts: Sequence[Mapping[str, Tensor]], rho: float) -> None:
        super().__init__({site: torch.stack([start[site] for start in starts]) for site in starts[0]})
        nn.init.constant_(self.rho, rho)

    def forward(self, x: Tensor | None = None, y: Tensor | None = None) -> dict[str, Tensor]:
        """Sample every site: (R, *shape), a set of weights for each data set."""
        register(self)
        scales = self._cut(self.scale)
        return {
            name: pyro.sample(name, dist.Normal(loc, scales[name], validate_args=False).to_event(loc.dim() - 1))
            for name, loc in self._cut(self.loc).items()
        }

    @torch.no_grad()
    def hand_out(self, guides: Sequence[MeanFieldNormal]) -> None:
        """Give each of the R guides its parameters."""
        for name in ("loc", "rho"):
            sites = self._cut(getattr(self, name)).values()
            for r, guide in enumerate(guides):
                getattr(guide, name).copy_(torch.cat([value[r].flatten() for value in sites]))


class _Transposed(nn.Module):
    """The model, which takes targets (R, N), for a loop that takes rows from (N, R)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.model(x, y.mT)
