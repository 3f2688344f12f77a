"""Data sets: the registry of named ones, and ``load_data``, which also reads a user's file."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bnn_pyro.datasets.arrays import IMAGE_SUFFIXES, read_inputs
from bnn_pyro.datasets.dataset import Column, Dataset, Raw, Schema
from bnn_pyro.datasets.in_memory import archive, dataset, inputs
from bnn_pyro.datasets.prepare import check_options, prepare, say_doubts, select_features
from bnn_pyro.datasets.tables import load_table, read_rows
from bnn_pyro.errors import UserError, unknown
from bnn_pyro.files import ARRAYS, SUFFIXES, data_root, existing, resolve

__all__ = [
    "DATASETS", "NOISE", "Column", "Dataset", "Schema", "data_root", "dataset", "load_data", "load_inputs",
    "read_rows",
]  # fmt: skip


def curve(x: Tensor) -> Tensor:
    """Return the true function of toy-curve: y = −x⁴ + 3x² + 1."""
    return -(x**4) + 3 * x**2 + 1


def toy_curve() -> Raw:
    """6 rows, 1 column, regression: points of y = −x⁴ + 3x² + 1; the test part is the curve itself on a grid."""
    x = torch.tensor([-2.0, -1.8, -1.0, 1.0, 1.8, 2.0], dtype=torch.float64)
    grid = torch.linspace(-2, 2, 101, dtype=torch.float64)
    source = "six points of y = -x^4 + 3x^2 + 1; tested on the curve itself between -2 and 2"
    about, test = dict(features=("x",), source=source, validation=0), (grid.unsqueeze(1), curve(grid))
    return Raw(name="toy-curve", task="regression", x=x.unsqueeze(1), y=curve(x), **about, test=test)


def breast_cancer() -> Raw:
    """569 rows, 30 columns, 2 classes: tumours by their cell nuclei, malignant (1) or benign (0)."""
    source, classes = "Breast Cancer Wisconsin (Diagnostic), Wolberg et al. 1995", ("benign", "malignant")
    raw = _table_set("breast-cancer", "classification", "diagnosis", source, classes=classes)
    return replace(raw, y=1 - raw.y)  # scikit-learn labels benign as 1


def diabetes() -> Raw:
    """442 rows, 10 columns, regression: patients, and how far the disease went in a year."""
    source = "Diabetes, Efron, Hastie, Johnstone & Tibshirani 2004"
    return _table_set("diabetes", "regression", "progression", source, scaled=False)


def _table_set(name: str, task: str, target: str, source: str, classes: Sequence[str] = (), **options: Any) -> Raw:
    import sklearn.datasets as bundled

    bunch = getattr(bundled, f"load_{name.replace('-', '_')}")(**options)
    x, y, features = *map(torch.from_numpy, (bunch.data, bunch.target)), tuple(map(str, bunch.feature_names))
    about = dict(classes=classes, features=features, target=target, source=f"{source}, in scikit-learn")
    return Raw(name=name, task=task, x=x, y=y, **about)


def digits() -> Raw:
    """1,797 images of 8 × 8 pixels, 10 classes: handwritten digits."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x, y = torch.from_numpy(bunch.images / 16).float(), torch.from_numpy(bunch.target.astype(np.int64))
    source = "Optical Recognition of Handwritten Digits (test part), Alpaydin & Kaynak 1998, in scikit-learn"
    of_target = dict(task="classification", classes=tuple("0123456789"), target="digit")
    return Raw(name="digits", x=x.unsqueeze(1), y=y, **of_target, source=source)


def mnist() -> Raw:
    """60,000 + 10,000 images of 28 × 28 pixels, 10 classes: handwritten digits."""
    return _image_set("mnist", map(str, range(10)), "MNIST, LeCun, Cortes & Burges 1998, CC BY-SA 3.0")


def fashion_mnist() -> Raw:
    """60,000 + 10,000 images of 28 × 28 pixels, 10 classes: clothes."""
    classes = "T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"
    return _image_set("fashion-mnist", classes, "Fashion-MNIST, Xiao, Rasul & Vollgraf 2017, MIT")


def kmnist() -> Raw:
    """60,000 + 10,000 images of 28 × 28 pixels, 10 classes: cursive Japanese characters."""
    classes = "o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"
    return _image_set("kmnist", classes, "KMNIST, Clanuwat et al. 2018, CODH, CC BY-SA 4.0")


