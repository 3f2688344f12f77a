"""Linear models, f = W φ(x): how they are recognised, and their log joint's gradient without automatic differentiation.

φ(x) = [x, 1] where the layer has a bias, else x; W is (K, D), K outputs and D numbers in φ, the bias its last column.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bnn_pyro.inference.log_joint import LogJoint, Pair, Precision, Rows, log_joints
from bnn_pyro.parts.likelihoods import Categorical
from bnn_pyro.parts.nets import MLP
from bnn_pyro.parts.priors import BayesianNet, GammaNormal
from bnn_pyro.parts.weights import CentredNormal

__all__ = ["LinearLayer", "LinearLogJoint", "categorical", "linear_layer", "prior_pull", "stochastic_log_joint"]


@dataclass(frozen=True)
class LinearLayer:
    """The one layer of a linear model, whose numbers come first in u: W by rows, then the bias.

    sites  its latent ones      order  (K, D), where in u each number of W stands
    """

    net: MLP
    sites: tuple[str, ...]
    has_bias: bool
    order: Tensor

    def features(self, x: Tensor) -> Tensor:
        """φ (B, D) of inputs (B, *input_shape), float64."""
        x = self.net.enter(x).double()
        return torch.cat([x, torch.ones_like(x[:, :1])], 1) if self.has_bias else x


def linear_layer(model: nn.Module) -> LinearLayer | None:
    """The layer of a ``BayesianNet`` over an ``MLP`` without hidden layers; None for any other model."""
    net = getattr(model, "net", None)
    plain = isinstance(model, BayesianNet) and type(model).forward is BayesianNet.forward
    if not (plain and isinstance(net, MLP) and type(net).forward is MLP.forward and len(net.layers) == 1):
        return None
    outputs, inputs = net.layers[0].weight.shape
    order, has_bias = torch.arange(outputs * inputs).view(outputs, inputs), net.layers[0].bias is not None
    if has_bias:
        order = torch.cat([order, torch.arange(outputs * inputs, outputs * (inputs + 1))[:, None]], 1)
    return LinearLayer(net, tuple(name for name, _ in net.named_parameters()), has_bias, order)


def stochastic_log_joint(model: nn.Module, x: Tensor, y: Tensor, temperature: float = 1.0) -> LogJoint:
    """The log joint whose gradient is the fastest for this model on mini-batches."""
    found, layer = LogJoint(model, x, y, temperature), linear_layer(model)
    if layer is None or found.constrained:
        return found
    known = all(isinstance(found.priors[site], CentredNormal | GammaNormal) for site in layer.sites)
    return LinearLogJoint(model, x, y, temperature) if known else found


class LinearLogJoint(LogJoint):
    """Of a linear model whose priors have −(a precision)·w for a gradient: several times as fast."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, temperature: float = 1.0) -> None:
        super().__init__(model, x, y, temperature)
        self.layer_sites = linear_layer(model).sites

    def gradient(self, u: Tensor, x: Rows = None, y: Rows = None, precision: Precision = None) -> Pair:
        """See :class:`LogJoint`."""
        x, y, precision = self.x if x is None else x, self.y if y is None else y, precision or {}
        factor = len(self.x) / y.shape[-1] / self.temperature
        sites, names = self.sites(u), self.layer_sites
        weight, *bias = (sites[name] for name in names)
        x = self.model.net.enter(x)
        f = weight @ x.mT
        if bias:
            f = f + bias[0].unsqueeze(-1)
        if type(self.model.likelihood) is Categorical:
            value, slope = categorical(f, y)
            total, slope, gradients = factor * value, factor * slope, {}
        else:
            f = f.mT.requires_grad_()
            own = {s: value.detach().requires_grad_() for s, value in sites.items() if s not in names}
            total = sum(log_joints(lambda _, y: self.model.likelihood(f, y), own, x, y, factor))
            slope, *others = torch.autograd.grad(total.sum(), [f, *own.values()])
            total, slope, gradients = total.detach(), slope.mT, dict(zip(own, others, strict=True))
        for site, gradient in zip(names, (slope @ x, slope.sum(-1)), strict=False):
            value, prior = sites[site], self.priors[site]
            pull = precision[site] if site in precision else prior_pull(prior, value)
            gradients[site] = gradient.addcmul_(
                pull.view(pull.shape + (1,) * (value.dim() - pull.dim())), value, value=-1
            )
            total = total + prior.log_prob(value)
        return total, self.flat(gradients)


def categorical(f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """(log p(y | f) summed over the rows (C,), its gradient (C, K, B)) of labels; f (C, K, B).

    By automatic differentiation this takes as long as all the rest of a step of a last layer.
    """
    log_p = f.log_softmax(-2)
    labels = y.unsqueeze(-2).expand((*f.shape[:-2], 1, f.shape[-1]))
    total = log_p.gather(-2, labels).flatten(-2).sum(-1)
    return total, log_p.exp_().neg_().scatter_add_(-2, labels, f.new_ones(()).expand(labels.shape))


def prior_pull(prior: CentredNormal | GammaNormal, w: Tensor) -> Tensor:
    """The factor of −w in the gradient of the prior's log-density, a scalar or (C,)."""
    return prior.precision_given(w).mean if isinstance(prior, GammaNormal) else prior.scale**-2
