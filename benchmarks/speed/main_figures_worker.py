"""Measures figures of the ``bnn_pyro`` that it imports; started by ``main_figures.py`` once for each checkout.

A line of JSON in, {"figure": name}, a line out, {"seconds": of its unit, "answer": a number that was computed}. It uses
public names alone, so that one file measures checkouts of different ages.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

__all__ = ["FIGURES"]


def rows(bp: Any, sizes: tuple[int, ...], num: int) -> Any:
    """Synthetic standardised rows of a classification."""
    import torch

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num, sizes[0], generator=generator)
    y = torch.randint(sizes[-1], (num,), generator=generator)
    names = tuple(f"x{i}" for i in range(sizes[0]))
    schema = bp.Schema("classification", sizes[:1], tuple(map(str, range(sizes[-1]))), names)
    return bp.Dataset("rows", schema, x, y, x[:0], y[:0], x[:0], y[:0])


def fit(bp: Any, entry: Any, data: Any, method: Any) -> tuple[float, Any]:
    """(seconds, posterior)."""
    start = time.perf_counter()
    posterior = bp.fit(entry, data, method, seed=0, device="cpu", progress=False)
    return time.perf_counter() - start, posterior


def step(bp: Any, variant: str) -> tuple[float, float]:
    """A training step of 784-400-400-10, batches of 128: a fit of 160 steps, divided by them; the last ELBO."""
    entry = bp.ZOO[variant](hidden=(400, 400), prior="normal:1")
    seconds, posterior = fit(bp, entry, rows(bp, (784, 10), 1024), bp.SVI(epochs=20, batch_size=128, lr=1e-3))
    return seconds / 160, posterior.trace["elbo"][-1]


def small_step(bp: Any) -> tuple[float, float]:
    """A step of mean-field 1-32-1 on all rows of toy-curve: what Python takes."""
    seconds, posterior = fit(bp, bp.MeanField(hidden=(32,)), bp.load_data("toy-curve"), bp.SVI(epochs=500, lr=1e-3))
    return seconds / 500, posterior.trace["elbo"][-1]


@cache
def trained(bp: Any) -> Any:
    """A mean-field posterior of 784-400-400-10."""
    return fit(bp, bp.MeanField(hidden=(400, 400)), rows(bp, (784, 10), 1024), bp.SVI(epochs=1, lr=1e-3))[1]


def prediction(bp: Any) -> tuple[float, float]:
    """1,000 rows by 100 draws; the first mean probability."""
    x = rows(bp, (784, 10), 1000).x_train
    posterior = trained(bp)
    start = time.perf_counter()
    mean = bp.predict(posterior, x, num_draws=100, seed=0).mean
    return time.perf_counter() - start, mean[0, 0].item()


def gradient(bp: Any, method: Any) -> tuple[float, float]:
    """A gradient of a sampler on breast-cancer, 2-5-5-1: the whole fit by those after warm-up; a weight's last draw."""
    data = bp.load_data("breast-cancer", features=["mean radius", "mean texture"])
    entry = bp.MeanField(hidden=(5, 5), activation="tanh", prior="fan-in:1.5")
    seconds, posterior = fit(bp, entry, data, method)
    last = posterior.chains["layers.0.weight"].flatten()[-1].item()
    return seconds / float(posterior.stats["n_steps"].sum()), last


def sghmc(bp: Any) -> tuple[float, float]:
    """An epoch of a last layer of 256 features, 4,096 rows, without a start that is optimised; a weight's last draw."""
    method = bp.SGHMC(epochs=20, burn_in=1, batch_size=512, lr=0.1, start="jitter")
    seconds, posterior = fit(bp, bp.MeanField(hidden=()), rows(bp, (256, 10), 4096), method)
    return seconds / 20, posterior.chains["layers.0.weight"].flatten()[-1].item()


#: Name -> what measures it once: (seconds of its unit, a number that was computed).
FIGURES: dict[str, Callable[[Any], tuple[float, float]]] = {
    "mean-field step": lambda bp: step(bp, "mean-field"),
    "hidden-layer step": lambda bp: step(bp, "hidden-layer"),
    "small step": small_step,
    "predict": prediction,
    "NUTS gradient": lambda bp: gradient(bp, bp.NUTS(chains=1, warmup=300, draws=500, cores=1)),
    "ChEES gradient": lambda bp: gradient(bp, bp.ChEES(chains=64, warmup=200, draws=100)),
    "SGHMC epoch": sghmc,
}


def main() -> None:
    """Answer line by line."""
    warnings.simplefilter("ignore")
    import bnn_pyro as bp

    for line in sys.stdin:
        request = json.loads(line)
        if "about" in request:
            print(json.dumps({"package": bp.__file__}), flush=True)
            continue
        seconds, answer = FIGURES[request["figure"]](bp)
        print(json.dumps({"seconds": seconds, "answer": answer}), flush=True)


if __name__ == "__main__":
    main()
