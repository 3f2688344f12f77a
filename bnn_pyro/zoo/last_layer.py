"""A Bayesian last layer on a frozen network: an inexpensive uncertainty for a trained network.

    φ = net(x) / c    W, b ~ p(W, b)    f = W φ + b    y ~ likelihood(f)          q(W, b): Normal, of a chosen family

The network is trained to a point estimate on the same rows and frozen; then the posterior of its last layer alone is
inferred (Snoek et al. 2015, arXiv:1502.05700; Kristiadi, Hein & Hennig 2020, arXiv:2002.10118). The model is a
generalised linear one, whose log posterior is concave for the usual likelihoods: samplers converge, and every
approximation can be checked. The uncertainty of the features themselves is not represented.
"""

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.errors import UserError
from bnn_pyro.parts import nets
from bnn_pyro.parts.backbone import INPUTS, Backbone, OnFeatures, Pretrained, from_description, from_text
from bnn_pyro.parts.correlated_normal import parse_family
from bnn_pyro.parts.likelihoods import LIKELIHOODS, make_likelihood
from bnn_pyro.parts.priors import BayesianNet
from bnn_pyro.posterior import Posterior
from bnn_pyro.settings import Settings, build, setting
from bnn_pyro.zoo.networks import MLP, ConvNet

#: Variants whose point estimate is a backbone.
BACKBONE_VARIANTS = {"convnet": ConvNet, "mlp": MLP}


@dataclass(frozen=True)
class LastLayer(Settings):
    """Settings of a Bayesian last layer.

    backbone    auto (convnet for images, else mlp), convnet or mlp: trained first, with default settings and the same
                seed; the folder of a run of one of these; a TorchScript file (.pt), a torch.export file (.pt2), or
                resnet18:WEIGHTS, any torchvision architecture with a weights file; in Python also a module, whose
                output is the features, or a posterior of one of these variants
    inputs      inputs of a module or a file: standardised, as in ``data.x_train``, or raw, in their own units. By
                default a module takes standardised inputs and a file raw ones; not for other backbones
    bias        whether the last layer has a bias
    prior       normal:SCALE, fan-in:SCALE, gamma:SHAPE,RATE or scale-mixture:WIDE,NARROW,WEIGHT; features have a
                mean square of 1. By default fan-in:4 for classes and fan-in:1 for numbers
    noise       numbers only: learned, heteroscedastic, correlated (several targets), or a standard deviation in target
                units. With one target and a backbone that was trained with early stopping, learned means the fixed root
                mean square error on the held-out rows, as features overfit the rows that they were trained on
    likelihood  for numbers, as in ``Network``
    family      SVI: q is mean-field, low-rank:RANK or full (any covariance of all weights)
    init_scale  SVI: initial σ of every weight
    """

    backbone: Any = "auto"
    bias: bool = True
    prior: str | None = setting(None, optional=True)
    noise: str | float = "learned"
    likelihood: str | None = setting(None, choices=LIKELIHOODS, optional=True)
    family: str = setting("mean-field", parse=parse_family)
    init_scale: float = setting(1e-2, above=0)
    #: Set to None after the description of the backbone has been changed accordingly.
    inputs: str | None = setting(None, choices=INPUTS, optional=True)

    summary: ClassVar[str] = "A Bayesian last layer on the features of a frozen network"
    paper: ClassVar[str] = "Snoek et al. 2015, arXiv:1502.05700; Chen, Fox & Guestrin 2014, arXiv:1402.4102"
    has: ClassVar[frozenset[str]] = frozenset({"guide", "weights", "proper prior", "linear model"})

    def __post_init__(self) -> None:
        super().__post_init__()
        backbone = self.backbone
        if isinstance(backbone, os.PathLike):
            backbone = os.fspath(backbone)
        elif isinstance(backbone, Posterior):
            backbone = _trained(backbone)
        elif isinstance(backbone, nn.Module):
            backbone = Pretrained(backbone, nets.described(backbone)).taking("standardised")
        elif not isinstance(backbone, str | Mapping | Pretrained):
            raise UserError(f"a backbone is a text, a module or a posterior, not {backbone!r}")
        if self.inputs is not None and backbone in ("auto", *BACKBONE_VARIANTS):
            raise UserError(f"inputs is for a network of your own; the backbone '{backbone}' knows its own")
        if self.inputs is not None and isinstance(backbone, Pretrained):
            backbone = backbone.taking(self.inputs)
            object.__setattr__(self, "inputs", None)
        object.__setattr__(self, "backbone", backbone)

    def backbone_variant(self, schema: Schema) -> str | None:
        """The variant to fit first, whose point estimate then replaces ``backbone``; None if none has to be fitted."""
        if self.backbone == "auto":
            return "convnet" if schema.is_image else "mlp"
        return self.backbone if self.backbone in (*BACKBONE_VARIANTS,) else None  # a tuple: modules have no hash

    def model(self, schema: Schema) -> OnFeatures:
        """p(y, w | x); see ``Entry.model``. A backbone that is the name of a variant is not trained here."""
        schema.refuse_exposure("last-layer")
        pretrained, noise = self._pretrained(schema), self.noise
        if noise == "learned" and self.likelihood in (None, "normal") and _is_for(pretrained, schema):
            noise = pretrained.description.get("held_out_error", noise)
        likelihood = make_likelihood(schema, noise, self.likelihood)
        backbone = Backbone(pretrained, schema)
        net = nets.MLP((backbone.num_features,), (), likelihood.outputs, bias=self.bias)
        layer, head = net.layers[0], pretrained.head
        # Start at the last layer that the network was trained with, unless the kind of noise needs another shape.
        if head is not None and head[0].shape == layer.weight.shape and _is_for(pretrained, schema):
            with torch.no_grad():
                layer.weight.copy_(head[0])
                if layer.bias is not None:
                    layer.bias.copy_(torch.zeros_like(layer.bias) if head[1] is None else head[1])
        prior = self.prior or ("fan-in:4" if schema.has_classes else "fan-in:1")
        return OnFeatures(backbone, BayesianNet(net, likelihood, prior))

    def guide(self, model: nn.Module) -> nn.Module:
        """q(w), starting at the last layer's own weights; see ``Entry.guide``."""
        return parse_family(self.family)(model.initial, self.init_scale)

    def _pretrained(self, schema: Schema) -> Pretrained:
        """The backbone, which has untrained weights if it is the name of a variant or a description from an archive."""
        about, like = self.backbone, schema
        if isinstance(about, Pretrained):
            return about
        if (name := self.backbone_variant(schema)) is not None:
            about = {"kind": "untrained", "entry": name}
        elif isinstance(about, str):
            return from_text(about)
        elif about["kind"] == "run":
            like = Schema.from_dict(about["schema"])
        else:
            return from_description(about)
        net = build(BACKBONE_VARIANTS[about["entry"]], about.get("entry_settings", {})).model(like).net
        return Pretrained(_Features(net), about, like)


