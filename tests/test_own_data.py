"""Arrays, tensors, lists and frames as data: the same as a file of them, divided as asked, refused in one line."""

import numpy as np
import pandas as pd
import pytest
import torch
from refused import refuses
from scipy.sparse import csr_matrix
from scipy.stats import ks_2samp
from test_images import save_pictures
from torch.utils.data import DataLoader, TensorDataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import ToTensor

import bnn_pyro as bp
from bnn_pyro.datasets.tables import row_problems

NUM = 60
LABELS = np.tile(["u", "v"], NUM // 2)
RNG = np.random.default_rng(0)
FRAME = pd.DataFrame({
    "area": RNG.normal(80, 20, NUM),
    "rooms": RNG.integers(1, 6, NUM),
    "city": RNG.choice(["Oslo", "Rome"], NUM),
    "flat": RNG.random(NUM) < 0.5,
    "heating": pd.Categorical(RNG.choice(["gas", "oil"], NUM)),
    "year": RNG.integers(1950, 1960, NUM),
})  # fmt: skip
PRICE = pd.Series(3 * FRAME["area"] + RNG.normal(size=NUM), name="price")
ARRAY, PRICES = FRAME[["area", "rooms"]].to_numpy(), PRICE.to_numpy()


class Foreign:
    """A frame of another library, without pandas: columns by name, values as lists (as polars without pyarrow)."""

    def __init__(self, frame):
        self.frame, self.columns = frame, list(frame.columns)

    def __dataframe__(self):
        raise NotImplementedError

    def __getitem__(self, name):
        values = self.frame[name].tolist()
        return type("Column", (), {"to_list": lambda self: values})()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "houses.csv"
    FRAME.assign(price=PRICE).to_csv(path, index=False)
    return path


@pytest.mark.parametrize("frame", [FRAME, Foreign(FRAME), dict(FRAME), FRAME.astype(object)])
def test_a_frame_is_the_same_as_a_file_of_it(file, frame):
    data, of_file = bp.dataset(frame, PRICE), bp.load_data(file, target="price")
    assert data.fingerprint == of_file.fingerprint and data.split == of_file.split
    assert data.schema == of_file.schema and torch.equal(data.y_test, of_file.y_test)
    assert data.schema.features[3:] == ("city=Rome", "flat=False", "flat=True", "heating=gas", "heating=oil", "year")
    assert bp.dataset(FRAME.assign(price=PRICE), "price").fingerprint == data.fingerprint
    assert bp.dataset(pd.DataFrame(ARRAY), 1, task="regression").schema.target == "1"  # as pandas names the columns
    torch.testing.assert_close(bp.load_inputs(FRAME.iloc[:, ::-1], data.schema), bp.load_inputs(file, data.schema))
    assert bp.Schema.from_dict(data.schema.to_dict()) == data.schema


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor, lambda x: x.tolist()])
def test_arrays_tensors_and_lists_are_one(kind):
    data = bp.dataset(kind(ARRAY), kind(PRICES[:, None]), seed=3)
    frame = bp.dataset(FRAME[["area", "rooms"]], PRICE, seed=3)
    assert data.fingerprint == frame.fingerprint and data.schema.features == ("x1", "x2")
    torch.testing.assert_close(bp.load_inputs(kind(ARRAY[:3]), data.schema), data.schema.standardise(ARRAY[:3]))


