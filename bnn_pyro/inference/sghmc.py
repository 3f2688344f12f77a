"""Stochastic-gradient HMC and Langevin dynamics: draws from mini-batches, at the cost of a few trainings.

    v ← (1 − α)·v − η·∇Ũ(w) + Normal(0, 2αη)        w ← w + v        Ũ = −log p(w) − (1/T)·(N/B)·Σ log p(y | x, w)

over mini-batches of B of the N rows, several chains at once (Chen, Fox & Guestrin 2014, arXiv:1402.4102, equation 15).
Positions move with the *new* momentum. The target is p(y | x, w)^(1/T)·p(w), up to a bias that vanishes with η.

The step size is η = lr/N: lr refers to the mean over rows, as in gradient descent. If every step takes all rows, the
variance of draws in a direction of posterior variance 1/λ is too large by the factor 1/(1 − ηλ/(4 − 2α)), and the
reported kinetic temperature, the mean of v²·(1 − α/2)/η over the weights, is the mean of these factors: 1.02 means that
variances are 2 % too large on average. An independent draw takes about 2α/(ηλ) steps.

Mini-batches need a smaller step: standard deviations were 0 to 2 % too large up to ηλ·N/B = 4α (docs/results/sghmc.md),
as each epoch takes each row once, so that its gradient noise sums to zero. The momenta are noisier, so the temperature
does not measure the bias here. If lr is left out, it is the largest within these bounds (``stable_step``) for the
largest λ that the burn-in finds in any chain.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import pyro
import torch
from torch import Tensor, nn

from bnn_pyro.checkpoint import Run
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.errors import UserError, diverged
from bnn_pyro.inference.linear import linear_layer
from bnn_pyro.inference.log_joint import LogJoint, Weights
from bnn_pyro.inference.members import by_rule, optimised
from bnn_pyro.inference.mini_batches import Batches, draws_due, stable_step, stiffest
from bnn_pyro.inference.optimise import BATCHES, MIN_EPOCHS, schedule
from bnn_pyro.inference.potential import log_likelihood
from bnn_pyro.inference.training_loop import check_finite
from bnn_pyro.isolation import generator_state, set_generator_state
from bnn_pyro.parts.nets import in_mode
from bnn_pyro.posterior import Posterior, weight_space
from bnn_pyro.settings import Settings, setting

#: Shares of the burn-in at which the largest λ is estimated.
LOOKS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7)
#: Chains count as diverged at this kinetic temperature in the second half of the burn-in, but not in the first
#: TRANSIENT steps, in which it can be high after any start.
TOO_HOT, TRANSIENT = 3.0, 300
#: Diverged chains start again with their step size times CAUTION, unless it was below MIN_SHARE of the rule's.
CAUTION, MIN_SHARE = 0.25, 1e-4
#: Number of steps by rule; rows × weights up to which a step takes all rows, and so can be many times as large.
STEPS, WHOLE_WORK = 10_000, 5_000_000
COLUMNS = ("draws", "log_joint", "validation")  # names of the parts of stored draws in a checkpoint


def step(w: Tensor, v: Tensor, gradient: Tensor, eta: float, friction: float) -> tuple[Tensor, Tensor]:
    """v' = (1 − friction)·v + eta·gradient + √(2·friction·eta)·Normal(0, 1),  w' = w + v'."""
    v = v.mul(1 - friction).add_(gradient, alpha=eta)
    v.add_(torch.randn_like(v), alpha=math.sqrt(2 * friction * eta))
    return w + v, v


