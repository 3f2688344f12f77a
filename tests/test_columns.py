"""Labels that are names or places of classes, or yes and no in any spelling."""

import numpy as np
import pandas as pd
import pytest
from test_own_data import ARRAY, FRAME, PRICE

import bnn_pyro as bp
from bnn_pyro.errors import UserError


@pytest.mark.parametrize("words", ["yes no", "Y n", "TRUE False", "ja nein", "t f", "oui non", "1 0"])
def test_labels_and_new_rows_may_be_yes_and_no_in_any_spelling(words):
    word = dict(zip((True, False), words.split(), strict=True))
    labels = pd.DataFrame({"large": FRAME["area"] > 80, "flat": FRAME["flat"]})
    data = bp.dataset(ARRAY, labels.replace(word) if words != "1 0" else labels.astype(int), seed=1)
    same = bp.dataset(ARRAY, labels, seed=1)  # booleans
    assert data.schema.task == same.schema.task == "labels" and data.fingerprint == same.fingerprint
    schema = bp.dataset(FRAME[["area"]].assign(flat=FRAME["flat"].astype(float)), PRICE).schema
    new = bp.load_inputs(FRAME[["area"]].assign(flat=FRAME["flat"].map(word)), schema)
    assert (new[:, 1] > 0).tolist() == FRAME["flat"].tolist()
    with pytest.raises(UserError, match="column 'flat', row 0: 'perhaps' is not a number"):
        bp.load_inputs(FRAME[["area"]].assign(flat=["perhaps", *FRAME["flat"].map(word)[1:]]), schema)


def test_numbers_of_classes_are_their_places_in_arrays_and_names_in_frames_that_have_them():
    names = [str(k) for k in range(11)]  # as folders are sorted: 0, 1, 10, 2, …
    labels = np.tile(np.arange(11), 6)
    x = np.random.default_rng(0).normal(size=(66, 2))
    data = bp.dataset(x, labels, classes=sorted(names), split=np.arange(66) >= 33)
    assert data.schema.classes[2] == "10" and data.y_test.tolist() == labels[33:].tolist()
    table = bp.dataset(pd.DataFrame(x), labels, classes=sorted(names), split=np.arange(66) >= 33)
    assert [table.schema.classes[k] for k in table.y_test] == [str(k) for k in labels[33:]]
    places = bp.dataset(pd.DataFrame(x), labels % 2, classes=["no", "yes"], split=np.arange(66) >= 33)
    assert places.schema.classes == ("no", "yes") and places.y_test.tolist() == (labels % 2)[33:].tolist()


def test_an_archive_may_have_several_targets_and_leaves_out_rows_with_a_gap(tmp_path):
    targets = np.stack([PRICE, 2 * PRICE], 1)
    targets[7, 1] = np.nan
    np.savez(tmp_path / "t.npz", x=ARRAY, y=targets)
    data = bp.load_data(tmp_path / "t.npz", missing="drop", seed=1)
    kept = np.delete(np.arange(len(ARRAY)), 7)
    assert data.schema.task == "targets" and data.schema.targets == ("y1", "y2")
    assert data.fingerprint == bp.dataset(ARRAY[kept], targets[kept], seed=1).fingerprint
    assert 7 not in np.concatenate([data.index_train, data.index_val, data.index_test])
    with pytest.raises(UserError, match=r"t.npz: column 'y2', row 7: missing value"):
        bp.load_data(tmp_path / "t.npz")
