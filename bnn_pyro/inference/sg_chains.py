"""Chains of stochastic-gradient MCMC at work, all at once: one step, mini-batches, gradient noise, stored draws.

Everything is a tensor with the chains first: weights and momenta are (C, P), P numbers for all sites of the model, so
that a step is one normal draw and a few passes over memory, however many sites there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bnn_pyro.errors import UserError
from bnn_pyro.inference.density import log_joints
from bnn_pyro.inference.validation import log_likelihood
from bnn_pyro.parts.gamma_prior import GammaNormal

__all__ = ["Batches", "Ensemble", "Target", "momentum_variance", "noise_variance", "step"]

#: Bytes of shuffled rows kept for an epoch; above, rows are fetched batch by batch.
SHUFFLED_BYTES = 2**30


def step(w: Tensor, v: Tensor, gradient: Tensor, eta: float, friction: float, noise: Tensor | float) -> tuple:
    """(w', v') by the semi-implicit form of SGHMC (Chen et al. 2014, equation 15).

        v' = (1 − friction)·v + eta·gradient + noise        w' = w + v'

    gradient: of the log joint.   noise: the standard deviation of what is injected, 0 for none.
    """
    v = v.mul(1 - friction).add_(gradient, alpha=eta)
    if isinstance(noise, Tensor):
        v.addcmul_(torch.randn_like(v), noise)
    elif noise:
        v.add_(torch.randn_like(v), alpha=noise)
    return w + v, v


def momentum_variance(eta: float, friction: float) -> float:
    """Of v in stationarity, in the limit of small steps: eta / (1 − friction/2).

    At a finite step it is larger, by 1 / (1 − eta·λ/(4 − 2·friction)) in a direction of curvature λ, and so is the
    variance of the weights, by the very same factor.
    """
    return eta / (1 - friction / 2)


def noise_variance(halves: Tensor, rows: int, batch: int, num: int) -> Tensor:
    """Unbiased estimate of the variance of a mini-batch's gradient, elementwise, from one batch.

    halves: (2, …), the gradient of the log-likelihood as each half of ``rows`` rows estimates it, at the scale of all
    ``num`` rows.   batch: rows of the batches whose noise is meant, drawn without replacement.
    """
    # Under sampling without replacement a contrast ½(a − b) has the variance N²s²/(2·rows), and the mean of a batch of
    # B rows N²s²/B · (1 − B/N).
    return (0.5 * (halves[0] - halves[1])).square() * (2 * rows / batch) * (1 - batch / num)


class Batches:
    """Mini-batches of C chains: x (C, B, *input_shape) and y (C, B); without mini-batches the data as they are.

    Every epoch the rows are divided into blocks of B anew (fewer than one row a block is left out), and every chain
    takes the blocks in an order of its own: ``independent`` with replacement, so that gradient noise is white; else
    each block once, so that the noise of an epoch sums to zero. Both ways the noises of any two chains are
    uncorrelated. All of it is a function of (seed, epoch).
    """

    def __init__(self, x: Tensor, y: Tensor, size: int, chains: int, seed: int, independent: bool) -> None:
        self.x, self.y, self.chains, self.seed, self.independent = x, y, chains, seed, independent
        size = size if 0 < size < len(x) else len(x)
        self.per_epoch = math.ceil(len(x) / size)
        self.size = len(x) // self.per_epoch

    @property
    def full(self) -> bool:
        """Whether every step sees all rows."""
        return self.per_epoch == 1

    def steps(self, start: int, stop: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(x, y) of steps start … stop−1."""
        if self.full:
            yield from ((self.x, self.y) for _ in range(start, stop))
            return
        while start < stop:
            epoch, first = divmod(start, self.per_epoch)
            for batch in self._epoch(epoch, first, min(self.per_epoch, first + stop - start)):
                yield batch
                start += 1

    def _epoch(self, epoch: int, first: int, last: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        used = self.per_epoch * self.size
        rows = torch.randperm(len(self.x), generator=generator)[:used].to(self.x.device)
        shape = (self.per_epoch, self.chains)
        if self.independent:
            which = torch.randint(self.per_epoch, shape, generator=generator)
        else:
            which = torch.rand(shape, generator=generator).argsort(0)
        which, rows = which.to(self.x.device), rows.view(self.per_epoch, self.size)
        if self.x.numel() * self.x.element_size() > SHUFFLED_BYTES:
            for blocks in which[first:last]:
                index = rows[blocks]
                yield self.x[index], self.y[index]
            return
        x, y = (part[rows.flatten()].unflatten(0, rows.shape) for part in (self.x, self.y))
        for blocks in which[first:last]:
            yield x.index_select(0, blocks), y.index_select(0, blocks)


class Target:
    """log p(y | x, w)/T + log p(w) of C chains, and its gradient, as functions of one flat tensor (C, P).

    Raises UserError for a prior without samples.
    """

    def __init__(self, model: nn.Module, num: int, device: torch.device, temperature: float) -> None:
        self.model, self.num, self.temperature = model, num, temperature
        self.initial = {site: value.detach().to(device) for site, value in model.initial.items()}
        self.shapes = {site: value.shape for site, value in self.initial.items()}
        self.sizes = [value.numel() for value in self.initial.values()]
        self.priors: dict[str, Any] = {}

    def sites(self, flat: Tensor) -> dict[str, Tensor]:
        """(…, P) -> {site: (…, *shape)}, views."""
        parts = flat.split(self.sizes, -1)
        return {site: p.unflatten(-1, shape) if shape else p.squeeze(-1)
                for p, (site, shape) in zip(parts, self.shapes.items(), strict=True)}  # fmt: skip

    def flat(self, sites: Mapping[str, Tensor]) -> Tensor:
        """{site: (C, *shape)} -> (C, P)."""
        return torch.cat([sites[site].reshape(len(sites[site]), -1) for site in self.shapes], 1)

    def start(self, chains: int, jitter: float, x: Tensor, y: Tensor) -> Tensor:
        """(C, P): the initial weights plus ``jitter`` times a vector with the prior's standard deviations."""
        import pyro.poutine as poutine

        # One ordinary call under Pyro's own checks: they tell what is wrong with a model.
        trace = poutine.trace(poutine.condition(self.model, data=self.initial)).get_trace(x[:2], y[:2])
        self.priors = {site: trace.nodes[site]["fn"] for site in self.shapes}
        try:
            drawn = {s: [p.sample((chains,)) for _ in range(2)] for s, p in self.priors.items()}
        except NotImplementedError:
            raise UserError(
                "a sampler needs a proper prior, and this variant's has no samples; take another, such as fan-in:1"
            ) from None
        scale = jitter / math.sqrt(2)  # the difference of two draws has mean 0 and twice the variance
        return self.flat({s: self.initial[s] + scale * (a - b) for s, (a, b) in drawn.items()})

    def __call__(
        self, w: Tensor, x: Tensor, y: Tensor, precision: Mapping[str, Tensor], prior: bool = True
    ) -> tuple[Tensor, Tensor]:
        """((C,) log joint estimated from these rows, its gradient (C, P)); without ``prior`` the likelihood alone.

        precision: {site: (C,)} for priors whose precision is given; the log joint has it integrated out all the same.
        """
        leaves = {site: value.detach().requires_grad_() for site, value in self.sites(w).items()}
        batch = y.shape[-1]
        first, second = log_joints(self.model, leaves, x, y, self.num / batch / self.temperature, precision)
        total = first + second if prior else second
        gradients = torch.autograd.grad(total.sum(), list(leaves.values()), allow_unused=not prior)
        found = dict(zip(leaves, gradients, strict=True))
        if not prior:
            found = {s: torch.zeros_like(leaves[s]) if g is None else g for s, g in found.items()}
        total = total.detach()
        for site, given in precision.items() if prior else ():
            value = leaves[site].detach()
            total = total + self.priors[site].log_prob(value) - self.priors[site].log_prob_given(value, given)
        return total, self.flat(found)

    def draw_precisions(self, w: Tensor) -> dict[str, Tensor]:
        """{site: (C,)}: the precision of every Gamma prior, drawn from its exact conditional given w."""
        sites = self.sites(w)
        return {s: p.precision_given(sites[s]).sample() for s, p in self.priors.items() if isinstance(p, GammaNormal)}

    def gradient_noise(self, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """(P,): variance of the gradient of batches like this one (C, B, …), mean over the chains; see above."""
        batch = y.shape[-1]
        half = batch // 2
        parts = [self(w, x[:, a : a + half], y[:, a : a + half], {}, prior=False)[1] for a in (0, half)]
        return noise_variance(torch.stack(parts), half, batch, self.num).mean(0)


@dataclass
class Ensemble:
    """The stored draws: equal weights, at most ``cap`` a chain, evenly spread over simulated time.

    Where one more is due, every second one is dropped and the interval doubles.
    """

    cap: int
    draws: list[Tensor] = field(default_factory=list)  # (C, P) each
    log_joint: list[Tensor] = field(default_factory=list)  # (C,) each
    validation: list[Tensor] = field(default_factory=list)  # log Σ_c p(y | x, w_c) of each validation row
    stride: int = 1

    def add(self, serial: int, w: Tensor, log_joint: Tensor, validation: Tensor | None) -> None:
        """Keep the draw with this serial number, 1, 2, …, if it is the turn of one."""
        if serial % self.stride:
            return
        if len(self.draws) == self.cap:
            for kept in (self.draws, self.log_joint, self.validation):
                kept[:] = kept[1::2]
            self.stride *= 2
            if serial % self.stride:
                return
        self.draws.append(w.clone())
        self.log_joint.append(log_joint)
        if validation is not None:
            self.validation.append(validation)

    def wants(self, serial: int) -> bool:
        """Whether the draw with this serial number would be kept."""
        return serial % (self.stride * (2 if len(self.draws) == self.cap else 1)) == 0

    def validation_nll(self) -> float:
        """Mean NLL of the validation rows under the mixture of all stored draws of all chains, in nats a row."""
        chains = self.draws[0].shape[0]
        return -(torch.stack(self.validation).logsumexp(0) - math.log(chains * len(self.draws))).mean().item()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold."""
        lists = {k: torch.stack(v) if v else torch.empty(0) for k, v in self._lists().items()}
        return {**lists, "stride": self.stride}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Go on from what :meth:`state_dict` returned."""
        for name, kept in self._lists().items():
            kept[:] = list(state[name].to(device))
        self.stride = state["stride"]

    def _lists(self) -> dict[str, list[Tensor]]:
        return {"draws": self.draws, "log_joint": self.log_joint, "validation": self.validation}


def scores(model: nn.Module, sites: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """log Σ_c p(y_n | x_n, w_c) of the rows, (B,)."""
    return log_likelihood(model, sites, x, y).logsumexp(0)