class Chains:
    """The job (see ``Run.take``) of C chains, whose weights w and momenta v are (C, P)."""

    def __init__(
        self, settings: "StochasticGradient", model: nn.Module, data: Dataset, seed: int, start: Weights | None = None
    ) -> None:
        self.settings, self.x_val, self.y_val = (s := settings), data.x_val, data.y_val
        self.batches = Batches(data.x_train, data.y_train, s.batch_size, s.chains, seed)
        self.step, self.total = 0, (per_epoch := self.batches.per_epoch) * s.epochs
        self.window = per_epoch * math.ceil(s.epochs / 1000)  # steps of one line of the trace
        burn_in = self.total // 5 if s.burn_in is None else per_epoch * s.burn_in
        self.due = draws_due(self.total, burn_in, s.max_draws)
        self.log_joint = LogJoint(model, data.x_train, data.y_train, s.temperature)
        a, b = (self.log_joint.flat(w) for w in self.log_joint.sample_prior(s.chains, s.chains))
        # a - b has mean 0 and twice the variance of the prior.
        jittered = self.log_joint.initial.to(a) + s.jitter / math.sqrt(2) * (a - b)
        self.w = jittered if start is None else self.log_joint.flat(start).to(a)
        self.burn_in, self.first = burn_in, self.w
        #: If lr is left out: the share of the rule's step size that is used, and the steps at which λ is estimated.
        self.share = 1.0
        self.looks = {int(part * burn_in) for part in LOOKS} if s.lr is None else set()
        self.lr = s.lr or 0.0
        self.v = torch.randn_like(self.w) * math.sqrt(self.momentum_variance)
        #: For each draw: w (C, P), log joint (C,), and, if there are validation rows, log Σ_c p(y | x, w_c).
        self.draws: list[tuple[Tensor, ...]] = []
        self.recent: list[Tensor] = []
        names = ["epoch", "step_size", "kinetic_temperature", "log_joint", "draws"]
        self.trace: dict[str, list[float]] = {n: [] for n in [*names, *(["validation_nll"] if len(self.x_val) else [])]}

    #: η.
    eta = property(lambda self: self.settings.eta_share * self.lr / len(self.log_joint.x))
    #: The stationary variance of v in the limit of small steps.
    momentum_variance = property(lambda self: self.eta / (1 - self.settings.friction / 2))

    def steps(self) -> Iterator[dict[str, float] | None]:
        """Take the steps that are left, and yield the figures to show after each line of the trace, else None."""
        while self.step < self.total:
            for x, y in self.batches.steps(self.step, self.total):
                self.advance(x, y)
                yield self.record() if self.step % self.window == 0 or self.step == self.total else None
                if self.step == 0:  # chains diverged and start again
                    break

    def advance(self, x: Tensor, y: Tensor) -> None:
        """Keep a draw if one is due, then take one step of every chain."""
        if self.step in self.looks:  # choose the step size by the largest λ, estimated with these rows
            s, per_epoch = self.settings, self.batches.per_epoch
            most = stable_step(stiffest(self.log_joint, self.w, x, y).max().item(), s.friction, per_epoch, s.eta_share)
            self.lr = self.share * most * len(self.log_joint.x) / s.eta_share
            self.v = torch.randn_like(self.w) * math.sqrt(self.momentum_variance)
        log_joint, gradient = self.log_joint.gradient(self.w, x, y)
        if self.due[self.step]:
            self.draws.append((self.w, log_joint, *([self._scores()] if len(self.x_val) else [])))
        self.w, self.v = step(self.w, self.v, gradient, self.eta, self.settings.friction)
        kinetic = self.v.flatten().dot(self.v.flatten()) / (self.v.numel() * self.momentum_variance)
        self.recent.append(torch.stack([log_joint.mean(), kinetic]))
        self.step += 1

    def record(self) -> dict[str, float]:
        """Add a line to the trace and return the figures to show. Raises UserError if a number is not finite."""
        log_joint, kinetic = torch.stack(self.recent).double().mean(0).tolist()
        too_hot = self.step > max(self.burn_in / 2, TRANSIENT) and kinetic > TOO_HOT
        if self.looks and self.step <= self.burn_in and (too_hot or not math.isfinite(log_joint)):
            if self.share < MIN_SHARE:
                raise diverged("chains diverged again and again, the last time at", self.step, self.lr)
            # Start again with a smaller step size.
            self.step, self.share, self.lr, self.w = 0, self.share * CAUTION, 0.0, self.first
            for values in (self.recent, *self.trace.values()):
                values.clear()
            return {"lr": self.lr}
        self._check()
        self.recent.clear()
        draws = self.settings.chains * len(self.draws)
        line = [self.step / self.batches.per_epoch, self.lr, kinetic, log_joint, float(draws)]
        figures = {"lr": self.lr, "draws": draws, "kinetic T": kinetic}
        if len(self.x_val):
            scores = torch.stack([scores for *_, scores in self.draws] or [self._scores()])
            log_p = scores.logsumexp(0) - math.log(self.settings.chains * len(scores))  # mixture of all draws
            figures["validation NLL"] = -log_p.mean().item()
            line.append(figures["validation NLL"])
        for values, value in zip(self.trace.values(), line, strict=True):
            values.append(value)
        return figures

    def state_dict(self) -> dict[str, Any]:
        """The contents of a checkpoint. Raises UserError if a number is not finite and chains cannot start again."""
        if not (self.looks and self.step <= self.burn_in):
            self._check()
        recent = torch.stack(self.recent) if self.recent else torch.empty(0, 2)
        chains = {"tensors": {"w": self.w, "v": self.v}, "recent": recent, "lr": self.lr, "share": self.share}
        columns = [torch.stack(column) for column in zip(*self.draws, strict=True)]
        results = {"ensemble": {**dict.fromkeys(COLUMNS, torch.empty(0)), **dict(zip(COLUMNS, columns, strict=False))}}
        return {**chains, **results, "trace": self.trace, "generators": generator_state(), "done": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a :meth:`state_dict`."""
        device = self.w.device
        self.w, self.v = (state["tensors"][name].to(device) for name in ("w", "v"))
        self.recent = list(state["recent"].to(device))
        columns = [state["ensemble"][name].to(device) for name in COLUMNS if len(state["ensemble"][name])]
        self.draws = list(zip(*columns, strict=True))
        self.step, self.trace = state["done"], state["trace"]
        self.lr, self.share = state.get("lr", self.lr), state.get("share", 1.0)
        set_generator_state(state["generators"])

    def _scores(self) -> Tensor:
        """log Σ_c p(y_n | x_n, w_c), (B,), of the validation rows."""
        return log_likelihood(self.log_joint.model, self.log_joint.sites(self.w), self.x_val, self.y_val).logsumexp(0)

    def _check(self) -> None:
        check_finite(self.recent, self.step, self.lr)
        if not bool(torch.isfinite(self.w).all()):
            raise diverged("weights stopped being finite at", self.step, self.lr)


@dataclass(frozen=True)
class StochasticGradient(Settings):
    """Settings that SGHMC and SGLD share; those left out follow a rule.

    epochs          passes over the training rows, by rule 10,000 steps or 20 epochs, whichever is more
    batch_size      rows a step, by rule all if rows × weights are at most 5 million; 0 takes all in every step
    lr              step size, referring to the mean over rows; by rule it is found in the burn-in, see above
    chains          number of independent chains, each with its own mini-batches, which move together
    burn_in         epochs before the first draw; by rule a fifth of all
    max_draws       largest number of stored draws of a chain; they are evenly spaced after the burn-in
    start           where chains start: members (optimised networks) or jitter (the model's initial values plus
                    ``jitter``); by rule members, but jitter for a linear model, or rows that stay in their file
    jitter          spread of jittered starts around the model's initial values, in standard deviations of the prior
    temperature     T: p(y | x, w)^(1/T) p(w) is sampled; 1 is Bayes, less is a cold posterior and is reported as such
    """

    converges_to: ClassVar[str] = "exact as lr → 0"
    needs: ClassVar[frozenset[str]] = frozenset({"weights", "proper prior"})
    streams: ClassVar[bool] = True
    tiny: ClassVar[Mapping[str, Any]] = {
        "chains": 128, "lr": 0.02, "start": "jitter", "jitter": 1.0, "batch_size": 0, "epochs": 1500, "burn_in": 400,
    }  # fmt: skip
    epochs: int | None = setting(None, low=1, optional=True)
    batch_size: int | None = setting(None, low=0, optional=True)
    lr: float | None = setting(None, above=0, optional=True)
    chains: int = setting(4, low=1)
    burn_in: int | None = setting(None, low=0)
    max_draws: int = setting(100, low=1)
    start: str | None = setting(None, choices=("members", "jitter"), optional=True)
    jitter: float = setting(0.5, low=0)
    temperature: float = setting(1.0, above=0)

    former: ClassVar[Mapping[str, Any]] = {"schedule": "constant", "thin": 0, "resample_prior": 10}
    friction: ClassVar[float]  # α, a setting of SGHMC, and 1 for SGLD
    eta_share: ClassVar[float] = 1.0  # η as a share of lr/N

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.burn_in is not None and self.burn_in >= (self.epochs or math.inf):
            raise UserError(f"burn_in must lie between 0 and the {self.epochs} epochs (excluded), got {self.burn_in}")

    def run(self, model: nn.Module, guide: nn.Module | None, data: Dataset, **options: Any) -> Posterior:
        """Sample the posterior; see ``Method.run``. The guide is not used.

        ``stats`` of the posterior, (C, D): log_joint of each draw in nats, estimated by the mini-batch of its step.
        ``trace``, a line an epoch, or for several: step_size (as lr), kinetic_temperature and log_joint (means over
        chains and steps), draws (number stored, all chains), validation_nll (of the draws so far, else of positions).
        """
        model, run = weight_space(model), Run(**options)
        settings = self.resolved(model, data)
        with in_mode(model, training=False), pyro.validation_enabled(False):
            chains = Chains(settings, model, data, run.seed, settings.starts(model, data, run))
            run.take(chains)
        w, log_joint, *_ = (torch.stack(column, 1) for column in zip(*chains.draws, strict=True))
        draws, stats = chains.log_joint.sites(w), {"log_joint": log_joint}
        rule = {"epochs": settings.epochs, "batch_size": settings.batch_size, "lr": chains.lr}
        about = {"schedule": {k: v for k, v in rule.items() if getattr(self, k) is None}}
        return Posterior(model, data.schema, chains=draws, stats=stats, trace=chains.trace, provenance=about)

    def resolved(self, model: nn.Module, data: Dataset) -> Self:
        """These settings, completed by the rules, except for an ``lr`` to be found in the burn-in."""
        num, size = len(data.x_train), self.batch_size
        if size is None:
            weights = sum(value.numel() for value in model.initial.values())
            whole = isinstance(data.x_train, Tensor) and num * weights <= WHOLE_WORK
            size = 0 if whole else schedule(num, weights)["batch_size"] or BATCHES[0]
        epochs = self.epochs or max(MIN_EPOCHS, STEPS // math.ceil(num / (size or num)))
        return replace(self, batch_size=size, epochs=epochs)

    def starts(self, model: nn.Module, data: Dataset, run: Run) -> dict[str, Tensor] | None:
        """Optimised networks {site: (C, *shape)}, or None: chains start around the model's initial values."""
        plain = linear_layer(model) is not None or not isinstance(data.x_train, Tensor)
        if self.start == "jitter" or (self.start is None and plain):
            return None
        data = replace(data, x_val=data.x_val[:0], y_val=data.y_val[:0])  # validation rows may calibrate
        return optimised(model, data, self.chains, run, temperature=self.temperature, **by_rule(model, data, run.seed))


@dataclass(frozen=True)
class SGHMC(StochasticGradient):
    """Settings of stochastic-gradient Hamiltonian Monte Carlo.

    friction  α in (0, 1], the share of the momentum that is lost in a step
    """

    former: ClassVar[Mapping[str, Any]] = {
        **StochasticGradient.former, "gradient_noise": "reshuffled", "resample_momentum": 0,
    }  # fmt: skip
    friction: float = setting(0.05, above=0, high=1)


@dataclass(frozen=True)
class SGLD(StochasticGradient):
    """Settings of stochastic-gradient Langevin dynamics: w ← w − (η/2)·∇Ũ + Normal(0, η), η = lr/N.

    Welling & Teh 2011. It is SGHMC without momentum (friction 1) with half the η, and needs 1/√(ηλ) times the steps.
    """

    tiny: ClassVar[Mapping[str, Any]] = {**StochasticGradient.tiny, "lr": 0.15, "epochs": 3000, "burn_in": 1000}
    friction: ClassVar[float] = 1.0
    eta_share: ClassVar[float] = 0.5
