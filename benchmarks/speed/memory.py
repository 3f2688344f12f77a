"""Peak memory of a training step, by what the allocator was asked for, from before there was a contestant.

On the CPU torch's profiler tells every allocation and release, kernels' own buffers included; on a GPU the caching
allocator keeps the count. In bytes, and in units that say where they come from: weights of the deterministic network,
and activations (one tensor of every layer, for the batch).
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from speed.problem import Contestant, Problem, Runner

__all__ = ["peak_bytes", "step_memory"]


def peak_bytes(device: torch.device, *phases: Callable[[], object]) -> tuple[list[int], list[int]]:
    """(bytes held after each phase, highest bytes during each), over what was held at the start."""
    gc.collect()
    held, peaks = [], []
    if device.type == "cuda":
        start = torch.cuda.memory_allocated(device)
        for phase in phases:
            torch.cuda.reset_peak_memory_stats(device)
            phase()
            torch.cuda.synchronize(device)
            held.append(torch.cuda.memory_allocated(device) - start)
            peaks.append(torch.cuda.max_memory_allocated(device) - start)
        return held, peaks
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        for i, phase in enumerate(phases):
            with record_function(f"phase {i}"):
                phase()
    events = profiler.profiler.kineto_results.events()
    starts = sorted(e.start_ns() for e in events if e.name().startswith("phase "))
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = 0
    for start, end in zip(starts, [*starts[1:], float("inf")], strict=True):
        peak = now
        for _, change in (c for c in changes if start <= c[0] < end):
            now += change
            peak = max(peak, now)
        held.append(now)
        peaks.append(peak)
    return held, peaks


def step_memory(contestant: Contestant, problem: Problem, steps: int = 5) -> dict[str, float]:
    """Bytes held between steps (parameters, gradients, optimiser state) and at the highest point of some steps.

    Garbage that waits for Python's collector counts in the peak, as it does in training, and not in what is held.
    """
    _ = problem.batches  # belong to nobody
    made: list[Runner] = []

    def build() -> None:
        made.append(Runner(contestant, problem))
        run(3)

    def run(count: int = steps) -> None:
        with made[0].at_work():
            made[0].run(count)

    held, peaks = peak_bytes(problem.device, build, gc.collect, run, gc.collect)
    found = {"held": held[3], "peak": peaks[2], "during": peaks[2] - held[3]}
    in_weights = {f"{key}_in_weights": round(value / (4 * problem.weights), 2) for key, value in found.items()}
    return {**found, **in_weights, "during_in_activations": round(found["during"] / (4 * problem.activations), 2)}
