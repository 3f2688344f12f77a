"""Which figures a report and a comparison show of a run."""

from dataclasses import replace

import pytest
import torch
from pictures import SCHEMA, chains, clean_matplotlib, guided, random  # noqa: F401 (a fixture)

import bnn_pyro as bp
from bnn_pyro import plots
from bnn_pyro.datasets.dataset import Dataset, Schema
from bnn_pyro.reports.page import read_texts
from bnn_pyro.reports.tables import RunFacts
from bnn_pyro.run import main
from bnn_pyro.runs import figures
from bnn_pyro.runs.compare import draw_comparison, short_labels
from bnn_pyro.runs.figures import EvaluatedRun, Outside, draw_all, figures_of


def scene(posterior, schema=SCHEMA):
    x, y = random(6, *schema.input_shape), torch.arange(6) % 3
    data = Dataset("three", schema, x, y, x[:0], y[:0], x, y)
    return EvaluatedRun(posterior, data, 4, bp.predict(posterior, x, num_draws=4))


COMMON = "reliability confidence-histogram selective-risk confusion-matrix"
IMAGES = Schema("classification", (1, 8, 8), ("a", "b", "c"))


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        (Schema("regression", (1,)), "predictive-band predictive-band-far predicted-observed calibration"),
        (Schema("regression", (3,)), "predicted-observed calibration"),
        (Schema("classification", (3,), ("a", "b", "c")), f"softmax-draws {COMMON}"),
        (IMAGES, f"uncertain-images {COMMON}"),
    ],
)
def test_figures_suit_task_and_shape(schema, wanted):
    assert list(figures_of(scene(guided(4, schema=schema), schema))) == wanted.split()


def test_inputs_from_elsewhere_are_drawn_and_old_figures_removed(tmp_path, monkeypatch):
    few = ("reliability", "entropy-histograms", "outside-letters")  # drawing takes most of the time
    monkeypatch.setattr(figures, "figures_of", lambda run: {k: v for k, v in figures_of(run).items() if k in few})
    inside = scene(guided(4, schema=IMAGES), IMAGES)
    inside = replace(inside, baseline=inside.prediction)
    outside = Outside("letters", inside.data.x_test, inside.prediction, inside.prediction)
    (tmp_path / "mine.png").write_bytes(b"mine")
    draw_all(replace(inside, outside=[outside]), tmp_path)
    assert {p.stem for p in tmp_path.iterdir()} == {*few, "mine"}
    draw_all(inside, tmp_path)
    assert {p.stem for p in tmp_path.iterdir()} == {"reliability", "mine"}


def test_a_report_of_a_sampler_shows_its_trace_and_its_growing_ensemble(tmp_path):
    sghmc = replace(chains(random(2, 3, 3, 2)), trace={"kinetic_temperature": [1.0], "log_joint": [-3.0]})
    nuts = replace(chains(random(2, 3, 3, 2)), stats={"lp": random(2, 3)})
    for posterior, last in ((sghmc, "sampler-trace"), (nuts, "transitions")):
        names = list(figures_of(scene(posterior)))
        assert names[-1] == last and "growing-ensemble" in names and "training-curves" not in names
    assert "growing-ensemble" not in figures_of(scene(guided()))
    drawn = draw_all(scene(sghmc), tmp_path)
    assert (tmp_path / "sampler-trace.png").read_bytes() == drawn[-1].png


NUTS = [f"--set={s}" for s in ["draws=6", "warmup=6", "chains=2", "compiled=no", "cores=1", "max_tree_depth=3"]]
SURE = "reliability doubt-calibration confidence-histogram selective-risk confusion-matrix"
#: Arguments of `train`, and the figures of the report.
REPORTS = {
    "images": (
        ["--data", "digits", "--limit", "150", "--epochs", "3"],
        f"uncertain-images {SURE} entropy-histograms outside-uniform-noise outside-gaussian-noise training-curves",
    ),
    "maps": (
        ["--data=breast-cancer", "--features=mean radius,mean texture", "--no-baseline", "--inference=nuts", *NUTS],
        f"decision-boundary epistemic-map softmax-draws {SURE} growing-ensemble transitions",
    ),
    "curve": (
        ["--data", "toy-curve", "--no-baseline", "--inference", "sghmc", "--epochs", "60", "--set=chains=2"],
        "predictive-band predictive-band-far predicted-observed calibration growing-ensemble sampler-trace",
    ),
}


@pytest.mark.parametrize("name", REPORTS)
def test_train_draws_every_figure_that_applies(name, tmp_path, monkeypatch):
    argv, figures = REPORTS[name]
    monkeypatch.setattr("bnn_pyro.runs.figures.SURE", 0.1)
    small = ["--hidden", "4", "--num-draws", "4", "--device", "cpu", "--quiet", "--out", str(tmp_path)]
    assert main(["train", *argv, *small]) == 0
    assert {p.name for p in (tmp_path / "figures").iterdir()} == {f"{figure}.png" for figure in figures.split()}
    assert (tmp_path / "report.html").read_text().count("data:image/png;base64,iVBOR") == len(figures.split())


def test_every_figure_of_a_report_is_drawn_by_a_command():
    drawn = {
        figure.split("-uniform")[0].split("-gaussian")[0] for _, names in REPORTS.values() for figure in names.split()
    }
    assert drawn | {"pruning", "signal-to-noise"} == set(read_texts("figures")["report"]), "and by test_pruning.py"


def test_doubt_is_shown_where_most_rows_are_sure():
    unsure = chains(0.1 * random(1, 3, 3, 2))
    bias = torch.tensor([9.0, 0.0, 0.0]).expand(1, 3, 3)
    assert "doubt-calibration" not in figures_of(scene(unsure))
    assert "doubt-calibration" in figures_of(scene(chains(0.1 * random(1, 3, 3, 2), bias)))


def run(inference, variant="last-layer", seed=0):
    recipe = {"variant": variant, "inference": inference, "seed": seed}
    return RunFacts(f"runs/{variant}-{inference}-{seed}", "", "classification", recipe, {}, {}, {})


def test_runs_are_told_apart_by_as_little_as_it_takes():
    assert short_labels([run("svi"), run("nuts")]) == ["svi", "nuts"]
    assert short_labels([run("svi"), run("svi", "mlp")]) == ["last-layer (svi)", "mlp (svi)"]
    assert short_labels([run("svi"), run("svi", seed=1)])[1] == "last-layer (svi), seed 1"
    assert short_labels([run("svi"), run("svi")]) == ["1: runs/last-layer-svi-0", "2: runs/last-layer-svi-0"]


def test_a_comparison_draws_what_applies():
    x, y = random(6, 2), torch.arange(6) % 3
    data = Dataset("three", SCHEMA, x, y, x[:0], y[:0], x, y)
    posteriors = [chains(random(1, 20, 3, 2, seed=s)) for s in (0, 1)]
    predictions = [bp.predict(p, x, num_draws=20) for p in posteriors]
    pictures = draw_comparison([run("svi"), run("nuts")], posteriors, predictions, data)
    assert [p.name for p in pictures] == ["method-predictions", "weight-posteriors"]
    assert all(p.png.startswith(b"\x89PNG") and p.sentence.endswith(".") for p in pictures)
    row = plots.most_disputed(dict(enumerate(predictions)))
    assert f"total variation {plots.dispute(dict(enumerate(predictions)), row):.3f}" in pictures[0].sentence
    unlike = draw_comparison([run("svi"), run("svi", "mlp")], [posteriors[0], guided(4)], predictions, data)
    assert [p.name for p in unlike] == ["method-predictions"], "weights of two models are not compared"
