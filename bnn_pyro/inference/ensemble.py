"""Deep ensembles: several point estimates of one network, from different starts, taken as draws of equal weight.

    ŵ_m = argmax_w log p(y | x, w) + log p(w),  m = 1 … M          p(y | x, D) ≈ 1/M Σ_m p(y | x, ŵ_m)

Lakshminarayanan, Pritzel & Blundell 2017, arXiv:1612.01474, without its adversarial examples. No posterior is
approximated around any of the M points: what they disagree on is how differently training can end.

A member is a function of a seed of its own, and is trained on one thread where there are several: one after the other
or many at once, here or on a cluster, the members are the same.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from bnn_pyro.checkpoint import Checkpoint, Interrupted, Run
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.distributed import here
from bnn_pyro.errors import UserError
from bnn_pyro.inference.potential import ARITHMETIC, EAGER, choose_cores
from bnn_pyro.inference.svi import MAP
from bnn_pyro.isolation import isolated
from bnn_pyro.parallel.executor import executor, on_cluster
from bnn_pyro.parallel.map import map_tasks
from bnn_pyro.progress import Figures, report_progress
from bnn_pyro.parts.guides import PointMass
from bnn_pyro.posterior import Posterior
from bnn_pyro.progress import Figures, Report, report_progress, should_stop
from bnn_pyro.settings import setting

__all__ = ["Ensemble"]

#: ({site: weights}, trace) of a member.
Member = tuple[dict[str, Tensor], dict[str, list[float]]]


@dataclass(frozen=True)
class Ensemble(MAP):
    """Settings of a deep ensemble: those of MAP, which finds every member.

    members  M, each with initial weights, an order of rows and dropout masks of its own
    cores    members at once, each in a process of its own; 1: one after the other in this one; 0: as many as there are
             cores, where training is long enough and the data are on the CPU. The members are the same
    """

    needs: ClassVar[frozenset[str]] = frozenset({"weights", "deterministic"})
    tiny: ClassVar[Mapping[str, Any]] = {**MAP.tiny, "members": 2}
    members: int = setting(5, low=1)
    cores: int = setting(0, low=0)

    #: Settings that no member depends on: a run may be resumed with others.
    incidental: ClassVar[tuple[str, ...]] = ("cores",)

    def run(self, model: nn.Module, guide: nn.Module | None, data: Dataset, **how: Any) -> Posterior:
        """Find the members and return each as a chain of one draw; see ``Method.run``.

        The trace is the mean over the members, as far as all of them trained. The guide is not used. Each member has a
        checkpoint of its own beside the run's.

        Raises UserError for a network with batch normalisation.
        """
        self.check(data)
        if any(isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) for part in model.modules()):
            raise UserError(
                "each member of an ensemble would have batch statistics of its own, and draws hold weights only; "
                "take layer or group normalisation instead of batch normalisation"
            )
        run, numbers = Run(**how), range(self.members)
        children = [None if run.checkpoint is None else run.checkpoint.child(f"member-{m + 1}") for m in numbers]
        states = [None if child is None else child.load() for child in children]
        found: dict[int, Member] = {m: state["found"] for m, state in enumerate(states) if state and "found" in state}
        todo = [m for m in numbers if m not in found]
        steps, before = self.epochs * math.ceil(len(data.x_train) / (self.batch_size or len(data.x_train))), len(found)

        def keep(index: int, member: Member) -> None:
            found[todo[index]] = member
            if (child := children[todo[index]]) is not None:
                child.save({"found": member})

        def watch() -> None:
            if run.stop:
                raise Interrupted(f"stopped with {len(found)} of {self.members} members found")

        def shown(done: float, of: int, figures: Figures) -> None:
            run.tell(round((before + done) * steps), self.members * steps, figures)

        rows = replace(data, x_test=data.x_test[:0], y_test=data.y_test[:0])  # the others need not travel
        train = partial(_train, self, model, rows, run.seed, [None] * self.members if on_cluster() else children)
        work = self.epochs * len(data.x_train) * sum(value.numel() for value in model.initial.values())
        seconds = self.members * (steps * EAGER + ARITHMETIC * work)
        where = dict(cores=choose_cores(self.cores, self.members, data.x_train.device, seconds), watch=watch)
        together = self.members == 1 or here().size > 1
        if together:  # here, on all threads; processes that share a fit agree by themselves on when to stop
            where = dict(all_threads=True)
        names = [f"member {m + 1} of {self.members}" for m in todo]
        with executor("here") if together else nullcontext():
            map_tasks(train, todo, names=names, report=shown, done=keep, **where)
        members = [found[m] for m in numbers]
        chains = {s: torch.stack([w[s].to(data.x_train.device) for w, _ in members])[:, None] for s in members[0][0]}
        return Posterior(model, data.schema, chains=chains, trace=_mean([trace for _, trace in members]))


def _train(
    method: Ensemble, model: nn.Module, data: Dataset, seed: int, children: Sequence[Checkpoint | None], m: int
) -> Member:
    """Member m, wherever this is called.   children: checkpoints of the members, where their files are in reach."""
    seed = seed if m == 0 else int(np.random.SeedSequence([seed, m]).generate_state(1)[0])
    with isolated(seed):
        model = copy.deepcopy(model)
        if m:  # the first starts where the model does, as MAP would
            for part in model.modules():
                if hasattr(part, "reset_parameters"):
                    part.reset_parameters()
        point = PointMass(model.initial).to(data.x_train.device)
        report = lambda done, of, figures: report_progress(done, of, {"member": m + 1, **figures})  # noqa: E731
        trace = method.find(model, point, data, Run(seed, children[m], report))
    return {site: value.detach().clone() for site, value in point.sites().items()}, trace


def _mean(traces: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    length = min(len(trace["epoch"]) for trace in traces)
    columns = {name: [trace[name][:length] for trace in traces] for name in traces[0]}
    return {name: torch.tensor(lines, dtype=torch.float64).mean(0).tolist() for name, lines in columns.items()}
