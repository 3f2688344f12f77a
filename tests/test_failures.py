"""A bad fit is called failed, by the exit code too; a good one, and noise, are not. Rows that have changed are seen."""

import json
import math
import re
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import JUDGES
from pyro.distributions import Normal
from refused import refuses
from run_folders import small_table
from scipy.stats import binom, kstest
from test_calibration import untrained
from test_conformal import LEVEL

import bnn_pyro as bp
from bnn_pyro.calibration import Adaptive, Conformal, martingale, monitor, threshold
from bnn_pyro.calibration.shift import classifier_p, conformal_p, epistemic_p
from bnn_pyro.diagnostics import failures
from bnn_pyro.diagnostics.failures import MARGINS, failure, is_worse
from bnn_pyro.reports.tables import RunFacts

pytestmark = pytest.mark.usefixtures("quick", "judged")
FEW = ["--num-draws", "20", "--device", "cpu", "--no-baseline"]
LINEAR = ["--set", "hidden=", "--inference", "map", "--epochs", "400", "--lr", "0.05"]


@pytest.fixture
def judged(monkeypatch, unjudged):
    for module in JUDGES:
        monkeypatch.setattr(f"bnn_pyro.{module}.failure", failure)
    monkeypatch.setattr(RunFacts, "exit_code", unjudged)


@pytest.fixture
def houses(tmp_path):
    return ["--data", str(small_table(tmp_path / "houses.csv", rows=120)), "--target", "price"]


def differences(num, generator, heavy):
    """d of the base rates of one set of rows and of a bootstrap sample of them, as two fits that learned nothing."""
    y = generator.standard_t(4, 20 * num) if heavy else generator.normal(size=20 * num)
    train, rows = y[num:], y[:num]
    other = generator.choice(train, len(train))
    nll = [0.5 * ((rows - by.mean()) / by.std()) ** 2 + math.log(by.std()) for by in (train, other)]
    yield "nll", nll[1] - nll[0]
    yield "square", ((rows - other.mean()) ** 2 - (rows - train.mean()) ** 2) / train.var()
    p, q = (y[num:] < -0.5).mean(), (other < -0.5).mean()
    yield "nll", np.where(rows < -0.5, math.log(p / q), math.log((1 - p) / (1 - q)))
    even = generator.random(num) < 0.5  # two classes as frequent: either is called
    yield "error", even * 1.0 - ~even


@pytest.mark.parametrize("heavy", [False, True], ids=["normal", "student"])
def test_noise_is_no_failure(heavy, num=30):
    generator, alarms, trials = np.random.default_rng(0), np.zeros(4), 300
    for _ in range(trials):
        alarms += [is_worse(d, MARGINS[what]) for what, d in differences(num, generator, heavy)]
    assert alarms.max() / trials < 0.01, alarms


def test_a_few_rows_that_are_far_off_do_not_hide_the_others():
    d = np.full(40, 0.5) + 0.2 * np.random.default_rng(0).normal(size=40)
    for worse, not_worse in ((d, d - 0.45), (np.r_[d, [1e30, math.inf]], np.r_[np.zeros(40), 1e30]), (d * 1e30, d[:2])):
        assert is_worse(worse, 0.1) and not is_worse(not_worse, 0.1)


def test_fewer_rows_than_a_test_of_signs_needs_show_nothing():
    wrong = np.ones(9)
    wrong[0] = 0
    assert not any(is_worse(d, 0.02) for d in (wrong, np.ones(13), np.array([0.8, 0.8 + 1e-7])))
    assert is_worse(np.ones(14), 0.02)


def test_a_bad_fit_is_exit_code_3_and_said_everywhere(houses, tmp_path, command):
    out = tmp_path / "run"
    printed = command("train", "mean-field", "--epochs", 1, *houses, *FEW, "--out", out, code=3)
    sentence = json.loads((out / "metrics.json").read_text())["failed"]
    assert re.search("84 training rows the .* of the training targets; .*--epochs", sentence)
    for text in (printed, (out / "report.html").read_text(), (out / "README.md").read_text()):
        flat = " ".join(text.replace("&#39;", "'").split())
        assert sentence in flat and flat.index("Failed") < flat.rindex("nll")
    assert "Failed" in command("evaluate", out, code=3)
    assert f"Problem The fit failed: {sentence[:40]}" in " ".join(command("diagnose", out, "--no-netcdf").split())


