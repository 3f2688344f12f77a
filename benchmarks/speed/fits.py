"""Seconds of training until q has an ELBO and an NLL: this package beside others that take any network.

10,000 images of MNIST, batches of 128, prior Normal(0, 1), q mean-field. This package fits by its defaults (stopped
by the rows of the NLL) and to the highest ELBO (patience 0), the others' Adam by three rates (their examples have
0.001); the quickest counts. Every eight CPU seconds (six seconds on a GPU), which take no part, the ELBO is estimated
on all rows (one draw) and the NLL on 1,000 others (probabilities averaged over 100 draws), by one code for all: the
weights of linear and convolutional layers are drawn, others are their means; normalisation takes its statistics from
the rows at hand.
"""

from __future__ import annotations

import copy
import math
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyro
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call

import bnn_pyro as bp
from benchmarks.speed.peers import PEERS
from benchmarks.speed.problem import MODULES, Problem, Runner, Step, network, wait_for
from bnn_pyro.parts.weights import cut

__all__ = ["level_of", "seconds_to", "time_fits"]

RATES = (0.001, 0.003, 0.01)
INTERVALS, MAX_SECONDS = {"cpu": 8.0, "cuda": 6.0}, {"cpu": 120.0, "cuda": 60.0}  # of a look, and of a fit of others
OURS = {"my-network, rows": "rows", "my-network, weights": "weights"}
Course = list[list[float]]  # [seconds, ELBO a row in nats, NLL in nats] of each look
Moments = Mapping[str, tuple[Tensor, Tensor]]  # {parameter: (μ, σ)}


@torch.no_grad()
def look(net: nn.Module, q: Moments, data: bp.Dataset) -> list[float]:
    """(ELBO a training row, NLL a validation row), in nats."""
    drawn = {f"{name}.{of}" for name, layer in net.named_modules() for of in ("weight", "bias")
             if isinstance(layer, nn.Linear | nn.Conv2d)}  # fmt: skip

    def outputs(x: Tensor) -> Tensor:
        weights = {name: torch.normal(m, s) if name in drawn else m for name, (m, s) in q.items()}
        return functional_call(net, weights, (x,))

    with bp.isolated(0):  # the same draws at each look
        of = [q[name] for name in q if name in drawn]
        kl = sum(kl_divergence(Normal(m, s), Normal(0.0, 1.0)).double().sum() for m, s in of)
        parts = zip(data.x_train.split(1000), data.y_train.split(1000), strict=True)
        likelihood = -sum(F.cross_entropy(outputs(x), y, reduction="sum") for x, y in parts) / len(data.x_train)
        log_p = torch.stack([outputs(data.x_val).log_softmax(1) for _ in range(100)]).logsumexp(0) - math.log(100)
        return [(likelihood - kl / len(data.x_train)).item(), F.nll_loss(log_p, data.y_val).item()]


def moments(step: Step) -> Moments:
    """Of another package's q; call inside ``Runner.active``."""
    store = dict(pyro.get_param_store().items())
    if store:
        names = [name.removesuffix(".loc") for name in store if name.endswith(".loc")]
        return {n.removeprefix("net_guide.net."): (store[f"{n}.loc"], store[f"{n}.scale"]) for n in names}
    q, named = {}, dict(step.net.named_parameters())
    for name, value in named.items():
        if "mu_" in name:  # bayesian-torch
            weight = name.replace("mu_", "").replace("kernel", "weight")
            q[weight] = value, F.softplus(named[name.replace("mu_", "rho_")])
        elif name.endswith("_mean"):  # torch_blue
            q[name.replace("._", ".").removesuffix("_mean")] = value, named[name.replace("_mean", "_log_std")].exp()
        elif not re.search("rho_|_log_std$", name):  # a point
            q[name] = value, torch.zeros_like(value)
    return q


def clock(device: torch.device, wait: bool = True) -> float:
    """CPU seconds of this process, or with a GPU those of a clock on the wall, when all is done that it was given."""
    if wait:
        wait_for(device)
    return time.perf_counter() if device.type == "cuda" else time.process_time()


