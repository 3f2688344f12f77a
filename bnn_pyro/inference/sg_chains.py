"""Chains of stochastic-gradient MCMC at work, all at once: one step, mini-batches, gradient noise, stored draws.

Everything is a tensor with the chains first: weights and momenta are (C, P), P numbers for all sites of the model, so
that a step is one normal draw and a few passes over memory, however many sites there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyro.poutine as poutine
import torch
from torch import Tensor, nn

from bnn_pyro.errors import UserError
from bnn_pyro.inference.log_joint import log_joints
from bnn_pyro.inference.validation import log_likelihood
from bnn_pyro.parts.gamma_prior import GammaNormal
from bnn_pyro.parts.likelihoods import Categorical
from bnn_pyro.parts.nets import MLP
from bnn_pyro.parts.priors import BayesianNet, IsotropicNormal

__all__ = ["Batches", "Stored", "Target", "categorical", "momentum_variance", "noise_variance", "scores", "step"]


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

    halves: (2, …), the gradient of the log joint as each half of ``rows`` rows estimates it, at the scale of all
    ``num`` rows.   batch: rows of the batches whose noise is meant, drawn without replacement.
    """
    # Under sampling without replacement a contrast ½(a − b) has the variance N²s²/(2·rows), and the mean of a batch of
    # B rows N²s²/B · (1 − B/N).
    return (0.5 * (halves[0] - halves[1])).square() * (2 * rows / batch) * (1 - batch / num)


