"""Runs the chains of a sampler in this process, in several, or on a cluster, with identical draws.

A chain depends only on its start and its own seed, and several chains compute on one thread each. Each chain has a
checkpoint of its own beside the one of the run; if its process dies, the chain resumes from there in another process.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pyro
import torch

from bnn_pyro.checkpoint import Checkpoint, Interrupted, Run
from bnn_pyro.errors import UserError
from bnn_pyro.inference.adaptation import ChainLost
from bnn_pyro.inference.potential import Potential
from bnn_pyro.isolation import chain_seed, isolated
from bnn_pyro.parallel.executor import executor, on_cluster
from bnn_pyro.parallel.map import WorkerDied, map_tasks
from bnn_pyro.progress import Figures, report_progress

#: {label: column of ``stats``}: the progress bar shows the mean of the first column that the sampler has.
SHOWN = {"accept": "acceptance_rate", "energy error": "energy_error"}
#: How the stats of the transitions of a draw are combined; for other stats the last value counts.
COMBINED: dict[str, Callable[[Sequence], Any]] = {
    **dict.fromkeys(("acceptance_rate", "trajectory_length", "cut"), lambda values: sum(values) / len(values)),
    **dict.fromkeys(("diverging", "tree_depth"), lambda values: np.max(values, axis=0)),
    "energy_error": lambda values: np.sqrt(np.mean(np.square(values), axis=0)),
    "n_steps": sum,
}
COUNTS = ("done", "kept", "divergent")  # the counts of a record that a checkpoint contains


class Record:
    """The draws and stats of one chain, or of C chains that move together; see ``thin`` of ``Sampler``.

    columns    {name: array (draws, …)}, of which the first ``kept`` rows are filled: stats, (draws,) or (draws, C), and
               positions "z", (draws, P) or (draws, C, P)
    done       number of transitions, of which ``resumed`` were made before the run was resumed
    divergent  number of divergent transitions after the warm-up
    """

    def __init__(self, draws: int, warmup: int, thin: int) -> None:
        self.draws, self.warmup, self.thin = draws, warmup, thin
        self.columns: dict[str, np.ndarray] = {}
        self.done = self.kept = self.divergent = self.resumed = 0
        self.interrupted = False
        self.since: list[Mapping[str, float | np.ndarray]] = []  # stats of the transitions since the last draw

    #: Whether all draws are made.
    finished = property(lambda self: self.kept == self.draws)
    #: Number of transitions to the next draw, or to the end of the warm-up.
    until_draw = property(lambda self: max(self.warmup - self.done, 0) or self.thin - len(self.since))

    def add(self, z: np.ndarray, figures: Mapping[str, float | np.ndarray]) -> None:
        """Record one transition: its position and its stats."""
        self.done += 1
        if self.done <= self.warmup:
            return
        self.divergent += int(np.count_nonzero(figures["diverging"]))
        self.since.append(figures)
        if len(self.since) < self.thin:
            return
        for name, value in {**figures, "z": z}.items():
            if self.thin > 1 and name in COMBINED:
                value = COMBINED[name]([one[name] for one in self.since])
            if name not in self.columns:
                self.columns[name] = np.zeros((self.draws, *np.shape(value)))
            self.columns[name][self.kept] = value
        self.since = []
        self.kept += 1

    def of_chain(self, c: int) -> Self:
        """The record of chain c of those that move together."""
        alone = copy(self)
        alone.columns = {name: values[:, c] for name, values in self.columns.items()}
        return alone

    def state(self) -> dict[str, Any]:
        """The contents as tensors and numbers."""
        stats = {name: torch.from_numpy(values[: self.kept]) for name, values in self.columns.items()}
        return {
            "z": stats.pop("z", torch.empty(0)),
            "stats": stats,
            "since": [{name: torch.as_tensor(v, dtype=torch.float64) for name, v in one.items()} for one in self.since],
            **{name: getattr(self, name) for name in COUNTS},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state``."""
        vars(self).update({name: state[name] for name in COUNTS}, resumed=state["done"])
        self.since = [{name: value.numpy() for name, value in one.items()} for one in state["since"]]
        for name, values in {**state["stats"], "z": state["z"]}.items() if self.kept else ():
            self.columns[name] = np.zeros((self.draws, *values.shape[1:]))
            self.columns[name][: self.kept] = values.numpy()


