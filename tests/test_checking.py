"""The command `check`: what it asks of whom, that finished checks are never lost, and what it writes and returns."""

import json
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch

from bnn_pyro import checks as registry
from bnn_pyro import plots
from bnn_pyro.checks import Finding, Outcome
from bnn_pyro.errors import UserError
from bnn_pyro.inference import methods_for
from bnn_pyro.run import main
from bnn_pyro.runs import check as bench
from bnn_pyro.runs import check_page as page
from bnn_pyro.runs import check_pictures as pictures
from bnn_pyro.runs import check_subjects as subjects
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
        finding = Finding("the mean <of w>", 1.0, 0.9, 0.1, 0.3, self.level)
        evidence = {"z": np.linspace(-1, 1, 5)}
        return Outcome("made", self.level, "Two & two.", {"draws": 7}, (finding,), evidence, {"coverage_95": 0.875})


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
        for module in (bench, page):
            monkeypatch.setattr(module, "CHECKS", kinds)

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


def test_a_claim_that_does_not_hold_is_told_by_the_exit_code(checks, tmp_path, capsys):
    checks(made=Made, wrong=Wrong)
    assert check("mean-field", "--out", tmp_path / "out") == 1
    assert "Problem" in capsys.readouterr().out


def test_what_does_not_apply_is_told_and_is_no_fault(checks, tmp_path, capsys):
    checks(made=Made)
    assert check("mlp", "--out", tmp_path / "out") == 0
    assert "Not checked: made: points have no spread" in capsys.readouterr().out and not CALLS
    assert "points have no spread" in (tmp_path / "out/check.html").read_text()


def test_the_full_budget_takes_the_defaults(checks, tmp_path):
    checks(made=Made)
    check("mean-field", "--budget", "full", "--seed", 4, "--out", tmp_path / "out")
    assert CALLS == [("Made", "mean-field", "svi", 100, 4)]


def test_finished_checks_survive_a_stop_and_are_not_made_again(checks, tmp_path, capsys):
    out = tmp_path / "out"
    checks(made=Made, stopped=Stopped)
    assert check("mean-field", "--out", out) == 130
    assert f"--resume --out {out}" in capsys.readouterr().err
    assert list(read(out)["subjects"][0]["outcomes"]) == ["made"] and (out / "check.html").is_file()
    checks(made=Made, stopped=Wrong)
    assert check("mean-field", "--resume", "--out", out) == 1
    assert [name for name, *_ in CALLS] == ["Made", "Wrong"]
    assert list(read(out)["subjects"][0]["outcomes"]) == ["made", "stopped"]


def test_a_check_that_fails_is_told_and_the_next_one_made(checks, tmp_path, capsys):
    out = tmp_path / "out"
    checks(refused=Refused, made=Made)
    assert check("mean-field", "--out", out) == 1
    assert "could not be finished: row 3 of x.csv is not finite" in capsys.readouterr().out
    assert read(out)["subjects"][0]["failed"] == {"refused": "row 3 of x.csv is not finite"}
    checks(refused=Made, made=Made)
    assert check("mean-field", "--resume", "--out", out) == 0, "a failed check is made again"
    assert read(out)["subjects"][0]["failed"] == {} and len(CALLS) == 2


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


def test_a_folder_that_is_not_ours_stays_as_it_is(checks, tmp_path, capsys):
    checks(made=Made)
    (tmp_path / "mine.txt").write_text("mine")
    assert check("mean-field", "--out", tmp_path) == 2 and "is not a check" in capsys.readouterr().err
    assert check("mean-field", "--out", tmp_path / "mine.txt") == 2 and "is a file" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_results_of_something_else_are_not_mixed(checks, tmp_path, capsys):
    out = tmp_path / "out"
    checks(made=Made)
    check("mean-field", "--out", out)
    before = (out / "check.json").read_bytes()
    for args, said in (
        ((), "is a check already"),
        (("--resume", "--budget", "full"), "are of budget quick"),
        (("--resume", "--seed", 1), "are of seed 0"),
        (("--resume", "--hidden", 9), "other variants, methods, data or settings"),
    ):
        assert check("mean-field", *args, "--out", out) == 2
        assert said in capsys.readouterr().err
    assert (out / "check.json").read_bytes() == before
    (out / "check.json").write_text("{")
    assert check("mean-field", "--resume", "--out", out) == 2 and "damaged" in capsys.readouterr().err


def test_without_a_variant_the_whole_zoo(checks, tmp_path, capsys, monkeypatch):
    checks(made=Made)
    out = tmp_path / "out"
    monkeypatch.setattr(subjects.Grounds, "entry", property(lambda grounds: grounds.recipe.entry()))  # untrained
    assert check("--inference", "svi", "--out", out) == 0
    assert [variant for _, variant, *_ in CALLS] == [name for name, kind in ZOO.items() if "svi" in methods_for(kind)]
    printed = capsys.readouterr().out
    assert "covers 95 %" in printed and "88%" in printed
    assert "All" in (out / "check.html").read_text()


def test_figures_are_drawn_of_the_evidence_and_kept(checks, tmp_path, monkeypatch):
    made = pictures.Shown(
        "Title", "Sentence.", ("z",), lambda e: plots.chain_traces({"lp": torch.from_numpy(e["z"])[None]})
    )
    other = pictures.Shown("Other", "Sentence.", ("not there",), lambda e: 1 / 0)
    monkeypatch.setattr(pictures, "SHOWN", {"made": (made, other)})
    checks(made=Made)
    check("mean-field", "--out", tmp_path / "out")
    drawn = read(tmp_path / "out")["subjects"][0]["outcomes"]["made"]["figures_drawn"]
    assert [figure["title"] for figure in drawn] == ["Title"]
    assert (tmp_path / f"out/figures/{drawn[0]['name']}.png").read_bytes().startswith(b"\x89PNG")
    assert "data:image/png;base64" in (tmp_path / "out/check.html").read_text()
