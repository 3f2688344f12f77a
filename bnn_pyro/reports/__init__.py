"""HTML pages and tables of results."""

import functools
import tomllib
from pathlib import Path
from typing import Any


@functools.cache
def read_texts(name: str) -> dict[str, Any]:
    """The texts of figures, of tables or of a summary, from templates/NAME.toml."""
    return tomllib.loads((Path(__file__).parent / f"templates/{name}.toml").read_text(encoding="utf-8"))