@dataclass
class Chains:
    """What the chains of a run need, sent to every process once. Called with the number of a task, it runs that task.

    sampler      settings, with a method ``kernel(potential, start, *seeds)``
    starts       (C, G, P): each of C tasks moves G chains together
    compiled     whether each process first compiles the potential's gradient
    checkpoints  one of each task, None if there is none or its file cannot be reached from other processes
    max_minutes  time limit of a task, beyond which a chain still takes the share ``least`` of its draws
    """

    sampler: Any
    potential: Potential
    starts: np.ndarray
    seed: int
    compiled: bool
    checkpoints: Sequence[Checkpoint | None] = ()
    max_minutes: float | None = None
    least: float = 0.0

    def numbers(self, c: int) -> range:
        """The numbers (from 0) of the chains that task c moves."""
        each = self.starts.shape[1]
        return range(c * each, (c + 1) * each)

    def name(self, c: int) -> str:
        """The name of task c in messages."""
        one, of = self.numbers(c), self.numbers(len(self.starts) - 1).stop
        return f"chain {c + 1} of {of}" if len(one) == 1 else f"chains {one.start + 1} to {one.stop} of {of}"

    def record(self, state: Mapping[str, Any] | None) -> Record:
        """A record, with the contents of a checkpoint's state if there is one."""
        record = Record(self.sampler.draws, self.sampler.warmup, self.sampler.thin)
        if state is not None:
            record.restore(state["record"])
        return record

    def __call__(self, c: int) -> tuple[Record, Figures]:
        """Run task c until its chains are finished, its time is over, or it is asked to stop."""
        checkpoint, potential, numbers = self.checkpoints[c], self.potential, self.numbers(c)
        if self.compiled and potential.compiled is None:  # once a process
            self.compiled = potential.compile(1)
        # Without Pyro's checks and numpy's warnings, as trajectories may meet infinities.
        with isolated(chain_seed(self.seed, c, 1)), pyro.validation_enabled(False), np.errstate(all="ignore"):
            kernel = self.sampler.kernel(potential, self.starts[c], *(chain_seed(self.seed, n, 2) for n in numbers))
            chain = Chain(kernel, self.record(None), {"chain": numbers.start + 1})
            try:
                Run(0, checkpoint, report_progress, self.max_minutes, self.least).take(chain)
                if checkpoint is not None:  # even if it is not due
                    checkpoint.save(chain.state_dict())
            except KeyboardInterrupt as stop:
                chain.record.interrupted = True
                if checkpoint is not None and not isinstance(stop, Interrupted):
                    raise
        return chain.record, chain.figures


