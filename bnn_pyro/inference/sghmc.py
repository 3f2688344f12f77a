"""Stochastic-gradient HMC and Langevin dynamics: an ensemble of draws at the price of a few trainings.

    v ← (1 − α)·v − η·∇Ũ(w) + Normal(0, 2αη)        w ← w + v        Ũ = −log p(w) − (1/T)·(N/B)·Σ log p(y | x, w)

over mini-batches of B of the N rows, several chains at once (Chen, Fox & Guestrin 2014, arXiv:1402.4102, equation 15).
Positions move with the *new* momentum. The target is p(y | x, w)^(1/T)·p(w), up to a bias that vanishes with η.

How to choose lr (η = lr/N, so that it is a step on the mean over the rows, as in gradient descent). In a direction of
posterior variance 1/λ the variance of full-batch draws is too large by 1/(1 − ηλ/(4 − 2α)). The kinetic temperature
that is shown, mean v²·(1 − α/2)/η over the weights, is the mean of just these factors: 1.02 says that variances are 2 %
too large on average, standard deviations 1 %. Slow directions need about 2α/(ηλ) steps for an independent draw. So:
raise lr until that temperature leaves 1 by more than you allow, and look at R-hat for whether the run was long enough.
Measured on linear regression (docs/results/sghmc.md, α = 0.1), standard deviations are within 0.5 % of exact up to
ηλ = 0.3 for the largest λ; the explicit form, w ← w + the old v, is off by 1 to 8 % from 0.02 to 0.06, then explodes.

Mini-batches ask for a smaller step. Every epoch takes each row once, so that the noises of an epoch sum to zero and
slow directions hardly feel them: standard deviations were 0 to 2 % too large up to ηλ·N/B = 4α and 6 % at 6α, while the
momenta, which do feel them, were at 1.35 and 1.7: the temperature is a warning here, not a measure of the bias.
``gradient_noise="subtracted"`` is the paper's way: batches are drawn independently, the variance V̂ of their gradients
is estimated in the burn-in, weight by weight, and η²V̂ is taken off what is injected (never below 0). With correlated
inputs that leaves soft directions too cold: 10 % too narrow where ignoring the noise is 8 % too wide and reshuffling is
right within 0.5 %. SGLD takes ten times the lr for the same bias, and still needs more steps for an independent draw.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pyro
import torch
from torch import Tensor, nn

from bnn_pyro.checkpoint import Checkpoint, Interrupted
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.errors import UserError, unknown
from bnn_pyro.inference.method import Report
from bnn_pyro.inference.optimise import _check_finite, _diverged
from bnn_pyro.inference.sg_chains import Batches, Stored, Target, momentum_variance, scores, step
from bnn_pyro.inference.sg_schedule import Plan, parse_schedule
from bnn_pyro.isolation import generator_state, set_generator_state
from bnn_pyro.parts.nets import in_mode
from bnn_pyro.posterior import Posterior, weight_space

__all__ = ["SGHMC", "SGLD"]

#: What becomes of the noise of mini-batch gradients.
GRADIENT_NOISE = ("reshuffled", "subtracted", "ignored")
#: Steps of the burn-in between two estimates of it, and the weight of the newest in their running mean.
ESTIMATE_EVERY, ESTIMATE_WEIGHT = 4, 0.01


@dataclass(frozen=True)
class _StochasticGradient:
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
    tiny: ClassVar[Mapping[str, Any]] = {"chains": 128, "lr": 0.02, "jitter": 1.0, "epochs": 1500, "burn_in": 400}
    limit: ClassVar[str] = "posterior at step size 0"
    epochs: int = 5000
    batch_size: int = 0
    lr: float = 0.01
    chains: int = 4
    burn_in: int | None = None
    schedule: str = "constant"
    thin: int = 0
    max_draws: int = 100
    resample_prior: int = 10
    jitter: float = 0.5
    temperature: float = 1.0

    #: The same for every method of this family; SGHMC has them as settings.
    friction: ClassVar[float]
    gradient_noise: ClassVar[str]
    resample_momentum: ClassVar[int]
    #: η as a share of lr/N.
    eta_share: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        for name, low in dict(epochs=1, batch_size=0, chains=1, thin=0, max_draws=1, resample_prior=0).items():
            if getattr(self, name) < low:
                raise UserError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if self.burn_in is not None and not 0 <= self.burn_in < self.epochs:
            raise UserError(f"burn_in must lie between 0 and the {self.epochs} epochs (excluded), got {self.burn_in}")
        for name in ("lr", "temperature"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name} must be positive and finite, got {getattr(self, name)}")
        if not 0 <= self.jitter < math.inf:
            raise UserError(f"jitter must be 0 or positive, got {self.jitter}")
        parse_schedule(self.schedule)

    def run(
        self,
        model: nn.Module,
        guide: nn.Module | None,
        data: Dataset,
        *,
        seed: int = 0,
        checkpoint: Checkpoint | None = None,
        report: Report | None = None,
    ) -> Posterior:
        """Sample the posterior; see ``Method.run``. The guide is not used.

        ``stats`` of the posterior, (C, D): log_joint of each draw in nats, as the mini-batch of its step estimates it.
        ``trace``, a line an epoch: step_size (as lr), kinetic_temperature and log_joint (means over chains and steps),
        draws (stored, all chains), validation_nll (of the ensemble so far; before the first draw, of the chains as
        they are).
        """
        model = weight_space(model)
        with in_mode(model, training=False):
            run = _Run(self, model, data, seed)
            if checkpoint is not None and (state := checkpoint.load()) is not None:
                run.load_state_dict(state)
            with pyro.validation_enabled(False):
                for x, y in run.batches.steps(run.done, run.total):
                    run.advance(x, y)
                    if run.done % run.window == 0 or run.done == run.total:
                        figures = run.record()
                        if report is not None:
                            report(run.done, run.total, figures)
                    if checkpoint is not None and checkpoint.due:
                        checkpoint.save(run.state_dict())
                        if checkpoint.stop:
                            raise Interrupted(f"stopped after step {run.done:,} of {run.total:,}")
        draws = torch.stack(run.ensemble.draws, 1)
        stats = {"log_joint": torch.stack(run.ensemble.log_joint, 1)}
        return Posterior(model, data.schema, chains=run.target.sites(draws), stats=stats, trace=run.trace)


@dataclass(frozen=True)
class SGHMC(_StochasticGradient):
    """Settings of stochastic-gradient Hamiltonian Monte Carlo.

    friction           α in (0, 1]: the share of the momentum that a step loses
    gradient_noise     of mini-batches: reshuffled (every epoch takes each row once), subtracted (independent batches,
                       the estimated variance taken off what is injected) or ignored (independent batches)
    resample_momentum  steps between two fresh draws of the momentum; 0: never
    """

    friction: float = 0.05
    gradient_noise: str = "reshuffled"
    resample_momentum: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.friction <= 1:
            raise UserError(f"friction must lie between 0 (excluded) and 1, got {self.friction}")
        if self.gradient_noise not in GRADIENT_NOISE:
            raise unknown("gradient_noise", self.gradient_noise, GRADIENT_NOISE)
        if self.gradient_noise == "subtracted" and self.burn_in == 0 and self.batch_size:
            raise UserError("gradient_noise=subtracted is estimated in the burn-in, and burn_in is 0: give it epochs")
        if self.resample_momentum < 0:
            raise UserError(f"resample_momentum must be at least 0, got {self.resample_momentum}")


@dataclass(frozen=True)
class SGLD(_StochasticGradient):
    """Settings of stochastic-gradient Langevin dynamics: w ← w − (η/2)·∇Ũ + Normal(0, η), η = lr/N.

    Welling & Teh 2011. It is SGHMC at friction 1, which forgets its momentum in every step, at half the η; it needs
    some 1/√(ηλ) times as many steps for an independent draw.
    """

    tiny: ClassVar[Mapping[str, Any]] = {"chains": 128, "lr": 0.15, "jitter": 1.0, "epochs": 3000, "burn_in": 1000}
    friction: ClassVar[float] = 1.0
    gradient_noise: ClassVar[str] = "reshuffled"
    resample_momentum: ClassVar[int] = 0
    eta_share: ClassVar[float] = 0.5


class _Run:
    """A run between two steps."""

    def __init__(self, settings: _StochasticGradient, model: nn.Module, data: Dataset, seed: int) -> None:
        self.settings, self.model, self.x_val, self.y_val = settings, model, data.x_val, data.y_val
        x, y, s = data.x_train, data.y_train, settings
        self.batches = Batches(x, y, s.batch_size, s.chains, seed, s.gradient_noise != "reshuffled")
        per_epoch = self.batches.per_epoch
        self.done, self.total = 0, per_epoch * s.epochs
        self.window = per_epoch * math.ceil(s.epochs / 1000)  # steps that make one line of the trace
        self.burn_in = self.total // 5 if s.burn_in is None else per_epoch * s.burn_in
        self.plan = Plan.make(parse_schedule(s.schedule), self.total, self.burn_in, s.thin, s.max_draws)
        self.target = Target(model, len(x), x.device, s.temperature)
        self.w = self.target.start(s.chains, s.jitter, x, y)
        self.v = self._momentum(self._eta(0))
        self.variance = torch.zeros_like(self.w[0])  # V̂, and of how many estimates it is the mean
        self.estimates = 0
        self.precision: dict[str, Tensor] = self.target.draw_precisions(self.w) if s.resample_prior else {}
        self.ensemble = Stored(s.max_draws)
        self.recent: list[Tensor] = []
        names = ["epoch", "step_size", "kinetic_temperature", "log_joint", "draws"]
        self.trace: dict[str, list[float]] = {n: [] for n in [*names, *(["validation_nll"] if len(self.x_val) else [])]}

    def advance(self, x: Tensor, y: Tensor) -> None:
        """One step of every chain, before which a draw is kept where one is due."""
        s, k = self.settings, self.done
        eta = self._eta(k)
        if self.precision and k % s.resample_prior == 0:
            self.precision = self.target.draw_precisions(self.w)
        if s.resample_momentum and k % s.resample_momentum == 0:
            self.v = self._momentum(eta)
        log_joint, gradient = self.target(self.w, x, y, self.precision)
        if self.plan.due(k) and self.ensemble.wants(serial := int(self.plan.serial[k])):
            seen = scores(self.model, self.target.sites(self.w), self.x_val, self.y_val) if len(self.x_val) else None
            self.ensemble.add(serial, self.w, log_joint, seen)
        noise: Tensor | float = 0.0
        if self.plan.samples[k]:
            noise = math.sqrt(2 * s.friction * eta)
            if s.gradient_noise == "subtracted" and not self.batches.full:
                if k < self.burn_in and k % ESTIMATE_EVERY == 0:
                    # Far from the mode gradients are noisier by much: the second half of the burn-in starts afresh.
                    self.estimates = 1 if k - ESTIMATE_EVERY < self.burn_in // 2 <= k else self.estimates + 1
                    found = self.target.gradient_noise(self.w, x, y)
                    self.variance.lerp_(found, max(1 / self.estimates, ESTIMATE_WEIGHT))
                noise = (2 * s.friction * eta - eta**2 * self.variance).clamp_(min=0).sqrt_()
        self.w, self.v = step(self.w, self.v, gradient, eta, s.friction, noise)
        kinetic = self.v.flatten().dot(self.v.flatten()) / (self.v.numel() * momentum_variance(eta, s.friction))
        self.recent.append(torch.stack([log_joint.mean(), kinetic]))
        self.done += 1

    def record(self) -> dict[str, float]:
        """Add a line to the trace; what to show of it. Raises UserError where something is not finite."""
        self._check()
        log_joint, kinetic = torch.stack(self.recent).double().mean(0).tolist()
        self.recent.clear()
        step_size = self.settings.lr * float(self.plan.share[self.done - 1])
        draws = self.settings.chains * len(self.ensemble.draws)
        line = [self.done / self.batches.per_epoch, step_size, kinetic, log_joint, float(draws)]
        figures = {"lr": step_size, "draws": draws, "kinetic T": kinetic}
        if len(self.x_val):
            line.append(self._validation_nll())
            figures["validation NLL"] = line[-1]
        for values, value in zip(self.trace.values(), line, strict=True):
            values.append(value)
        return figures

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold. Raises UserError where something is not finite."""
        self._check()
        return {
            "tensors": {"w": self.w, "v": self.v, "variance": self.variance},
            "precision": self.precision,
            "recent": torch.stack(self.recent) if self.recent else torch.empty(0, 2),
            "ensemble": self.ensemble.state_dict(),
            "estimates": self.estimates,
            "generators": generator_state(),
            "done": self.done,
            "trace": self.trace,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        device = self.w.device
        for name, value in state["tensors"].items():
            setattr(self, name, value.to(device))
        self.precision = {site: value.to(device) for site, value in state["precision"].items()}
        self.recent = list(state["recent"].to(device))
        self.ensemble.load_state_dict(state["ensemble"], device)
        self.estimates, self.done, self.trace = state["estimates"], state["done"], state["trace"]
        set_generator_state(state["generators"])

    def _eta(self, k: int) -> float:
        return self.settings.eta_share * self.settings.lr / len(self.batches.x) * float(self.plan.share[k])

    def _momentum(self, eta: float) -> Tensor:
        return torch.randn_like(self.w) * math.sqrt(momentum_variance(eta, self.settings.friction))

    def _validation_nll(self) -> float:
        if self.ensemble.draws:
            return self.ensemble.validation_nll()
        seen = scores(self.model, self.target.sites(self.w), self.x_val, self.y_val)
        return -(seen - math.log(self.settings.chains)).mean().item()

    def _check(self) -> None:
        _check_finite(self.recent, self.done, self.settings.lr)
        if not bool(torch.isfinite(self.w).all()):
            raise _diverged("weights stopped being finite at", self.done, self.settings.lr)
