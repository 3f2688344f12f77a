"""Reports say what their numbers say, hold all that they show, escape what a user typed."""

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure as Page

from bnn_pyro.doubts import between
from bnn_pyro.reports.page import Picture, run_pages
from bnn_pyro.reports.summary import run_table, summary
from bnn_pyro.reports.tables import RunFacts, as_text, difference, estimate, headline_differences
from bnn_pyro.run import main

pytestmark = pytest.mark.usefixtures("clean_matplotlib")
BASELINE = RunFacts(
    label="mlp (map)",
    folder="runs/a/baseline",
    task="classification",
    recipe={"variant": "mlp", "variant_settings": {"hidden": [8, 4]}, "inference": "map",
            "inference_settings": {"epochs": 3}, "data": {"name": "digits"}, "seed": 0, "num_draws": 5},
    metrics={"error": 0.1, "error_low": 0.05, "error_high": 0.15, "nll": 0.4, "nll_low": 0.3, "nll_high": 0.5},
    environment={},
    provenance={"data": "digits", "source": "<b>scikit-learn</b>", "rows": {"train": 1000, "val": 10, "test": 300},
                "split": {"kind": "random", "seed": 0, "rows": [1000, 10, 300]}, "fingerprint": "f00d",
                "seconds": 1.25, "device": "cpu"},
)  # fmt: skip
RUN = replace(
    BASELINE,
    label="mean-field (svi)",
    folder="runs/a",
    recipe={**BASELINE.recipe, "variant": "mean-field", "inference": "svi",
            "inference_settings": {"epochs": 3, "temperature": 1.0}},
    metrics={**BASELINE.metrics, "nll": 0.25, "nll_low": 0.2, "nll_high": 0.31,
             "nll_minus_baseline": -0.15, "nll_minus_baseline_low": -0.2, "nll_minus_baseline_high": -0.05},
    baseline=BASELINE,
)  # fmt: skip

PICTURE = Picture.of("p", lambda: Page(figsize=(1, 1)).add_subplot(), "A title", "A sentence.")


@pytest.mark.parametrize(("name", "low", "high", "verdict", "words"), [
    ("nll", -0.2, -0.1, "better", ["A beside B, paired differences: nll -0.15 nats [-0.2, -0.1], better."]),
    ("error", 0.1, 0.2, "worse", ["A beside B, paired differences: error +15.00 pp [+10.00, +20.00], worse."]),
    ("accuracy", 0.1, 0.2, "better", []),
    ("accuracy", -0.1, 0.0, "no clear difference", []),
])  # fmt: skip
def test_verdict_follows_the_interval_and_the_direction(name, low, high, verdict, words):
    found = {name: (low + high) / 2, f"{name}_low": low, f"{name}_high": high}
    assert difference(found, name, "classification").verdict == verdict
    sentences = headline_differences("A", "B", found, "classification")
    assert [sentence[: len(start)] for sentence, start in zip(sentences, words, strict=True)] == words


@pytest.mark.parametrize(("predicted", "some"), [(33, True), (35, False)], ids=["one of 5 missed", "none missed"])
def test_a_threshold_is_for_a_rare_class_of_which_some_are_missed(predicted, some):
    rows = {"class_rows": {"no": 295, "yes": 5}, "class_predictions": {"no": 300 - predicted, "yes": predicted}}
    sentences = summary(replace(BASELINE, metrics=BASELINE.metrics | rows))  # 30 are wrong
    assert ("a threshold on P(yes)" in " ".join(sentences)) == some


def test_numbers_are_rounded_as_their_kind_and_nominal_metrics_have_no_verdict():
    found = {"coverage_95": -0.1, "coverage_95_low": -0.2, "coverage_95_high": -0.05}
    assert difference(found, "coverage_95", "regression") == ("-10.00 pp", "[-20.00, -5.00]", "")
    error = {"error": 0.0142, "error_low": 0.012, "error_high": 0.0166}
    assert estimate(error, "error") == ("1.42 %", "[1.20, 1.66]", "")
    assert estimate({"rmse": 53.219, "rmse_low": 49.0, "rmse_high": 12345.6}, "rmse") == ("53.2", "[49, 12,346]", "")
    assert estimate({}, "rmse") is None
    assert as_text(pd.DataFrame({"a": {"x": None, "yy": "1"}})) == "    a\nx   –\nyy  1"


def run_html(run, pictures):
    """The page with blanks and minus signs as they are typed."""
    return run_pages(run, pictures)[0].replace("\u00a0", " ").replace("−", "-")


