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
from tersekv.kernels.triton import spec, tuning
from tersekv.kernels.triton.leaves import Leaf, Readable, UnreadableError, changed, power


def why_not_in_pages(name: str, leaves: Iterable[Leaf], turn: tuple[Any, ...] = ()) -> str | None:
    """Why tokens of these leaves are not read in another order than they lie in; None if they are."""
    if turn or any(leaf.spec[0] == spec.TURNED.value for leaf in leaves):
        return f"{name} have RoPE: their tokens have one order"
    return f"{name} have outliers in one order" if any(x.spec[0] == spec.SPARSE.value for x in leaves) else None


class Keys(NamedTuple):
    """Leaves whose scores add up, and RoPE: angles (`rope.py`) with what `_partners` returns as pairs, and where they
    come from; empty and 0 where there is none."""

    leaves: list[Leaf]
    turn: tuple[Any, ...]
    roped: int = 0


def keys(operand: Operand, query: Tensor) -> Keys:
    """Leaves of keys for query float32 [B, H, R, D].

    Raises:
        UnreadableError: the kernels do not read them.
    """
    readable = Readable("keys", query.device)
    if getattr(operand, "kind", None) != "roped":
        return Keys(_key_leaves(readable, operand, query), ())
    roped: Any = operand
    D = query.shape[-1]
    before = roped.before
    rotation = None
    if before.kind == "rotated":
        rotation, before = readable.plane("a rotation", before.rotation, (torch.float32,))[0], before.inner
    leaves = _key_leaves(readable, before.operand, query, turned=True)
    if rotation is not None:
        if any(leaf.matrix is not None or leaf.spec[0] == spec.SPARSE.value for leaf in leaves) or len(leaves) > 1:
            raise UnreadableError(f"keys have a rotation of {roped.before.format} in front of RoPE")
        leaves = [_mapped(leaves[0], rotation, D)]
    partners = _partners(roped.rope, D, query.device)
    angles, kind = readable.angles(roped.angles, partners)
    return Keys(leaves, (*angles, partners), kind)


def _key_leaves(
    readable: Readable, operand: Operand, query: Tensor, turned: bool = False, first: int = 0
) -> list[Leaf]:
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
    if kind == "turned":
        if turned:
            raise UnreadableError("keys have RoPE twice")
        pairs = _pairs(view.rope, view.mean.shape[-1], query.device)
        return [readable.turned(view, pairs)._replace(query=query)]
    if kind != "signs":
        return [changed(readable.leaf(operand), spec.FIRST, first)._replace(query=query)]
    return [_sketched(readable, sketch, view.head_dim, query, turned, first) for sketch in view.sketches]


def _sketched(readable: Readable, sketch: Any, D: int, query: Tensor, turned: bool, first: int) -> Leaf:
    """The leaf of one sketch of keys."""
    if sketch.varies:
        behind = 0
        if sketch.channels is None and not turned:  # the whole sketched query, which each block takes a part from
            sketched = torch.matmul(query, sketch.sketch.T)
            query, behind = torch.cat([sketched, query], dim=-1), sketched.shape[-1]
        if sketch.channels is None and turned:
            _check_matrix(sketch.sketch, len(sketch.sketch), D)
        return changed(readable.sketch(sketch, D, behind), spec.FIRST, first)._replace(query=query)
    if not turned:
        return readable.signs(sketch)._replace(query=sketch.query(query))
    leaf = changed(readable.signs(sketch), spec.FIRST, first)._replace(query=query)
    return _mapped(leaf, _spread(sketch, D), D)


def _check_matrix(matrix: Tensor, n: int, D: int) -> None:
    """Of [n, D], in front of RoPE: a program holds all of it.

    Raises:
        UnreadableError: it is too large.
    """
    most = tuning.most_matrix(tuning.architecture(matrix.device))
    if power(n) * power(D) > most:
        raise UnreadableError(f"keys have a matrix of {n} × {D} in front of RoPE, more than {most:,} elements")


def _mapped(leaf: Leaf, matrix: Tensor, D: int) -> Leaf:
    """A leaf whose decoded vectors [n] become [D] by a matrix [n, D], or one per head [B, H, n, D]."""
    _check_matrix(matrix, matrix.shape[-2], D)
    leaf = changed(changed(leaf, spec.MAPPED, power(D)), spec.MAPPED_CHANNELS, D)
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
    """Leaves with an output each, `channels` in all, and what makes one output of them."""

    leaves: list[Leaf]
    channels: int
    tree: Any

    def join(self, out: Tensor) -> Tensor:
        """The output [B, H, R, Dv] from those of the leaves side by side [B, H, R, channels]."""
        return self.tree(out)


NO_VALUES = Values([], 0, lambda out: out)


def values(operand: Operand, device: torch.device) -> Values:
    """Leaves of values.

    Raises:
        UnreadableError: the kernels do not read them.
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
            D, varies = view.head_dim, sketch.varies
            leaves.append(_placed(readable.sketch(sketch, D, 0) if varies else readable.signs(sketch), leaves))
            S = None if varies else _spread(sketch, D)
            sketched.append((_slice(leaves, len(leaves) - 1, len(leaves)), S))
        return lambda out: _sum(pick(out) if S is None else pick(out) @ S for pick, S in sketched)
    if kind == "turned":
        raise UnreadableError("values have RoPE, which only keys have")
    leaves.append(_placed(readable.leaf(operand), leaves))
    return _slice(leaves, len(leaves) - 1, len(leaves))


def _placed(leaf: Leaf, leaves: list[Leaf]) -> Leaf:
    """A leaf whose output begins behind those that are there."""
    return changed(leaf, spec.FIRST, sum(other.spec[1] for other in leaves))


def _sum(parts: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, parts)


def _slice(leaves: list[Leaf], first: int, last: int) -> Callable[[Tensor], Tensor]:
    """Picks the outputs of these leaves."""
    start = sum(leaf.spec[1] for leaf in leaves[:first])
    size = sum(leaf.spec[1] for leaf in leaves[first:last])
    return lambda out: out if out.shape[-1] == size else out[..., start : start + size]
