"""The pieces that generated C is made of: types, elementwise operators, arrays as addresses or expressions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["C_TYPES", "POINTWISE", "PRELUDE", "VIEWS", "Array", "Unsupported", "broadcast", "literal"]

aten = torch.ops.aten

C_TYPES = {torch.float32: "float", torch.float64: "double", torch.bool: "unsigned char", torch.int64: "long"}

#: Elementwise operators; {f} is the suffix of C's float functions.
POINTWISE = {
    aten.add: "({0} + {1})",
    aten.sub: "({0} - {1})",
    aten.mul: "({0} * {1})",
    aten.div: "({0} / {1})",
    aten.neg: "(-{0})",
    aten.reciprocal: "(1 / {0})",
    aten.abs: "fabs{f}({0})",
    aten.exp: "exp{f}({0})",
    aten.expm1: "expm1{f}({0})",
    aten.log: "log{f}({0})",
    aten.log1p: "log1p{f}({0})",
    aten.sqrt: "sqrt{f}({0})",
    aten.rsqrt: "(1 / sqrt{f}({0}))",
    aten.tanh: "quick_tanh{f}({0})",
    aten.erf: "erf{f}({0})",
    aten.sin: "sin{f}({0})",
    aten.cos: "cos{f}({0})",
    aten.sigmoid: "(1 / (1 + exp{f}(-{0})))",
    aten.relu: "larger{f}({0}, 0)",
    aten.gelu: "gelu{f}({0})",
    aten.maximum: "larger{f}({0}, {1})",
    aten.minimum: "smaller{f}({0}, {1})",
    aten.clamp_min: "larger{f}({0}, {1})",
    aten.clamp_max: "smaller{f}({0}, {1})",
    aten.where: "choose{f}({0}, {1}, {2})",
    aten.gt: "({0} > {1})",
    aten.ge: "({0} >= {1})",
    aten.lt: "({0} < {1})",
    aten.le: "({0} <= {1})",
    aten.eq: "({0} == {1})",
    aten.ne: "({0} != {1})",
    aten.logical_not: "(!{0})",
    aten.logical_and: "({0} && {1})",
    aten.logical_or: "({0} || {1})",
    aten.clone: "{0}",
    aten.alias: "{0}",
    aten._to_copy: "{0}",
    aten.lift_fresh_copy: "{0}",
}
VIEWS = {
    aten.view, aten._unsafe_view, aten.permute, aten.expand, aten.unsqueeze, aten.squeeze, aten.slice, aten.select,
    aten.split_with_sizes, aten.transpose, aten.t, aten.detach,
}  # fmt: skip

PRELUDE = """
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#include <features.h>
#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 35)
#define VECTOR __attribute__((simd("notinbranch"), const))
#endif
#endif
#ifndef VECTOR
#define VECTOR
#endif
#define BOTH(name) VECTOR double name(double); VECTOR float name##f(float);
BOTH(exp) BOTH(expm1) BOTH(log) BOTH(log1p) BOTH(tanh) BOTH(erf) BOTH(sin) BOTH(cos)
double sqrt(double); float sqrtf(float); double fabs(double); float fabsf(float); double pow(double, double);
float powf(float, float); void *aligned_alloc(unsigned long, unsigned long); void free(void *);
#define INLINE(type, f) \\
  static inline type larger##f(type a, type b) { return a > b || a != a ? a : b; } \\
  static inline type smaller##f(type a, type b) { return a < b || a != a ? a : b; } \\
  static inline type leaky##f(type a, type slope) { return a > 0 ? a : a * slope; } \\
  static inline type choose##f(int c, type a, type b) { return c ? a : b; } \\
  static inline type square##f(type a) { return a * a; } \\
  static inline type gelu##f(type a) { return a * (type)0.5 * (1 + erf##f(a * (type)0.70710678118654752)); }
INLINE(double, ) INLINE(float, f)
static inline double quick_tanh(double x) { return tanh(x); }
/* The rational approximation of Eigen (generic_fast_tanh_float), good to a few units in the last place */
static inline float quick_tanhf(float x) {
  float c = smallerf(largerf(x, -7.9053111f), 7.9053111f), s = c * c;
  float p = -2.76076847742355e-16f * s + 2.00018790482477e-13f;
  p = p * s + -8.60467152213735e-11f; p = p * s + 5.12229709037114e-08f; p = p * s + 1.48572235717979e-05f;
  p = p * s + 6.37261928875436e-04f; p = p * s + 4.89352455891786e-03f;
  float q = 1.19825839466702e-06f * s + 1.18534705686654e-04f;
  q = q * s + 2.26843463243900e-03f; q = q * s + 4.89352518554385e-03f;
  float t = c * p / q;
  return s < 1.6e-7f ? x : t;
}
"""


class Unsupported(Exception):
    """A graph holds something that has no C here."""


@dataclass
class Array:
    """A value of the graph: an address into a buffer, or (``at``) an expression of the indices."""

    like: Tensor  # on the "meta" device: shape, strides, offset, type
    buffer: str = ""
    at: Callable[[Sequence[str]], str] | None = None

    def __call__(self, index: Sequence[str]) -> str:
        """The element at these indices, as C."""
        if self.at is not None:
            return self.at(index)
        return f"{self.buffer}[{_address(index, self.like.stride(), self.like.storage_offset())}]"

    @property
    def type(self) -> str:
        """C's name of its type."""
        if self.like.dtype not in C_TYPES:
            raise Unsupported(f"arrays of {self.like.dtype}")
        return C_TYPES[self.like.dtype]


def _address(index: Sequence[str], stride: Sequence[int], offset: int) -> str:
    terms = [f"{i} * {s}" if s != 1 else i for i, s in zip(index, stride, strict=True) if i != "0" and s]
    return " + ".join([*terms, *([str(offset)] if offset or not terms else [])])


def broadcast(index: Sequence[str], shape: Sequence[int]) -> list[str]:
    """The last indices, 0 where the array has but one element."""
    return ["0" if n == 1 else i for i, n in zip(index[len(index) - len(shape) :], shape, strict=True)]


def literal(value: float, dtype: torch.dtype) -> str:
    """A number of this type, as C."""
    if value != value or value in (float("inf"), -float("inf")):
        return "NAN" if value != value else "INFINITY" if value > 0 else "(-INFINITY)"
    if dtype in (torch.int64, torch.bool):
        return str(int(value))
    return f"({float(value)!r}{'f' if dtype == torch.float32 else ''})"
