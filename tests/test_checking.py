"""The command `check`: what it asks of whom, that finished checks are never lost, and what it writes and returns."""

import json
from dataclasses import dataclass
from typing import ClassVar

import pytest

from bnn_pyro import checks as registry
from bnn_pyro.checks import Finding, Outcome
from bnn_pyro.errors import UserError
from bnn_pyro.inference import methods_for
from bnn_pyro.reports.page import read_texts
from bnn_pyro.run import main
from bnn_pyro.runs import check as bench
from bnn_pyro.runs.diagnose import FIGURES as DIAGNOSIS_FIGURES
from bnn_pyro.zoo import ZOO

CALLS: list = []


@dataclass(frozen=True)
class Made:
    """A check that finds what the test tells it to."""

    effort: int = 100
    title: ClassVar[str] = "Made up"
    idea: ClassVar[str] = "What was found beside what was asked for."
    quick: ClassVar = {"effort": 3}
    level: ClassVar[str] = "good"

    def refuses(self, subject):
        return "points have no spread" if subject.converges_to == "point" else ""

    def run(self, subject, *, seed=0, report=None):
        CALLS.append((type(self).__name__, subject.variant, subject.inference, self.effort, seed))
        finding = Finding("the mean <of w>", 1.0, 0.9, 0.1, 0.3, self.level, z=1.0)
        return Outcome("made", self.level, "Two & two.", {"draws": 7}, (finding,), figures={"coverage_95": 0.875})


class Wrong(Made):
    title, level = "Wrong", "bad"


class Stopped(Made):
    title = "Stopped"

    def run(self, subject, *, seed=0, report=None):
        raise KeyboardInterrupt


class Refused(Made):
    title = "Refused"

    def run(self, subject, *, seed=0, report=None):
        raise UserError("row 3 of x.csv is not finite")


@pytest.fixture(autouse=True)
def calls():
    CALLS.clear()


@pytest.fixture
def checks(monkeypatch):
    """Puts these checks in the place of the real ones."""

    def put(**kinds):
        monkeypatch.setattr(registry, "CHECKS", kinds)
        monkeypatch.setattr(bench, "CHECKS", kinds)

    return put


def check(*args):
    return main(["check", *map(str, args), "--quiet"])


def read(out):
    return json.loads((out / "check.json").read_text())


def test_a_check_that_holds(checks, tmp_path, capsys):
    checks(made=Made)
    out = tmp_path / "out"
    assert check("mean-field", "--inference", "nuts", "--hidden", 3, "--set", "chains=2", "--out", out) == 0
    assert CALLS == [("Made", "mean-field", "nuts", 3, 0)]
    printed = capsys.readouterr().out
    assert "Good" in printed and "Two & two." in printed and "claims the exact posterior" in printed
    held = read(out)
    assert held["key"]["plans"][0]["variant_settings"]["hidden"] == [3]
    assert held["key"]["plans"][0]["given"] == {"chains": 2}
    assert held["subjects"][0]["outcomes"]["made"]["check_settings"] == {"effort": 3}
    assert "evidence" not in held["subjects"][0]["outcomes"]["made"]
    html = (out / "check.html").read_text()
    assert "Two &amp; two." in html and "the mean &lt;of w&gt;" in html and "0.300" in html


def test_a_claim_that_does_not_hold_and_what_does_not_apply(checks, tmp_path, capsys):
    """The first is told by the exit code, the second is no fault; the full budget takes the defaults."""
    checks(made=Made, wrong=Wrong)
    assert check("mean-field", "--budget", "full", "--seed", 4, "--out", tmp_path / "out") == 1
    assert "Problem" in capsys.readouterr().out
    assert [(kind, "mean-field", "svi", 100, 4) for kind in ("Made", "Wrong")] == CALLS
    assert check("mlp", "--out", tmp_path / "other") == 0 and len(CALLS) == 2
    assert "Not checked: made: points have no spread" in capsys.readouterr().out
    assert "points have no spread" in (tmp_path / "other/check.html").read_text()


