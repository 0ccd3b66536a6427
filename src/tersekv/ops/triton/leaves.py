"""Operands of attention as the kernels take them: a tree of views becomes a list of leaves.

Sums and joins of layouts, sketches, RoPE and rotations in front of it are linear, so a leaf's scores are those of a
query of its own, and all leaves of the keys add up; each leaf of the values has an output of its own, and `Values.join`
makes one of them. What the kernels do not read raises `Unreadable`, whose text `why_not` gives on.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tersekv.ops.attend_grid import GridSide
from tersekv.ops.attend_packed import Operand
from tersekv.ops.lanes import packed_words
from tersekv.ops.triton import spec

_HALVES = (torch.float16, torch.bfloat16)
_FLOATS = (torch.float32, *_HALVES)


class Unreadable(Exception):
    """Why the kernels do not read an operand."""


class Leaf(NamedTuple):
    """One packed layout: constants (`spec.py`), tensors and numbers; of keys the query [B, H, R, channels that it meets]
    and a matrix in front of RoPE (or none)."""

    spec: tuple[int, ...]
    fields: tuple[Any, ...]
    query: Tensor | None = None
    matrix: Tensor | None = None


def power(n: int, least: int = 16) -> int:
    """The next power of two."""
    return max(least, 1 << (n - 1).bit_length())


def _value(constant: Any) -> int:
    return int(constant.value)


def _spec(kind: Any, channels: int, padded: int, block: int, bfloat16: bool, *more: int) -> tuple[int, ...]:
    return (_value(kind), channels, padded, block, 0, int(bfloat16), 0, 0, *map(int, more))


def _with(leaf: Leaf, constant: Any, value: int) -> Leaf:
    at = _value(constant)
    return leaf._replace(spec=(*leaf.spec[:at], value, *leaf.spec[at + 1 :]))


class Readable:
    """Checks of one side's tensors. device: where they have to be."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device = name, device

    def plane(self, what: str, x: Tensor, dtypes: Sequence[torch.dtype], dense: int = 0) -> tuple[Any, ...]:
        """A tensor and the strides of its three leading axes, the last `dense` axes being contiguous."""
        if x.device != self.device:
            raise Unreadable(f"{self.name} have {what} on {x.device}, the query is on {self.device}")
        if x.dtype not in dtypes:
            readable = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise Unreadable(f"{self.name} have {what} of {x.dtype}, not {readable}")
        if x.requires_grad and torch.is_grad_enabled():
            raise Unreadable(f"{self.name} need a gradient")
        step = 1
        for size, stride in zip(reversed(x.shape[x.dim() - dense :]), reversed(x.stride()), strict=False):
            if size > 1 and stride != step:
                raise Unreadable(f"{self.name} have {what} with stride {stride}, not {step}, along an inner axis")
            step *= size
        return (x, *(0 if size == 1 else stride for size, stride in zip(x.shape[:3], x.stride(), strict=False)))

    def leaves(self, operand: Operand) -> list[Leaf]:
        """The layouts of an operand without linear maps on the outside, in order."""
        if isinstance(operand, Tensor):
            return [self._exact(operand)]
        if isinstance(operand, GridSide):
            return [self._grid(operand)]
        read = {"polar": self._polar, "sparse": self._sparse}.get(operand.kind)
        if read is None:
            raise Unreadable(f"no kernel reads the format {getattr(operand, 'format', operand.kind)}")
        return [read(operand)]

    def _exact(self, x: Tensor) -> Leaf:
        fields = self.plane("tokens", x, _FLOATS, 1)
        D, dtype = x.shape[-1], x.dtype
        constants = _spec(spec.EXACT, D, power(D), 32, dtype is torch.bfloat16, dtype is torch.float32)
        return Leaf(constants, fields)

    def _grid(self, grid: GridSide) -> Leaf:
        if grid.side != self.name:
            raise ValueError(f"{self.name}: expected a GridSide of {self.name}, got one of {grid.side}")
        if not 1 <= grid.bits <= 8:
            raise Unreadable(f"{self.name} have {grid.bits} bits, the kernels take 1 to 8")
        if grid.block_tokens % 32:
            raise Unreadable(f"{self.name} have blocks of {grid.block_tokens} tokens, not a multiple of 32")
        D, t, offset = grid.head_dim, grid.block_tokens, grid.offset
        wide = grid.scale.dtype is torch.bfloat16
        scales = _scales(grid)
        fields = (
            *self.plane("codes", grid.codes, (torch.int32,), 3),
            *self.plane("a scale", grid.scale, _HALVES, 2),
            *self.plane("an offset", grid.scale if offset is None else offset, _HALVES, 2),
            *self.plane("a table", grid.table, (torch.float32,), 1)[:1],
            grid.table.stride(0) if grid.table.dim() == 2 else 0,
        )
        words = packed_words(grid.bits, D if self.name == "keys" else t)
        more = grid.bits, grid.group, grid.axis == "token", offset is not None, grid.integers, words, scales
        return Leaf(_spec(spec.GRID, D, power(D, 32), t, wide, *more), fields)

    def _polar(self, view: Any) -> Leaf:
        polar, bits = view.polar, view.polar.level_bits
        angles = self.plane("angles", view.angles, (torch.uint8,), 2)
        radii = self.plane("radii", view.radii, _HALVES, 2)
        table = view.directions
        fields = (*angles, *radii, float(polar.radius_unit), table, table.stride(0) if len(table) > 1 else 0)
        wide = view.radii.dtype is torch.bfloat16
        D = polar.head_dim
        return Leaf(_spec(spec.POLAR, D, power(D), view.angles.shape[-1], wide, len(bits), *bits), fields)

    def _sparse(self, view: Any) -> Leaf:
        fields = (
            *self.plane("starts", view.starts, (torch.int32,)),
            *self.plane("places", view.places, (torch.int16,), 1)[:1],
            *self.plane("outliers", view.values, (torch.float16,), 1)[:1],
            len(view.places),
        )
        return Leaf(_spec(spec.SPARSE, view.head_dim, power(view.head_dim), 32, False), fields)

    def signs(self, sketch: Any) -> Leaf:
        """One sketch of a `signs` view."""
        if sketch.varies:
            raise Unreadable(f"{self.name} have sketches whose channels differ between blocks")
        signs = self.plane("signs", sketch.signs, (torch.uint8,), 2)
        norms = self.plane("norms", sketch.norms, _HALVES, 1)
        self.plane("a sketch", sketch.sketch, (torch.float32,))
        M = sketch.sketch.shape[0]
        constants = _spec(spec.SIGNS, M, power(M), sketch.signs.shape[-1], sketch.norms.dtype is torch.bfloat16)
        return Leaf(constants, (*signs, *norms, float(sketch.factor)))