def _image_set(name: str, classes: Iterable[str], source: str) -> Raw:
    from bnn_pyro.datasets.images import image_part

    (x, y), test = image_part(name, train=True), image_part(name, train=False)
    of_target = dict(task="classification", classes=tuple(classes), target="label")
    return Raw(name=name, x=x, y=y, **of_target, source=source, test=test)


#: {name: loader}; the first line of the loader's docstring describes the data set.
DATASETS: dict[str, Callable[[], Raw]] = {
    "toy-curve": toy_curve,
    "breast-cancer": breast_cancer,
    "digits": digits,
    "diabetes": diabetes,
    "mnist": mnist,
    "fashion-mnist": fashion_mnist,
    "kmnist": kmnist,
}
#: Names of out-of-distribution noise.
NOISE = ("noise", "uniform-noise", "gaussian-noise")


def load_data(
    name_or_path: str | Path, *, features: Sequence[str] | None = None, exclude: Sequence[str] = (),
    categorical: Sequence[str] = (), target: str | Sequence[str] | None = None, task: str | None = None,
    classes: Sequence[str] | None = None, target_scale: str = "identity", dates: str = "refuse", scale: str = "auto",
    missing: str = "refuse", drop_missing: bool = False, unseen: str = "refuse", groups: str | None = None,
    time: str | None = None, exposure: str | None = None, event: str | None = None, splits: str | Path | None = None,
    split: int = 0, seed: int = 0, fractions: Sequence[float] | None = None, validation: int | None = None,
    limit: int | None = None,
) -> Dataset:  # fmt: skip
    """Load a named data set, a file (CSV, TSV, Parquet, NPZ, NPY) or a folder of pictures; split and standardise it.

    task, classes, missing, unseen, target_scale, dates, scale, limit and seed are those of :func:`dataset`. If an NPZ
    file has arrays x_test and y_test, they are the test part.

    features      names of the columns to use, in that order; None: all
    exclude       names of columns to leave out
    categorical   names of columns of a table whose numbers are codes of categories (or of classes)
    target        the target column of a file, by default "y"; for a table also several, as a list or text with commas
    drop_missing  the same as missing="drop"; for pictures it leaves out damaged files
    groups, time, exposure, event  names of columns of a table; event may also be "COLUMN=VALUE"
    splits, split  an NPZ file with arrays of test rows (test_0, test_1, …; rows counted from 0), and the number of the
                  array to use; all other rows are training rows
    fractions     shares of training, validation and test rows, by default 0.70, 0.15 and 0.15; not for data with a
                  test part of their own
    validation    number of validation rows. By default it follows from ``fractions``; it is a sixth of the training
                  rows of a data set with its own test part (10,000 of MNIST), and 0 with ``splits``
    Raises UserError, one line with the place and what to do, for anything that is wrong with the input.
    """
    if not isinstance(name_or_path, str | Path):
        raise UserError(f"load_data takes a name or a file, not a {type(name_or_path).__name__}; give it to bp.dataset")
    names = ((some,) if isinstance(some, str) else some for some in (features, exclude, categorical))
    features, exclude, categorical = (None if some is None else list(some) for some in names)
    if drop_missing and missing == "indicator":
        raise UserError("drop_missing (--drop-missing) means missing=drop; leave it out, or missing=indicator")
    missing = "drop" if drop_missing else missing
    check_options(task=task, missing=missing, unseen=unseen, target_scale=target_scale, dates=dates, scale=scale)
    path, aside = _located(name_or_path), {}
    by = {name: column for name, column in (("groups", groups), ("time", time)) if column is not None}
    table = path is not None and not path.is_dir() and path.suffix.lower() not in ARRAYS
    of_tables = {**by, "classes": classes, "exposure": exposure, "event": event, "categorical": categorical or None}
    of_tables |= {"missing=indicator": missing == "indicator" or None, f"dates={dates}": dates != "refuse" or None}
    if not table and (names := [name for name, value in of_tables.items() if value is not None]):
        raise UserError(f"{name_or_path}: {', '.join(names)} is for tables (CSV, TSV, Parquet)")
    if path is None:
        raw = DATASETS[str(name_or_path)]()
    elif path.is_dir():
        from bnn_pyro.datasets.images import load_folder

        raw = load_folder(path, drop_damaged=missing == "drop")
    elif not table:
        raw = archive(path, target=target, task=task, drop_missing=missing == "drop")
    else:
        of_columns = dict(features=features, exclude=exclude, categorical=categorical, exposure=exposure)
        of_target = dict(target=target, task=task, classes=classes, event=event, dates=dates)
        raw, aside = load_table(path, aside=list(by.values()), missing=missing, **of_columns, **of_target)
    if path is None or path.is_dir():
        for setting, choice, has in (("target", target, raw.target), ("task", task, raw.task)):
            if choice not in (None, has):
                raise UserError(f"{raw.name}: its {setting} is '{has}', not '{choice}'; leave {setting} out")
    if not raw.columns:  # features of a table are selected earlier, before missing values are looked for
        raw = select_features(raw, features, str(path or raw.name), exclude)
    if path is not None and raw.name in DATASETS:  # a user's digits.csv is not the data set "digits"
        raw = replace(raw, name=path.name)
    if splits is None and split:
        raise UserError(f"split={split} is one of a file of given splits; give splits too, or another seed")
    raw = replace(raw, target_scale=target_scale, unseen=unseen)
    file, by = None if splits is None else (resolve(splits), split), {kind: aside[name] for kind, name in by.items()}
    options = dict(scale=scale, limit=limit, seed=seed, validation=validation, fractions=fractions)
    return say_doubts(prepare(raw, file=file, by=by, **options))


