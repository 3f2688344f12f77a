"""NPZ files: tables, images, official pairs; and what bad ones get."""

import numpy as np
import pytest
import torch

from bnn_pyro.datasets import load_data
from bnn_pyro.errors import UserError


def test_archives_hold_tables_and_images(tmp_path):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(50, 3))
    np.savez(tmp_path / "t.npz", x=x, y=x.sum(1))
    data = load_data(tmp_path / "t.npz")
    assert data.schema.features == ("x1", "x2", "x3") and data.schema.task == "regression"
    raw = data.schema.unstandardise(data.x_test)
    torch.testing.assert_close(raw.sum(1), data.y_test, atol=1e-5, rtol=0)
    pixels = generator.integers(0, 256, size=(50, 6, 4, 3), dtype=np.uint8)
    np.savez(tmp_path / "i.npz", x=pixels, y=np.arange(50) % 2, classes=np.array(["cat", "dog"]))
    images = load_data(tmp_path / "i.npz")
    assert images.schema.input_shape == (3, 6, 4) and images.schema.classes == ("cat", "dog")
    back = images.schema.unstandardise(images.x_train)[0].movedim(0, 2) * 255
    assert (np.abs(pixels - back.numpy()).max((1, 2, 3)) < 0.01).sum() == 1


def test_archive_rows_with_nan_are_dropped_only_when_asked(tmp_path):
    x, y = np.arange(80.0).reshape(40, 2), np.linspace(0, 1, 40)
    x[3, 1] = y[5] = np.nan
    np.savez(tmp_path / "t.npz", x=x, y=y)
    np.savez(tmp_path / "s.npz", test_0=np.array([3, 4, 39]))
    data = load_data(tmp_path / "t.npz", drop_missing=True, splits=tmp_path / "s.npz")
    assert data.split["rows"] == [36, 0, 2]
    torch.testing.assert_close(data.y_test, torch.tensor([4 / 39, 1.0]))


def test_an_official_training_pair_takes_the_test_pair_beside_it(tmp_path):
    for part, num in (("train", 60), ("test", 20)):
        np.savez(
            tmp_path / f"k-{part}-imgs.npz",
            np.zeros((num, 5, 5), np.uint8) + np.arange(num, dtype=np.uint8)[:, None, None],
        )
        np.savez(tmp_path / f"k-{part}-labels.npz", np.arange(num) % 4)
    data = load_data(tmp_path / "k-train-imgs.npz")
    assert data.split["rows"] == [50, 10, 20] and data.schema.classes == ("0", "1", "2", "3")


X, Y = np.arange(40.0).reshape(20, 2), np.linspace(0, 1, 20)
BAD_ARCHIVES = {
    "keys": ({"inputs": X, "y": Y}, {}, "has inputs, y; it needs arrays x and y"),
    "lengths": ({"x": X, "y": Y[:19]}, {}, r"shape \(20, 2\) and y \(19,\)"),
    "scalars": ({"x": np.array(1.0), "y": np.array(1.0)}, {"drop_missing": True}, r"x has shape \(\)"),
    "no rows": ({"x": X[:0], "y": Y[:0]}, {"drop_missing": True}, r"x has shape \(0, 2\)"),
    "flat": ({"x": Y, "y": Y}, {}, r"x has shape \(20,\)"),
    "channels": ({"x": np.zeros((20, 2, 5, 5)), "y": Y}, {}, "1 or 3 channels"),
    "pixels": ({"x": np.full((20, 5, 5), 255.0), "y": Y}, {}, r"store images as uint8"),
    "text": ({"x": X.astype(str), "y": Y}, {}, "x holds <U"),
    "objects": ({"x": X.astype(object), "y": Y}, {}, "it holds Python objects"),
    "nan": ({"x": np.where(X == 7, np.nan, X), "y": Y}, {}, r"x\[3, 1\] is nan; correct or remove row 3"),
    "missing": ({"x": X, "y": np.where(Y == 0, np.nan, Y)}, {}, r"y\[0\] is nan; .*drop_missing"),
    "inf": ({"x": X, "y": np.where(Y == 1, np.inf, Y)}, {"drop_missing": True}, r"y\[19\] is inf"),
    "label": ({"x": X, "y": np.arange(20) % 3, "classes": np.array(["a", "b"])}, {}, "row 2 .*label 2, outside 0 to 1"),
    "one class": ({"x": X, "y": np.zeros(20, int)}, {}, "one class only, '0'"),
    "feature": ({"x": X, "y": Y}, {"features": ["x3"]}, "unknown feature.*Valid: x1, x2"),
    "target": ({"x": X, "y": Y}, {"target": "price"}, "its array y"),
    "no images": ({"arr_0": X}, {}, "give the file of images"),
}


@pytest.mark.parametrize("case", BAD_ARCHIVES)
def test_bad_archives_get_one_line(tmp_path, case):
    arrays, arguments, message = BAD_ARCHIVES[case]
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(UserError, match=message) as caught:
        load_data(tmp_path / "bad.npz", **arguments)
    assert "\n" not in str(caught.value) and "bad.npz" in str(caught.value)


def test_official_pairs_are_checked(tmp_path):
    images, labels = tmp_path / "k-imgs.npz", tmp_path / "k-labels.npz"
    np.savez(images, np.zeros((4, 3, 3), np.uint8))
    with pytest.raises(UserError, match=r"its labels .*k-labels.npz are missing"):
        load_data(images)
    np.savez(labels, np.array([0, 1, 0]))
    with pytest.raises(UserError, match="4 images need"):
        load_data(images)
    np.savez(images, np.zeros((4, 3, 3)))
    with pytest.raises(UserError, match="arr_0 is float64"):
        load_data(images)


def test_a_file_that_is_no_archive_is_told(tmp_path):
    for content in (b"", b"PK\x03\x04 cut short", b"anything else"):
        (tmp_path / "bad.npz").write_bytes(content)
        with pytest.raises(UserError, match="not an NPZ file"):
            load_data(tmp_path / "bad.npz")
    np.save(tmp_path / "one", X)
    (tmp_path / "one.npy").rename(tmp_path / "bad.npz")
    with pytest.raises(UserError, match="not an NPZ file"):
        load_data(tmp_path / "bad.npz")