class Batches:
    """Mini-batches of C chains: x (C, B, *input_shape) and y (C, B); without mini-batches the data as they are.

    Every epoch each chain divides the rows into blocks of B of its own (fewer rows than there are blocks are left out)
    and takes each block once, so that the noise of an epoch sums to zero; or, ``independent``, as many blocks with
    replacement, so that gradient noise is white. All of it is a function of (seed, epoch).
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
            for rows in self._rows(epoch)[first : first + stop - start]:
                flat = rows.flatten()
                yield tuple(part.index_select(0, flat).unflatten(0, rows.shape) for part in (self.x, self.y))
                start += 1

    def _rows(self, epoch: int) -> Tensor:
        """Row numbers of every step of an epoch (steps, C, B)."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        rows = []
        for _ in range(self.chains):
            blocks = torch.randperm(len(self.x), generator=generator)[: self.per_epoch * self.size]
            blocks = blocks.view(self.per_epoch, self.size)
            if self.independent:
                blocks = blocks[torch.randint(self.per_epoch, (self.per_epoch,), generator=generator)]
            rows.append(blocks)
        return torch.stack(rows, 1).to(self.x.device)


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
        #: Sites of the weights (and biases) of a linear model; empty for any other.
        self.linear: tuple[str, ...] = ()

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
        # One ordinary call under Pyro's own checks: they tell what is wrong with a model.
        trace = poutine.trace(poutine.condition(self.model, data=self.initial)).get_trace(x[:2], y[:2])
        self.priors = {site: trace.nodes[site]["fn"] for site in self.shapes}
        if type(self.model) is BayesianNet and type(self.model.net) is MLP and len(self.model.net.layers) == 1:
            names = tuple(name for name, _ in self.model.net.named_parameters())
            self.linear = names if all(isinstance(self.priors[n], IsotropicNormal | GammaNormal) for n in names) else ()
        try:
            drawn = {s: [p.sample((chains,)) for _ in range(2)] for s, p in self.priors.items()}
        except NotImplementedError:
            raise UserError(
                "a sampler needs a proper prior, and this variant's has no samples; take another, such as fan-in:1"
            ) from None
        scale = jitter / math.sqrt(2)  # the difference of two draws has mean 0 and twice the variance
        return self.flat({s: self.initial[s] + scale * (a - b) for s, (a, b) in drawn.items()})

    def __call__(self, w: Tensor, x: Tensor, y: Tensor, precision: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """((C,) log joint estimated from these rows, its gradient (C, P)).

        precision: {site: (C,)} for priors whose precision is given; the log joint has it integrated out all the same.
        """
        factor = self.num / y.shape[-1] / self.temperature
        sites = self.sites(w)
        total, gradients = (self._linear if self.linear else self._any)(sites, x, y, factor, precision)
        for site, given in precision.items() if not self.linear else ():
            law, value = self.priors[site], sites[site]
            total = total + law.log_prob(value) - law.log_prob_given(value, given)
        return total, self.flat(gradients)

    def _any(
        self, sites: dict[str, Tensor], x: Tensor, y: Tensor, factor: float, precision: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Of any model, by automatic differentiation."""
        leaves = {site: value.detach().requires_grad_() for site, value in sites.items()}
        total = sum(log_joints(self.model, leaves, x, y, factor, precision))
        gradients = torch.autograd.grad(total.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True)
        return total.detach(), dict(zip(leaves, gradients, strict=True))

    def _linear(
        self, sites: dict[str, Tensor], x: Tensor, y: Tensor, factor: float, precision: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Of a linear model whose priors have −(a precision)·w for a gradient: several times as fast as the other way.

        Pyro sees the likelihood and its own sites only. Products keep the long dimension of x contiguous.
        """
        weight, *bias = (sites[name] for name in self.linear)
        x = self.model.net.enter(x)
        f = weight @ x.mT
        if bias:
            f = f + bias[0].unsqueeze(-1)
        if type(self.model.likelihood) is Categorical:
            value, gradient = categorical(f, y)
            total, gradient, others, own = factor * value, factor * gradient, (), {}
        else:
            f = f.mT.requires_grad_()
            own = {s: value.detach().requires_grad_() for s, value in sites.items() if s not in self.linear}
            total = sum(log_joints(lambda _, y: self.model.likelihood(f, y), own, x, y, factor))
            gradient, *others = torch.autograd.grad(total.sum(), [f, *own.values()])
            gradient = gradient.mT
        gradients = dict(zip(self.linear, (gradient @ x, gradient.sum(-1)), strict=False))
        total = total.detach()
        for site in self.linear:
            value, law = sites[site], self.priors[site]
            pull = precision[site] if site in precision else _pull(law, value)
            gradients[site].addcmul_(pull.view(pull.shape + (1,) * (value.dim() - pull.dim())), value, value=-1)
            total = total + law.log_prob(value)
        return total, gradients | dict(zip(own, others, strict=True))

    def draw_precisions(self, w: Tensor) -> dict[str, Tensor]:
        """{site: (C,)}: the precision of every Gamma prior, drawn from its exact conditional given w."""
        sites = self.sites(w)
        return {s: p.precision_given(sites[s]).sample() for s, p in self.priors.items() if isinstance(p, GammaNormal)}

    def gradient_noise(self, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """(P,): variance of the gradient of batches like this one (C, B, …), mean over the chains; see above."""
        batch = y.shape[-1]
        half = batch // 2
        parts = [self(w, x[:, a : a + half], y[:, a : a + half], {})[1] for a in (0, half)]
        return noise_variance(torch.stack(parts), half, batch, self.num).mean(0)


def categorical(f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """(log p(y | f) summed over the rows (C,), its gradient (C, K, B)) of ``likelihoods.Categorical``; f (C, K, B).

    By hand: what Pyro and automatic differentiation do takes as long as the rest of a step of a last layer, most of it
    in passes over the classes of one row at a time.
    """
    log_p = f.log_softmax(-2)
    labels = y.unsqueeze(-2).expand((*f.shape[:-2], 1, f.shape[-1]))
    total = log_p.gather(-2, labels).flatten(-2).sum(-1)
    return total, log_p.exp_().neg_().scatter_add_(-2, labels, f.new_ones(()).expand(labels.shape))


def _pull(prior: IsotropicNormal | GammaNormal, w: Tensor) -> Tensor:
    """The factor of −w in the gradient of the prior's log-density, a scalar or (C,)."""
    return prior.precision_given(w).mean if isinstance(prior, GammaNormal) else prior.scale**-2


@dataclass
class Stored:
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