class _Features(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net.features(x)


def _trained(posterior: Posterior) -> Pretrained:
    """The network of a point estimate, with its weights and its last layer."""
    about, draws = posterior.provenance, posterior.draw(2, seed=0)
    if about.get("entry") not in BACKBONE_VARIANTS or len(next(iter(draws.values()))) > 1:
        raise UserError(f"a backbone is the point estimate of {' or '.join(BACKBONE_VARIANTS)}; this posterior is of "
                        f"{about.get('entry', 'an unknown variant')} by "
                        f"{about.get('method', 'an unknown method')}")  # fmt: skip
    net = copy.deepcopy(posterior.model.net).cpu()
    net.load_state_dict({name: draws[name][0].cpu() for name, _ in net.named_parameters()})
    facts = {k: about[k] for k in ("entry", "entry_settings", "seed", "data", "fingerprint", "split")}
    description = {"kind": "run", **facts, "schema": posterior.schema.to_dict(), "weights": nets.weights_digest(net)}
    if "early_stopping" in about and (noise := draws.get("log_noise")) is not None and noise.numel() == 1:
        description["held_out_error"] = noise.exp().item() * posterior.schema.y_scale
    last = net.layers[-1]
    head = (last.weight.detach().clone(), None if last.bias is None else last.bias.detach().clone())
    return Pretrained(_Features(net), description, posterior.schema, head, posterior.rows)


def _is_for(pretrained: Pretrained, schema: Schema) -> bool:
    """Whether it was trained for these targets, in these units."""
    names = ("task", "classes", "target", "target_scale", "y_shift", "y_scale")
    return all(getattr(schema, name) == getattr(pretrained.schema, name, None) for name in names)