def load_inputs(
    name_or_path: Any, schema: Schema, *, num: int | None = None, seed: int = 0, invert: bool = False
) -> Tensor:
    """Load inputs (N, *input_shape), standardised with the model's statistics, for example out-of-distribution inputs.

    name_or_path  a named data set (its test part, if it has one); a CSV, TSV or NPZ file; a PNG or JPG file or a folder
                  of them; a frame, array, tensor or list of inputs that are not standardised (see ``dataset``); or
                  independent noise in every pixel: "noise" or "uniform-noise" in [0, 1], or "gaussian-noise", which is
                  standard Normal after standardisation and not clipped
    num           number of inputs to keep, from the first one (of noise: to draw, by default 1,000)
    invert        for pictures, see ``images.read_images``
    """
    if num is not None and num < 1:
        raise UserError(f"num={num}: give the number of inputs to keep, 1 or more")
    if not isinstance(name_or_path, str | Path):
        return inputs(name_or_path, schema)[:num]
    text, path = str(name_or_path), resolve(name_or_path)
    from bnn_pyro.datasets.images import IMAGE_SETS, image_part, read_images

    of_pictures = text not in DATASETS and (path.is_dir() or path.suffix.lower() in IMAGE_SUFFIXES)
    if (text in NOISE or of_pictures) and not schema.is_image:
        raise UserError(f"{text}: images don't fit a model of {len(schema.features)} features; give it a table")
    if text in NOISE:
        shape, generator = (1000 if num is None else num, *schema.input_shape), torch.Generator().manual_seed(seed)
        if text == "gaussian-noise":
            return torch.randn(shape, generator=generator)
        return schema.standardise(torch.rand(shape, generator=generator))
    if of_pictures:
        return read_images(path, schema, invert=invert)[:num]
    path = _located(name_or_path, also=NOISE)
    if path is not None and path.suffix.lower() not in ARRAYS:
        return read_rows(path, schema)[0][:num]
    if path is not None:
        x = read_inputs(path)
    elif text in IMAGE_SETS:  # the test part alone
        x = image_part(text, train=False)[0]
    else:
        raw = DATASETS[text]()
        x = raw.x if raw.test is None else raw.test[0]
        if schema.features and set(schema.features) <= set(raw.features):
            x = x[:, [raw.features.index(name) for name in schema.features]]
    return inputs(x[:num], schema, str(path or text))


def _located(name_or_path: str | Path, also: Sequence[str] = ()) -> Path | None:
    """Return the path of an existing file or folder, or None for a named data set."""
    if (text := str(name_or_path)) in DATASETS:
        return None
    path = resolve(name_or_path)
    if not (path.exists() or path.suffix or len(path.parts) > 1):
        raise UserError(f"{unknown('data set', text, [*DATASETS, *also])}; or the path of a file or folder")
    if path.is_dir() or existing(path).suffix.lower() in SUFFIXES:
        return path
    raise UserError(f"{path}: can't read a '{path.suffix}' file; save it as {', '.join(SUFFIXES)}")
