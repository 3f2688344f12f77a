"""Seconds of training until q has an ELBO and an NLL: this package beside others that take any network.

10,000 images of MNIST, batches of 128, prior Normal(0, 1), q mean-field. This package fits by its defaults (stopped
by the rows of the NLL) and to the highest ELBO (patience 0), the others' Adam by three rates (their examples have
0.001); the quickest counts. Every eight CPU seconds (six seconds on a GPU), which take no part, the ELBO is estimated
on all rows (one draw) and the NLL on 1,000 others (probabilities averaged over 100 draws), by one code for all: the
weights of linear and convolutional layers are drawn, others are their means; normalisation takes its statistics from
the rows at hand. Of a module on a CPU, every 48 seconds, of 2,000 and of 400 rows, with the lower two rates.
"""

from __future__ import annotations

import copy
import math
import re
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

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


class Plan(NamedTuple):
    """Seconds between two looks, and of a fit of others; rows that a look takes; how many of ``RATES``."""

    interval: float
    longest: float
    train: int = 10_000
    val: int = 1000
    rates: int = 3


CPU, CUDA, MODULE_ON_CPU = Plan(8.0, 120.0), Plan(6.0, 60.0), Plan(48.0, 240.0, 2000, 400, 2)
OURS = {"my-network, rows": "rows", "my-network, weights": "weights"}
Course = list[list[float]]  # [seconds, ELBO a row in nats, NLL in nats] of each look
Moments = Mapping[str, tuple[Tensor, Tensor]]  # {parameter: (μ, σ)}


def plan_of(task: Problem) -> Plan:
    """A look takes a hundred times as long of a module as of a network of layers."""
    return CUDA if task.device.type == "cuda" else MODULE_ON_CPU if task.sizes in MODULES else CPU


@torch.no_grad()
def look(net: nn.Module, q: Moments, data: bp.Dataset, plan: Plan) -> list[float]:
    """(ELBO a training row, NLL a validation row), in nats."""
    (x, y), (x_val, y_val) = ((a[:n], b[:n]) for a, b, n in ((data.x_train, data.y_train, plan.train),
                                                             (data.x_val, data.y_val, plan.val)))  # fmt: skip
    drawn = {f"{name}.{of}" for name, layer in net.named_modules() for of in ("weight", "bias")
             if isinstance(layer, nn.Linear | nn.Conv2d)}  # fmt: skip

    def outputs(x: Tensor) -> Tensor:
        weights = {name: torch.normal(m, s) if name in drawn else m for name, (m, s) in q.items()}
        return functional_call(net, weights, (x,))

    with bp.isolated(0):  # the same draws at each look
        of = [q[name] for name in q if name in drawn]
        kl = sum(kl_divergence(Normal(m, s), Normal(0.0, 1.0)).double().sum() for m, s in of)
        parts = zip(x.split(1000), y.split(1000), strict=True)
        likelihood = -sum(F.cross_entropy(outputs(x), y, reduction="sum") for x, y in parts) / len(x)
        log_p = torch.stack([outputs(x_val).log_softmax(1) for _ in range(100)]).logsumexp(0) - math.log(100)
        return [(likelihood - kl / len(data.x_train)).item(), F.nll_loss(log_p, y_val).item()]


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
    """``Plan.longest`` seconds of steps, rows in a new order each epoch."""
    plan, runner, net, course, spent, batches = plan_of(task), Runner(PEERS[name], task), network(task), [], 0.0, []
    with runner.active():
        while spent < plan.longest:
            start = clock(task.device)
            while clock(task.device, wait=False) - start < plan.interval:
                rows = (batches := batches or [*torch.randperm(task.rows, device=task.device).split(task.batch)]).pop()
                runner.step(data.x_train[rows], data.y_train[rows])
            spent += clock(task.device) - start
            course.append([spent, *look(net.to(task.device), moments(runner.step), data, plan)])
    return course


def ours(sampling: str, task: Problem, data: bp.Dataset, patience: int | None) -> Course:
    """``bp.fit`` to its end, or for twice ``Plan.longest``; four times, of a module on a CPU, looks included."""
    plan, net, course, start, apart = plan_of(task), network(task), [], clock(task.device), [0.0]
    looked_at, stopping = copy.deepcopy(net).to(task.device), {}

    class Watched(bp.SVI):
        def minimise(self, *given: Any, **how: Any) -> Any:
            stopping.update(how)
            return super().minimise(*given, **how)

        def run(self, model: Any, guide: Any, given: bp.Dataset, *, report: Any = None, **rest: Any) -> bp.Posterior:
            def watch(*_: object) -> None:
                due = plan.interval + (course[-1][0] if course else 0.0)
                if clock(task.device, wait=False) - start - apart[0] >= due:
                    spent = (now := clock(task.device)) - start - apart[0]
                    with stopping["watch"].averaged() if "watch" in stopping else nullcontext():
                        means, scales = (cut(v.detach().clone(), guide.shapes) for v in (guide.loc, guide.scale))
                    course.append([spent, *look(looked_at, {n: (means[n], scales[n]) for n in means}, data, plan)])
                    apart[0] += clock(task.device) - now

            return super().run(model, guide, given, report=watch, **rest)

    minutes = (4 if plan is MODULE_ON_CPU else 2) * plan.longest / 60
    how = dict(seed=0, device=task.device.type, progress=False, max_minutes=minutes)
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
        for how in (0, None) if name in OURS else RATES[: plan_of(task).rates]:
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
