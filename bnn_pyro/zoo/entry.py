"""The protocol of a variant: a frozen dataclass whose fields are its settings, with two verbs, ``model`` and ``guide``.

To add one: a file here, and a line in ``ZOO``. Its class attributes say the rest: ``summary`` (the idea in one line),
``paper``, and ``has`` (keys of ``inference.NEEDS``, from which follows what methods suit it);
``images_only = True`` where inputs must have a height and a width. Those tuned for a data set go into ``tuned.toml``.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

from torch import nn

from bnn_pyro.datasets.dataset import Schema

__all__ = ["Entry"]


class Entry(Protocol):
    """One Bayesian network: p(y, w | x) and its q(w)."""

    summary: ClassVar[str]
    paper: ClassVar[str]
    has: ClassVar[frozenset[str]]

    def model(self, schema: Schema) -> nn.Module:
        """m with m(x, y=None): draws w, then the site "y" in a plate of len(x). It never learns N.

        Besides: ``initial`` {site: value} where optimisers start. ``parts.priors.BayesianNet`` makes one of any module.
        """
        ...

    def guide(self, model: nn.Module) -> nn.Module | None:
        """q over exactly the model's latent sites, or None."""
        ...
