"""Pictures: read files as inputs of a model, folders of classes as a data set, and the image sets of torchvision."""

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bnn_pyro.datasets.arrays import IMAGE_SUFFIXES
from bnn_pyro.datasets.dataset import Raw, Schema
from bnn_pyro.errors import UserError, refusing
from bnn_pyro.files import data_root, existing, read_archive

#: {image set: the torchvision class that downloads it, which is also the name of its folder under the data root}.
IMAGE_SETS = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST", "kmnist": "KMNIST"}
#: Pictures of a folder are scaled down if their longer side has more pixels than this.
MAX_SIDE = 32
#: Names of folders with training (and validation) pictures and with test pictures.
TRAINING, TEST = ("train", "training", "val", "valid", "validation"), ("test", "testing")


def load_folder(path: Path, shape: Sequence[int] | None = None, *, drop_damaged: bool = False) -> Raw:
    """Read a folder of pictures with one subfolder per class, like torchvision's ``ImageFolder``.

    They are FOLDER/CLASS/*.png; or FOLDER/train/CLASS/*.png and, for the test part, FOLDER/test/CLASS/*.png. Pictures
    in FOLDER/val join the training pictures, from which validation rows are drawn. Rows are ordered by file name.

    shape: (channels, height, width) to which all pictures are resized; by default the most frequent size, scaled down
        to a longer side of ``MAX_SIDE``, and grey if all pictures are.   drop_damaged: leave out unreadable files.
    Raises UserError for fewer than two classes, a class without pictures, or a damaged file.
    """
    parts = {place.name.lower(): place for place in _folders(path)}
    divided = not {"train", "training"}.isdisjoint(parts) and set(parts) <= {*TRAINING, *TEST}
    roots, tests = ([parts[n] for n in names if n in parts] if divided else [] for names in (TRAINING, TEST))
    names = " and ".join(place.name for place in roots)
    doubts = (f"{path}: pictures of {names} train; validation rows are drawn of them",) if len(roots) > 1 else ()
    roots = roots or [path]
    if len(classes := tuple(sorted({place.name for root in roots for place in _folders(root)}))) < 2:
        raise UserError(f"{path}: {len(classes)} folders of classes; put the pictures of each of two or more classes "
                        f"into a folder with its name, as {path}/CLASS/1.png")  # fmt: skip
    train, test = _class_files(roots, classes), _class_files(tests, classes)
    if empty := sorted(set(range(len(classes))) - {label for _, label in train}):
        raise UserError(f"{path}: no picture of class '{classes[empty[0]]}'; add some, or remove its folder")
    channels, height, width = shape or _shape(file for file, _ in train + test)
    (x, y), tested = (_decoded(part, (channels, height, width), drop_damaged) for part in (train, test))
    of_target = dict(task="classification", classes=classes, target="class", test=tested if tests else None)
    about = dict(name=path.name, source=f"{path}, pictures of {width} × {height}", doubts=doubts)
    return Raw(x=x, y=y, **of_target, **about, dropped=len(train) + len(test) - len(y) - len(tested[1]))


def _folders(path: Path) -> list[Path]:
    return [place for place in sorted(path.iterdir()) if place.is_dir() and place.name[0] not in "._"]


def _class_files(roots: Sequence[Path], classes: Sequence[str]) -> list[tuple[Path, int]]:
    if odd := [place for root in roots for place in _folders(root) if place.name not in classes]:
        raise UserError(f"{odd[0]}: class '{odd[0].name}' has no training pictures; known: {', '.join(classes):.60}")
    named = [(root / name, label) for root in roots for label, name in enumerate(classes)]
    return [(file, label) for place, label in named for file in pictures_in(place)]


def pictures_in(folder: Path) -> list[Path]:
    """Return the pictures in a folder and its subfolders, sorted."""
    return sorted(p for p in folder.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES and p.name[0] not in "._")


def _shape(files: Iterable[Path]) -> tuple[int, int, int]:
    """Return (channels, height, width): the most frequent size, at most ``MAX_SIDE``; 3 channels if any has colours."""
    from PIL import Image

    sizes: Counter[tuple[int, int]] = Counter()
    coloured = False
    for file in files:  # errors of damaged files are raised when they are decoded
        with suppress(OSError, ValueError, SyntaxError, Image.DecompressionBombError), Image.open(file) as picture:
            sizes[picture.size] += 1
            coloured |= picture.mode[:2] not in ("1", "L", "LA", "I", "I;", "F")
    (width, height) = sizes.most_common(1)[0][0] if sizes else (MAX_SIDE, MAX_SIDE)
    share = min(1.0, MAX_SIDE / max(width, height))
    return (3 if coloured else 1, *(max(1, round(share * side)) for side in (height, width)))


