"""A frozen network as the source of features for a Bayesian last layer, and the model over the two together.

    φ(x) = net(x) / c          c the root mean square of the training rows' features
    w ~ p(w)    f = W φ(x) + b    y ~ likelihood(f)

The network is run out of training mode and without gradients. No draw of w changes what it does, so that :func:`once`
lets a caller run it once for all of them.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.errors import UserError, first_line
from bnn_pyro.parts.nets import in_mode
from bnn_pyro.parts.priors import BayesianNet

__all__ = ["INPUTS", "Backbone", "OnFeatures", "Pretrained", "once", "spoken", "weights_digest"]

#: Input numbers that one call of the network takes, and rows at most: bounds the memory of its activations.
CHUNK_NUMBERS, CHUNK_ROWS = 2**21, 512
#: What a user's own network can be given: the data set's inputs as they are (``data.x_train``), or in their own units.
INPUTS = ("standardised", "raw")


def weights_digest(net: nn.Module) -> str:
    """SHA-256 of a module's parameters and buffers, the first 16 hex digits."""
    digest = hashlib.sha256()
    for name, value in net.state_dict().items():
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Pretrained:
    """A network up to its features, with what belongs to it.

    net          inputs -> features, (B, *input_shape) -> (B, …)
    description  where it comes from, JSON-able: enough to know it by, or to make it again
    schema       the data that it was trained on, whose standardised inputs it takes; None: it takes what
                 ``description["inputs"]`` says: "standardised", those of the data that it is used on; absent, raw: in
                 their own units (pixels in [0, 1])
    head         weight (K, F) and bias (K,) or None of the last layer that it was trained with; None where it had none
    """

    net: nn.Module
    description: Mapping[str, Any]
    schema: Schema | None = None
    head: tuple[Tensor, Tensor | None] | None = None

    @property
    def inputs(self) -> str:
        """ "raw" or "standardised"."""
        return "standardised" if self.schema is not None else self.description.get("inputs", "raw")

    def taking(self, inputs: str) -> Pretrained:
        """The same network, given "raw" or "standardised" inputs.

        Raises UserError for a network that takes the one kind only.
        """
        if inputs != self.inputs and self.description["kind"] not in ("module", "file"):
            raise UserError(f"the backbone ({spoken(self.description)}) takes {self.inputs} inputs; leave 'inputs' out")
        if inputs == self.inputs:
            return self
        # Descriptions of before there was a choice say nothing, and mean raw: they must stay the same.
        about = {k: v for k, v in self.description.items() if k != "inputs"}
        return replace(self, description=about if inputs == "raw" else about | {"inputs": inputs})


class Backbone(nn.Module):
    """φ: standardised inputs (B, *input_shape) -> features (B, F), with a mean square of 1 on the training rows."""

    def __init__(self, pretrained: Pretrained, schema: Schema) -> None:
        super().__init__()
        self.net = _frozen_copy(pretrained.net)
        self.description = pretrained.description
        self.register_buffer("scale", torch.tensor(1.0))
        self._enter = _translation(schema, pretrained)
        self.num_features = self._features(torch.zeros(2, *schema.input_shape, device=_device(self.net))).shape[1]

    def forward(self, x: Tensor, report: Callable[[int, int], None] | None = None) -> Tensor:
        """Features of x, a few rows at a time.

        report: called as report(rows done, of how many).
        Raises UserError where the network does not take such inputs, or gives no finite features.
        """
        rows = max(1, min(CHUNK_ROWS, CHUNK_NUMBERS // max(1, x.shape[1:].numel())))
        whole = torch.empty(len(x), self.num_features, device=x.device)  # put together without a copy
        for start in range(0, len(x), rows):
            part = slice(start, start + rows)
            whole[part] = self._features(x[part])
            if report is not None:
                report(min(part.stop, len(x)), len(x))
        return whole

    @torch.no_grad()
    def _features(self, x: Tensor) -> Tensor:
        try:
            with in_mode(self.net, training=False):
                features = self.net(self._enter(x))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a user's own network raises
            raise UserError(
                f"the backbone ({spoken(self.description)}) does not take inputs of shape {tuple(x.shape)}: "
                f"{first_line(error)}"
            ) from error
        shape = tuple(features.shape) if isinstance(features, Tensor) else ()
        if len(shape) < 2 or shape[0] != len(x) or not features[0].numel():
            raise UserError(
                f"the backbone ({spoken(self.description)}) must give features of shape ({len(x)}, F) for {len(x)} "
                f"rows, and gave {shape or type(features).__name__}"
            )
        if not bool(torch.isfinite(features).all()):
            raise UserError(f"the backbone ({spoken(self.description)}) gave features that are not finite")
        return features.flatten(1).to(torch.float32) / self.scale


class OnFeatures(nn.Module):
    """p(y, w | x): a Bayesian last layer, ``head``, on the features of a frozen ``backbone``."""

    def __init__(self, backbone: Backbone, head: BayesianNet) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    @property
    def initial(self) -> Mapping[str, Tensor]:
        """{site: value} where guides, samplers and optimisers start."""
        return self.head.initial

    def divide_features(self, c: float) -> None:
        """Let features be divided by c from now on; the head's start follows."""
        self.backbone.scale *= c
        self.head.net.layers[0].weight *= c

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Draw w, then the site "y" for inputs x (B, *input_shape); y (B,) observes it."""
        return self.head(self.backbone(x), y)


def once(model: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
    """(the part of the model that draws change, its inputs): what no draw changes has been computed."""
    if not isinstance(model, OnFeatures):
        return model, x
    return model.head, model.backbone(x.to(_device(model.head)))


def spoken(description: Mapping[str, Any]) -> str:
    """A backbone's description in a few words."""
    names = [str(description[k]) for k in ("kind", "entry", "name", "class", "path") if k in description]
    return " ".join(names)


def _frozen_copy(net: nn.Module) -> nn.Module:
    """Frozen as a copy: neither the user's module nor another model's is changed, moved or overwritten."""
    try:
        with torch.no_grad():  # TorchScript copies by operations
            own = copy.deepcopy(net)
    except Exception as error:
        raise UserError(
            f"the backbone {type(net).__name__} cannot be copied ({first_line(error)}); "
            "give it as a TorchScript or torch.export file"
        ) from error
    for parameter in own.parameters():  # TorchScript has no requires_grad_ of a whole module
        parameter.requires_grad_(False)
    return own


def _translation(given: Schema, pretrained: Pretrained) -> Callable[[Tensor], Tensor]:
    """From inputs standardised by ``given`` to those that the network takes."""
    own = pretrained.schema
    if pretrained.inputs == "raw":
        return given.unstandardise
    if own is None or (given.x_shift, given.x_scale) == (own.x_shift, own.x_scale):
        return lambda x: x
    return lambda x: own.standardise(given.unstandardise(x))


def _device(module: nn.Module) -> torch.device:
    return next((p.device for p in (*module.parameters(), *module.buffers())), torch.device("cpu"))
