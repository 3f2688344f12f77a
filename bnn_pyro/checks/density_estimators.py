"""The log joint density that samplers follow: its gradient against finite differences, precision, and mini-batches."""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch
from torch import nn

from bnn_pyro.checks.check import Finding
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.inference import Method
from bnn_pyro.inference.potential import Potential
from bnn_pyro.inference.sg_chains import Target
from bnn_pyro.parts.nets import in_mode
from bnn_pyro.posterior import weight_space

__all__ = ["density_estimators"]

#: Step of central differences, how far they and 32 bits may be off (relative); points, and numbers looked at in each.
STEP, SMOOTH, ROUNDING, PLACES, COORDINATES = 1e-5, 1e-5, 1e-3, 4, 12


class Sizes(Protocol):
    """See ``estimators.Estimators``."""

    batches: int


def density_estimators(
    sizes: Sizes, method: Method, model: nn.Module, data: Dataset
) -> tuple[list[Finding], dict[str, Any], dict[str, float]]:
    """Findings, evidence and figures; call inside ``isolated``."""
    model, temperature = weight_space(model), method.temperature
    x, y = data.x_train, data.y_train
    exact = y.double() if y.is_floating_point() else y
    single = Potential(model, x, y, temperature)
    double = Potential(copy.deepcopy(model).double(), x.double(), exact, temperature)
    z = double.initial + 0.2 * (single.prior_draws(PLACES) - double.initial)
    density, gradient = double(z)
    which = torch.linspace(0, double.size - 1, min(COORDINATES, double.size)).round().long().unique()
    moves = torch.zeros(len(which), double.size, dtype=torch.float64)
    moves[torch.arange(len(which)), which] = STEP
    ahead, behind = (torch.stack([double(place + sign * moves)[0] for place in z]) for sign in (1, -1))
    differences = (ahead - behind) / (2 * STEP)  # (PLACES, coordinates)
    chosen = gradient[:, which]
    scale = gradient.abs().amax(1, keepdim=True).clamp_min(1.0)
    # Kinks of a piecewise linear network, and cancellation in a density of many nats, count for something.
    cancelled = 1e-15 * density.abs().max().item() / STEP / scale.min().item()
    off = ((differences - chosen).abs() / scale).flatten().sort().values
    median, largest = off[len(off) // 2].item(), off[-1].item()
    findings = [_close("gradient less finite differences, of the largest entry (median)", median, SMOOTH + cancelled)]
    smooth = getattr(model.net, "activation", None) in (torch.tanh, torch.sigmoid, None) or _linear(model)
    if smooth:
        about = "gradient less finite differences, of the largest entry (worst)"
        findings.append(_close(about, largest, 10 * SMOOTH + cancelled))
    low, low_gradient = single(z)
    about = "log joint density in 32 bits less that in 64 (relative)"
    findings.append(_close(about, ((low - density).abs() / density.abs().clamp_min(1.0)).max().item(), ROUNDING))
    about = "gradient in 32 bits less that in 64, of the largest entry"
    findings.append(_close(about, ((low_gradient - gradient).abs() / scale).max().item(), ROUNDING))
    if hasattr(method, "eta_share"):
        findings += _batches(sizes, model, data, temperature)
    evidence = {"gradient": chosen.flatten().numpy(), "finite_difference": differences.flatten().numpy()}
    return findings, evidence, {}


def _batches(sizes: Sizes, model: nn.Module, data: Dataset, temperature: float) -> list[Finding]:
    """The mean over equal mini-batches of log joint and gradient is that of all rows."""
    x, y, chains = data.x_train, data.y_train, 3
    target = Target(model, len(x), x.device, temperature)
    with in_mode(model, training=False):
        w = target.start(chains, 0.2, x, y)
        total, gradient = target(w, x, y, {})
        blocks = torch.randperm(len(x)).view(min(sizes.batches, len(x)), -1)
        pieces = [target(w, *(part[rows].expand(chains, *part[rows].shape) for part in (x, y)), {}) for rows in blocks]
    mean, slope = (torch.stack([p[k].double() for p in pieces]).mean(0) for k in (0, 1))
    off = ((mean - total).abs() / total.abs().clamp_min(1.0)).max().item()
    steep = ((slope - gradient).norm(dim=1) / gradient.norm(dim=1).clamp_min(1e-12)).max().item()
    return [
        _close(
            f"log joint density: mean over {len(blocks)} mini-batches less that of all rows (relative)", off, ROUNDING
        ),
        _close(f"gradient: mean over {len(blocks)} mini-batches less that of all rows (relative)", steep, ROUNDING),
    ]


def _linear(model: nn.Module) -> bool:
    return len(getattr(model.net, "layers", ())) == 1 and not hasattr(model.net, "convolutions")


def _close(about: str, off: float, room: float) -> Finding:
    return Finding(about, off, 0.0, 0.0, level="bad" if not off < room else "good")
