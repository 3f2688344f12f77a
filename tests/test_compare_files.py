"""What a run is compared with, by scipy; the first box of a report."""

import json
import re
from html import unescape

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from scipy.stats import nbinom
from sklearn.metrics import average_precision_score, log_loss, roc_auc_score

import bnn_pyro as bp
from bnn_pyro.predictive import knows_nothing
from bnn_pyro.runs.folder import RunFolder

pytestmark = pytest.mark.usefixtures("quick", "no_figures")


@pytest.fixture
def compared(command, tmp_path):
    def compared(run, frame, *more, code=0):
        frame.to_csv(tmp_path / "mine.csv", index=False)
        return command("compare", run, tmp_path / "mine.csv", "--out", tmp_path / "c.html", *more, code=code)

    return compared


def test_numbers_have_the_scores_of_their_normal(runs, tmp_path, compared):
    data = RunFolder(runs / "houses").recipe.load()
    y, rng = data.y_test.double().numpy(), np.random.default_rng(0)
    frame = pd.DataFrame({"row": data.index_test, "mean": y + rng.normal(0, y.std(), len(y)), "sd": y.std()})
    told = compared(runs / "houses", frame.sample(frac=1, random_state=0))
    nll = -stats.norm(frame["mean"], frame["sd"]).logpdf(y).mean()
    assert f"{nll:.3g} [" in told.split("Metrics on the same test rows")[1].splitlines()[3]
    assert "a file has no posterior" in told and str(tmp_path / "mine.csv") in (tmp_path / "c.html").read_text()


def test_classes_have_the_scores_of_their_probabilities_and_tables_are_written_for_a_paper(runs, tmp_path, compared):
    data = RunFolder(runs / "digits").recipe.load()
    p = np.random.default_rng(0).uniform(0.1, 0.9, (len(data.y_test), 10))
    p /= p.sum(1, keepdims=True)
    frame = pd.DataFrame(p, columns=[f"p({name})" for name in data.schema.classes])
    value = f"{log_loss(data.y_test, p, labels=range(10)):.3g}"
    for option, cell in {"--markdown": f"| {value} [", "--latex": f"& {value} ["}.items():
        told = compared(runs / "digits", frame, option)
        assert next(line for line in told.splitlines() if line.startswith(("| nll ", "nll "))).count(cell)
        (tmp_path / "c.html").unlink()
    assert "\\toprule" in told and r"\%" in told
    own = bp.predict(bp.load(runs / "digits"), data.x_test, num_draws=RunFolder(runs / "digits").recipe.num_draws).mean
    told = compared(runs / "digits", pd.DataFrame(own.numpy(), columns=frame.columns))
    assert "no clear difference" in told and not {"better", "worse"} & {*told.split()}  # of equal predictions


def test_a_file_that_does_not_fit_is_refused_in_one_line(runs, tmp_path, compared, command):
    run = runs / "houses"
    data = RunFolder(run).recipe.load()
    frame = pd.DataFrame({"mean": np.ones(len(data.y_test)), "sd": 1.0})
    last = int(data.index_test.max())
    every = pd.DataFrame({"row": np.arange(last + 1), "mean": 1.0, "sd": 1.0})
    for changed, words in (
        (frame.drop(columns="sd"), "no column 'sd'; it needs mean, sd"),
        (frame[1:], "test rows: give one for each in their order, or a column 'row'"),
        (frame.assign(sd=0.0), "row 2: sd must be above 0, not [1.0, 0.0]"),  # the header is row 1
        (frame.drop(4).reindex(frame.index), "row 6: mean, sd must be numbers, not [nan, nan]"),
        (frame.assign(row=3), "a number stands twice in the column 'row'"),
        (every, "has a row 0 in its column 'row'; rows of these data are counted as in an editor"),
        (every[2:-1], f"has no row {last} in its column 'row'"),
    ):
        told = compared(run, changed, code=2)
        assert words in told and told.count("\n") == 1 and not (tmp_path / "c.html").exists()
    assert f"error: {tmp_path / 'none.csv'}: no such file" in command("compare", run, tmp_path / "none.csv", code=2)


