"""Operands of attention as leaves: a tree of views becomes a list of layouts.

Sums and joins of layouts, sketches, RoPE and rotations in front of it are linear, so a leaf's scores are those of a
query of its own, and all leaves of the keys add up; each leaf of the values has an output of its own, and `Values.join`
makes one of them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tersekv.kernels.attend_packed import Operand
from tersekv.kernels.triton import leaves as constants
from tersekv.kernels.triton import tuning
from tersekv.kernels.triton.leaves import Leaf, Readable, UnreadableError, changed, identity, power


def why_not_in_pages(name: str, leaves: Iterable[Leaf], roped: int = 0) -> str | None:
    """Why tokens of these leaves are not read in another order than they lie in; None if they are."""
    if roped or any(leaf.spec[0] == constants.TURNED.value for leaf in leaves):
        return f"{name} have RoPE: their tokens have one order"
    return f"{name} have outliers in one order" if any(x.spec[0] == constants.SPARSE.value for x in leaves) else None


class Keys(NamedTuple):
    """Leaves whose scores add up, and RoPE: angles (`tiles.py`), channels as `_partners` returns them, and where the
    angles come from; empty, None and 0 where there is none."""

    leaves: list[Leaf]
    angles: tuple[Any, ...] = ()
    pairs: Tensor | None = None
    roped: int = 0


def size(operand: Operand) -> tuple[int, int]:
    """Tokens and channels of an operand."""
    if isinstance(operand, Tensor):
        return operand.shape[2], operand.shape[-1]
    view: Any = operand
    match getattr(operand, "kind", "grid"):
        case "grid":
            return view.codes.shape[2] * view.block_tokens, view.head_dim
        case "sum":
            return size(view.views[0].operand)
        case "concat":
            return size(view.views[0].operand)[0], sum(view.dims)
        case "roped":
            return size(view.before if view.before.kind == "rotated" else view.before.operand)
        case "rotated":
            return size(view.inner.operand)[0], view.rotation.shape[-1]
        case "rotated_mean":
            return view.tokens, view.mean.shape[-1]
        case "sparse":
            return view.starts.shape[2] * 32, view.head_dim
    return _blocks(view)


def _blocks(view: Any) -> tuple[int, int]:
    """As `size`, of layouts with a plane whose last axis is the tokens of a block."""
    match view.kind:
        case "signs":
            plane, channels = view.sketches[0].norms, view.head_dim
        case "polar":
            plane, channels = view.radii, view.polar.head_dim
        case "trellis":
            plane, channels = view.gain, view.head_dim
        case _:
            raise UnreadableError(f"no kernel reads the format {getattr(view, 'format', view.kind)}")
    return plane.shape[2] * plane.shape[-1], channels


def device_of(operand: Operand) -> torch.device:
    """Where the codes of an operand are, of its first layout where it has several."""
    view: Any = operand
    for name in ("before", "inner", "views", "sketches"):
        part = view if isinstance(view, Tensor) else getattr(view, name, view)
        if part is not view:
            part = part[0] if isinstance(part, list) else part
            return device_of(getattr(part, "operand", part))
    if not isinstance(view, Tensor):
        view = next(getattr(view, name) for name in _CODES if hasattr(view, name))
    device: torch.device = view.device
    return device


_CODES = ("codes", "signs", "radii", "gain", "starts", "mean")
"""A plane of each layout."""


def keys(operand: Operand, device: torch.device, dry: bool = False) -> Keys:
    """Leaves of keys. dry: checks only, see `Readable`.

    Raises:
        UnreadableError: the kernels do not read them.
    """
    readable = Readable("keys", device, dry)
    if getattr(operand, "kind", None) != "roped":
        return Keys(_key_leaves(readable, operand, _whole, ()))
    roped: Any = operand
    D = size(operand)[1]
    before = roped.before
    rotation = None
    if before.kind == "rotated":
        rotation, before = readable.plane("a rotation", before.rotation, (torch.float32,))[0], before.inner
    leaves = _key_leaves(readable, before.operand, _whole, (), roped=True)
    if rotation is not None:
        if any(leaf.matrix is not None or leaf.spec[0] == constants.SPARSE.value for leaf in leaves) or len(leaves) > 1:
            raise UnreadableError(f"keys have a rotation of {roped.before.format} in front of RoPE")
        leaves = [_mapped(leaves[0], functools.partial(_whole, rotation), (rotation.shape[-2], D), identity(rotation))]
    pairs = _partners(roped.rope, D, device)
    angles, kind = readable.angles(roped.angles, pairs)
    return Keys(leaves, angles, pairs, kind)


Query = Callable[[Tensor], Tensor]


def _whole(x: Tensor) -> Tensor:
    return x


def _key_leaves(
    readable: Readable, operand: Operand, query: Query, origin: tuple[Any, ...], roped: bool = False, first: int = 0
) -> list[Leaf]:
    """query: returns the operand's query from the segment's; origin: see `Leaf`. roped: RoPE follows, so that leaves
    are multiplied with the head's own channels, from `first` on."""
    kind = getattr(operand, "kind", None)
    view: Any = operand
    if kind == "sum":
        parts = [_key_leaves(readable, part.operand, query, origin, roped, first) for part in view.views]
        return [leaf for part in parts for leaf in part]
    if kind == "concat":
        leaves, at = [], 0
        for part, dim in zip(view.views, view.dims, strict=True):
            own = functools.partial(_channels, query, at, dim)
            leaves += _key_leaves(readable, part.operand, own, (*origin, at, dim), roped, first + at)
            at += dim
        return leaves
    if kind == "rotated_mean":
        if roped:
            raise UnreadableError("keys have RoPE twice")
        pairs = _pairs(view.rope, view.mean.shape[-1], readable.device)
        return [readable.turned(view, pairs)._replace(query=query, origin=origin)]
    if kind != "signs":
        return [changed(readable.leaf(operand), constants.FIRST, first)._replace(query=query, origin=origin)]
    return [_sketched(readable, sketch, view.head_dim, query, origin, roped, first) for sketch in view.sketches]


