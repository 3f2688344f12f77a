"""MNIST and its relatives as one uint8 tensor, and pictures of the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bnn_pyro.datasets.arrays import check_labels, image_pair
from bnn_pyro.datasets.dataset import Raw, Schema
from bnn_pyro.errors import UserError
from bnn_pyro.files import data_root

__all__ = ["IMAGE_SUFFIXES", "fashion_mnist", "kmnist", "mnist", "read_images", "read_part"]

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")
#: Name -> torchvision's class (and its folder under the data root), class names, source.
_DIGITS = tuple(str(k) for k in range(10))
_SETS = {
    "mnist": ("MNIST", _DIGITS, "MNIST, LeCun, Cortes & Burges 1998, CC BY-SA 3.0"),
    "fashion-mnist": (
        "FashionMNIST",
        ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
        "Fashion-MNIST, Xiao, Rasul & Vollgraf 2017, MIT",
    ),
    "kmnist": (
        "KMNIST",
        ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"),
        "KMNIST, Clanuwat et al. 2018, CODH, CC BY-SA 4.0",
    ),
}


def mnist() -> Raw:
    """60,000 + 10,000 handwritten digits of 28 × 28 pixels."""
    return _load("mnist")


def fashion_mnist() -> Raw:
    """60,000 + 10,000 pictures of clothes of 28 × 28 pixels."""
    return _load("fashion-mnist")


def kmnist() -> Raw:
    """60,000 + 10,000 handwritten cursive Japanese characters of 28 × 28 pixels."""
    return _load("kmnist")


def read_part(name: str, train: bool) -> tuple[Tensor, Tensor]:
    """Training or test part of an image set: (N, 1, 28, 28) uint8 and labels (N,) int64.

    Looked for under the data root, as torchvision lays it out (``MNIST/raw/…-ubyte``) or as the official pair of NPZ
    files (``KMNIST/kmnist-test-imgs.npz``); downloaded by torchvision where neither is there.
    """
    folder, classes, _ = _SETS[name]
    home = data_root() / folder
    part = "train" if train else "t10k"
    images, labels = (home / "raw" / f"{part}-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1"))
    pair = [home / f"{name}-{'train' if train else 'test'}-{kind}.npz" for kind in ("imgs", "labels")]
    if not (images.is_file() and labels.is_file()):
        if all(path.is_file() for path in pair):
            return image_pair(*pair, len(classes))
        _download(name, folder, labels if images.is_file() else images)
    return _read_idx(images, labels, len(classes))


def read_images(paths: str | Path | Sequence[str | Path], schema: Schema, invert: bool = False) -> Tensor:
    """PNG or JPG files (or a folder of them) as standardised inputs (N, channels, height, width).

    Resized to the schema's size and made grey or RGB as the model wants it; transparency becomes white. ``invert``
    turns dark on white into white on dark, as MNIST has it.
    """
    from PIL import Image, ImageOps

    if not schema.is_image:
        raise UserError(f"images don't fit a model of {len(schema.features)} features; give it a table")
    channels, height, width = schema.input_shape
    files = _image_files([paths] if isinstance(paths, str | Path) else list(paths))
    inputs = torch.empty(len(files), channels, height, width)
    for row, path in enumerate(files):
        try:
            with Image.open(path) as opened:
                picture = ImageOps.exif_transpose(opened)
                if picture.mode.startswith("I"):  # 16 bits a pixel
                    picture = Image.fromarray((np.asarray(picture) // 256).astype(np.uint8))
                if picture.has_transparency_data:
                    picture = picture.convert("RGBA")
                    picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
                picture = picture.convert("L" if channels == 1 else "RGB").resize((width, height))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            raise UserError(f"{path}: is no image that can be read; give a whole PNG or JPG file") from None
        pixels = torch.from_numpy(np.array(picture, dtype=np.float32) / 255)
        inputs[row] = pixels if channels == 1 else pixels.movedim(2, 0)
    return schema.standardise(1 - inputs if invert else inputs)


def _load(name: str) -> Raw:
    _, classes, source = _SETS[name]
    (x, y), test = read_part(name, train=True), read_part(name, train=False)
    return Raw(name, "classification", x, y, classes, target="label", source=source, test=test, white=255.0)


def _read_idx(images: Path, labels: Path, num_classes: int) -> tuple[Tensor, Tensor]:
    from torchvision.datasets.mnist import read_image_file, read_label_file

    parts = []
    for path, read in ((images, read_image_file), (labels, read_label_file)):
        try:
            parts.append(read(str(path)))
        except (OSError, ValueError, RuntimeError, AssertionError, TypeError, KeyError):
            raise UserError(f"{path}: is damaged or no idx file; delete it and it is downloaded again") from None
    x, y = parts
    if len(x) != len(y):
        raise UserError(f"{images}: has {len(x)} images, and {labels} {len(y)} labels; they are no pair")
    check_labels(str(labels), y.numpy(), num_classes)
    return x.unsqueeze(1), y


def _download(name: str, folder: str, missing: Path) -> None:
    from torchvision import datasets

    where = f"place it there (from the data set's page), or set BNN_PYRO_DATA to a folder that has {folder}/raw"
    try:
        getattr(datasets, folder)(data_root(), download=True)
    except (OSError, RuntimeError, EOFError) as error:
        reason = " ".join(str(error).split())[:200]
        for empty in (data_root() / folder / "raw", data_root() / folder):
            if empty.is_dir() and not any(empty.iterdir()):
                empty.rmdir()
        raise UserError(f"{name}: {missing} is not there and can't be downloaded ({reason}); {where}") from None
    if not missing.is_file():
        raise UserError(f"{name}: {missing} is not there after downloading; {where}")


def _image_files(paths: list[str | Path]) -> list[Path]:
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise UserError(f"{path}: no such image file")
        inside = sorted(path.iterdir()) if path.is_dir() else []
        files += [p for p in inside if p.suffix.lower() in IMAGE_SUFFIXES] if path.is_dir() else [path]
    if not files:
        raise UserError(f"{', '.join(map(str, paths)) or 'images'}: no PNG or JPG file in this folder")
    return files
