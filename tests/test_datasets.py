"""Named sets, the one split, standardisation by the training part, images and inputs from elsewhere."""

import json
import struct

import numpy as np
import pytest
import torch

from bnn_pyro.datasets import DATASETS, Schema, data_root, load_data, load_inputs, noise_images, read_images
from bnn_pyro.errors import UserError

PARTS = ("x_train", "y_train", "x_val", "y_val", "x_test", "y_test")


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
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("BNN_PYRO_DATA", str(tmp_path))
    return tmp_path


@pytest.fixture
def mnist(root):
    fake_images(root / "MNIST")
    return root


def image_schema(size=28):
    return Schema("classification", (1, size, size), ("0", "1"), x_shift=(0.25,), x_scale=(0.5,))


@pytest.mark.parametrize("name", DATASETS)
def test_every_set_loads_with_the_promised_shapes_and_types(name, root):
    for folder in ("MNIST", "FashionMNIST", "KMNIST"):
        fake_images(root / folder)
    data = load_data(name)
    schema = data.schema
    for part in ("train", "val", "test"):
        x, y = getattr(data, f"x_{part}"), getattr(data, f"y_{part}")
        assert x.dtype == torch.float32 and tuple(x.shape) == (len(y), *schema.input_shape)
        assert y.dtype == (torch.float32 if schema.task == "regression" else torch.int64)
    assert data.split["rows"] == [len(data.y_train), len(data.y_val), len(data.y_test)]
    if schema.task == "classification":
        assert set(data.y_train.tolist()) == set(range(len(schema.classes)))
        assert (schema.y_shift, schema.y_scale) == (0.0, 1.0)
    else:
        assert data.y_train.mean().item() == pytest.approx(schema.y_shift, rel=1e-5)
        assert data.y_train.std(correction=0).item() == pytest.approx(schema.y_scale, rel=1e-5)
    assert Schema.from_dict(json.loads(json.dumps(schema.to_dict()))) == schema
    json.dumps(dict(data.split))
    assert data.name == name and data.source


def test_toy_curve_is_the_six_points_and_is_tested_on_the_truth():
    data = load_data("toy-curve")
    x = data.schema.unstandardise(data.x_train)[:, 0]
    order = x.argsort()
    torch.testing.assert_close(x[order], torch.tensor([-2.0, -1.8, -1.0, 1.0, 1.8, 2.0]))
    torch.testing.assert_close(data.y_train[order], torch.tensor([-3.0, 0.2224, 3.0, 3.0, 0.2224, -3.0]))
    grid = data.schema.unstandardise(data.x_test)[:, 0]
    assert len(data.x_val) == 0 and grid.min() >= -2.001 and grid.max() <= 2.001
    middle = grid.abs().argmin()
    assert data.y_test[middle].item() == pytest.approx(1.0, abs=1e-4)
    assert data.y_test.max().item() == pytest.approx(3.25, abs=2e-3)  # at x² = 3/2


def test_breast_cancer_has_malignant_as_one():
    data = load_data("breast-cancer", fractions=(0.5, 0, 0.5))
    labels = torch.cat([data.y_train, data.y_test])
    assert data.schema.classes == ("benign", "malignant") and len(labels) == 569
    assert labels.sum() == 212
    assert len(data.y_train) == 285 and len(data.y_val) == 0
    assert len(data.schema.features) == 30


def test_features_are_chosen_in_the_order_asked_for():
    names = ["mean texture", "mean radius"]
    data = load_data("breast-cancer", features=names)
    everything = load_data("breast-cancer")
    assert data.schema.features == tuple(names)
    torch.testing.assert_close(data.x_train, everything.x_train[:, [1, 0]])
    again = load_inputs("breast-cancer", data.schema)
    assert again.shape == (569, 2)


def test_the_split_is_reproducible_disjoint_and_stratified():
    first, same, other = (load_data("breast-cancer", seed=s) for s in (0, 0, 1))
    for part in PARTS:
        assert torch.equal(getattr(first, part), getattr(same, part))
    assert first.fingerprint == same.fingerprint != other.fingerprint
    rows = [
        {tuple(r) for r in first.schema.unstandardise(x).tolist()} for x in (first.x_train, first.x_val, first.x_test)
    ]
    assert not rows[0] & rows[1] and not rows[0] & rows[2] and not rows[1] & rows[2]
    assert [len(r) for r in rows] == [399, 85, 85]
    for y in (first.y_train, first.y_val, first.y_test):
        assert abs(y.float().mean().item() - 212 / 569) < 0.006


