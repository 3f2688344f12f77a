"""C code, compiled by the machine's compiler in about a second and loaded."""

import ctypes
import os
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

#: Sums may be reordered, so that loops are vectorised; infinities and NaN stay exact, because diverging fits have them.
MATHS = ["-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math", "-freciprocal-math"]
#: Sets of compiler options, tried in this order until one compiles.
FLAGS = (["-O3", "-march=native", *MATHS], ["-O3", *MATHS], ["-O2"])
#: How many compiled libraries the cache in memory holds.
KEPT = 32
#: Mathematical functions that loops can vectorise where the machine's C library supports it; included in every source.
MATHEMATICS = Path(__file__).with_name("mathematics.h")


class NotCompiled(Exception):
    """The C code could not be compiled or loaded; the message says why."""


def find_compiler() -> str:
    """Return the path of the C compiler. Raises NotCompiled if there is none."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise NotCompiled("there is no C compiler (install gcc or clang, or name one in the variable CC)")
    return compiler


def load(source: str) -> ctypes.CDLL:
    """Compile ``MATHEMATICS`` and this source to a library, and load a separate copy of it. Raises NotCompiled."""
    compiler = find_compiler()
    try:
        with tempfile.TemporaryDirectory(prefix="bnn-pyro-") as folder:  # a file loaded twice would be one library
            path = Path(folder, "code.so")
            path.write_bytes(build(compiler, MATHEMATICS.read_text() + source))
            return ctypes.CDLL(str(path))  # stays loaded after the file is deleted
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotCompiled(f"{compiler} or the library that it compiled cannot be used ({error})") from None


@lru_cache(KEPT)
def build(compiler: str, source: str) -> bytes:
    """Compile a C source to a shared library and return its bytes. Raises NotCompiled."""
    with tempfile.TemporaryDirectory(prefix="bnn-pyro-") as folder:
        code, library = Path(folder, "code.c"), Path(folder, "code.so")
        code.write_text(source)
        for flags in FLAGS:
            command = [compiler, "-shared", "-fPIC", "-w", *flags, str(code), "-o", str(library), "-lm", "-pthread"]
            made = subprocess.run(command, capture_output=True, text=True, timeout=120)
            if made.returncode == 0 and library.is_file():
                return library.read_bytes()
    raise NotCompiled(f"{compiler} failed: {made.stderr.strip().splitlines()[-1] if made.stderr else 'no message'}")
