"""Parts of generated C code: types, elementwise operators, and arrays as buffers or expressions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bnn_pyro.c_code import NotCompiled

aten = torch.ops.aten

C_TYPES = {torch.float32: "float", torch.float64: "double", torch.bool: "char", torch.int64: "long", torch.int32: "int"}
#: Elementwise operators as C expressions; {f} is the suffix of C's float functions.
SIGNS = dict(add="+", sub="-", mul="*", div="/", gt=">", ge=">=", lt="<", le="<=", eq="==", ne="!=")
SIGNS |= dict(logical_and="&&", logical_or="||", bitwise_and="&", bitwise_or="|")
OWN_NAMES = "exp expm1 log log1p sqrt sin cos tan asin acos atan sinh cosh asinh floor ceil lgamma digamma sign"
POINTWISE = {
    **{getattr(aten, name): f"({{0}} {sign} {{1}})" for name, sign in SIGNS.items()},
    **{getattr(aten, name): f"{name}{{f}}({{0}})" for name in OWN_NAMES.split()},
    **dict.fromkeys([aten.clone, aten.alias, aten._to_copy, aten.lift_fresh_copy], "{0}"),
    aten.sgn: "sign{f}({0})",
    aten.isnan: "({0} != {0})",
    aten.neg: "(-{0})",
    aten.reciprocal: "(1 / {0})",
    aten.logical_not: "(!{0})",
    aten.abs: "fabs{f}({0})",
    aten.rsqrt: "(1 / sqrt{f}({0}))",
    aten.tanh: "quick_tanh{f}({0})",
    aten.erf: "quick_erf{f}({0})",
    aten.sigmoid: "(1 / (1 + exp{f}(-{0})))",
    aten.round: "rint{f}({0})",
    aten.atan2: "atan2{f}({0}, {1})",
    aten.remainder: "({0} - {1} * floor{f}(({0} + 0.0{f}) / {1}))",
    aten.relu: "larger{f}({0}, 0)",
    **dict.fromkeys([aten.maximum, aten.clamp_min], "larger{f}({0}, {1})"),
    **dict.fromkeys([aten.minimum, aten.clamp_max], "smaller{f}({0}, {1})"),
    aten.where: "choose{f}({0}, {1}, {2})",
}
VIEWS = {
    aten.view, aten._unsafe_view, aten.permute, aten.expand, aten.unsqueeze, aten.squeeze, aten.slice, aten.select,
    aten.split_with_sizes, aten.transpose, aten.t, aten.detach, aten.diagonal, aten.unfold,
}  # fmt: skip


@dataclass
class Array:
    """A value of the graph: a view of a buffer, or (``at``) a C expression as a function of the indices."""

    like: Tensor  # on the "meta" device, with shape, strides, offset and type
    buffer: str = ""
    at: Callable[[Sequence[str]], str] | None = None

    def __call__(self, index: Sequence[str]) -> str:
        """The element at these indices as C. Leading indices, and indices of dimensions of size 1, are ignored."""
        shape = self.like.shape
        index = ["0" if n == 1 else i for i, n in zip(index[len(index) - len(shape) :], shape, strict=True)]
        if self.at is not None:
            return self.at(index)
        strides, offset = zip(index, self.like.stride(), strict=True), self.like.storage_offset()
        terms = [f"{i} * {s}" if s != 1 else i for i, s in strides if i != "0" and s]
        return f"{self.buffer}[{' + '.join([*terms, *([str(offset)] if offset or not terms else [])])}]"

    @property
    def type(self) -> str:
        """The C name of its type."""
        if self.like.dtype not in C_TYPES:
            raise NotCompiled(f"arrays of {self.like.dtype} have no C form")
        return C_TYPES[self.like.dtype]


def literal(value: float, dtype: torch.dtype) -> str:
    """A number of this type, as C."""
    if value != value or value in (float("inf"), -float("inf")):
        return "NAN" if value != value else "INFINITY" if value > 0 else "(-INFINITY)"
    if not dtype.is_floating_point:
        return str(int(value))
    return f"({float(value)!r}{'f' if dtype == torch.float32 else ''})"
