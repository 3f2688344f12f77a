"""The ELBO and its gradient as training estimates them: unbiased in mini-batches, and how noisy by which estimator."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyro.poutine as poutine
import torch
from torch import Tensor, nn

from bnn_pyro.checks.check import Finding, Subject, fields_of
from bnn_pyro.checks.z_tests import Estimate, close, judge, of_independent
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.inference import optimise
from bnn_pyro.inference.elbo import ELBO
from bnn_pyro.inference.log_joint import Rescale, log_joints
from bnn_pyro.inference.optimise import Optimisation
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.guides import PointMass
from bnn_pyro.parts.nets import in_mode
from bnn_pyro.posterior import weight_space

__all__ = ["elbo_estimators"]

#: Relative rounding of float32 sums; particles whose invariance is looked at; projections of a gradient.
ROUNDING, PARTICLES, PROJECTIONS = 1e-4, 4, 6
#: A learning rate at which no weight moves.
STILL = 1e-30

Values = list[tuple[float, Tensor]]  # repeats of (ELBO in nats, its gradient, flat)


def elbo_estimators(
    batches: int, repeats: int, warm: int, subject: Subject, method: Optimisation, model: nn.Module,
    guide: nn.Module | None, data: Dataset, seed: int,
) -> tuple[list[Finding], dict[str, Any], dict[str, float]]:  # fmt: skip
    """Findings, evidence and figures; call inside ``isolated``.   batches, repeats, warm: see ``Estimators``."""
    point, entry = subject.converges_to == "point", subject.entry
    latent = getattr(method, "prior_weight", 1.0) if point else getattr(method, "temperature", 1.0)
    q = PointMass(model.initial) if point else guide
    loop = replace(method, epochs=warm, batch_size=0, lr=0.01, final_lr=1.0)
    loop = replace(loop, kl_warmup=0) if "kl_warmup" in fields_of(loop) else loop
    trained = _Trained(loop, model, q, data, seed, latent)
    trained.epochs()
    num, approximate = len(data.x_train), hasattr(entry, "channels")
    batches = min(batches, num)
    parts = torch.randperm(num, generator=torch.Generator().manual_seed(seed)).chunk(batches)
    in_weights = weight_space(model), weight_space(q)

    findings = [_common_noise(trained, in_weights, parts)]
    # As training computes it, mean over an epoch, with batches of several sizes and several particles.
    sizes = [0 if b == 1 else -(-num // b) for b in dict.fromkeys((1, 2, batches)) if b <= num]
    traces = [trained.elbo(repeats, batch_size=size) for size in sizes]
    several = trained.elbo(max(20, repeats // 3), num_particles=PARTICLES)
    names = [*(f"ELBO of batches of {size} rows (nats)" for size in sizes[1:]), f"ELBO by {PARTICLES} particles (nats)"]
    findings += _alike(names, [*traces[1:], several], traces[0])
    masks = (point and any(getattr(in_weights[0].net, "dropout_rates", ()))) or getattr(in_weights[0].net, "rate", 0.0)
    if not (subject.improper or masks):  # a KL up to a constant; masks, which are no part of this model
        level = "caution" if approximate and in_weights[0] is not model else "bad"
        defined = _by_definition(*in_weights, data, latent, 4 * repeats, point)
        about = "ELBO as trained, beside log p(y, w) − log q(w) over drawn weights (nats)"
        findings += _alike([about], [traces[0]], defined, level)

    def some_rows() -> Tensor:
        return torch.randperm(num)[: len(parts[0])]

    draws: dict[str, Callable[[], tuple[float, Tensor]]] = {"all rows, one draw": lambda: trained.estimate(model, q)}
    if in_weights[0] is not model:
        draws["weight draws"] = lambda: trained.estimate(*in_weights)
    draws[f"{PARTICLES} particles"] = lambda: trained.estimate(model, q, particles=PARTICLES)
    draws[f"batches of {len(parts[0])}"] = lambda: trained.estimate(model, q, some_rows())
    values = {name: [one() for _ in range(repeats)] for name, one in draws.items()}
    findings += _gradients(values, approximate) + _precision(*in_weights, data)
    evidence: dict[str, Any] = {
        "batch_sizes": np.array([size or num for size in sizes]),
        "elbo": np.array([t.mean() for t in traces]),
        "elbo_error": np.array([of_independent(t).error[0] for t in traces]),
    }
    if point:
        return findings, evidence, {}
    shares, errors = _variances(values)
    evidence |= {"estimators": list(values), "variance": shares, "variance_error": errors}
    return findings, evidence, {"gradient_variance": 1 / float(shares[1])} if "weight draws" in values else {}


class _Trained:
    """The loop that trains, and the objective that it follows."""

    def __init__(
        self, loop: Optimisation, model: nn.Module, q: nn.Module, data: Dataset, seed: int, latent: float
    ) -> None:
        self.loop, self.model, self.q, self.data, self.seed, self.latent = loop, model, q, data, seed, latent

    def epochs(self, particles: int = 1, **settings: Any) -> dict[str, list[float]]:
        """Train on; returns the trace."""
        loop, how = replace(self.loop, **settings), dict(seed=self.seed, latent=self.latent)
        more = {} if particles == 1 else {"num_particles": particles}
        return Optimisation.minimise(loop, self.model, self.q, self.data, **how, **more)

    def elbo(self, epochs: int, num_particles: int = 1, **settings: Any) -> np.ndarray:
        """Of every epoch (E, 1), nats, from the very loop that trains, at a learning rate that moves nothing."""
        before = copy.deepcopy(self.q.state_dict())
        trace = self.epochs(num_particles, epochs=min(epochs, 1000), lr=STILL, **settings)
        self.q.load_state_dict(before)
        return np.array(trace["elbo"])[:, None]

    def estimate(
        self, m: nn.Module, g: nn.Module, rows: Tensor | None = None, particles: int = 1
    ) -> tuple[float, Tensor]:
        """The ELBO of all rows, or as these rows stand for them, and its gradient, flat."""
        x, y, num = self.data.x_train, self.data.y_train, len(self.data.x_train)
        x, y = (x, y) if rows is None else (x[rows], y[rows])
        scaled = optimise.Rescale(num / len(x), self.latent)(m)
        with in_mode(m, training=False):
            elbo, _ = ELBO(particles).parts(scaled, optimise.Rescale(latent=self.latent)(g), x, y)
        gradients = torch.autograd.grad(elbo, list(g.parameters()), allow_unused=True, materialize_grads=True)
        return elbo.item(), torch.cat([v.flatten() for v in gradients]).double()


def _common_noise(trained: _Trained, pair: tuple[nn.Module, nn.Module], parts: tuple[Tensor, ...]) -> Finding:
    """Weights drawn with the same noise in each: the batches, weighted by their rows, are the whole."""
    values: Values = []
    for rows in (None, *parts):
        with isolated(11):
            values.append(trained.estimate(*pair, rows))
    (elbo, gradient), *pieces = values
    shares = [len(rows) / sum(map(len, parts)) for rows in parts]
    mean = sum(share * g for share, (_, g) in zip(shares, pieces, strict=True))
    off = ((mean - gradient).norm() / gradient.norm().clamp_min(1e-12)).item()
    mean_elbo = sum(share * e for share, (e, _) in zip(shares, pieces, strict=True))
    off = max(off, abs(mean_elbo - elbo) / max(1.0, abs(elbo)))
    about = f"mean over {len(parts)} mini-batches, with the same noise, less all rows: ELBO or gradient (relative)"
    return close(about, off, 0.0, 10 * ROUNDING)


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


def _alike(abouts: list[str], values: list[np.ndarray], reference: np.ndarray, level: str = "bad") -> list[Finding]:
    """Means of (R, 1) estimates that should be that of the reference."""
    base, estimates = of_independent(reference), [of_independent(v) for v in values]
    mean, error = (np.concatenate([getattr(e, name) for e in estimates]) for name in ("mean", "error"))
    rounding = ROUNDING * max(1.0, abs(base.mean[0]))
    return judge(abouts, Estimate(mean, error).less(base), base.mean[0] + 0 * mean, tolerance=rounding, level=level)


def _gradients(repeats: dict[str, Values], approximate: bool) -> list[Finding]:
    """Every estimator's gradient has the same mean: in a few directions, and along the mean itself."""
    stacked = {name: torch.stack([g for _, g in values]) for name, values in repeats.items()}
    first, *_ = stacked.values()
    g = torch.Generator().manual_seed(1)
    directions = torch.randn(first.shape[1], PROJECTIONS, generator=g, dtype=torch.float64)
    mean = torch.nn.functional.normalize(first.mean(0), dim=0)
    directions = torch.cat([directions / directions.norm(dim=0), mean[:, None]], 1)
    base, findings = of_independent((first @ directions).numpy()), []
    which = [*(f"direction {k + 1}" for k in range(PROJECTIONS)), "the mean gradient"]
    for name, values in list(stacked.items())[1:]:
        findings += judge(
            [f"gradient by {name}, along {what} (nats)" for what in which],
            of_independent((values @ directions).numpy()).less(base),
            base.mean,
            tolerance=10 * ROUNDING * float(first.norm(dim=1).mean()),
            level="caution" if approximate and name == "weight draws" else "bad",
        )
    return findings


