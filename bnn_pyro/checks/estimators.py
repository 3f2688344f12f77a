"""Check of the estimates that a method computes with: whether they are unbiased and consistent with each other.

The variant itself is checked on its own data. For optimisers: the ELBO and its gradient as training estimates them. For
samplers: the log joint density, its gradient against finite differences, its precision, and mini-batches.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pyro.poutine as poutine
import torch
from torch import Tensor, nn

from bnn_pyro.checkpoint import Run
from bnn_pyro.checks.check import Check, Estimate, Finding, Outcome, Subject, close, concluded, judge
from bnn_pyro.checks.user_module import few_rows
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.diagnostics.draws import even
from bnn_pyro.errors import refusing
from bnn_pyro.features import on_features
from bnn_pyro.inference import Method
from bnn_pyro.inference.linear import linear_layer
from bnn_pyro.inference.log_joint import LogJoint, Objective, log_joints
from bnn_pyro.inference.optimise import Optimisation
from bnn_pyro.inference.potential import Potential
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.guides import PointMass
from bnn_pyro.parts.nets import in_mode
from bnn_pyro.posterior import weight_space
from bnn_pyro.progress import Report

#: Step of central differences, and their relative tolerance.
STEP, SMOOTH = 1e-5, 1e-5
#: Relative tolerances of results in float32, and of sums of float32.
SINGLE, ROUNDING = 1e-3, 1e-4
#: Numbers of points, and of coordinates of each, at which a gradient is compared with finite differences.
PLACES, COORDINATES = 4, 12
#: Number of random directions that gradients are projected on, and of particles.
PROJECTIONS, PARTICLES = 6, 4
#: The conclusions for samplers and for optimisers.
OF_DENSITY = """\
The log joint density's gradient equals finite differences, in 32 bits as in 64, and the mean of the gradients \
of mini-batches is the gradient of all rows"""
OF_ELBO = "Mini-batches and particles change the noise of the objective and of its gradient, not their mean"

Values = tuple[Tensor, Tensor]  # an objective in nats, (C,), and its gradient, (C, P)


@dataclass(frozen=True)
class Estimators(Check):
    """The mean of mini-batch estimates must be the full-batch value, whatever the size of the batches and the number
    of particles; gradients must equal finite differences, in 32 bits as in 64.

    rows, batches  largest number of training rows; number of mini-batches that they are divided into
    repeats, warm  number of estimates; steps of training before the check, so that q differs from its initial state
    """

    rows: int = 600
    batches: int = 6
    repeats: int = 400
    warm: int = 300

    title: ClassVar[str] = "Estimators"
    quick: ClassVar[Mapping[str, Any]] = {"rows": 120, "repeats": 60, "warm": 60}

    def _refuses(self, subject: Subject) -> str:
        if subject.converges_to == "normal at the mode":
            return "it takes all rows at once and estimates nothing"
        return "its prior is improper: there is no posterior to sample" if subject.improper and subject.exact else ""

    def _run(self, subject: Subject, seed: int, report: Report) -> Outcome:
        method, data = subject.method({}), subject.data
        num = min(self.rows, len(data.x_train))
        num -= num % self.batches if num >= self.batches else 0
        data = few_rows(data, num)
        with isolated(seed):
            model, data = on_features(subject.entry.model(data.schema), data)
            facts = subject.entry.prepare(model, subject.entry.guide(model), data) if subject.own_module else {}
            if isinstance(method, Optimisation):
                findings, sentence = _of_elbo(self, subject, method, model, data, seed, facts), OF_ELBO
            else:
                findings, sentence = _of_density(method, weight_space(model), data, self.batches), OF_DENSITY
        about = "gradient of the outputs along '{}': its posterior would be its prior"
        findings = [Finding(about.format(name), 0.0, level="bad") for name in facts.get("ignored", ())] + findings
        settings = subject.settings(method) | {"rows": len(data.x_train)}
        return concluded("estimator", findings, settings, sentence, "Estimates are wrong")


def _batch_findings(label: str, full: Values, pieces: Sequence[Values], shares: Sequence[float]) -> list[Finding]:
    """Whether the weighted mean over mini-batches of the objective and of its gradient equals that of all rows."""
    value, gradient = (sum(s * p for s, p in zip(shares, part, strict=True)) for part in zip(*pieces, strict=True))
    off = ((value - full[0]).abs() / full[0].abs().clamp_min(1.0)).max().item()
    steep = ((gradient - full[1]).norm(dim=1) / full[1].norm(dim=1).clamp_min(1e-12)).max().item()
    about = f"{{}}: mean over {len(pieces)} mini-batches less that of all rows (relative)"
    return [close(about.format(name), far, 0.0, SINGLE) for name, far in ((label, off), ("gradient", steep))]


