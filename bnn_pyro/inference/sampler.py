"""What HMC, NUTS and ChEES have in common: settings, the way of a run, and where chains start.

    jitter  the model's initial values, plus ``jitter`` times a vector of mean 0 with the prior's standard deviations
    prior   a draw of the prior each
    map     each climbs from its jittered start to a mode of its own (Adam, all at once)
    members networks optimised by AdamW on mini-batches with early stopping, one for each chain (``inference.members``)
    auto    members where a hidden layer is wide, else the sampler's usual start

Of a network with several modes, all tell whether chains agree between them.
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
#: Units of a hidden layer above which ``auto`` takes members: from random weights of a wide network a chain needs
#: thousands of gradients to where it predicts at all, and the step size is found on the way there.
WIDE = 20
#: Steps of Adam to a mode, the first of its learning rates, which fall to 0 by a cosine, and starts in one call.
STEPS, LR, TOGETHER = 500, 0.05, 64
#: Draws from which on a chain that never moves, or always diverges, is reported (fewer may be bad luck); chains named.
MIN_DRAWS, NAMED = 10, 5
#: How many -> where as many chains start, (C, P).
Starts = Callable[[int], Tensor]
#: (What each chain has drawn, why they were stopped: "" where they were not).
Drawn = tuple[list[Record], str]


@dataclass(frozen=True)
class Sampler(Settings):
    """Settings that all share. A subclass has ``_draw(potential, starts, run)``, which returns what is :data:`Drawn`.

    draws          draws kept of each chain
    warmup         transitions before them, in which step size, mass and the like are adapted; dropped
    chains         independent chains
    target_accept  acceptance rate that the step size is adapted to; higher where trajectories diverge
    thin           transitions a draw
    start          where chains start: auto, jitter, prior, map or members
    jitter         how far apart jittered chains start, in standard deviations of the prior; of a linear model in twice
                   those of the posterior, as its curvature tells them
    temperature    T: p(y | x, w)^(1/T) p(w) is sampled; 1 is Bayes, less is a cold posterior and is reported as such
    compiled       whether to compile the gradient: auto (where the run is long enough), yes or no
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
    #: Where several chains draw side by side, each computes on one thread, and draws the same.
    one_by_one: ClassVar[bool] = True
    #: Takes ``max_minutes``, and where ``auto`` starts in a narrow network.
    timed: ClassVar[bool] = True
    usual_start: ClassVar[str] = "jitter"

    #: Of every chain, with its warm-up.
    transitions = property(lambda self: self.warmup + self.draws * self.thin)

    #: Transitions after which one takes about as long as the later ones do.
    untimed = property(lambda self: min(100, self.warmup // 4))

    def run(self, model: nn.Module, guide: nn.Module | None, data: Dataset, **how: Any) -> Posterior:
        """Sample the posterior; see ``Method.run``. The guide is not used.

        ``stats`` of the posterior, (C, D): acceptance_rate, diverging (0 or 1), energy (in nats, where the trajectory
        starts), lp (log joint density of the draw in nats), n_steps (gradients taken), step_size; tree_depth of NUTS;
        trajectory_length of HMC and ChEES; superchain of ChEES. Where thinned they speak for all transitions.

        Ctrl-C, without a checkpoint, returns the draws so far with a warning; ``max_minutes`` as many of every chain.
        Raises UserError where a step size falls to nothing, or a chain is still in its warm-up after ``max_minutes``.
        """
        from bnn_pyro.inference.coordinates import coordinates  # with SciPy's optimisers

        model, run = weight_space(model), Run(**how)
        with isolated(run.seed), one_thread() if self.one_by_one and self.chains > 1 else nullcontext():
            potential = Potential(model, data.x_train, data.y_train, self.temperature)
            begun = run.checkpoint.load() if run.checkpoint else None
            potential.centred = CENTRED if begun is None else begun.get("kernel", begun).get("centred", 0)
            potential.space = coordinates(potential)
            records, stopped = self._draw(potential, self._starts(potential, data, run), Forecast(self, run).run)
        return self._posterior(model, data, potential, records, stopped, run)

    def _starts(self, potential: Potential, data: Dataset, run: Run) -> Starts:
        how = self.start
        if how == "auto":
            widths = [len(potential.model.initial[site]) for site in weight_sites(potential.model)[:-1]]
            how = "members" if max(widths, default=0) > WIDE else self.usual_start
        if how == "members":
            return partial(self._members, potential, data, run)
        return partial(starting_points, potential, how, jitter=self.jitter, seed=run.seed)

    def _members(self, potential: Potential, data: Dataset, run: Run, num: int, **how: Any) -> Tensor:
        """z (num, P), an optimised network each; modes of the log joint where its numbers are not free on all of ℝ."""
        if potential.constrained:
            return starting_points(potential, "map", num, self.jitter, run.seed)
        if not hasattr(self, "patience"):  # what stops them is held out of the training rows: validation may calibrate
            data = replace(data, x_val=data.x_val[:0], y_val=data.y_val[:0])
        w = optimised(potential.model, data, num, run, temperature=self.temperature, **how)
        return _placed(potential, potential.flat(w).double())

    def _posterior(
        self, model: nn.Module, data: Dataset, potential: Potential, records: Sequence[Record], stopped: str, run: Run
    ) -> Posterior:
        """An equal number of draws of as many chains as makes the most of them."""
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
        warn_of_idle_chains(z, stats["diverging"] * (self.thin == 1), chosen, self.chains)  # of thinned ones: any
        drawn = [potential.weights(one) for one in z.to(potential.initial.device)]
        chains = {site: torch.stack([w[site] for w in drawn]) for site in model.initial}
        about = {"stopped": stopped} if stopped else {}
        return Posterior(model, data.schema, chains=chains, stats=stats, provenance=about)


def _too_early(records: Sequence[Record], run: Run, thin: int) -> UserError:
    """The error where a chain has no draw when the time is over, with how much it takes to have one of each."""
    done = max(1, sum(record.done - record.resumed for record in records))
    left = sum(max(0, record.warmup + thin - record.done) for record in records)
    more, whole = run.minutes * left / done, sum(r.draws * thin + r.warmup - r.done for r in records)
    least = min(records, key=lambda record: record.done)
    resumed = run.checkpoint is not None
    need = math.ceil(1.1 * (more if resumed else run.minutes + more))
    need, later = f"{need} with --resume" if resumed else need, duration(60 * run.minutes * whole / done)
    return UserError(f"the limit of {run.max_minutes:g} min was reached in the warm-up, at transition {least.done:,} "
                     f"of {least.warmup:,}: for a first draw of every chain take --max-minutes {need}; all draws take "
                     f"{later} more")  # fmt: skip


def warn_of_idle_chains(z: Tensor, diverging: Tensor, numbers: Sequence[int], chains: int) -> None:
    """Warn of chains that never move or always diverge.   z (C, D, P).   numbers: of these C among ``chains``."""
    if z.shape[1] < MIN_DRAWS:
        return
    diverged = diverging.bool().all(1)
    rejected = (z == z[:, :1]).flatten(1).all(1) & ~diverged
    for idle, what in ((diverged, "every draw diverged"), (rejected, "every transition was rejected")):
        if which := [numbers[i] + 1 for i in idle.nonzero()[:, 0].tolist()]:
            named = ", ".join(map(str, which[:NAMED])) + (", …" if len(which) > NAMED else "")
            who = f"chain {named}" if len(which) == 1 else f"{len(which)} chains ({named})"
            warnings.warn(f"{who} of {chains}: {what}, and tells of its start alone; try start=map, a higher "
                          "target_accept or a longer warm-up", stacklevel=5)  # fmt: skip


def starting_points(potential: Potential, how: str, num: int, jitter: float = 1.0, seed: int = 0) -> Tensor:
    """z (num, P), float64, each of finite density; that of a chain does not depend on how many there are.

    how: "jitter", "prior" or "map".
    Raises UserError where no start of finite density is found, with the chain's number.
    """
    z = torch.stack([_drawn(potential, how, jitter, seed, chain) for chain in range(num)])
    z = _placed(potential, _climbed(potential, z)) if how == "map" else z
    if not (good := _finite(potential, z)).all():
        raise UserError(f"chain {int((~good).nonzero()[0]) + 1} has no start where the log density and its gradient "
                        f"are finite (start={how}); take a {'narrower prior' if how == 'prior' else 'smaller jitter'}, "
                        "or start=map")  # fmt: skip
    return z


def _drawn(potential: Potential, how: str, jitter: float, seed: int, chain: int) -> Tensor:
    """One start of finite density, (P,); the last one tried where there is none."""
    with isolated(chain_seed(seed, chain)):
        for _ in range(100):  # attempts, as in Stan
            if how == "prior":
                z = potential.prior_draws(1)
            else:
                if potential.space.whitened and potential.centred >= 2:  # the posterior of a linear model, about 1 wide
                    apart = 2.0 * torch.randn_like(potential.initial)
                else:
                    a, b = potential.prior_draws(2)  # their difference has mean 0 and twice the variance
                    apart = (a - b) / math.sqrt(2)
                z = (potential.space.inverse(potential.initial) + jitter * apart)[None]
            if _finite(potential, z).all():
                break
    return z[0]


def _finite(potential: Potential, z: Tensor) -> Tensor:
    density, gradient = potential(z)
    return torch.isfinite(density) & torch.isfinite(gradient).all(1)


def _climbed(potential: Potential, z: Tensor) -> Tensor:
    """From each z (num, P) to the most probable u on the way to a mode, on the scale of the weights themselves."""
    u = potential.space.forward(z).detach().requires_grad_(True)
    best, top = u.detach().clone(), torch.full((len(z),), -math.inf, dtype=z.dtype, device=z.device)
    optimiser = torch.optim.Adam([u], LR)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS)
    for _ in range(STEPS):
        density = torch.cat([potential.log_density(part) for part in u.split(TOGETHER)])
        (gradient,) = torch.autograd.grad(density.sum(), u)
        better = density.detach() > top  # not where it is not a number
        top = torch.where(better, density.detach(), top)
        best = torch.where(better[:, None], u.detach(), best)
        u.grad = -gradient.nan_to_num(0.0, 0.0, 0.0)
        optimiser.step()
        schedule.step()
    return best


def _placed(potential: Potential, u: Tensor) -> Tensor:
    """z (num, P) at each u, one after the other, as some coordinates are drawn: those of a chain whatever follows."""
    return torch.stack([potential.space.inverse(one) for one in u])
