"""Minimising -ELBO over mini-batches: the loop that SVI and the point estimates share.

The ELBO is Pyro's TraceMeanField_ELBO (closed-form KL wherever a pair of distributions has one), the learning rate
falls by a cosine: noise in the gradient is averaged away at the end instead of left in the answer. Every step is a
function of (parameters, optimiser state, generator state, step number), so a checkpoint made between any two steps
goes on to the very same result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import pyro
import torch
from pyro.distributions.util import scale_and_mask
from pyro.infer import TraceMeanField_ELBO
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn
from torch.distributions import kl_divergence

from bnn_pyro.checkpoint import Checkpoint, Interrupted
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.errors import UserError
from bnn_pyro.inference.density import Rescale
from bnn_pyro.inference.early_stopping import EarlyStopping
from bnn_pyro.inference.method import Report
from bnn_pyro.inference.optimisers import parse_optimiser
from bnn_pyro.isolation import generator_state, set_generator_state
from bnn_pyro.parts.nets import in_mode

__all__ = ["ELBO", "Optimisation"]


class ELBO(TraceMeanField_ELBO):
    """Pyro's TraceMeanField_ELBO, the same number, without the densities that a closed-form KL makes superfluous.

    Pyro's own evaluates log q(w) and log p(w) of every draw even where it then uses KL(q ‖ p): at 784-400-400-10 that
    is more than half of a step. This one also keeps the likelihood part, so that a training curve can tell it from
    the KL. It is meant for models without subsampled or enumerated sites.
    """

    def parts(self, model: Callable, guide: Callable, *args: Tensor) -> tuple[Tensor, Tensor]:
        """(ELBO with its gradient, its likelihood part detached), scalars in nats, means over the particles."""
        elbo, likelihood = 0.0, 0.0
        for _ in range(self.num_particles):
            with _Record() as q:
                guide(*args)
            with _Record(given=q.sites) as p:
                model(*args)
            for name, site in p.sites.items():
                if site["is_observed"]:
                    term = _scaled(site["fn"].log_prob(site["value"]), site)
                    likelihood = likelihood + term.detach()
                    elbo = elbo + term
                else:
                    elbo = elbo - _kl(q.sites[name], site)
            for name, site in q.sites.items():
                if name not in p.sites:
                    elbo = elbo + _entropy(site)
        if self.num_particles == 1:
            return elbo, likelihood
        return elbo / self.num_particles, likelihood / self.num_particles

    def differentiable_loss(self, model: Callable, guide: Callable, *args: Tensor) -> Tensor:
        """-ELBO."""
        return -self.parts(model, guide, *args)[0]


class _Record(Messenger):
    """Keeps the sample sites of a call, after giving latent ones the values of a former call.

    What ``poutine.trace`` and ``poutine.replay`` do together, without copies of every message: a third of what Pyro
    adds to the step of a small network.
    """

    def __init__(self, given: Mapping[str, dict] | None = None) -> None:
        super().__init__()
        self.given = given
        self.sites: dict[str, dict] = {}

    def _pyro_sample(self, msg: dict) -> None:
        if self.given is not None and not msg["is_observed"] and msg["name"] in self.given:
            msg["value"], msg["done"] = self.given[msg["name"]]["value"], True

    def _pyro_post_sample(self, msg: dict) -> None:
        if not site_is_subsample(msg):
            self.sites[msg["name"]] = msg


def _kl(q: dict, p: dict) -> Tensor:
    """KL(q ‖ p) of one latent site, in closed form, else log q(w) − log p(w) at the draw."""
    try:
        return _scaled(kl_divergence(q["fn"], p["fn"]), q)
    except NotImplementedError:
        return _scaled(q["fn"].log_prob(q["value"]), q) - _scaled(p["fn"].log_prob(q["value"]), p)


def _entropy(q: dict) -> Tensor:
    """−E[log q] of a site that the guide alone has, in closed form, else at the draw.

    Raises ValueError unless the guide says that it is auxiliary, as the whole of a joint guide: a misspelt site would
    be rewarded for its entropy.
    """
    if not q["infer"].get("is_auxiliary"):
        raise ValueError(f"the guide's site '{q['name']}' is none of the model's, and is not marked as auxiliary")
    try:
        return _scaled(q["fn"].entropy(), q)
    except NotImplementedError:
        return -_scaled(q["fn"].log_prob(q["value"]), q)


def _scaled(term: Tensor, site: dict) -> Tensor:
    return scale_and_mask(term, site["scale"], site["mask"]).sum()


@dataclass(frozen=True)
class Optimisation:
    """Settings of stochastic gradient descent.

    epochs      passes over the training rows
    batch_size  rows a step; 0 takes all rows in every step
    lr          the first learning rate; it falls by a cosine to ``final_lr``·lr
    final_lr    the last learning rate as a share of the first
    optimiser   adam, or sgd:MOMENTUM, whose lr is that of the mean over the rows
    """

    epochs: int = 2000
    batch_size: int = 0
    lr: float = 0.01
    final_lr: float = 0.01
    optimiser: str = "adam"

    def __post_init__(self) -> None:
        for name, low in (("epochs", 1), ("batch_size", 0)):
            if getattr(self, name) < low:
                raise UserError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise UserError(f"lr must be positive and finite, got {self.lr}")
        if not 0 <= self.final_lr <= 1:
            raise UserError(f"final_lr is a share of lr between 0 and 1, got {self.final_lr}")
        parse_optimiser(self.optimiser)

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
        x, y = data.x_train, data.y_train
        elbo = ELBO(num_particles=num_particles)
        optimiser = parse_optimiser(self.optimiser)(guide.parameters(), self.lr, len(x))
        first_lr = optimiser.param_groups[0]["lr"]
        size = self.batch_size if 0 < self.batch_size < len(x) else len(x)
        per_epoch = math.ceil(len(x) / size)
        total = per_epoch * self.epochs
        window = per_epoch * math.ceil(self.epochs / 1000)  # steps that make one line of the trace
        step, trace = 0, {"epoch": [], "elbo": [], "log_likelihood": [], "kl": []}
        if watch is not None:
            trace["validation_nll"] = []
        recent: list[Tensor] = []

        if checkpoint is not None and (state := checkpoint.load()) is not None:
            guide.load_state_dict(state["guide"])
            optimiser.load_state_dict(state["optimiser"])
            set_generator_state(state["generators"])
            step, trace, recent = state["step"], state["trace"], list(state["recent"].to(x.device))
            if watch is not None:
                watch.load_state_dict(state["watch"])

        def save() -> None:
            assert checkpoint is not None
            _check_finite(recent, step, self.lr)
            _check_weights(guide, step, self.lr)
            checkpoint.save(
                {
                    "guide": guide.state_dict(),
                    "optimiser": optimiser.state_dict(),
                    "generators": generator_state(),
                    "step": step,
                    "trace": trace,
                    "recent": torch.stack(recent) if recent else torch.empty(0, 2),
                    "watch": None if watch is None else watch.state_dict(),
                }
            )

        first = step
        for index in _batches(len(x), size, seed, step, total, x.device):
            rows = slice(None) if index is None else index
            x_batch, y_batch = x[rows], y[rows]
            for group in optimiser.param_groups:
                group["lr"] = first_lr * self._decay(step / total)
            weight = latent * min(1.0, (step + 1) / (warmup * per_epoch)) if warmup else latent
            scaled = Rescale(len(x) / len(x_batch), weight)(model)
            optimiser.zero_grad(set_to_none=True)  # before the forward pass, which needs the memory
            # Pyro's checks of shapes and supports tell what is wrong with a model in its first step.
            checks = nullcontext() if step == first else pyro.validation_enabled(False)
            try:
                with checks, in_mode(model, training=True):
                    objective, log_likelihood = elbo.parts(scaled, Rescale(latent=weight)(guide), x_batch, y_batch)
            except ValueError as refused:  # a likelihood is refused its NaN parameters before there is a loss
                if "constraint" not in str(refused):
                    raise
                raise _diverged("loss became nan at", step + 1, self.lr) from None
            (-objective).backward()
            optimiser.step()
            if project is not None:
                project()
            step += 1
            value = objective.detach()
            if weight != latent:  # in the warm-up too, the trace tells of the ELBO with all of its KL
                value = log_likelihood + (value - log_likelihood) * (latent / weight)
            recent.append(torch.stack([value, log_likelihood]))
            if step % window == 0 or step == total:
                _check_finite(recent, step, self.lr)
                mean, likelihood = torch.stack(recent).double().mean(0).tolist()
                line = [step / per_epoch, mean, likelihood, likelihood - mean]
                figures, enough = {"ELBO/N": mean / len(x)}, False
                if watch is not None:
                    nll, enough = watch.seen(step / per_epoch)
                    line, figures = [*line, nll], figures | {"validation NLL": nll}
                for name, value in zip(trace, line, strict=True):
                    trace[name].append(value)
                recent.clear()
                if report is not None:
                    report(step, total, figures)
                if enough:
                    break
            if checkpoint is not None and checkpoint.due:
                save()
                if checkpoint.stop:
                    raise Interrupted(f"stopped after step {step:,} of {total:,}")
        if watch is not None:
            watch.restore()
        _check_weights(guide, step, self.lr)
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


def _check_finite(recent: list[Tensor], step: int, lr: float) -> None:
    bad = [i for i, parts in enumerate(recent) if not bool(torch.isfinite(parts[0]))]
    if bad:
        raise _diverged(f"loss became {recent[bad[0]][0].item()} at", step - len(recent) + bad[0] + 1, lr)


def _check_weights(guide: nn.Module, step: int, lr: float) -> None:
    """A finite loss can have a gradient that is not: its harm shows in the weights, before the next loss."""
    if not all(bool(torch.isfinite(p).all()) for p in guide.parameters()):
        raise _diverged("weights stopped being finite at", step, lr)


def _diverged(what: str, step: int, lr: float) -> UserError:
    return UserError(
        f"the {what} step {step} (lr {lr}); the last good checkpoint, if any, is kept: "
        f"try a smaller --lr, such as {lr / 10:g}"
    )
