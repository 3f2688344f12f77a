"""Minimising -ELBO over mini-batches: the loop that SVI and the point estimates share.

By Adam (Kingma & Ba 2015, arXiv:1412.6980); the learning rate falls by a cosine, so that noise in the gradient is
averaged away at the end. Settings left out follow a rule (``inference.schedule``): without ``epochs`` the rate falls
once the ELBO has settled. Every step is a function of (parameters, optimiser state, generator state, step number), so a
checkpoint made between any two steps goes on to the very same result.

Where the fit has several processes (torchrun), each step's rows are divided among them. With R ranks, rank r's
objective is R · N/B · Σ_{its rows} log p(y | x, w_r) − KL, w_r drawn with noise of its own: the mean over the ranks
estimates the same ELBO as one process does.
"""

import itertools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import pyro
import torch
from torch import Tensor, nn

from bnn_pyro.checkpoint import Run
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.distributed import here
from bnn_pyro.errors import FitFailed, UserError
from bnn_pyro.inference.early_stopping import EarlyStopping, GuideStopping, default_patience, hold_out
from bnn_pyro.inference.log_joint import Objective
from bnn_pyro.inference.mini_batches import Augmentation, MiniBatches, Step
from bnn_pyro.inference.schedule import schedule, settled
from bnn_pyro.isolation import generator_state, set_generator_state, set_stream
from bnn_pyro.parts.guides import MeanFieldNormal
from bnn_pyro.parts.nets import in_mode
from bnn_pyro.posterior import model_buffers
from bnn_pyro.settings import Settings, plain, setting

Trace = dict[str, list[float]]  # a column of numbers by its name, such as epoch and elbo


