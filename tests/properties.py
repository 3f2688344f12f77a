"""What the property tests share: how many cases, how a command is run, and what every answer must be like.

A property is checked on random cases: 100 in all of the three files here, the same ones every time. With
``BNN_PYRO_CASES`` there are as many as it says, drawn anew (``python -m benchmarks.reliability fuzz``).
"""

import contextlib
import io
import json
import os
import pickle
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
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


def tally(name: str) -> None:
    """One more case was run."""
    if TALLY:
        with open(TALLY, "a") as file:
            file.write(name + "\n")


class Planted:
    """What a malicious file would hold: unpickling it makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def planted(mark: Path) -> bytes:
    return pickle.dumps(Planted(mark))


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str


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
def place():
    """A folder of a case's own; code that was planted in a file must not have run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
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
    kind = draw(st.sampled_from(["flip", "flips", "cut", "empty", "insert", "remove", "double", "zeros", "other"]))
    at = draw(st.integers(0, max(0, len(data) - 1)))
    if kind == "flip" and data:
        data[at] ^= 1 << draw(st.integers(0, 7))
    elif kind == "flips" and data:
        for where in draw(st.lists(st.integers(0, len(data) - 1), min_size=2, max_size=20)):
            data[where] ^= 1 << (where % 8)
    elif kind == "cut":
        del data[at:]
    elif kind == "empty":
        data.clear()
    elif kind == "insert":
        data[at:at] = draw(st.binary(min_size=1, max_size=8))
    elif kind == "remove":
        del data[at : at + draw(st.integers(1, 64))]
    elif kind == "double":
        data[at:at] = data[at : at + draw(st.integers(1, 64))]
    elif kind == "zeros":
        data[at : at + 64] = bytes(len(data[at : at + 64]))
    else:
        data = bytearray(draw(st.binary(max_size=200)))
    return bytes(data)


@st.composite
def changed_json(draw, blob: bytes) -> bytes:
    """A JSON file with one value replaced, removed, or put under another key; still JSON."""
    try:
        tree = json.loads(blob)
    except ValueError:
        tree = None
    holder, key = None, None
    node = tree
    while isinstance(node, dict | list) and len(node) and (holder is None or draw(st.booleans())):
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        holder, key = node, draw(st.sampled_from(keys))
        node = node[key]
    if holder is None or draw(st.integers(0, 9)) == 0:
        tree = draw(ODD_VALUE)
    elif draw(st.integers(0, 3)) == 0:
        del holder[key]
    elif isinstance(holder, dict) and draw(st.integers(0, 4)) == 0:
        holder[draw(st.text(max_size=5))] = holder.pop(key)
    else:
        holder[key] = draw(ODD_VALUE)
    return json.dumps(tree).encode()


#: Arrays of every kind that numpy can write.
DTYPES = ["f8", "f4", "f2", ">f8", "i8", "i4", ">i4", "u1", "u8", "?", "c16", "U5", "S3", "M8[s]", "m8[s]", "O", "g",
          [("a", "f8"), ("b", "i4")]]  # fmt: skip


@st.composite
def array(draw, rows: int | None = None) -> np.ndarray:
    """An array of any type and shape, of ``rows`` rows where given, with odd values in it."""
    first = draw(st.sampled_from([0, 1, 2, 30])) if rows is None else rows
    rest = draw(
        st.sampled_from([(), (), (2,), (2,), (1,), (0,), (3, 3), (3, 3, 1), (3, 3, 3), (1, 3, 3), (2, 2, 2, 2)])
    )
    shape = () if rows is None and draw(st.integers(0, 9)) == 0 else (first, *rest)
    kind = np.dtype(draw(st.sampled_from(DTYPES)))
    generator = np.random.default_rng(draw(st.integers(0, 5)))
    if kind.hasobject and not kind.names:
        return np.full(shape, "text", dtype=object)
    if kind.names:
        return np.zeros(shape, kind)
    if kind.kind == "U":
        return np.full(shape, draw(TEXT)[:5], kind)
    if kind.kind == "S":
        return np.full(shape, b"ab", kind)
    whole = draw(st.booleans())
    numbers = generator.integers(0, 3, shape) if whole else generator.uniform(0, 1, shape)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = np.asarray(numbers).astype(kind)
        if values.size and values.ndim and draw(st.booleans()) and kind.kind in "fgiu":
            odd = draw(st.sampled_from([np.nan, np.inf, -np.inf, 1e300, 1e38, -1e39, 2**62, -1, 255, 1e-320]))
            at = draw(st.integers(0, values.size - 1))
            flat = values.reshape(-1)
            flat[at] = np.array(odd).astype(kind) if kind.kind in "fg" else int(np.clip(np.nan_to_num(odd), 0, 127))
            values = flat.reshape(shape)
    return values
