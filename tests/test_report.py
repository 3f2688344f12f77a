"""Reports say what their numbers say, hold everything they show, and escape what a user typed."""

import dataclasses
import re

import numpy as np
import pytest
from matplotlib.figure import Figure as Page

from bnn_pyro.reports.page import Picture, read_texts, run_card, run_html
from bnn_pyro.reports.ranking import Ranking, ranked
from bnn_pyro.reports.tables import RunFacts, difference, estimate, plain_table, run_table, told_headlines
from bnn_pyro.runs.compare import show_comparison

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
RUN = dataclasses.replace(
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


NLL = "nll: A is better than B (paired difference -0.15 nats, 95 % interval [-0.2, -0.1])."


@pytest.mark.parametrize(
    ("name", "low", "high", "verdict", "words"),
    [
        ("nll", -0.2, -0.1, "better", [NLL]),
        ("error", 0.1, 0.2, "worse", ["error: A is worse than B (paired difference +15.00 pp, 95 % interval [+"]),
        ("nll", -0.1, 0.0, "no clear difference", ["nll: A is not clearly different from B"]),
        ("accuracy", 0.1, 0.2, "better", []),
        ("accuracy", -0.2, -0.1, "worse", []),
    ],
)
def test_verdict_follows_the_interval_and_the_direction(name, low, high, verdict, words):
    found = {name: (low + high) / 2, f"{name}_low": low, f"{name}_high": high}
    assert difference(found, name, "classification").verdict == verdict
    sentences = told_headlines("A", "B", found, "classification")
    assert len(sentences) == len(words) and all(s.startswith(w) for s, w in zip(sentences, words, strict=True))


def test_numbers_are_rounded_as_their_kind_and_nominal_metrics_have_no_verdict():
    found = {"coverage_95": -0.1, "coverage_95_low": -0.2, "coverage_95_high": -0.05}
    assert difference(found, "coverage_95", "regression") == ("-10.00 pp", "[-20.00, -5.00]", "")
    error = estimate({"error": 0.0142, "error_low": 0.012, "error_high": 0.0166}, "error")
    assert error == ("1.42 %", "[1.20, 1.66]", "")
    assert estimate({"rmse": 53.219, "rmse_low": 49.0, "rmse_high": 12345.6}, "rmse") == ("53.2", "[49, 12,346]", "")
    assert estimate({}, "rmse") is None
    assert plain_table(["", "a"], [["x", None], ["yy", 1]]) == "    a\nx   –\nyy  1"


def test_a_report_says_what_was_run_and_found_is_self_contained_and_escaped():
    html = run_html(RUN, [PICTURE])
    for words in ("0.25", "[0.2, 0.31]", "0.4", "-0.15", "[-0.2, -0.05]", "better", "f00d", "hidden 8/4", "1.2 s"):
        assert words in html, words
    assert "train --config runs/a/config.json" in html and "One seed and one split" in html
    cold = {**RUN.recipe, "inference_settings": {"temperature": 0.1}}
    assert "Temperature" not in html and "Temperature 0.1" in run_html(dataclasses.replace(RUN, recipe=cold), [])
    assert "<b>scikit-learn</b>" not in html and "&lt;b&gt;scikit-learn" in html
    assert not re.findall(r"(?:src|href)=\"(?!data:image/png;base64,)", html) and "http" not in html.replace(
        "https://", ""
    )
    assert html.count("data:image/png;base64,iVBOR") == 1 and 'alt="A title"' in html
    assert 'name="viewport"' in html and "@media print" in html


def test_card_has_front_matter_from_the_metrics():
    card = run_card(RUN)
    front, body = card.split("---\n")[1:3]
    assert "library_name: pyro" in front and "- type: nll\n      value: 0.25" in front
    assert "nll: mean-field (svi) is better than mlp (map)" in body
    lines = [line for line in card.splitlines() if line.startswith("|")]
    assert lines[0] == "| metric | mean-field (svi) | mlp (map) | difference |" and lines[1] == "|---|---|---|---|"
    assert "| nll | 0.25 [0.2, 0.31] | 0.4 [0.3, 0.5] | -0.15 [-0.2, -0.05] better |" in lines


BAD = {"level": "bad", "about": "overall", "sentence": "Not converged: R-hat is 1.2 <at most>. Try more draws."}
FINE = {"level": "good", "about": "divergences", "sentence": "No transition diverged."}


def test_chains_that_have_not_converged_are_the_first_thing_to_read_and_others_one_sentence():
    run = dataclasses.replace(RUN, convergence={"verdicts": [BAD, FINE]})
    html, card = run_html(run, []), run_card(run)
    assert html.index("<b>Problem</b>") < html.index("Not converged") < html.index("On 300 test rows")
    assert "&lt;at most&gt;" in html and "diagnose runs/a" in html and "No transition diverged" not in html
    assert card.index("**Problem.** Not converged") < card.index("## Use")
    assert "Problem  Not converged" in run_table(run) and "`diagnose runs/a`" in run_table(run)

    good = {**BAD, "level": "good", "sentence": "The chains agree."}
    run = dataclasses.replace(RUN, convergence={"verdicts": [good, FINE]})
    html = run_html(run, [])
    assert '<p class="under">The chains agree.</p>' in html and html.index("On 300 test rows") < html.index("chains ag")
    assert "verdict-good" not in html.split("</style>")[1] and "The chains agree" not in run_table(run)
    assert "chains agree" not in run_html(RUN, []), "no chains, nothing said"


def test_a_comparison_has_its_rankings_and_differences_to_the_first():
    ranked_ones = ranked({"a": np.zeros(3), "b": np.ones(3)})
    ranking = Ranking("Ranking by PSIS-LOO", "A sentence.", ranked_ones, [("c", "<why>")])
    _, html = show_comparison([BASELINE, RUN], {RUN.label: RUN.differences}, [ranking], [])
    assert "-0.15" in html and "nll: mean-field (svi) is better than mlp (map)" in html
    assert html.index("Ranking by PSIS-LOO") < html.index("Metrics on the same test rows")
    assert html.index('scope="row">b<') < html.index('scope="row">a<') and "&lt;why&gt;" in html and "-3.0" in html


def test_every_figure_has_a_sentence():
    for words in read_texts("figures").values():
        assert all(len(w["sentence"]) > 40 and w["sentence"].endswith(".") and w["title"] for w in words.values())
