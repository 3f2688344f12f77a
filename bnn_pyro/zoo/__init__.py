"""The zoo: every variant is a class in one of these files, and one line in ``ZOO``.

A variant is a frozen dataclass whose fields are its settings, with the methods ``model`` and ``guide``. It has the
class attributes ``summary`` (the idea in one line), ``paper`` and ``has`` (keys of ``inference.NEEDS``, which decide
what methods suit it), and ``images_only = True`` if inputs must have a height and a width.
"""

from typing import ClassVar, Protocol

from torch import nn

from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.errors import UserError
from bnn_pyro.zoo.last_layer import LastLayer
from bnn_pyro.zoo.networks import (
    MLP,
    BayesianConvNet,
    ConvNet,
    DropoutMLP,
    HiddenLayerNet,
    MeanField,
    SparseDropout,
    VariationalDropout,
)
from bnn_pyro.zoo.own_network import Bayesian


class Entry(Protocol):
    """One Bayesian network: p(y, w | x) and its q(w)."""

    summary: ClassVar[str]
    paper: ClassVar[str]
    has: ClassVar[frozenset[str]]

    def model(self, schema: Schema) -> nn.Module:
        """A module m; m(x, y=None) samples w, then the site "y" in a plate of len(x), and does not depend on N.

        It has an attribute ``initial``, {site: initial value}. ``parts.priors.BayesianNet`` creates one of any module.
        """

    def guide(self, model: nn.Module) -> nn.Module | None:
        """q over exactly the model's latent sites, or None.

        A variant may also have ``prepare(model, guide, data)``, which a fit calls before inference, and which returns
        the entry "module" of the provenance; and ``to_choose(schema)``, settings to compare by held-out rows.
        """


def model_of(entry: Entry, schema: Schema) -> nn.Module:
    """The model of a variant.   Raises UserError unless it is a module with the attribute ``initial``."""
    model = entry.model(schema)
    if not (isinstance(model, nn.Module) and hasattr(model, "initial")):
        raise UserError(f"the model of {type(entry).__name__} is {type(model).__name__}; it must be a torch.nn.Module "
                        "with `initial`, {site: tensor} of all latent sites (an example: docs/methods.md)")  # fmt: skip
    return model


#: Every variant by its name on the command line.
ZOO: dict[str, type[Entry]] = {
    "mean-field": MeanField,
    "hidden-layer": HiddenLayerNet,
    "variational-dropout": VariationalDropout,
    "sparse-dropout": SparseDropout,
    "bayesian-convnet": BayesianConvNet,
    "last-layer": LastLayer,
    "mlp": MLP,
    "convnet": ConvNet,
    "dropout-mlp": DropoutMLP,
    "my-network": Bayesian,
}