class Chain:
    """The job (see ``Run.take``) of one chain, or of several that move together.   figures: for a progress bar."""

    def __init__(self, kernel: Any, record: Record, figures: Figures) -> None:
        self.kernel, self.record, self.figures = kernel, record, figures
        self.total = record.warmup + record.draws * record.thin

    #: Transitions so far.
    step = property(lambda self: self.record.done)
    #: Share of the draws that are made.
    share_drawn = property(lambda self: self.record.kept / self.record.draws)

    def steps(self) -> Iterator[Figures]:
        """Make the transitions that are left, and yield the figures to show after each."""
        report_progress(self.step, self.total, self.figures)
        start, last, mean, since, gradients = time.perf_counter(), 0.0, 0.0, 0, 0
        move = getattr(self.kernel, "steps", lambda _: [self.kernel.step()])  # ``steps`` may make several at once
        while not self.record.finished:
            since = 0 if self.step == self.record.warmup else since
            made, now = move(self.record.until_draw), time.perf_counter()
            for figures in made:
                self.record.add(self.kernel.point.z, figures)
            since += len(made)
            name, stat = next((name, stat) for name, stat in SHOWN.items() if stat in figures)
            mean += (np.mean([one[stat] for one in made]) - mean) * len(made) / since
            gradients += int(np.max(figures["n_steps"])) * len(made)
            if now - last > 0.1 or self.record.finished:  # update the progress bar every 0.1 seconds
                last = now
                latest = {name: float(mean), "step size": float(np.mean(figures["step_size"]))}
                latest |= {"gradients": int(np.max(figures["n_steps"])), "ms/gradient": 1e3 * (now - start) / gradients}
                self.figures = {**self.figures, **latest, "divergent": self.record.divergent}
            yield self.figures

    def state_dict(self) -> dict[str, Any]:
        """The contents of a checkpoint."""
        return {"record": self.record.state(), "kernel": self.kernel.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a :meth:`state_dict`."""
        self.kernel.restore(state.get("kernel", state))  # in an earlier version ChEES had no part "kernel"
        self.record.restore(state["record"])


def run_chains(plan: Chains, cores: int, run: Run) -> tuple[list[Record], str]:
    """Run all chains; returns (the record of each task, the reason why some were stopped early or "").

    Without a checkpoint, Ctrl-C ends the run with the draws so far, and a chain whose process died repeatedly has no
    draws. With a checkpoint, which then holds all draws, ``Interrupted`` is raised after a signal, and UserError for a
    chain that died. A chain that diverged (``ChainLost``) has no draws; its error is raised if no chain has any.
    """
    chains, in_reach, checkpoint = len(plan.starts), not on_cluster(), run.checkpoint
    children = [None if checkpoint is None else checkpoint.child(f"chain-{c}") for c in range(chains)]
    records = [plan.record(None if child is None else child.load()) for child in children]
    plan.checkpoints = children if in_reach else [None] * chains
    todo = [c for c in range(chains) if not records[c].finished]
    transitions, done_now = plan.sampler.transitions, np.array([record.done for record in records])
    total, reported = chains * transitions, done_now.sum()
    if run.max_minutes is not None:  # each chain has an equal share of the time that is left
        plan.least = run.least
        plan.max_minutes = max(0.0, run.max_minutes - run.minutes) / max(1, math.ceil(len(todo) / cores))
    died, stopped, lost = [], "", {}

    def progress(index: int, share: float, figures: Figures) -> None:
        nonlocal reported
        done_now[todo[index]] = round(share * transitions)
        if figures and done_now.sum() != reported:
            reported = done_now.sum()
            run.tell(int(reported), total, figures)

    def done(index: int, result: tuple[Record, Figures] | None) -> None:
        if result is None:
            return
        c = todo[index]
        records[c] = result[0]
        if children[c] is not None and not in_reach and records[c].finished:
            children[c].save({"record": records[c].state(), "kernel": {}})
        progress(index, records[c].done / transitions, result[1])

    def failed(c: int, error: UserError) -> None:
        if isinstance(error, WorkerDied):
            died.append(c)
        elif isinstance(error, ChainLost):
            lost[c], records[c] = error, plan.record(None)
        else:
            raise error

    def watch() -> None:
        if run.stop or any(record.interrupted for record in records):
            raise KeyboardInterrupt

    options = dict(cores=cores, names=list(map(plan.name, todo)), all_threads=chains == 1, grace=math.inf)
    try:
        with executor("here" if in_reach and cores == 1 else None):
            map_tasks(plan, todo, **options, progress=progress, done=done, failed=failed, watch=watch)
    except KeyboardInterrupt:
        if checkpoint is not None and not checkpoint.stop:
            raise
        stopped = "stopped by Ctrl-C"
    if checkpoint is not None and checkpoint.stop:
        raise Interrupted(f"stopped after step {sum(record.done for record in records):,} of {total:,}")
    if died and not stopped:
        stopped = f"{', '.join(map(plan.name, sorted(died)))} died in its process (killed, or out of memory?)"
        if checkpoint is not None:
            raise UserError(f"{stopped}; the draws so far of every chain are kept: go on with --resume (resume=True)")
        if not any(record.kept for record in records):
            raise UserError(f"{stopped}; nothing was drawn: run the chains one after the other, with cores=1")
    if lost and not stopped:
        if not any(record.kept for record in records):
            raise next(iter(lost.values()))
        stopped = f"{next(iter(lost.values()))}{f' (and {len(lost) - 1} more)' if len(lost) > 1 else ''}"
    return records, stopped
