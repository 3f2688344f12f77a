"""Reports say what their numbers say, hold all that they show, escape what a user typed; and which figures apply."""

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure as Page
from pictures import SCHEMA, chains, clean_matplotlib, guided, random  # noqa: F401 (a fixture)

import bnn_pyro as bp
from bnn_pyro.datasets.dataset import Dataset, Schema
from bnn_pyro.reports.page import Picture, read_texts, run_card, run_html
from bnn_pyro.reports.ranking import ranked, ranking_table
from bnn_pyro.reports.summary import run_table
from bnn_pyro.reports.tables import RunFacts, Section, as_text, difference, estimate, headline_differences
from bnn_pyro.run import main
from bnn_pyro.runs.compare import show_comparison
from bnn_pyro.runs.figures import Scored, draw_all, figures_of

BASELINE = RunFacts(
    label="mlp (map)",
    folder="runs/a/baseline",
    task="classification",
    recipe={
        "variant": "mlp",
        "variant_settings": {"hidden": [8, 4]},
        "inference": "map",
        "inference_settings": {"epochs": 3},
        "data": {"name": "digits"},
        "seed": 0,
        "num_draws": 5,
    },
    metrics={"error": 0.1, "error_low": 0.05, "error_high": 0.15, "nll": 0.4, "nll_low": 0.3, "nll_high": 0.5},
    environment={},
    provenance={
        "data": "digits",
        "source": "<b>scikit-learn</b>",
        "rows": {"train": 1000, "val": 10, "test": 300},
        "split": {"kind": "random", "seed": 0, "rows": [1000, 10, 300]},
        "fingerprint": "f00d",
        "seconds": 1.25,
        "device": "cpu",
    },
)
DIFFERENCES = {"nll_minus_baseline": -0.15, "nll_minus_baseline_low": -0.2, "nll_minus_baseline_high": -0.05}
RUN = replace(
    BASELINE,
    label="mean-field (svi)",
    folder="runs/a",
    recipe={
        **BASELINE.recipe,
        "variant": "mean-field",
        "inference": "svi",
        "inference_settings": {"epochs": 3, "temperature": 1.0},
    },
    metrics={**BASELINE.metrics, "nll": 0.25, "nll_low": 0.2, "nll_high": 0.31, **DIFFERENCES},
    baseline=BASELINE,
)


PICTURE = Picture.of("p", Page(figsize=(1, 1)).add_subplot(), "A title", "A sentence.")


@pytest.mark.parametrize(
    ("name", "low", "high", "verdict", "words"),
    [
        ("nll", -0.2, -0.1, "better", "A beside B, paired differences: nll -0.15 nats [-0.2, -0.1], better."),
        ("error", 0.1, 0.2, "worse", "A beside B, paired differences: error +15.00 pp [+10.00, +20.00], worse."),
        ("nll", -0.1, 0.0, "no clear difference", "nll -0.05 nats [-0.1, +0], no clear difference."),
        ("accuracy", 0.1, 0.2, "better", ""),
        ("accuracy", -0.2, -0.1, "worse", ""),
        ("coverage_95", -0.2, -0.05, "", ""),
    ],
)
def test_verdict_follows_the_interval_and_the_direction(name, low, high, verdict, words):
    """A share that has a nominal value is neither better nor worse."""
    found = {name: (low + high) / 2, f"{name}_low": low, f"{name}_high": high}
    assert difference(found, name, "regression" if "coverage" in name else "classification").verdict == verdict
    if name != "coverage_95":
        assert words in " ".join(headline_differences("A", "B", found, "classification"))
        assert bool(words) == bool(headline_differences("A", "B", found, "classification"))


def test_numbers_are_rounded_as_their_kind():
    error = {"error": 0.0142, "error_low": 0.012, "error_high": 0.0166}
    assert estimate(error, "error") == ("1.42 %", "[1.20, 1.66]", "")
    assert estimate({"rmse": 53.219, "rmse_low": 49.0, "rmse_high": 12345.6}, "rmse") == ("53.2", "[49, 12,346]", "")
    assert estimate({}, "rmse") is None
    assert as_text(pd.DataFrame({"a": {"x": None, "yy": "1"}})) == "    a\nx   –\nyy  1"


