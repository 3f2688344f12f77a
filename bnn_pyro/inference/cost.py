"""Estimates of the run time of a fit, which decide whether to compile and how many processes to use; a forecast.

    seconds of a run  ≈  gradients · (overhead + arithmetic),   arithmetic ∝ rows · weights

Decisions depend on settings and sizes alone, not on measured times: compiled gradients have other rounding errors, and
draws must be reproducible.
"""

import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pyro.poutine as poutine
import torch
from torch import Tensor, nn

from bnn_pyro.checkpoint import Run
from bnn_pyro.inference.potential import Potential
from bnn_pyro.isolation import isolated
from bnn_pyro.parallel.executor import current_executor, on_cluster, usable_cores
from bnn_pyro.parts.nets import outputs_seen
from bnn_pyro.progress import Figures, duration

#: Overhead in seconds of a gradient by PyTorch's operators, of a compiled gradient, and of an optimiser's step by Pyro.
EAGER, COMPILED, PYRO_STEP = 1e-3, 1e-5, 2.5e-3
ARITHMETIC = 5e-10  # seconds for the 6 floating-point operations that a weight takes for a row, forward and backward
#: The same in code compiled for one chain: up to CACHED rows · weights, for which its arrays are in the cache of a core
#: (512 KiB), and above.
COMPILED_ARITHMETIC, CACHED, LARGE_ARITHMETIC = 3.5e-10, 2e6, 5e-10
#: Rows · weights above which compiled code is no faster than operators on several chains, for 784 inputs (for narrow
#: networks: 5e7).
LARGE = 2e7
COMPILATION, PROCESS = 2.5, 5.0  # seconds of a compilation, and of the start of a process
#: A forecast is made from TIMED transitions, or from those in MAX_TIMED seconds, and reported above LONG seconds.
TIMED, MAX_TIMED, LONG = 20, 30.0, 60.0
FEWER = 5  # the forecast suggests to make draws/FEWER draws instead
TYPICAL = 20  # expected number of steps of a trajectory of ChEES or of the adjusted microcanonical sampler
#: Overhead in seconds of a transition of mile, made alone and with other transitions in one call of compiled code; and
#: of a step of the optimisation of its members.
TRANSITION, TOGETHER, STEP = 3e-4, 4e-5, 6e-3
GRADIENTS, TREE = 2, 30  # number of gradients in a step of mile, and in a transition of NUTS
Cost = Callable[[Mapping[str, Any], int, int, int], float]  # (settings of the method, N, macs, cores) -> seconds


def choose_compiled(setting: str, gradients: float, potential: Potential) -> bool:
    """Whether to compile; for "auto", if that saves twice the time it takes. PyTorch is faster for large matrices."""
    long = gradients * (EAGER - COMPILED) > 2 * COMPILATION
    small = potential.x.device.type == "cpu" and len(potential.x) * potential.size <= LARGE
    return setting == "yes" or (setting == "auto" and long and small)


def gradient_seconds(rows: int, macs: int) -> float:
    """Seconds of the arithmetic of one chain's gradient on one core.   macs: multiplications of a row, forward."""
    return rows * macs * (LARGE_ARITHMETIC if rows * macs > CACHED else COMPILED_ARITHMETIC)


def run_cost(gradients: float, compiled: bool, potential: Potential, chains: int = 1) -> tuple[float, float]:
    """(seconds of ``gradients`` gradients of C chains at once, seconds until another process computes its first)."""
    work = chains * len(potential.x) * potential.size if potential.x.device.type == "cpu" else 0
    seconds = gradients * ((COMPILED if compiled else EAGER) + ARITHMETIC * work)
    return seconds, PROCESS + (COMPILATION if compiled else 0.0)


def choose_cores(cores: int, tasks: int, device: torch.device, seconds: float, price: float = PROCESS) -> int:
    """Number of processes: ``cores``, or for 0 one for each core if that saves twice the price, else 1 (this process).

    For 0 it is 1 on a GPU and in a process that is itself one of several. An executor in force decides instead.
    device: where tasks compute.   seconds: of all tasks.   price: seconds that a process takes to start.
    """
    cpu, usable = device.type == "cpu", min(tasks, usable_cores())
    if current_executor() is not None and not on_cluster():
        return usable if cpu else 1
    if cores:
        return min(cores, tasks)
    return usable if cpu and seconds * (1 - 1 / usable) > 2 * price else 1


