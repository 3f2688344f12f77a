"""Small runs for the tests of the command line: what they are trained with, and what their folders hold."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from bnn_pyro.posterior import archive_digest, read_archive

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


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    guide, chains = (read_archive(folder)[0][key] for key in ("guide", "chains"))
    return guide if guide is not None else chains


def same(a: Path, b: Path) -> bool:
    a, b = tensors(a), tensors(b)
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def snapshot(folder: Path) -> dict[str, tuple[int, str]]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p): (p.stat().st_mtime_ns, hashlib.sha256(p.read_bytes()).hexdigest()) for p in files}


def reseal(folder: Path, **changes) -> None:
    """Make the checksum fit again: what someone would do who alters an archive on purpose."""
    meta = {**json.loads((folder / "posterior.json").read_text()), **changes}
    meta["sha256"] = archive_digest((folder / "posterior.pt").read_bytes(), meta)
    (folder / "posterior.json").write_text(json.dumps(meta))