def test_noise_that_was_learned_is_no_matter_of_more_epochs_and_a_problem_on_test_rows_alone(
    tmp_path, command, monkeypatch
):
    out, file = tmp_path / "run", tmp_path / "t.csv"
    pd.DataFrame(np.random.default_rng(0).normal(size=(200, 4)), columns=[*"abcy"]).to_csv(file, index=False)
    train = ["train", "mlp", "--inference=mle", "--hidden=50,50", "--epochs=600", "--lr=0.02", "--set=patience=0"]
    words = "knowing nothing: .*it has learned the noise .* early stopping .--set patience=50., fewer --epochs or fewer"
    assert re.search(f"Failed .*{words}", " ".join(command(*train, "--data", file, *FEW, "--out", out, code=3).split()))
    monkeypatch.setattr("bnn_pyro.runs.evaluate.failure", lambda *_, **__: None)
    for text in (command("evaluate", out, code=4), (out / "report.html").read_text(), (out / "README.md").read_text()):
        assert re.search(f"Predictions of the test rows are worse than {words}.* rmse", " ".join(text.split()))
    assert "Problem" in (out / "report.html").read_text()


def test_a_good_fit_is_none_and_weights_that_are_not_finite_are(houses, tmp_path, command):
    out = tmp_path / "run"
    train = ["train", "mean-field", *houses, *FEW, *LINEAR, "--conformal", "0.8", "--out", out]
    assert not re.search("Failed|Problem", command(*train) + (out / "report.html").read_text())
    assert "failed" not in json.loads((out / "metrics.json").read_text())
    frame, other = pd.read_csv(houses[1])[:25], tmp_path / "other.csv"
    for factor in (1, 1000):
        frame.assign(area=factor * frame.area).to_csv(other, index=False)
        said = command("evaluate", out, "--data", other, code=3 * (factor > 1))
        assert said.startswith("Failed: predictions are worse than knowing nothing: on 25 new rows the") is (factor > 1)
        assert ("failed" in json.loads((out / "metrics-other.json").read_text())) is (factor > 1)
    assert "in other units" in said
    frame.assign(area=1.02 * frame.area).to_csv(other, index=False)
    said = " ".join(command("evaluate", out, "--data", other).split())
    assert said.startswith("90 % intervals hold ") and "of these 25 rows: too narrow" in said
    assert "These 25 rows are predicted clearly worse than the run's own test rows (nll " in said
    Path(houses[1]).rename(other.with_name("moved.csv"))
    assert not command("evaluate", out, "--data", other).startswith("Failed"), "there is nothing to compare with"
    other.with_name("moved.csv").rename(houses[1])
    posterior = bp.load(out).posterior
    lost = {site: value.clone() for site, value in posterior.chains.items()}
    next(iter(lost.values()))[0, 0] = math.nan
    replace(posterior, chains=lost).save(out)
    (out / "calibration.json").unlink()  # of the posterior before
    for text in (command(*train, "--resume", code=3), (out / "report.html").read_text()):
        assert "1 of 1 draws have weights that are not finite" in text
    assert list(json.loads((out / "metrics.json").read_text())) == ["failed"]


