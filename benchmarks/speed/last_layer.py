"""Speed and memory of a Bayesian last layer: SGHMC on features, several chains at once, an ensemble's predictions.

    python benchmarks/last_layer.py speed                   # about three minutes on two cores, with nothing beside it

Everything is synthetic: 48,000 images and as many rows of 256 features, 10 classes, a CNN with random weights of the
shape that is tuned on MNIST. Contestants take turns, in a new order every round; a ratio is that of two times of one
round, and what is kept is its median and quartiles over the rounds.

* "SGHMC" is ``SGHMC.run``, whole: its set-up, its batches, its trace and its stored draws are in its time. Several
  epochs a run, divided by their number.
* "… CNN for every batch" is the same run on images whose features are computed again for every batch, on a tenth of
  the rows, times ten.
* "by hand" is one chain in plain torch: rows gathered, W xᵀ + b, the gradient of the softmax's cross-entropy, its
  product with x, normal noise, the update; "… no gathering" takes the rows as they lie: matrix products and noise only.
* "matrix product" of a prediction is that of 10,000 × 256 features with 100 draws of a 256 × 10 layer, the faster of
  one batched and one flat product.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from hidden_layer import provenance
from torch import Tensor, nn

import bnn_pyro as bp
from bnn_pyro import isolated
from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.fitting import tuned
from bnn_pyro.inference import METHODS
from bnn_pyro.parts.backbone import Backbone, OnFeatures, Pretrained
from bnn_pyro.parts.likelihoods import make_likelihood
from bnn_pyro.parts.nets import MLP
from bnn_pyro.parts.priors import BayesianNet
from speed.memory import peak_bytes
from speed.timing import Times, ratio, spread

__all__ = ["measure"]

RESULTS = Path(__file__).parents[1] / "results" / "last_layer_speed.json"
ROWS, BATCH, FEATURES, CLASSES = 48_000, 512, 256, 10
IMAGES, DRAWS, CHAINS = 10_000, 100, 8
LR, FRICTION = 0.1, 0.03
LABELS = tuple(map(str, range(CLASSES)))
SCHEMA = Schema("classification", (FEATURES,), LABELS, tuple(f"x{i}" for i in range(FEATURES)))
IMAGE_SCHEMA = Schema("classification", (1, 28, 28), LABELS, ())
CPU = torch.device("cpu")

#: Ratios that are asked for: (what, numerator, denominator, at most).
EPOCH_RATIOS = (
    ("an epoch / by hand", "SGHMC", "by hand", None),
    ("an epoch / by hand, no gathering", "SGHMC", "by hand, no gathering", 2),
    (f"{CHAINS} chains / 1 chain", f"SGHMC, {CHAINS} chains", "SGHMC", 2.5),
)
CNN_RATIOS = (("an epoch / with the CNN for every batch", "SGHMC", "SGHMC, CNN for every batch", 1 / 20),)
PREDICT_RATIOS = (
    ("predict, features given / matrix product", "predict, features given", "matrix product", 1.5),
    ("predict / CNN once + matrix product", "predict", "CNN once + matrix product", None),
)


def head() -> BayesianNet:
    """A Bayesian last layer on features."""
    return BayesianNet(MLP((FEATURES,), (), CLASSES), make_likelihood(SCHEMA), "fan-in:4")


def dataset(x: Tensor, schema: Schema) -> bp.Dataset:
    """Training rows only."""
    y = torch.randint(CLASSES, (len(x),))
    return bp.Dataset("rows", schema, x, y, x[:0], y[:0], x[:0], y[:0])


def backbone() -> Backbone:
    """The CNN with random weights, up to its features."""
    _, best = tuned("convnet", "mnist")
    net = bp.ConvNet(**best.entry).model(IMAGE_SCHEMA).net
    last = net.layers[-1]
    if last.in_features != FEATURES:
        raise SystemExit(f"the tuned CNN has {last.in_features} features, and this benchmark is about {FEATURES}")
    return Backbone(Pretrained(_UpToFeatures(net), {"kind": "random"}, IMAGE_SCHEMA), IMAGE_SCHEMA)


class _UpToFeatures(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net.features(x)


def sghmc(model: BayesianNet, data: bp.Dataset, epochs: int, chains: int = 1) -> bp.Posterior:
    """Whole run of the package's own."""
    settings = {"epochs": epochs, "batch_size": BATCH, "lr": LR, "friction": FRICTION, "jitter": 0.1}
    method = METHODS["sghmc"](**settings, chains=chains, max_draws=max(1, epochs // 2))
    return method.run(model, None, data, seed=0)


def by_hand(x: Tensor, y: Tensor, epochs: int, gather: bool) -> Tensor:
    """The same chain in plain torch; nothing is recorded."""
    steps = math.ceil(len(x) / BATCH)
    size, eta, prior = len(x) // steps, LR / len(x), FEATURES / 16.0
    noise = math.sqrt(2 * FRICTION * eta)
    w, v = torch.zeros(FEATURES * CLASSES + CLASSES), torch.zeros(FEATURES * CLASSES + CLASSES)
    weight, bias = w[: FEATURES * CLASSES].view(CLASSES, FEATURES), w[FEATURES * CLASSES :].unsqueeze(-1)
    one_hot = torch.nn.functional.one_hot(y, CLASSES).to(x.dtype).T.contiguous() if not gather else None
    for _ in range(epochs):
        order = torch.randperm(len(x))[: steps * size].view(steps, size) if gather else None
        for i in range(steps):
            if gather:
                rows = x.index_select(0, order[i])
                residual = torch.addmm(bias, weight, rows.mT).softmax(0)
                residual.sub_(torch.nn.functional.one_hot(y.index_select(0, order[i]), CLASSES).mT)
            else:
                part = slice(i * size, (i + 1) * size)
                rows = x[part]
                residual = torch.addmm(bias, weight, rows.mT).softmax(0).sub_(one_hot[:, part])
            gradient = torch.cat([(residual @ rows).flatten(), residual.sum(1)]).mul_(len(x) / size)
            gradient.add_(w, alpha=prior)
            v.mul_(1 - FRICTION).add_(gradient, alpha=-eta).add_(torch.randn_like(v), alpha=noise)
            w.add_(v)
    return w


def in_turn(
    contestants: dict[str, tuple[float, Callable[[], object]]], rounds: int, report: Callable[[str], None]
) -> Times:
    """Seconds of every contestant, {name: (what its time is divided by, what it does)}, a number a round."""
    times: Times = {}
    order = random.Random(0)
    for _, run in contestants.values():
        run()
    for i in range(rounds):
        names = list(contestants)
        order.shuffle(names)
        for name in names:
            report(f"round {i + 1} of {rounds}: {name}")
            units, run = contestants[name]
            start = time.perf_counter()
            run()
            times.setdefault(name, []).append((time.perf_counter() - start) / units)
    return times


def epochs(x: Tensor, images: Tensor, net: Backbone, args: dict[str, int], report: Callable[[str], None]) -> dict:
    """Milliseconds of an epoch, and the ratios."""
    data, model, few = dataset(x, SCHEMA), head(), 3
    own = (few, lambda: sghmc(model, data, few))
    contestants = {
        "SGHMC": own,
        f"SGHMC, {CHAINS} chains": (few, lambda: sghmc(model, data, few, CHAINS)),
        "by hand": (few, lambda: by_hand(data.x_train, data.y_train, few, True)),
        "by hand, no gathering": (few, lambda: by_hand(data.x_train, data.y_train, few, False)),
    }
    times = in_turn(contestants, args["rounds"], report)
    # The very same run: features are what its network makes of a batch first.
    again = BayesianNet(MLP((1, 28, 28), (), CLASSES), make_likelihood(SCHEMA), "fan-in:4")
    again.net.layers[0] = head().net.layers[0]
    again.net.enter = lambda images: net(images.flatten(0, -4)).unflatten(0, images.shape[:-3])
    tenth = dataset(images, IMAGE_SCHEMA)
    slow = {"SGHMC": own, "SGHMC, CNN for every batch": (len(images) / ROWS, lambda: sghmc(again, tenth, 1))}
    slow_times = in_turn(slow, args["slow_rounds"], report)
    milliseconds = {name: spread([1000 * v for v in values], 2) for name, values in (slow_times | times).items()}
    return {"ms": milliseconds, "ratios": {**compare(times, EPOCH_RATIOS), **compare(slow_times, CNN_RATIOS)}}


def predictions(images: Tensor, net: Backbone, args: dict[str, int], report: Callable[[str], None]) -> dict:
    """Milliseconds of a prediction and its parts, the ratios, and bytes at the peak."""
    layer = head()
    chains = {s: torch.randn(1, DRAWS, *v.shape) / 16 for s, v in layer.initial.items()}
    given = bp.Posterior(layer, SCHEMA, chains=chains)
    whole = bp.Posterior(OnFeatures(net, layer), IMAGE_SCHEMA, chains=chains)
    x = net(images)
    weights = chains["layers.0.weight"][0]
    flat = weights.flatten(0, 1)
    contestants = {
        "batched product": (1, lambda: weights @ x.mT),
        "flat product": (1, lambda: flat @ x.mT),
        "predict, features given": (1, lambda: bp.predict(given, x, num_draws=DRAWS)),
        "predict, features given, and mean": (1, lambda: bp.predict(given, x, num_draws=DRAWS).mean),
    }
    times = in_turn(contestants, args["rounds"], report)
    slow = in_turn(
        {
            "CNN once": (1, lambda: net(images)),
            "batched product": contestants["batched product"],
            "flat product": contestants["flat product"],
            "predict": (1, lambda: bp.predict(whole, images, num_draws=DRAWS)),
        },
        args["slow_rounds"],
        report,
    )
    for some in (times, slow):
        some["matrix product"] = [min(pair) for pair in zip(some["batched product"], some["flat product"], strict=True)]
    slow["CNN once + matrix product"] = [a + b for a, b in zip(slow["CNN once"], slow["matrix product"], strict=True)]
    report("memory of a prediction")
    memory = {
        "predict, features given": peak(lambda: bp.predict(given, x, num_draws=DRAWS)),
        "predict": peak(lambda: bp.predict(whole, images, num_draws=DRAWS)),
        "the prediction itself": 4 * IMAGES * DRAWS * CLASSES,
    }
    milliseconds = {name: spread([1000 * v for v in values], 2) for name, values in (slow | times).items()}
    ratios = {**compare(times, PREDICT_RATIOS[:1]), **compare(slow, PREDICT_RATIOS[1:])}
    return {"ms": milliseconds, "ratios": ratios, "peak_bytes": memory}


def peak(run: Callable[[], object]) -> int:
    """Highest bytes during a call, above what was held before it."""
    return peak_bytes(CPU, run)[1][0]


def compare(times: Times, asked: tuple[tuple[str, str, str, float | None], ...]) -> dict[str, dict]:
    """{what: median and quartiles, and the target}."""
    return {what: {**ratio(times, a, b), "target": target} for what, a, b, target in asked}


def measure(out: Path | None = RESULTS, rounds: int = 15, slow_rounds: int = 4) -> dict:
    """Everything, with all threads and with one; printed, and written to ``out``."""

    def report(line: str) -> None:
        print(f"\r  {line:70}", end="", flush=True)

    args = {"rounds": rounds, "slow_rounds": slow_rounds}
    threads = torch.get_num_threads()
    result: dict = {**provenance(CPU), **args, "by_threads": {}}
    with isolated(0):
        x, net = torch.randn(ROWS, FEATURES).relu_(), backbone()
        images = torch.randn(IMAGES, 1, 28, 28)
        for number in dict.fromkeys((threads, 1)):
            torch.set_num_threads(number)
            found = result["by_threads"][str(number)] = {
                "epochs": epochs(x, images[: ROWS // 10], net, args, report),
                "prediction": predictions(images, net, args, report),
            }
            show(number, found)
        torch.set_num_threads(threads)
        data = dataset(x, SCHEMA)
        result["sghmc_peak_bytes"] = {
            f"{chains} chain{'s' if chains > 1 else ''}": peak(lambda chains=chains: sghmc(head(), data, 1, chains))
            for chains in (1, CHAINS)
        }
        result["sghmc_peak_bytes"]["the features"] = x.nbytes
    print({name: f"{value / 2**20:.1f} MB" for name, value in result["sghmc_peak_bytes"].items()})
    if out is not None:
        out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        print(f"wrote {out}")
    return result


def show(threads: int, found: dict) -> None:
    """Print what was found with that many threads."""
    print(f"\r{threads} thread(s){'':70}")
    for part, values in found.items():
        for name, value in values["ms"].items():
            print(f"  {part:12} {name:40} {value['median']:10.2f} ms  {value['quartiles']}")
        for name, value in values["ratios"].items():
            target = "" if value["target"] is None else f"   target {value['target']:g}"
            print(f"  {part:12} {name:44} {value['median']:8.3f}  {value['quartiles']}{target}")
        for name, value in values.get("peak_bytes", {}).items():
            print(f"  {part:12} {name:40} {value / 2**20:10.1f} MB")
