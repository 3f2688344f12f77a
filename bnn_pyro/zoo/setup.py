"""A variant and a method with their settings, made of names in this one place; what comes after takes the objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from torch import nn

from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.errors import unknown
from bnn_pyro.inference import METHODS, Method, methods_for, unsuitable
from bnn_pyro.settings import build, defaults, plain
from bnn_pyro.zoo import ZOO, Bayesian, Entry

__all__ = ["AUTO", "Setup", "make_setup", "name_of"]

#: What stands for a variant's name where it is chosen by size.
AUTO = "auto"


@dataclass(frozen=True)
class Setup:
    """What is fitted and how.

    entry   the variant with its settings     method  the inference method with its settings
    auto    where both were chosen by size: reason, minutes and expected_seconds
    """

    entry: Entry
    method: Method
    auto: Mapping[str, Any] = field(default_factory=dict)

    @property
    def variant(self) -> str:
        """The variant's name."""
        return name_of(self.entry, ZOO)

    @property
    def inference(self) -> str:
        """The method's name."""
        return name_of(self.method, METHODS)

    @property
    def variant_settings(self) -> dict[str, Any]:
        """JSON-able."""
        return plain(self.entry)

    @property
    def inference_settings(self) -> dict[str, Any]:
        """JSON-able."""
        return plain(self.method)

    def backbone_variant(self, schema: Schema) -> str | None:
        """The name of the variant that has to be fitted first, as the backbone of a last layer; None for most."""
        return self.entry.backbone_variant(schema) if hasattr(self.entry, "backbone_variant") else None

    def changed(
        self, variant: Mapping[str, Any] = {}, method: Mapping[str, Any] = {}, settings: Mapping[str, Any] = {}
    ) -> Self:
        """With other settings of the variant and of the method; ``settings`` go over them, those that either has."""
        both = ((self.entry, variant), (self.method, method))
        entry, method = (
            build(one, {**values, **{k: v for k, v in settings.items() if k in defaults(one)}}) for one, values in both
        )
        return replace(self, entry=entry, method=method)


def make_setup(variant: str | Entry | nn.Module, method: str | Method | None = None) -> Setup:
    """Names with their default settings; an object stays as it is.

    variant: a module of the user's own is ``Bayesian(module)``.   method: by default the variant's first.

    Raises UserError for an unknown variant, or a method that does not suit it.
    """
    entry = Bayesian(variant) if isinstance(variant, nn.Module) else variant
    if isinstance(entry, str) and entry not in ZOO:
        raise unknown("variant", entry, [*ZOO, AUTO])
    kind = ZOO[entry] if isinstance(entry, str) else entry  # settings may decide what a variant has
    name = entry if isinstance(entry, str) else name_of(entry, ZOO)
    inference = method if isinstance(method, str) else name_of(method, METHODS) if method else methods_for(kind)[0]
    if (isinstance(method, str) or inference in METHODS) and inference not in methods_for(kind):
        raise unsuitable(inference, name, kind)  # a method of the user's own suits any variant
    return Setup(
        kind() if isinstance(entry, str) else entry, METHODS[inference]() if isinstance(method, str | None) else method
    )


def name_of(settings: object, table: Mapping[str, type]) -> str:
    """The name of a variant or method in its table; the class's own name where it is the user's."""
    return next((name for name, kind in table.items() if type(settings) is kind), type(settings).__name__)