def _of_density(method: Method, model: nn.Module, data: Dataset, batches: int) -> list[Finding]:
    """Findings on a sampler's log joint; call inside ``isolated``.   batches: see ``Estimators``."""
    temperature = method.temperature
    single = Potential(model, data.x_train, data.y_train, temperature)
    y = data.y_train.double() if data.y_train.is_floating_point() else data.y_train
    precise = copy.deepcopy(model).double()
    if "initial" in vars(precise):  # of a model of the user's own
        precise.initial = {site: value.double() for site, value in precise.initial.items()}
    message = "the model does not compute in float64: make its constants like x or its `initial` ({error})"
    with refusing(message, RuntimeError):
        double = Potential(precise, data.x_train.double(), y, temperature)
        z = double.initial + 0.2 * (single.prior_draws(PLACES) - double.initial)
        density, gradient = double(z)
    coordinates = torch.from_numpy(even(double.size, COORDINATES))
    moves = STEP * nn.functional.one_hot(coordinates, double.size).double()
    ahead, behind = (torch.stack([double(place + sign * moves)[0] for place in z]) for sign in (1, -1))
    differences = (ahead - behind) / (2 * STEP)  # (PLACES, coordinates)
    chosen, scale = gradient[:, coordinates], gradient.abs().amax(1, keepdim=True).clamp_min(1.0)
    # The tolerance allows for cancellation in a density of many nats. At kinks of the network gradients differ as well.
    cancelled = 1e-15 * density.abs().max().item() / STEP / scale.min().item()
    off = ((differences - chosen).abs() / scale).flatten().sort().values
    about = "gradient less finite differences, of the largest entry ({})"
    findings = [close(about.format("median"), off[len(off) // 2].item(), 0.0, SMOOTH + cancelled)]
    low, low_gradient = single(z)
    rounded = ((low - density).abs() / density.abs().clamp_min(1.0)).max().item()
    findings.append(close("log joint density in 32 bits less that in 64 (relative)", rounded, 0.0, SINGLE))
    rounded = ((low_gradient - gradient).abs() / scale).max().item()
    findings.append(close("gradient in 32 bits less that in 64, of the largest entry", rounded, 0.0, SINGLE))
    activation = getattr(getattr(model, "net", None), "activation", None)
    if linear_layer(model) is not None or activation in (torch.tanh, torch.sigmoid, None):
        findings.append(close(about.format("worst"), off[-1].item(), 0.0, 10 * SMOOTH + cancelled))
    if hasattr(method, "eta_share"):
        x, y, chains = data.x_train, data.y_train, 3
        target = LogJoint(model, x, y, temperature)
        with in_mode(model, training=False):
            w = target.flat(target.sample_prior(chains)[0])
            w = w.lerp(target.initial.to(w), 0.8)
            blocks = torch.randperm(len(x)).view(min(batches, len(x)), -1)
            chunks = ([part[rows].expand(chains, *part[rows].shape) for part in (x, y)] for rows in blocks)
            pieces = [[v.double() for v in target.gradient(w, *rows)] for rows in chunks]
            shares = [1 / len(blocks)] * len(blocks)
            findings += _batch_findings("log joint density", target.gradient(w), pieces, shares)
    return findings


def _of_elbo(
    check: Estimators, subject: Subject, method: Optimisation, model: nn.Module, data: Dataset, seed: int, facts: dict
) -> list[Finding]:
    """Findings on an optimiser's objective; call inside ``isolated``.   facts: returned by a module's ``prepare``."""
    point = subject.converges_to == "point"
    latent = getattr(method, "prior_weight", 1.0) if point else getattr(method, "temperature", 1.0)
    q = PointMass(model.initial) if point else subject.entry.guide(model)
    loop = replace(method, epochs=check.warm, batch_size=0, lr=0.01, final_lr=1.0)
    trained = _Trained(model, q, data, seed, latent)
    trained.epochs(loop)
    num, approximate = len(data.x_train), hasattr(subject.entry, "channels")
    parts = torch.randperm(num, generator=torch.Generator().manual_seed(seed)).chunk(min(check.batches, num))
    weights, _ = in_weights = weight_space(model), weight_space(q)
    same_noise = []
    for rows in (slice(None), *parts):
        with isolated(11):
            same_noise.append(trained.estimate(*in_weights, rows))
    shares = [len(rows) / num for rows in parts]
    findings = _batch_findings("ELBO with the same noise", same_noise[0], same_noise[1:], shares)
    size = len(parts[0])
    estimators: dict[str, Callable[[], Values]] = {
        "all rows": lambda: trained.estimate(model, q),
        f"{PARTICLES} particles": lambda: trained.estimate(model, q, particles=PARTICLES),
        "mini-batches": lambda: trained.estimate(model, q, torch.randperm(num)[:size]),
    }
    if weights is not model:
        estimators["weight draws"] = lambda: trained.estimate(*in_weights)
    repeated = {name: [one() for _ in range(check.repeats)] for name, one in estimators.items()}
    elbos = {name: torch.cat([v for v, _ in pairs]).numpy()[:, None] for name, pairs in repeated.items()}
    gradients = {name: torch.cat([g for _, g in pairs]) for name, pairs in repeated.items()}
    full, *others = gradients
    directions = torch.randn(gradients[full].shape[1], PROJECTIONS, generator=torch.Generator().manual_seed(1))
    # The mean gradient is estimated from other samples, whose noise is independent of those that are projected on it.
    mean = torch.cat([estimators[full]()[1] for _ in range(max(1, check.repeats // 4))]).mean(0)
    directions = nn.functional.normalize(torch.cat([directions.double(), mean[:, None]], 1), dim=0)
    along = [*(f"direction {k + 1}" for k in range(PROJECTIONS)), "the mean gradient"]
    values = {name: np.column_stack([elbos[name], g @ directions]) for name, g in gradients.items()}
    rounding = ROUNDING * max(1.0, abs(elbos[full].mean()))
    tolerance = np.array([rounding] + [10 * ROUNDING * gradients[full].norm(dim=1).mean().item()] * len(along))
    for name in others:
        names = [f"ELBO by {name} (nats)", *(f"gradient by {name}, along {direction} (nats)" for direction in along)]
        level = "caution" if approximate and name == "weight draws" else "bad"
        findings += _alike(names, values[name], values[full], tolerance, level)
    # The ELBO as training computes it, mean over an epoch. It is compared with its definition, unless that is unknown
    # because the KL has an unknown constant or the network has masks.
    trace = trained.epochs(replace(loop, epochs=min(check.repeats, 1000), lr=1e-30, batch_size=size))  # fixed weights
    if "dropout" in facts or facts.get("batch_norm") == "batch":  # training mode is another function
        return findings
    if subject.improper or (point and any(getattr(getattr(weights, "net", None), "rates", ()))):
        return findings + _alike(["ELBO as trained, beside that of all rows (nats)"], trace, elbos[full], rounding)
    level = "caution" if approximate and weights is not model else "bad"
    about = "ELBO as trained, beside log p(y, w) − log q(w) over drawn weights (nats)"
    return findings + _alike([about], trace, trained.defined(*in_weights, 4 * check.repeats, point), rounding, level)


@dataclass
class _Trained:
    """A model and guide with the objective of training.   latent: factor of the KL."""

    model: nn.Module
    q: nn.Module
    data: Dataset
    seed: int
    latent: float

    def epochs(self, loop: Optimisation) -> np.ndarray:
        """The ELBO of every epoch (E, 1), nats, from the training loop itself."""
        options = {"run": Run(self.seed), "latent": self.latent, "num_particles": 1}
        return np.array(Optimisation.minimise(loop, self.model, self.q, self.data, **options)[0].trace["elbo"])[:, None]

    def estimate(self, m: nn.Module, g: nn.Module, rows: Tensor | slice = slice(None), particles: int = 1) -> Values:
        """The ELBO (1,) of all rows, estimated from ``rows``, and its gradient (1, P)."""
        x, y, num = self.data.x_train[rows], self.data.y_train[rows], len(self.data.x_train)
        with in_mode(m, training=False):
            elbo, _ = Objective(m, g, particles)(x, y, num / len(x), self.latent)
        gradients = torch.autograd.grad(elbo, list(g.parameters()), allow_unused=True, materialize_grads=True)
        return elbo.detach()[None].double(), torch.cat([v.flatten() for v in gradients]).double()[None]

    def defined(self, m: nn.Module, g: nn.Module, number: int, point: bool) -> np.ndarray:
        """log p(y | x, w) + latent · (log p(w) − log q(w)) of weights drawn from q (number, 1), nats."""
        values = []
        with torch.no_grad(), in_mode(m, training=False):
            for _ in range(number):
                nodes = poutine.trace(g).get_trace(None).nodes
                sites = {k: s for k, s in nodes.items() if s["type"] == "sample" and not s["is_observed"]}
                w = {k: s["value"].detach()[None] for k, s in sites.items() if not s["infer"].get("is_auxiliary")}
                log_q = 0.0 if point else sum(s["fn"].log_prob(s["value"]).sum() for s in sites.values())
                prior, likelihood = log_joints(m, w, self.data.x_train, self.data.y_train)
                values.append((likelihood + self.latent * (prior - log_q)).double().item())
        return np.array(values)[:, None]


def _alike(
    names: list[str], values: np.ndarray, reference: np.ndarray, tolerance: np.ndarray | float, level: str = "bad"
) -> list[Finding]:
    """Findings on the means of (R, M) estimates, which should equal those of the reference (R', M); NaN is wrong."""
    mine, base = Estimate.of_independent(values), Estimate.of_independent(reference)
    difference = Estimate(mine.mean, np.hypot(mine.error, base.error), mine.freedom)
    return judge(names, difference, np.nan_to_num(base.mean, nan=np.inf), tolerance=tolerance, level=level)
