"""Where chains start: apart, as a convergence diagnostic wants it, or near where the posterior is, as a budget does.

    jitter  the model's initial values, plus ``jitter`` times a vector of mean 0 with the prior's standard deviations
    prior   a draw of the prior each
    map     each climbs from its jittered start to a mode of its own (Adam, all at once)
    svi     draws of a mean-field Normal fitted to the posterior

Of a network with several modes, the first three tell whether chains agree between them; "svi" starts them all in one.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.errors import UserError, unknown
from bnn_pyro.inference.potential import Potential
from bnn_pyro.inference.svi import SVI
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.guides import MeanFieldNormal
from bnn_pyro.posterior import weight_space

__all__ = ["STARTS", "chain_seed", "starting_points"]

STARTS = ("jitter", "prior", "map", "svi")

#: How often a chain may draw a start of finite density before it gives up (as in Stan).
ATTEMPTS = 100

#: Steps of Adam to a mode, and the first of its learning rates, which fall to 0 by a cosine.
STEPS, LR = 500, 0.05

#: Starts that climb in one call of the model.
TOGETHER = 64

#: Steps of SVI, in full batches: enough to tell where the posterior is and how wide.
SVI_STEPS = 1000


def chain_seed(seed: int, chain: int, stream: int = 0) -> int:
    """A seed of its own for every chain of a run, and for every use that the chain has for one."""
    return int(np.random.SeedSequence([seed, chain, stream]).generate_state(1)[0])


def starting_points(
    potential: Potential,
    model: nn.Module,
    guide: nn.Module | None,
    data: Dataset,
    how: str,
    num: int,
    jitter: float = 1.0,
    seed: int = 0,
) -> Tensor:
    """z (num, P), float64, each of finite density; that of a chain does not depend on how many there are.

    how: one of ``STARTS``.   guide: fitted in place by "svi"; None for one of this file's own.

    Raises UserError for another ``how``, and where no start of finite density is found, with the chain's number.
    """
    if how not in STARTS:
        raise unknown("start", how, STARTS)
    if how == "svi":
        return _checked(potential, _from_svi(potential, model, guide, data, num, seed), how)
    z = torch.stack([_drawn(potential, how, jitter, seed, chain) for chain in range(num)])
    return _checked(potential, _climbed(potential, z) if how == "map" else z, how)


def _drawn(potential: Potential, how: str, jitter: float, seed: int, chain: int) -> Tensor:
    """One start of finite density, (P,); the last one tried where there is none."""
    with isolated(chain_seed(seed, chain)):
        for _ in range(ATTEMPTS):
            if how == "prior":
                z = potential.prior_draws(1)
            else:
                a, b = potential.prior_draws(2)  # their difference has mean 0 and twice the variance
                z = (potential.space.inverse(potential.initial) + jitter / math.sqrt(2) * (a - b))[None]
            if _finite(potential, z).all():
                break
    return z[0]


def _finite(potential: Potential, z: Tensor) -> Tensor:
    """(C,), whether the density and its gradient are finite there."""
    density, gradient = potential(z)
    return torch.isfinite(density) & torch.isfinite(gradient).all(1)


def _checked(potential: Potential, z: Tensor, how: str) -> Tensor:
    good = _finite(potential, z)
    if not good.all():
        chain = int((~good).nonzero()[0])
        raise UserError(
            f"chain {chain + 1} has no start where the log density and its gradient are finite (start={how}); "
            f"{'take a narrower prior' if how == 'prior' else 'take a smaller jitter'}, or start=map"
        )
    return z


def _climbed(potential: Potential, z: Tensor) -> Tensor:
    """From each z (num, P) to the most probable place on the way to a mode.

    On the scale of the weights themselves: in coordinates in which the posterior is round, starts are far away.
    """
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
    return potential.space.inverse(best)


def _from_svi(
    potential: Potential, model: nn.Module, guide: nn.Module | None, data: Dataset, num: int, seed: int
) -> Tensor:
    """Draws z (num, P) of a guide that was fitted to the model."""
    model, guide = weight_space(model), weight_space(guide)
    with isolated(seed):
        if guide is None:
            guide = MeanFieldNormal(model.initial, 0.01).to(data.x_train.device)
        method = SVI(epochs=SVI_STEPS, lr=0.02, temperature=potential.temperature)
        posterior = method.run(model, guide, data, seed=seed)
        return potential.position(posterior.draw(num, data.x_train[:1], seed=seed))
