"""Posteriors of Bayesian networks that are known, in what the network computes: ``checks/references``.

A reference is an NPZ file of arrays and a JSON file of the rest, made by ``benchmarks/checks`` from 10,000 draws of HMC
that meet the bar of posteriordb (Magnusson et al. 2024, arXiv:2407.04967) in function space: averages over all draws,
and predictions of a part of them. A model is the one that a reference is of where log p(y, w | x) at a few weights that
a formula gives is the same: no other prior, noise, data or shape passes.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bnn_pyro.datasets import load_data
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.diagnostics.convergence import LEAST_DRAWS, ess_mean
from bnn_pyro.diagnostics.draws import sized
from bnn_pyro.errors import UserError, check_known, refusing
from bnn_pyro.features import on_features
from bnn_pyro.files import read_archive
from bnn_pyro.inference.potential import Potential
from bnn_pyro.isolation import isolated
from bnn_pyro.posterior import Posterior, archive_digest, weight_space
from bnn_pyro.predictive import predict
from bnn_pyro.zoo import Entry

REFERENCES = Path(__file__).parent / "references"
FORMAT = 1
#: Weights at which densities are compared, and how far they may differ: single precision, on another machine.
PLACES, SAME = 5, 2e-5


@dataclass(frozen=True, eq=False)
class ReferencePosterior:
    """One reference. Shapes: B inputs; K classes, or 1 in regression; J outputs: log-odds, 1 for two classes; S draws.

    name      of its files
    about     title, variant, entry (settings), data (arguments of ``load_data``), criteria with what was reached, met,
              draws (of which the averages are), log_joint, and who, when and how; JSON-able
    x         (B, *input_shape) inputs, standardised
    mean      (B, K) mean class probabilities, or mean of the network in target units, over all draws
    mean_sd   (B, K) their standard deviation from draw to draw
    centre, spread  (B, J) mean and standard deviation of the outputs: of every class's log-odds, or as ``mean``
    expected, error (2, B, J) means of :func:`bounded` of the outputs, and their Monte-Carlo standard errors
    points    (T,) those of the B inputs at which draws are stored
    draws     (S, T, J) the outputs of S draws, thinned evenly, as (output − centre) / spread, in half precision
    noise     (S, 1) standard deviations of the observations in target units; empty for classification
    backbone  weights of the backbone of a last layer; empty where there is none
    """

    name: str
    about: Mapping[str, Any]
    x: np.ndarray
    mean: np.ndarray
    mean_sd: np.ndarray
    centre: np.ndarray
    spread: np.ndarray
    expected: np.ndarray
    error: np.ndarray
    points: np.ndarray
    draws: np.ndarray
    noise: np.ndarray
    backbone: Mapping[str, np.ndarray] = field(default_factory=dict)

    def outputs(self) -> np.ndarray:
        """(S, T, J) float64: the stored draws' log-odds, or means in target units."""
        return self.centre[self.points] + self.spread[self.points] * self.draws.astype(np.float64)

    def data(self) -> Dataset:
        """The data set that it is a posterior given. Raises UserError where a file of it is not at hand."""
        return load_data(**self.about["data"])

    def settings(self) -> dict[str, Any]:
        """Settings of a variant that the posterior depends on; of a last layer also the stored backbone."""
        entry = {k: tuple(v) if isinstance(v, list) else v for k, v in self.about["entry"].items()}
        if not self.backbone:
            return entry
        weight, bias = (torch.from_numpy(self.backbone[k].copy()) for k in ("weight", "bias"))
        with isolated(0):
            layer = nn.Linear(weight.shape[1], weight.shape[0])
        layer.load_state_dict({"weight": weight, "bias": bias})
        return entry | {"backbone": nn.Sequential(nn.Flatten(), layer, nn.ReLU()), "inputs": "raw"}

    def unlike(self, entry: Entry, data: Dataset) -> str:
        """Why the posterior of a variant given data is another one than this, in words; "" where it is this."""
        if data.schema.task != self.about["task"] or tuple(data.schema.input_shape) != self.x.shape[1:]:
            return f"its data are of another kind than those of {self.about['title']}"
        try:
            density = log_joints_at(entry, data)
        except UserError as reason:
            return str(reason)
        expected = np.asarray(self.about["log_joint"])
        if density.shape != expected.shape or not np.allclose(density, expected, rtol=SAME, atol=1e-3):
            return f"its model or its data are not those of {self.about['title']}: the log joint density is another one"
        return ""


def references() -> list[str]:
    """Names of those that are there."""
    return sorted(path.stem for path in REFERENCES.glob("*.json") if path.with_suffix(".npz").is_file())


def load_reference(name: str) -> ReferencePosterior:
    """The reference of that name. Raises UserError where there is none, or its files are damaged."""
    check_known("reference", references(), name)
    path = REFERENCES / f"{name}.npz"
    damaged = f"{path} or the .json beside it is damaged; install the package again"
    with refusing(damaged, ValueError, KeyError, TypeError):
        about = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        if about["format"] != FORMAT or archive_digest(path.read_bytes(), about) != about["sha256"]:
            raise ValueError
    arrays = read_archive(path)
    backbone = {k.removeprefix("backbone."): arrays.pop(k) for k in list(arrays) if k.startswith("backbone.")}
    return ReferencePosterior(name, about, **arrays, backbone=backbone)


def bounded(outputs: np.ndarray, centre: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """(2, …, B, J) of outputs (…, B, J): tanh z and z²/(1 + z²), z = (output − centre)/spread; means are Normal."""
    z = (outputs - centre) / np.where(spread > 0, spread, 1.0)
    square = np.square(z)
    return np.stack([np.tanh(z), square / (1 + square)])


@torch.no_grad()
def log_joints_at(entry: Entry, data: Dataset) -> np.ndarray:
    """(PLACES,) log p(y, w | x) in nats, with the volume of any transform, at weights that a formula gives.

    Sines of incommensurable frequencies, a third of a prior's usual scale. Raises UserError for a model without it.
    """
    with isolated(0):
        inferred, seen = on_features(weight_space(entry.model(data.schema)), data)
        potential = Potential(weight_space(inferred), seen.x_train, seen.y_train)
        index = torch.arange(1, potential.size + 1, dtype=torch.float64)
        place = torch.arange(1, PLACES + 1, dtype=torch.float64)[:, None]
        return potential.log_density(0.3 * torch.sin(math.sqrt(2) * place * index + place**2)).double().numpy()


def outputs_of(posterior: Posterior, reference: ReferencePosterior, draws: int) -> np.ndarray:
    """(C, D, B, J) log-odds, or means in target units: all draws of chains, or so many of a guide as chains of one."""
    shape = sized(posterior, draws)
    shape = shape[::-1] if posterior.chains is None else shape
    prediction = predict(posterior, torch.from_numpy(reference.x), num_draws=shape[0] * shape[1])
    return prediction.output_values().numpy().astype(np.float32).reshape(*shape, len(reference.x), -1)


def effective_draws(outputs: np.ndarray) -> float:
    """What draws (C, D, B, J) are worth for the mean, the median over the outputs; infinite for a single draw."""
    chains, draws = outputs.shape[:2]
    if chains * draws == 1:
        return math.inf
    if draws < LEAST_DRAWS:
        return float(chains * draws)
    return float(np.nanmedian(ess_mean(np.moveaxis(outputs.reshape(chains, draws, -1), 2, 0))))
