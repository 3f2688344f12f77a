"""The first box of a report says what matters: of rare classes, a skewed target, few rows, many columns."""

import json
import re
from html import unescape

import numpy as np
import pandas as pd
import pytest
from scipy.stats import poisson
from sklearn.metrics import average_precision_score, roc_auc_score

import bnn_pyro as bp
from bnn_pyro.run import main
from bnn_pyro.runs.baselines import knows_nothing

RNG = np.random.default_rng(0)
SHORT = ["--no-baseline", "--epochs", "30", "--hidden", "8", "--num-draws", "20", "--quiet", "--device", "cpu"]


@pytest.fixture
def box(tmp_path, quick, capsys):
    """(frame, arguments of train) -> (sentences of the first box, metrics.json); `train` prints the same sentences."""

    def train(frame, *arguments):
        file, run = tmp_path / "t.csv", tmp_path / "run"
        frame.to_csv(file, index=False)
        assert main(["train", "--data", str(file), "--out", str(run), "--target", "y", *SHORT, *arguments]) in (0, 3)
        page = (run / "report.html").read_text()
        summary = page.split('class="summary">')[1].split("</div>")[0]
        sentences = [re.sub("</?code>", "`", unescape(text)) for text in re.findall("<p>(.*?)</p>", summary)]
        printed = " ".join(capsys.readouterr().out.split())
        assert all(sentence in printed for sentence in sentences)
        return sentences, json.loads((run / "metrics.json").read_text())

    return train


def table(num, columns=3):
    x = RNG.normal(size=(num, columns))
    return pd.DataFrame(x, columns=[f"x{k}" for k in range(columns)]), x


def test_three_per_cent_positives(box, tmp_path):
    """The rare class is not the second one in the alphabet, so that P(class 1) would be the wrong one."""
    frame, x = table(2000)
    rare = RNG.random(2000) < 1 / (1 + np.exp(4.2 - x[:, 0]))
    frame["y"] = np.where(rare, "fraud", "no")
    sentences, scores = box(frame, "mlp")
    share = scores["class_rows"]["no"] / 300
    assert scores["class_predictions"] == {"fraud": 0, "no": 300}
    assert re.match(rf"{share:.1%} of the test rows are 'no', and this run says it of every row: .*fraud", sentences[0])
    assert re.match(r"On 300 test rows: nll .*, auroc .*, average precision ", sentences[1])
    assert "error" not in sentences[1] and "beside the class frequencies alone" in sentences[2]
    assert "a threshold on P(no) (`predict --threshold`) finds more of the rare class" in sentences[-1]
    data = bp.load_data(tmp_path / "t.csv", target="y")
    prediction = bp.predict(bp.load(tmp_path / "run"), data.x_test, num_draws=20)
    positive, score = data.y_test.numpy() == 0, prediction.mean[:, 0].numpy()
    assert scores["average_precision"] == pytest.approx(average_precision_score(positive, score), rel=1e-5)
    assert scores["auroc"] == pytest.approx(roc_auc_score(positive, score), rel=1e-5)


def test_a_skewed_positive_target(box, tmp_path):
    frame, x = table(400)
    frame["y"] = np.exp(3 + x[:, 0] + 0.2 * RNG.normal(size=400))
    sentences, scores = box(frame, "mlp", "--target-scale", "log", "--epochs", "200")
    assert re.match("On 60 test rows: crps .*, nll ", sentences[0])
    assert re.search(r"beside the training mean alone.*nll -\d.*, better", sentences[1])
    # Knowing nothing is a log-normal of the training rows: its NLL by hand.
    data = bp.load_data(tmp_path / "t.csv", target="y", target_scale="log")
    log_train, log_test = (np.log(y.double().numpy()) for y in (data.y_train, data.y_test))
    z = (log_test - log_train.mean()) / log_train.std()
    nll = np.mean(z**2 / 2 + np.log(log_train.std() * np.sqrt(2 * np.pi)) + log_test)
    assert bp.metrics.nll(knows_nothing(data), data.y_test) == pytest.approx(nll, rel=1e-4)
    assert scores["nll_minus_nothing"] == pytest.approx(scores["nll"] - nll, abs=1e-3)


def test_few_rows_of_many_columns_that_tell_nothing(box, tmp_path):
    """Counts beside a Poisson of their mean: its NLL by hand."""
    frame, _ = table(30, columns=200)
    frame["y"] = RNG.poisson(2.0, size=30)
    sentences, scores = box(frame, "mean-field", "--task", "counts")
    num = int(sentences[0].split()[1])
    assert sentences[0].startswith(f"On {num} test rows") and num in (4, 5)
    assert sentences[1].startswith(f"{num} test rows are few") and f" {100 / num:.0f} %" in sentences[1]
    data = bp.load_data(tmp_path / "t.csv", target="y", task="counts")
    nll = -poisson.logpmf(data.y_test, data.y_train.double().mean()).mean()
    assert scores["nll_minus_nothing"] == pytest.approx(scores["nll"] - nll, abs=1e-4)
    beside = next(sentence for sentence in sentences if "beside the training mean alone" in sentence)
    assert scores["nll_minus_nothing_high"] > 0 and not re.search(r"nll [^;]*, better", beside)
    assert "inputs may say little" in sentences[-1]


def test_five_classes_with_one_of_four_rows(box):
    frame, _ = table(300)
    frame["y"] = ["e"] * 4 + [*np.array(list("abcd"))[RNG.integers(4, size=296)]]
    sentences, scores = box(frame, "mlp", "--fractions", "0.4,0.2,0.4")
    num, never = scores["class_rows"]["e"], scores["class_predictions"]["e"] == 0
    assert 0 < num < 5 and ("never" in sentences[0] or "No test row is given the class" in sentences[0]) == never
    assert f"Too few test rows to judge the class 'e' ({num} of the test rows)." in sentences[:2]
