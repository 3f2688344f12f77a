"""Data from a variant's own prior, and quantities of the weights that made them.

    w* ~ p(w)    y ~ p(y | x, w*)    q(w | y) ≈ p(w | y):    is f(w*, y) like f(w, y), w ~ q?

The quantities f are those of a user first: predictions at fixed inputs. A posterior that ignores its data is seen by
the log-likelihood alone, which depends on them (Modrák et al. 2023, arXiv:2211.02383). Single weights of a network have
no meaning, units can be exchanged; the bias of the output has one, and the log prior density speaks for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pyro.poutine as poutine
import torch
from torch import Tensor, nn

from bnn_pyro.checks.simulators import targets_of
from bnn_pyro.datasets.dataset import Dataset, Schema
from bnn_pyro.errors import UserError
from bnn_pyro.features import on_features
from bnn_pyro.inference.log_joint import log_joints
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.backbone import once
from bnn_pyro.parts.likelihoods import OBSERVED, Heteroscedastic
from bnn_pyro.parts.nets import in_mode
from bnn_pyro.posterior import weight_space
from bnn_pyro.zoo import Entry

__all__ = ["Design", "Question", "Simulated", "answers", "design", "simulate"]

IMPROPER = "there is no data to simulate: the prior is improper (it has no draws); take another, such as fan-in:1"


@dataclass(frozen=True)
class Design:
    """The inputs of every simulated data set: x (N, …), and points (M, …) at which predictions are asked for.

    old: how many of the points, the first ones, are rows of x.
    """

    schema: Schema
    x: Tensor
    points: Tensor
    old: int

    def data(self, y: Tensor) -> Dataset:
        """The rows with targets y (N,); without a validation or a test part."""
        x = self.x
        return Dataset("simulated", self.schema, x, y, x[:0], y[:0], x[:0], y[:0], source="simulated from the prior")


def design(data: Dataset, rows: int, points: int, seed: int) -> Design:
    """At most ``rows`` of the training inputs; ``points`` of them and of others, in equal parts."""
    g = torch.Generator().manual_seed(seed)
    train = data.x_train.cpu()[torch.randperm(len(data.x_train), generator=g)]
    rows = min(rows, len(train))
    x, rest = train[:rows], torch.cat([train[rows:], data.x_test.cpu(), data.x_val.cpu()])
    old = min(points - points // 2 if len(rest) else points, rows)
    new = rest[torch.randperm(len(rest), generator=g)][: points - old]
    return Design(replace(data.schema), x, torch.cat([x[:old], new]), old)


class Simulated(NamedTuple):
    """One draw of the joint distribution, by its seed: weights {site: shape} and the data that they made."""

    w: Mapping[str, Tensor]
    data: Dataset
    seed: int


def simulate(entry: Entry, inputs: Design, seed: int) -> Simulated:
    """w* from the prior, targets from the model's own site at all rows together.

    Raises UserError for a prior that cannot be drawn from.
    """
    with isolated(seed), torch.no_grad():
        model = _model(entry, inputs)
        with in_mode(model, training=False), poutine.trace() as traced:
            try:
                model(inputs.x)
            except NotImplementedError:
                raise UserError(IMPROPER) from None
    nodes = traced.trace.nodes
    w = {site: nodes[site]["value"].detach() for site in model.initial}
    y = nodes[OBSERVED]["value"].detach()
    y = y.long() if inputs.schema.has_classes else y.float()
    return Simulated(w, inputs.data(y), seed)


class Question(NamedTuple):
    """One quantity. about: in words.   kind: prediction, likelihood, prior, noise or weight."""

    about: str
    kind: str


def answers(
    entry: Entry, inputs: Design, y: Tensor, draws: Mapping[str, Tensor], truth: Mapping[str, Tensor]
) -> tuple[list[Question], np.ndarray, np.ndarray]:
    """(Q questions, their answers by the true weights (Q,), by the draws (Q, S)), float64.

    draws: {site: (S, *shape)}.   truth: {site: shape}.

    Predictions are the network's mean in units of the target; the log odds of one class against another.
    """
    with isolated(0), torch.no_grad():
        model = _model(entry, inputs)
        both = {site: torch.cat([truth[site][None].to(v), v]) for site, v in draws.items()}
        with in_mode(model, training=False):
            head, points = once(model, inputs.points)
            _, x = once(model, inputs.x)
            questions, columns = _predictions(head, points, both, inputs)
            prior, likelihood = log_joints(head, both, x, y)
    questions += [Question("log-likelihood of the data", "likelihood"), Question("log prior density", "prior")]
    columns += [likelihood, prior]
    own = getattr(getattr(head, "likelihood", None), "initial", {})
    for site in (site for site in own if both[site].dim() == 1):
        questions.append(Question(site, "noise"))
        columns.append(both[site])
    for site in [site for site in both if site.endswith(".bias")][-1:]:
        questions.append(Question(f"{site}[0]", "weight"))
        columns.append(both[site].flatten(1)[:, 0])
    values = torch.stack([c.double().expand(len(prior)) for c in columns]).numpy()
    return questions, values[:, 0], values[:, 1:]


def _model(entry: Entry, inputs: Design) -> nn.Module:
    """Over weights, its features scaled as ``fit`` scales them; call inside ``isolated``."""
    model = weight_space(entry.model(inputs.schema))
    on_features(model, inputs.data(torch.zeros(len(inputs.x))))
    return model


def _predictions(
    model: nn.Module, points: Tensor, w: Mapping[str, Tensor], inputs: Design
) -> tuple[list[Question], list[Tensor]]:
    law = targets_of(model, points, w)
    where = [f"row {m + 1}" if m < inputs.old else f"new input {m + 1 - inputs.old}" for m in range(len(points))]
    if not law.has_classes:
        what, values = ["mean"] * len(where), list(law.components.mean.expand(law.components.batch_shape).unbind(-1))
        if isinstance(getattr(model, "likelihood", None), Heteroscedastic):
            what, where = [*what, "log noise", "log noise"], [*where, where[0], where[-1]]
            values += [law.components.scale[:, 0].log(), law.components.scale[:, -1].log()]
    elif len(inputs.schema.classes) == 2:
        what, values = ["log odds"] * len(where), list(law.output_values()[..., 0].unbind(-1))
    else:
        logits, classes = law.components.logits, len(inputs.schema.classes)
        pairs = [(m % classes, (m + 1) % classes) for m in range(len(where))]
        what = [f"log odds of class {a} to {b}" for a, b in pairs]
        values = [logits[:, m, a] - logits[:, m, b] for m, (a, b) in enumerate(pairs)]
    return [Question(f"{a} at {b}", "prediction") for a, b in zip(what, where, strict=True)], values
