"""Runs the chains of a sampler, one after the other, several at once or on a cluster, to the very same draws.

A chain depends on its start and on a seed of its own, and where there are several each computes on one thread. Each
keeps a checkpoint of its own beside the run's; one whose process dies goes on from there in another.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyro

from bnn_pyro.checkpoint import Checkpoint, Interrupted
from bnn_pyro.errors import UserError
from bnn_pyro.inference.method import Report
from bnn_pyro.inference.potential import Potential
from bnn_pyro.inference.record import Record
from bnn_pyro.inference.sampler import announce, seconds_per_gradient
from bnn_pyro.inference.starts import chain_seed
from bnn_pyro.isolation import isolated
from bnn_pyro.parallel.executor import executor, on_cluster
from bnn_pyro.parallel.map import WorkerDied, map_tasks
from bnn_pyro.parallel.task import Figures, one_thread, report_progress, should_stop

__all__ = ["Plan", "one_thread_each", "run_chains"]

#: Chains up to which each has its own share of the bar's figures, and seconds between two updates of the figures.
SHOWN, UPDATE = 8, 0.1


# -- one chain ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Plan:
    """All that the chains of a run need: sent to every process once.

    sampler    settings, with the verb ``kernel(potential, blocks, start, seed)``
    blocks     {block of the mass matrix: its length}
    starts     (C, P)          gradients  how many are expected of all chains
    compiled   whether each process compiles the potential's gradient first
    """

    sampler: Any
    potential: Potential
    blocks: dict[str, int]
    starts: np.ndarray
    seed: int
    compiled: bool
    gradients: float

    def record(self) -> Record:
        """An empty one of a chain."""
        return Record(self.sampler.draws, self.sampler.warmup, self.sampler.thin, self.starts.shape[1:])


def one_thread_each(chains: int) -> contextlib.AbstractContextManager[None]:
    """One thread where there are several chains; a single one has all of them, and nothing to be compared with."""
    return contextlib.nullcontext() if chains == 1 else one_thread()


@dataclass
class _Task:
    """A chain, its checkpoint if that is in reach, and else the state that it goes on from."""

    chain: int
    checkpoint: Checkpoint | None = field(repr=False)
    state: dict[str, Any] | None = field(repr=False)


@dataclass
class _Chain:
    """Draws a chain, wherever it is called, to its end or until it is asked to stop."""

    plan: Plan
    cost: float = 0.0  # seconds of a gradient in this process

    def __call__(self, task: _Task) -> tuple[Record, Figures]:
        plan, c, checkpoint = self.plan, task.chain, task.checkpoint
        if not self.cost:
            if plan.compiled:
                plan.potential.compile(1)
            self.cost = seconds_per_gradient(plan.potential, plan.starts[c])
        quiet = pyro.validation_enabled(False), np.errstate(all="ignore")  # trajectories may meet infinities
        with isolated(chain_seed(plan.seed, c, stream=1)), quiet[0], quiet[1]:
            kernel = plan.sampler.kernel(
                plan.potential, plan.blocks, plan.starts[c], chain_seed(plan.seed, c, stream=2)
            )
            record = plan.record()
            state = task.state if checkpoint is None else checkpoint.load()
            if state is not None:
                record.restore(state["record"])
                kernel.restore(state["kernel"])
            return record, self._draw(kernel, record, checkpoint)

    def _draw(self, kernel: Any, record: Record, checkpoint: Checkpoint | None) -> Figures:
        """The transitions that the record lacks; what is known of them."""
        start, warmup, total = time.perf_counter(), record.warmup, self.plan.sampler.transitions
        shown = {"cost": self.cost, "total": 0, "seconds": 0.0}
        report_progress(record.done, total, shown)
        accept, since = 0.0, 0
        try:
            while not record.finished:
                figures = kernel.step()
                record.add(kernel.point.z, figures)
                since = 1 if record.done == warmup + 1 else since + 1
                accept += (figures["acceptance_rate"] - accept) / since
                shown = {
                    "cost": self.cost,
                    "total": shown["total"] + figures["n_steps"],
                    "seconds": time.perf_counter() - start,
                    "accept": accept,
                    "step size": figures["step_size"],
                    "gradients": figures["n_steps"],
                    "divergent": record.divergent,
                }
                report_progress(record.done, total, shown)
                if checkpoint is not None and (checkpoint.due or record.finished):
                    checkpoint.save({"record": record.state(), "kernel": kernel.state()})
                if should_stop() or (checkpoint is not None and checkpoint.stop):
                    break
        except KeyboardInterrupt:
            if checkpoint is not None:
                raise
        return shown


# -- all chains --------------------------------------------------------------------------------------------------------
def run_chains(
    plan: Plan, cores: int, checkpoint: Checkpoint | None, report: Report | None
) -> tuple[list[Record], str]:
    """(what each chain has drawn, why they were stopped: "" where they were not).

    Where there is no checkpoint, Ctrl-C stops the chains and returns what they have, and a chain whose process died
    time and again is returned without draws. Where there is one, it holds everything that was drawn when one of these
    is raised:

    Raises ``Interrupted`` after a signal, and UserError for a chain that died or cannot go on, with its number.
    """
    chains = len(plan.starts)
    records, children = [plan.record() for _ in range(chains)], [None] * chains
    if checkpoint is not None:
        children = [checkpoint.child(f"chain-{c}") for c in range(chains)]
    states = [None if child is None else child.load() for child in children]
    for record, state in zip(records, states, strict=True):
        if state is not None:
            record.restore(state["record"])
    todo, in_reach = [c for c, record in enumerate(records) if not record.finished], not on_cluster()
    progress = _Progress(plan, records, todo, min(cores, len(todo)) if in_reach else 0, report)
    died, failure, stopped = [], [], ""

    def done(index: int, result: tuple[Record, Figures] | None) -> None:
        if result is None:
            return
        c = todo[index]
        records[c] = result[0]
        if children[c] is not None and not in_reach:
            children[c].save({"record": records[c].state(), "kernel": {}})
        if not records[c].finished:
            failure.append(KeyboardInterrupt())
        progress(index, records[c].done / plan.sampler.transitions, result[1])

    def failed(task: _Task, error: UserError) -> None:
        if isinstance(error, WorkerDied):
            died.append(task.chain)
        else:
            failure.append(error)

    def watch() -> None:
        if failure:
            raise failure[0]
        if checkpoint is not None and checkpoint.stop:
            raise KeyboardInterrupt

    tasks = [_Task(c, *((children[c], None) if in_reach else (None, states[c]))) for c in todo]
    names = [f"chain {c + 1} of {chains}" for c in todo]
    how = dict(cores=cores, names=names, all_threads=chains == 1, grace=math.inf)
    try:
        with executor("here") if in_reach and cores == 1 else contextlib.nullcontext():
            map_tasks(_Chain(plan), tasks, **how, progress=progress, done=done, failed=failed, watch=watch)
    except KeyboardInterrupt:
        if checkpoint is not None and not checkpoint.stop:
            raise
        stopped = "stopped by Ctrl-C"
    if checkpoint is not None and checkpoint.stop:
        done_now, total = sum(record.done for record in records), chains * plan.sampler.transitions
        raise Interrupted(f"stopped after step {done_now:,} of {total:,}")
    if died and not stopped:
        who = ", ".join(str(c + 1) for c in sorted(died))
        stopped = f"chain {who} of {chains} died in its process (killed, or out of memory?)"
        if checkpoint is not None:
            raise UserError(f"{stopped}; the draws so far of every chain are kept: go on with --resume (resume=True)")
        if not any(record.kept for record in records):
            raise UserError(f"{stopped}; nothing was drawn: run the chains one after the other, with cores=1")
    return records, stopped


class _Progress:
    """Tells the progress bar how many transitions are done; its other figures now and then."""

    def __init__(self, plan: Plan, records: Sequence[Record], todo: list[int], workers: int, report: Report | None):
        self.plan, self.todo, self.workers, self.report = plan, todo, workers, report
        self.transitions = plan.sampler.transitions
        self.done = np.array([record.done for record in records])
        self.figures: dict[int, Figures] = {}
        self.announced, self.shown, self.last, self.reported = workers == 0, {}, 0.0, self.done.sum()

    def __call__(self, index: int, share: float, figures: Figures) -> None:
        """A chain has told how far it is."""
        if not figures:
            return
        c = self.todo[index]
        self.done[c], self.figures[c] = round(share * self.transitions), figures
        if not self.announced:
            self.announced = True
            gradients = self.plan.gradients * len(self.todo) / len(self.done)
            announce(figures["cost"], gradients, self.workers)
        done = int(self.done.sum())
        if self.report is None or done == self.reported:
            return
        now = time.perf_counter()
        if share == 1 or now - self.last > UPDATE:
            self.shown, self.last = self._combined(), now
        self.reported = done
        self.report(done, len(self.done) * self.transitions, self.shown)

    def _combined(self) -> dict[str, float | str]:
        begun = [(self.done[c] < self.transitions, f) for c, f in self.figures.items() if f["total"]]
        if not begun:
            return {}
        running = [f for going, f in begun if going] or [begun[-1][1]]
        everyone = [f for _, f in begun]
        mean = lambda chains, name: sum(f[name] for f in chains) / len(chains)  # noqa: E731
        shown: dict[str, float | str] = {
            "accept": mean(everyone, "accept"),
            "step size": mean(running, "step size"),
            "gradients": mean(running, "gradients"),
            "ms/gradient": 1e3 * mean(everyone, "seconds") / mean(everyone, "total"),
            "divergent": sum(f["divergent"] for f in everyone),
        }
        if 1 < len(self.done) <= SHOWN:
            shown["chains"] = "·".join(f"{100 * done / self.transitions:.0f}" for done in self.done) + "%"
        return shown