def test_a_report_says_what_was_run_and_found_is_self_contained_and_escaped():
    html = run_html(RUN, [PICTURE])
    for words in ("0.25", "[0.2, 0.31]", "0.4", "-0.15", "[-0.2, -0.05]", "better", "f00d", "hidden 8/4", "1.2 s",
                  "train --config runs/a/config.json", "One seed and one split"):  # fmt: skip
        assert words in html, words
    more = {"seed": 0, "module": {"class": "Net", "parameters": {"layer.weight": [3, 2]}}}
    html_of_more = run_html(replace(RUN, provenance={**RUN.provenance, **more}), [])
    assert "<dt>seed</dt><dd>0</dd>" in html_of_more and "class Net" in html_of_more
    cold = {**RUN.recipe, "inference_settings": {"temperature": 0.1}}
    assert "Temperature" not in html and "Temperature 0.1" in run_html(replace(RUN, recipe=cold), [])
    assert "<b>scikit-learn</b>" not in html and "&lt;b&gt;scikit-learn" in html
    assert not re.findall(r"(?:src|href)=\"(?!data:image/png;base64,)", html) and "http:" not in html
    assert html.count("data:image/png;base64,iVBOR") == 1 and 'alt="A title"' in html


@pytest.mark.parametrize(
    ("coverage", "words"),
    [
        ((0.7, 0.5), "90 % intervals hold 70 % of 300 test rows: too narrow"),
        ((0.89, 0.95), "about right; 50 % intervals hold 95 % of 300 test rows: too wide."),
        ((0.89, 0.52), ""),
    ],
)
def test_intervals_that_do_not_hold_are_said_in_the_first_box_with_what_to_do(coverage, words):
    numbers = {"rmse": 1.0, "rmse_low": 0.9, "rmse_high": 1.1, "coverage_95": 0.9}
    numbers |= dict(zip(("coverage_90", "coverage_50"), coverage, strict=True))
    page = run_html(replace(RUN, task="regression", metrics=numbers, baseline=None), [])
    assert words in page and ("`calibrate runs/a`" in page) == bool(words)


def test_inputs_of_another_kind_that_look_familiar_are_said_first():
    noise = {"ood_noise_total_entropy": 0.04, "ood_noise_total_entropy_low": 0.02, "ood_noise_total_entropy_high": 0.07}
    run = replace(RUN, metrics=RUN.metrics | noise)
    sentence, html = "noise gets more certain predictions than the test rows", run_html(run, [])
    assert all(sentence in text for text in (html, run_table(run), run_card(run)))
    assert html.index(sentence) < html.index("paired difference")
    assert not replace(run, metrics=run.metrics | {"ood_noise_total_entropy_high": 0.51}).worries


def test_card_has_front_matter_from_the_metrics():
    card = run_card(RUN)
    assert "library_name: pyro" in card and "- type: nll\n      value: 0.25" in card.split("---\n")[1]
    assert "|  | mean-field (svi) | mlp (map) | difference |\n| --- | --- | --- | --- |\n" in card
    assert "| nll | 0.25 [0.2, 0.31] | 0.4 [0.3, 0.5] | -0.15 [-0.2, -0.05] better |" in card


BAD = {"level": "bad", "about": "overall", "sentence": "Not converged: R-hat is 1.2 <at most>. Try more draws."}
FINE = {"level": "good", "about": "divergences", "sentence": "No transition diverged."}


def test_chains_that_have_not_converged_are_the_first_thing_to_read_and_others_one_sentence():
    run = replace(RUN, convergence={"verdicts": [BAD, FINE]})
    html, card = run_html(run, []), run_card(run)
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


def test_a_comparison_has_its_rankings_and_differences_to_the_first():
    ranking = ranking_table(ranked({"a": np.zeros(3), "b": np.ones(3)}))
    section = Section("Ranking by PSIS-LOO", "A sentence.", ranking, ["c: <why>"])
    _, html = show_comparison([BASELINE, RUN], {RUN.label: RUN.differences()}, [section])
    assert "-0.15" in html and "mean-field (svi) beside mlp (map), paired differences: nll" in html
    assert html.index("<th>b</th>") < html.index("<th>a</th>") and "&lt;why&gt;" in html and "-3.0" in html


