"""Minimising -ELBO over mini-batches: the loop that SVI and the point estimates share.

The learning rate falls by a cosine: noise in the gradient is averaged away at the end instead of left in the answer.
Every step is a function of (parameters, optimiser state, generator state, step number), so a checkpoint made between
any two steps goes on to the very same result.

Where the fit has several processes (torchrun), each step's rows are divided among them. With R ranks, rank r's
objective is R · N/B · Σ_{its rows} log p(y | x, w_r) − KL, w_r drawn with noise of its own, so that the mean over the
ranks estimates the same ELBO as one process does, also where their shares differ in size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar

import pyro
import torch
from torch import Tensor, nn

from bnn_pyro.checkpoint import Checkpoint, Interrupted
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.distributed import Ranks, here
from bnn_pyro.errors import UserError
from bnn_pyro.inference.early_stopping import EarlyStopping
from bnn_pyro.inference.elbo import ELBO
from bnn_pyro.inference.log_joint import Rescale
from bnn_pyro.inference.method import Report
from bnn_pyro.inference.optimisers import parse_optimiser
from bnn_pyro.isolation import generator_state, set_generator_state, set_stream
from bnn_pyro.parts.nets import in_mode
from bnn_pyro.posterior import model_buffers
from bnn_pyro.settings import Settings, setting

__all__ = ["Optimisation", "check_finite", "diverged"]

#: Seconds between two agreements of several processes on whether to save or to stop.
AGREE = 1.0


@dataclass(frozen=True)
class Optimisation(Settings):
    """Settings of stochastic gradient descent.

    epochs      passes over the training rows
    batch_size  rows a step; 0 takes all rows in every step
    lr          the first learning rate; it falls by a cosine to ``final_lr``·lr
    final_lr    the last learning rate as a share of the first
    optimiser   adam, or sgd:MOMENTUM, whose lr is that of the mean over the rows
    """

    #: Several processes can share one fit.
    divisible: ClassVar[bool] = True

    epochs: int = setting(2000, low=1)
    batch_size: int = setting(0, low=0)
    lr: float = setting(0.01, above=0)
    final_lr: float = setting(0.01, low=0, high=1)
    optimiser: str = setting("adam", parse=parse_optimiser)

    def minimise(
        self,
        model: nn.Module,
        guide: nn.Module,
        data: Dataset,
        *,
        seed: int,
        latent: float = 1.0,
        warmup: int = 0,
        num_particles: int = 1,
        project: Callable[[], None] | None = None,
        watch: EarlyStopping | None = None,
        checkpoint: Checkpoint | None = None,
        report: Report | None = None,
    ) -> dict[str, list[float]]:
        """Fit ``guide`` in place and return the trace {epoch, elbo, log_likelihood, kl}, means over the epochs.

        The model is in training mode meanwhile, where dropout draws its masks.
        latent: what the KL is multiplied by, after rising to it from 0 in the first ``warmup`` epochs.
        project: called after every step, to bring the guide's parameters back to where they must stay.
        watch: asked after every line of the trace, to which it adds ``validation_nll``, whether to stop; the weights
            are then those that it found best.

        Raises UserError where the objective stops being finite, and Interrupted after a signal.
        """
        x, y, ranks = data.x_train, data.y_train, here()
        trained = ranks.averaged(_Objective(model, guide, num_particles))
        optimiser = parse_optimiser(self.optimiser)(guide.parameters(), self.lr, len(x))
        first_lr = optimiser.param_groups[0]["lr"]
        size = self.batch_size if 0 < self.batch_size < len(x) else len(x)
        per_epoch = math.ceil(len(x) / size)
        total = per_epoch * self.epochs
        window = per_epoch * math.ceil(self.epochs / 1000)  # steps that make one line of the trace
        step, trace = 0, {"epoch": [], "elbo": [], "log_likelihood": [], "kl": []}
        if watch is not None:
            trace["validation_nll"] = []
        # Figures of the steps since the last line: in one place, as tensors of their own between those of the steps
        # would keep the allocator from giving any memory back for as long as an epoch takes.
        recent, since = torch.empty(window, 2, dtype=torch.float64, device=x.device), 0
        state = None if checkpoint is None else checkpoint.load()
        if state is not None:
            guide.load_state_dict(state["guide"])
            optimiser.load_state_dict(state["optimiser"])
            model.load_state_dict(state.get("buffers", {}), strict=False)
            step, trace, since = state["step"], state["trace"], len(state["recent"])
            recent[:since] = state["recent"]
            if watch is not None:
                watch.load_state_dict(state["watch"])
        _start_noise(ranks, state, seed, step)

        def figures_since() -> Tensor:
            """(steps, 2) since the last line of the trace, of all ranks."""
            figures = ranks.mean(recent[:since])
            check_finite(figures, step, self.lr)
            return figures

        def check_guide() -> None:
            ranks.all_do(lambda: _check_weights(guide, step, self.lr))
            ranks.check_alike(guide, f"after step {step:,}")

        def save() -> None:
            assert checkpoint is not None
            figures = figures_since()
            check_guide()
            generators = ranks.gather(generator_state())
            state = {
                "guide": guide.state_dict(),
                "optimiser": optimiser.state_dict(),
                "buffers": model_buffers(model),
                "generators": generators[0],
                "others": generators[1:],
                "step": step,
                "trace": trace,
                "recent": figures.clone(),  # of a part, the whole would be saved
                "watch": None if watch is None else watch.state_dict(),
            }
            checkpoint.save(state)

        first, agreed = step, _Agreement(ranks, checkpoint, step)
        for index in _batches(len(x), size, seed, step, total, x.device):
            rows = slice(None) if index is None else index
            x_batch, y_batch = x[rows], y[rows]
            for group in optimiser.param_groups:
                group["lr"] = first_lr * self._decay(step / total)
            weight = latent * min(1.0, (step + 1) / (warmup * per_epoch)) if warmup else latent
            optimiser.zero_grad(set_to_none=True)  # before the forward pass, which needs the memory
            # Pyro's checks of shapes and supports tell what is wrong with a model in its first step.
            checks = nullcontext() if step == first else pyro.validation_enabled(False)
            try:
                with checks, in_mode(model, training=True):
                    objective, log_likelihood = trained(*_share(ranks, x_batch, y_batch, len(x)), weight)
            except ValueError as refused:  # a likelihood is refused its NaN parameters before there is a loss
                if "constraint" not in str(refused):
                    raise
                raise diverged("loss became nan at", step + 1, self.lr) from None
            (-objective).backward()
            optimiser.step()
            if project is not None:
                project()
            step, value = step + 1, objective.detach()
            if weight != latent:  # in the warm-up too, the trace tells of the ELBO with all of its KL
                value = log_likelihood + (value - log_likelihood) * (latent / weight)
            recent[since, 0], recent[since, 1] = value, log_likelihood
            since += 1
            if step % window == 0 or step == total:
                mean, likelihood = figures_since().mean(0).tolist()
                line = [step / per_epoch, mean, likelihood, likelihood - mean]
                figures, enough = {"ELBO/N": mean / len(x)}, False
                if watch is not None:
                    nll, enough = watch.seen(step / per_epoch)
                    line, figures = [*line, nll], figures | {"validation NLL": nll}
                for name, value in zip(trace, line, strict=True):
                    trace[name].append(value)
                since = 0
                if report is not None:
                    report(step, total, figures)
                if enough:
                    break
            due, stop = agreed.after(step)
            if due or stop:
                save()
                if stop:
                    raise Interrupted(f"stopped after step {step:,} of {total:,}")
        if watch is not None:
            watch.restore()
        check_guide()
        return trace

    def _decay(self, progress: float) -> float:
        """Learning rate after a share of the steps, as a share of the first."""
        return self.final_lr + (1 - self.final_lr) * 0.5 * (1 + math.cos(math.pi * progress))


def _batches(num: int, size: int, seed: int, start: int, stop: int, device: torch.device) -> Iterator[Tensor | None]:
    """Row indices of steps start … stop−1; None for all rows. A new random order every epoch.

    The order is a function of (seed, epoch) alone, so that step k has the same rows after a resume.
    """
    if size == num:
        yield from (None for _ in range(start, stop))
        return
    per_epoch = math.ceil(num / size)
    step = start
    while step < stop:
        epoch, first = divmod(step, per_epoch)
        order = torch.randperm(num, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)).to(device)
        for batch in order.tensor_split(per_epoch)[first:]:  # sizes differ by one row at most
            yield batch
            step += 1


class _Objective(nn.Module):
    """(ELBO with its gradient, its likelihood part) of some rows: a module, as gradients are averaged by modules."""

    def __init__(self, model: nn.Module, guide: nn.Module, num_particles: int) -> None:
        super().__init__()
        self.guide, self.elbo = guide, ELBO(num_particles=num_particles)
        self._model = (model,)  # not as a submodule: its parameters are not trained

    def forward(self, x: Tensor, y: Tensor, likelihood: float, latent: float) -> tuple[Tensor, Tensor]:
        """x, y: rows whose log-likelihood counts ``likelihood`` times; the KL counts ``latent`` times."""
        scaled = Rescale(likelihood, latent)(self._model[0])
        return self.elbo.parts(scaled, Rescale(latent=latent)(self.guide), x, y)


def _share(ranks: Ranks, x: Tensor, y: Tensor, num: int) -> tuple[Tensor, Tensor, float]:
    """(x, y, what their log-likelihood is multiplied by) of this rank in a step whose rows x, y stand for ``num``.

    A rank without rows of its own takes one with weight 0: its guide has a KL all the same.
    """
    mine = ranks.part(x), ranks.part(y)
    return (*mine, ranks.size * num / len(x)) if len(mine[0]) else (x[:1], y[:1], 0.0)


def _start_noise(ranks: Ranks, state: dict | None, seed: int, step: int) -> None:
    """The generators as a checkpoint has them; a stream of its own for a rank that has none there."""
    kept = [] if state is None else [state["generators"], *state.get("others", ())]
    if ranks.rank < len(kept):
        set_generator_state(kept[ranks.rank])
    elif ranks.rank:
        set_stream(seed, ranks.rank, step)


class _Agreement:
    """Whether to save and whether to stop, the same answer on every rank: rank 0's clock, anybody's signal.

    Asking costs a collective, so that several ranks ask only about once in ``AGREE`` seconds, after steps that they
    have agreed on the time before.
    """

    def __init__(self, ranks: Ranks, checkpoint: Checkpoint | None, step: int) -> None:
        self.ranks, self.checkpoint = ranks, checkpoint
        self.last, self.next, self.since = step, step + 1, time.monotonic()

    def after(self, step: int) -> tuple[bool, bool]:
        """(whether to save, whether to stop) after this step."""
        if self.checkpoint is None or step < self.next:
            return False, False
        if self.ranks.size == 1:
            return (True, self.checkpoint.stop) if self.checkpoint.due else (False, False)
        now = time.monotonic()
        pace = (step - self.last) / max(now - self.since, 1e-3)
        wait = min(max(1, int(pace * AGREE)), 4 * (step - self.last))  # the first steps are slow, and no measure
        first = self.ranks.first
        mine = [self.checkpoint.due and first, self.checkpoint.stop, wait if first else 0]
        due, stop, wait = self.ranks.largest(torch.tensor(mine, dtype=torch.int64)).tolist()
        self.last, self.next, self.since = step, step + wait, now
        return bool(due), bool(stop)


def check_finite(recent: Sequence[Tensor] | Tensor, step: int, lr: float) -> None:
    """Raise UserError where the first figure of a line of ``recent`` is not finite, the last of them of this step."""
    bad = [i for i, parts in enumerate(recent) if not bool(torch.isfinite(parts[0]))]
    if bad:
        raise diverged(f"loss became {recent[bad[0]][0].item()} at", step - len(recent) + bad[0] + 1, lr)


def _check_weights(guide: nn.Module, step: int, lr: float) -> None:
    """A finite loss can have a gradient that is not: its harm shows in the weights, before the next loss."""
    if not all(bool(torch.isfinite(p).all()) for p in guide.parameters()):
        raise diverged("weights stopped being finite at", step, lr)


def diverged(what: str, step: int, lr: float) -> UserError:
    """The error that says so, with what to do."""
    return UserError(
        f"the {what} step {step} (lr {lr}); the last good checkpoint, if any, is kept: "
        f"try a smaller --lr, such as {lr / 10:g}"
    )
