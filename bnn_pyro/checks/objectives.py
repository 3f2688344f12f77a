"""The objectives that methods follow, as they compute them: unbiased in mini-batches, the same in 32 bits and in 64.

Of samplers the log joint density, with its gradient against finite differences; of optimisers the ELBO, and how noisy
its gradient is by which estimator.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyro.poutine as poutine
import torch
from torch import Tensor, nn

from bnn_pyro.checks.check import Estimate, Finding, Subject, close, fields_of, judge
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.inference import Method
from bnn_pyro.inference.linear import linear_layer, stochastic_log_joint
from bnn_pyro.inference.log_joint import LogJoint, Objective, log_joints
from bnn_pyro.inference.optimise import Optimisation
from bnn_pyro.inference.potential import Potential
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.guides import PointMass
from bnn_pyro.parts.nets import in_mode
from bnn_pyro.posterior import weight_space

__all__ = ["density_estimators", "elbo_estimators"]

#: Relative: of central differences, their step and how far off they may be; of 32 bits; of sums of float32.
STEP, SMOOTH, SINGLE, ROUNDING = 1e-5, 1e-5, 1e-3, 1e-4
#: Points and numbers of each where a gradient is looked at; its projections; particles whose invariance is looked at.
PLACES, COORDINATES, PROJECTIONS, PARTICLES = 4, 12, 6, 4
#: A learning rate at which no weight moves.
STILL = 1e-30

Values = tuple[Tensor, Tensor]  # an objective in nats, (C,), and its gradient, (C, P)


def _batch_findings(what: str, whole: Values, pieces: Sequence[Values], shares: Sequence[float]) -> list[Finding]:
    """The mean over mini-batches, weighted by their rows, is that of all rows: of the objective and its gradient."""
    value, gradient = (sum(s * p for s, p in zip(shares, part, strict=True)) for part in zip(*pieces, strict=True))
    off = ((value - whole[0]).abs() / whole[0].abs().clamp_min(1.0)).max().item()
    steep = ((gradient - whole[1]).norm(dim=1) / whole[1].norm(dim=1).clamp_min(1e-12)).max().item()
    about = f"{{}}: mean over {len(pieces)} mini-batches less that of all rows (relative)"
    return [close(about.format(name), far, 0.0, SINGLE) for name, far in ((what, off), ("gradient", steep))]


def _precision(single: Callable[[Tensor], Values], double: Callable[[Tensor], Values], z: Tensor) -> list[Finding]:
    """Log joint and its gradient in 32 and in 64 bits, at the same z (C, P)."""
    (low, low_slope), (high, high_slope) = single(z), double(z)
    off = ((low - high).abs() / high.abs().clamp_min(1.0)).max().item()
    steep = (low_slope - high_slope).abs() / high_slope.abs().amax(1, keepdim=True).clamp_min(1.0)
    return [
        close("log joint density in 32 bits less that in 64 (relative)", off, 0.0, SINGLE),
        close("gradient in 32 bits less that in 64, of the largest entry", steep.max().item(), 0.0, SINGLE),
    ]


def _cast(data: Dataset, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    y = data.y_train
    return data.x_train.to(dtype), y.to(dtype) if y.is_floating_point() else y


def density_estimators(method: Method, model: nn.Module, data: Dataset, batches: int) -> tuple[list[Finding], dict]:
    """Findings and evidence of a sampler's log joint; call inside ``isolated``.   batches: see ``Estimators``."""
    temperature = method.temperature
    single = Potential(model, data.x_train, data.y_train, temperature)
    double = Potential(copy.deepcopy(model).double(), *_cast(data, torch.float64), temperature)
    z = double.initial + 0.2 * (single.prior_draws(PLACES) - double.initial)
    density, gradient = double(z)
    which = torch.linspace(0, double.size - 1, min(COORDINATES, double.size)).round().long().unique()
    moves = torch.zeros(len(which), double.size, dtype=torch.float64)
    moves[torch.arange(len(which)), which] = STEP
    ahead, behind = (torch.stack([double(place + sign * moves)[0] for place in z]) for sign in (1, -1))
    differences = (ahead - behind) / (2 * STEP)  # (PLACES, coordinates)
    chosen, scale = gradient[:, which], gradient.abs().amax(1, keepdim=True).clamp_min(1.0)
    # Kinks of a piecewise linear network, and cancellation in a density of many nats, count for something.
    cancelled = 1e-15 * density.abs().max().item() / STEP / scale.min().item()
    off = ((differences - chosen).abs() / scale).flatten().sort().values
    about = "gradient less finite differences, of the largest entry ({})"
    findings = [close(about.format("median"), off[len(off) // 2].item(), 0.0, SMOOTH + cancelled)]
    findings += _precision(single, double, z)
    if linear_layer(model) is not None or getattr(model.net, "activation", None) in (torch.tanh, torch.sigmoid, None):
        findings.append(close(about.format("worst"), off[-1].item(), 0.0, 10 * SMOOTH + cancelled))
    if hasattr(method, "eta_share"):
        x, y, chains = data.x_train, data.y_train, 3
        target = stochastic_log_joint(model, x, y, temperature)
        with in_mode(model, training=False):
            w = target.flat(target.sample_prior(chains)[0])
            w = w.lerp(target.initial.to(w), 0.8)
            blocks = torch.randperm(len(x)).view(min(batches, len(x)), -1)
            own = ([part[rows].expand(chains, *part[rows].shape) for part in (x, y)] for rows in blocks)
            pieces = [[v.double() for v in target.gradient(w, *rows)] for rows in own]
            findings += _batch_findings(
                "log joint density", target.gradient(w), pieces, [1 / len(blocks)] * len(blocks)
            )
    return findings, {"gradient": chosen.flatten().numpy(), "finite_difference": differences.flatten().numpy()}


def elbo_estimators(
    batches: int, repeats: int, warm: int, subject: Subject, method: Optimisation, model: nn.Module,
    guide: nn.Module | None, data: Dataset, seed: int,
) -> tuple[list[Finding], dict[str, Any], dict[str, float]]:  # fmt: skip
    """Findings, evidence and figures; call inside ``isolated``.   batches, repeats, warm: see ``Estimators``."""
    point = subject.converges_to == "point"
    latent = getattr(method, "prior_weight", 1.0) if point else getattr(method, "temperature", 1.0)
    q = PointMass(model.initial) if point else guide
    loop = replace(method, epochs=warm, batch_size=0, lr=0.01, final_lr=1.0)
    loop = replace(loop, kl_warmup=0) if "kl_warmup" in fields_of(loop) else loop
    trained = _Trained(model, q, data, seed, latent)
    trained.epochs(loop)
    num, approximate = len(data.x_train), hasattr(subject.entry, "channels")
    batches = min(batches, num)
    parts = torch.randperm(num, generator=torch.Generator().manual_seed(seed)).chunk(batches)
    weights, q_weights = in_weights = weight_space(model), weight_space(q)

    same_noise = []
    for rows in (None, *parts):
        with isolated(11):
            same_noise.append(trained.estimate(*in_weights, rows))
    findings = _batch_findings(
        "ELBO with the same noise", same_noise[0], same_noise[1:], [len(rows) / num for rows in parts]
    )
    # As training computes it, mean over an epoch, with batches of several sizes and several particles.
    sizes = [0 if b == 1 else -(-num // b) for b in dict.fromkeys((1, 2, batches)) if b <= num]
    still = replace(loop, epochs=min(repeats, 1000), lr=STILL)
    traces = [trained.epochs(replace(still, batch_size=size)) for size in sizes]
    several = trained.epochs(replace(still, epochs=min(max(20, repeats // 3), 1000)), PARTICLES)
    names = [*(f"ELBO of batches of {size} rows (nats)" for size in sizes[1:]), f"ELBO by {PARTICLES} particles (nats)"]
    rounding = ROUNDING * max(1.0, abs(traces[0].mean()))
    findings += _alike(names, [*traces[1:], several], traces[0], rounding)
    masks = point and any(getattr(weights.net, "rates", ()))
    if not (subject.improper or masks):  # a KL up to a constant; masks, which are no part of this model
        level = "caution" if approximate and weights is not model else "bad"
        defined = _by_definition(*in_weights, data, latent, 4 * repeats, point)
        about = "ELBO as trained, beside log p(y, w) − log q(w) over drawn weights (nats)"
        findings += _alike([about], [traces[0]], defined, rounding, level)

    draws: dict[str, Callable[[], Values]] = {"all rows, one draw": lambda: trained.estimate(model, q)}
    if weights is not model:
        draws["weight draws"] = lambda: trained.estimate(*in_weights)
    draws[f"{PARTICLES} particles"] = lambda: trained.estimate(model, q, particles=PARTICLES)
    size = len(parts[0])
    draws[f"batches of {size}"] = lambda: trained.estimate(model, q, torch.randperm(num)[:size])
    gradients = {name: torch.cat([one()[1] for _ in range(repeats)]) for name, one in draws.items()}
    findings += _same_mean(gradients, approximate)
    with isolated(5), torch.no_grad():
        w, _ = _draw(q_weights)
    single = LogJoint(weights, data.x_train, data.y_train)
    double = LogJoint(copy.deepcopy(weights).double(), *_cast(data, torch.float64))
    findings += _precision(single.gradient, double.gradient, single.flat(w).double()) + _kl_precision(*in_weights, data)
    evidence: dict[str, Any] = {
        "batch_sizes": np.array([size or num for size in sizes]),
        "elbo": np.array([t.mean() for t in traces]),
        "elbo_error": np.array([Estimate.of_independent(t).error[0] for t in traces]),
    }
    if point:
        return findings, evidence, {}
    shares, errors = _variances(gradients.values())
    evidence |= {"estimators": list(gradients), "variance": shares, "variance_error": errors}
    return findings, evidence, {"gradient_variance": 1 / float(shares[1])} if "weight draws" in gradients else {}


@dataclass
class _Trained:
    """What is trained, and the objective that training follows."""

    model: nn.Module
    q: nn.Module
    data: Dataset
    seed: int
    latent: float

    def epochs(self, loop: Optimisation, particles: int = 1) -> np.ndarray:
        """The ELBO of every epoch (E, 1), nats, from the very loop that trains."""
        how = {"seed": self.seed, "latent": self.latent, "num_particles": particles}
        return np.array(Optimisation.minimise(loop, self.model, self.q, self.data, **how)["elbo"])[:, None]

    def estimate(self, m: nn.Module, g: nn.Module, rows: Tensor | None = None, particles: int = 1) -> Values:
        """The ELBO (1,) of all rows, or as these rows stand for them, and its gradient (1, P)."""
        x, y, num = self.data.x_train, self.data.y_train, len(self.data.x_train)
        x, y = (x, y) if rows is None else (x[rows], y[rows])
        with in_mode(m, training=False):
            elbo, _ = Objective(m, g, particles)(x, y, num / len(x), self.latent)
        gradients = torch.autograd.grad(elbo, list(g.parameters()), allow_unused=True, materialize_grads=True)
        return elbo.detach()[None].double(), torch.cat([v.flatten() for v in gradients]).double()[None]


def _by_definition(
    model: nn.Module, q: nn.Module, data: Dataset, latent: float, number: int, point: bool
) -> np.ndarray:
    """log p(y | x, w) + log p(w) − log q(w) of weights drawn from q (number, 1), nats."""
    values = []
    with torch.no_grad(), in_mode(model, training=False):
        for _ in range(number):
            w, log_q = _draw(q)
            prior, likelihood = log_joints(model, w, data.x_train, data.y_train)
            values.append((likelihood + latent * (prior - (0.0 if point else log_q))).double().item())
    return np.array(values)[:, None]


def _draw(q: nn.Module) -> tuple[dict[str, Tensor], Tensor]:
    """({site of the model: one draw (1, …)}, log q of all sites, nats)."""
    nodes = poutine.trace(q).get_trace(None).nodes
    sites = {name: node for name, node in nodes.items() if node["type"] == "sample" and not node["is_observed"]}
    w = {name: s["value"].detach()[None] for name, s in sites.items() if not s["infer"].get("is_auxiliary")}
    return w, sum(s["fn"].log_prob(s["value"]).sum() for s in sites.values())


def _alike(
    names: list[str], values: list[np.ndarray], reference: np.ndarray, rounding: float, level: str = "bad"
) -> list[Finding]:
    """Means of (R, M) estimates that should be those of the reference."""
    base = Estimate.of_independent(reference)
    estimates = [Estimate.of_independent(v).less(base) for v in values]
    mean, error = (np.concatenate([getattr(e, name) for e in estimates]) for name in ("mean", "error"))
    expected = np.tile(np.nan_to_num(base.mean, nan=np.inf), len(values))  # of a NaN, none is right
    return judge(names, Estimate(mean, error), expected, tolerance=rounding, level=level)


def _same_mean(repeats: Mapping[str, Tensor], approximate: bool) -> list[Finding]:
    """Every estimator's gradients (R, P) have the same mean: in a few directions, and along the mean itself."""
    first, *_ = repeats.values()
    g = torch.Generator().manual_seed(1)
    directions = torch.randn(first.shape[1], PROJECTIONS, generator=g, dtype=torch.float64)
    mean = torch.nn.functional.normalize(first.mean(0), dim=0)
    directions = torch.cat([directions / directions.norm(dim=0), mean[:, None]], 1)
    which = [*(f"direction {k + 1}" for k in range(PROJECTIONS)), "the mean gradient"]
    along, findings = {name: (values @ directions).numpy() for name, values in repeats.items()}, []
    rounding = 10 * ROUNDING * float(first.norm(dim=1).mean())
    for name, values in list(along.items())[1:]:
        names = [f"gradient by {name}, along {what} (nats)" for what in which]
        level = "caution" if approximate and name == "weight draws" else "bad"
        findings += _alike(names, [values], next(iter(along.values())), rounding, level)
    return findings


def _variances(repeats: Iterable[Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Total variance of each estimator's gradient as a share of the first one's, and its standard error."""
    squares = [(g - g.mean(0)).square().sum(1).numpy() for g in repeats]
    totals = [(s.mean(), s.std() / np.sqrt(len(s))) for s in squares]
    total, error = np.maximum(np.array(totals).T, 1e-300)
    share, relative = total / total[0], error / total
    return share, share * np.hypot(relative, relative[0]) * (np.arange(len(share)) > 0)


def _kl_precision(model: nn.Module, q: nn.Module, data: Dataset) -> list[Finding]:
    """KL(q ‖ prior) in 32 and in 64 bits, where it has a closed form: no draw is in it."""
    values = []
    for cast in (torch.float32, torch.float64):
        m, g = (copy.deepcopy(module).to(cast) for module in (model, q))
        for seed in (1, 2):
            with isolated(seed), torch.no_grad(), in_mode(m, training=False):
                values.append(-Objective(m, g, 1)(*_cast(data, cast), 0.0, 1.0)[0].double().item())
    low, _, high, other = values
    off = (low - high) / max(1.0, abs(high))
    return [close("KL(q ‖ prior) in 32 bits less that in 64 (relative)", off, 0.0, SINGLE)] if high == other else []
