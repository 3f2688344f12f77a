"""Named sets, the one split, standardisation by the training part; and what bad requests get."""

import json
from dataclasses import replace

import pytest
import torch
from fake_mnist import fake_images

from bnn_pyro.datasets import DATASETS, Schema, data_root, load_data, load_inputs
from bnn_pyro.errors import UserError

PARTS = ("x_train", "y_train", "x_val", "y_val", "x_test", "y_test")


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("BNN_PYRO_DATA", str(tmp_path))
    return tmp_path


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
    assert load_data("breast-cancer", features="mean radius").schema.features == ("mean radius",)
    again = load_inputs("breast-cancer", data.schema)
    assert again.shape == (569, 2)


def test_the_split_is_reproducible_disjoint_and_stratified():
    first, same, other = (load_data("breast-cancer", seed=s) for s in (0, 0, 1))
    for part in PARTS:
        assert torch.equal(getattr(first, part), getattr(same, part))
    assert first.fingerprint == same.fingerprint != other.fingerprint
    assert first.fingerprint != replace(first, y_train=1 - first.y_train).fingerprint
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


def test_the_data_root_is_data_unless_told(monkeypatch):
    monkeypatch.delenv("BNN_PYRO_DATA", raising=False)
    assert str(data_root()) == "data"


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
    "no fractions": (dict(name_or_path="diabetes", fractions=("a", 1, 2)), "give three shares"),
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
