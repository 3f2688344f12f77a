"""The joint distribution p(w, y | x) of a variant: draws of it, quantities of weights and targets, and replications.

    w* ~ p(w)    y ~ p(y | x, w*)    q(w | y) ≈ p(w | y):    is f(w*, y) distributed like f(w, y), w ~ q?

The quantities f are predictions at fixed inputs; the log-likelihood, which alone detects a posterior that ignores the
data (Modrák et al. 2023, arXiv:2211.02383); the log prior density; and the output's bias, as units can be exchanged.
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pyro
import pyro.poutine as poutine
import torch
from torch import Tensor

from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.diagnostics.convergence import ess_mean
from bnn_pyro.diagnostics.draws import sized
from bnn_pyro.errors import UserError
from bnn_pyro.features import on_features
from bnn_pyro.fitting import fit
from bnn_pyro.inference import Method
from bnn_pyro.inference.log_joint import log_joints
from bnn_pyro.inference.potential import Potential
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.likelihoods import Heteroscedastic
from bnn_pyro.parts.mixtures import Mixture
from bnn_pyro.parts.observed import ReadLikelihood
from bnn_pyro.posterior import split_frozen, weight_space
from bnn_pyro.zoo import Entry

#: One quantity: its description, and its kind: "prediction", "likelihood", "prior", "noise" or "weight".
Question = tuple[str, str]


def design(data: Dataset, rows: int, points: int, seed: int) -> Dataset:
    """At most ``rows`` training inputs; the test part has ``points`` inputs, half of them training inputs.

    y_train belongs to other rows than the inputs; its times are where simulated times are censored.
    """
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(data.x_train), generator=g)
    train, y = data.x_train.cpu()[order], data.y_train.cpu()[order.flip(0)][:rows]
    x, other_inputs = train[:rows], torch.cat([train[rows:], data.x_test.cpu(), data.x_val.cpu()])
    old = x[: points - points // 2 if len(other_inputs) else points]
    new = other_inputs[torch.randperm(len(other_inputs), generator=g)][: points - len(old)]
    none, place = (x[:0], y[:0]), torch.cat([old, new])
    return Dataset("simulated", data.schema, x, y, *none, place, y[:0], source="simulated from the prior")


class Simulator:
    """Simulates targets of a variant at the training inputs of ``inputs``; its test inputs are for predictions.

    To be made inside ``isolated``. Simulated times are censored at those of ``inputs``.
    Raises UserError for a prior that cannot be sampled.
    """

    def __init__(self, entry: Entry, inputs: Dataset) -> None:
        model, self.inputs = weight_space(entry.model(inputs.schema)).eval(), inputs
        start, targets = 0 if inputs.schema.has_classes else inputs.schema.y_shift, len(inputs.schema.targets)
        data = self.data(torch.as_tensor(start).expand(len(inputs.x_train), *[targets][:targets]))
        on_features(model, data)
        if hasattr(entry, "prepare"):
            entry.prepare(model, entry.guide(model), data)
        self.model, self.points = split_frozen(model, inputs.x_test)
        self.potential = Potential(self.model, split_frozen(model, data.x_train)[1], data.y_train)

    def data(self, y: Tensor) -> Dataset:
        """The training rows with targets y (N,), without a test part."""
        y = y.long() if self.inputs.schema.has_classes else y.float()
        return replace(self.inputs, y_train=y, x_test=self.inputs.x_test[:0])

    def draws(self, num: int) -> tuple[dict[str, Tensor], Tensor]:
        """Draws of the joint distribution: w {site: (num, *shape)} and y (num, N)."""
        (w,) = self.potential.sample_prior(num)
        return w, self.targets(w)

    def targets(self, w: Mapping[str, Tensor]) -> Tensor:
        """Draws of p(y | x, w), (C, N), for C sets of weights."""
        y, ends = self._law(self.potential.x, w).components.sample(), self.inputs.y_train.abs()
        return torch.where(y > ends, -ends, y) if self.inputs.schema.task == "survival" else y

    def quantities(self, w: Mapping[str, Tensor], y: Tensor) -> tuple[list[Question], np.ndarray]:
        """(Q questions, their values (C, Q), float64) for weights {site: (C, *shape)} and targets (N,) or (C, N)."""
        with torch.no_grad(), pyro.validation_enabled(False):
            prior, likelihood = log_joints(self.model, w, self.potential.x, y)
        table = self._predictions(w)
        table |= {("log-likelihood of the data", "likelihood"): likelihood, ("log prior density", "prior"): prior}
        noise = getattr(getattr(self.model, "likelihood", None), "initial", {})
        table |= {(site, "noise"): w[site] for site in noise if w[site].dim() == 1}
        for site in [site for site in w if site.endswith(".bias")][-1:]:
            table[f"{site}[0]", "weight"] = w[site].flatten(1)[:, 0]
        return list(table), torch.stack([v.double().expand(len(prior)) for v in table.values()], 1).numpy()

    def _predictions(self, w: Mapping[str, Tensor]) -> dict[Question, Tensor]:
        law, num = self._law(self.points, w), len(self.points)
        values, quantity = law.output_values(), "log odds" if law.has_classes else "mean"
        one, classes = "target" if self.inputs.schema.targets else "class", values.shape[-1]
        labels = [f"{quantity} of {one} {m % classes}" if classes > 1 else quantity for m in range(num)]
        table = {f"{labels[m]} at input {m + 1}": values[:, m, m % classes] for m in range(num)}
        if isinstance(getattr(self.model, "likelihood", None), Heteroscedastic):
            scale = law.components.scale.log()
            table |= {f"log noise at input {m + 1}": scale[:, m] for m in (0, num - 1)}
        return {(about, "prediction"): value for about, value in table.items()}

    def _law(self, x: Tensor, w: Mapping[str, Tensor]) -> Mixture:
        """p(y | x, w) of C sets of weights, as components (C, N)."""
        with torch.no_grad(), pyro.validation_enabled(False), ReadLikelihood() as read, poutine.condition(data=w):
            self.model(x)
        return read.mixture(read.likelihood)


class Replication(NamedTuple):
    """The fit to one simulated data set."""

    questions: list[Question]  # the Q quantities
    truth: np.ndarray  # (Q,) values at the weights that made the data
    draws: np.ndarray  # (Q, S) values at S draws of the posterior
    ess: np.ndarray  # (Q,) effective sample size of each quantity
    learned: float  # median log-likelihood of the data over the draws minus that over draws of the prior; nats
    warned: list[str]  # warnings of the fit


def replicate(
    entry: Entry, inputs: Dataset, method: Method, seed: int, num_draws: int, number: int
) -> Replication | UserError:
    """The replication of this number, or why its fit failed.   num_draws: of a posterior that is no chains."""
    first, second = (int(s) for s in np.random.SeedSequence([seed, number]).generate_state(2))
    with isolated(first):
        simulator = Simulator(entry, inputs)
        w, y = simulator.draws(10)  # the truth, and nine other draws of the prior
    data = simulator.data(y[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            posterior = fit(entry, data, method, seed=second, device="cpu", progress=False)
        except UserError as error:
            return UserError(str(error))  # without its traceback, which keeps the fit in memory
    shape = sized(posterior, num_draws)
    with isolated(second):
        blocks = [simulator.quantities(block, data.y_train)[1] for block in posterior.blocks(shape[0] * shape[1])]
    draws = np.concatenate(blocks).T
    questions, prior = simulator.quantities(w, data.y_train)
    ess = np.full(len(draws), float(num_draws if posterior.chains is None else shape[0]))
    if posterior.chains is not None and shape[1] >= 4:
        ess = ess_mean(draws.reshape(-1, *shape))
    likelihood = [kind for _, kind in questions].index("likelihood")
    learned = float(np.median(draws[likelihood]) - np.median(prior[1:, likelihood]))
    warned = [str(one.message) for one in caught if issubclass(one.category, UserWarning)]
    return Replication(questions, prior[0], draws, ess, learned, warned)
