"""Bytes that a fit or a prediction takes at its highest point, by what they are for.

P weights, N rows, D inputs, B rows a batch, K classes, C chains, S draws; A numbers in one activation of every layer
for a batch. What is counted is what tensors ask for; the allocator's resident set is larger where it keeps fragments.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.scaling.subjects import F32, F64, Sizes

__all__ = ["FORMULAE", "TEXTS", "expected"]

#: Bytes of draws that ``Posterior`` gives at once, and rows by which ``predict`` divides its draws.
BLOCK, ROWS = 64 * 2**20, 512

#: Bytes by what they are for; those of different moments under names of these moments.
Bytes = dict[str, float]


def expected(subject: str, sizes: Sizes) -> float:
    """Bytes at the highest moment: the data, and the most that any moment needs besides."""
    return _data(sizes) + max(sum(moment.values()) for moment in FORMULAE[subject](sizes).values())


def _data(s: Sizes) -> float:
    return s.rows * (F32 * s.inputs + F64)


def _batch(s: Sizes, passes: float) -> Bytes:
    """Gathered rows, and as many tensors of the activations' size."""
    return {"batch": s.batch * (F32 * s.inputs + F64), "activations": passes * F32 * s.batch * sum(s.layers)}


def _optimised(**numbers: float) -> Callable[..., Callable[[Sizes], dict[str, Bytes]]]:
    """Float32 numbers for every weight, by what they are."""

    def made(passes: float) -> Callable[[Sizes], dict[str, Bytes]]:
        def formula(s: Sizes) -> dict[str, Bytes]:
            weights = {name: F32 * number * s.weights for name, number in numbers.items()}
            return {"training": weights | _batch(s, passes)}

        return formula

    return made


MEAN_FIELD = dict(network=1, locations_and_scales=2, gradients=2, adam=4, drawn_weights_noise_and_scales=3)
POINT = dict(network=1, locations=1, gradients=1, adam=2, gradients_by_layer=1)


def _hidden_layer(s: Sizes) -> dict[str, Bytes]:
    """No drawn weights; the squared inputs of a layer besides the inputs."""
    made = _optimised(network=1, locations_and_scales=2, gradients=2, adam=4)(3)(s)
    made["training"]["squared inputs"] = F32 * s.batch * s.inputs
    return made


def _sghmc(s: Sizes) -> dict[str, Bytes]:
    """A batch is there until the next one is; stored draws are there twice when they are put together at the end."""
    chains, own = F32 * s.chains * s.weights, 2 * F32 * s.weights
    step = {
        "network and noise estimate": own,
        "positions, momenta, gradients, noise": 6 * chains,
        "stored draws": s.draws * chains,
        "order of the rows": F64 * s.chains * s.rows,
        "batches": s.chains * s.batch * (F32 * s.inputs + F64),
        "log-probabilities": 3 * F32 * s.chains * s.batch * s.classes,
    }
    between = {name: step[name] for name in ("network and noise estimate", "stored draws", "order of the rows")}
    between |= {"positions and momenta": 2 * chains, "two batches": 2 * step["batches"]}
    end = {"network and noise estimate": own, "positions and momenta": 4 * chains, "stored draws": 2 * s.draws * chains}
    return {"step": step, "between": between, "end": end}


def _laplace(s: Sizes) -> dict[str, Bytes]:
    """Λ is a matrix, and so is what a Kronecker product stands for in it."""
    found = {
        "matrices": 4 * F64 * s.weights**2,
        "inputs": F64 * s.rows * (s.inputs + 1),
        "information of every row": 3 * F64 * s.rows * s.outputs**2,
    }
    return {"curvature": found}


#: What the stats of a draw of ChEES are: float64 numbers.
STATS = 8


def _chees(s: Sizes) -> dict[str, Bytes]:
    """Draws in float64 as they come and once more chain by chain; those of a linear model in other coordinates, too."""
    numbers, back = s.chains * s.draws, 0 if s.hidden else F64
    return {
        "end": {
            "draws": 2 * F64 * numbers * s.weights,
            "weights": (back + F32) * numbers * s.weights,
            "stats": 2 * STATS * F64 * numbers,
            "chains": 10 * F64 * s.chains * s.weights,
        }
    }


def _predict(s: Sizes) -> dict[str, Bytes]:
    """The result, once more where blocks of draws are joined; a block of weights with what draws it; activations."""
    block = max(1, BLOCK // (F32 * s.weights))
    drawn = min(s.draws, block)
    most = s.memory * 2**20 if s.memory else 2**50
    widest = F32 * max(s.layers)
    at_once = max(1, min(drawn, most // (widest * min(s.points, ROWS))))
    points = max(1, min(s.points, most // (widest * at_once)))
    result = F32 * s.draws * s.points * s.classes
    return {
        "chunk": {
            "inputs": F32 * s.points * s.inputs,
            "result": result,
            "weights of a block": F32 * drawn * s.weights,
            "network and guide": 3 * F32 * s.weights,
            "widest activations": 3 * at_once * points * widest,
        },
        "drawing": {
            "inputs": F32 * s.points * s.inputs,
            "result": result * (1 - drawn / s.draws),
            "weights of a block, noise": 2 * F32 * drawn * s.weights,
        },
        "end": {"inputs": F32 * s.points * s.inputs, "result": (2 if s.draws > block else 1) * result},
    }


FORMULAE: dict[str, Callable[[Sizes], dict[str, Bytes]]] = {
    "mean-field": _optimised(**MEAN_FIELD)(2),
    "hidden-layer": _hidden_layer,
    "map": _optimised(**POINT)(2),
    "last-svi": _optimised(**MEAN_FIELD)(4),
    "last-map": _optimised(**POINT)(4),
    "last-sghmc": _sghmc,
    "sghmc-chains": _sghmc,
    "laplace": _laplace,
    "chees-chains": _chees,
    "chees-net": _chees,
    "predict": _predict,
}
#: The same in a line, besides the data, 4·N·D.
TEXTS: dict[str, str] = {
    "mean-field": "4·(12 P + B·D + 2 A)",
    "hidden-layer": "4·(9 P + 2 B·D + 3 A)",
    "map": "4·(6 P + B·D + 2 A)",
    "last-svi": "4·(12 P + B·D + 4 B·K)",
    "last-map": "4·(6 P + B·D + 4 B·K)",
    "last-sghmc": "4·C·P·(S + 6) + 8·C·N + 4·C·B·(D + 3 K) in a step, 4·C·P·(S + 2) + 8·C·N + 8·C·B·D before the next, "
    "4·C·P·(2 S + 4) at the end: the most of these",
    "laplace": "8·(4 P² + N·D + 3 N·K²)",
    "chees-chains": "C·S·(28 P + 128)",
    "predict": "4·S·B·K (twice where 4·P·S > 64 MiB) + at most 64 MiB of weights + 3 · max_memory",
}
