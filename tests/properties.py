"""What the property tests share: how many cases, how a command is run, and what every answer must be like.

A property is checked on random cases: 100 in all of the files here, the same ones every time. With
``BNN_PYRO_CASES`` there are as many as it says, drawn anew (``python -m benchmarks.reliability fuzz``).
"""

import contextlib
import io
import json
import os
import pickle
import tempfile
import warnings
from collections import namedtuple
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir

from bnn_pyro.run import main

CI = 100
CASES = int(os.environ.get("BNN_PYRO_CASES", CI))
#: Where the number of cases that were run is written, one line a property.
TALLY = os.environ.get("BNN_PYRO_TALLY")

set_hypothesis_home_dir(Path(tempfile.gettempdir()) / "hypothesis")  # not the folder that tests are run from
settings.register_profile(
    "ci",
    derandomize=CASES == CI,
    database=None,
    deadline=None,
    print_blob=False,
    phases=[Phase.generate, *([Phase.shrink] if CASES == CI else [])],
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("ci")

#: The shortest training there is.
SHORT = ["--hidden", "3", "--epochs", "2", "--num-draws", "3", "--device", "cpu", "--quiet"]
#: Of the error line, in characters: a line to read.
LONGEST = 5000


def cases(percent: int) -> settings:
    """So many of a hundred cases are this property's."""
    return settings(max_examples=max(1, CASES * percent // 100))


class Planted:
    """What a malicious file would hold: unpickling it makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def planted(mark: Path) -> bytes:
    return pickle.dumps(Planted(mark))


Answer = namedtuple("Answer", "code out err")


def answer(argv: list[str]) -> Answer:
    """Run a command here and hold it to its word: done, or one line that says what was wrong."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # numpy's overflows and divisions are not for the user
        warnings.simplefilter("ignore", UserWarning)
        code = main(argv)
    found = Answer(code, out.getvalue(), err.getvalue())
    assert code in (0, 2), (argv, found)
    if code == 2:
        assert found.err.startswith("error: ") and found.err.endswith("\n") and len(found.err) < LONGEST, found.err
        assert len(found.err.splitlines()) == 1 and found.err.strip() != "error:", found.err
        assert not found.out, found.out
    assert "Traceback" not in found.out + found.err
    return found


def contents(folder: Path) -> dict[str, bytes]:
    """Every file in a folder, and the folders, by their names."""
    found = {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in folder.rglob("*")}
    return dict(sorted(found.items()))


@contextlib.contextmanager
def place(name: str):
    """A folder of a case of this property; code that was planted in a file must not have run."""
    if TALLY:
        with open(TALLY, "a") as file:
            file.write(name + "\n")
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        yield folder
        assert not (folder / "executed").exists(), "code in a file was executed"


# -- what to try -----------------------------------------------------------------------------------------------------
#: Texts that have broken programs.
ODD_TEXT = st.sampled_from(
    ["", " ", "nan", "NaN", "inf", "-inf", "1e400", "-0", "1e39", "1e308", "0x10", "1_000", "1,5", "٣", "½", "'", '"',
     "a\nb", "a\r\nb", "a,b", "a;b", "a\tb", "=1+1", "\ufeff", "\x00", "\x1a", "é", "🙂", "x" * 300, "9" * 400, "NULL",
     "?", "2024-02-30", "2024-01-01", "12:30", "True", "y", "y ", " y", "#", "../x", "%s", "{}", "\\", "\u2028",
     "\x85", "-"]
)  # fmt: skip
NUMBER = st.one_of(
    st.integers(-3, 60).map(str),
    st.floats(-1e6, 1e6).map(repr),
    st.floats().map(repr),
    st.integers(-(10**25), 10**25).map(str),
)
WORD = st.sampled_from(["red", "green", "blue", "north", "south"])
TEXT = st.one_of(ODD_TEXT, WORD, st.text(max_size=12))
#: What can be typed: one line of it.
LINE = TEXT.map(lambda text: " ".join(text.replace("\x00", "").split()))

#: Values of JSON.
ODD_VALUE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 5),
    st.sampled_from([10**30, -(2**63), 1e308, float("nan"), float("inf"), -float("inf"), 0.5, -1.5]),
    TEXT,
    st.lists(st.one_of(st.integers(-1, 4), st.text(max_size=3), st.none()), max_size=3),
    st.dictionaries(st.text(max_size=4), st.integers(0, 3), max_size=2),
)


@st.composite
def damage(draw, blob: bytes) -> bytes:
    """A file after something happened to it: bits flipped, cut short, bytes put in, left out or doubled."""
    data = bytearray(blob)
    kind = draw(st.sampled_from(["flip", "flip", "cut", "empty", "insert", "remove", "double", "other"]))
    at = draw(st.integers(0, max(0, len(data) - 1)))
    if kind == "flip" and data:
        for where in [at, *draw(st.lists(st.integers(0, len(data) - 1), max_size=20))]:
            data[where] ^= 1 << draw(st.integers(0, 7))
    elif kind == "insert":
        data[at:at] = draw(st.binary(min_size=1, max_size=8))
    elif kind == "remove":
        del data[at : at + draw(st.integers(1, 64))]
    elif kind == "double":
        data[at:at] = data[at : at + draw(st.integers(1, 64))]
    elif kind == "other":
        return draw(st.binary(max_size=200))
    else:
        del data[at if kind == "cut" else 0 :]
    return bytes(data)


@st.composite
def changed_json(draw, blob: bytes) -> bytes:
    """A JSON file with one value replaced, removed, or put under another key; still JSON."""
    try:
        tree = json.loads(blob)
    except ValueError:
        tree = None
    holder, key, node = None, None, tree
    while isinstance(node, dict | list) and len(node) and (holder is None or draw(st.booleans())):
        holder, key = node, draw(st.sampled_from(list(node) if isinstance(node, dict) else range(len(node))))
        node = node[key]
    what = "all" if holder is None else draw(st.sampled_from(["value"] * 5 + ["gone", "key", "all"]))
    if what == "all":
        return json.dumps(draw(ODD_VALUE)).encode()
    former = holder.pop(key)
    if isinstance(holder, list) and what != "gone":
        holder.insert(key, draw(ODD_VALUE))
    elif what != "gone":
        holder |= {draw(st.text(max_size=5)): former} if what == "key" else {key: draw(ODD_VALUE)}
    return json.dumps(tree).encode()
