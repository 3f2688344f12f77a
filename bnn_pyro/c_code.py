"""C code, compiled by the machine's compiler in about a second and loaded."""

import ctypes
import os
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

#: Associative sums make vector instructions possible; infinities and NaN keep their meaning: a divergence has them.
MATHS = ["-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math", "-freciprocal-math"]
#: Options of the compiler, tried in this order.
FLAGS = (["-O3", "-march=native", *MATHS], ["-O3", *MATHS], ["-O2"])
#: Libraries that are kept in memory, by their source.
KEPT = 32
#: Mathematics of which loops make vector instructions, where the machine's C library has them.
MATHEMATICS = Path(__file__).with_name("mathematics.h")


class NotCompiled(Exception):
    """Why there is no compiled code."""


def find_compiler() -> str:
    """Its path.   Raises NotCompiled where there is none."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise NotCompiled("there is no C compiler (install gcc or clang, or name one in the variable CC)")
    return compiler


def load(source: str) -> ctypes.CDLL:
    """The library of this source, after ``MATHEMATICS``; one of its own at every call.   Raises NotCompiled."""
    compiler = find_compiler()
    try:
        with tempfile.TemporaryDirectory(prefix="bnn-pyro-") as folder:  # what is loaded twice from one file is one
            path = Path(folder, "code.so")
            path.write_bytes(build(compiler, MATHEMATICS.read_text() + source))
            return ctypes.CDLL(str(path))  # stays loaded when the file is gone
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotCompiled(f"{compiler}, or what it makes, cannot be used ({error})") from None


@lru_cache(KEPT)
def build(compiler: str, source: str) -> bytes:
    """A shared library."""
    with tempfile.TemporaryDirectory(prefix="bnn-pyro-") as folder:
        code, library = Path(folder, "code.c"), Path(folder, "code.so")
        code.write_text(source)
        for flags in FLAGS:
            command = [compiler, "-shared", "-fPIC", "-w", *flags, str(code), "-o", str(library), "-lm", "-pthread"]
            made = subprocess.run(command, capture_output=True, text=True, timeout=120)
            if made.returncode == 0 and library.is_file():
                return library.read_bytes()
    raise NotCompiled(f"{compiler} failed: {made.stderr.strip().splitlines()[-1] if made.stderr else 'no message'}")
