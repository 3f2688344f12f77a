"""Optimised networks at which chains start: M members, trained together by AdamW on mini-batches with early stopping.

    u ← (1 − lr·decay) u + lr · Adam(∇ log π(u)),     u (M, P)

(Loshchilov & Hutter 2019, arXiv:1711.05101.) Each member has its own initial weights and mini-batches of the training
rows that are not held out, and its result is the weights of the epoch with its lowest held-out NLL.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bnn_pyro.checkpoint import Run
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.errors import UserError
from bnn_pyro.inference.early_stopping import default_patience, hold_out
from bnn_pyro.inference.log_joint import LogJoint
from bnn_pyro.inference.mini_batches import Batches
from bnn_pyro.inference.optimise import MIN_EPOCHS, schedule
from bnn_pyro.isolation import chain_seed, isolated
from bnn_pyro.parts.nets import users_code
from bnn_pyro.progress import Figures


def optimised(model: nn.Module, data: Dataset, members: int, run: Run, **settings: Any) -> dict[str, Tensor]:
    """Trained :class:`Members`, {site: (members, *shape)}. Raises UserError for an infinite NLL, or at a time limit."""
    checkpoint = None if run.checkpoint is None else run.checkpoint.child("members")
    job = Members(model, data, members, run.seed, **settings)
    replace(run, checkpoint=checkpoint, max_minutes=None if run.least else run.max_minutes).take(job)
    if checkpoint is not None:  # even if it is not due
        checkpoint.save(job.state_dict())
    if not job.finished:
        raise UserError(f"the limit of {run.max_minutes:g} min was reached at epoch {job.epoch:,} of {job.epochs:,} of "
                        "the networks that chains start from, before the first draw; take a larger "
                        f"--max-minutes{', with --resume' * (checkpoint is not None)}")  # fmt: skip
    if not (finite := torch.isfinite(job.least)).all():
        lost, lr = int((~finite).nonzero()[0]) + 1, job.schedule.base_lrs[0]
        raise UserError(f"member {lost} of {members} has no finite loss (lr {lr:g}); try a smaller lr ({lr / 10:g})")
    return job.log_joint.sites(job.best)


def by_rule(model: nn.Module, data: Dataset, seed: int) -> dict[str, Any]:
    """Settings of :class:`Members` by the rules of ``optimise`` and ``early_stopping``: 2,500 steps at least."""
    split = hold_out(data, seed)
    rule = schedule(num := len(split.x_train), sum(value.numel() for value in model.initial.values()))
    epochs = max(MIN_EPOCHS, 2_500 // math.ceil(num / (size := rule["batch_size"] or num)))
    return dict(epochs=epochs, patience=default_patience(split, size), lr=rule["lr"], batch_size=size)


class Members:
    """The job (see ``Run.take``) that trains M networks. lr falls by a cosine; patience 0: no early stopping."""

    def __init__(
        self, model: nn.Module, data: Dataset, members: int, seed: int, *, epochs: int = 300, patience: int = 50,
        lr: float = 0.01, batch_size: int = 64, temperature: float = 1.0,
    ) -> None:  # fmt: skip
        data = hold_out(data, seed) if patience else data
        x, y, self.held_out = data.x_train, data.y_train, (data.x_val, data.y_val)
        self.log_joint = LogJoint(model, x, y, temperature)
        self.epochs, self.patience, self.epoch = epochs, patience if len(data.x_val) else 0, 0
        self.members, self.total = members, epochs * members
        starts = [self.log_joint.initial[None]]
        for m in range(1, members):  # other initial weights that the model might have had
            with isolated(chain_seed(seed, m, stream=3)):
                sites = {site: value[None] for site, value in restarted(model).initial.items()}
                starts.append(self.log_joint.flat(sites).double())
        u = torch.cat(starts)
        self.u, self.best = u.clone().requires_grad_(True), u
        self.optimiser = torch.optim.AdamW([self.u], lr, weight_decay=1e-3)  # in addition to the prior
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimiser, epochs)
        self.batches = Batches(x, y, batch_size, members, seed)
        self.least, self.since = u.new_full((members,), math.inf), u.new_zeros(members)

    #: Epochs so far, summed over members.
    step = property(lambda self: self.epoch * self.members)
    #: Whether all epochs are done or all members have stopped.
    finished = property(lambda s: s.epoch == s.epochs or (s.patience > 0 and bool((s.since >= s.patience).all())))

    def steps(self) -> Iterator[Figures]:
        """Take the epochs that are left."""
        while not self.finished:
            first = self.epoch * self.batches.per_epoch
            for rows in self.batches.steps(first, first + self.batches.per_epoch):
                self.u.grad = -self.log_joint.gradient(self.u, *rows)[1]
                self.optimiser.step()
            self.schedule.step()
            self.epoch += 1
            self._score()
            yield {"members": self.members, "NLL": self.least.mean().item()}

    @torch.no_grad()
    def _score(self) -> None:
        u, log_joint = self.u.detach(), self.log_joint
        scored = log_joint.terms(u, *self.held_out)[1] if self.patience else sum(log_joint.terms(u))
        nll = -scored * (log_joint.temperature / len(log_joint.x))
        better = (nll < self.least) & (self.since < self.patience) if self.patience else nll < math.inf
        self.least = torch.where(better, nll, self.least)
        self.since = torch.where(better, 0.0, self.since + 1)
        self.best = torch.where(better[:, None], u, self.best)

    def state_dict(self) -> dict[str, Any]:
        """The contents of a checkpoint."""
        parts = {name: getattr(self, name) for name in ("epoch", "best", "least", "since")}
        learned = {"optimiser": self.optimiser.state_dict(), "schedule": self.schedule.state_dict()}
        return {"u": self.u.detach(), **parts, **learned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a :meth:`state_dict`."""
        self.best, self.least, self.since = (state[name].to(self.u.device) for name in ("best", "least", "since"))
        self.u.data.copy_(state["u"])
        self.epoch = state["epoch"]
        self.optimiser.load_state_dict(state["optimiser"])
        self.schedule.load_state_dict(state["schedule"])


@torch.no_grad()
def restarted(model: nn.Module) -> nn.Module:
    """A copy of the model whose initial weights are drawn again; call it inside ``isolated``.

    Buffers stay, among them frozen weights, and so do all weights of a trained network (``start="pretrained"``).
    Parameters that no ``reset_parameters`` draws, such as a module's own, are shuffled.
    """
    former, buffers, model = dict(model.named_parameters()), dict(model.named_buffers()), copy.deepcopy(model)
    if getattr(model, "is_pretrained", False):
        return model
    for part in reversed([*model.modules()]):  # parts before the layer that contains them
        reset = "_reset_parameters" if isinstance(part, nn.MultiheadAttention | nn.Transformer) else "reset_parameters"
        with users_code(f"{reset}() of {type(part).__name__}, which draws the weights of another start, fails"):
            getattr(part, reset, lambda: None)()
    for name, value in model.named_buffers():
        value.copy_(buffers[name])
    for name, value in model.named_parameters():
        if torch.equal(value, former[name]) and (value != value.flatten()[:1]).any():
            value.copy_(value.flatten()[torch.randperm(value.numel())].view_as(value))
    return model
