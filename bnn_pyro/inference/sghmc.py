"""Stochastic-gradient HMC and Langevin dynamics: an ensemble of draws at the price of a few trainings.

    v ← (1 − α)·v − η·∇Ũ(w) + Normal(0, 2αη)        w ← w + v        Ũ = −log p(w) − (1/T)·(N/B)·Σ log p(y | x, w)

over mini-batches of B of the N rows, several chains at once (Chen, Fox & Guestrin 2014, arXiv:1402.4102, equation 15).
Positions move with the *new* momentum. The target is p(y | x, w)^(1/T)·p(w), up to a bias that vanishes with η.

How lr is chosen (η = lr/N, so that it is a step on the mean over the rows, as in gradient descent). In a direction of
posterior variance 1/λ the variance of full-batch draws is too large by 1/(1 − ηλ/(4 − 2α)). The kinetic temperature
that is shown, mean v²·(1 − α/2)/η over the weights, is the mean of just these factors: 1.02 says that variances are 2 %
too large on average. Slow directions need about 2α/(ηλ) steps for an independent draw.

Mini-batches ask for a smaller step. Every epoch takes each row once, so that the noises of an epoch sum to zero and
slow directions hardly feel them: standard deviations were 0 to 2 % too large up to ηλ·N/B = 4α (docs/results/sghmc.md).
The momenta do feel them, so that the temperature is a warning here, not a measure of the bias. Where lr is left out it
is the largest that this allows for the stiffest direction of any chain, as the burn-in finds it (``stable_step``).
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

#: Where in the burn-in λ is looked for.
LOOKS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7)
#: Kinetic temperature at which chains diverge in the second half of the burn-in; what then becomes of the step size,
#: the least share of the rule's with which they begin again, and steps in which momenta are hot from any start.
TOO_HOT, CAUTION, LEAST_SHARE, TRANSIENT = 3.0, 0.25, 1e-4, 300
#: Steps by rule; rows × weights up to which a step takes all rows, which lets it be many times as large.
STEPS, WHOLE_WORK = 10_000, 5_000_000
#: What a checkpoint calls the parts of stored draws.
COLUMNS = ("draws", "log_joint", "validation")


def step(w: Tensor, v: Tensor, gradient: Tensor, eta: float, friction: float) -> tuple[Tensor, Tensor]:
    """v' = (1 − friction)·v + eta·gradient + √(2·friction·eta)·Normal(0, 1),  w' = w + v'."""
    v = v.mul(1 - friction).add_(gradient, alpha=eta)
    v.add_(torch.randn_like(v), alpha=math.sqrt(2 * friction * eta))
    return w + v, v