def test_what_is_doubtful_in_the_data_is_in_the_first_box_and_rows_of_wide_tables_are_explained_below_their_names():
    worse = {f"nll_minus_nothing{end}": 0.1 for end in ("", "_low", "_high")}
    split = {**RUN.provenance["split"], "doubts": ["price: 2.25e+07 in row 9 is far", *"bcdef"]}
    run = replace(RUN, provenance={**RUN.provenance, "split": split}, metrics=RUN.metrics | worse)
    html, _ = run_pages(run, [PICTURE])
    assert "data: price: 2.25e+07 in row 9 is far; b; c; d; e. 1 more" in html and html.count("2.25e+07") == 1
    assert "Next: correct what is named of the data; else more --epochs than " in html
    chains = {**RUN.recipe, "inference_settings": {"epochs": 9, "draws": 100}}
    assert "else more draws than 100 a chain" in run_html(replace(run, recipe=chains), [])
    assert "nll −0.15 nats [−0.2,\u00a0−0.05], better" in html
    assert '<img width="110"' in html and "<th>what it is</th>" in html
    failed = replace(run, metrics={"failed": "NaN"})
    assert "To look at in the data: price" in run_html(failed, []) and "price" in run_table(failed)
    boosting = {"metrics": RUN.metrics, "differences": run.differences(), "about": "trees", "seconds": 1.0}
    wide, _ = run_pages(replace(run, boosting=boosting), [])
    assert "<th>nll<small>how improbable" in wide and "what it is" not in wide


def test_a_report_says_what_was_run_and_found_is_self_contained_and_escaped():
    html, card = run_html(RUN, [PICTURE]), run_pages(RUN, [])[1]
    assert "- type: nll\n      value: 0.25" in card.split("---\n")[1]
    assert "| nll | 0.25 [0.2, 0.31] | 0.4 [0.3, 0.5] | -0.15 [-0.2, -0.05] better |" in card
    for words in ("0.25", "[0.2, 0.31]", "0.4", "-0.15", "[-0.2, -0.05]", "better", "f00d", "hidden 8/4", "1.2 s",
                  "train --config runs/a/config.json", "one seed and one split"):  # fmt: skip
        assert words in html, words
    more = {"seed": 0, "module": {"class": "Net", "parameters": {"layer.weight": [3, 2]}}}
    html_of_more = run_html(replace(RUN, provenance={**RUN.provenance, **more}), [])
    assert "<dt>seed</dt><dd>0</dd>" in html_of_more and "class Net" in html_of_more
    cold = {**RUN.recipe, "inference_settings": {"temperature": 0.1}}
    assert "Temperature" not in html and "Temperature 0.1" in run_html(replace(RUN, recipe=cold), [])
    assert "<b>scikit-learn</b>" not in html and "&lt;b&gt;scikit-learn" in html
    assert not re.findall(r"(?:src|href)=\"(?!data:image/png;base64,)", html) and "http:" not in html
    alone, pair = 'class="wide-figure lone"', [replace(PICTURE, wide=False)] * 2
    assert alone in run_html(RUN, pair[:1]) and alone not in run_html(RUN, pair)  # no hole beside the last figure
    assert html.count("data:image/png;base64,iVBOR") == 1 and 'alt="A title"' in html