RNG = np.random.default_rng(0)
SHORT = ["--no-baseline", "--epochs", "30", "--hidden", "8", "--num-draws", "20", "--device", "cpu"]


@pytest.fixture
def box(tmp_path, quick, command):
    """(frame, arguments of train) -> (sentences of the first box, metrics.json); `train` prints the same sentences."""

    def train(frame, *arguments):
        file, run = tmp_path / "t.csv", tmp_path / "run"
        frame.to_csv(file, index=False)
        printed = command("train", "--data", file, "--out", run, "--target", "y", *SHORT, *arguments, code=(0, 3))
        page = (run / "report.html").read_text().replace("\u00a0", " ").replace("−", "-")
        summary = page.split('class="summary">')[1].split("</div>")[0]
        sentences = [re.sub("</?code>", "`", unescape(text)) for text in re.findall("<p>(.*?)</p>", summary)]
        assert all(sentence in " ".join(printed.split()) for sentence in sentences)
        return sentences, json.loads((run / "metrics.json").read_text())

    return train


def inputs(num, columns=3):
    x = RNG.normal(size=(num, columns))
    return pd.DataFrame(x, columns=[f"x{k}" for k in range(columns)]), x


def test_three_per_cent_positives(box, tmp_path, command):
    """The rare class is not the second one in the alphabet, so that P(class 1) would be the wrong one."""
    (frame, x), (new, x_new) = inputs(2000), inputs(2000)
    for rows, of in ((frame, x), (new, x_new)):
        rows["y"] = np.where(RNG.random(2000) < 1 / (1 + np.exp(4.2 - of[:, 0])), "fraud", "no")
    sentences, scores = box(frame, "mlp")
    share = scores["class_rows"]["no"] / 300
    assert scores["class_predictions"] == {"fraud": 0, "no": 300}
    assert re.match(rf"{share:.1%} of the test rows are 'no', and this run says it of every row: .*fraud", sentences[0])
    assert re.match(r"On 300 test rows: nll .*, auroc .*, average precision ", sentences[1])
    assert "error" not in sentences[1] and "beside the class frequencies alone" in sentences[2]
    assert "a threshold on P(no) (`predict --threshold`) finds more of the rare class" in sentences[-1]
    assert not any("calibrated by" in text for text in sentences), "most of these sets would be empty"
    data = bp.load_data(tmp_path / "t.csv", target="y")
    prediction = bp.predict(bp.load(tmp_path / "run"), data.x_test, num_draws=20)
    positive, score = data.y_test.numpy() == 0, prediction.mean[:, 0].numpy()
    assert scores["average_precision"] == pytest.approx(average_precision_score(positive, score), rel=1e-5)
    assert scores["auroc"] == pytest.approx(roc_auc_score(positive, score), rel=1e-5)
    new.to_csv(tmp_path / "new.csv", index=False)
    held = []
    for more in ([], ["--groups", "y"]):
        said = command("calibrate", tmp_path / "run", "--data", tmp_path / "new.csv", *more)
        assert ("take a larger --level, such as 0.95" in said) == (not more)
        held.append(bp.load(tmp_path / "run").predict(data.x_test).set(0.9).members.numpy()[positive, 0].mean())
    shown = {row["rows"]: row for row in json.loads((tmp_path / "run/guarantees.json").read_text())["table"]}
    assert shown["y fraud"]["covered"] == pytest.approx(held[1]) and held[0] < 0.2 and held[1] > 0.5 and "y no" in shown


