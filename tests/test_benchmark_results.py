"""Results of benchmarks: files are read, those of committed code are kept, and every table can be made of them."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import keep, provenance, tables
from benchmarks.accuracy.tables import sweep_table
from benchmarks.checks.references import RECIPES
from benchmarks.checks.tables import TABLES
from bnn_pyro.checks.reference_posterior import references
from bnn_pyro.files import resolve
from bnn_pyro.run import main
from bnn_pyro.runs.sweep_config import read_sweep_config

ROOT = Path(__file__).parents[1]
SWEEP = """
seeds = [0, 1]
[data.toy-curve]
[recipes.short]
variant = "mlp"
inference_settings = { epochs = 2 }
[recipes.long]
variant = "mlp"
inference_settings = { epochs = 4 }
"""


@pytest.mark.parametrize("path", sorted(ROOT.glob("benchmarks/accuracy/*.toml")), ids=lambda p: p.stem)
def test_sweep_files_are_understood(path):
    if path.stem.startswith("uci") and not resolve(f"uci/{path.stem[4:]}.csv").exists():
        pytest.skip("needs the UCI data")
    assert len({task.recipe_name for task in read_sweep_config(path).tasks}) >= 3


def test_a_sweep_is_kept_and_tabulated(tmp_path, monkeypatch):
    (tmp_path / "small.toml").write_text(SWEEP)
    out = ["--out", str(tmp_path / "sweep"), "--cores", "1", "--quiet"]
    assert main(["sweep", str(tmp_path / "small.toml"), *out]) == 0
    monkeypatch.setattr(keep, "RESULTS", tmp_path)
    path = tmp_path / "sweep" / "sweep.json"
    held = json.loads(path.read_text())
    for commit in ("8c96fb3-dirty", None):
        path.write_text(json.dumps(held | {"facts": held["facts"] | {"commit": commit}}))
        with pytest.raises(SystemExit, match="uncommitted code"):
            keep.main([str(tmp_path / "sweep")])
    path.write_text(json.dumps(held | {"facts": held["facts"] | {"commit": "8c96fb3"}}))
    keep.main([str(tmp_path / "sweep")])
    lines = sweep_table(tmp_path / "sweep_small.json").splitlines()
    assert lines[0].startswith("| toy-curve | fits | RMSE | NLL |")
    assert [line.split(" | ")[:2] for line in lines[2:4]] == [["| short", "2"], ["| long", "2"]]
    assert "commit 8c96fb3" in lines[-1]


def test_references_are_those_that_are_stored():
    assert sorted(RECIPES) == references()
    assert TABLES["references"]().count("\n") == len(RECIPES) + 1


def test_tables_are_replaced_between_their_markers(tmp_path, monkeypatch, capsys):
    page = tmp_path / "docs" / "results" / "page.md"
    page.parent.mkdir(parents=True)
    old, other = (f"<!-- begin {name} -->\nold\n<!-- end {name} -->" for name in ("references", "other"))
    page.write_text(f"a\n{old}\n{other}")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    tables.main([])
    text = page.read_text()
    assert text.startswith("a\n<!-- begin references -->\n\n| reference |") and old not in text
    assert text.endswith(other)
    assert "written: references" in capsys.readouterr().out


def test_figures_of_changed_code_are_not_written(monkeypatch, tmp_path):
    monkeypatch.setattr(provenance, "commit", lambda: "8c96fb3-dirty")
    provenance.check_tree(tmp_path / "any.json")
    with pytest.raises(SystemExit, match="commit what is changed"):
        provenance.check_tree(provenance.RESULTS / "speed.json")


def test_runs_are_kept_beside_each_other(tmp_path):
    held = provenance.Measurements(tmp_path / "results.json", "growth")
    key = {"subject": "map", "value": 100}
    for seconds in (2.0, 1.0):
        held.add(key, {"seconds": seconds}, load=0.5)
    held.add({**key, "value": 400}, {"seconds": 3.0}, load=0.5)
    assert [run["seconds"] for run in held.runs(key)] == [2.0, 1.0]
    assert len(held.lines()) == 2 and held.runs({**key, "value": 1}) == []
    assert "load 0.5 to 0.5" in provenance.source(held.lines())
    assert provenance.Measurements(tmp_path / "none.json", "growth").lines() == []