def _decoded(files: Sequence[tuple[Path, int]], shape: tuple[int, int, int], drop: bool) -> tuple[Tensor, Tensor]:
    """Return (x (N, *shape) uint8, labels (N,)) of the readable pictures."""
    x, y = torch.empty(len(files), *shape, dtype=torch.uint8), []
    way = "or remove it; a run trained with missing='drop' (--missing drop) leaves such files out"
    for file, label in files:
        with suppress(UserError) if drop else refusing(f"{{error}}, {way}", UserError):
            x[len(y)] = _pixels(file, shape)
            y.append(label)
    return x[: len(y)], torch.tensor(y, dtype=torch.int64)


def _pixels(path: Path, shape: tuple[int, int, int]) -> Tensor:
    """Read a picture as (channels, height, width) uint8, grey or RGB; transparency becomes white. Raises UserError."""
    from PIL import Image, ImageOps

    channels, height, width = shape
    message = f"{path}: is no image that can be read; give a whole PNG or JPG file"
    with refusing(message, OSError, ValueError, SyntaxError, Image.DecompressionBombError), Image.open(path) as opened:
        picture = ImageOps.exif_transpose(opened)
        if picture.mode[0] in "IF":  # 16-bit integers, or floats from 0 to 1 or from 0 to 255
            values = np.asarray(picture, dtype=np.float64)
            low, high = values.min(), values.max()
            scale = 1 / 256 if picture.mode[0] == "I" else 255 if high <= 1 else 1
            if low < 0 or not (high == 0 or 1 <= scale * high < 256):
                raise UserError(f"{path}: pixels of mode {picture.mode} from {low:g} to {high:g}, of which 8 bits "
                                "would keep next to nothing; save it as 8 bits, of 0 to 255")  # fmt: skip
            picture = Image.fromarray((scale * values).astype(np.uint8))
        if picture.has_transparency_data:
            picture = picture.convert("RGBA")
            picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
        picture = picture.convert("L" if channels == 1 else "RGB").resize((width, height))
    return torch.from_numpy(np.array(picture)).reshape(height, width, channels).movedim(2, 0)


def read_images(path: Path, schema: Schema, invert: bool = False) -> Tensor:
    """Read a picture, or a folder of them, as standardised inputs (N, channels, height, width).

    Pictures are resized to the model's size and converted to grey or RGB; transparency becomes white.
    invert: dark becomes bright, for models of white digits on a dark background, like MNIST.
    """
    files = pictures_in(path) if path.is_dir() else [existing(path)]
    if not files:
        raise UserError(f"{path}: no PNG or JPG file in this folder")
    inputs = torch.stack([_pixels(file, schema.input_shape) for file in files]) / 255
    return schema.standardise(1 - inputs if invert else inputs)


def image_part(name: str, train: bool) -> tuple[Tensor, Tensor]:
    """Load the training or test part of an image set: (N, 1, 28, 28) uint8 and labels (N,) int64.

    It is read under the data root: the official pair of NPZ files (``KMNIST/kmnist-test-imgs.npz``) if it exists, else
    torchvision's files (``MNIST/raw/…-ubyte``), which are downloaded if necessary.
    """
    from torchvision import datasets

    home = data_root() / IMAGE_SETS[name]
    pair = [home / f"{name}-{'train' if train else 'test'}-{kind}.npz" for kind in ("imgs", "labels")]
    try:
        if all(path.is_file() for path in pair):
            x, y = (torch.from_numpy(read_archive(path)["arr_0"]) for path in pair)
        else:
            part = getattr(datasets, IMAGE_SETS[name])(data_root(), train=train, download=True)
            x, y = part.data, part.targets
        if x.dtype != torch.uint8 or x.dim() != 3 or y.shape != x.shape[:1] or not 0 <= y.min() <= y.max() < 10:
            raise ValueError(f"images {tuple(x.shape)}, labels {tuple(y.shape)} from {y.min()} to {y.max()}")
    except (OSError, RuntimeError, EOFError, ValueError, AssertionError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        for empty in (home / "raw", home):
            if empty.is_dir() and not any(empty.iterdir()):
                empty.rmdir()
        raise UserError(f"{name}: {home / 'raw'} is incomplete or damaged, and can't be downloaded ({reason}); delete "
                        "what is damaged, place the files there (from the data set's page), or set BNN_PYRO_DATA to a "
                        f"folder that has {home.name}/raw") from None  # fmt: skip
    return x.unsqueeze(1), y.long()
