"""The gradient of a log density, traced once and compiled by the machine's C compiler in about a second.

A Python call of an operator costs more than what it computes for a small network: one gradient of 50 weights takes a
millisecond as some two hundred operators, and a fiftieth of that as one piece of C that runs through the arrays of one
chain, chain after chain, on all cores that OMP_NUM_THREADS allows. What is not supported, or a machine without a
compiler, raises ``NotCompiled``; on a GPU, and where matrices are large, operators are the faster way anyhow.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from bnn_pyro.inference.target.c_source import Unsupported, write_c

__all__ = ["CompiledGradient", "NotCompiled", "compile_gradient"]

#: Associative sums make vector instructions possible; infinities and NaN keep their meaning: a divergence has them.
MATHS = ["-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math", "-freciprocal-math"]
#: What compilers are asked for, until one of them takes it.
FLAGS = (["-O3", "-march=native", *MATHS], ["-O3", *MATHS], ["-O2"])

#: Chains are handed out to threads one by one; each is worked on by one thread alone, so that results depend on no
#: number of threads. They are POSIX threads that end with the call: those of OpenMP wait for each other by spinning,
#: which on a busy machine costs several times what they do.
DRIVER = """
#include <pthread.h>
typedef struct {
  double *z, *r, *density, *g;
  const double *m, *step;
  long steps, chains, size, next;
} Job;
/* steps of (r += e/2 g; z += e m r; r += e/2 g), or the gradient alone; the chain ends where it is not finite */
static void chain(Job *job, long c, char *work) {
  long size = job->size;
  double *z = job->z + c * size, *g = job->g + c * size;
  if (!job->r) { job->density[c] = gradient(z, g, work); return; }
  double *r = job->r + c * size, e = job->step[c];
  for (long s = 0; s < job->steps; s++) {
    for (long i = 0; i < size; i++) { r[i] += 0.5 * e * g[i]; z[i] += e * job->m[i] * r[i]; }
    double density = job->density[c] = gradient(z, g, work);
    for (long i = 0; i < size; i++) r[i] += 0.5 * e * g[i];
    if (!(density - density == 0)) break;
  }
}
static void *chains(void *given) {
  Job *job = given;
  char *work = aligned_alloc(64, WORK);
  for (long c; (c = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->chains;) chain(job, c, work);
  free(work);
  return 0;
}
static void run(Job *job, long threads) {
  pthread_t others[63];
  int n = 0;
  while (n < 63 && n + 1 < threads && n + 1 < job->chains && !pthread_create(others + n, 0, chains, job)) n++;
  chains(job);
  while (n) pthread_join(others[--n], 0);
}
void evaluate(double *z, double *density, double *g, long chains, long size, long threads) {
  Job job = {z, 0, density, g, 0, 0, 0, chains, size, 0};
  run(&job, threads);
}
void leapfrog(double *z, double *r, double *density, double *g, const double *m, const double *step, long steps,
              long chains, long size, long threads) {
  Job job = {z, r, density, g, m, step, steps, chains, size, 0};
  run(&job, threads);
}
"""


class NotCompiled(Exception):
    """Why there is no compiled gradient."""


class CompiledGradient:
    """The log density and its gradient as a call into C; results do not depend on the number of threads."""

    def __init__(self, library: ctypes.CDLL, constants: list[Tensor], size: int) -> None:
        self._library, self._constants, self.size, self.threads = library, constants, size, _threads()
        library.bind((ctypes.c_void_p * max(1, len(constants)))(*(k.data_ptr() for k in constants)))
        long, pointer = ctypes.c_long, ctypes.c_void_p
        library.evaluate.argtypes = [pointer] * 3 + [long] * 3
        library.leapfrog.argtypes = [pointer] * 6 + [long] * 4
        library.evaluate.restype = library.leapfrog.restype = library.bind.restype = None

    def __call__(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """(C, P) float64 -> (C,), (C, P)."""
        z = z.contiguous()
        density, gradient = z.new_empty(len(z)), torch.empty_like(z)
        pointers = z.data_ptr(), density.data_ptr(), gradient.data_ptr()
        self._library.evaluate(*pointers, len(z), self.size, self.threads)
        return density, gradient

    def leapfrog(
        self, z: Tensor, r: Tensor, density: Tensor, gradient: Tensor, inverse_mass: Tensor, step: Tensor, steps: int
    ) -> None:
        """``steps`` steps of C chains, in place; all float64 and contiguous, inverse_mass (P,), step (C,)."""
        pointers = (t.data_ptr() for t in (z, r, density, gradient, inverse_mass, step))
        self._library.leapfrog(*pointers, steps, len(z), self.size, self.threads)


def _threads() -> int:
    """The cores that this process may use, or as many as OMP_NUM_THREADS says."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(asked) if asked.isdigit() and int(asked) else cores


def compile_gradient(gradient: Callable[[Tensor], tuple[Tensor, Tensor]], z: Tensor) -> CompiledGradient:
    """Trace ``gradient`` at z (C, P) float64, for one chain, write it as C, compile and load it.

    Raises NotCompiled with the reason.
    """
    if z.device.type != "cpu":
        raise NotCompiled(f"the model is on {z.device}")
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise NotCompiled("there is no C compiler (install gcc or clang, or name one in the variable CC)")
    try:
        first = make_fx(lambda z: gradient(z))(z[:1])
        plain = functionalize(first)
        graph = make_fx(lambda z: plain(z), decomposition_table=core_aten_decompositions())(z[:1])
        graph.graph.eliminate_dead_code()
        source, constants = write_c(graph)
    except Unsupported as reason:
        raise NotCompiled(f"{reason} has no C form") from None
    except Exception as error:
        raise NotCompiled(f"the model could not be traced ({type(error).__name__}: {error})") from None
    with tempfile.TemporaryDirectory(prefix="bnn-pyro-") as folder:
        return CompiledGradient(_build(compiler, source + DRIVER, Path(folder)), constants, z.shape[1])


def _build(compiler: str, source: str, folder: Path) -> ctypes.CDLL:
    code, library = folder / "gradient.c", folder / "gradient.so"
    code.write_text(source)
    for flags in FLAGS:
        command = [compiler, "-shared", "-fPIC", "-w", *flags, str(code), "-o", str(library), "-lm", "-pthread"]
        try:
            made = subprocess.run(command, capture_output=True, text=True, timeout=120)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotCompiled(f"{compiler}: {error}") from None
        if made.returncode == 0:
            try:
                return ctypes.CDLL(str(library))  # stays loaded when the file is gone
            except OSError as error:
                raise NotCompiled(f"the compiled code could not be loaded ({error})") from None
    raise NotCompiled(f"{compiler} failed: {made.stderr.strip().splitlines()[-1] if made.stderr else 'no message'}")