def test_another_problem_is_exit_code_4_and_a_sweep_names_it(houses, tmp_path, command, no_figures):
    spec, out = tmp_path / "s.toml", tmp_path / "sweep"
    recipe = '[recipes.{}]\nvariant = "mean-field"\ninference = "nuts"\nnum_draws = 5\nbaseline = false\n'
    recipe += "variant_settings = {{ hidden = [] }}\ninference_settings = {{ chains = 2, draws = {}, warmup = 100 }}\n"
    data = f'[data.houses]\nname = "{houses[1]}"\ntarget = "price"\n'
    spec.write_text(data + recipe.format("short", 8) + recipe.format("long", 400))
    said = command("sweep", spec, "--out", out, "--cores", 1)  # 0: both count
    problems = {fit["recipe"]: fit["problem"] for fit in json.loads((out / "sweep.json").read_text())["fits"]}
    assert not problems["long"] and "too few to tell" in problems["short"] and said.count("Problem") == 1
    for text in (said, (out / "sweep.html").read_text()):
        assert problems["short"] in text
    for name, code in (("short", 4), ("long", 0)):
        assert ("Problem" in command("evaluate", out / f"{name}-houses-seed0-split0", code=code)) is bool(code)


def test_a_sweep_goes_on_and_compare_says_which(houses, tmp_path, command, no_figures):
    spec = tmp_path / "s.toml"
    recipe = '[recipes.{}]\nvariant = "mean-field"\ninference = "{}"\nnum_draws = 5\nbaseline = false\n'
    recipe += "variant_settings = {{ hidden = [] }}\ninference_settings = {{ epochs = {}, lr = 0.05 }}\n"
    data = f'[data.houses]\nname = "{houses[1]}"\ntarget = "price"\n'
    spec.write_text(data + recipe.format("bad", "svi", 1) + recipe.format("good", "map", 400))
    out = tmp_path / "sweep"
    for _ in range(2):  # nothing is made again
        said = command("sweep", spec, "--out", out, "--cores", 1, code=1)
        fits = {fit["recipe"]: fit for fit in json.loads((out / "sweep.json").read_text())["fits"]}
        assert fits["bad"]["status"] == "failed" and "knowing nothing" in fits["bad"]["error"]
        assert fits["good"]["status"] == "finished" and "metrics" not in fits["bad"]
        assert "failed: bad-houses-seed0-split0: predictions" in said
    runs = [out / fits[name]["name"] for name in ("good", "bad")]
    text, html = command("compare", *runs), (runs[0] / "comparison.html").read_text()
    assert "its fit failed" in text and "Failed" in html
    assert text.index("Failed   bad-houses") < text.index("rmse")
    scores = runs[0] / "metrics.json"
    scores.write_text(json.dumps(json.loads(scores.read_text()) | {"failed": "a row is not finite"}))
    verdict = {"level": "bad", "about": "overall", "sentence": "Not converged: R-hat."}
    (runs[0] / "convergence.json").write_text(json.dumps({"statistics": {}, "verdicts": [verdict]}))
    for words in ("a row is not finite", "Not converged: R-hat."):  # which its own evaluation says
        assert f"good-houses-seed0-split0: {words}" in " ".join(command("compare", *runs).split())
        scores.write_text(json.dumps({k: v for k, v in json.loads(scores.read_text()).items() if k != "failed"}))


NET, SAMPLER = {"entry_settings": {"hidden": [50, 50]}}, {"warmup": 9, "epochs": 9, "patience": 50, "lr": 0.1}
EPOCHS, LONGER = NET | {"method_settings": {"epochs": 9, "patience": 0}}, "a longer warm-up (--set warmup=…)"
#: What is worse, whether it is too certain, provenance, and what alone may help; by errors training rows fit better.
WAYS = (
    ("errors", False, EPOCHS, "early stopping (--set patience=50), fewer --epochs or fewer weights (--hidden 16)"),
    ("errors", False, EPOCHS | {"early_stopping": {}}, "fewer weights (--hidden 16)"),
    ("errors", False, NET | {"method_settings": SAMPLER}, "fewer weights (--hidden 16)"),
    ("nll", True, {"method_settings": SAMPLER, "entry_settings": {"noise": 0.1}}, f"more --noise or {LONGER}"),
    ("nll", False, {"method_settings": SAMPLER}, LONGER),
    ("nll", False, {"schedule": {"epochs": 9, "lr": 0.1}}, "more --epochs or a smaller --lr"),
    ("nll", False, {"method_settings": {"epochs": 999, "lr": 0.1}, "early_stopping": {}}, "a smaller --lr"),
    ("nll", False, {}, "another variant or method"),
)


