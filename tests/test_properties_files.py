"""Whatever became of a run's files: a command uses them or refuses them in one line, runs nothing, damages nothing."""

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import Planted, answer, cases, changed_json, contents, damage, place, planted

import bnn_pyro as bp
from bnn_pyro.posterior import _digest, read_archive

#: What the runs of this file are: quick ones of a guide, of chains, and of a last layer.
RUNS = {
    "svi": ["mean-field", "--epochs", "2", "--hidden", "3"],
    "nuts": ["mean-field", "--inference", "nuts", "--hidden", "3", "--set", "draws=4", "--set", "warmup=4",
             "--set", "chains=2", "--set", "compiled=no", "--set", "cores=1", "--set", "max_tree_depth=3"],
    "laplace": ["last-layer", "--inference", "laplace", "--set", "backbone=RUNS/svi/baseline"],
}  # fmt: skip
COMMON = ["--data", "toy-curve", "--num-draws", "3", "--device", "cpu", "--quiet"]
#: Files that hold numbers to be trusted: a change in one of them is always noticed.
SEALED = ("posterior.pt", "posterior.json")


pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{name: a finished run}, the first of them diagnosed."""
    folder = tmp_path_factory.mktemp("runs")
    for name, options in RUNS.items():
        small = ["--no-baseline"] if name == "nuts" else []
        options = [option.replace("RUNS", str(folder)) for option in options]
        done = answer(["train", *options, *COMMON, *small, "--out", str(folder / name)])
        assert done.code == 0, done.err
    assert answer(["diagnose", str(folder / "nuts"), "--no-netcdf", "--quiet"]).code == 0
    return {name: folder / name for name in RUNS}


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


COMMANDS = {
    "evaluate": ["evaluate", "RUN", "--quiet"],
    "mean weights": ["evaluate", "RUN", "--mean-weights", "--quiet"],
    "prune": ["evaluate", "RUN", "--prune", "--quiet"],
    "predict": ["predict", "RUN", "--input", "toy-curve", "--output", "CASE/p.csv", "--quiet"],
    "compare": ["compare", "RUN", "OTHER", "--out", "CASE/c.html", "--quiet"],
    "resume": ["train", "--resume", "--out", "RUN", "--quiet"],
    "again": ["train", "--config", "RUN/config.json", "--out", "CASE/again", "--quiet"],
    "overwrite": ["train", "--overwrite", "--out", "RUN", *RUNS["svi"], *COMMON],
    "diagnose": ["diagnose", "RUN", "--no-netcdf", "--out", "CASE/d", "--quiet"],
}


@cases(28)
@given(
    data=st.data(),
    name=st.sampled_from(["svi", "svi", "nuts", "laplace"]),
    command=st.sampled_from([*COMMANDS, *[c for c in COMMANDS if c not in ("diagnose", "again")] * 3]),
)
def test_a_damaged_run_is_used_or_refused(runs, data, name, command):
    with place("damaged run") as folder:
        run = folder / "run"
        shutil.copytree(runs[name], run)
        for _ in range(data.draw(st.sampled_from([1, 1, 1, 2]))):
            path = run / data.draw(st.sampled_from([*files(run), *SEALED, "config.json", "config.json"]))
            blob = path.read_bytes() if path.is_file() else b""
            how = data.draw(st.sampled_from(["bytes", "json", "json", "swap", "remove", "code"]))
            if how == "json" and path.suffix == ".json" and blob:
                path.write_bytes(data.draw(changed_json(blob)))
            elif how == "swap":
                path.write_bytes((run / data.draw(st.sampled_from(files(run)))).read_bytes())
            elif how == "remove":
                path.unlink(missing_ok=True)
            elif how == "code":
                path.write_bytes(planted(folder / "executed"))
            else:
                path.write_bytes(data.draw(damage(blob)))
        before = contents(run)
        sealed = all((run / f).is_file() and (run / f).read_bytes() == (runs[name] / f).read_bytes() for f in SEALED)
        here = {"RUN": str(run), "OTHER": str(runs["svi"]), "CASE": str(folder)}
        argv = COMMANDS[command]
        for word, value in here.items():
            argv = [arg.replace(word, value) for arg in argv]
        done = answer(argv)
        if done.code == 2:
            told = ("environment.json", "history.csv") if command == "resume" else ()  # of when it was last run
            before = {k: v for k, v in before.items() if Path(k).name not in told}
            kept = {k: v for k, v in contents(run).items() if k in before}
            assert kept == before, "a failing command changed the run"
        elif command not in ("overwrite", "again", "resume") and not sealed:
            same = all(read_archive(run)[1][k] == read_archive(runs[name])[1][k] for k in ("schema", "provenance"))
            assert same, "an altered posterior was used"
        elif command == "resume":
            bp.load(run)


# -- archives whose checksum was made to fit -------------------------------------------------------------------------
@cases(4)
@given(data=st.data(), name=st.sampled_from(sorted(RUNS)), how=st.sampled_from(["json", "json", "tensors", "code"]))
def test_an_archive_that_was_resealed_is_loaded_or_refused(runs, data, name, how):
    """What someone would do who alters an archive on purpose: nothing in it is executed."""
    with place("resealed archive") as folder:
        blob = (runs[name] / "posterior.pt").read_bytes()
        meta = json.loads((runs[name] / "posterior.json").read_text())
        if how == "json":
            changed = json.loads(data.draw(changed_json(json.dumps(meta).encode())))
            meta = changed if isinstance(changed, dict) else {"format": 1}
        else:
            tensors = torch.load(io.BytesIO(blob), weights_only=True)
            part = data.draw(st.sampled_from(sorted(tensors)))
            if how == "code":
                tensors[part] = Planted(folder / "executed")
            else:
                tensors[part] = data.draw(
                    st.sampled_from([None, {}, [], 3, torch.zeros(2), {"layers.0.weight": torch.zeros(1)}, {"w": "x"}])
                )
            buffer = io.BytesIO()
            torch.save(tensors, buffer)
            blob = buffer.getvalue()
        meta["sha256"] = _digest(blob, meta)
        (folder / "posterior.pt").write_bytes(blob)
        (folder / "posterior.json").write_text(json.dumps(meta))
        try:
            bp.load(folder)
        except bp.UserError as error:
            assert len(str(error).splitlines()) == 1