def test_categories_of_a_type_stay_categories_and_labels_keep_their_names():
    codes = FRAME.assign(heating=pd.Categorical(np.tile(["01", "02"], NUM // 2)))
    assert {"heating=01", "heating=02"} <= set(bp.dataset(codes, PRICE).schema.features)
    for y, classes in (
        (LABELS, ("u", "v")),
        (np.tile([0, 3, 7], 20), ("0", "3", "7")),
        (FRAME["flat"], ("False", "True")),
    ):
        data = bp.dataset(FRAME.drop(columns="flat"), y)
        assert data.schema.classes == classes and data.y_train.unique().tolist() == [*range(len(classes))]
    data = bp.dataset(ARRAY, np.tile([0, 1], NUM // 2), classes=["no", "yes"])
    assert data.schema.classes == ("no", "yes")


@pytest.mark.parametrize("codes", [["007", "7"], [7, 8], [7.0, 8.0], pd.array([7, 8], "Int64")], ids=str)
def test_codes_are_as_they_are_written_and_a_model_knows_those_it_was_trained_on(codes):
    frame = FRAME.assign(code=pd.Series(codes).repeat(NUM // 2).to_numpy())
    data = bp.dataset(frame, PRICE, categorical="code")
    assert data.schema.features[-2:] == tuple(f"code={c}".removesuffix(".0") for c in codes)
    prediction = bp.predict(bp.fit("mlp", data, bp.MAP(epochs=1), seed=np.int64(3), progress=False), frame)
    assert len(prediction) == NUM


def test_codes_of_a_column_with_gaps_are_those_of_one_without(tmp_path):
    """pandas writes and reads whole numbers beside gaps as 1.0; and the other way round."""
    rng, path = np.random.default_rng(0), tmp_path / "t.csv"
    for codes in ([1.0, 2.0, np.nan], [1, 2, 3]):
        frame = pd.DataFrame({"code": rng.choice(codes, 60), "y": rng.normal(size=60)})
        frame.to_csv(path, index=False)
        data = bp.load_data(path, target="y", categorical=["code"], missing="indicator")
        posterior = bp.fit("mlp", data, bp.MAP(epochs=1), progress=False)
        kinds = ["float64", "Int64"] if 3 not in codes else ["int64", "float64"]
        rows = [pd.DataFrame({"code": pd.Series([2, 1], dtype=kind)}) for kind in kinds]
        rows += [one.astype(str) for one in rows]
        first, *others = [bp.predict(posterior, one).mean for one in rows]
        assert first[0] != first[1] and all(torch.equal(first, other) for other in others)
        assert (row_problems(rows[-1], data.schema) == "").all()
        with pytest.raises(bp.UserError, match="unknown category '9'"):
            bp.predict(posterior, pd.DataFrame({"code": [9]}))


def test_a_torch_data_set_is_read_into_memory(tmp_path):
    for name, value in (("cats", 40), ("dogs", 200)):
        save_pictures(tmp_path / name, [(value + k,) * 3 for k in range(10)], (5, 6))
    folder = ImageFolder(tmp_path, ToTensor())
    data = bp.dataset(folder)
    assert data.schema.input_shape == (3, 6, 5) and data.schema.classes == ("cats", "dogs")
    assert sum(data.split["rows"]) == 20
    assert torch.equal(data.schema.unstandardise(data.x_train).mean((1, 2, 3)) < 0.5, data.y_train == 0)
    of_pixels = bp.dataset(ImageFolder(tmp_path))  # images as they are: uint8, channels last
    pixels, floats = (d.schema.unstandardise(d.x_test) for d in (of_pixels, data))
    torch.testing.assert_close(pixels, floats)
    (tmp_path / "dogs" / "y.png").write_bytes(b"no picture")
    for items in (ImageFolder(tmp_path), DataLoader(ImageFolder(tmp_path, ToTensor()), 4, num_workers=1)):
        refuses("could not be read to its end .*cannot identify image file .*y.png", bp.dataset, items)
    for wrong, message in (
        (dict(x=folder, y=LABELS), "leave y out"),
        (dict(x=TensorDataset(torch.ones(0, 2), torch.ones(0))), "without items"),
    ):
        refuses(message, bp.dataset, **wrong)


def test_a_fit_takes_rows_and_a_prediction_a_frame():
    posterior = bp.fit("mlp", (FRAME, PRICE), bp.MAP(epochs=2), progress=False, device="cpu")
    assert posterior.provenance["rows"] == {"train": NUM, "val": 0, "test": 0}
    mean = bp.predict(posterior, FRAME).mean
    assert torch.equal(mean, bp.predict(posterior, bp.load_inputs(FRAME, posterior.schema)).mean)
    refuses(r"a fit takes a data set .* or \(X, y\), not a str", bp.fit, "mlp", "houses.csv")
    for unnamed in (FRAME.to_numpy(object), FRAME.to_numpy(object).tolist()):  # in the order of the training columns
        assert torch.equal(mean, bp.predict(posterior, unnamed).mean)
    for row in (FRAME.iloc[3], FRAME.iloc[3].to_dict()):
        torch.testing.assert_close(bp.predict(posterior, row).mean, mean[3:4])
    refuses(r"a DataFrame; give it to bp\.dataset", bp.load_data, FRAME)
    images = bp.dataset(np.zeros((NUM, 4, 4), dtype=np.uint8), LABELS).schema
    refuses(r"a frame, and this model takes arrays of shape \(N, 1, 4, 4\)", bp.load_inputs, FRAME, images)
    refuses("no column 'city', which this model needs", bp.predict, posterior, FRAME.drop(columns="city"))
    with pytest.warns(UserWarning, match="left aside: garden"):
        bp.predict(posterior, FRAME.assign(garden=1))


def test_missing_values_become_the_training_median_and_an_indicator_and_unseen_categories_none_of_the_known():
    gaps = FRAME.assign(area=FRAME["area"].where(FRAME.index % 5 > 0), city=FRAME["city"].where(FRAME.index % 7 > 0))
    rows = np.arange(40), np.arange(40, NUM)
    data = bp.dataset(gaps, PRICE, missing="indicator", split=rows)
    median = gaps["area"][:40].median()
    assert data.schema.columns[0].fill == pytest.approx(median)
    x = data.schema.unstandardise(bp.load_inputs(gaps, data.schema))
    names = data.schema.features
    np.testing.assert_allclose(x[:, 0], gaps["area"].fillna(median), rtol=1e-5)
    assert names[1] == "area missing" and torch.equal(x[:, 1], torch.tensor(gaps["area"].isna(), dtype=torch.float32))
    assert torch.equal(x[:, names.index("city=(missing)")], torch.tensor(gaps["city"].isna(), dtype=torch.float32))
    torch.testing.assert_close(bp.load_inputs(gaps[40:], data.schema), data.x_test)
    filled = x[:40, 0].double()
    assert data.schema.x_shift[0] == pytest.approx(filled.mean().item(), rel=1e-5) and data.schema.x_shift[1] == 0
    array = bp.dataset(gaps[["area", "rooms"]].to_numpy(), PRICES, missing="indicator", split=rows)
    torch.testing.assert_close(array.x_test, data.x_test[:, :3])
    torch.testing.assert_close(bp.load_inputs(gaps[["area", "rooms"]].to_numpy()[40:], array.schema), array.x_test)
    refuses("column 'rooms', row 0: missing value", bp.load_inputs, gaps.assign(rooms=np.nan), data.schema)
    for x in (gaps, gaps[["area", "rooms"]].to_numpy(), gaps[["rooms"]].to_numpy()):  # what nothing can stand for
        left = bp.dataset(x, PRICE.where(PRICE.index != 3), missing="indicator")
        assert left.split["dropped"] == 1 and sum(left.split["rows"]) == NUM - 1
        assert left.split["doubts"][0] == "price: missing in 1 of the rows, which are left out"
    rates = bp.dataset(gaps, "rooms", missing="indicator", task="counts", exposure="area")
    assert rates.split["dropped"] == gaps["area"].isna().sum()
    data = bp.dataset(FRAME, PRICE, unseen="ignore", x_test=FRAME.assign(city="Paris"), y_test=PRICE)
    place = data.schema.features.index("city=Oslo")
    assert data.x_test[:, place : place + 2].abs().sum() == 0 and len(data.x_test) == NUM
    words = r"x_test.*column 'city', row 0: unknown category 'Paris'"
    refuses(words, bp.dataset, FRAME, PRICE, x_test=FRAME.assign(city="Paris"), y_test=PRICE)


def parts(data, column):
    place, inputs = data.schema.features.index(column), (data.x_train, data.x_val, data.x_test)
    return [set(data.schema.unstandardise(x)[:, place].round().int().tolist()) for x in inputs]


def test_groups_stay_together_and_time_goes_on():
    groups = bp.dataset(FRAME, PRICE, groups=FRAME["year"], split=0.2, validation=0.2)
    train, val, test = parts(groups, "year")
    assert train and val and test and not (train & val or train & test or val & test)
    assert sum(groups.split["rows"]) == NUM and abs(groups.split["rows"][2] - 12) <= 5
    train, val, test = parts(bp.dataset(FRAME, PRICE, time=FRAME["year"]), "year")
    assert max(train) < min(val) <= max(val) < min(test)
    dates = pd.to_datetime("2020-01-01") + pd.to_timedelta(FRAME["year"] - 1950, unit="D")
    by_column = bp.dataset(FRAME.assign(day=dates), PRICE, time="day")
    assert "day" not in by_column.schema.features
    for form in ("%Y-%m-%d", "%d.%m.%Y"):
        for texts in (dates.dt.strftime(form).tolist(), dates.dt.strftime(form).astype("category")):
            assert bp.dataset(FRAME, PRICE, time=texts).fingerprint == by_column.fingerprint


def test_either_half_of_the_rows_that_validate_is_of_random_groups():
    x = np.arange(1000.0)
    data = bp.dataset(x[:, None], x % 7, groups=np.arange(1000) // 5)
    half = len(data.index_val) // 2
    first, second = (set((rows // 5).tolist()) for rows in (data.index_val[:half], data.index_val[half:]))
    assert len(first & second) <= 1 and ks_2samp(list(first), list(second)).pvalue > 1e-3


def test_given_rows_are_the_test_part():
    mask = np.arange(NUM) % 4 == 0
    of_mask, of_rows = (bp.dataset(FRAME, PRICE, split=s, validation=5) for s in (mask, np.flatnonzero(mask)))
    assert of_mask.fingerprint == of_rows.fingerprint and of_mask.split["rows"] == [40, 5, 15]
    np.testing.assert_allclose(of_mask.y_test, PRICES[mask], rtol=1e-6)
    three = bp.dataset(FRAME, PRICE, split=(np.arange(10, 50), np.arange(50, 55), np.arange(55, 60)))
    assert three.split["rows"] == [40, 5, 5]
    assert bp.dataset(FRAME, PRICE, split=(np.arange(50), [], np.arange(50, 60))).split["rows"] == [50, 0, 10]
    np.testing.assert_allclose(three.y_val, PRICES[50:55], rtol=1e-6)
    given = bp.dataset(FRAME[:40], PRICE[:40], x_test=FRAME[40:], y_test=PRICE[40:], validation=0)
    np.testing.assert_allclose(given.y_test, PRICES[40:], rtol=1e-6)
    torch.testing.assert_close(given.x_test, bp.load_inputs(FRAME[40:], given.schema))
    shares = bp.dataset(ARRAY, LABELS, split=0.5, validation=10)
    assert shares.split["rows"] == [20, 10, 30] and shares.y_test.sum() == 15, "stratified"


COUNTS = dict(y=FRAME["rooms"].to_numpy(), task="counts", exposure="area")
ORDINAL = dict(y=LABELS, task="ordinal")
ZERO, GAP = (FRAME.assign(area=FRAME["area"].where(FRAME.index != row, cell)) for row, cell in ((7, 0.0), (0, np.nan)))
MASKED = np.ma.array(ARRAY, mask=np.arange(ARRAY.size).reshape(ARRAY.shape) == 7 * ARRAY.shape[1])
BAD = {
    "lengths": (dict(y=PRICE[:9]), "X has 60 rows and y 9"),
    "a column in a tuple": (dict(x=(PRICES,)), r"X has 1 rows and y 60.*such as column.reshape\(-1, 1\)"),
    "no target": (dict(y=None), "y is missing"),
    "no such column": (dict(y="prize"), r"unknown column of X \(y=\) 'prize'"),
    "mixed": (dict(x=FRAME.assign(a=[1, "a"] * 30)), r"'a' holds mixed-integer values \(row 0: int, row 1: str\)"),
    "gap": (dict(x=GAP), r"'area', row 0: missing value.*missing='drop'"),
    "gap in array": (dict(x=np.where(np.arange(NUM)[:, None] == 7, np.nan, ARRAY)), r"x\[7, 0\] is nan.*row 7"),
    "mask": (dict(x=MASKED), r"x\[7, 0\] is nan.*row 7"),
    "mask of targets": (dict(y=MASKED[:, 0]), "'y', row 7: missing value"),
    "mask of labels": (dict(x=ARRAY, y=np.ma.array(LABELS, mask=MASKED.mask[:, 0])), "'y', row 7: missing value"),
    "mask of exposure": (dict(**COUNTS | {"exposure": MASKED[:, 0]}), "'exposure', row 7: missing value"),
    "gap in labels": (dict(x=ARRAY, y=[None, *LABELS[1:]]), "'y', row 0: missing value"),
    "gap in target": (dict(y=PRICE.where(PRICE.index > 0)), "'price', row 0: missing value .* missing='drop' or 'indi"),
    "other order": (dict(y=PRICE[::-1]), "y has the row labels of X in another order.* y.loc.X.index., or y.to_numpy"),
    "groups in other order": (dict(groups=FRAME["year"][::-1]), "groups has the row labels of X in another order"),
    "split in other order": (dict(split=(PRICE > 0)[::-1]), "split has the row labels of X in another order"),
    "seed": (dict(seed=1.5), "seed must be a whole number, got 1.5"),
    "too narrow": (dict(y=PRICE + 1e9), "'price' varies by .* around 1e.09, too little for 32-bit numbers; subtract a"),
    "no spread left": (dict(y=PRICE * 1e-300), "'price' varies by 0 around .*, too little for .*; multiply by a"),
    "too large": (dict(y=PRICE * 1e22), "'price' varies by .*e.*, too much for 32-bit numbers; divide"),
    "too small": (dict(y=PRICE * 1e-22), "'price' varies by .*e-.*, too little for 32-bit numbers; multiply by a"),
    "durations": (dict(x=FRAME.assign(a=pd.Timedelta("1D"))), "holds dates or times; make numbers .*total_seconds"),
    "sparse": (dict(x=csr_matrix(ARRAY)), r"X is a csr_matrix, .* give X.toarray\(\)"),
    "no columns": (dict(x=FRAME[[]]), "X has no columns"),
    "lists": (dict(x=FRAME.assign(a=[[1]] * NUM)), "'a' holds values of type list; make them all numbers"),
    "all missing": (dict(x=FRAME.assign(a=np.nan), missing="indicator"), "column 'a' has no value in any row"),
    "names": (dict(x=pd.concat([FRAME, FRAME], axis=1)), "X has 2 columns called 'area'"),
    "one dimension": (dict(x=PRICES), r"X has shape \(60,\); .*X.reshape\(-1, 1\)"),
    "targets in three dimensions": (dict(y=np.ones((NUM, 2, 2))), r"\(60, 2, 2\); give .*\(N,\), or several, \(N, T\)"),
    "empty": (dict(x=ARRAY[:0], y=[]), "X has no rows"),
    "ragged": (dict(x=[[1, 2], [3]], y=[1, 2]), "rows of unequal length"),
    "series": (dict(x=([[1, 2], [3]],), y=[1, 2]), r"X\['0'\]: rows of unequal .*; pad series .* mask as another"),
    "a column of series": (dict(x={"a": pd.Series([[1, 2], [3]])}, y=[1, 2]), r"X\['a'\]: rows of unequal .*; pad"),
    "indicator of a series": (dict(x=(ARRAY,), missing="indicator"), "X is a tuple or dict, .* no missing='indicator'"),
    "pixels": (dict(x=np.full((NUM, 4, 4), 300.0)), r"pixels from 300.0 to 300.0; .*bp.dataset\(\(X,\), y\)"),
    "class without rows": (dict(y=np.repeat(["u", "v"], 30), split=np.arange(NUM) < 30), "class 'u' .*no training row"),
    "negative counts": (dict(y=np.arange(NUM) - 3, task="counts"), r"row 0: -3.0 is no count.*task='regression'"),
    "mask of rows": (dict(split=np.ones(5, bool)), r"split= is bool of shape \(5,\)"),
    "nothing to train": (dict(split=0.9), r"split=0.9 and validation=0.15 of the rows leave none to train"),
    "rows": (dict(split=[3, 99]), "split= names rows 3 to 99, but there are rows 0 to 59"),
    "few groups": (dict(groups=np.arange(NUM) % 2), "2 different values, of which one has up to 30"),
    "group gap": (dict(groups=[None] + [1] * 59), r"groups: row 0 .*has no value"),
    "no date": (dict(time=["1.2.2020", *["soon"] * 59]), "time must be numbers, dates"),
    "day or month": (dict(time=["1/2/2020"] * NUM), "time must be numbers, dates"),
    "test alone": (dict(x_test=FRAME), "x_test and y_test are the test part together"),
    "test and split": (dict(x_test=FRAME, y_test=PRICE, split=0.2), "leave split= out"),
    "choice": (dict(missing="median"), "unknown missing 'median'"),
    "no order": (ORDINAL, "target 'y': the order of the classes u, v is not known; give classes= .--classes."),
    "class not named": (dict(**ORDINAL, classes=("u",)), "unknown class 'v'"),
    "class of no row": (dict(**ORDINAL, classes=("v", "u", "w")), "no row of class 'w'"),
    "class twice": (dict(**ORDINAL, classes=("u", "v", "u")), "names it twice"),
    "classes": (dict(task="counts", classes=["u"]), "classes= .--classes. names classes, and the task is counts"),
    "exposure of a price": (dict(exposure="area"), "exposure .--exposure. is for counts, and the task is regr"),
    "no exposure": (dict(**COUNTS, x=ZERO), "column 'area', row 7: '0.0' is no exposure, which is positive"),
    "text for a number": (dict(y=LABELS, task="counts"), "target 'y' is text, and task='counts' takes numbers; leave"),
    "gaps in every row": (dict(x=GAP.assign(area=np.nan), y=PRICE.where(PRICE.index > 30), missing="drop"),
                          "every row has a missing value, most often in column 'area'; leave it out .*'indicator'"),
    "no target in any row": (dict(y=PRICE * np.nan, missing="drop"), "missing value, most often in column 'price'$"),
    "exposures": (dict(**COUNTS | {"exposure": [1.0, 2.0]}), "exposure has 2 values, and X 60 rows"),
    "no time": (dict(x=ZERO, y="area", event="flat"), "'area', row 7: '0.0' is no time, which is positive"),
    "no event": (dict(y="area", event="rooms"), r"event 'rooms' holds 1, 2, 3, 4, 5; give 1 .* event='rooms=VALUE'"),
    "no events": (dict(y="area", event="rooms=9"),
                  "training times of 'area' are censored: .* is 'rooms' right, and 9 an event"),
    "event": (dict(event="flat", task="regression"), "event= .--event. is for task='survival', and the task is"),
    "time alone": (dict(y="area", task="survival"), "takes a time and an event, and there are 1 columns; give event="),
    "events": (dict(y="area", event=np.ones(3)), "event 'event' has 3 values, and the times area 60"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_said_in_one_line(case):
    wrong, message = BAD[case]
    refuses(message, bp.dataset, **{"x": FRAME, "y": PRICE, **wrong})
