"""MNIST and its relatives, pictures, noise, NPZ files of tables and images; torch loaders; and what bad ones get."""

import re
import struct

import numpy as np
import pytest
import torch
from PIL import Image
from refused import refuses
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchvision import datasets

import bnn_pyro as bp
from bnn_pyro.datasets import Schema, load_data, load_inputs
from bnn_pyro.datasets.images import read_images
from bnn_pyro.datasets.in_memory import inputs
from bnn_pyro.datasets.rows import Rows
from bnn_pyro.runs.evaluate import labelled
from bnn_pyro.runs.recipe import Recipe


def write_idx(path, array):
    """One file of MNIST's layout: magic number (uint8, dimensions), sizes, bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack(">HBB" + "I" * array.ndim, 0, 8, array.ndim, *array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


def fake_images(folder, num_train=120, num_test=30):
    """Images whose first pixel is the row number and whose label is row mod 10."""
    for part, num in (("train", num_train), ("t10k", num_test)):
        images = np.zeros((num, 28, 28), np.uint8)
        images[:, 0, 0] = np.arange(num)
        images[:, 9:19, 9:19] = 255
        write_idx(folder / "raw" / f"{part}-images-idx3-ubyte", images)
        write_idx(folder / "raw" / f"{part}-labels-idx1-ubyte", np.arange(num) % 10)


@pytest.fixture
def mnist(root):
    fake_images(root / "MNIST")
    return root


def image_schema(size=28):
    return Schema("classification", (1, size, size), ("0", "1"), x_shift=(0.25,), x_scale=(0.5,))


def test_mnist_keeps_its_test_part_and_holds_out_training_rows(mnist):
    data = load_data("mnist")
    assert data.split["rows"] == [100, 20, 30]
    assert load_data("mnist", validation=0).split["rows"] == [120, 0, 30]
    pixels = data.schema.unstandardise(data.x_test)
    torch.testing.assert_close(pixels[:, 0, 0, 0] * 255, torch.arange(30.0), atol=1e-3, rtol=0)
    assert torch.equal(data.y_test, torch.arange(30) % 10)
    held = data.schema.unstandardise(torch.cat([data.x_train, data.x_val]))[:, 0, 0, 0] * 255
    assert sorted(held.round().int().tolist()) == list(range(120))
    assert torch.bincount(data.y_val).tolist() == [2] * 10
    assert data.schema.x_shift == (0.0,) and len(data.schema.x_scale) == 1  # of all pixels: the background is 0
    assert data.x_train.std(correction=0).item() == pytest.approx(1, abs=1e-5)
    assert data.x_train.min() == 0 and data.x_train.max().item() == pytest.approx(1 / data.schema.x_scale[0])


def test_kmnist_reads_official_pairs_and_its_test_part_alone_serves_as_inputs(root):
    images = np.full((4, 28, 28), 51, np.uint8)
    (root / "KMNIST").mkdir()
    np.savez(root / "KMNIST" / "kmnist-test-imgs.npz", images)
    np.savez(root / "KMNIST" / "kmnist-test-labels.npz", np.array([0, 9, 1, 2], np.uint8))
    x = load_inputs("kmnist", image_schema())
    assert x.shape == (4, 1, 28, 28)
    torch.testing.assert_close(x, torch.full_like(x, (0.2 - 0.25) / 0.5))
    assert torch.equal(load_inputs(root / "KMNIST" / "kmnist-test-imgs.npz", image_schema(), num=2), x[:2])


def test_a_failed_download_names_the_file_to_place_and_leaves_no_folder(root, monkeypatch):
    def fail(where, train, download):
        (where / "KMNIST" / "raw").mkdir(parents=True)
        raise RuntimeError("no network")

    monkeypatch.setattr(datasets, "KMNIST", fail)
    refuses(r"KMNIST/raw is incomplete.*no network.*BNN_PYRO_DATA", load_data, "kmnist")
    assert not (root / "KMNIST").exists()


def test_noise_is_in_pixel_units_and_seeded():
    schema = image_schema()
    for kind, mean, scale in (("uniform", 0.5, 12**-0.5), ("gaussian", 0.25, 0.5)):
        x = load_inputs(f"{kind}-noise", schema, num=200, seed=3)
        pixels = schema.unstandardise(x)
        assert pixels.mean().item() == pytest.approx(mean, abs=0.01)
        assert pixels.std().item() == pytest.approx(scale, abs=0.01)
        assert kind == "gaussian" or (pixels.min() >= 0 and pixels.max() <= 1.0001)
        assert torch.equal(load_inputs("noise", schema, num=200, seed=3), x) == (kind == "uniform")
        assert not torch.equal(load_inputs(f"{kind}-noise", schema, num=200, seed=4), x)


def test_pictures_are_resized_greyed_flattened_on_white_and_inverted(tmp_path):
    schema = image_schema(8)
    Image.new("RGB", (40, 20), (51, 51, 51)).save(tmp_path / "a.png")
    Image.new("RGBA", (5, 5), (0, 0, 0, 0)).save(tmp_path / "b.png")
    for name, value, kind in (
        ("c.png", 32768, np.uint16),
        ("d.tif", 128.5 / 255, np.float32),
        ("e.tif", 128, np.float32),
    ):
        Image.fromarray(np.full((4, 4), value, kind)).save(tmp_path / name)
    x = schema.unstandardise(read_images(tmp_path, schema))
    assert x.shape == (5, 1, 8, 8)
    torch.testing.assert_close(x.mean((1, 2, 3)), torch.tensor([0.2, 1.0, *[128 / 255] * 3]))
    for name, value in (("s.png", np.uint16(255)), ("l.tif", np.int32(1e5)), ("f.tif", np.float32(-1))):
        Image.fromarray(np.full((4, 4), value)).save(tmp_path / name)
        refuses(f"{name}: .* to {value:g}, .*save it as 8 bits", read_images, tmp_path / name, schema)
    inverted = schema.unstandardise(load_inputs(tmp_path / "a.png", schema, invert=True))
    torch.testing.assert_close(inverted, torch.full((1, 1, 8, 8), 0.8))


def test_damaged_image_files_are_named(mnist):
    labels = mnist / "MNIST" / "raw" / "train-labels-idx1-ubyte"
    for rows, size, message in (
        (np.arange(119) % 10, None, r"MNIST/raw .*damaged.*images \(120, 28, 28\), labels \(119,\) from 0 to 9"),
        (np.arange(120) % 11, None, "from 0 to 10"),
        (np.arange(120) % 10, 100, "delete what is damaged"),
    ):
        write_idx(labels, rows)
        labels.write_bytes(labels.read_bytes()[:size])
        refuses(message, load_data, "mnist")


def test_bad_inputs_get_one_clear_line(tmp_path):
    schema, table = image_schema(), load_data("diabetes").schema
    (tmp_path / "no.png").write_text("not a picture")
    (tmp_path / "empty").mkdir()
    np.savez(tmp_path / "small.npz", x=np.zeros((2, 5, 5)))
    for what, to, message in (
        (tmp_path / "no.png", schema, "no.png: is no image"),
        (tmp_path / "empty", schema, "no PNG or JPG file"),
        (tmp_path / "small.npz", schema, r"shape \(1, 5, 5\); this model takes \(1, 28, 28\); a folder of PNG"),
        ("noise", table, "don't fit a model of 10 features"),
        ("nois", schema, "did you mean 'noise'"),
    ):
        refuses(message, load_inputs, what, to)


def save_pictures(folder, shades, size=(12, 10)):
    """One PNG of each shade, of one colour all over."""
    folder.mkdir(parents=True)
    for i, shade in enumerate(shades):
        Image.new("RGB" if isinstance(shade, tuple) else "L", size, shade).save(folder / f"{i:02}.png")


def test_a_folder_of_classes_is_read_as_torchvision_reads_it(tmp_path):
    save_pictures(tmp_path / "photos" / "cat", range(0, 40, 2))
    save_pictures(tmp_path / "photos" / "dog", range(200, 240, 2))
    data = load_data(tmp_path / "photos", validation=6)
    assert data.schema.classes == ("cat", "dog") and data.schema.input_shape == (1, 10, 12)
    folder = datasets.ImageFolder(tmp_path / "photos")
    expected = sorted((picture.convert("L").getpixel((0, 0)), label) for picture, label in folder)
    pixels = data.schema.unstandardise(torch.cat([data.x_train, data.x_val, data.x_test]))[:, 0, 0, 0] * 255
    labels = torch.cat([data.y_train, data.y_val, data.y_test])
    assert sorted(zip(pixels.round().int().tolist(), labels.tolist(), strict=True)) == expected


def test_a_folder_with_a_test_part_in_colour_and_of_large_pictures(tmp_path):
    for part, name in (("train", "a"), ("val", "a"), ("train", "b"), ("test", "a"), ("test", "b")):
        save_pictures(tmp_path / part / name, [(10, 20, 30 + 5 * i) for i in range(6)], (160, 80))
    data = load_data(tmp_path, validation=2)
    assert data.schema.input_shape == (3, 16, 32) and data.split["rows"] == [16, 2, 12]
    blue = data.schema.unstandardise(data.x_test)[:, :, 0, 0] * 255
    assert blue[:6].round().int().tolist() == [[10, 20, 30 + 5 * i] for i in range(6)]


def test_bad_folders_get_one_clear_line_and_damaged_pictures_can_be_left_out(tmp_path):
    for name in ("one/a", "two/a", "three/a", "three/b", "new/train/a", "new/train/b", "new/test/c"):
        save_pictures(tmp_path / name, range(8))
    (tmp_path / "two" / "b").mkdir()
    (tmp_path / "three" / "b" / "03.png").write_bytes(b"half")
    for name, options, message in (
        ("one", {}, "1 folders of classes"),
        ("two", {}, "no picture of class 'b'"),
        ("new", {}, "test/c: class 'c' has no training pictures"),
        ("three", {}, r"03.png: is no image.*remove it.*--missing drop"),
        ("three", {"task": "regression", "drop_missing": True}, "its task is 'classification', not 'regression'"),
    ):
        refuses(message, load_data, tmp_path / name, **options)
    data = load_data(tmp_path / "three", drop_missing=True)
    assert sum(data.split["rows"]) == 15 and data.split["dropped"] == 1
    for option in ({"missing": "drop"}, {"drop_missing": True}):  # what a run left out is left out of other data too
        assert len(labelled(str(tmp_path / "three"), data.schema, Recipe.from_dict({"data": option}))[1]) == 15


def test_archives_hold_tables_and_images(tmp_path):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(50, 3))
    np.savez(tmp_path / "t.npz", x=x, y=x.sum(1))
    data = load_data(tmp_path / "t.npz")
    assert data.schema.features == ("x1", "x2", "x3") and data.schema.task == "regression"
    torch.testing.assert_close(data.schema.unstandardise(data.x_test).sum(1), data.y_test, atol=1e-5, rtol=0)
    pixels = generator.integers(0, 256, size=(50, 6, 4, 3), dtype=np.uint8)
    np.savez(tmp_path / "i.npz", x=pixels, y=np.arange(50) % 2, classes=np.array(["cat", "dog"]))
    images = load_data(tmp_path / "i.npz")
    assert images.schema.input_shape == (3, 6, 4) and images.schema.classes == ("cat", "dog")
    back = images.schema.unstandardise(images.x_train)[0].movedim(0, 2) * 255
    assert (np.abs(pixels - back.numpy()).max((1, 2, 3)) < 0.01).sum() == 1


X, Y = np.arange(40.0).reshape(20, 2), np.linspace(0, 1, 20)


def test_bad_archives_and_files_that_are_none_get_one_line(tmp_path):
    for arrays, arguments, message in (
        ({"inputs": X, "y": Y}, {}, "has inputs, y; it needs arrays x and y"),
        ({"x": np.array(1.0), "y": np.array(1.0)}, {"drop_missing": True}, r"y has shape \(\)"),
        ({"x": np.zeros((20, 2, 5, 5)), "y": Y}, {}, "1 or 3 channels"),
        ({"x": X.astype(str), "y": Y}, {}, "x holds <U"),
        ({"x": X.astype(object), "y": Y}, {}, "it holds Python objects"),
        ({"x": X, "y": np.where(Y == 1, np.inf, Y)}, {"drop_missing": True}, "'y', row 19: 'inf' is not finite"),
        ({"x": X, "y": np.arange(20) % 3, "classes": np.array(["a", "b"])}, {}, "row 2: unknown label '2.0'"),
        ({"x": X, "y": Y}, {"target": "price"}, "its array y"),
    ):
        np.savez(tmp_path / "bad.npz", **arrays)
        refuses(rf"(?=.*bad\.npz).*{message}", load_data, tmp_path / "bad.npz", **arguments)
    np.save(tmp_path / "one", X)
    for content in (b"", b"PK\x03\x04 cut short", b"anything else", (tmp_path / "one.npy").read_bytes()):
        (tmp_path / "bad.npz").write_bytes(content)
        refuses("not an NPZ file", load_data, tmp_path / "bad.npz")


# -- torch data sets and loaders become the data set that their arrays become -----------------------------------------
RNG = np.random.default_rng(0)
INPUTS, TARGETS = torch.from_numpy(RNG.normal(size=(60, 3)).astype(np.float32)), torch.from_numpy(RNG.normal(size=60))


class Stream(IterableDataset):
    """Rows one after the other, without a length."""

    def __init__(self, num=60, width=None):
        self.num, self.width = num, width

    def __iter__(self):
        for k in range(self.num):
            yield (INPUTS[k] if self.width is None or k < 10 else INPUTS[k, : self.width]), TARGETS[k]


def same(a, b):
    assert a.schema == b.schema and a.fingerprint == b.fingerprint
    assert all(torch.equal(part[:], b.parts()[name][:]) for name, part in a.parts().items())


@pytest.mark.parametrize("large", [False, True])
def test_loaders_are_the_arrays_that_they_give(large, monkeypatch):
    expected, both = bp.dataset(INPUTS, TARGETS), bp.dataset(INPUTS, TARGETS, x_test=INPUTS[:20], y_test=TARGETS[:20])
    monkeypatch.setenv("BNN_PYRO_MEMORY", "1e-7" if large else "1")
    items, small = TensorDataset(INPUTS, TARGETS), TensorDataset(INPUTS[:20], TARGETS[:20])
    data = bp.dataset(train=DataLoader(items, 7, shuffle=True, generator=torch.Generator().manual_seed(1)))
    assert isinstance(data.x_train, Rows) == large
    same(data, expected)
    assert torch.equal(inputs(DataLoader(items, 7, shuffle=True), data.schema)[:], inputs(INPUTS, data.schema))
    same(bp.dataset(train=Stream(), rows=60), expected)
    for test, rows in ((DataLoader(small, 8), 60), (DataLoader(Stream(20), 8), (60, 20))):
        same(bp.dataset(train=DataLoader(Stream(), 16), test=test, rows=rows), both)


def test_classes_of_both_parts_are_the_same():
    items, other = (TensorDataset(INPUTS, (TARGETS > 0).long()) for _ in range(2))
    items.classes, other.classes = ["down", "up"], ["up", "down"]
    data = bp.dataset(train=DataLoader(items, 8), test=DataLoader(items, 8))
    assert data.schema.classes == ("down", "up") and torch.equal(data.y_test, (TARGETS > 0).long())
    refuses("test has the classes", bp.dataset, train=DataLoader(items, 8), test=DataLoader(other, 8))


def test_loaders_that_are_refused():
    for options, message in (
        (dict(train=DataLoader(Stream(), 16)), "train has no length; give rows="),
        (dict(train=DataLoader(Stream(), 16), rows=80), "train ends after 60 of 80 rows"),
        (dict(train=DataLoader(Stream(), 16), rows=50), "train has more rows than 50"),
        (dict(train=DataLoader(TensorDataset(INPUTS, TARGETS)), rows=50), "train has 60 rows, and rows=50"),
        (dict(train=Stream(width=2), rows=60), "train[10] is float32 (2,) and float64 (1,), and train[0]"),
        (dict(train=DataLoader(TensorDataset(INPUTS), 8, drop_last=True)), "must be a pair"),
        (dict(x=INPUTS, train=TensorDataset(INPUTS, TARGETS)), "give X or train="),
    ):
        refuses(re.escape(message), bp.dataset, **options)


@pytest.mark.parametrize("axis", [0, -1])
def test_images_among_several_inputs_are_standardised_by_channel(axis):
    """A pixel that is 0 in all but few rows would else be worth a hundred standard deviations in these."""
    units = np.array([1.0, 50.0, 1000.0])[:, None, None]
    pixels = units * np.random.default_rng(0).normal(2, 1, (60, 3, 4, 5)) * (np.arange(60)[:, None, None, None] > 5)
    images = np.moveaxis(pixels, 1, axis) if axis else pixels
    data = bp.dataset((images,), np.arange(60.0), split=0.0, validation=0)
    found = data.x_train.view(-1, *images.shape[1:]).movedim(axis % 4 or 1, 1)
    own = pixels[data.index_train.numpy()]
    expected = (own - own.mean((0, 2, 3), keepdims=True)) / own.std((0, 2, 3), keepdims=True)
    torch.testing.assert_close(found, torch.from_numpy(expected).float(), rtol=1e-4, atol=1e-4)