@dataclass(frozen=True)
class Optimisation(Settings):
    """Settings of stochastic gradient descent; those left out follow the rule of ``inference.schedule``.

    epochs      passes over the training rows; by rule until the objective has settled
    batch_size  rows a step, by rule all of up to 512; 0 takes all rows in every step
    lr          the first learning rate, by rule of the number of weights; it falls by a cosine to ``final_lr``·lr
    final_lr    the last learning rate as a share of the first
    patience    epochs without a better NLL of held-out rows (of a q: clearly worse ones) after which training stops,
                with what the best had; by a rule for points, and any q of a network of one's own. The rows are the
                validation rows, or 15 % of the training rows where the data have none. 0: train all epochs
    augment     draws another input from each training input in each step: a function of one in its own units (pixels in
                [0, 1]), such as a transform of torchvision; or package.module:function
    workers     processes that read and augment mini-batches ahead of the steps; with 0 it is done between them
    """

    former: ClassVar[Mapping[str, Any]] = {"optimiser": "adam"}
    #: Several processes can share one fit; its mini-batches may come from a file; and it takes ``max_minutes``.
    divisible: ClassVar[bool] = True
    streams: ClassVar[bool] = True
    timed: ClassVar[bool] = True
    incidental: ClassVar[tuple[str, ...]] = ("workers",)
    tiny: ClassVar[Mapping[str, Any]] = {"epochs": 400, "batch_size": 0, "lr": 0.05, "final_lr": 0.0, "patience": 0}

    epochs: int | None = setting(None, low=1, optional=True)
    batch_size: int | None = setting(None, low=0, optional=True)
    lr: float | None = setting(None, above=0, optional=True)
    final_lr: float = setting(0.01, low=0, high=1)
    patience: int | None = setting(None, low=0, optional=True)
    augment: Any = setting(None, optional=True)  # noqa: RUF009 (a field of any type)
    workers: int = setting(0, low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if callable(self.augment):
            object.__setattr__(self, "augment", Augmentation(self.augment))

    def held_out(self, model: nn.Module, data: Dataset, seed: int) -> tuple[Dataset, int]:
        """(data whose validation rows stop the training, patience; 0: none do). Raises UserError for too few rows."""
        if self.patience == 0 or (self.patience is None and not self.stops_early(model)):
            return data, 0
        apart = hold_out(data, seed)
        if self.patience and not len(apart.x_val):
            raise UserError(f"early stopping (patience {self.patience}) needs validation rows, and of {data.name}'s "
                            f"{len(data.x_train)} training rows none can be held out: set patience to 0")  # fmt: skip
        patience = self.patience or default_patience(apart, self.resolved(model, apart).batch_size)
        return (apart, patience) if patience else (data, 0)

    def stops_early(self, model: nn.Module) -> bool:
        """Whether held-out rows stop the training by rule."""
        return True

    def resolved(self, model: nn.Module, data: Dataset) -> Self:
        """These settings with every number in them; ``epochs`` is then the most."""
        weights = sum(value.numel() for value in model.initial.values())
        rule = schedule(len(data.x_train), weights)._asdict()
        return replace(self, **{name: value for name, value in rule.items() if getattr(self, name) is None})

    def chosen(self, model: nn.Module, data: Dataset, trace: Trace, over: str) -> dict[str, Any]:
        """For the provenance, what the rule chose for the settings left out, what rows stopped the training, and why
        the fit ended before its end.
        """
        apart, patience = self.held_out(model, data, 0)
        rule = plain(self.resolved(model, apart)) | {"epochs": round(trace["epoch"][-1])}
        chosen = {k: rule[k] for k in ("epochs", "batch_size", "lr") if getattr(self, k) is None}
        if over:
            warnings.warn(f"{over}: the weights of then are kept", stacklevel=4)
        of = "validation rows" if len(data.x_val) else f"of {len(data.x_train)} training rows"
        about = {"early_stopping": {"rows": len(apart.x_val), "of": of, "patience": patience}} if patience else {}
        return ({"schedule": chosen} if chosen else {}) | ({"stopped": over} if over else {}) | about

    def minimise(self, model: nn.Module, guide: nn.Module, data: Dataset, run: Run, **how: Any) -> tuple[Trace, str]:
        """Fit ``guide``, see :class:`Training`: (trace, as ``Run.take``). Raises UserError where it is not finite."""
        training = Training(self, model, guide, data, run.seed, **how)
        over = run.take(training)
        if training.since:  # it was over within a line of the trace
            training.record()
        if training.watch is not None:
            training.watch.finish()
        training.check_guide()
        return training.trace, over


@dataclass
class Training:
    """A fit between two steps. The model is in training mode in them, where dropout draws its masks.

    seed           of the order of mini-batches
    latent         what the KL is multiplied by
    num_particles  draws of w that estimate the ELBO in a step
    watch          an ``EarlyStopping``: adds ``validation_nll`` to the trace, says when to stop, has the best weights
    """

    settings: Optimisation
    model: nn.Module
    guide: nn.Module
    data: Dataset
    seed: int = 0
    latent: float = 1.0
    num_particles: int = 1
    watch: Any = None

    def __post_init__(self) -> None:
        #: The step after which the learning rate falls; None until the objective has settled.
        self.decay: int | None = None if self.settings.epochs is None else 0
        settings = self.settings = self.settings.resolved(self.model, self.data)
        self.x, self.y, self.ranks = self.data.x_train, self.data.y_train, here()
        num, size = len(self.x), settings.batch_size
        self.objective = self.ranks.averaged(Objective(self.model, self.guide, self.num_particles))
        self.optimiser = torch.optim.Adam(self.guide.parameters(), lr=settings.lr, fused=True)
        self.per_epoch = math.ceil(num / size) if 0 < size < num else 1
        self.total = self.per_epoch * settings.epochs
        self.window = self.per_epoch * math.ceil(settings.epochs / 1000)  # steps that make one line of the trace
        self.first = self.step = self.since = 0
        self.jointly_drawn = [part for part in self.guide.modules() if isinstance(part, MeanFieldNormal)]
        names = ["epoch", "elbo", "log_likelihood", "kl", *([] if self.watch is None else ["validation_nll"])]
        self.trace: Trace = {name: [] for name in names}
        # Of the steps since the last line, in one tensor: many small ones would keep the allocator from freeing.
        self.figures = torch.empty(self.window, 2, dtype=torch.float64, device=self.x.device)
        if self.ranks.rank:
            set_stream(self.seed, self.ranks.rank, 0)

    def steps(self) -> Iterator[dict[str, float] | None]:
        """Those that are left, and what to show after a line of the trace."""
        batches = MiniBatches(self.data, self.seed, self.settings.augment)
        loaded = batches.load(self.rows_of_steps(), self.settings.workers)
        while self.step < self.total and not (self.watch is not None and self.decay is not None and self._over()):
            self.advance(*next(loaded))
            yield self.record() if self.step % self.window == 0 or self.step == self.total else None

    def rows_of_steps(self) -> Iterator[Step]:
        """Rows of each step that is left; an epoch's order is a function of (seed, epoch) alone, as resuming needs."""
        start = self.step
        for epoch in itertools.count(start // self.per_epoch):
            parts = [slice(None)]
            if self.per_epoch > 1:
                generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
                order = torch.randperm(len(self.x), generator=generator)
                parts = order.to(self.x.device).tensor_split(self.per_epoch)
            first = epoch * self.per_epoch
            yield from ((first + i, rows) for i, rows in enumerate(parts) if first + i >= start)

    def advance(self, x: Tensor, y: Tensor) -> None:
        """One step. Raises UserError where the likelihood is given parameters that are not finite."""
        settings, first = self.settings, self.step if self.decay is None else self.decay
        progress = (self.step - first) / (self.total - first)
        decay = settings.final_lr + (1 - settings.final_lr) * 0.5 * (1 + math.cos(math.pi * progress))
        for group in self.optimiser.param_groups:
            group["lr"] = settings.lr * decay
        for part in self.jointly_drawn:
            part.clear_gradients()
        self.optimiser.zero_grad(set_to_none=True)  # before the forward pass, which needs the memory
        # Pyro's checks of shapes and supports tell what is wrong with a model in its first step.
        checks = nullcontext() if self.step == self.first else pyro.validation_enabled(False)
        try:
            with checks, in_mode(self.model, training=True):
                batch = self.ranks.share_of_step(x, y, len(self.x))
                objective, log_likelihood = self.objective(*batch, self.latent)
        except ValueError as refused:  # a likelihood is refused its NaN parameters before there is a loss
            if "constraint" not in str(refused):
                raise
            raise diverged("loss became nan at", self.step + 1, settings.lr) from None
        (-objective).backward()
        self.optimiser.step()
        self.figures[self.since, 0], self.figures[self.since, 1] = objective.detach(), log_likelihood
        self.step, self.since = self.step + 1, self.since + 1

    def record(self) -> dict[str, float]:
        """Add a line to the trace; what to show of it."""
        elbo, likelihood = self._recent().mean(0).tolist()
        line = [self.step / self.per_epoch, elbo, likelihood, likelihood - elbo]
        figures = {"ELBO/N": elbo / len(self.x)}
        if self.watch is not None:
            figures["validation NLL"] = self.watch.score(self.ranks)
            self.watch.seen(line[0], figures["validation NLL"])
            line.append(figures["validation NLL"])
        for name, value in zip(self.trace, line, strict=True):
            self.trace[name].append(value)
        self.since = 0
        if self.decay is None and (3 * self.step >= 2 * self.total or self._settled()):
            if isinstance(self.watch, GuideStopping):
                self.watch.go_back()
            self._decay_from(self.step)
        return figures

    def _settled(self) -> bool:
        over = self.watch is not None and self._over()
        return over or (type(self.watch) is not EarlyStopping and settled(self.trace["elbo"], len(self.x)))

    def _over(self) -> bool:  # patience begins anew where the learning rate falls
        return self.watch.enough(self.trace["epoch"], (self.decay or 0) / self.per_epoch)

    def _decay_from(self, step: int) -> None:  # the learning rate falls, for half as many steps as there were
        self.decay, self.total = step, step + self.window * math.ceil(step / self.window / 2)

    def _recent(self) -> Tensor:
        """(steps, 2) since the last line of the trace, means over the ranks. Raises UserError where not finite."""
        figures = self.ranks.total(self.figures[: self.since]) / self.ranks.size
        check_finite(figures, self.step, self.settings.lr)
        return figures

    def check_guide(self) -> None:
        """Raises UserError where a parameter is not finite, or not the same on all ranks."""
        with self.ranks.agreed():
            # A finite loss can have a gradient that is not: its harm shows in the weights, before the next loss.
            if not all(bool(torch.isfinite(p).all()) for p in self.guide.parameters()):
                raise diverged("weights stopped being finite at", self.step, self.settings.lr)
        self.ranks.check_alike(self.guide, f"after step {self.step:,}")

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold. Raises UserError where something is not finite."""
        figures = self._recent()
        self.check_guide()
        generators = self.ranks.gather(generator_state())
        learned = {"guide": self.guide.state_dict(), "optimiser": self.optimiser.state_dict()}
        recent = figures.clone()  # of a part, the whole would be saved
        watch = None if self.watch is None else self.watch.state
        return dict(learned, buffers=model_buffers(self.model), generators=generators[0], others=generators[1:],
                    step=self.step, decay=self.decay, trace=self.trace, recent=recent, watch=watch)  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        self.guide.load_state_dict(state["guide"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.model.load_state_dict(state.get("buffers", {}), strict=False)
        self.first = self.step = state["step"]
        if decay := state.get("decay"):
            self._decay_from(decay)
        self.trace, self.since = state["trace"], len(state["recent"])
        self.figures[: self.since] = state["recent"]
        if self.watch is not None:
            self.watch.state = state["watch"]
        generators = [state["generators"], *state.get("others", ())]
        if self.ranks.rank < len(generators):
            set_generator_state(generators[self.ranks.rank])
        else:  # it was saved by fewer ranks
            set_stream(self.seed, self.ranks.rank, self.step)


def check_finite(recent: Sequence[Tensor] | Tensor, step: int, lr: float) -> None:
    """Raise UserError where the first figure of a line of ``recent`` is not finite, the last of them of this step."""
    bad = [i for i, parts in enumerate(recent) if not bool(torch.isfinite(parts[0]))]
    if bad:
        raise diverged(f"loss became {recent[bad[0]][0].item()} at", step - len(recent) + bad[0] + 1, lr)


def diverged(what: str, step: int, lr: float) -> FitFailed:
    """The error that says so, with what to do."""
    return FitFailed(
        f"the {what} step {step} (lr {lr}); the last good checkpoint, if any, is kept: "
        f"try a smaller --lr, such as {lr / 10:g}"
    )
