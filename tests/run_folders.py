"""Small runs for the tests of the command line: what they are trained with, and what their folders hold."""

import json
from pathlib import Path

import monte_carlo
import numpy as np
import pandas as pd

import bnn_pyro as bp
from bnn_pyro.posterior import archive_digest

#: A command without a variant chooses one, by the size of the data.
MEAN_FIELD = ["train", "mean-field"]
SMALL = ["--hidden", "8", "--epochs", "3", "--num-draws", "5", "--device", "cpu", "--quiet"]


def small_table(path: Path, rows: int = 60, shift: float = 0.0) -> Path:
    rng = np.random.default_rng(0)
    area = rng.uniform(20, 200, rows).round(1)
    town = rng.choice(["north", "south"], rows)
    price = (3 * area + 40 * (town == "north") + rng.normal(0, 5, rows) + shift).round(2)
    pd.DataFrame({"area": area, "town": town, "price": price}).to_csv(path, index=False)
    return path


def same(a: Path, b: Path) -> bool:
    """Whether two runs have the very same posterior."""
    return monte_carlo.same(bp.load(a), bp.load(b))


def reseal(folder: Path, **changes) -> None:
    """Make the checksum fit again: what someone would do who alters an archive on purpose."""
    meta = {**json.loads((folder / "posterior.json").read_text()), **changes}
    meta["sha256"] = archive_digest((folder / "posterior.pt").read_bytes(), meta)
    (folder / "posterior.json").write_text(json.dumps(meta))