def _channels(query: Query, first: int, count: int, of: Tensor) -> Tensor:
    return query(of)[..., first : first + count]


def _sketched(
    readable: Readable, sketch: Any, D: int, query: Query, origin: tuple[Any, ...], roped: bool, first: int
) -> Leaf:
    """The leaf of one sketch of keys."""
    S = sketch.sketch
    if sketch.varies:
        behind = 0
        if sketch.channels is None and not roped:  # the whole sketched query, which each block takes a part from
            whole = query
            query, behind, origin = (lambda of: _with_sketched(whole(of), S)), len(S), (*origin, *identity(S))
        if sketch.channels is None and roped:
            _check_matrix(S, len(S), D)
        leaf = readable.sketch(sketch, D, behind)
        return changed(leaf, constants.FIRST, first)._replace(query=query, origin=origin)
    made_of = () if readable.dry else (identity(S), identity(sketch.channels), identity(sketch.dropped))
    if not roped:
        leaf, unsketched = readable.signs(sketch), query
        return leaf._replace(query=lambda of: sketch.query(unsketched(of)), origin=(*origin, *made_of))
    leaf = changed(readable.signs(sketch), constants.FIRST, first)._replace(query=query, origin=origin)
    return _mapped(leaf, functools.partial(_spread, sketch, D), (len(S), D), made_of)


def _with_sketched(query: Tensor, S: Tensor) -> Tensor:
    return torch.cat([torch.matmul(query, S.T), query], dim=-1)


def _check_matrix(like: Tensor, n: int, D: int) -> None:
    """Check the size of a matrix [n, D] before RoPE, since a program holds all of it; like: a tensor of its device.

    Raises:
        UnreadableError: it is too large.
    """
    most = tuning.most_matrix(tuning.architecture(like.device))
    if power(n) * power(D) > most:
        raise UnreadableError(f"keys have a matrix of {n} × {D} in front of RoPE, more than {most:,} elements")


def _mapped(leaf: Leaf, matrix: Callable[[], Tensor], shape: tuple[int, int], made_of: tuple[Any, ...]) -> Leaf:
    """A leaf whose decoded vectors [n] become [D] by a matrix [n, D] (`shape`), or one per head [B, H, n, D]."""
    n, D = shape
    _check_matrix(leaf.fields[0], n, D)
    leaf = changed(changed(leaf, constants.MAPPED, power(D)), constants.MAPPED_CHANNELS, D)
    return leaf._replace(matrix=matrix, origin=(*leaf.origin, *made_of))


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


_tables_of: weakref.WeakKeyDictionary[Any, dict[Any, Tensor]] = weakref.WeakKeyDictionary()
"""Of each RoPE, what `_pairs` and `_partners` made for a device."""


def _pairs(rope: Any, D: int, device: torch.device) -> Tensor:
    """`Rope.channels` on the device, int32 [D, 4]."""
    known = _tables_of.setdefault(rope, {})
    key = ("pairs", D, device)
    if key not in known:
        pairs = rope.channels(D)
        if pairs is None:
            raise UnreadableError("keys have a RoPE that does not turn pairs of channels")
        known[key] = pairs.to(device)
    return known[key]