@pytest.mark.parametrize(("coverage", "words"), [
    ((0.7, 0.5), "90 % intervals hold 70 % of 300 test rows: too narrow"),
    ((0.89, 0.95), "about right; 50 % intervals hold 95 % of 300 test rows: too wide."),
    ((0.89, 0.52), ""),
])  # fmt: skip
def test_intervals_that_do_not_hold_are_said_in_the_first_box_with_what_to_do(coverage, words):
    numbers = {"rmse": 1.0, "rmse_low": 0.9, "rmse_high": 1.1, "coverage_95": 0.9}
    numbers |= dict(zip(("coverage_90", "coverage_50"), coverage, strict=True))
    page = run_html(replace(RUN, task="regression", metrics=numbers, baseline=None), [])
    assert words in page and ("<code>calibrate runs/a</code>" in page) == bool(words)
    copies = (run_html(replace(RUN, metrics=RUN.metrics | {"rows_that_trained": num}), []) for num in (15, 16))
    assert ["If they are copies, the scores below are too good; keep" in page for page in copies] == [False, True]
    grouped = replace(RUN, provenance=RUN.provenance | {"split": {"kind": "groups"}})
    again = replace(grouped, metrics=RUN.metrics | {"rows_that_trained": 16})
    assert "too good; leave them out" in run_html(again, [])
    y = pd.DataFrame({"y": np.arange(50) ** 2.0})
    leaks = [next(between(pd.DataFrame({"a": a, "b": 0.0}), y)).sentence for a in (y.y, 2 * y.y, y.y**0.5)]
    for doubt, first in (*((leak, True) for leak in leaks), ("is 1 in every row, and tells nothing", False)):
        page = run_html(replace(RUN, provenance=RUN.provenance | {"split": {"doubts": [f"a: {doubt}"]}}), [])
        assert (page.index("To look at in the data: a: ") < page.index("On 300 test rows")) == first
    asked = replace(RUN, provenance=RUN.provenance | {"split": {"doubts": ["a: a missing value?"]}})
    assert "a: a missing value?<" in run_html(asked, [])
    counts = run_html(replace(RUN, task="counts", metrics=numbers | {"coverage_90": 0.97}, baseline=None), [])
    assert "hold 97 % of 300 test rows: those of whole numbers hold more" in counts and "<code>calibrate" not in counts
    recipe = RUN.recipe | {"data": {"name": "t.csv", "target": "price [EUR]"}}
    priced = run_html(replace(RUN, task="regression", metrics=numbers, baseline=None, recipe=recipe), [])
    assert "rmse (EUR) 1 [0.9" in priced and "predictive mean, EUR<" in priced
    several = {"nrmse": 1.0, "targets": {"price": {"coverage_90": coverage[0]}}}
    page = run_html(replace(RUN, task="targets", metrics=several), [])
    assert ("90 % intervals of price hold 70 % of 300 test rows: too narrow." in page) == (coverage[0] == 0.7)


@pytest.mark.parametrize(("sure", "words"), [
    (0.96, "off by more than chance, overconfident on average: ECE 0.2000 is above"),
    (0.84, "off by more than chance, underconfident on average: ECE"),
    (0.9, "off by more than chance: ECE"),
])  # fmt: skip
def test_the_side_of_a_confidence_is_said_and_a_step_names_what_it_corrects(sure, words):
    ends = {"accuracy": 0.9, "accuracy_low": 0.85, "accuracy_high": 0.95, "mean_confidence": sure}
    ece = {"ece": 0.2, "ece_floor": 0.05, "ece_floor_95": 0.1}
    split = {**RUN.provenance["split"], "doubts": ["a: alone tells the target"]}
    run = replace(RUN, metrics=RUN.metrics | ends | ece, provenance={**RUN.provenance, "split": split})
    assert words in (html := run_html(run, []))
    assert "<code>calibrate runs/a --method temperature</code> corrects the probabilities by rows that did not" in html
    lines = [{"covered": 0.9, "size": 2.0}] * 2
    change = {"data": "test rows, every second one", "table": lines, "level": 0.9, "calibration_rows": 150}
    halves = replace(run, metrics=run.metrics | {"if_calibrated": change})
    assert "--method temperature --data FILE` corrects the probabilities" in summary(halves)[-1]


def test_equal_rows_are_said_to_be_likely_where_inputs_have_few_patterns():
    same = RUN.metrics | {"rows_that_trained": 140}
    few, many = (run_html(replace(RUN, metrics=same | {"different_inputs": num}), []) for num in (128, 1200))
    assert "target and all: 140, as is likely of 1,300 rows with 128 different inputs. If they are copies" in few
    assert "target and all: 140. If they are copies" in many


@pytest.mark.parametrize(("ends", "said"), [((-0.4, 0.1), True), ((-0.4, -0.1), False)], ids=["not clear", "better"])
def test_more_epochs_are_offered_where_any_headline_metric_is_not_clearly_better_than_knowing_nothing(ends, said):
    nothing = {f"{name}_minus_nothing{end}": value for name, three in (("nll", (-0.2, -0.3, -0.1)),
               ("error", (-0.2, *ends))) for end, value in zip(("", "_low", "_high"), three, strict=True)}  # fmt: skip
    last = summary(replace(RUN, metrics=RUN.metrics | nothing))[-1]
    assert ("more --epochs than 3, if the training curve still rose in the end; else the inputs may" in last) is said


def test_draws_of_predictions_are_told_from_those_that_are_stored():
    stored = replace(RUN, recipe=RUN.recipe | {"num_draws": 100}, provenance=RUN.provenance | {"stored_draws": 168})
    assert stored.subtitle.endswith("predictions by 100 draws of 168")
    one = replace(stored, recipe=RUN.recipe | {"num_draws": 1})
    assert one.subtitle.endswith("predictions by 1 draw of 168") and RUN.subtitle.endswith("predictions by 5 draws")
    wide = run_html(replace(RUN, boosting={"metrics": RUN.metrics, "differences": {}, "about": "", "seconds": 1.0}), [])
    assert "<small>" in wide and "th:has(small) { min-width: 13.5rem; }" in wide  # room for what rows are


