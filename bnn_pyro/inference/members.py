"""Members of an ensemble as starts of chains: M networks by AdamW on mini-batches, all in one call, stopped early.

    u ← (1 − lr·decay) u + lr · Adam(∇ log π(u)),     u (M, P)

The log joint of the training rows that are not held out, N/B-scaled (Loshchilov & Hutter 2019, arXiv:1711.05101). Each
member has initial weights and mini-batches of its own, and keeps the weights of the epoch at which its NLL of the rows
held out was least. One call of the operators moves all of them: of 8 small networks it takes little longer than of one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from bnn_pyro.checkpoint import Interrupted, Run
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.errors import UserError
from bnn_pyro.inference.log_joint import LogJoint
from bnn_pyro.inference.sg_chains import Batches
from bnn_pyro.inference.svi import restarted
from bnn_pyro.isolation import chain_seed, isolated

__all__ = ["HELD_OUT", "hold_out", "optimised"]

#: Share of the training rows that are held out where the data have no validation rows.
HELD_OUT = 0.15
#: AdamW's decay besides the prior's own.
DECAY = 1e-3


def hold_out(data: Dataset, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, y to train with and x, y held out: the validation rows, or else a share of the training rows."""
    if len(data.x_val):
        return data.x_train, data.y_train, data.x_val, data.y_val
    order = torch.randperm(len(data.x_train), generator=torch.Generator().manual_seed(seed)).to(data.x_train.device)
    kept, held = order.tensor_split([len(order) - round(HELD_OUT * len(order))])
    return data.x_train[kept], data.y_train[kept], data.x_train[held], data.y_train[held]


def optimised(
    model: nn.Module,
    data: Dataset,
    members: int,
    run: Run,
    *,
    epochs: int,
    patience: int,
    lr: float,
    batch_size: int,
    temperature: float = 1.0,
) -> dict[str, Tensor]:
    """{site: (members, *shape)}.   epochs: at most, over which lr falls by a cosine.   patience: 0, and all are taken.

    Nothing of it is in a checkpoint: after a stop it begins again, to the same members.

    Raises UserError where a member has no finite NLL.
    """
    seed, nothing = run.seed, (data.x_train[:0], data.y_train[:0])
    x, y, x_held, y_held = hold_out(data, seed) if patience else (data.x_train, data.y_train, *nothing)
    log_joint, watched = LogJoint(model, x, y, temperature), len(x_held) > 0
    u = torch.cat([_initial(log_joint, model, seed, m) for m in range(members)]).requires_grad_(True)
    optimiser = torch.optim.AdamW([u], lr, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs)
    batches = Batches(x, y, batch_size, members, seed)
    best, least = u.detach().clone(), u.new_full((members,), math.inf)
    since = torch.zeros_like(least)
    for epoch in range(epochs):
        for x_part, y_part in batches.steps(epoch * batches.per_epoch, (epoch + 1) * batches.per_epoch):
            u.grad = -log_joint.gradient(u, x_part, y_part)[1]
            optimiser.step()
        schedule.step()
        with torch.no_grad():
            scored = log_joint.terms(u, x_held, y_held)[1] if watched else sum(log_joint.terms(u))
        nll = -scored * (temperature / len(x))
        better = (nll < least) & (since < patience) if watched else nll < math.inf
        least, since = torch.where(better, nll, least), torch.where(better, 0.0, since + 1)
        best = torch.where(better[:, None], u.detach(), best)
        run.tell((epoch + 1) * members, epochs * members, {"members": members, "NLL": least.mean().item()})
        if run.stop:
            raise Interrupted(f"stopped with the members' epoch {epoch + 1:,} of {epochs:,}")
        if watched and bool((since >= patience).all()):
            break
    if not (finite := torch.isfinite(least)).all():
        lost = int((~finite).nonzero()[0]) + 1
        who = f"member {lost} of {members}"
        raise UserError(f"{who} has no finite loss (lr {lr:g}); try a smaller lr, such as {lr / 10:g}")
    return log_joint.sites(best)


def _initial(log_joint: LogJoint, model: nn.Module, seed: int, member: int) -> Tensor:
    """(1, P): the model's own initial weights, and for others than the first what it might have begun with."""
    if not member:
        return log_joint.initial[None].clone()
    with isolated(chain_seed(seed, member, stream=3)):
        return log_joint.flat({site: value[None] for site, value in restarted(model).initial.items()}).double()