def _partners(rope: Any, D: int, device: torch.device) -> Tensor:
    """RoPE as a query's channels meet those of a key, int32 [D, 4]: channel e of the key is multiplied by
    q[e]·cos[column] + sign·q[partner]·sin[across] with row (column, partner, across, sign), and by q[e] alone where its
    column is −1."""
    known = _tables_of.setdefault(rope, {})
    key = ("partners", D, device)
    if key not in known:
        partner, cos, sin, sign = _pairs(rope, D, torch.device("cpu")).long().unbind(1)
        moved, own = partner >= 0, torch.arange(D)
        back = torch.where(moved, partner.clamp(min=0), own)
        if not back[back].equal(own):
            raise UnreadableError("keys have a RoPE that does not turn pairs of channels")
        rows = [torch.where(moved, cos, -1), back, torch.where(moved, sin[back], 0), torch.where(moved, sign[back], 0)]
        known[key] = torch.stack(rows, 1).to(device, torch.int32)
    return known[key]


class Values(NamedTuple):
    """Leaves, their outputs of `channels` in all, and `join`, which makes the output [B, H, R, Dv] of them
    [B, H, R, channels]. plain: the output is that of the leaves as it is. origin: equal for values whose `join` does
    the same."""

    leaves: list[Leaf]
    channels: int
    join: Callable[[Tensor], Tensor]
    plain: bool = True
    origin: tuple[Any, ...] = ()


NO_VALUES = Values([], 0, _whole)


def values(operand: Operand, device: torch.device, dry: bool = False) -> Values:
    """Leaves of values. dry: checks only, see `Readable`.

    Raises:
        UnreadableError: the kernels do not read them.
    """
    leaves: list[Leaf] = []
    origin: list[Any] = []
    join = _value_leaves(Readable("values", device, dry), operand, leaves, origin)
    return Values(leaves, _end(leaves), join, isinstance(join, _Slice), tuple(origin))


class _Slice(NamedTuple):
    """The outputs of some leaves, which are side by side."""

    first: int
    end: int

    def __call__(self, out: Tensor) -> Tensor:
        return out if out.shape[-1] == self.end - self.first else out[..., self.first : self.end]


def _value_leaves(readable: Readable, operand: Operand, leaves: list[Leaf], origin: list[Any]) -> Any:
    """Adds the operand's leaves; returns the function that makes its output of all outputs."""
    kind = getattr(operand, "kind", None)
    view: Any = operand
    if kind in ("sum", "concat"):
        before, first = len(leaves), _end(leaves)
        parts = [_value_leaves(readable, part.operand, leaves, origin) for part in view.views]
        if kind == "sum":
            return _added(leaves, before, parts)
        if all(isinstance(part, _Slice) for part in parts):
            return _Slice(first, _end(leaves))
        return lambda out: torch.cat([part(out) for part in parts], dim=-1)
    if kind == "signs":
        sketched = []
        for sketch in view.sketches:
            D, varies = view.head_dim, sketch.varies
            leaves.append(_placed(readable.sketch(sketch, D, 0) if varies else readable.signs(sketch), leaves))
            if not readable.dry and not varies:
                origin += [identity(sketch.sketch), identity(sketch.channels), identity(sketch.dropped)]
            S = None if varies or readable.dry else _spread(sketch, D)
            sketched.append((_own(leaves), S))
        return lambda out: _sum(pick(out) if S is None else pick(out) @ S for pick, S in sketched)
    if kind == "rotated_mean":
        raise UnreadableError("values have RoPE, which only keys have")
    leaves.append(_placed(readable.leaf(operand), leaves))
    return _own(leaves)


def _added(leaves: list[Leaf], before: int, parts: list[Any]) -> Any:
    """The function that adds the parts' outputs. Where each part is one leaf of the same channels, the kernel adds
    them: their outputs are at the same place."""
    added = leaves[before:]
    alike = len({leaf.spec[1:3] for leaf in added}) == 1 and len(added) == len(parts)
    if not alike or not all(isinstance(part, _Slice) for part in parts):
        return lambda out: _sum(part(out) for part in parts)
    leaves[before:] = [changed(leaf, constants.FIRST, parts[0].first) for leaf in added]
    return parts[0]


def _end(leaves: list[Leaf]) -> int:
    """Channels of the outputs of leaves."""
    return max((leaf.spec[constants.FIRST.value] + leaf.spec[1] for leaf in leaves), default=0)


def _placed(leaf: Leaf, leaves: list[Leaf]) -> Leaf:
    """A leaf whose output begins behind those that are there."""
    return changed(leaf, constants.FIRST, _end(leaves))


def _own(leaves: list[Leaf]) -> _Slice:
    """The outputs of the last leaf."""
    end = _end(leaves)
    return _Slice(end - leaves[-1].spec[1], end)


def _sum(parts: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, parts)