def _variances(repeats: dict[str, Values]) -> tuple[np.ndarray, np.ndarray]:
    """Total variance of each estimator's gradient as a share of the first one's, and its standard error."""
    totals = []
    for values in repeats.values():
        g = torch.stack([gradient for _, gradient in values])
        squares = (g - g.mean(0)).square().sum(1).numpy()
        totals.append((squares.mean(), squares.std() / np.sqrt(len(squares))))
    total, error = np.maximum(np.array(totals).T, 1e-300)
    share, relative = total / total[0], error / total
    return share, share * np.hypot(relative, relative[0]) * (np.arange(len(share)) > 0)


def _precision(model: nn.Module, q: nn.Module, data: Dataset) -> list[Finding]:
    """Log joint, its gradient and KL(q ‖ prior) in 32 and in 64 bits, at the same weights."""
    with isolated(5), torch.no_grad():
        w, _ = _draw(q)
    values = []
    for cast in (torch.float32, torch.float64):
        m, g = (copy.deepcopy(module).to(cast) for module in (model, q))
        x, y = data.x_train.to(cast), data.y_train
        y = y.to(cast) if y.is_floating_point() else y
        leaves = {site: value.to(cast).requires_grad_() for site, value in w.items()}
        with in_mode(m, training=False):
            total, kl = sum(log_joints(m, leaves, x, y)).sum(), []
            slopes = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
            for seed in (1, 2):
                with isolated(seed), torch.no_grad():
                    kl.append(-ELBO().parts(Rescale(0.0)(m), g, x, y)[0].double().item())
        values.append((total.item(), torch.cat([v.flatten() for v in slopes]).double(), kl))
    (low, low_slope, low_kl), (high, high_slope, high_kl) = values
    steep = (low_slope - high_slope).norm() / high_slope.norm().clamp_min(1e-12)
    pairs = [("log joint density", (low - high) / max(1.0, abs(high))), ("its gradient", steep.item())]
    if high_kl[0] == high_kl[1]:  # in closed form: no draw is in it
        pairs.append(("KL(q ‖ prior)", (low_kl[0] - high_kl[0]) / max(1.0, abs(high_kl[0]))))
    return [close(f"{what} in 32 bits less that in 64 (relative)", off, 0.0, 10 * ROUNDING) for what, off in pairs]
