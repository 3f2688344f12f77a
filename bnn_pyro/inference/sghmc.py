"""Stochastic-gradient HMC and Langevin dynamics: an ensemble of draws at the price of a few trainings.

    v ← (1 − α)·v − η·∇Ũ(w) + Normal(0, 2αη)        w ← w + v        Ũ = −log p(w) − (1/T)·(N/B)·Σ log p(y | x, w)

over mini-batches of B of the N rows, several chains at once (Chen, Fox & Guestrin 2014, arXiv:1402.4102, equation 15).
Positions move with the *new* momentum. The target is p(y | x, w)^(1/T)·p(w), up to a bias that vanishes with η.

How to choose lr (η = lr/N, so that it is a step on the mean over the rows, as in gradient descent). In a direction of
posterior variance 1/λ the variance of full-batch draws is too large by 1/(1 − ηλ/(4 − 2α)). The kinetic temperature
that is shown, mean v²·(1 − α/2)/η over the weights, is the mean of just these factors: 1.02 says that variances are 2 %
too large on average, standard deviations 1 %. Slow directions need about 2α/(ηλ) steps for an independent draw. So:
raise lr until that temperature leaves 1 by more than you allow, and look at R-hat for whether the run was long enough.

Mini-batches ask for a smaller step. Every epoch takes each row once, so that the noises of an epoch sum to zero and
slow directions hardly feel them: standard deviations were 0 to 2 % too large up to ηλ·N/B = 4α and 6 % at 6α, while the
momenta, which do feel them, were at 1.35 and 1.7: the temperature is a warning here, not a measure of the bias.
Independent batches were worse: 8 % too wide where this is right within 0.5 %, and 10 % too narrow where the estimated
variance of their gradients was taken off the injected noise, as the paper has it (docs/results/sghmc.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pyro
import torch
from torch import Tensor, nn

from bnn_pyro.checkpoint import Run
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.errors import UserError
from bnn_pyro.inference.linear import stochastic_log_joint
from bnn_pyro.inference.log_joint import LogJoint
from bnn_pyro.inference.optimise import check_finite, diverged
from bnn_pyro.inference.potential import log_likelihood
from bnn_pyro.inference.sg_chains import Batches, Plan, Stored, parse_schedule
from bnn_pyro.isolation import generator_state, set_generator_state
from bnn_pyro.parts.nets import in_mode
from bnn_pyro.parts.priors import GammaNormal
from bnn_pyro.parts.weights import cut
from bnn_pyro.posterior import Posterior, weight_space
from bnn_pyro.settings import Settings, setting

#: What runs of earlier versions may have for ``gradient_noise``.
FORMER_NOISE = ("subtracted", "ignored")


def step(w: Tensor, v: Tensor, gradient: Tensor, eta: float, friction: float, noise: float) -> tuple[Tensor, Tensor]:
    """v' = (1 − friction)·v + eta·gradient + noise·Normal(0, 1),  w' = w + v'.

    gradient: of the log joint.   noise: √(2·friction·eta) in a step that samples, 0 in one that optimises.
    """
    v = v.mul(1 - friction).add_(gradient, alpha=eta)
    if noise:
        v.add_(torch.randn_like(v), alpha=noise)
    return w + v, v


def condition(gradient: Tensor, log_joint: LogJoint, w: Tensor, precision: Mapping[str, Tensor]) -> None:
    """Make the gradient (C, P) of log π at w that of the conditional, in place: −τ w for −E[τ | w] w at Gamma priors.

    precision: {site: τ (C,)}.
    """
    parts, sites = cut(gradient, log_joint.free), log_joint.sites(w)
    for site, tau in precision.items():
        change = log_joint.priors[site].precision_given(sites[site]).mean - tau
        parts[site].addcmul_(change.view(-1, *(1 for _ in log_joint.free[site])), sites[site])


class Chains:
    """C chains between two steps; w and v are (C, P): a step is one normal draw and a few passes over memory."""

    def __init__(self, settings: StochasticGradient, model: nn.Module, data: Dataset, seed: int) -> None:
        self.settings, self.x_val, self.y_val = (s := settings), data.x_val, data.y_val
        if s.gradient_noise in FORMER_NOISE:
            about = "was measured to be further off the posterior than reshuffled, and is no longer offered"
            raise UserError(f"gradient_noise={s.gradient_noise} {about}; runs made with it are still read")
        self.batches = Batches(data.x_train, data.y_train, s.batch_size, s.chains, seed)
        self.step, self.total = 0, (per_epoch := self.batches.per_epoch) * s.epochs
        self.window = per_epoch * math.ceil(s.epochs / 1000)  # steps that make one line of the trace
        burn_in = self.total // 5 if s.burn_in is None else per_epoch * s.burn_in
        self.plan = Plan.make(parse_schedule(s.schedule), self.total, burn_in, s.thin, s.max_draws)
        self.log_joint = stochastic_log_joint(model, data.x_train, data.y_train, s.temperature)
        a, b = (self.log_joint.flat(w) for w in self.log_joint.sample_prior(s.chains, s.chains))
        # The difference of two draws has mean 0 and twice the variance of the prior.
        self.w = self.log_joint.initial.to(a) + s.jitter / math.sqrt(2) * (a - b)
        self.v = self._momentum(self._eta(0))
        self.precision = self._precisions() if s.resample_prior else {}
        self.stored = Stored(s.max_draws)
        self.recent: list[Tensor] = []
        names = ["epoch", "step_size", "kinetic_temperature", "log_joint", "draws"]
        self.trace: dict[str, list[float]] = {n: [] for n in [*names, *(["validation_nll"] if len(self.x_val) else [])]}

    def steps(self) -> Iterator[dict[str, float] | None]:
        """Those that are left, and what to show after an epoch."""
        for x, y in self.batches.steps(self.step, self.total):
            self.advance(x, y)
            yield self.record() if self.step % self.window == 0 or self.step == self.total else None

    def advance(self, x: Tensor, y: Tensor) -> None:
        """One step of every chain, before which a draw is kept where one is due."""
        s, k = self.settings, self.step
        eta = self._eta(k)
        if self.precision and k % s.resample_prior == 0:
            self.precision = self._precisions()
        if s.resample_momentum and k % s.resample_momentum == 0:
            self.v = self._momentum(eta)
        log_joint, gradient = self.log_joint.gradient(self.w, x, y)
        condition(gradient, self.log_joint, self.w, self.precision)
        if self.plan.due[k] and self.stored.wants(int(self.plan.serial[k])):
            self.stored.add(self.w, log_joint, *([self._scores()] if len(self.x_val) else []))
        noise = math.sqrt(2 * s.friction * eta) if self.plan.samples[k] else 0.0
        self.w, self.v = step(self.w, self.v, gradient, eta, s.friction, noise)
        kinetic = self.v.flatten().dot(self.v.flatten()) / (self.v.numel() * self._momentum_variance(eta))
        self.recent.append(torch.stack([log_joint.mean(), kinetic]))
        self.step += 1

    def start_at(self, w: dict[str, Tensor]) -> None:
        """Go on from other weights, {site: (C, *shape)}."""
        self.w = self.log_joint.flat(w)
        self.precision = self._precisions() if self.precision else {}

    def record(self) -> dict[str, float]:
        """Add a line to the trace; what to show of it. Raises UserError where something is not finite."""
        self._check()
        log_joint, kinetic = torch.stack(self.recent).double().mean(0).tolist()
        self.recent.clear()
        step_size = self.settings.lr * float(self.plan.share[self.step - 1])
        draws = self.settings.chains * len(self.stored.draws)
        line = [self.step / self.batches.per_epoch, step_size, kinetic, log_joint, float(draws)]
        figures = {"lr": step_size, "draws": draws, "kinetic T": kinetic}
        if len(self.x_val):
            figures["validation NLL"] = self.stored.validation_nll(self._scores, self.settings.chains)
            line.append(figures["validation NLL"])
        for values, value in zip(self.trace.values(), line, strict=True):
            values.append(value)
        return figures

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold. Raises UserError where something is not finite."""
        self._check()
        recent = torch.stack(self.recent) if self.recent else torch.empty(0, 2)
        chains = {"tensors": {"w": self.w, "v": self.v}, "precision": self.precision, "recent": recent}
        results = {"ensemble": self.stored.state_dict(), "trace": self.trace}
        return {**chains, **results, "generators": generator_state(), "done": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        device = self.w.device
        self.w, self.v = (state["tensors"][name].to(device) for name in ("w", "v"))
        self.precision = {site: value.to(device) for site, value in state["precision"].items()}
        self.recent = list(state["recent"].to(device))
        self.stored.load_state_dict(state["ensemble"], device)
        self.step, self.trace = state["done"], state["trace"]
        set_generator_state(state["generators"])

    def _eta(self, k: int) -> float:
        return self.settings.eta_share * self.settings.lr / len(self.batches.x) * float(self.plan.share[k])

    def _momentum_variance(self, eta: float) -> float:
        return eta / (1 - self.settings.friction / 2)  # in stationarity, in the limit of small steps

    def _momentum(self, eta: float) -> Tensor:
        return torch.randn_like(self.w) * math.sqrt(self._momentum_variance(eta))

    def _precisions(self) -> dict[str, Tensor]:
        """{site: (C,)}: the precision of every Gamma prior, drawn from its exact conditional given w."""
        sites, priors = self.log_joint.sites(self.w), self.log_joint.priors
        return {s: p.precision_given(sites[s]).sample() for s, p in priors.items() if isinstance(p, GammaNormal)}

    def _scores(self) -> Tensor:
        """log Σ_c p(y_n | x_n, w_c) of the validation rows, (B,)."""
        log_probs = log_likelihood(self.log_joint.model, self.log_joint.sites(self.w), self.x_val, self.y_val)
        return log_probs.logsumexp(0)

    def _check(self) -> None:
        check_finite(self.recent, self.step, self.settings.lr)
        if not bool(torch.isfinite(self.w).all()):
            raise diverged("weights stopped being finite at", self.step, self.settings.lr)


@dataclass(frozen=True)
class StochasticGradient(Settings):
    """Settings that SGHMC and SGLD share.

    epochs          passes over the training rows
    batch_size      rows a step; 0 takes all rows in every step
    lr              step size on the mean over the rows; see above
    chains          independent chains, all at once, each with mini-batches of its own
    burn_in         epochs before the first draw; none given: a fifth of all
    schedule        constant, decaying:FINAL,POWER or cyclical:CYCLES,EXPLORE: step sizes over the run. Draws weigh the
                    same, so they are taken at equal increments of simulated time Ση, not of steps
    thin            sampling steps between two draws, on average; 0: as fits max_draws
    max_draws       stored draws of a chain at most; where they are reached, every second one is dropped and the
                    interval doubles
    resample_prior  steps between two draws of the precision of every Gamma prior from its exact conditional;
                    0: never, it is integrated out, which has the same posterior
    jitter          how far apart chains start, in standard deviations of the prior around the model's initial values
    temperature     T: p(y | x, w)^(1/T) p(w) is sampled; 1 is Bayes, less is a cold posterior and is reported as such
    """

    converges_to: ClassVar[str] = "exact as lr → 0"
    needs: ClassVar[frozenset[str]] = frozenset({"weights", "proper prior"})
    streams: ClassVar[bool] = True
    tiny: ClassVar[Mapping[str, Any]] = {"chains": 128, "lr": 0.02, "jitter": 1.0, "epochs": 1500, "burn_in": 400}
    epochs: int = setting(5000, low=1)
    batch_size: int = setting(0, low=0)
    lr: float = setting(0.01, above=0)
    chains: int = setting(4, low=1)
    burn_in: int | None = setting(None, low=0)
    schedule: str = setting("constant", parse=parse_schedule)
    thin: int = setting(0, low=0)
    max_draws: int = setting(100, low=1)
    resample_prior: int = setting(10, low=0)
    jitter: float = setting(0.5, low=0)
    temperature: float = setting(1.0, above=0)

    #: The same for every method of this family; SGHMC has them as settings.
    friction: ClassVar[float]
    gradient_noise: ClassVar[str] = "reshuffled"
    resample_momentum: ClassVar[int]
    #: η as a share of lr/N.
    eta_share: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.burn_in is not None and self.burn_in >= self.epochs:
            raise UserError(f"burn_in must lie between 0 and the {self.epochs} epochs (excluded), got {self.burn_in}")

    def run(self, model: nn.Module, guide: nn.Module | None, data: Dataset, **how: Any) -> Posterior:
        """Sample the posterior; see ``Method.run``. The guide is not used.

        ``stats`` of the posterior, (C, D): log_joint of each draw in nats, as the mini-batch of its step estimates it.
        ``trace``, a line an epoch: step_size (as lr), kinetic_temperature and log_joint (means over chains and steps),
        draws (stored, all chains), validation_nll (of the ensemble so far, or of the chains as they are).
        """
        model, run = weight_space(model), Run(**how)
        with in_mode(model, training=False):
            chains = Chains(self, model, data, run.seed)
            with pyro.validation_enabled(False):
                run.take(chains)
        w, log_joint, *_ = (torch.stack(column, 1) for column in zip(*chains.stored.draws, strict=True))
        draws, stats = chains.log_joint.sites(w), {"log_joint": log_joint}
        return Posterior(model, data.schema, chains=draws, stats=stats, trace=chains.trace)


@dataclass(frozen=True)
class SGHMC(StochasticGradient):
    """Settings of stochastic-gradient Hamiltonian Monte Carlo.

    friction           α in (0, 1]: the share of the momentum that a step loses
    gradient_noise     reshuffled: every epoch takes each row once; no other choice any more
    resample_momentum  steps between two fresh draws of the momentum; 0: never
    """

    friction: float = setting(0.05, above=0, high=1)
    gradient_noise: str = setting("reshuffled", choices=("reshuffled", *FORMER_NOISE))
    resample_momentum: int = setting(0, low=0)


@dataclass(frozen=True)
class SGLD(StochasticGradient):
    """Settings of stochastic-gradient Langevin dynamics: w ← w − (η/2)·∇Ũ + Normal(0, η), η = lr/N.

    Welling & Teh 2011. It is SGHMC at friction 1, which forgets its momentum in every step, at half the η; it needs
    some 1/√(ηλ) times as many steps for an independent draw.
    """

    tiny: ClassVar[Mapping[str, Any]] = {"chains": 128, "lr": 0.15, "jitter": 1.0, "epochs": 3000, "burn_in": 1000}
    friction: ClassVar[float] = 1.0
    resample_momentum: ClassVar[int] = 0
    eta_share: ClassVar[float] = 0.5
