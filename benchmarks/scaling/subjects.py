"""What is measured, by name: a fit or a prediction of synthetic rows of given sizes."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

import bnn_pyro as bp
from benchmarks.memory import peak
from benchmarks.timing import Enough, clocked

__all__ = ["SUBJECTS", "Sizes", "Subject", "measure", "run"]

#: Epochs that are timed at least after the first, and seconds after which that is enough.
EPOCHS, SECONDS = 3, 2.0


@dataclass(frozen=True)
class Sizes:
    """N rows of ``inputs`` numbers, two hidden layers of ``width`` (0: a linear model), K classes, B rows a batch.

    chains  C of a sampler      draws  stored of each chain, or S of a prediction      points  that are predicted
    memory  MiB that ``predict`` is told to keep within; 0: more than it can use
    threads of this process
    """

    rows: int = 512
    inputs: int = 784
    width: int = 400
    classes: int = 10
    batch: int = 128
    chains: int = 1
    draws: int = 100
    points: int = 1000
    memory: int = 256
    threads: int = 1

    @property
    def hidden(self) -> tuple[int, ...]:
        """Widths of the hidden layers."""
        return (self.width, self.width) if self.width else ()

    @property
    def outputs(self) -> int:
        """Numbers that the network gives: one log-odds for two classes."""
        return 1 if self.classes == 2 else self.classes

    @property
    def weights(self) -> int:
        """P, weights and biases of the network."""
        widths = (self.inputs, *self.hidden, self.outputs)
        return sum((i + 1) * o for i, o in pairwise(widths))

    def data(self) -> bp.Dataset:
        """Standard normal inputs, random labels; no validation and no test rows."""
        g = torch.Generator().manual_seed(0)
        x = torch.randn(self.rows, self.inputs, generator=g)
        y = torch.randint(self.classes, (self.rows,), generator=g)
        schema = bp.Schema("classification", (self.inputs,), tuple(str(k) for k in range(self.classes)))
        return bp.Dataset("synthetic", schema, x, y, x[:0], y[:0], x[:0], y[:0])


@dataclass(frozen=True)
class Subject:
    """One thing to fit.

    title   how the tables name it
    unit    what its seconds are of: "step" of a mini-batch, "iteration" of all chains, "fit" or "prediction"
    sizes   where it starts from
    whole   whether it is fitted to its end
    """

    title: str
    unit: str
    sizes: Sizes
    entry: Callable[[Sizes], object]
    method: Callable[[Sizes], Any] | None = None
    whole: bool = False


def _net(kind: type, **more: object) -> Callable[[Sizes], object]:
    return lambda s: kind(hidden=s.hidden, **more)


def _long(kind: type, **settings: Any) -> Callable[[Sizes], Any]:
    return lambda s: kind(epochs=1000, batch_size=s.batch, lr=1e-4, **settings)


def _sghmc(s: Sizes) -> bp.SGHMC:
    """As many epochs as fill the store: one draw is kept an epoch."""
    return bp.SGHMC(epochs=s.draws + 2, burn_in=1, batch_size=s.batch, lr=1e-3, chains=s.chains, max_draws=s.draws)


def _chees(s: Sizes) -> bp.ChEES:
    return bp.ChEES(chains=s.chains, warmup=100, draws=s.draws, superchains=min(16, s.chains), compiled="yes")


LINEAR = _net(bp.MeanField)
WIDE = Sizes()
FEATURES = Sizes(rows=4096, inputs=512, width=0, batch=512)
SUBJECTS: dict[str, Subject] = {
    "mean-field": Subject("mean-field, SVI", "step", WIDE, _net(bp.MeanField), _long(bp.SVI)),
    "hidden-layer": Subject("hidden-layer, SVI", "step", WIDE, _net(bp.HiddenLayerNet), _long(bp.SVI)),
    "map": Subject("mlp, MAP", "step", WIDE, _net(bp.MLP), _long(bp.MAP, patience=0)),
    "last-svi": Subject("last layer, SVI", "step", FEATURES, LINEAR, _long(bp.SVI)),
    "last-map": Subject("last layer, MAP", "step", FEATURES, LINEAR, _long(bp.MAP, patience=0)),
    "last-sghmc": Subject("last layer, SGHMC", "step", replace(FEATURES, draws=8), LINEAR, _sghmc, whole=True),
    "laplace": Subject("last layer, Laplace", "fit", replace(FEATURES, inputs=124), LINEAR, lambda s: bp.Laplace()),
    "sghmc-chains": Subject(
        "SGHMC, 64 features", "step", Sizes(1024, 64, 0, batch=128, draws=4), LINEAR, _sghmc, whole=True
    ),
    "chees-chains": Subject(
        "ChEES, logistic regression", "fit", Sizes(284, 30, 0, classes=2, draws=50, threads=2), LINEAR, _chees, True
    ),
    "chees-net": Subject(
        "ChEES, 2-5-5-1", "fit", Sizes(284, 2, 5, classes=2, draws=50, threads=2),
        _net(bp.MeanField, activation="tanh"), _chees, True,
    ),
    "predict": Subject("predict, mean-field", "prediction", WIDE, _net(bp.MeanField)),
}  # fmt: skip


def measure(name: str, sizes: Sizes) -> dict[str, float]:
    """{seconds (of the unit), peak and anonymous (bytes), …} of a run in this process, after a tiny one."""
    subject = SUBJECTS[name]
    torch.set_num_threads(sizes.threads)
    tiny = replace(sizes, rows=32, inputs=min(sizes.inputs, 8), width=min(sizes.width, 8), batch=16, points=4, draws=2)
    run(subject, replace(tiny, classes=min(sizes.classes, 3), chains=min(sizes.chains, 2)), 0.0)
    with peak() as found:
        figures = run(subject, sizes, SECONDS)
    return {**figures, "peak": found.resident, "anonymous": found.anonymous}


def run(subject: Subject, sizes: Sizes, seconds: float) -> dict[str, float]:
    """Seconds of the unit, of one run from data to posterior.   seconds: that mini-batches are timed for."""
    if subject.method is None:
        return _predicted(subject, sizes)
    data = sizes.data()
    method = clocked(subject.method(sizes), math.inf if subject.whole else seconds, epochs_least=EPOCHS + 1)
    start, figures = time.perf_counter(), {}
    with suppress(Enough):
        posterior = bp.fit(subject.entry(sizes), data, method, device="cpu", progress=False)
        if "n_steps" in posterior.stats:  # of the draws that were kept
            figures["gradients"] = posterior.stats["n_steps"].mean().item()
    figures["whole"] = time.perf_counter() - start
    if subject.unit == "fit":
        return {"seconds": figures["whole"], **figures}
    epochs, steps = method.epoch_seconds(), -(-sizes.rows // sizes.batch)
    return {"seconds": statistics.median(epochs) / steps, "fastest": min(epochs) / steps, **figures}


def _predicted(subject: Subject, sizes: Sizes) -> dict[str, float]:
    """By the guide as it is before training."""
    data, entry = sizes.data(), subject.entry(sizes)
    with bp.isolated(0):
        x = torch.randn(sizes.points, sizes.inputs)
        model = entry.model(data.schema)
        posterior = bp.Posterior(model, data.schema, guide=entry.guide(model))
    start = time.perf_counter()
    bound = sizes.memory * 2**20 if sizes.memory else 2**50
    prediction = bp.predict(posterior, x, num_draws=sizes.draws, max_memory=bound)
    assert prediction.num_draws == sizes.draws
    return {"seconds": time.perf_counter() - start}
