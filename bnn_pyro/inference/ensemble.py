"""Deep ensembles: several point estimates of one network, from different starts, taken as draws of equal weight.

    ŵ_m = argmax_w log p(y | x, w) + log p(w),  m = 1 … M          p(y | x, D) ≈ 1/M Σ_m p(y | x, ŵ_m)

Lakshminarayanan, Pritzel & Blundell 2017, arXiv:1612.01474, without its adversarial examples. No posterior is
approximated around any of the M points: what they disagree on is how differently training can end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bnn_pyro.checkpoint import Checkpoint
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.errors import UserError
from bnn_pyro.inference.method import Report
from bnn_pyro.inference.point import MAP
from bnn_pyro.parts.guides import PointMass
from bnn_pyro.posterior import Posterior

__all__ = ["Ensemble"]


@dataclass(frozen=True)
class Ensemble(MAP):
    """Settings of a deep ensemble: those of MAP, which finds every member.

    members  M, each with initial weights, an order of rows and dropout masks of its own
    """

    members: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.members < 1:
            raise UserError(f"members must be at least 1, got {self.members}")

    def run(
        self,
        model: nn.Module,
        guide: nn.Module | None,
        data: Dataset,
        *,
        seed: int = 0,
        checkpoint: Checkpoint | None = None,
        report: Report | None = None,
    ) -> Posterior:
        """Find the members one after the other and return each as a chain of one draw; see ``Method.run``.

        The trace is the mean over the members, as far as all of them trained. The guide is not used.
        """
        state = (checkpoint.load() if checkpoint is not None else None) or {"done": [], "traces": []}
        done, traces = state["done"], state["traces"]
        for member in range(len(done), self.members):
            if member:
                _start_afresh(model)
            point = PointMass(model.initial).to(data.x_train.device)
            stage = None if checkpoint is None else _Stage(checkpoint, done, traces)
            trace = self.find(
                model,
                point,
                data,
                seed=seed + 7919 * member,  # of the order of the rows
                checkpoint=stage,
                report=None if report is None else _shifted(report, member, self.members),
            )
            done = [*done, {site: value.detach().clone() for site, value in point.sites().items()}]
            traces = [*traces, trace]
        where = data.x_train.device
        chains = {site: torch.stack([member[site].to(where) for member in done])[:, None] for site in done[0]}
        return Posterior(model, data.schema, chains=chains, trace=_mean(traces))


class _Stage:
    """A checkpoint as one member sees it: its own state, kept beside the members that are done."""

    def __init__(self, whole: Checkpoint, done: list, traces: list) -> None:
        self.whole, self.beside = whole, {"done": done, "traces": traces}

    def load(self) -> dict[str, Any] | None:
        state = self.whole.load()
        return state["current"] if state is not None and len(state["done"]) == len(self.beside["done"]) else None

    def save(self, state: dict[str, Any]) -> None:
        self.whole.save({**self.beside, "current": state})

    @property
    def due(self) -> bool:
        return self.whole.due

    @property
    def stop(self) -> bool:
        return self.whole.stop


def _start_afresh(model: nn.Module) -> None:
    for part in model.net.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()


def _shifted(report: Report, member: int, members: int) -> Report:
    def shifted(done: int, of: int, figures: Mapping[str, float]) -> None:
        report(member * of + done, members * of, {"member": member + 1, **figures})

    return shifted


def _mean(traces: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    length = min(len(trace["epoch"]) for trace in traces)
    columns = {name: [trace[name][:length] for trace in traces] for name in traces[0]}
    return {name: torch.tensor(lines, dtype=torch.float64).mean(0).tolist() for name, lines in columns.items()}
