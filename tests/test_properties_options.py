"""Whatever a command line, a config file or a settings class is given: it runs, or is refused in one line."""

import contextlib
import dataclasses
import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from properties import LINE, ODD_VALUE, SHORT, answer, cases, contents, place, tally

import bnn_pyro as bp
from bnn_pyro.errors import UserError
from bnn_pyro.inference import methods_for
from bnn_pyro.runs.recipe import DATA_KEYS, KEYS
from bnn_pyro.settings import build

#: What every training of this file says last, so that it ends within a second.
QUICK = {
    "epochs": 2, "draws": 3, "warmup": 3, "chains": 2, "cycles": 1, "max_tree_depth": 2, "max_steps": 3, "members": 2,
    "map_epochs": 2, "start_epochs": 2, "samples": 2,
}  # fmt: skip
#: Values that are not tried: they ask for more than a test has, and rightly get it.
COSTLY = 200


@pytest.fixture(autouse=True, scope="module")
def quick():
    """Figures take most of the time of a small run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bnn_pyro.runs.evaluate.draw_all", lambda scene, folder: [])
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    answer(["train", "--data", "toy-curve", "--out", str(folder / "run"), *SHORT])
    return folder / "run"


# -- the command line ------------------------------------------------------------------------------------------------
VALUES = st.one_of(
    st.sampled_from(["0", "1", "2", "3", "-1", "0.5", "1e-3", "nan", "inf", "-inf", "1e30", "1e-30", "", ",", "3,2",
                     "3,,2", "true", "no", "None", "normal:1", "normal:0", "normal:nan", "normal", "fan-in:-1",
                     "gamma:1,1",
                     "scale-mixture:1,0.1,0.5", "scale-mixture:1,0.1,2", "gamma:1", "relu", "tanh", "learned",
                     "heteroscedastic", "svi", "map", "nuts", "auto", "full", "low-rank:2", "4:8"]),
    LINE,
)  # fmt: skip
FLAGS = ["--hidden", "--activation", "--prior", "--noise", "--inference", "--epochs", "--batch-size", "--lr", "--seed",
         "--limit", "--validation", "--data-seed", "--target", "--task", "--features", "--device", "--num-draws",
         "--split", "--splits", "--config", "--data"]  # fmt: skip
SWITCHES = ["--bias", "--no-bias", "--baseline", "--no-baseline", "--drop-missing", "--resume", "--overwrite", "--fast",
            "extra", "--", "-x", "--epoch=3"]  # fmt: skip
WORDS = [*FLAGS, *SWITCHES, "--out", "RUN", "--quiet", "--invert"]
NAMES = sorted({f.name for table in (bp.ZOO, bp.METHODS) for kind in table.values() for f in dataclasses.fields(kind)})


def costly(text: str) -> bool:
    """Whether a number in the text asks for more than a test has."""
    for part in text.replace(":", ",").split(","):
        with contextlib.suppress(ValueError):
            if float(part) > COSTLY:
                return True
    return False


@st.composite
def arguments(draw) -> list[str]:
    """A training that is short, with a few options that may be good or bad."""
    data = draw(st.sampled_from(["toy-curve", "toy-curve", "breast-cancer", "digits"]))
    variant = draw(st.sampled_from(["mean-field", "mean-field", "mlp", *bp.ZOO]))
    argv = [variant, "--data", data, "--limit", "20", *SHORT]
    for _ in range(draw(st.integers(0, 4))):
        what = draw(st.integers(0, 5))
        if what == 0:
            argv.append(draw(st.sampled_from(SWITCHES)))
            continue
        value = draw(VALUES)
        if what < 4:
            flag = draw(st.sampled_from(FLAGS))
            assume(not (flag in ("--hidden", "--epochs", "--num-draws") and costly(value)))
            argv.append(f"{flag}={value}")
        else:
            name = draw(st.sampled_from(NAMES))
            assume(not costly(value) or name in ("lr", "temperature", "prior", "noise", "init_scale"))
            argv += ["--set", f"{name}={value}"]
    method = draw(st.sampled_from([None, None, *methods_for(bp.ZOO[variant])]))
    kinds = [bp.ZOO[variant], bp.METHODS[method or methods_for(bp.ZOO[variant])[0]]]
    fields = {f.name for kind in kinds for f in dataclasses.fields(kind)}
    asked = " ".join(argv)
    short = [f"{name}={value}" for name, value in QUICK.items() if name in fields and name not in asked]
    argv += [] if method is None else ["--inference", method]
    return argv + [part for text in short for part in ("--set", text)]


@cases(7)
@given(argv=arguments())
def test_a_training_runs_or_is_refused(argv):
    tally("options of train")
    with place() as folder:
        done = answer(["train", "--out", str(folder / "run"), *argv])
        if done.code == 0:
            assert (folder / "run" / "report.html").is_file() and not list(folder.rglob("*.part"))
        else:
            assert not (folder / "run" / "posterior.pt").exists()


@cases(3)
@given(
    argv=st.lists(st.one_of(st.sampled_from(WORDS), VALUES), max_size=6),
    command=st.sampled_from(["train", "evaluate", "predict", "compare", "diagnose", "list", "", "help"]),
)
def test_a_jumble_is_refused_and_leaves_a_finished_run_alone(finished, argv, command):
    tally("jumbled command")
    assume(not {"--help", "-h", "--json"} & set(argv))
    run = str(finished)
    argv = [run if arg == "RUN" else arg for arg in argv]
    with place() as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        before = contents(finished)
        argv = [command, *argv] if command else argv
        if command in ("evaluate", "predict", "diagnose"):
            argv.insert(1, run)
        assume(command not in ("train", "") or "--config" in argv)  # a default training takes minutes
        done = answer(argv)
        assert done.code == 2 or command in ("evaluate", "diagnose", "list", "compare")
        if done.code == 2:
            assert contents(finished) == before


# -- config files ----------------------------------------------------------------------------------------------------
@st.composite
def config(draw) -> dict:
    """A config of a short training with something strange in it."""
    tree = {
        "variant": "mean-field",
        "variant_settings": {"hidden": [3]},
        "inference_settings": {"epochs": 2},
        "data": {"name": draw(st.sampled_from(["toy-curve", "breast-cancer"])), "limit": 20},
        "num_draws": 3,
        "device": "cpu",
        "baseline": False,
    }
    value = st.one_of(ODD_VALUE, st.sampled_from(["mlp", "map", "digits"]))
    for _ in range(draw(st.integers(1, 3))):
        where = draw(st.sampled_from(["", "", "data", "variant_settings", "inference_settings"]))
        holder = tree if not where else tree.get(where)
        if not isinstance(holder, dict):
            continue
        names = {"": list(KEYS), "data": list(DATA_KEYS)}.get(where, NAMES)
        key = draw(st.one_of(st.sampled_from(names), st.sampled_from(names), LINE))
        if draw(st.integers(0, 6)) == 0:
            holder.pop(key, None)
        else:
            holder[key] = draw(value)
            huge = isinstance(holder[key], int | float) and holder[key] > COSTLY
            assume(not huge or key not in ("num_draws", "hidden", "width", *QUICK))
    return tree


@cases(6)
@given(tree=config(), fixed=st.booleans())
def test_a_config_runs_or_is_refused(tree, fixed):
    tally("config")
    with place() as folder:
        path = folder / "c.json"
        path.write_text(json.dumps(tree))
        before = path.read_bytes()
        more = ["--data", "toy-curve", "--epochs", "2"] if fixed or "data" not in tree else ["--epochs", "2"]
        answer(["train", "--config", str(path), "--out", str(folder / "run"), *more, "--quiet"])
        assert path.read_bytes() == before


# -- settings --------------------------------------------------------------------------------------------------------
@cases(6)
@given(data=st.data())
def test_settings_are_taken_or_refused(data):
    tally("settings")
    kind = data.draw(st.sampled_from([*bp.ZOO.values(), *bp.METHODS.values()]))
    fields = {f.name: f.default for f in dataclasses.fields(kind)}
    names = data.draw(st.lists(st.one_of(st.sampled_from(sorted(fields)), LINE), max_size=3, unique=True))
    values = {name: data.draw(st.one_of(ODD_VALUE, st.just(fields.get(name)))) for name in names}
    try:
        made = build(kind, values)
    except UserError as error:
        assert len(str(error).splitlines()) == 1 and len(str(error)) < 5000
    else:
        assert dataclasses.is_dataclass(made) and set(values) <= set(fields)
