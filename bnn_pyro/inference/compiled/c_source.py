"""Translates a traced gradient to C: loops over the arrays of one chain, which are small enough for processor caches.

Nodes of the graph that depend on no input are evaluated when the code is written. Views become addresses in other
arrays; elementwise operators become expressions, which are fused into the loop that needs them; sums and products of
matrices become loops. The innermost loop has the smallest stride, so that the C compiler can vectorise it.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map

from bnn_pyro.c_code import NotCompiled
from bnn_pyro.inference.compiled.c_pieces import C_TYPES, POINTWISE, VIEWS, Array, literal

aten = torch.ops.aten


def write_c(graph: fx.GraphModule, y: Tensor) -> tuple[str, list[Tensor]]:
    """(C source of ``double gradient(const double *z, double *g, char *work)`` and ``WORK``, the constants k0, k1, …).

    graph: inputs (1, P) float64 and y; outputs (1,) and (1, P), as ``make_fx`` traces them.
    y: contiguous, the first of the constants.   Raises NotCompiled for an operator that is not supported.
    """
    writer = _Writer(graph, [y])
    body = "\n".join(writer.run())
    globals_ = "\n".join(f"static const {C_TYPES[k.dtype]} *k{i};" for i, k in enumerate(writer.constants))
    bind = " ".join(f"k{i} = constants[{i}];" for i in range(len(writer.constants)))
    head = f"#define WORK {max(64, writer.work)}\n{globals_}\nvoid bind(void **constants) {{ {bind} }}\n"
    gradient = f"static double gradient(const double *restrict z, double *restrict g, char *work) {{\n{body}\n}}\n"
    return head + gradient, writer.constants


@dataclass
class _Writer:
    graph: fx.GraphModule
    constants: list[Tensor]
    work: int = 0

    def run(self) -> list[str]:
        self.lines: list[str] = []
        self.values: dict[fx.Node, Array | tuple[Array, ...] | Tensor | tuple] = {}
        inputs = iter(["z", "k0"])
        for node in self.graph.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = Array(torch.empty_like(node.meta["val"], device="meta"), next(inputs))
            elif node.op == "get_attr":
                self.values[node] = getattr(self.graph, node.target).detach()
            elif node.op == "output":
                density, gradient = (self._array(self.values[value]) for value in node.args[0])
                self._loop(gradient.like.shape, (0, 1), lambda i, g=gradient: f"g[{i[1]}] = {g(i)};")
                self.lines.append(f"return {density(['0'])};")
            else:
                self.values[node] = self._node(node)
        return self.lines

    def _node(self, node: fx.Node) -> object:
        values = fx.map_arg((node.args, node.kwargs), lambda n: self.values[n])
        if not any(isinstance(value, Array) for value in tree_leaves(values)):  # depends on no input
            return node.target(*values[0], **values[1])
        if node.target is operator.getitem:
            return values[0][0][values[0][1]]
        packet, val = node.target.overloadpacket, node.meta["val"]
        if packet in VIEWS:
            source = self._stored(values[0][0])
            result = node.target(source.like, *values[0][1:], **values[1])
            return tree_map(lambda part: Array(part, source.buffer), result)
        if not isinstance(val, Tensor):
            raise NotCompiled(f"the operator {packet} gives several tensors, and has no C form")
        like = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device="meta")
        if values[1].get("alpha", 1) != 1 or values[1].get("rounding_mode"):
            raise NotCompiled(f"the operator {packet} with {values[1]} has no C form")
        if packet in POINTWISE or packet in (aten.pow, aten.clamp, aten.gather):
            made = Array(like, at=self._expression(packet, like, values[0]))
            # A value that is used several times is stored, so that it is computed once.
            return made if len(node.users) == 1 else self._stored(made)
        special = {aten.sum: partial(self._reduce, start="0", form="a += {0};"),
                   aten.prod: partial(self._reduce, start="1", form="a *= {0};"),
                   aten.any: partial(self._reduce, start="0", form="a |= {0};"),
                   aten.amax: partial(self._reduce, start="-INFINITY", form="a = larger{f}(a, {0});"),
                   aten.cumsum: partial(self._cumulate, sign="+="), aten.cumprod: partial(self._cumulate, sign="*="),
                   aten.scatter_add: partial(self._scatter, sign="+="), aten.scatter: partial(self._scatter, sign="="),
                   aten.mm: self._mm, aten.bmm: self._mm, aten.cat: self._cat,
                   **{getattr(aten, f"{view}_scatter"): partial(self._replace, getattr(aten, view))
                      for view in ("slice", "select", "diagonal")}}  # fmt: skip
        if packet not in special:
            raise NotCompiled(f"the operator {packet} has no C form")
        return special[packet](like, *values[0])

    def _array(self, value: object, kind: torch.dtype = torch.float32) -> Array:
        """An argument as an Array: a value of the graph, a constant tensor, or a number (as dtype ``kind``)."""
        if isinstance(value, Array):
            return value
        if isinstance(value, int | float):
            return Array(torch.empty((), device="meta"), at=lambda _: literal(value, kind))
        if isinstance(value, Tensor):
            if value.numel() == 1:
                number = literal(value.item(), value.dtype)
                return Array(value.to("meta"), at=lambda _: number)
            value = value.detach().cpu()
            if value.dtype not in C_TYPES:
                raise NotCompiled(f"constants of {value.dtype} have no C form")
            dense = value.clone(memory_format=torch.contiguous_format if 0 in value.stride() else torch.preserve_format)
            self.constants.append(dense)
            like = torch.empty_strided(dense.shape, dense.stride(), dtype=dense.dtype, device="meta")
            return Array(like, f"k{len(self.constants) - 1}")
        raise NotCompiled(f"an argument {value!r} has no C form")

    def _stored(self, value: object) -> Array:
        if (array := self._array(value)).at is None:
            return array
        made = self._copy(array.like, array)
        array.at, array.buffer = None, made.buffer  # in place, so that all users of this Array read the buffer
        return made

    def _new(self, like: Tensor) -> Array:
        size = 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True)) if like.numel() else 1
        made = Array(like, f"b{self.work}")
        self.lines.append(f"{made.type} *restrict {made.buffer} = ({made.type} *)(work + {self.work});")
        self.work += (size * like.element_size() + 63) // 64 * 64
        return made

    def _expression(self, packet: object, like: Tensor, args: Sequence) -> Callable[[Sequence[str]], str]:
        f = "f" if like.dtype == torch.float32 else ""
        if packet is aten.gather:
            source, dim, chosen = self._stored(args[0]), args[1] % like.dim(), self._array(args[2])
            return lambda i: source([*i[:dim], chosen(i), *i[dim + 1 :]])
        if packet is aten._to_copy or packet is aten.clone:
            args = args[:1]
        arrays = (a.like if isinstance(a, Array) else a for a in args if isinstance(a, Array | Tensor))
        kind = like.dtype if like.dtype != torch.bool else next(arrays).dtype
        operands = [None if a is None else self._array(a, kind) for a in args]
        if packet is aten.pow:
            powers = {2: f"square{f}({{0}})", 1: "{0}", 0.5: f"sqrt{f}({{0}})", -1: "(1 / {0})",
                      3: f"({{0}} * square{f}({{0}}))", -2: f"(1 / square{f}({{0}}))"}  # fmt: skip
            form = powers.get(args[1] if isinstance(args[1], int | float) else None, f"pow{f}({{0}}, {{1}})")
        elif packet is aten.clamp:
            form = "{0}" if operands[1] is None else f"larger{f}({{0}}, {{1}})"
            form = form if len(operands) < 3 or operands[2] is None else f"smaller{f}({form}, {{2}})"
        else:
            form = POINTWISE[packet].replace("{f}", f)
        cast = f"({C_TYPES[like.dtype]})" if packet is aten._to_copy else ""
        return lambda i: cast + form.format(*("" if o is None else o(i) for o in operands))

    def _loop(self, shape: Sequence[int], stride: Sequence[int], body: Callable[[list[str]], str]) -> None:
        """Write nested loops with ``body`` of the indices; the innermost loop has the smallest stride."""
        if 0 in shape:
            return
        index = [f"i{d}" if n > 1 else "0" for d, n in enumerate(shape)]
        order = sorted((d for d, n in enumerate(shape) if n > 1), key=lambda d: -stride[d])
        for d in order:
            pragma = "\n\n" if d == order[-1] else ""
            self.lines.append(f"{pragma}for (long {index[d]} = 0; {index[d]} < {shape[d]}; {index[d]}++) {{")
        self.lines.append(body(index) + "}" * len(order))

    def _reduce(self, like: Tensor, base: object, dims: object = (), *_: object, start: str, form: str) -> Array:
        """Reduce ``dims`` of the base, one element of the result at a time."""
        base, made = self._array(base), self._new(like)
        shape, f = base.like.shape, "f" if like.dtype == torch.float32 else ""
        dims = {d % len(shape) for d in tree_leaves(dims)} or set(range(len(shape)))
        inner = sorted((d for d in sorted(dims) if shape[d] > 1), key=lambda d: -base.like.stride(d))
        loops = "".join(f"for (long j{d} = 0; j{d} < {shape[d]}; j{d}++) " for d in inner)

        def body(index: list[str]) -> str:
            element = base([f"j{d}" if d in inner else i for d, i in enumerate(index)])
            place = index if like.dim() == len(shape) else [i for d, i in enumerate(index) if d not in dims]
            return f"{{ {made.type} a = {start}; {loops}{form.format(element, f=f)} {made(place)} = a; }}"

        outer = [1 if d in dims else n for d, n in enumerate(shape)]
        self._loop(outer, list(range(len(outer), 0, -1)), body)
        return made

    def _mm(self, like: Tensor, left: object, right: object) -> Array:
        """The product (M, K) (K, N), or a batch of products, by ``matmul`` of prelude.h."""
        a = self._stored(left)
        if isinstance(right, Tensor):  # a constant can have any layout: prefer the longer of k and n as contiguous
            ways = right.mT.contiguous().mT, right.contiguous()
            ways = ways if right.shape[-2] > right.shape[-1] else ways[::-1]
            right = min(ways, key=lambda b: _copies(like, a.like, b)[0])
        factors = [a, self._stored(right)]
        for i, axis in _copies(like, *(factor.like for factor in factors))[1]:
            x = factors[i].like
            factors[i] = self._copy(x.contiguous() if axis == -1 else x.mT.contiguous().mT, factors[i])
        a, b = factors
        made = self._new(like)
        lead, f = ["p"] if like.dim() == 3 else [], "f" if like.dtype == torch.float32 else ""
        batch = f"for (long p = 0; p < {like.shape[0]}; p++) " if lead else ""
        places = ", ".join(f"&{array([*lead, '0', '0'])}" for array in (made, a, b))
        sizes = a.like.shape[-2], b.like.shape[-1], a.like.shape[-1]  # M, N, K
        strides = (s for array in (made, a, b) for s in array.like.stride()[-2:])
        self.lines.append(f"{batch}matmul{f}({places}, {', '.join(map(str, (*sizes, *strides)))});")
        return made

    def _copy(self, like: Tensor, base: object) -> Array:
        return self._fill(self._new(like), base)

    def _fill(self, made: Array, base: object) -> Array:
        base = self._array(base)
        self._loop(made.like.shape, made.like.stride(), lambda i: f"{made(i)} = {base(i)};")
        return made

    def _cumulate(self, like: Tensor, base: object, dim: int, *_: object, sign: str) -> Array:
        made, num = self._copy(like, base), like.shape[dim] - 1
        before, after = (Array(like.narrow(dim, start, num), made.buffer) for start in (0, 1))
        self._loop(after.like.shape, like.stride(), lambda i: f"{after(i)} {sign} {before(i)};")
        return made

    def _scatter(self, like: Tensor, base: object, dim: int, chosen: object, source: object, *, sign: str) -> Array:
        made, chosen, source = self._copy(like, base), self._array(chosen), self._array(source, like.dtype)
        dim, shape = dim % like.dim(), chosen.like.shape
        put = lambda i: made([*i[:dim], chosen(i), *i[dim + 1 :]])  # noqa: E731
        self._loop(shape, list(range(len(shape), 0, -1)), lambda i: f"{put(i)} {sign} {source(i)};")
        return made

    def _replace(self, view: Callable[..., Tensor], like: Tensor, base: object, part: object, *where: int) -> Array:
        """A copy of the base in which the view at ``where`` is replaced by the part."""
        made = self._copy(like, base)
        self._fill(Array(view(made.like, *where), made.buffer), part)
        return made

    def _cat(self, like: Tensor, parts: Sequence, dim: int = 0) -> Array:
        made, parts = self._new(like), [self._array(part) for part in parts]
        for part, view in zip(parts, like.split([part.like.shape[dim] for part in parts], dim), strict=True):
            self._fill(Array(view, made.buffer), part)
        return made


def _copies(like: Tensor, a: Tensor, b: Tensor) -> tuple[int, list[tuple[int, int]]]:
    """The cheapest copies that make ``matmul`` fast: (elements to copy, [(number of a factor, axis to be dense)])."""
    (m, k), n, (om, on) = a.shape[-2:], b.shape[-1], like.stride()[-2:]
    wide = 32 // like.element_size()  # numbers of a vector
    along_m, along_n, along_k = om == 1 and m >= wide, on == 1 and n >= wide, k > 4
    ways = []
    for possible, *axes in ((along_n, None, -1), (along_m, -2, None), (along_k, -1, -2)):
        parts = [(i, axis) for i, axis in enumerate(axes) if axis is not None and (a, b)[i].stride(axis) != 1]
        if possible:
            ways.append((sum((a, b)[i].numel() for i, _ in parts), parts))
    return min(ways, key=lambda way: way[0], default=(0, []))