def test_too_certain_predictions_of_right_means_and_probabilities_of_rare_counts():
    """What validates decides where it suffices, else training rows do."""
    generator = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(300, generator=generator) for _ in range(2))
    y = 3 * x + noise
    kind = bp.Schema("regression", (1,))
    data = bp.Dataset("line", kind, x[:150, None], y[:150], x[150:, None], y[150:], x[:0, None], y[:0])
    entry = bp.MeanField(hidden=(), prior="normal:3", noise=0.1)
    posterior = bp.fit(entry, data, bp.MAP(epochs=300, lr=0.05), progress=False)
    found = failure(posterior, data)
    assert found.finite and "on 150 validation rows the NLL is" in str(found) and "too certain" in str(found)
    for kind, which in {"time": "later", "groups": "of other groups"}.items():
        sentence = str(failure(posterior, replace(data, split={"kind": kind})))
        assert f"they are {which} than the rows that trained" in sentence and "--epochs" not in sentence
    for by, certain, about, words in WAYS:
        way = failures.way_out(replace(posterior, provenance=about), data, by, certain)
        assert way.endswith(f"try {words}"), (about, way)
    assert "150 training rows" in str(failure(posterior, replace(data, x_val=x[:29, None], y_val=y[:29])))
    good = bp.fit(replace(entry, noise=1.0), data, bp.MAP(epochs=300, lr=0.05), progress=False)
    assert failure(good, data) is None
    flags = {"diverging": torch.ones(1, failures.MIN_DRAWS)}
    assert "chain 1 of 1 diverged in every" in str(failure(replace(good, stats=flags), data))
    assert str(failure(replace(good, provenance={"failed": "chain 2 of 4 diverged"}), data)) == "chain 2 of 4 diverged"
    # A Normal of the targets' moments, 1 in 200 of which is 1, has a density of 5.6 at 0.
    y = (torch.arange(400) % 200 == 0).float()
    data = bp.dataset(torch.zeros(400, 1), y, task="counts", split=0, validation=0)
    posterior = bp.fit(bp.MLP(hidden=()), data, bp.MAP(epochs=100, lr=0.05, patience=0), progress=False)
    assert failure(posterior, data) is None


