"""Variants of this package: by the calls that ``Optimisation.minimise`` makes in a step, and by ``minimise`` itself."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise

import pyro
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bnn_pyro import isolated
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.inference.elbo import ELBO
from bnn_pyro.inference.log_joint import Rescale
from bnn_pyro.inference.optimise import Optimisation
from bnn_pyro.parts.hidden_layer import HiddenLayer
from bnn_pyro.parts.likelihoods import make_likelihood
from bnn_pyro.parts.nets import in_mode
from bnn_pyro.zoo import ZOO
from speed.plain import INIT_SCALE, LocalWeights
from speed.problem import LR, NOISE, Contestant, Problem, Step, step_time, wait_for

__all__ = ["OURS", "ZOO_STEPS", "variant"]


def svi_step(model: nn.Module, guide: nn.Module, rows: int) -> Step:
    """One step of ``Optimisation.minimise``: its ELBO, its scaling, its optimiser, its bookkeeping."""
    elbo = ELBO(num_particles=1)
    optimiser = torch.optim.Adam(guide.parameters(), lr=LR, fused=True)
    checks = nullcontext()  # Pyro's, in the first step only

    def step(x: Tensor, y: Tensor) -> Tensor:
        nonlocal checks
        for group in optimiser.param_groups:
            group["lr"] = LR
        optimiser.zero_grad(set_to_none=True)
        scaled = Rescale(rows / len(x), 1.0)(model)
        with checks, in_mode(model, training=True):
            objective, log_likelihood = elbo.parts(scaled, Rescale(latent=1.0)(guide), x, y)
        (-objective).backward()
        optimiser.step()
        checks = pyro.validation_enabled(False)
        return -torch.stack([objective.detach(), log_likelihood])[0]

    return step


class TrainingLoop:
    """``Optimisation.minimise`` itself: a block is one call of it, whose steps tell the time as they end."""

    def __init__(self, problem: Problem, model: nn.Module, guide: nn.Module) -> None:
        self.problem, self.model, self.guide = problem, model, guide
        x, y = (torch.cat(part) for part in zip(*problem.batches, strict=True))
        self.data = Dataset("rows", problem.schema, x, y, x[:0], y[:0], x[:0], y[:0])

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """A few steps; the mean ELBO, negative, of the last epoch."""
        return -torch.tensor(self._minimise(1)[0]["elbo"][-1])

    def seconds(self, steps: int) -> float:
        """Seconds a step, without the first two, which make the optimiser's state."""
        return step_time(self._minimise(steps + 2)[1][1:], self.problem.device)

    def _minimise(self, steps: int) -> tuple[dict[str, list[float]], list[float]]:
        per_epoch = len(self.problem.batches)
        epochs = math.ceil(steps / per_epoch)
        watch = _Watch(self.problem.device, per_epoch * epochs)
        loop = Optimisation(epochs=epochs, batch_size=self.problem.batch, lr=LR)
        return loop.minimise(self.model, self.guide, self.data, seed=0, checkpoint=watch), watch.ticks


class _Watch:
    """In the place of a checkpoint, which the loop asks after every step whether it is due."""

    def __init__(self, device: torch.device, steps: int) -> None:
        self.device, self.steps, self.ticks = device, steps, []

    def load(self) -> None:
        """There is none."""

    @property
    def due(self) -> bool:
        """Never; the time is noted."""
        if len(self.ticks) in (1, self.steps - 1):  # where the stretch that counts begins and ends
            wait_for(self.device)
        self.ticks.append(time.perf_counter())
        return False


class Pair(nn.Module):
    """``HiddenLayer`` in guide and model, written by hand: a call samples the layers, of q or of N(0, 1)."""

    def __init__(self, problem: Problem, weights: LocalWeights | None) -> None:
        super().__init__()
        self.sizes, self.weights = problem.sizes, weights
        if weights is None:
            self.likelihood = make_likelihood(problem.schema, NOISE)
            shapes = [(i + 1, o) for i, o in pairwise(self.sizes)]
            self.zeros = nn.ParameterList(torch.zeros(shape) for shape in shapes).requires_grad_(False)
            self.ones = nn.ParameterList(torch.ones(shape) for shape in shapes).requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor | None = None) -> None:
        """Sample; the model's likelihood besides."""
        if self.weights is None:
            means, scales = self.zeros, self.ones
        else:
            means, scales = self.weights.means, [(0.5 * v).exp() for v in self.weights.log_variances]
        last, x = len(means) - 1, F.pad(x, (0, 1), value=1.0)
        for i, (mean, scale) in enumerate(zip(means, scales, strict=True)):
            activation = None if i == last else F.leaky_relu
            layer = HiddenLayer(x, mean, scale, activation, include_hidden_bias=i < last)
            with pyro.plate(f"rows{i}", len(x), dim=-1):
                x = pyro.sample(f"h{i}", layer)
        if self.weights is None:
            self.likelihood(x, y)


def pair(problem: Problem) -> Step:
    """The pair written by hand through our step."""
    guide = Pair(problem, LocalWeights(problem)).to(problem.device)
    return svi_step(Pair(problem, None).to(problem.device), guide, problem.rows)


def variant(name: str, problem: Problem, **settings: object) -> tuple[nn.Module, nn.Module]:
    """(model, guide) of a zoo variant at the problem's sizes, N(0, 1) prior, known noise."""
    given = {"hidden": problem.sizes[1:-1], "activation": "leaky_relu", "noise": NOISE, "prior": "normal:1"}
    entry = ZOO[name](**{**given, "init_scale": INIT_SCALE, **settings})
    model = entry.model(problem.schema).to(problem.device)
    return model, entry.guide(model).to(problem.device)


def zoo_step(name: str, note: str, **settings: object) -> Contestant:
    """A variant through our step."""

    def build(problem: Problem) -> Step:
        return svi_step(*variant(name, problem, **settings), problem.rows)

    return Contestant(build, f"{note}; our SVI step", around=_own)


def _own() -> AbstractContextManager:
    return isolated(None)


ZOO_STEPS: dict[str, Contestant] = {
    "HiddenLayer by hand": Contestant(pair, "our HiddenLayer in model and guide by hand; our SVI step", around=_own),
    "hidden-layer": zoo_step("hidden-layer", "local reparametrization, a free σ for every weight"),
    "hidden-layer, training loop": Contestant(
        lambda problem: TrainingLoop(problem, *variant("hidden-layer", problem)),
        "the same in Optimisation.minimise itself: new rows and a trace besides",
        around=_own,
    ),
    "variational-dropout": zoo_step("variational-dropout", "one α a layer", prior="log-uniform"),
    "sparse-dropout": zoo_step("sparse-dropout", "one α a weight", prior="log-uniform"),
    "mean-field": zoo_step("mean-field", "sampled weights"),
}
#: The contestant that the comparisons are about.
OURS = "hidden-layer"
