"""The features that a frozen backbone computes of a data set, once: cached on disk and mapped into memory.

The name of a cached file is a digest of the backbone and the inputs, so that it cannot hold other features. The folder
is ``features`` in ``cache_root()``; the least recently used files are deleted when it exceeds ``CACHE_BYTES``. If a fit
has several processes, each computes the features of its share of the rows, and one per machine writes all of them.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.distributed import process_group
from bnn_pyro.errors import UserError
from bnn_pyro.files import cache_root, whole_file
from bnn_pyro.parts.backbone import Backbone, OnFeatures, check_scale, in_words
from bnn_pyro.parts.nets import weights_digest
from bnn_pyro.progress import progress_bar

#: Features of fewer bytes are not cached on disk.
SMALL = 2**20
CACHE_BYTES = 8 * 2**30
#: The features of the first ``PROBE`` rows are computed twice, and may differ by this share of the largest feature.
PROBE, TOLERANCE = 8, 0.05


def check_split(description: Mapping[str, Any], data: Dataset) -> None:
    """Raise UserError if validation or test rows of ``data`` may have trained the backbone of this description."""
    if description.get("kind") != "run" or description["data"] != data.name:
        return
    # The option "limit" removes training rows only, so splits that differ in it have the same held-out rows.
    splits = (json.loads(json.dumps(dict(split))) for split in (description["split"], data.split))
    then, now = ({k: v for k, v in split.items() if k not in ("limit", "rows")} for split in splits)
    if then != now:
        raise UserError(f"the backbone ({in_words(description)}) was trained on another split of {data.name} ({then}; "
                        f"here {now}), perhaps on validation or test rows; use that split, or train anew")  # fmt: skip


def on_features(model: nn.Module, data: Dataset, progress: bool = False) -> tuple[nn.Module, Dataset]:
    """The last layer of a model with a frozen backbone, and the data set with features as its inputs.

    A model without a backbone is returned as it is, with its data. The features are divided by the root mean square of
    those of the training rows; the test part of the data set returned is empty.
    Raises UserError if the backbone is random, or if all of its features are 0.
    """
    if not isinstance(model, OnFeatures):
        return model, data
    title, backbone = f"features · {data.name}", model.backbone
    if backbone.description["kind"] == "module":  # warn about a whole network, or other inputs than it expects
        name, num = f"the backbone ({in_words(backbone.description)})", backbone.num_features
        if num in {1, len(data.schema.classes)} and [*backbone.net.parameters()]:
            message = f"{name} gives {num} features, as many as a whole network has outputs"
            warnings.warn(f"{message}; give it without its last layer", stacklevel=2)
        check_scale(backbone.net, data, backbone.description.get("inputs", "raw"), name, "LastLayer")
    train, c = _features(backbone, data.x_train, title, progress, unit=True)
    backbone.scale *= c
    model.head.net.layers[0].weight *= c  # the last layer then starts as the same function of the inputs
    return model.head, _with_inputs(data, train, _features(backbone, data.x_val, title, progress)[0])


def of_frozen_layers(model: nn.Module, data: Dataset, progress: bool = False) -> tuple[nn.Module, Dataset]:
    """Like ``on_features``, for the frozen layers of a user's own network; these features are not cached on disk."""
    from bnn_pyro.parts.frozen_layers import without_frozen_layers

    with progress_bar(f"frozen layers · {data.name}", progress, unit="row") as report:
        split = without_frozen_layers(model, data.x_train, data.x_val, training=True, report=report)
    return (model, data) if split is None else (split[0], _with_inputs(data, *split[1]))


def _with_inputs(data: Dataset, train: Tensor, val: Tensor) -> Dataset:
    shape = (train.shape[1],)
    schema = replace(data.schema, input_shape=shape, features=(), x_shift=(0.0,), x_scale=(1.0,), x_tails=())
    return replace(data, schema=schema, x_train=train, x_val=val, x_test=train[:0], y_test=data.y_test[:0])


def _features(backbone: Backbone, x: Tensor, title: str, progress: bool, unit: bool = False) -> tuple[Tensor, float]:
    """Features (N, F), from the cache or computed, and their divisor: with ``unit`` their root mean square, else 1."""
    ranks, name = process_group(), f"the backbone ({in_words(backbone.description)})"
    probe, path = backbone(x[:PROBE]), None
    if 4 * len(x) * backbone.num_features >= SMALL:
        about = [weights_digest(backbone.net), dict(backbone.description), backbone.scale.item(), unit, list(x.shape)]
        digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
        for part in (probe, x):  # features also depend on the network's code and the units of the inputs
            digest.update(part.detach().cpu().contiguous().numpy())
        path = cache_root() / "features" / f"{digest.hexdigest()[:32]}.npy"
        if all(ranks.gather(path.is_file())):
            return _read(path, x.device)
    with progress_bar(title, progress, unit="row") as report, ranks.sharing_errors():
        mine = backbone(ranks.part(x), report)
    features = ranks.gather_rows(mine, len(x))
    with ranks.sharing_errors():
        # The features of a row must be neither random nor dependent on the other rows of a batch.
        if len(probe) and (probe - features[: len(probe)]).abs().max() > TOLERANCE * probe.abs().max():
            raise UserError(f"{name} gives different features for the same rows in two passes: dropout or batch "
                            "statistics are active in evaluation mode; export it after .eval()")  # fmt: skip
    c = 1.0
    if unit:
        squares = sum(part.square().sum(dtype=torch.float64) for part in features.split(4096))
        c = (squares / features.numel()).sqrt().to(features.dtype).item()
        if not c > 0:
            raise UserError(f"all features of {name} are 0")
        features /= c
    if path is None:
        return features, c
    try:
        if ranks.local == 0:
            _keep(path, features, c)
    except OSError as error:
        warnings.warn(f"features could not be cached in {path.parent} ({error})", stacklevel=2)
    return _read(path, x.device) if ranks.gather(path.is_file())[ranks.rank] else (features, c)  # in lockstep


def _read(path: Path, device: torch.device) -> tuple[Tensor, float]:
    with suppress(OSError):  # the file may belong to another user, or the folder be read-only
        os.utime(path)
    array = np.load(path, mmap_mode="c")  # copy-on-write: torch needs writable memory
    c = np.fromfile(path, np.float32, offset=path.stat().st_size - 4).item()
    return torch.from_numpy(np.asarray(array)).to(device), c


def _keep(path: Path, features: Tensor, c: float) -> None:
    """Write the array, followed by c, to one file atomically, after deleting old files to make space."""
    path.parent.mkdir(parents=True, exist_ok=True)
    old = sorted(path.parent.glob("*.npy*"), key=lambda file: file.stat().st_mtime)
    total = sum(file.stat().st_size for file in old) + features.nbytes
    while old and total > CACHE_BYTES:
        total -= old[0].stat().st_size
        old.pop(0).unlink(missing_ok=True)
    with whole_file(path) as file:
        np.save(file, features.cpu().numpy())
        file.write(np.float32(c).tobytes())