def test_inputs_of_another_kind_that_look_familiar_are_said_first():
    noise = {"ood_noise_total_entropy": 0.04, "ood_noise_total_entropy_low": 0.02, "ood_noise_total_entropy_high": 0.07}
    run = replace(RUN, metrics=RUN.metrics | noise)
    sentence, html = "Predictions for noise are more certain than for the test rows", run_html(run, [])
    assert all(sentence in text for text in (html, run_table(run), run_pages(run, [])[1]))
    assert html.index(sentence) < html.index("paired difference")
    assert not replace(run, metrics=run.metrics | {"ood_noise_total_entropy_high": 0.51}).worries


@pytest.mark.parametrize(("more", "words"), [({"means_outside": 2}, "of 2 test rows"), ({}, None)])
def test_means_that_few_draws_carry_are_a_caution_above_the_scores(more, words):
    run = replace(RUN, metrics=RUN.metrics | more)
    html = run_html(run, [])
    assert [(w["level"], w["about"]) for w in run.worries] == [("caution", "predicted means")] * bool(words)
    assert words is None or html.index(words) < html.index("On 300 test rows")


BAD = {"level": "bad", "about": "overall", "sentence": "Not converged: R-hat is 1.2 <at most>. Try more draws."}
FINE = {"level": "good", "about": "divergences", "sentence": "No transition diverged."}


def test_chains_that_have_not_converged_are_the_first_thing_to_read_and_others_one_sentence():
    run = replace(RUN, convergence={"verdicts": [BAD, FINE]})
    html, card = run_html(run, []), run_pages(run, [])[1]
    assert html.index("<b>Problem</b>") < html.index("Not converged") < html.index("On 300 test rows")
    assert "&lt;at most&gt;" in html and "diagnose runs/a" in html and "No transition diverged" not in html
    assert card.index("**Problem.** Not converged") < card.index("## Use")
    assert "Problem  Not converged" in run_table(run) and "`diagnose runs/a`" in run_table(run)
    several = replace(run, task="targets", baseline=None)  # which `diagnose` refuses
    assert "Not converged" in run_table(several) and "diagnose runs/a" not in run_table(several)
    good = {**BAD, "level": "good", "sentence": "The chains agree."}
    html = run_html(replace(RUN, convergence={"verdicts": [good, FINE]}), [])
    assert html.index("On 300 test rows") < html.index("The chains agree.")
    assert "chains agree" not in run_html(RUN, []), "no chains, nothing said"


EFFECTS = "permutation-importance partial-dependence"
AFTER = "reliability-recalibrated"
SURE = "reliability confidence-histogram selective-risk confusion-matrix"

NUTS = [f"--set={s}" for s in ["draws=6", "warmup=6", "chains=2", "compiled=no", "cores=1", "max_tree_depth=3"]]
NUTS += ["--inference=nuts", "--no-baseline"]
#: Arguments of `train`, and the figures of the report.
SGHMC = ["--inference=sghmc", "--epochs=60", "--set=chains=2", "--set=start=jitter"]
OUTSIDE = "outside-uniform-noise outside-gaussian-noise"
REPORTS = {
    "images": (["mean-field", "--data", "digits", "--limit", "150", "--epochs", "3"],
               f"{SURE} {AFTER} pixel-maps uncertain-images entropy-histograms training-curves {OUTSIDE}"),
    "maps": (["mean-field", "--data=breast-cancer", "--features=mean radius,mean texture", *NUTS],
             f"decision-boundary epistemic-map {SURE} {AFTER} threshold-curves {EFFECTS} growing-ensemble transitions"),
    "curve": (["mean-field", "--data=toy-curve", "--no-baseline", *SGHMC],
              "predictive-band predictive-band-far predicted-observed calibration calibration-recalibrated "
              "growing-ensemble sampler-trace"),
}  # fmt: skip


@pytest.mark.parametrize("name", REPORTS)
def test_train_draws_every_figure_that_applies(name, tmp_path):
    argv, figures = REPORTS[name]
    small = ["--hidden", "4", "--num-draws", "4", "--device", "cpu", "--quiet", "--out", str(tmp_path)]
    assert main(["train", *argv, *small]) == 0
    assert {p.name for p in (tmp_path / "figures").iterdir()} == {f"{figure}.png" for figure in figures.split()}
    assert (tmp_path / "report.html").read_text().count("data:image/png;base64,iVBOR") == len(figures.split())