class Chains:
    """C chains between two steps; w and v are (C, P): a step is one normal draw and a few passes over memory."""

    def __init__(
        self, settings: "StochasticGradient", model: nn.Module, data: Dataset, seed: int, start: Weights | None = None
    ) -> None:
        self.settings, self.x_val, self.y_val = (s := settings), data.x_val, data.y_val
        self.batches = Batches(data.x_train, data.y_train, s.batch_size, s.chains, seed)
        self.step, self.total = 0, (per_epoch := self.batches.per_epoch) * s.epochs
        self.window = per_epoch * math.ceil(s.epochs / 1000)  # steps that make one line of the trace
        burn_in = self.total // 5 if s.burn_in is None else per_epoch * s.burn_in
        self.due = draws_due(self.total, burn_in, s.max_draws)
        self.log_joint = LogJoint(model, data.x_train, data.y_train, s.temperature)
        a, b = (self.log_joint.flat(w) for w in self.log_joint.sample_prior(s.chains, s.chains))
        # The difference of two draws has mean 0 and twice the variance of the prior.
        jittered = self.log_joint.initial.to(a) + s.jitter / math.sqrt(2) * (a - b)
        self.w = jittered if start is None else self.log_joint.flat(start).to(a)
        #: Where lr is looked for: steps at which it is, and the share of the rule's that it has come to.
        self.burn_in, self.share, self.first = burn_in, 1.0, self.w
        self.looks = {int(part * burn_in) for part in LOOKS} if s.lr is None else set()
        self.lr = s.lr or 0.0
        self.v = torch.randn_like(self.w) * math.sqrt(self.momentum_variance)
        #: w (C, P) and log joint (C,) of each, and where there are validation rows, log Σ_c p(y | x, w_c).
        self.draws: list[tuple[Tensor, ...]] = []
        self.recent: list[Tensor] = []
        names = ["epoch", "step_size", "kinetic_temperature", "log_joint", "draws"]
        self.trace: dict[str, list[float]] = {n: [] for n in [*names, *(["validation_nll"] if len(self.x_val) else [])]}

    #: η.
    eta = property(lambda self: self.settings.eta_share * self.lr / len(self.log_joint.x))
    #: In stationarity, in the limit of small steps.
    momentum_variance = property(lambda self: self.eta / (1 - self.settings.friction / 2))

    def steps(self) -> Iterator[dict[str, float] | None]:
        """Those that are left, and what to show after an epoch."""
        while self.step < self.total:
            for x, y in self.batches.steps(self.step, self.total):
                self.advance(x, y)
                yield self.record() if self.step % self.window == 0 or self.step == self.total else None
                if self.step == 0:  # begun again
                    break

    def advance(self, x: Tensor, y: Tensor) -> None:
        """One step of every chain, before which a draw is kept where one is due."""
        if self.step in self.looks:  # the step size is that of the stiffest direction, as these rows show it
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
        """Add a line to the trace; what to show of it. Raises UserError where something is not finite."""
        log_joint, kinetic = torch.stack(self.recent).double().mean(0).tolist()
        too_hot = self.step > max(self.burn_in / 2, TRANSIENT) and kinetic > TOO_HOT
        if self.looks and self.step <= self.burn_in and (too_hot or not math.isfinite(log_joint)):
            if self.share < LEAST_SHARE:
                raise diverged("chains diverged again and again, the last time at", self.step, self.lr)
            # From the start with a smaller step size, after a divergence in the burn-in.
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
            log_p = scores.logsumexp(0) - math.log(self.settings.chains * len(scores))  # of all draws of all chains
            figures["validation NLL"] = -log_p.mean().item()
            line.append(figures["validation NLL"])
        for values, value in zip(self.trace.values(), line, strict=True):
            values.append(value)
        return figures

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold. Raises UserError where something is not finite that no new start mends."""
        if not (self.looks and self.step <= self.burn_in):
            self._check()
        recent = torch.stack(self.recent) if self.recent else torch.empty(0, 2)
        chains = {"tensors": {"w": self.w, "v": self.v}, "recent": recent, "lr": self.lr, "share": self.share}
        columns = [torch.stack(column) for column in zip(*self.draws, strict=True)]
        results = {"ensemble": {**dict.fromkeys(COLUMNS, torch.empty(0)), **dict(zip(COLUMNS, columns, strict=False))}}
        return {**chains, **results, "trace": self.trace, "generators": generator_state(), "done": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        device = self.w.device
        self.w, self.v = (state["tensors"][name].to(device) for name in ("w", "v"))
        self.recent = list(state["recent"].to(device))
        columns = [state["ensemble"][name].to(device) for name in COLUMNS if len(state["ensemble"][name])]
        self.draws = list(zip(*columns, strict=True))
        self.step, self.trace = state["done"], state["trace"]
        self.lr, self.share = state.get("lr", self.lr), state.get("share", 1.0)
        set_generator_state(state["generators"])

    def _scores(self) -> Tensor:
        """log Σ_c p(y_n | x_n, w_c) of the validation rows, (B,)."""
        return log_likelihood(self.log_joint.model, self.log_joint.sites(self.w), self.x_val, self.y_val).logsumexp(0)

    def _check(self) -> None:
        check_finite(self.recent, self.step, self.lr)
        if not bool(torch.isfinite(self.w).all()):
            raise diverged("weights stopped being finite at", self.step, self.lr)


@dataclass(frozen=True)
class StochasticGradient(Settings):
    """Settings that SGHMC and SGLD share; those left out follow a rule.

    epochs          passes over the training rows, by rule 10,000 steps, or 20 where these are more
    batch_size      rows a step, by rule all where rows × weights are 5 million at most; 0 takes all in every step
    lr              step size on the mean over the rows, by rule found in the burn-in; see above
    chains          independent chains, all at once, each with mini-batches of its own
    burn_in         epochs before the first draw; none given: a fifth of all
    max_draws       stored draws of a chain at most, evenly spaced after the burn-in
    start           where chains start: members (an optimised network each) or jitter (the model's initial values plus
                    ``jitter``); by rule members, but jitter of a linear model and of rows that stay in their file
    jitter          how far apart chains start, in standard deviations of the prior around the model's initial values
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
    #: The same for every run of SGLD; SGHMC has it as a setting.
    friction: ClassVar[float]
    #: η as a share of lr/N.
    eta_share: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.burn_in is not None and self.burn_in >= (self.epochs or math.inf):
            raise UserError(f"burn_in must lie between 0 and the {self.epochs} epochs (excluded), got {self.burn_in}")

    def run(self, model: nn.Module, guide: nn.Module | None, data: Dataset, **how: Any) -> Posterior:
        """Sample the posterior; see ``Method.run``. The guide is not used.

        ``stats`` of the posterior, (C, D): log_joint of each draw in nats, as the mini-batch of its step estimates it.
        ``trace``, a line an epoch: step_size (as lr), kinetic_temperature and log_joint (means over chains and steps),
        draws (stored, all chains), validation_nll (of the ensemble so far, or of the chains as they are).
        """
        model, run = weight_space(model), Run(**how)
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
        """These settings with numbers in them, but for a step size that is to be found."""
        num, size = len(data.x_train), self.batch_size
        if size is None:
            weights = sum(value.numel() for value in model.initial.values())
            whole = isinstance(data.x_train, Tensor) and num * weights <= WHOLE_WORK
            size = 0 if whole else schedule(num, weights)["batch_size"] or BATCHES[0]
        epochs = self.epochs or max(MIN_EPOCHS, STEPS // math.ceil(num / (size or num)))
        return replace(self, batch_size=size, epochs=epochs)

    def starts(self, model: nn.Module, data: Dataset, run: Run) -> dict[str, Tensor] | None:
        """{site: (C, *shape)}, a network for each chain; None: around the model's initial values."""
        plain = linear_layer(model) is not None or not isinstance(data.x_train, Tensor)
        if self.start == "jitter" or (self.start is None and plain):
            return None
        data = replace(data, x_val=data.x_val[:0], y_val=data.y_val[:0])  # validation rows may calibrate
        return optimised(model, data, self.chains, run, temperature=self.temperature, **by_rule(model, data, run.seed))


@dataclass(frozen=True)
class SGHMC(StochasticGradient):
    """Settings of stochastic-gradient Hamiltonian Monte Carlo.

    friction  α in (0, 1]: the share of the momentum that a step loses
    """

    former: ClassVar[Mapping[str, Any]] = {
        **StochasticGradient.former, "gradient_noise": "reshuffled", "resample_momentum": 0,
    }  # fmt: skip
    friction: float = setting(0.05, above=0, high=1)


@dataclass(frozen=True)
class SGLD(StochasticGradient):
    """Settings of stochastic-gradient Langevin dynamics: w ← w − (η/2)·∇Ũ + Normal(0, η), η = lr/N.

    Welling & Teh 2011. It is SGHMC without momentum (friction 1) at half the η, and needs 1/√(ηλ) times as many steps.
    """

    tiny: ClassVar[Mapping[str, Any]] = {**StochasticGradient.tiny, "lr": 0.15, "epochs": 3000, "burn_in": 1000}
    friction: ClassVar[float] = 1.0
    eta_share: ClassVar[float] = 0.5