def _scales(grid: GridSide) -> int:
    """Where a grid's scales are multiplied, see `grid.py`."""
    packed = grid.axis == ("channel" if grid.side == "keys" else "token")
    lanes = 32  # of a tile: they share a scale of the packed axis
    if grid.axis == "token" and grid.group >= grid.head_dim:
        return int(spec.TO_PRODUCT.value)
    return int((spec.TO_COEFFICIENTS if packed and grid.group % lanes == 0 else spec.TO_ELEMENTS).value)


class Keys(NamedTuple):
    """Leaves whose scores add up, and RoPE: cos and sin with strides of batch row, head and token, and what `_partners`
    returns; empty where there is none."""

    leaves: list[Leaf]
    turn: tuple[Any, ...]


def keys(operand: Operand, query: Tensor) -> Keys:
    """Leaves of keys for query float32 [B, H, R, D].

    Raises:
        Unreadable: the kernels do not read them.
    """
    readable = Readable("keys", query.device)
    if getattr(operand, "kind", None) != "roped":
        return Keys(_key_leaves(readable, operand, query), ())
    roped: Any = operand
    cos, sin = (x if x.dim() == 4 else x.unsqueeze(1) for x in (roped.cos, roped.sin))
    turn = (*readable.plane("cos", cos, (torch.float32,), 1), *readable.plane("sin", sin, (torch.float32,), 1))
    D = query.shape[-1]
    before = roped.before
    rotation = None
    if before.kind == "rotated":
        rotation, before = readable.plane("a rotation", before.rotation, (torch.float32,))[0], before.inner
    leaves = _key_leaves(readable, before.operand, query, turned=True)
    if rotation is not None:
        if any(leaf.matrix is not None or leaf.spec[0] == spec.SPARSE.value for leaf in leaves) or len(leaves) > 1:
            raise Unreadable(f"keys have a rotation of {roped.before.format} in front of RoPE")
        leaves = [_mapped(leaves[0], rotation, D)]
    return Keys(leaves, (*turn, _partners(roped.rope, D, cos.shape[-1], query.device)))


def _key_leaves(readable: Readable, operand: Operand, query: Tensor, turned: bool = False, first: int = 0) -> list[Leaf]:
    """turned: RoPE follows, so that all leaves meet the head's own channels, from `first` on."""
    kind = getattr(operand, "kind", None)
    view: Any = operand
    if kind == "added":
        return [leaf for part in view.views for leaf in _key_leaves(readable, part.operand, query, turned, first)]
    if kind == "joined":
        leaves, at = [], first
        for part, dim in zip(view.views, view.dims, strict=True):
            leaves += _key_leaves(readable, part.operand, query[..., at - first : at - first + dim], turned, at)
            at += dim
        return leaves
    if kind != "signs":
        return [_with(readable.leaves(operand)[0], spec.FIRST, first)._replace(query=query)]
    if not turned:
        return [readable.signs(sketch)._replace(query=sketch.query(query)) for sketch in view.sketches]
    leaves = []
    for sketch in view.sketches:
        leaf = _with(readable.signs(sketch), spec.FIRST, first)._replace(query=query)
        leaves.append(_mapped(leaf, _spread(sketch, view.head_dim), view.head_dim))
    return leaves


