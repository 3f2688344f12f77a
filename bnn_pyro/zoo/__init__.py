"""The zoo: every variant is a class here, in a file of its own or beside its kin, and one line in ``ZOO``.

A variant is a frozen dataclass whose fields are its settings, with two verbs, ``model`` and ``guide``. Its class
attributes say the rest: ``summary`` (the idea in one line), ``paper``, and ``has`` (keys of ``inference.NEEDS``, from
which follows what methods suit it); ``images_only = True`` where inputs must have a height and a width.
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
        """m with m(x, y=None): draws w, then the site "y" in a plate of len(x). It never learns N.

        Besides: ``initial`` {site: value} where optimisers start. ``parts.priors.BayesianNet`` makes one of any module.
        """

    def guide(self, model: nn.Module) -> nn.Module | None:
        """q over exactly the model's latent sites, or None.

        A variant may have ``prepare(model, guide, data)`` as well, which a fit calls before it infers, and which
        returns what provenance says under "module"; and ``to_choose(schema)``, settings to compare by held-out rows.
        """


def model_of(entry: Entry, schema: Schema) -> nn.Module:
    """Its model.   Raises UserError where that is no module with ``initial``, as a plain Pyro function is none."""
    model = entry.model(schema)
    if not (isinstance(model, nn.Module) and hasattr(model, "initial")):
        raise UserError(f"the model of {type(entry).__name__} is {type(model).__name__}; it must be a torch.nn.Module "
                        "with `initial`, {site: tensor} of its latent sites and its likelihood's, where fits start "
                        "(docs/methods.md has an example)")  # fmt: skip
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
