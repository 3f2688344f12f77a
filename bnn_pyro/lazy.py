"""Lazy imports: names of a package are imported when they are first used."""

import importlib
from collections.abc import Callable, Mapping


def lazy_names(
    package: str, names: Mapping[str, str], modules: str = ""
) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """Return (``__all__``, ``__getattr__``, ``__dir__``) for a package (PEP 562).

    names: {module: its public names, separated by spaces}.   modules: names of public modules, separated by spaces.
    """
    homes = {name: module for module, text in names.items() for name in text.split()}
    public = sorted([*homes, *modules.split()])

    def getattr_(name: str) -> object:
        if name in homes:
            return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        if name in modules.split():
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module '{package}' has no attribute '{name}'")

    return public, getattr_, lambda: public