def theirs(name: str, task: Problem, data: bp.Dataset) -> Course:
    """``MAX_SECONDS`` of steps, rows in a new order each epoch."""
    runner, net, course, spent, batches = Runner(PEERS[name], task), network(task), [], 0.0, []
    with runner.active():
        while spent < MAX_SECONDS[task.device.type]:
            start = clock(task.device)
            while clock(task.device, wait=False) - start < INTERVALS[task.device.type]:
                rows = (batches := batches or [*torch.randperm(task.rows, device=task.device).split(task.batch)]).pop()
                runner.step(data.x_train[rows], data.y_train[rows])
            spent += clock(task.device) - start
            course.append([spent, *look(net.to(task.device), moments(runner.step), data)])
    return course


def ours(sampling: str, task: Problem, data: bp.Dataset, patience: int | None) -> Course:
    """``bp.fit`` to its end, or for twice ``MAX_SECONDS``, looks included."""
    net, course, start, apart = network(task), [], clock(task.device), [0.0]
    looked_at = copy.deepcopy(net).to(task.device)

    class Watched(bp.SVI):
        def run(self, model: Any, guide: Any, given: bp.Dataset, *, report: Any = None, **rest: Any) -> bp.Posterior:
            def watch(*_: object) -> None:
                due = INTERVALS[task.device.type] + (course[-1][0] if course else 0.0)
                if clock(task.device, wait=False) - start - apart[0] >= due:
                    spent = (now := clock(task.device)) - start - apart[0]
                    means, scales = (cut(v.detach(), guide.shapes) for v in (guide.loc, guide.scale))
                    course.append([spent, *look(looked_at, {n: (means[n], scales[n]) for n in means}, data)])
                    apart[0] += clock(task.device) - now

            return super().run(model, guide, given, report=watch, **rest)

    how = dict(seed=0, device=task.device.type, progress=False, max_minutes=2 * MAX_SECONDS[task.device.type] / 60)
    bp.fit(bp.Bayesian(net, prior="normal:1", sampling=sampling), data, Watched(patience=patience), **how)
    return course


def time_fits(task: Problem, only: list[str], result: dict[str, Any]) -> None:
    """Fill ``result`` with {"contestant; patience or rate": course}; an interrupt keeps what is whole."""
    mnist = bp.load_data("mnist", limit=task.rows)
    parts = (mnist.x_train, mnist.y_train, mnist.x_val[:1000], mnist.y_val[:1000], mnist.x_test[:0], mnist.y_test[:0])
    shaped = [part if part.ndim == 1 or task.sizes in MODULES else part.flatten(1) for part in parts]
    data = bp.Dataset("mnist", task.schema, *(part.to(task.device) for part in shaped))
    peers = [name for name, who in PEERS.items() if who.modules and not who.absent]
    for name in (name for name in (*OURS, *peers) if not only or any(text in name for text in only)):
        for how in (0, None) if name in OURS else RATES:
            pyro.set_rng_seed(0)
            fit = ours(OURS[name], task, data, how) if name in OURS else theirs(name, replace(task, lr=how), data)
            result[f"{name}; {how}"] = fit
            print(f"  {name} {how}: {fit[-1][0]:.0f} s, ELBO and NLL {fit[-1][1:]}", flush=True)


def level_of(fits: Mapping[str, list[Course]], column: int) -> float:
    """What the best course of every contestant reaches, of the ELBO (1) or, negative, the NLL (2)."""
    return min(max(_so_far(course, column)[-1] for course in courses) for courses in fits.values())


def seconds_to(courses: list[Course], column: int, level: float) -> float:
    """The first seconds, on a line between two looks, at which one of the courses has it."""
    seconds = []
    for course in courses:
        values = _so_far(course, column)
        if (i := int(np.searchsorted(values, level))) < len(course):
            around = slice(max(0, i - 1), i + 1)
            seconds.append(float(np.interp(level, values[around], [line[0] for line in course[around]])))
    return min(seconds)


def _so_far(course: Course, column: int) -> np.ndarray:
    return np.maximum.accumulate([line[column] * (1 if column == 1 else -1) for line in course])
