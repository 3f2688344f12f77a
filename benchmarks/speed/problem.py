"""What is to be learned, the same for all, and what a contestant is: a function that returns one training step."""

import contextlib
import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import pyro
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bnn_pyro as bp
from benchmarks.accuracy.nets import lstm, resnet20, transformer

__all__ = ["INIT_SCALE", "LR", "NOISE", "Contestant", "Problem", "Runner", "Step", "adam_step", "network", "wait_for"]

#: Standard deviation of the targets in regression, known to every contestant.
NOISE = 0.1
LR = 1e-3
#: Standard deviation of every weight where training starts.
INIT_SCALE = 0.01

#: step(x, y) -> the loss, detached where the contestant has one to give.
Step = Callable[[Tensor, Tensor], object]


@dataclass(frozen=True)
class Problem:
    """Synthetic standardised inputs; classification, or regression where the last size is 1.

    sizes   widths from input to output; or the name of a module of ``MODULES``, which takes images of 28 x 28
    rows    N, to which a mini-batch's log-likelihood is scaled
    batch   B; a batch of N rows is a full batch
    lr      Adam's
    """

    sizes: tuple[int, ...] | str
    rows: int
    batch: int
    device: torch.device
    lr: float = LR

    @property
    def name(self) -> str:
        """784-400-400-10, or resnet-18."""
        return self.sizes if isinstance(self.sizes, str) else "-".join(map(str, self.sizes))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of an input."""
        return (1, 28, 28) if self.sizes in MODULES else self.sizes[:1]

    @property
    def outputs(self) -> int:
        """The number of outputs."""
        return 10 if self.sizes in MODULES else self.sizes[-1]

    @property
    def regression(self) -> bool:
        """Whether targets are real numbers."""
        return self.outputs == 1

    @property
    def schema(self) -> bp.Schema:
        """For the variants of the zoo."""
        features = () if self.sizes in MODULES else tuple(f"x{i}" for i in range(self.sizes[0]))
        if self.regression:
            return bp.Schema("regression", self.shape, features=features)
        return bp.Schema("classification", self.shape, tuple(map(str, range(self.outputs))), features)

    @cached_property
    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """A few batches (B, D), (B,) that the steps go round."""
        generator = torch.Generator().manual_seed(0)
        found = []
        for _ in range(1 if self.batch == self.rows else 8):
            x = torch.randn(self.batch, *self.shape, generator=generator)
            labels = torch.randint(self.outputs, (self.batch,), generator=generator)
            y = torch.sin(3 * x[:, 0]) if self.regression else labels
            found.append((x.to(self.device), y.to(self.device)))
        return found

    def nll(self, f: Tensor, y: Tensor) -> Tensor:
        """Mean negative log-likelihood a row, in nats, of outputs f (B, K)."""
        if self.regression:
            squares = (f.squeeze(-1) - y).square().mean()
            return 0.5 * squares / NOISE**2 + math.log(NOISE) + 0.5 * math.log(2 * math.pi)
        return F.cross_entropy(f, y)


@dataclass(frozen=True)
class Contestant:
    """Who takes part.

    build   from a problem to a step, with its own parameters and optimiser; a step with a method ``seconds(steps)``
            times itself
    note    what it is, for the results
    needs   a package that must be importable
    modules  whether it takes any module, and not only the layers that it brings
    """

    build: Callable[[Problem], Step]
    note: str
    needs: str | None = None
    modules: bool = False

    @property
    def absent(self) -> bool:
        """Whether its package is not installed."""
        return self.needs is not None and importlib.util.find_spec(self.needs) is None


def wait_for(device: torch.device) -> None:
    """Until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Runner:
    """One contestant: its step, its place in the batches, and a Pyro parameter store of its own."""

    def __init__(self, contestant: Contestant, problem: Problem) -> None:
        self.contestant, self.problem, self.done = contestant, problem, 0
        self.store: dict | None = None
        with self.active():
            self.step = contestant.build(problem)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Two contestants may give their parameters the same names: neither sees the other's."""
        store = pyro.get_param_store()
        store.clear()
        if self.store is not None:
            store.set_state(self.store)
        try:
            yield
        finally:
            self.store = store.get_state()
            store.clear()

    def run(self, steps: int) -> object:
        """Take steps; call inside ``active``. Returns the last loss."""
        loss = None
        for _ in range(steps):
            x, y = self.problem.batches[self.done % len(self.problem.batches)]
            loss = self.step(x, y)
            self.done += 1
        return loss

    def seconds(self, steps: int) -> float:
        """Of a step, after an untimed one: the median, or on a GPU, where steps overlap, the mean."""
        with self.active():
            if hasattr(self.step, "seconds"):
                return self.step.seconds(steps)
            self.run(1)
            wait_for(self.problem.device)
            ticks = [time.perf_counter()]
            for _ in range(steps):
                self.run(1)
                ticks.append(time.perf_counter())
            wait_for(self.problem.device)
            ticks[-1] = time.perf_counter()
        if self.problem.device.type == "cuda":
            return (ticks[-1] - ticks[0]) / steps
        return statistics.median(b - a for a, b in pairwise(ticks))


def _resnet_18() -> nn.Module:
    import torchvision

    net = torchvision.models.resnet18(num_classes=10)
    net.conv1 = nn.Conv2d(1, 64, 7, 2, 3, bias=False)  # of one channel
    return net


def _own(make: Callable[[bp.Schema], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: make(bp.Schema("classification", (1, 28, 28), tuple("0123456789")))


#: Networks by name: 11.2 million weights with batch normalisation, 0.27 million with it; 0.14 and 0.02 million.
MODULES: dict[str, Callable[[], nn.Module]] = {
    "resnet-18": _resnet_18,
    "resnet-20": _own(resnet20),
    "transformer": _own(transformer),
    "lstm": _own(lstm),
}


def adam_step(problem: Problem, net: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor]) -> Step:
    """A step of fused Adam on what ``loss_of(x, y)`` gives; it has ``net``."""
    optimiser = torch.optim.Adam(net.parameters(), lr=problem.lr, fused=True)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(x, y)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        return loss.detach()

    step.net = net
    return step


def network(problem: Problem, linear: Callable[[int, int], nn.Module] = nn.Linear) -> nn.Module:
    """Layers made by ``linear(in, out)`` with leaky ReLU between them, or the module: what everybody computes."""
    if problem.sizes in MODULES:
        return MODULES[problem.sizes]()
    layers: list[nn.Module] = []
    for i, o in pairwise(problem.sizes):
        layers += [linear(i, o), nn.LeakyReLU()]
    return nn.Sequential(*layers[:-1])
