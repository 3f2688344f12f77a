"""Checks of a module of the user's: its outputs by plain forward passes, and linear regression if it is linear.

f = f₀(x) + A(x) w,    y ~ Normal(f, σ²)        A: the Jacobian of the outputs in the weights, the same at every w
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Normal

from bnn_pyro.checks.check import Subject
from bnn_pyro.checks.problems import NOISE, Problem
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.diagnostics.draws import even
from bnn_pyro.errors import UserError
from bnn_pyro.inference.log_joint import LogJoint
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.backbone import called
from bnn_pyro.parts.nets import with_weights
from bnn_pyro.parts.own_module import norm_layers
from bnn_pyro.parts.weights import CentredNormal

#: Largest number of weights whose covariances are compared, number of rows, and number of new inputs.
MAX_WEIGHTS, ROWS, POINTS = 100, 200, 8


def few_rows(data: Dataset, rows: int) -> Dataset:
    """The data with at most ``rows`` evenly spaced training rows, and no others."""
    at = even(len(data.x_train), rows)
    none = {f"{letter}_{part}": getattr(data, f"{letter}_{part}")[:0] for letter in "xy" for part in ("val", "test")}
    return replace(data, x_train=data.x_train[at], y_train=data.y_train[at], **none)


def fixed_noise(subject: Subject) -> dict[str, float]:
    """The setting of a known noise: the user's, or a share of the target's standard deviation; {} for classes."""
    schema, noise = subject.data.schema, subject.entry.noise
    noise = NOISE * float(np.mean(schema.y_scale)) if isinstance(noise, str) else noise
    return {} if schema.has_classes else {"noise": noise}


def plain_outputs(subject: Subject, w: Mapping[str, Tensor], model: nn.Module, data: Dataset) -> Tensor:
    """Outputs (S, N, K), target units, of the user's module at the training rows by w {site: (S, *shape)}."""
    schema, module, outputs = data.schema, subject.entry.own(data.schema).eval(), []
    module.load_state_dict(model.net.state_dict(), strict=False)  # frozen weights, which may be random
    for layer in norm_layers(module).values() if model.statistics is not None else ():
        layer.train()
    x = schema.unstandardise(data.x_train) if subject.entry.inputs == "raw" else data.x_train
    with torch.no_grad():
        for s in range(len(next(iter(w.values())))):
            module.load_state_dict({site: draws[s] for site, draws in w.items()}, strict=False)
            outputs.append(schema.y_shift + schema.y_scale * called(module, schema, x))
    return torch.stack(outputs)


@dataclass(frozen=True, eq=False)
class LinearModule(Problem):
    """Linear regression by a module: inputs (N, P + 1) are A and f₀, in target units.   rows: the data set."""

    rows: Dataset | None = None

    size = property(lambda self: self.inputs.shape[1] - 1)
    settings = property(lambda self: {"noise": self.noise})
    data = property(lambda self: self.rows)
    new = property(lambda self: self.rows.x_train[: len(self.x)])

    def design(self, x: Tensor) -> Tensor:
        """See ``Problem``."""
        return x[:, :-1]

    def output(self, w: Tensor, x: Tensor) -> Tensor:
        """f (S, B) of w (S, P)."""
        return w @ self.design(x).mT + x[:, -1]


def linear_module(subject: Subject) -> LinearModule:
    """The problem of a module on rows of its data. Raises UserError if it is not linear regression."""
    rows, settings = few_rows(subject.data, ROWS), fixed_noise(subject)
    with isolated(0):
        entry = subject.reduced(**settings)
        model = entry.model(rows.schema)
        entry.prepare(model, entry.guide(model), rows)
        joint = LogJoint(model, rows.x_train, rows.y_train)
        priors = list(joint.priors.values())
        normal = all(isinstance(p, CentredNormal) or isinstance(getattr(p, "base_dist", None), Normal) for p in priors)
        if not normal or model.statistics is not None or not getattr(model.likelihood, "quadratic", False):
            raise UserError("its closed form needs Normal noise and priors, one target, and neither points that are "
                            "trained (frozen='*' keeps them as they are) nor batch statistics")  # fmt: skip
        if joint.size > MAX_WEIGHTS:
            raise UserError(f"covariances of {joint.size:,} weights are too many to compare; at most {MAX_WEIGHTS}")
        mean = torch.cat([p.mean.flatten() for p in priors]).double()
        scale = torch.cat([p.variance.flatten() for p in priors]).double().sqrt()

        def outputs(u: Tensor) -> Tensor:
            w = {site: value[0] for site, value in joint.sites(u[None]).items()}
            return model.likelihood.components(with_weights(model.net, w, rows.x_train)).loc.double()

        a = torch.autograd.functional.jacobian(outputs, mean)
        with torch.no_grad():
            f0 = outputs(mean) - a @ mean
            for u in mean + scale * torch.randn(3, joint.size, dtype=torch.float64):
                f = outputs(u)
                if (f - f0 - a @ u).abs().max() > 1e-3 * (f - f.mean()).abs().max():
                    raise UserError("its outputs are not linear in its Bayesian weights, and there is no closed form")
    inputs, options = torch.cat([a, f0[:, None]], 1), dict(stops=0.02, batches=4 if len(a) >= 40 else 1)
    parts = inputs, rows.y_train.double(), inputs[:POINTS], scale, settings["noise"]
    return LinearModule("linear regression by the module", *parts, **options, prior_mean=mean, rows=rows)
