"""The ELBO and its gradient as training estimates them: unbiased in mini-batches, and how noisy by which estimator."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from bnn_pyro.checks.check import Finding
from bnn_pyro.checks.subject import Subject
from bnn_pyro.checks.z_tests import Estimate, judge, of_independent
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.inference import optimise
from bnn_pyro.inference.elbo import ELBO, _Record
from bnn_pyro.inference.log_joint import Rescale, log_joints
from bnn_pyro.inference.method import Report
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

Found = tuple[list[Finding], dict[str, Any], dict[str, float]]
Gradient = Callable[[], tuple[float, Tensor]]  # -> (ELBO in nats, its gradient, flat)


class Sizes(Protocol):
    """See ``estimators.Estimators``."""

    batches: int
    repeats: int
    warm: int


def elbo_estimators(
    sizes: Sizes,
    subject: Subject,
    method: Optimisation,
    model: nn.Module,
    guide: nn.Module | None,
    data: Dataset,
    seed: int,
    report: Report | None,
) -> Found:
    """Findings, evidence and figures; call inside ``isolated``."""
    point = subject.limit == "points"
    latent = getattr(method, "prior_weight", 1.0) if point else getattr(method, "temperature", 1.0)
    q = PointMass(model.initial) if point else guide
    loop = replace(method, epochs=sizes.warm, batch_size=0, lr=0.01, final_lr=1.0)
    loop = replace(loop, **({"kl_warmup": 0} if hasattr(loop, "kl_warmup") else {}))
    Optimisation.minimise(loop, model, q, data, seed=seed, latent=latent)
    x, y = data.x_train, data.y_train
    num, batches = len(x), min(sizes.batches, len(x))
    parts = torch.randperm(num, generator=torch.Generator().manual_seed(seed)).chunk(batches)

    def estimate(m: nn.Module, g: nn.Module, rows: Tensor | slice, particles: int = 1) -> tuple[float, Tensor]:
        size = num if isinstance(rows, slice) else len(rows)
        scaled = optimise.Rescale(num / size, latent)(m)
        with in_mode(m, training=False):
            elbo, _ = ELBO(particles).parts(scaled, optimise.Rescale(latent=latent)(g), x[rows], y[rows])
        gradients = torch.autograd.grad(elbo, list(g.parameters()), allow_unused=True, materialize_grads=True)
        return elbo.item(), torch.cat([v.flatten() for v in gradients]).double()

    whole = slice(None)
    findings = [_common_noise(estimate, weight_space(model), weight_space(q), parts, whole, num)]
    evidence: dict[str, Any] = {}

    # As training computes it, mean over an epoch, with batches of several sizes and several particles.
    counted = [b for b in (1, 2, batches) if b <= num]
    options = [dict(batch_size=0 if b == 1 else -(-num // b)) for b in dict.fromkeys(counted)]
    traces = [_as_trained(loop, sizes.repeats, model, q, data, seed, latent, **option) for option in options]
    several = _as_trained(loop, max(20, sizes.repeats // 3), model, q, data, seed, latent, num_particles=PARTICLES)
    full = of_independent(traces[0])
    names = [f"ELBO of batches of {option['batch_size']} rows (nats)" for option in options[1:]]
    findings += _alike([*names, f"ELBO by {PARTICLES} particles (nats)"], [*traces[1:], several], traces[0])
    findings += _by_definition(sizes, subject, model, q, data, traces[0], latent)
    if report is not None:
        report(1, 2, {})

    draws: dict[str, Gradient] = {"all rows, one draw": lambda: estimate(model, q, whole)}
    if weight_space(model) is not model:
        draws["weight draws"] = lambda: estimate(weight_space(model), weight_space(q), whole)
    draws[f"{PARTICLES} particles"] = lambda: estimate(model, q, whole, PARTICLES)
    draws[f"batches of {len(parts[0])}"] = _random_batch(estimate, model, q, num, len(parts[0]))
    repeats = {name: [one() for _ in range(sizes.repeats)] for name, one in draws.items()}
    findings += _gradients(repeats, approximate=hasattr(subject.entry, "channels"))
    shares, errors = _variances(repeats)
    findings += _precision(model, q, data)
    evidence |= {
        "batch_sizes": np.array([option["batch_size"] or num for option in options]),
        "elbo": np.array([t.mean() for t in traces]),
        "elbo_error": np.array([of_independent(t).error[0] for t in traces]),
        "full_elbo": full.mean[0],
        "full_error": full.error[0],
    }
    if not point:
        evidence |= {"estimators": list(repeats), "variance": shares, "variance_error": errors}
    figures = {} if point or "weight draws" not in repeats else {"gradient_variance": 1 / float(shares[1])}
    return findings, evidence, figures


def _common_noise(
    estimate: Callable, model: nn.Module, q: nn.Module, parts: tuple[Tensor, ...], whole: slice, num: int
) -> Finding:
    """Weights drawn with the same noise in each: the batches, weighted by their rows, are the whole."""

    def at(rows: Tensor | slice) -> tuple[float, Tensor]:
        with isolated(11):
            return estimate(model, q, rows)

    elbo, gradient = at(whole)
    pieces = [(len(rows) / num, *at(rows)) for rows in parts]
    mean = sum(share * g for share, _, g in pieces)
    off = ((mean - gradient).norm() / gradient.norm().clamp_min(1e-12)).item()
    off = max(off, abs(sum(share * e for share, e, _ in pieces) - elbo) / max(1.0, abs(elbo)))
    about = (
        f"mean over {len(parts)} mini-batches, with the same noise, less the full batch: ELBO or gradient (relative)"
    )
    return Finding(about, off, 0.0, 0.0, level="bad" if not off < 10 * ROUNDING else "good")


def _as_trained(
    loop: Optimisation,
    epochs: int,
    model: nn.Module,
    q: nn.Module,
    data: Dataset,
    seed: int,
    latent: float,
    **given: Any,
) -> np.ndarray:
    """The ELBO of every epoch (E, 1), nats, from the very loop that trains, at a learning rate that moves nothing."""
    particles = {"num_particles": given.pop("num_particles", 1)}
    still = replace(loop, epochs=min(epochs, 1000), lr=STILL, **given)
    before = copy.deepcopy(q.state_dict())
    trace = Optimisation.minimise(still, model, q, data, seed=seed, latent=latent, **particles)
    q.load_state_dict(before)
    return np.array(trace["elbo"])[:, None]


def _by_definition(
    sizes: Sizes, subject: Subject, model: nn.Module, q: nn.Module, data: Dataset, trained: np.ndarray, latent: float
) -> tuple[Finding, ...]:
    """E_q[log p(y | x, w) + log p(w) − log q(w)] over drawn weights is what training maximises, in the mean."""
    m, g = weight_space(model), weight_space(q)
    if str(getattr(subject.entry, "prior", "")).startswith("log-uniform"):
        return ()  # its KL is an approximation up to a constant
    values = []
    with torch.no_grad(), in_mode(m, training=False):
        for _ in range(4 * sizes.repeats):
            with _Record() as record:
                g(None)
            w = {name: site["value"][None] for name, site in _own(record).items()}
            prior, likelihood = log_joints(m, w, data.x_train, data.y_train)
            inside = 0.0 if subject.limit == "points" else sum(_density(site) for site in record.sites.values())
            values.append((likelihood + latent * (prior - inside)).double().item())
    about = "ELBO as trained, beside log p(y, w) − log q(w) over drawn weights (nats)"
    found = _alike([about], [trained], np.array(values)[:, None])
    approximate = hasattr(subject.entry, "channels") and m is not model
    masks = (subject.limit == "points" and any(getattr(m.net, "dropout_rates", ()))) or getattr(m.net, "rate", 0.0)
    if masks:  # training averages over them, and they are no part of this model
        return ()
    return tuple(replace(f, level="caution") if approximate and f.level == "bad" else f for f in found)


def _density(site: dict[str, Any]) -> Tensor:
    return site["fn"].log_prob(site["value"]).sum()


def _own(record: Any) -> dict[str, Any]:
    """The sites that the model has too."""
    return {name: site for name, site in record.sites.items() if not site["infer"].get("is_auxiliary")}


def _alike(abouts: list[str], values: list[np.ndarray], reference: np.ndarray) -> tuple[Finding, ...]:
    """Means of (R, 1) estimates that should be that of the reference."""
    base = of_independent(reference)
    found = [of_independent(v) for v in values]
    both = Estimate(
        np.concatenate([f.mean for f in found]),
        np.hypot(np.concatenate([f.error for f in found]), base.error[0]),
        np.full(len(found), np.inf),
    )
    rounding = ROUNDING * max(1.0, abs(base.mean[0]))
    return judge(abouts, both, np.full(len(found), base.mean[0]), tolerance=rounding)


def _random_batch(estimate: Callable, model: nn.Module, q: nn.Module, num: int, size: int) -> Gradient:
    return lambda: estimate(model, q, torch.randperm(num)[:size])


def _gradients(repeats: dict[str, list[tuple[float, Tensor]]], approximate: bool) -> list[Finding]:
    """Every estimator's gradient has the same mean: in a few directions, and along the mean itself."""
    stacked = {name: torch.stack([g for _, g in values]) for name, values in repeats.items()}
    first = next(iter(stacked.values()))
    g = torch.Generator().manual_seed(1)
    directions = torch.randn(first.shape[1], PROJECTIONS, generator=g, dtype=torch.float64)
    along = torch.nn.functional.normalize(first.mean(0), dim=0)
    directions = torch.cat([directions / directions.norm(dim=0), along[:, None]], 1)
    base = of_independent((first @ directions).numpy())
    findings: list[Finding] = []
    for name, values in list(stacked.items())[1:]:
        one = of_independent((values @ directions).numpy())
        both = Estimate(one.mean, np.hypot(one.error, base.error), one.freedom)
        abouts = [f"gradient by {name}, along direction {k + 1} (nats)" for k in range(PROJECTIONS)]
        abouts.append(f"gradient by {name}, along the mean gradient (nats)")
        rounding = 10 * ROUNDING * float(first.norm(dim=1).mean())
        level = "caution" if approximate and name == "weight draws" else "bad"
        findings += judge(abouts, both, base.mean, tolerance=rounding, level=level)
    return findings


