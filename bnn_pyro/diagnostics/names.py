"""Names of what a weight connects: the dimensions of every site, and the labels along them."""

from __future__ import annotations

import numpy as np

from bnn_pyro.posterior import Posterior

__all__ = ["dimensions"]

#: A weight's dimensions after its outputs and inputs: those of a convolution's kernel.
KERNEL = ("kernel_height", "kernel_width")


def dimensions(posterior: Posterior) -> tuple[dict[str, tuple[str, ...]], dict[str, np.ndarray]]:
    """({site: names of its dimensions}, {dimension: labels}).

    "layers.0.weight" has the dimensions ("layers.0.out", "layers.0.in"). Inputs of the first layer are the features by
    name, outputs of the last one the classes (of two, the second: its log-odds); everything else is numbered.
    """
    shapes = {site: tuple(value.shape) for site, value in posterior.model.initial.items()}
    names: dict[str, tuple[str, ...]] = {}
    coords: dict[str, np.ndarray] = {}
    for site, shape in shapes.items():
        layer, _, role = site.rpartition(".")
        if role == "weight" and layer and len(shape) in (2, 4):
            names[site] = tuple(f"{layer}.{part}" for part in ("out", "in", *KERNEL)[: len(shape)])
        elif role == "bias" and layer and len(shape) == 1:
            names[site] = (f"{layer}.out",)
        else:
            names[site] = tuple(f"{site}.dim_{i}" for i in range(len(shape)))
        coords |= {name: np.arange(size) for name, size in zip(names[site], shape, strict=True)}
    weights = [site for site in shapes if site.endswith(".weight")]
    if weights:
        _label(coords, names[weights[0]][1:2], _features(posterior))
        _label(coords, names[weights[-1]][:1], _outputs(posterior))
    return names, coords


def _label(coords: dict[str, np.ndarray], name: tuple[str, ...], labels: tuple[str, ...]) -> None:
    if name and len(coords[name[0]]) == len(labels) == len(set(labels)):
        coords[name[0]] = np.array(labels)


def _features(posterior: Posterior) -> tuple[str, ...]:
    """Names of the network's inputs; none where it stands on the features of another."""
    return () if hasattr(posterior.model, "backbone") else posterior.schema.features


def _outputs(posterior: Posterior) -> tuple[str, ...]:
    schema = posterior.schema
    if schema.classes:
        return schema.classes[1:] if len(schema.classes) == 2 else schema.classes
    outputs = next((n for n in (getattr(posterior.model, "likelihood", None),) if n is not None), None)
    return (schema.target,) if getattr(outputs, "outputs", 1) == 1 else ("mean", "spread")
