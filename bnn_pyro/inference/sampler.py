"""The base class of the samplers that use all rows (HMC, NUTS, ChEES, MILE): settings, ``run``, and starting points.

The setting ``start`` chooses where each chain starts:

    jitter   the model's initial values plus ``jitter`` times a random vector with the prior's standard deviations
    prior    a draw from the prior
    map      the mode that Adam reaches from the jittered start
    members  a network optimised by AdamW on mini-batches with early stopping (``inference.members``)
    auto     members if a hidden layer is wide, else ``usual_start`` of the sampler
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from bnn_pyro.checkpoint import Run
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.errors import UserError
from bnn_pyro.inference.chains import Record
from bnn_pyro.inference.cost import Forecast
from bnn_pyro.inference.members import optimised
from bnn_pyro.inference.potential import CENTRED, Potential
from bnn_pyro.isolation import chain_seed, isolated, one_thread
from bnn_pyro.parts.guides import weight_sites
from bnn_pyro.posterior import Posterior, weight_space
from bnn_pyro.progress import duration
from bnn_pyro.settings import Settings, setting

STARTS = ("jitter", "prior", "map", "members")
#: Width of a hidden layer above which ``auto`` means members: from random weights of a wide network a chain needs
#: thousands of gradients before it predicts anything, and its step size would be adapted on the way.
WIDE = 20
#: Search for a mode: steps of Adam, first learning rate (it falls to 0 by a cosine), starts evaluated in one call.
STEPS, LR, TOGETHER = 500, 0.05, 64
#: A chain that never moves or always diverges is reported from MIN_DRAWS draws on; the warning names up to NAMED.
MIN_DRAWS, NAMED = 10, 5
Starts = Callable[[int], Tensor]  # from the number of chains C to their starting points, (C, P)
Drawn = tuple[list[Record], str]  # (one record a chain, the reason why the chains were stopped early or "")


@dataclass(frozen=True)
class Sampler(Settings):
    """Settings of all these samplers. A subclass defines ``_draw(potential, starts, run)``, returning :data:`Drawn`.

    draws          number of draws kept from each chain
    warmup         number of transitions before the first draw, which adapt step size and mass and are discarded
    chains         number of independent chains
    target_accept  acceptance rate to which the step size is adapted; raise it if trajectories diverge
    thin           number of transitions a draw; the last position of each ``thin`` transitions is kept
    start          where chains start: auto, jitter, prior, map or members
    jitter         spread of jittered starts, in standard deviations of the prior; for a linear model, in units of two
                   standard deviations of the posterior, as estimated from its curvature
    temperature    T: p(y | x, w)^(1/T) p(w) is sampled; 1 is Bayes, less is a cold posterior and is reported as such
    compiled       whether to compile the gradient to C: auto (if the run is long enough), yes or no
    """

    converges_to: ClassVar[str] = "exact"
    needs: ClassVar[frozenset[str]] = frozenset({"weights", "proper prior"})
    tiny: ClassVar[Mapping[str, Any]] = {"draws": 1000, "warmup": 300, "chains": 4, "cores": 1}
    draws: int = setting(1000, low=1)
    warmup: int = setting(500, low=1)
    chains: int = setting(4, low=1)
    target_accept: float = setting(0.8, above=0, below=1)
    thin: int = setting(1, low=1)
    start: str = setting("auto", choices=("auto", *STARTS))
    jitter: float = setting(1.0, low=0)
    temperature: float = setting(1.0, above=0)
    compiled: str = setting("auto", choices=("auto", "yes", "no"))

    #: {setting: values that only earlier versions took}.
    former_values: ClassVar[Mapping[str, Any]] = {"start": ("svi",)}
    #: Whether chains move independently; several of them then compute on one thread each.
    one_by_one: ClassVar[bool] = True
    timed: ClassVar[bool] = True
    usual_start: ClassVar[str] = "jitter"  # the meaning of start="auto" for a narrow network
    #: Transitions of each chain, including its warm-up.
    transitions = property(lambda self: self.warmup + self.draws * self.thin)
    #: Number of first transitions that a forecast of the run time leaves out, as their duration is not typical.
    untimed = property(lambda self: min(100, self.warmup // 4))

    def run(self, model: nn.Module, guide: nn.Module | None, data: Dataset, **options: Any) -> Posterior:
        """Sample the posterior; see ``Method.run``. The guide is not used.

        ``stats`` of the posterior, (C, D): acceptance_rate, diverging (0 or 1), energy (at the start of the trajectory,
        nats), lp (log joint density of the draw, nats), n_steps (number of gradients), step_size; tree_depth (NUTS);
        trajectory_length (HMC and ChEES); superchain (ChEES). With ``thin`` they summarise the transitions of a draw.

        After Ctrl-C without a checkpoint it returns the draws so far, with a warning; after ``max_minutes``, equally
        many of every chain. Raises UserError if a step size falls to 0, or a chain is in its warm-up at that time.
        """
        from bnn_pyro.inference.coordinates import coordinates  # imports SciPy's optimisers, which takes long

        model, run = weight_space(model), Run(**options)
        with isolated(run.seed), one_thread() if self.one_by_one and self.chains > 1 else nullcontext():
            potential = Potential(model, data.x_train, data.y_train, self.temperature)
            begun = run.checkpoint.load() if run.checkpoint else None
            potential.centred = CENTRED if begun is None else begun.get("kernel", begun).get("centred", 0)
            potential.space = coordinates(potential)
            records, stopped = self._draw(potential, self._starts(potential, data, run), Forecast(self, run).run)
        return self._posterior(model, data, potential, records, stopped, run)

    def _starts(self, potential: Potential, data: Dataset, run: Run) -> Starts:
        start = self.start
        if start == "auto":
            widths = [len(potential.model.initial[site]) for site in weight_sites(potential.model)[:-1]]
            start = "members" if max(widths, default=0) > WIDE else self.usual_start
        if start == "members":
            return partial(self._members, potential, data, run)
        return partial(starting_points, potential, start, jitter=self.jitter, seed=run.seed)

    def _members(self, potential: Potential, data: Dataset, run: Run, num: int) -> Tensor:
        """Optimised networks as starts, z (num, P); if a site is constrained, modes of the log joint instead."""
        if potential.constrained:
            return starting_points(potential, "map", num, self.jitter, run.seed)
        plan = {k: v for k, v in vars(self).items() if k in ("epochs", "patience", "lr", "batch_size")}
        if not plan:  # a sampler without these settings leaves validation rows to calibration, and holds out other rows
            data = replace(data, x_val=data.x_val[:0], y_val=data.y_val[:0])
        w = optimised(potential.model, data, num, run, temperature=self.temperature, **plan)
        return _placed(potential, potential.flat(w).double())

    def _posterior(
        self, model: nn.Module, data: Dataset, potential: Potential, records: Sequence[Record], stopped: str, run: Run
    ) -> Posterior:
        """The posterior of equally many draws of each chain, of the chains that give the most draws in total."""
        draws = max((r.kept for r in records), key=lambda n: (n * sum(r.kept >= n for r in records), n))
        chosen = [c for c, record in enumerate(records) if record.kept >= max(draws, 1)]
        if not stopped and not all(record.finished for record in records):
            stopped = f"stopped at the limit of {run.max_minutes:g} min"
            if (least := min(record.kept for record in records)) > 0:
                chosen, draws = list(range(len(records))), least
            elif run.checkpoint is not None or not chosen:
                raise _too_early(records, run, self.thin)
        if not chosen:
            raise KeyboardInterrupt(f"{stopped} in the warm-up, before the first draw; with a folder (out=…, --out) a "
                                    "run can go on from where it was stopped")  # fmt: skip
        if stopped:
            stopped = f"{stopped}: {len(chosen)} of {self.chains} chains with {draws:,} of {self.draws:,} draws each"
            warnings.warn(f"{stopped} are kept", stacklevel=4)
        columns = [records[c].columns for c in chosen]
        stats = {name: torch.from_numpy(np.stack([column[name][:draws] for column in columns])) for name in columns[0]}
        z = stats.pop("z")
        stats["lp"] = stats["lp"] - torch.as_tensor(potential.space.extra(z.to(potential.initial.device))).cpu()
        # With thinning, "diverging" means that any transition of a draw diverged, not all.
        warn_of_idle_chains(z, stats["diverging"] * (self.thin == 1), chosen, self.chains)
        drawn = [potential.weights(one) for one in z.to(potential.initial.device)]
        chains = {site: torch.stack([w[site] for w in drawn]) for site in model.initial}
        provenance = {"stopped": stopped} if stopped else {}
        return Posterior(model, data.schema, chains=chains, stats=stats, provenance=provenance)


def _too_early(records: Sequence[Record], run: Run, thin: int) -> UserError:
    """The error if a chain has no draw within ``max_minutes``; it estimates how long a first draw of each takes."""
    done = max(1, sum(record.done - record.resumed for record in records))
    left = sum(max(0, record.warmup + thin - record.done) for record in records)
    more, whole = run.minutes * left / done, sum(r.draws * thin + r.warmup - r.done for r in records)
    least = min(records, key=lambda record: record.done)
    resumed = run.checkpoint is not None
    need = f"{math.ceil(1.1 * (more if resumed else run.minutes + more))}{' with --resume' * resumed}"
    return UserError(f"the limit of {run.max_minutes:g} min was reached in the warm-up, at transition {least.done:,} "
                     f"of {least.warmup:,}: for a first draw of every chain take --max-minutes {need}; all draws take "
                     f"{duration(60 * run.minutes * whole / done)} more")  # fmt: skip


def warn_of_idle_chains(z: Tensor, diverging: Tensor, numbers: Sequence[int], chains: int) -> None:
    """Warn of chains that never move or always diverge.   z: (C, D, P).   numbers: of these C among all ``chains``."""
    if z.shape[1] < MIN_DRAWS:
        return
    diverged = diverging.bool().all(1)
    rejected = (z == z[:, :1]).flatten(1).all(1) & ~diverged
    for idle, problem in ((diverged, "every draw diverged"), (rejected, "every transition was rejected")):
        if idle_numbers := [numbers[i] + 1 for i in idle.nonzero()[:, 0].tolist()]:
            named = ", ".join(map(str, idle_numbers[:NAMED])) + (", …" if len(idle_numbers) > NAMED else "")
            who = f"chain {named}" if len(idle_numbers) == 1 else f"{len(idle_numbers)} chains ({named})"
            warnings.warn(f"{who} of {chains}: {problem}, and tells of its start alone; try start=map, a higher "
                          "target_accept or a longer warm-up", stacklevel=5)  # fmt: skip


def starting_points(potential: Potential, start: str, num: int, jitter: float = 1.0, seed: int = 0) -> Tensor:
    """Starts z (num, P), float64, of finite density; the start of a chain does not depend on the number of chains.

    start: "jitter", "prior" or "map".
    Raises UserError, with the chain's number, if no start with a finite density and gradient is found.
    """
    z = torch.stack([_drawn(potential, start, jitter, seed, chain) for chain in range(num)])
    z = _placed(potential, _climbed(potential, z)) if start == "map" else z
    if not (good := _finite(potential, z)).all():
        raise UserError(f"chain {int((~good).nonzero()[0]) + 1} has no start where the log density and its gradient "
                        f"are finite (start={start}); take start=map, or a "
                        f"{'narrower prior' if start == 'prior' else 'smaller jitter'}")  # fmt: skip
    return z


def _drawn(potential: Potential, start: str, jitter: float, seed: int, chain: int) -> Tensor:
    """One start of finite density, (P,); if there is none in 100 attempts, the last one."""
    with isolated(chain_seed(seed, chain)):
        for _ in range(100):  # attempts, as in Stan
            if start == "prior":
                z = potential.prior_draws(1)
            else:
                if potential.space.whitened and potential.centred >= 2:  # z has standard deviations of about 1
                    offset = 2.0 * torch.randn_like(potential.initial)
                else:
                    a, b = potential.prior_draws(2)  # a - b has mean 0 and twice the variance of the prior
                    offset = (a - b) / math.sqrt(2)
                z = (potential.space.inverse(potential.initial) + jitter * offset)[None]
            if _finite(potential, z).all():
                break
    return z[0]


def _finite(potential: Potential, z: Tensor) -> Tensor:
    density, gradient = potential(z)
    return torch.isfinite(density) & torch.isfinite(gradient).all(1)


def _climbed(potential: Potential, z: Tensor) -> Tensor:
    """The most probable u (num, P) that Adam passes on its way from each z (num, P) to a mode."""
    u = potential.space.forward(z).detach().requires_grad_(True)
    best, top = u.detach().clone(), torch.full((len(z),), -math.inf, dtype=z.dtype, device=z.device)
    optimiser = torch.optim.Adam([u], LR)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS)
    for _ in range(STEPS):
        density = torch.cat([potential.log_density(part) for part in u.split(TOGETHER)])
        (gradient,) = torch.autograd.grad(density.sum(), u)
        better = density.detach() > top  # False for NaN
        top = torch.where(better, density.detach(), top)
        best = torch.where(better[:, None], u.detach(), best)
        u.grad = -gradient.nan_to_num(0.0, 0.0, 0.0)
        optimiser.step()
        schedule.step()
    return best


def _placed(potential: Potential, u: Tensor) -> Tensor:
    """z (num, P) of each u. One at a time: some coordinates are drawn, and must not depend on the other chains."""
    return torch.stack([potential.space.inverse(one) for one in u])
