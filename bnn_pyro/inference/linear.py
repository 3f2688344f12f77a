"""Linear models, f = W φ(x): how they are recognised, and the curvature of their log joint.

φ(x) = [x, 1] if the layer has a bias, else x. W is (K, D), with K outputs, D entries of φ, and the bias as last column.

    Λ = (1/T) Σ_n φ_n φ_nᵀ ⊗ I_n − ∂² log p(w)             f_n = W φ_n

I_n is the Fisher information of the likelihood about the outputs at row n; for labels, and for targets with one noise,
it equals the Hessian. The information about the logarithm of a learned noise is 2N/T, with no cross terms to W.
"""

from collections.abc import Callable

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor, nn
from torch.distributions import Normal

from bnn_pyro.inference.log_joint import LogJoint
from bnn_pyro.parts.nets import MLP
from bnn_pyro.parts.priors import BayesianNet
from bnn_pyro.parts.weights import CentredNormal, base_of

ROWS = 1024  # number of rows processed at once, so that their features stay in the processor's cache
Information = Callable[[Tensor], Tensor]  # φ (B, D) -> I (B, K, K)


def linear_layer(model: nn.Module) -> nn.Module | None:
    """The layer of a ``BayesianNet`` over an ``MLP`` without hidden layers, whose weights come first in u; or None."""
    net = getattr(model, "net", None)
    plain = isinstance(model, BayesianNet) and type(model).forward is BayesianNet.forward
    is_mlp = plain and isinstance(net, MLP) and type(net).forward is MLP.forward
    return net.layers[0] if is_mlp and len(net.layers) == 1 else None


class Curvature:
    """The curvature Λ of a linear model, float64, over the flat vector u of ``LogJoint``; use it inside ``isolated``.

    features         φ (N, D), followed by a column of log exposure if there is one
    order            (K, D), the index in u of each entry of W
    prior_precision  (P,), −∂² log p(w) of a Normal prior, 1/variance of another; ``coordinates`` may change it
    """

    def __init__(self, log_joint: LogJoint) -> None:
        layer, self.log_joint = linear_layer(log_joint.model), log_joint
        outputs, inputs = layer.weight.shape
        self.order, self.has_bias = torch.arange(outputs * inputs).view(outputs, inputs), layer.bias is not None
        self.features = log_joint.model.net.enter(log_joint.x).double()
        if self.has_bias:
            self.order = torch.cat([self.order, torch.arange(outputs * inputs, outputs * (inputs + 1))[:, None]], 1)
            self.features = torch.cat([self.features, torch.ones_like(self.features[:, :1])], 1)
        if log_joint.model.net.exposure:
            self.features = torch.cat([self.features, log_joint.model.net.add_exposure(0.0, log_joint.x).double()], 1)
        numbers = torch.cat([self.order.flatten(), torch.arange(self.order.numel(), log_joint.size)])
        self.inverse = numbers.argsort()  # the index in (output, input) order of each entry of u
        pieces = [_scale(log_joint.priors[s]).pow(-2).expand(shape).flatten() for s, shape in log_joint.free.items()]
        self.prior_precision = torch.cat(pieces)

    def information(self, u: Tensor) -> Information:
        """The function that computes I_n of rows φ, at weights u (P,)."""
        likelihood, exposed = self.log_joint.model.likelihood, self.features.shape[1] - self.order.shape[1]
        noise = {s: v.double() for s, v in self.log_joint.sites(u).items() if s in likelihood.initial}
        weight = nn.functional.pad(u[self.order], (0, exposed), value=1.0)
        return lambda features: likelihood.information(features @ weight.mT, noise)

    @property
    def own_precision(self) -> Tensor:
        """The diagonal of Λ for the likelihood's own sites, (P − K·D,); there it is a diagonal matrix."""
        likelihood = self.log_joint.model.likelihood
        each = [likelihood.own_information[site] for site in likelihood.initial]
        rows = len(self.features) / self.log_joint.temperature
        return rows * self.features.new_tensor(each) + self.prior_precision[self.order.numel() :]

    @torch.no_grad()
    def precision(self, u: Tensor, structure: Callable[[Tensor, Information], Tensor]) -> Tensor:
        """Λ (P, P) at u (P,).   structure: :func:`summed`, or an approximation of it."""
        weights = structure(self.features, self.information(u)) / self.log_joint.temperature
        outputs, inputs = self.order.shape
        weights = weights.view(outputs, -1, outputs, self.features.shape[1])[:, :inputs, :, :inputs]
        weights = weights.reshape(outputs * inputs, -1)
        weights.diagonal().add_(self.prior_precision[self.order.flatten()])
        return torch.block_diag(weights, self.own_precision.diag())[self.inverse][:, self.inverse]


def _scale(prior: TorchDistribution) -> Tensor:
    """The standard deviation of a prior; it is estimated from 20 draws, roughly, unless the prior is Normal."""
    if isinstance(prior := base_of(prior), CentredNormal | Normal):
        return prior.scale.double()
    return torch.stack([prior.sample() for _ in range(20)]).double().square().mean().sqrt()


def summed(features: Tensor, information: Information) -> Tensor:
    """Σ_n I_n ⊗ φ_n φ_nᵀ, (K·D, K·D) by (output, input). Only blocks on and above the diagonal are computed."""
    outputs, inputs = information(features[:1]).shape[-1], features.shape[-1]
    total = features.new_zeros(outputs, inputs, outputs, inputs)
    for rows in features.split(ROWS):
        each = information(rows)
        for k in range(outputs):
            right = (each[:, k, k:, None] * rows[:, None, :]).flatten(1)
            total[k, :, k:] += (rows.mT @ right).unflatten(1, (outputs - k, inputs))
    for k in range(outputs):
        total[k + 1 :, :, k] = total[k, :, k + 1 :].permute(1, 2, 0)
    return total.view(outputs * inputs, outputs * inputs)


def factored(features: Tensor, information: Information) -> Tensor:
    """mean_n I_n ⊗ Σ_n φ_n φ_nᵀ, an approximation of the sum (Ritter, Botev & Barber 2018, openreview Skdvd2xAZ)."""
    mean = sum(information(rows).sum(0) for rows in features.split(ROWS)) / len(features)
    return torch.kron(mean, features.mT @ features)