def test_statistics_are_those_of_the_training_part_alone():
    data = load_data("diabetes")
    torch.testing.assert_close(data.x_train.mean(0), torch.zeros(10), atol=1e-5, rtol=0)
    torch.testing.assert_close(data.x_train.std(0, correction=0), torch.ones(10), atol=1e-5, rtol=0)
    assert data.x_test.mean(0).abs().max() > 0.01
    assert data.schema.y_shift == pytest.approx(data.y_train.mean().item(), rel=1e-6)
    whole = torch.cat([data.y_train, data.y_val, data.y_test])
    assert data.schema.y_shift != pytest.approx(whole.mean().item(), rel=1e-4)


def test_limit_keeps_the_first_training_rows_and_standardises_by_them():
    full, few = load_data("diabetes"), load_data("diabetes", limit=20)
    torch.testing.assert_close(few.y_train, full.y_train[:20])
    torch.testing.assert_close(few.y_test, full.y_test)
    torch.testing.assert_close(few.x_train.mean(0), torch.zeros(10), atol=1e-5, rtol=0)
    assert few.split["limit"] == 20


def test_validation_counts_rows():
    data = load_data("diabetes", validation=7)
    assert data.split["rows"] == [369, 7, 66]


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


def test_pixels_share_one_shift_the_background_and_one_scale(mnist):
    data = load_data("mnist")
    assert data.schema.x_shift == (0.0,) and len(data.schema.x_scale) == 1
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
    same = load_inputs(root / "KMNIST" / "kmnist-test-imgs.npz", image_schema(), num=2)
    assert torch.equal(same, x[:2])


def test_an_official_training_pair_takes_the_test_pair_beside_it(tmp_path):
    for part, num in (("train", 60), ("test", 20)):
        np.savez(
            tmp_path / f"k-{part}-imgs.npz",
            np.zeros((num, 5, 5), np.uint8) + np.arange(num, dtype=np.uint8)[:, None, None],
        )
        np.savez(tmp_path / f"k-{part}-labels.npz", np.arange(num) % 4)
    data = load_data(tmp_path / "k-train-imgs.npz")
    assert data.split["rows"] == [50, 10, 20] and data.schema.classes == ("0", "1", "2", "3")


def test_download_goes_to_the_data_root(root, monkeypatch):
    from torchvision import datasets

    monkeypatch.setattr(datasets, "FashionMNIST", lambda where, download: fake_images(where / "FashionMNIST"))
    assert load_data("fashion-mnist").split["rows"] == [100, 20, 30]
    assert (root / "FashionMNIST" / "raw" / "train-images-idx3-ubyte").is_file()


def test_a_failed_download_names_the_file_to_place_and_leaves_no_folder(root, monkeypatch):
    from torchvision import datasets

    def fail(where, download):
        (where / "KMNIST" / "raw").mkdir(parents=True)
        raise RuntimeError("no network")

    monkeypatch.setattr(datasets, "KMNIST", fail)
    with pytest.raises(UserError, match=r"KMNIST/raw/train-images-idx3-ubyte.*no network.*BNN_PYRO_DATA"):
        load_data("kmnist")
    assert not (root / "KMNIST").exists()


def test_the_data_root_is_data_unless_told(monkeypatch):
    monkeypatch.delenv("BNN_PYRO_DATA", raising=False)
    assert str(data_root()) == "data"


def test_noise_is_in_pixel_units_and_seeded():
    schema = image_schema()
    uniform, gaussian = (noise_images(kind, 200, schema, seed=3) for kind in ("uniform", "gaussian"))
    pixels = schema.unstandardise(uniform)
    assert 0 <= pixels.min() < 0.001 and 0.999 < pixels.max() <= 1.0001
    assert pixels.mean().item() == pytest.approx(0.5, abs=0.005)
    assert schema.unstandardise(gaussian).mean().item() == pytest.approx(0.25, abs=0.01)
    assert schema.unstandardise(gaussian).std().item() == pytest.approx(0.5, abs=0.01)
    assert torch.equal(load_inputs("noise", schema, num=200, seed=3), uniform)
    assert not torch.equal(noise_images("uniform", 200, schema, seed=4), uniform)