def _variances(repeats: dict[str, list[tuple[float, Tensor]]]) -> tuple[np.ndarray, np.ndarray]:
    """Total variance of each estimator's gradient as a share of the first one's, and its standard error."""
    totals = []
    for values in repeats.values():
        g = torch.stack([gradient for _, gradient in values])
        squares = (g - g.mean(0)).square().sum(1).numpy()
        totals.append((squares.mean(), squares.std() / np.sqrt(len(squares))))
    base = max(totals[0][0], 1e-300)
    share = np.array([total / base for total, _ in totals])
    relative = [error / max(total, 1e-300) for total, error in totals]
    error = share * np.hypot(relative, relative[0])
    error[0] = 0.0
    return share, error


def _precision(model: nn.Module, q: nn.Module, data: Dataset) -> list[Finding]:
    """Log joint, its gradient and KL(q ‖ prior) in 32 and in 64 bits, at the same weights."""
    model, q = weight_space(model), weight_space(q)
    with isolated(5), torch.no_grad():
        w = {k: v[None] for k, v in _sample(q).items()}
    values = []
    for m, g, cast in (
        (model, q, torch.float32),
        (copy.deepcopy(model).double(), copy.deepcopy(q).double(), torch.float64),
    ):
        x = data.x_train.to(cast)
        y = data.y_train.to(cast) if data.y_train.is_floating_point() else data.y_train
        leaves = {site: value.to(cast).requires_grad_() for site, value in w.items()}
        with in_mode(m, training=False):
            total = sum(log_joints(m, leaves, x, y))
            gradient = torch.autograd.grad(
                total.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True
            )
            with torch.no_grad():
                kl = []
                for seed in (1, 2):
                    with isolated(seed):
                        kl.append(-ELBO().parts(Rescale(0.0)(m), g, x, y)[0].double().item())
        values.append((total.double().item(), torch.cat([v.flatten() for v in gradient]).double(), kl))
    (low, low_gradient, low_kl), (high, high_gradient, high_kl) = values
    about = "{} in 32 bits less that in 64 (relative)"
    steep = (low_gradient - high_gradient).norm() / high_gradient.norm().clamp_min(1e-12)
    pairs = [("log joint density", (low - high) / max(1.0, abs(high))), ("its gradient", steep.item())]
    if high_kl[0] == high_kl[1]:  # in closed form: no draw is in it
        pairs.append(("KL(q ‖ prior)", (low_kl[0] - high_kl[0]) / max(1.0, abs(high_kl[0]))))
    return [
        Finding(about.format(what), off, 0.0, 0.0, level="bad" if not abs(off) < 10 * ROUNDING else "good")
        for what, off in pairs
    ]


def _sample(q: nn.Module) -> dict[str, Tensor]:
    """{site of the model: one draw}."""
    with _Record() as record:
        q(None)
    return {
        name: site["value"].detach() for name, site in record.sites.items() if not site["infer"].get("is_auxiliary")
    }
