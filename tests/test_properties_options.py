"""Whatever a command line or a config file is given: it runs, or is refused in one line."""

import contextlib
import dataclasses
import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from properties import LINE, SHORT, answer, cases, changed_json, place

import bnn_pyro as bp
from bnn_pyro.inference import methods_for

#: What every training of this file says last, so that it ends within a second.
QUICK = {
    "epochs": 2, "draws": 3, "warmup": 3, "chains": 2, "cycles": 1, "max_tree_depth": 2, "max_steps": 3, "members": 2,
    "map_epochs": 2, "start_epochs": 2, "samples": 2,
}  # fmt: skip
#: Values that are not tried: they ask for more than a test has, and rightly get it.
COSTLY = 200


pytestmark = pytest.mark.usefixtures("quick")


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


@cases(10)
@given(argv=arguments())
def test_a_training_runs_or_is_refused(argv):
    with place("options of train") as folder:
        done = answer(["train", "--out", str(folder / "run"), *argv])
        if done.code == 0:
            assert (folder / "run" / "report.html").is_file() and not list(folder.rglob("*.part"))
        else:
            assert not (folder / "run" / "posterior.pt").exists()


# -- config files ----------------------------------------------------------------------------------------------------
CONFIG = {
    "variant": "mean-field", "variant_settings": {"hidden": [3], "prior": "normal:1", "noise": "learned"},
    "inference": "svi", "inference_settings": {"epochs": 2, "lr": 0.1, "batch_size": 0},
    "data": {"name": "toy-curve", "target": "y", "limit": 20, "seed": 0}, "seed": 1, "num_draws": 3, "device": "cpu",
    "baseline": False,
}  # fmt: skip


@cases(10)
@given(data=st.data(), times=st.integers(1, 3))
def test_a_config_runs_or_is_refused(data, times):
    with place("config") as folder:
        path, blob = folder / "c.json", json.dumps(CONFIG).encode()
        for _ in range(times):
            blob = data.draw(changed_json(blob))
        path.write_bytes(blob)
        short = ["--data", "toy-curve", "--no-baseline", *SHORT]  # what it says of these is read all the same
        answer(["train", "--config", str(path), "--out", str(folder / "run"), *short])
        assert path.read_bytes() == blob