def test_pictures_are_resized_greyed_flattened_on_white_and_inverted(tmp_path):
    from PIL import Image

    schema = image_schema(8)
    Image.new("RGB", (40, 20), (51, 51, 51)).save(tmp_path / "a.png")
    Image.new("RGBA", (5, 5), (0, 0, 0, 0)).save(tmp_path / "b.png")
    Image.fromarray(np.full((4, 4), 32768, np.uint16)).save(tmp_path / "c.png")
    x = schema.unstandardise(read_images(tmp_path, schema))
    assert x.shape == (3, 1, 8, 8)
    torch.testing.assert_close(x.mean((1, 2, 3)), torch.tensor([0.2, 1.0, 128 / 255]))
    inverted = schema.unstandardise(load_inputs(tmp_path / "a.png", schema, invert=True))
    torch.testing.assert_close(inverted, torch.full((1, 1, 8, 8), 0.8))


def cut_short(path):
    path.write_bytes(path.read_bytes()[:100])


BAD_NAMES = {
    "unknown": (dict(name_or_path="mnits"), "unknown data set 'mnits'; did you mean 'mnist'"),
    "no file": (dict(name_or_path="houses.csv"), r"houses.csv: no such file"),
    "no folder": (dict(name_or_path="no/houses.csv"), r"no folder no"),
    "suffix": (dict(name_or_path="README.md"), r"README.md"),
    "feature": (dict(name_or_path="breast-cancer", features=["mean radios"]), "did you mean 'mean radius'"),
    "twice": (dict(name_or_path="breast-cancer", features=["mean radius"] * 2), "chosen twice"),
    "none": (dict(name_or_path="diabetes", features=[]), "chooses no column"),
    "image columns": (dict(name_or_path="digits", features=["a"]), "digits holds images"),
    "target": (dict(name_or_path="digits", target="price"), "its target is 'digit', not 'price'"),
    "task": (dict(name_or_path="digits", task="regression"), "its task is 'classification'"),
    "no task": (dict(name_or_path="digits", task="clasification"), "did you mean 'classification'"),
    "fractions": (dict(name_or_path="diabetes", fractions=(0.5, 0.2, 0.2)), "sum to 1"),
    "own test": (dict(name_or_path="toy-curve", fractions=(0.5, 0, 0.5)), "its test part is given"),
    "own split": (dict(name_or_path="toy-curve", splits="s.npz"), "has a test part of its own"),
    "validation": (dict(name_or_path="toy-curve", validation=6), "validation=6 of 6 training rows"),
    "too much": (dict(name_or_path="diabetes", validation=400), "too few to divide"),
    "few for classes": (dict(name_or_path="digits", validation=3), "every class in both"),
    "limit": (dict(name_or_path="diabetes", limit=0), "limit=0"),
}


@pytest.mark.parametrize("case", BAD_NAMES)
def test_bad_requests_get_one_clear_line(case, root):
    arguments, message = BAD_NAMES[case]
    with pytest.raises(UserError, match=message) as caught:
        load_data(**arguments)
    assert "\n" not in str(caught.value)


def test_damaged_image_files_are_named(mnist):
    labels = mnist / "MNIST" / "raw" / "train-labels-idx1-ubyte"
    write_idx(labels, np.arange(119) % 10)
    with pytest.raises(UserError, match=r"120 images.*119 labels"):
        load_data("mnist")
    write_idx(labels, np.arange(120) % 11)
    with pytest.raises(UserError, match=r"row 10 .* has label 10, outside 0 to 9"):
        load_data("mnist")
    cut_short(labels)
    with pytest.raises(UserError, match="train-labels-idx1-ubyte: is damaged"):
        load_data("mnist")
    labels.write_bytes(b"")
    with pytest.raises(UserError, match="train-labels-idx1-ubyte: is damaged"):
        load_data("mnist")


def test_bad_inputs_get_one_clear_line(tmp_path):
    schema, table = image_schema(), load_data("diabetes").schema
    (tmp_path / "no.png").write_text("not a picture")
    (tmp_path / "empty").mkdir()
    np.savez(tmp_path / "small.npz", x=np.zeros((2, 5, 5)))
    for what, to, message in (
        (tmp_path / "no.png", schema, "no.png: is no image"),
        (tmp_path / "gone.png", schema, "gone.png: no such image"),
        (tmp_path / "empty", schema, "no PNG or JPG file"),
        (tmp_path / "small.npz", schema, r"shape \(1, 5, 5\); this model takes \(1, 28, 28\)"),
        ("digits", schema, r"shape \(1, 8, 8\)"),
        ("noise", table, "don't fit a model of 10 features"),
        ("nois", schema, "did you mean 'noise'"),
        ("breast-cancer", table, r"shape \(30,\); this model takes \(10,\)"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            load_inputs(what, to)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="did you mean 'uniform'"):
        noise_images("unform", 2, schema)
