"""Settings are frozen dataclasses: made from names and plain values, refused with the valid list, written as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from bnn_pyro.errors import UserError, unknown

__all__ = ["build", "plain"]

T = TypeVar("T")


def build(kind: type[T], values: Mapping[str, Any]) -> T:
    """``kind(**values)`` with lists taken as tuples.

    Raises UserError for an unknown setting (with the nearest name) or a value that ``kind`` refuses.
    """
    valid = [f.name for f in dataclasses.fields(kind)]
    for name in values:
        if name not in valid:
            raise unknown(f"{kind.__name__} setting", name, valid)
    try:
        return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
    except TypeError as error:
        raise UserError(f"bad value among the {kind.__name__} settings {dict(values)}: {error}") from None


def plain(settings: Any) -> dict[str, Any]:
    """The fields of a settings dataclass as JSON-able values; an object that is not is told by its ``description``."""
    values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    values = {k: dict(getattr(v, "description", None) or {}) or v for k, v in values.items()}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
