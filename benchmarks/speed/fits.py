"""CPU seconds of training until q has an ELBO and an NLL: this package beside others that take any network.

10,000 images of MNIST, batches of 128, prior Normal(0, 1), q mean-field. This package fits by its defaults (stopped
by the rows of the NLL) and to the highest ELBO (patience 0), the others' Adam by three rates (their examples have
0.001); the quickest counts. Every eight seconds, which take no part, the ELBO is estimated on all rows (one draw)
and the NLL on 1,000 others (probabilities averaged over 100 draws): by μ and σ of every weight, by one code for all.
"""

from __future__ import annotations

import math
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
from benchmarks.speed.problem import Problem, Runner, Step, network
from bnn_pyro.parts.weights import cut

__all__ = ["level_of", "seconds_to", "time_fits"]

RATES, INTERVAL, MAX_SECONDS = (0.001, 0.003, 0.01), 8.0, 120.0  # of a look, and of a fit of others
OURS = {"my-network, rows": "rows", "my-network, weights": "weights"}
Course = list[list[float]]  # [seconds, ELBO a row in nats, NLL in nats] of each look
Moments = Mapping[str, tuple[Tensor, Tensor]]  # {parameter: (μ, σ)}


@torch.no_grad()
def look(net: nn.Module, q: Moments, data: bp.Dataset) -> list[float]:
    """(ELBO a training row, NLL a validation row), in nats."""

    def outputs(x: Tensor) -> Tensor:
        return functional_call(net, {name: torch.normal(m, s) for name, (m, s) in q.items()}, (x,))

    with bp.isolated(0):  # the same draws at each look
        kl = sum(kl_divergence(Normal(m, s), Normal(0.0, 1.0)).double().sum() for m, s in q.values())
        likelihood = -F.cross_entropy(outputs(data.x_train), data.y_train)
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
            q[name.replace("mu_", "")] = value, F.softplus(named[name.replace("mu_", "rho_")])
        elif name.endswith("_mean"):  # torch_blue
            q[name.replace("._", ".").removesuffix("_mean")] = value, named[name.replace("_mean", "_log_std")].exp()
    return q


def theirs(name: str, task: Problem, data: bp.Dataset) -> Course:
    """``MAX_SECONDS`` seconds of steps, rows in a new order each epoch."""
    runner, net, course, spent, batches = Runner(PEERS[name], task), network(task), [], 0.0, []
    with runner.active():
        while spent < MAX_SECONDS:
            start = time.process_time()
            while time.process_time() - start < INTERVAL:
                rows = (batches := batches or [*torch.randperm(task.rows).split(task.batch)]).pop()
                runner.step(data.x_train[rows], data.y_train[rows])
            spent += time.process_time() - start
            course.append([spent, *look(net, moments(runner.step), data)])
    return course


def ours(sampling: str, task: Problem, data: bp.Dataset, patience: int | None) -> Course:
    """``bp.fit`` to its end."""
    net, course, start, apart = network(task), [], time.process_time(), [0.0]

    class Watched(bp.SVI):
        def run(self, model: Any, guide: Any, data: bp.Dataset, *, report: Any = None, **rest: Any) -> bp.Posterior:
            def watch(*_: object) -> None:
                spent = (now := time.process_time()) - start - apart[0]
                if spent >= INTERVAL + (course[-1][0] if course else 0.0):
                    means, scales = (cut(v.detach(), guide.shapes) for v in (guide.loc, guide.scale))
                    course.append([spent, *look(net, {n: (means[n], scales[n]) for n in means}, data)])
                    apart[0] += time.process_time() - now

            return super().run(model, guide, data, report=watch, **rest)

    how = dict(seed=0, device="cpu", progress=False)
    bp.fit(bp.Bayesian(net, prior="normal:1", sampling=sampling), data, Watched(patience=patience), **how)
    return course


def time_fits(task: Problem, only: list[str], result: dict[str, Any]) -> None:
    """Fill ``result`` with {"contestant; patience or rate": course}; an interrupt keeps what is whole."""
    mnist = bp.load_data("mnist", limit=task.rows)
    x, x_val = mnist.x_train.flatten(1), mnist.x_val[:1000].flatten(1)
    data = bp.Dataset("mnist", task.schema, x, mnist.y_train, x_val, mnist.y_val[:1000], x[:0], mnist.y_train[:0])
    peers = [name for name, who in PEERS.items() if who.modules and not who.absent]
    for name in (name for name in (*OURS, *peers) if not only or any(text in name for text in only)):
        for how in (0, None) if name in OURS else RATES:
            pyro.set_rng_seed(0)
            fit = ours(OURS[name], task, data, how) if name in OURS else theirs(name, replace(task, lr=how), data)
            result[f"{name}; {how}"] = fit
            print(f"  {name} {how}: {fit[-1][0]:.0f} CPU s, ELBO and NLL {fit[-1][1:]}", flush=True)


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
