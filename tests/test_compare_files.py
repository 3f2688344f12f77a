"""Predictions of a file beside a run, against scipy and scikit-learn; tables for a paper."""

import numpy as np
import pandas as pd
import pytest
from run_folders import MEAN_FIELD, SMALL, small_table
from scipy import stats
from sklearn.metrics import log_loss

from bnn_pyro.run import main
from bnn_pyro.runs.folder import RunFolder

pytestmark = pytest.mark.usefixtures("quick", "no_figures")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{task: (a run, its data)}."""
    folder = tmp_path_factory.mktemp("runs")
    table = small_table(folder / "houses.csv", rows=90)
    options = {"regression": ["--data", str(table), "--target", "price"], "classification": ["--data", "breast-cancer"]}
    for name, data in options.items():
        assert main([*MEAN_FIELD, *data, *SMALL, "--no-baseline", "--out", str(folder / name)]) == 0
    return {name: (folder / name, RunFolder(folder / name).recipe.load()) for name in options}


def compared(run, frame, tmp_path, capsys, *more):
    """(exit code, what was printed) of a comparison with a file."""
    frame.to_csv(tmp_path / "mine.csv", index=False)
    arguments = ["compare", str(run), str(tmp_path / "mine.csv"), "--out", str(tmp_path / "c.html"), "--quiet", *more]
    code, told = main(arguments), capsys.readouterr()
    return code, told.out + told.err


def test_numbers_have_the_scores_of_their_normal(runs, tmp_path, capsys):
    run, data = runs["regression"]
    y, rng = data.y_test.double().numpy(), np.random.default_rng(0)
    frame = pd.DataFrame({"row": data.index_test, "mean": y + rng.normal(0, y.std(), len(y)), "sd": y.std()})
    code, told = compared(run, frame.sample(frac=1, random_state=0), tmp_path, capsys)  # in any order, by their rows
    nll = -stats.norm(frame["mean"], frame["sd"]).logpdf(y).mean()
    assert code == 0 and f"{nll:.3g} [" in told.split("Metrics on the same test rows")[1].splitlines()[3]
    assert "is a file of predictions" in told and str(tmp_path / "mine.csv") in (tmp_path / "c.html").read_text()


def test_classes_have_the_scores_of_their_probabilities_and_tables_are_written_for_a_paper(runs, tmp_path, capsys):
    run, data = runs["classification"]
    p = np.random.default_rng(0).uniform(0.1, 0.9, len(data.y_test))
    frame = pd.DataFrame(dict(zip((f"p({name})" for name in data.schema.classes), (1 - p, p), strict=True)))
    value = f"{log_loss(data.y_test, np.c_[1 - p, p]):.3g}"
    for option, cell in {"--markdown": f"| {value} [", "--latex": f"& {value} ["}.items():
        code, told = compared(run, frame, tmp_path, capsys, option)
        assert code == 0 and next(line for line in told.splitlines() if line.startswith(("| nll ", "nll "))).count(cell)
        (tmp_path / "c.html").unlink()
    assert "\\toprule" in told and r"\%" in told


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda frame: frame.drop(columns="sd"), "no column 'sd'; it needs mean, sd"),
        (lambda frame: frame[1:], "test rows: give one for each in their order, or a column 'row'"),
        (lambda frame: frame.assign(sd=0.0), "row 0 is missing, or has not a mean and an sd above 0: [1.0, 0.0]"),
        (lambda frame: frame.assign(mean="x"), "row 0 is missing, or has not a mean and an sd above 0: [nan, 1.0]"),
        (lambda frame: frame.assign(row=3), "a number stands twice in the column 'row'"),
        (lambda frame: frame.assign(row=range(10**6, 10**6 + len(frame))), "has not a mean and an sd above 0"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_in_one_line(runs, tmp_path, capsys, change, said):
    run, data = runs["regression"]
    frame = pd.DataFrame({"mean": np.ones(len(data.y_test)), "sd": 1.0})
    code, told = compared(run, change(frame), tmp_path, capsys)
    assert code == 2 and said in told and told.count("\n") == 1 and not (tmp_path / "c.html").exists()
    assert main(["compare", str(tmp_path / "none.csv"), str(tmp_path / "none.csv"), "--quiet"]) == 2
    assert "none.csv" in capsys.readouterr().err
    assert main(["compare", str(run), str(tmp_path / "none.csv"), "--quiet"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'none.csv'}: no such file")