# -- figures -----------------------------------------------------------------------------------------------------------
def scene(posterior, schema=SCHEMA):
    x, y = random(6, *schema.input_shape), torch.arange(6) % 3
    data = Dataset("three", schema, x, y, x[:0], y[:0], x, y)
    return Scored(posterior, data, 4, bp.predict(posterior, x, num_draws=4))


EFFECTS = "permutation-importance partial-dependence"
SURE = "reliability confidence-histogram selective-risk confusion-matrix"
IMAGES = Schema("classification", (1, 8, 8), ("a", "b", "c"))


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        (Schema("regression", (3,)), f"predicted-observed calibration {EFFECTS}"),
        (Schema("classification", (3,), ("a", "b", "c")), f"softmax-draws {SURE} {EFFECTS}"),
    ],
)
def test_figures_of_several_features(schema, wanted):
    assert list(figures_of(scene(guided(4, schema=schema), schema))) == wanted.split()


def test_inputs_from_elsewhere_are_drawn_and_old_figures_removed(tmp_path):
    few = ("reliability", "entropy-histograms", "outside-letters")  # drawing takes most of the time
    inside = scene(guided(4, schema=IMAGES), IMAGES)
    outside, x = replace(inside, outside={"letters": inside.prediction}), inside.data.x_test
    (tmp_path / "mine.png").write_bytes(b"mine")
    figures = figures_of(outside, outside, {"letters": x})
    labels = figures["entropy-histograms"]().get_legend_handles_labels()[1]
    assert [label.split(" (mean")[0] for label in labels] == [f"{inside.data.name} (test)", "letters"]
    draw_all({name: draw for name, draw in figures.items() if name in few}, tmp_path)
    assert {p.stem for p in tmp_path.iterdir()} == {*few, "mine"}
    draw_all({"reliability": figures_of(inside, inside)["reliability"]}, tmp_path)
    assert {p.stem for p in tmp_path.iterdir()} == {"reliability", "mine"}


NUTS = [f"--set={s}" for s in ["draws=6", "warmup=6", "chains=2", "compiled=no", "cores=1", "max_tree_depth=3"]]
NUTS += ["--inference=nuts", "--no-baseline"]
#: Arguments of `train`, and the figures of the report.
REPORTS = {
    "images": (
        ["mean-field", "--data", "digits", "--limit", "150", "--epochs", "3"],
        f"uncertain-images {SURE} entropy-histograms outside-uniform-noise outside-gaussian-noise training-curves",
    ),
    "maps": (
        ["mean-field", "--data=breast-cancer", "--features=mean radius,mean texture", *NUTS],
        f"decision-boundary epistemic-map softmax-draws {SURE} threshold-curves {EFFECTS} growing-ensemble transitions",
    ),
    "curve": (
        ["mean-field", "--data=toy-curve", "--no-baseline", "--inference=sghmc", "--epochs=60", "--set=chains=2"],
        "predictive-band predictive-band-far predicted-observed calibration growing-ensemble sampler-trace",
    ),
}


@pytest.mark.parametrize("name", REPORTS)
def test_train_draws_every_figure_that_applies(name, tmp_path):
    argv, figures = REPORTS[name]
    small = ["--hidden", "4", "--num-draws", "4", "--device", "cpu", "--quiet", "--out", str(tmp_path)]
    assert main(["train", *argv, *small]) == 0
    assert {p.name for p in (tmp_path / "figures").iterdir()} == {f"{figure}.png" for figure in figures.split()}
    assert (tmp_path / "report.html").read_text().count("data:image/png;base64,iVBOR") == len(figures.split())


def test_every_figure_of_a_report_has_a_sentence_and_is_drawn_by_a_command():
    for words in read_texts("figures").values():
        assert all(len(w["sentence"]) > 40 and w["sentence"].endswith(".") and w["title"] for w in words.values())
    drawn = {
        figure.split("-uniform")[0].split("-gaussian")[0] for _, names in REPORTS.values() for figure in names.split()
    }
    elsewhere = {"pruning", "signal-to-noise", "reliability-recalibrated", "calibration-recalibrated", "rootogram"}
    elsewhere |= {"survival-curve"}
    tests = "test_pruning, test_compare_files, test_counts, test_times"
    assert drawn | elsewhere == set(read_texts("figures")["report"]), f"and by {tests}"