@torch.no_grad()
def multiplications(net: nn.Module, x: Tensor) -> int:
    """Multiplications in the layers of a forward pass of x (1, *input_shape), but at least one for each weight."""
    counts = []

    def count(path: str, output: object) -> None:
        weight = getattr(layer := net.get_submodule(path), "weight", None)
        if isinstance(layer, nn.RNNBase):
            counts.append(output[0].data.shape[:-1].numel() * sum(w.numel() for w in layer.parameters() if w.dim() > 1))
        if isinstance(weight, Tensor) and isinstance(output, Tensor) and weight.dim() > 1:
            counts.append(output.numel() * weight[0].numel())

    initial = getattr(net, "initial", {})  # instead of draws, which points and improper priors do not have
    with isolated(0), outputs_seen(net, count), poutine.condition(data=initial):
        net(x)
    return max(sum(counts), sum(value.numel() for value in net.parameters() if value.dim() > 1))


def sampling(s: Mapping[str, Any], rows: int, macs: int, cores: int) -> float:
    """Seconds of mile: of its members' optimisation, and of chains."""
    chains, batch = s["chains"] or 8, s["batch_size"] or rows  # 8 if left out
    members = s["epochs"] * math.ceil(rows / batch) * (STEP + ARITHMETIC * chains * batch * macs)
    processes = 1 if rows * macs > LARGE else min(cores, chains)  # large: operators move all chains in one process
    steps, besides = (TYPICAL, TRANSITION) if s.get("adjusted") else (1, TOGETHER)
    step = besides + math.ceil(chains / processes) * GRADIENTS * gradient_seconds(rows, macs)
    sampled = s["warmup"] * TRANSITION / 2 + (s["warmup"] + s["draws"] * s["thin"]) * steps * step
    return PROCESS + COMPILATION + members + sampled


def trees(s: Mapping[str, Any], rows: int, macs: int, cores: int) -> float:
    """Seconds of NUTS, with one chain at a time in each process."""
    gradient = COMPILED + gradient_seconds(rows, macs)
    return COMPILATION + (s["warmup"] + s["draws"] * s["thin"]) * math.ceil(s["chains"] / cores) * TREE * gradient


def optimisation(s: Mapping[str, Any], rows: int, macs: int, cores: int) -> float:
    """Seconds of an optimisation by mini-batches, of one fit or of the members of an ensemble."""
    batch, members = s["batch_size"] or rows, s.get("members", 1)
    seconds = s["epochs"] * math.ceil(rows / batch) * (PYRO_STEP + ARITHMETIC * batch * macs / 2)
    return seconds * math.ceil(members / cores) + (PROCESS if min(members, cores) > 1 else 0)


class Forecast:
    """Warns once of a long run, estimated from the pace of its first transitions, and says how to shorten it."""

    def __init__(self, sampler: Any, run: Run) -> None:
        self.sampler, self.tell, self.run = sampler, run.tell, replace(run, report=self)
        self.typical = self.warned = False
        #: (transitions, time) at the beginning of the run, then at the first transition of typical duration.
        self.since: tuple[float, float] | None = None

    def __call__(self, done: float, of: int, figures: Figures) -> None:
        """A ``Report``."""
        self.tell(done, of, figures)
        now, untimed = time.monotonic(), self.sampler.untimed * of // self.sampler.transitions  # of every chain
        self.since = self.since or (done, now)
        timed, seconds = done - self.since[0], now - self.since[1]
        if self.warned or done == of:
            return
        if not self.typical:
            if timed >= untimed or (seconds > MAX_TIMED and not getattr(self.sampler, "adjusted", False)):
                self.typical, self.since = True, (done, now)
        elif (timed >= TIMED and seconds > 1) or (timed >= 1 and seconds > MAX_TIMED):
            self.warned, remaining = True, (of - done) * seconds / timed
            if remaining >= LONG:
                self._warn(remaining)

    def _warn(self, seconds: float) -> None:
        sampler, run, fewer = self.sampler, self.run, max(1, self.sampler.draws // FEWER)
        share = (sampler.warmup + fewer * sampler.thin) / sampler.transitions
        less = f"draws={fewer} (--set draws={fewer}) takes {duration(share * seconds)}" * (fewer < sampler.draws)
        ends = "max_minutes=M (--max-minutes M) ends after M minutes with the draws so far"
        if run.max_minutes is not None:
            least = f"once every chain has {run.least:.0%} of its draws" if run.least else "or an error without any"
            ends = f"it ends after {run.max_minutes:g} min with the draws so far, {least}"
            ends *= 60 * run.max_minutes < seconds
        warnings.warn("; ".join(filter(None, [f"about {duration(seconds)}", less, ends])), stacklevel=1)