def test_an_outlier_among_the_validation_rows_is_named_and_the_run_is_kept(tmp_path, command):
    """On a log scale the exponential of what is predicted 300 sd away overflows: one row is no reason to lose a fit."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": rng.normal(size=200), "z": rng.normal(size=200)})
    frame["y"] = np.exp(1 + frame["x"] + 0.1 * rng.normal(size=200))
    out, file = tmp_path / "run", tmp_path / "t.csv"
    frame.to_csv(file, index=False)
    row = int(bp.load_data(file, target="y", target_scale="log").index_val[3])
    frame.loc[row - 2, "x"] = 1e6
    frame.to_csv(file, index=False)
    data = ["--data", file, "--target", "y", "--target-scale", "log"]
    command("train", "mean-field", *data, "--hidden", 8, "--epochs", 60, *FEW, "--out", out, code=3)
    failed = json.loads((out / "metrics.json").read_text())
    assert re.search(f"1 validation rows, such as row {row} of t, is not finite", failed["failed"])
    assert failed["nll"] < 9 and "not finite" in (out / "report.html").read_text()


# -- rows over time: levels that adapt, and whether new rows are as those of calibration -------------------------------
def test_adaptive_levels_hold_under_a_drift_that_breaks_split_conformal():
    rng, rounds, batch, rate = np.random.default_rng(10), 300, 10, 0.02
    scale = np.repeat([1.0, 3.0, 0.5], rounds * batch // 3)
    y = torch.tensor((rng.normal(size=rounds * batch) * scale).reshape(rounds, batch))
    prediction = bp.Prediction(Normal(torch.zeros(1, batch), torch.ones(1, batch)))
    conformal, level = Conformal("normalised", np.abs(rng.normal(size=200)).tolist()), LEVEL

    def predict(x, level=None):
        prediction.guarantee = conformal.at(len(x), level=level)
        return prediction

    adaptive, covered = Adaptive(types.SimpleNamespace(conformal=conformal, predict=predict), LEVEL, rate=rate), []
    for targets in y:
        low, high, *_ = adaptive.predict(targets).interval(0.5)  # the level of time, whatever is asked for
        limit = threshold(np.array(conformal.scores), level) if 0 < level < 1 else math.inf * (level - 0.5)
        covered.append(adaptive.update(targets).double())
        assert torch.equal(covered[-1] == 1, targets.abs() <= limit)
        assert torch.equal(covered[-1] == 1, (low <= targets) & (targets <= high))
        level += rate * (LEVEL - covered[-1]).sum().item()
        assert adaptive.now == pytest.approx(level)
    refuses("once", adaptive.update, targets)
    # Gibbs & Candès 2021, proposition 4.1, with steps of a batch: the level stays within one step of [0, 1].
    assert abs(torch.stack(covered).mean() - LEVEL) < (1 + 2 * rate * batch) / (rate * rounds * batch) < 0.03
    assert torch.stack(covered[110:200]).mean() > 0.85
    assert (y[100:200].abs() <= threshold(np.array(conformal.scores), LEVEL)).double().mean() < 0.5


def test_p_values_of_what_is_exchangeable_and_bets_on_others():
    rng, repeats, rate = np.random.default_rng(3), 80, 0.1
    inputs = epistemic = 0
    for k in range(repeats):
        inputs += classifier_p(*(torch.tensor(rng.normal(size=(60, 3))) for _ in range(2)), k)[0] <= rate
        epistemic += epistemic_p(rng.exponential(size=60).tolist(), rng.exponential(size=60))[0] <= rate
    most = binom.ppf(1 - 1e-4, repeats, rate)
    assert epistemic <= most and binom.ppf(1e-4, repeats, rate) < inputs <= most  # an exact test, not a timid one
    p, _ = epistemic_p(range(19), np.array([30.0, 1, 2, 3]))
    assert p == pytest.approx(4 / 23)  # that a new row is the largest of 23
    ranks = conformal_p(rng.normal(size=50).round().tolist(), rng.normal(size=3000).round())
    assert kstest(ranks, "uniform").pvalue > 1e-3 and abs(np.corrcoef(ranks[1:], ranks[:-1])[0, 1]) < 0.08
    # E of the capital is 1: exactly, over all p-values of a step.
    mean = np.mean([np.exp(martingale(np.array([0.01, p])))[1] for p in (np.arange(2000) + 0.5) / 2000])
    assert mean == pytest.approx(np.exp(martingale(np.array([0.01])))[0])
    shifted = conformal_p(rng.normal(size=200).tolist(), rng.normal(2, 1, size=60))
    assert martingale(shifted).max() > math.log(100)


def test_monitor_speaks_of_what_changed():
    posterior, x, y = untrained(rows=torch.zeros(1, dtype=torch.int64))
    calibrated = bp.calibrate(posterior, x[:100], y[:100], num_draws=20)
    for shift, alarm in ((0.0, False), (8.0, True)):
        found = monitor(calibrated, x[:100], x[100:] + torch.tensor([shift / 2, 0, 0]), y[100:] + shift)
        assert [(v.test, v.alarm) for v in found] == [(name, alarm) for name in ("inputs", "epistemic", "targets")]
    assert "a chance of 0.01 if nothing changed" in found[2].sentence
    refuses("the 100 calibration rows", monitor, calibrated, x, x)
    refuses("y is nan at row 0", monitor, calibrated, x[:100], x[100:], y[100:] * math.nan)
    labelled = bp.calibrate(posterior, x[:100], y[:100], groups=["a"] * 100, num_draws=20)  # its scores have no groups
    found = [monitor(one, x[:100], x[100:], y[100:]) for one in (calibrated, labelled)]
    assert found[0] == found[1]