def test_a_skewed_positive_target(box, tmp_path):
    frame, x = inputs(400)
    frame["y"] = np.exp(3 + x[:, 0] + 0.2 * RNG.normal(size=400))
    sentences, scores = box(frame, "mlp", "--target-scale", "log", "--epochs", "200")
    assert re.match("On 60 test rows: crps .*, nll ", sentences[0])
    assert re.search(r"beside the training mean alone.*nll -\d.*, better", sentences[1])
    # Knowing nothing is a log-normal of the training rows: its NLL by hand.
    data = bp.load_data(tmp_path / "t.csv", target="y", target_scale="log")
    log_train, log_test = (np.log(y.double().numpy()) for y in (data.y_train, data.y_test))
    z = (log_test - log_train.mean()) / log_train.std()
    nll = np.mean(z**2 / 2 + np.log(log_train.std() * np.sqrt(2 * np.pi)) + log_test)
    assert bp.metrics.nll(knows_nothing(data, data.x_test), data.y_test) == pytest.approx(nll, rel=1e-4)
    assert scores["nll_minus_nothing"] == pytest.approx(scores["nll"] - nll, abs=1e-3)


def test_noise_that_grows_is_proposed_and_calibrated_intervals_are_judged_first(box, tmp_path):
    frame, x = inputs(900)
    frame["y"] = x[:, 0] + np.exp(0.9 * x[:, 1]) * RNG.normal(size=900)
    sentences, scores = box(frame, "mlp", "--conformal", "0.9", "--epochs", "100")
    (name, ratio), *_ = scores["errors_by"].items()
    assert name == "x1" and ratio > 2 and "`--noise heteroscedastic`, as errors are" in sentences[-1]
    hold = next(sentence for sentence in sentences if "intervals" in sentence)
    assert re.match(r"90 % intervals that `predict` writes \(conformal: normalised\) hold \d+ % of 135 test rows", hold)
    assert "before calibration 90 % intervals hold" in hold and "calibrate" not in sentences[-1]
    assert not any("least sure" in sentence for sentence in sentences), "one noise for all rows"
    assert "third" not in (tmp_path / "run/guarantees.json").read_text()
    even = frame.assign(y=x[:, 0] + RNG.normal(size=900))
    assert "errors_by" not in box(even, "mlp", "--overwrite", "--epochs", "100")[1]


def test_few_rows_of_many_columns_that_tell_nothing(box, tmp_path):
    """Counts beside the likeliest negative binomial of their mean: its NLL by hand."""
    frame, _ = inputs(30, columns=500)
    frame["y"] = RNG.poisson(2.0, size=30)
    sentences, scores = box(frame, "mean-field", "--task", "counts")
    num = int(sentences[0].split()[1])
    assert sentences[0].startswith(f"On {num} test rows") and num in (4, 5)
    assert sentences[1].startswith(f"{num} test rows are few") and f" {100 / num:.0f} %" in sentences[1]
    data = bp.load_data(tmp_path / "t.csv", target="y", task="counts")
    y, y_test = data.y_train.double().numpy(), data.y_test.numpy()
    laws = [nbinom(r, r / (r + y.mean())) for r in np.exp(np.linspace(-4, 14, 1801))]
    nll = -max(laws, key=lambda law: law.logpmf(y).sum()).logpmf(y_test).mean()
    assert scores["nll_minus_nothing"] == pytest.approx(scores["nll"] - nll, abs=1e-3)
    beside = next(sentence for sentence in sentences if "beside the training rate alone" in sentence)
    assert scores["nll_minus_nothing_high"] > 0 and not re.search(r"nll [^;]*, better", beside)
    assert "inputs may say little" in sentences[-1]


def test_five_classes_with_one_of_four_rows(box):
    frame, _ = inputs(300)
    frame["y"] = ["e"] * 4 + [*np.array(list("abcd"))[RNG.integers(4, size=296)]]
    sentences, scores = box(frame, "mlp", "--fractions", "0.4,0.2,0.4")
    num, never = scores["class_rows"]["e"], scores["class_predictions"]["e"] == 0
    assert 0 < num < 5 and ("never" in sentences[0] or "No test row is given the class" in sentences[0]) == never
    assert f"Too few test rows to judge the class 'e' ({num} of the test rows)." in sentences[:2]
