"""What is checked: a variant, a method and data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.inference import METHODS, Method
from bnn_pyro.settings import build, plain
from bnn_pyro.zoo import Entry

__all__ = ["Subject"]


@dataclass(frozen=True)
class Subject:
    """A variant and a method, with the settings that a user gave, and data whose inputs are used.

    variant, inference  their names in ``ZOO`` and ``METHODS``
    entry               the variant with its settings
    given               settings of the method that the user gave; what a check sets goes below them
    """

    variant: str
    entry: Entry
    inference: str
    data: Dataset
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def limit(self) -> str:
        """What the method says that it converges to: a key of ``inference.method.LIMITS``."""
        return METHODS[self.inference].limit

    def method(self, below: Mapping[str, Any]) -> Method:
        """The method: the user's settings, over those of a check."""
        return build(METHODS[self.inference], {**below, **self.given})

    def settings(self, method: Method) -> dict[str, Any]:
        """Of variant and method, for the report; JSON-able."""
        return {"variant": plain(self.entry), "method": plain(method)}