def test_finished_checks_survive_a_stop_and_failed_ones_are_made_again(checks, tmp_path, capsys):
    out = tmp_path / "out"
    checks(refused=Refused, made=Made, stopped=Stopped)
    assert check("mean-field", "--out", out) == 130
    assert f"--resume --out {out}" in capsys.readouterr().err
    subject = read(out)["subjects"][0]
    assert subject["failed"] == {"refused": "row 3 of x.csv is not finite"} and list(subject["outcomes"]) == ["made"]
    assert "could not be finished: row 3 of x.csv is not finite" in (out / "check.html").read_text()
    checks(refused=Refused, made=Made, stopped=Wrong)
    assert check("mean-field", "--resume", "--out", out) == 1
    assert "could not be finished: row 3 of x.csv" in capsys.readouterr().out
    assert [name for name, *_ in CALLS] == ["Made", "Wrong"], "a finished check is not made again"
    checks(refused=Made, made=Made, stopped=Wrong)
    assert check("mean-field", "--resume", "--out", out) == 1
    subject = read(out)["subjects"][0]
    assert subject["failed"] == {} and list(subject["outcomes"]) == ["made", "stopped", "refused"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["mean-feld"], "did you mean 'mean-field'"),
        (["mean-field", "--budget", "large"], "unknown budget 'large'. Valid: full, quick"),
        (["mean-field", "--only", "mad"], "did you mean 'made'"),
        (["mean-field", "--set", "chain=3"], "unknown setting"),
        (["--hidden", "3"], "--hidden needs a variant"),
        (["--inference", "nutz"], "did you mean 'nuts'"),
        (["mean-field", "--resume"], "nothing to resume"),
        (["mean-field", "--data", "none.csv"], "none.csv"),
    ],
)
def test_bad_input_is_one_line(checks, tmp_path, capsys, monkeypatch, args, message):
    checks(made=Made)
    monkeypatch.chdir(tmp_path)
    assert check(*args) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and message in error and "\n" not in error
    assert not CALLS


def test_a_folder_with_something_else_stays_as_it_is(checks, tmp_path, capsys):
    out, mine = tmp_path / "out", tmp_path / "mine.txt"
    checks(made=Made)
    mine.write_text("mine")
    check("mean-field", "--out", out)
    before = (out / "check.json").read_bytes()
    for place, args, said in (
        (tmp_path, (), "is not a check"),
        (mine, (), "is a file"),
        (out, (), "is a check already"),
        (out, ("--resume", "--budget", "full"), "are of budget quick"),
        (out, ("--resume", "--seed", 1), "are of seed 0"),
        (out, ("--resume", "--hidden", 9), "other variants, methods, data or settings"),
    ):
        assert check("mean-field", *args, "--out", place) == 2
        assert said in capsys.readouterr().err
    assert (out / "check.json").read_bytes() == before and {p.name for p in tmp_path.iterdir()} == {"out", "mine.txt"}
    (out / "check.json").write_text("{")
    assert check("mean-field", "--resume", "--out", out) == 2 and "damaged" in capsys.readouterr().err


def test_without_a_variant_the_whole_zoo(checks, tmp_path, capsys, monkeypatch):
    checks(made=Made)
    out = tmp_path / "out"
    monkeypatch.setattr(bench.SubjectSpec, "entry", property(lambda spec: spec.recipe.entry))  # untrained
    assert check("--inference", "svi", "--executor", "here", "--out", out) == 0
    assert [variant for _, variant, *_ in CALLS] == [
        name for name, kind in ZOO.items() if "svi" in methods_for(kind) and name != "my-network"
    ]
    printed = capsys.readouterr().out
    assert "covers 95 %" in printed and "88%" in printed
    assert "All" in (out / "check.html").read_text()


def test_figures_are_drawn_of_the_evidence_and_kept(checks, tmp_path):
    checks(made=Made)  # has no ranks, and no reference
    check("mean-field", "--out", tmp_path / "out")
    drawn = read(tmp_path / "out")["subjects"][0]["outcomes"]["made"]["figures_drawn"]
    assert [figure["title"] for figure in drawn] == ["How far off is each quantity?"]
    assert (tmp_path / f"out/figures/{drawn[0]['name']}.png").read_bytes().startswith(b"\x89PNG")
    assert "data:image/png;base64" in (tmp_path / "out/check.html").read_text()


def test_every_figure_has_its_words_and_every_words_a_figure():
    words = read_texts("figures")
    assert set(bench.FIGURES) == set(words["check"]) and list(DIAGNOSIS_FIGURES) == list(words["diagnose"])
