"""What a frozen backbone makes of a data set, computed once: a cache on disk, mapped into memory where it is large.

A file is named by the backbone's weights and the inputs, so that it can never be the wrong one. The folder is
``BNN_PYRO_CACHE``, or ``~/.cache/bnn_pyro``; what was used least recently goes when it exceeds ``CACHE_BYTES``.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.parts.backbone import Backbone, OnFeatures, weights_digest
from bnn_pyro.progress import progress_bar

__all__ = ["cache_folder", "on_features"]

#: Features of fewer bytes are not kept on disk; of more, mapped into memory instead of read.
SMALL, LARGE = 2**20, 2**28
CACHE_BYTES = 8 * 2**30


def cache_folder() -> Path:
    """Where features are kept."""
    given = os.environ.get("BNN_PYRO_CACHE")
    return (Path(given) if given else Path.home() / ".cache" / "bnn_pyro") / "features"


def on_features(model: nn.Module, data: Dataset, progress: bool = False) -> tuple[nn.Module, Dataset]:
    """(the part of the model that is inferred, the data set that it takes): features instead of inputs, if it has any.

    The features are scaled by those of the training rows; the test part is left empty.
    """
    if not isinstance(model, OnFeatures):
        return model, data
    train, val = (_features(model.backbone, x, f"features · {data.name}", progress) for x in (data.x_train, data.x_val))
    schema = replace(data.schema, input_shape=(train.shape[1],), features=(), x_shift=(0.0,), x_scale=(1.0,))
    train = model.scale_features(train)
    seen = replace(data, schema=schema, x_train=train, x_val=val / model.backbone.scale, x_test=train[:0],
                   y_test=data.y_test[:0])  # fmt: skip
    return model.head, seen


def _features(backbone: Backbone, x: Tensor, what: str, progress: bool) -> Tensor:
    """(N, F) of the inputs, from the cache where they are there."""
    size = 4 * len(x) * backbone.num_features
    if size < SMALL:
        return backbone(x)
    path = cache_folder() / f"{_key(backbone, x)}.npy"
    if not path.is_file():
        with progress_bar(what, progress, unit="row") as report:
            features = backbone(x, report)
        try:
            _keep(path, features)
        except OSError as error:
            warnings.warn(f"features could not be cached in {path.parent} ({error})", stacklevel=2)
        if size < LARGE or not path.is_file():
            return features
    os.utime(path)
    array = np.load(path, mmap_mode="c" if size >= LARGE else None)  # "c": a private map, which torch may share
    return torch.from_numpy(np.asarray(array)).to(x.device)


def _key(backbone: Backbone, x: Tensor) -> str:
    about = [weights_digest(backbone.net), json.dumps(dict(backbone.description), sort_keys=True), list(x.shape)]
    digest = hashlib.sha256(json.dumps(about).encode())
    digest.update(x.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]


def _keep(path: Path, features: Tensor) -> None:
    """Write one file as a whole, after making room for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    old = sorted(path.parent.glob("*.npy"), key=lambda file: file.stat().st_mtime)
    held = sum(file.stat().st_size for file in old) + features.nbytes
    while old and held > CACHE_BYTES:
        held -= old[0].stat().st_size
        old.pop(0).unlink(missing_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    with open(beside, "wb") as file:
        np.save(file, features.cpu().numpy())
    os.replace(beside, path)