def _mapped(leaf: Leaf, matrix: Tensor, D: int) -> Leaf:
    """A leaf whose decoded vectors [n] become [D] by a matrix [n, D], or one per head [B, H, n, D]."""
    leaf = _with(_with(leaf, spec.MAPPED, power(D)), spec.MAPPED_CHANNELS, D)
    return leaf._replace(matrix=matrix if matrix.dim() == 4 else matrix[None, None])


def _spread(sketch: Any, D: int) -> Tensor:
    """S with its columns at their channels of the head: [M, D] or [B, H, M, D]."""
    S = sketch.sketch
    if sketch.channels is not None:
        index = sketch.channels.expand(-1, -1, S.shape[0], -1)
        S = S.new_zeros((*index.shape[:3], D)).scatter(-1, index, S.expand(index.shape))
    if sketch.dropped is not None:
        index = sketch.dropped.expand(-1, -1, S.shape[-2], -1)
        S = S.expand(*index.shape[:3], D).scatter(-1, index, 0.0)
    return S


_partners_of: weakref.WeakKeyDictionary[Any, dict[Any, Tensor]] = weakref.WeakKeyDictionary()


def _partners(rope: Any, D: int, columns: int, device: torch.device) -> Tensor:
    """RoPE as a query's channels meet those of a key, int32 [D, 4]: channel e of the key is multiplied by
    q[e]·cos[column] + sign·q[partner]·sin[across] with row (column, partner, across, sign), and by q[e] alone where its
    column is −1. Made once per RoPE and device."""
    known = _partners_of.setdefault(rope, {})
    key = (D, columns, device)
    if key not in known:
        pairs = rope.channels(D, columns)
        if pairs is None:
            raise Unreadable("keys have a RoPE that does not turn pairs of channels")
        partner, cos, sin, sign = pairs.long().unbind(1)
        moved, own = partner >= 0, torch.arange(D)
        back = torch.where(moved, partner.clamp(min=0), own)
        if not back[back].equal(own):
            raise Unreadable("keys have a RoPE that does not turn pairs of channels")
        rows = [torch.where(moved, cos, -1), back, torch.where(moved, sin[back], 0), torch.where(moved, sign[back], 0)]
        known[key] = torch.stack(rows, 1).to(device, torch.int32)
    return known[key]


class Values(NamedTuple):
    """Leaves with an output each, `channels` in all, and what makes one output of them."""

    leaves: list[Leaf]
    channels: int
    tree: Any

    def join(self, out: Tensor) -> Tensor:
        """The output [B, H, R, Dv] from those of the leaves side by side [B, H, R, channels]."""
        return self.tree(out)


def values(operand: Operand, device: torch.device) -> Values:
    """Leaves of values.

    Raises:
        Unreadable: the kernels do not read them.
    """
    leaves: list[Leaf] = []
    tree = _value_leaves(Readable("values", device), operand, leaves)
    return Values(leaves, sum(leaf.spec[1] for leaf in leaves), tree)


def _value_leaves(readable: Readable, operand: Operand, leaves: list[Leaf]) -> Any:
    """Adds the operand's leaves; returns the function that makes its output of all outputs."""
    kind = getattr(operand, "kind", None)
    view: Any = operand
    if kind in ("added", "joined"):
        before = len(leaves)
        parts = [_value_leaves(readable, part.operand, leaves) for part in view.views]
        if kind == "added":
            return lambda out: _sum(part(out) for part in parts)
        if len(leaves) == before + len(parts):  # side by side as they are
            return _slice(leaves, before, len(leaves))
        return lambda out: torch.cat([part(out) for part in parts], dim=-1)
    if kind == "signs":
        sketched = []
        for sketch in view.sketches:
            leaves.append(_placed(readable.signs(sketch), leaves))
            sketched.append((_slice(leaves, len(leaves) - 1, len(leaves)), _spread(sketch, view.head_dim)))
        return lambda out: _sum(pick(out) @ S for pick, S in sketched)
    leaves.append(_placed(readable.leaves(operand)[0], leaves))
    return _slice(leaves, len(leaves) - 1, len(leaves))


def _placed(leaf: Leaf, leaves: list[Leaf]) -> Leaf:
    """A leaf whose output begins behind those that are there."""
    return _with(leaf, spec.FIRST, sum(other.spec[1] for other in leaves))


def _sum(parts: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, parts)


def _slice(leaves: list[Leaf], first: int, last: int) -> Callable[[Tensor], Tensor]:
    """Picks the outputs of these leaves."""
    start = sum(leaf.spec[1] for leaf in leaves[:first])
    size = sum(leaf.spec[1] for leaf in leaves[first:last])
    return lambda out: out if out.shape[-1] == size else out[..., start : start + size]
