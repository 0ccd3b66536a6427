"""Build leaves from operands of attention: a tree of views becomes a list of layouts.

Sums and concatenations of layouts, sketches, RoPE and rotations before RoPE are linear. A key
leaf's scores are therefore those of its own query, and the scores of all key leaves are added. Each
value leaf has its own output; `Values.join` combines them.
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
    """Return the reason why the tokens of these leaves cannot be read in another order, or None."""
    if roped or any(leaf.spec[0] == constants.ROTATED_MEAN.value for leaf in leaves):
        return f"{name} have RoPE, so a page table cannot reorder their tokens"
    return (
        f"{name} have a list of outliers, so a page table cannot reorder their tokens"
        if any(x.spec[0] == constants.SPARSE.value and not x.spec[constants.PER_BLOCK.value] for x in leaves)
        else None
    )


class Keys(NamedTuple):
    """Leaves whose scores are added, and RoPE: angles (`tiles.py`), channels as `_partners` returns
    them, and the source of the angles. Without RoPE these are empty, None and 0."""

    leaves: list[Leaf]
    angles: tuple[Any, ...] = ()
    pairs: Tensor | None = None
    roped: int = 0


def size(operand: Operand) -> tuple[int, int]:
    """Return the number of tokens and of channels of an operand."""
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
        case "sparse blocks":
            return view.places.shape[2] * 32, view.head_dim
    return _blocks(view)


def _blocks(view: Any) -> tuple[int, int]:
    """Like `size`, for layouts that have a tensor whose last axis is the tokens of a block."""
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
    """Return the device of an operand's codes; the first layout's if it has several."""
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


_CODES = ("codes", "signs", "radii", "gain", "starts", "places", "mean")
"""Names of a tensor in each layout."""


def keys(operand: Operand, device: torch.device, dry: bool = False) -> Keys:
    """Build the leaves of keys. dry: checks only, see `Readable`.

    Raises:
        UnreadableError: the kernels cannot read them.
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
            raise UnreadableError(f"keys have a rotation of {roped.before.format} before RoPE")
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
    """Build the leaves of one operand of keys. query: returns the operand's query from the
    segment's; origin: see `Leaf`. roped: RoPE follows, so leaves are multiplied with the head's own
    channels, from `first` on."""
    kind = getattr(operand, "kind", None)
    view: Any = operand
    if kind == "sum":
        parts = [_key_leaves(readable, part.operand, query, origin, roped, first) for part in view.views]
        return [leaf for part in parts for leaf in part]
    dims = view.dims if kind == "concat" else _widths(operand)
    if dims:
        parts = [part.operand for part in view.views] if kind == "concat" else view.split(dims, -1)
        leaves, at = [], 0
        for part, dim in zip(parts, dims, strict=True):
            own = functools.partial(_channels, query, at, dim)
            leaves += _key_leaves(readable, part, own, (*origin, at, dim), roped, first + at)
            at += dim
        return leaves
    if kind == "rotated_mean":
        if roped:
            raise UnreadableError("keys have RoPE twice")
        pairs = _pairs(view.rope, view.mean.shape[-1], readable.device)
        return [readable.rotated_mean(view, pairs)._replace(query=query, origin=origin)]
    if kind != "signs":
        return [changed(readable.leaf(operand), constants.FIRST, first)._replace(query=query, origin=origin)]
    return [_sketched(readable, sketch, view.head_dim, query, origin, roped, first) for sketch in view.sketches]


def _widths(operand: Operand) -> list[int]:
    """Return the powers of two in which wide exact tokens are read, as latents with rotated keys are, because 576
    channels would be padded to 1,024. None for other operands."""
    left = operand.shape[-1] if isinstance(operand, Tensor) else 0
    if left <= tuning.WIDE or left == power(left):
        return []
    widths = []
    while left:
        widths.append(1 << (left.bit_length() - 1) if left > power(1) else left)
        left -= widths[-1]
    return widths


def _channels(query: Query, first: int, count: int, of: Tensor) -> Tensor:
    return query(of)[..., first : first + count]


def _sketched(
    readable: Readable, sketch: Any, D: int, query: Query, origin: tuple[Any, ...], roped: bool, first: int
) -> Leaf:
    """Build the leaf of one sketch of keys."""
    S = sketch.sketch
    if sketch.varies:
        behind = 0
        # the query sketched with all channels; each block subtracts the channels that it leaves out
        if sketch.channels is None and not roped:
            whole = query
            query, behind, origin = (lambda of: _with_sketched(whole(of), S)), len(S), (*origin, *identity(S))
        if sketch.channels is None and roped:
            _check_matrix(S, len(S), D)
        leaf = readable.sketch(sketch, D, behind)
        return changed(leaf, constants.FIRST, first)._replace(query=query, origin=origin)
    made_of = () if readable.dry else (identity(S), identity(sketch.channels), identity(sketch.dropped))
    if not roped:
        leaf, unsketched = readable.signs(sketch), query
        return leaf._replace(query=lambda of: sketch.query(unsketched(of).float()), origin=(*origin, *made_of))
    leaf = changed(readable.signs(sketch), constants.FIRST, first)._replace(query=query, origin=origin)
    return _mapped(leaf, functools.partial(_spread, sketch, D), (len(S), D), made_of)


def _with_sketched(query: Tensor, S: Tensor) -> Tensor:
    query = query.float()
    return torch.cat([torch.matmul(query, S.T), query], dim=-1)


def _check_matrix(like: Tensor, n: int, D: int) -> None:
    """Check the size of a matrix [n, D] before RoPE, because a program holds all of it.

    like: a tensor on the matrix's device.

    Raises:
        UnreadableError: the matrix is too large.
    """
    most = tuning.most_matrix(tuning.architecture(like.device))
    if power(n) * power(D) > most:
        raise UnreadableError(f"keys have a matrix of {n} × {D} before RoPE, more than {most:,} elements")


def _mapped(leaf: Leaf, matrix: Callable[[], Tensor], shape: tuple[int, int], made_of: tuple[Any, ...]) -> Leaf:
    """Return a leaf whose decoded vectors [n] are mapped to [D] by a matrix [n, D] (`shape`), or by
    one per head [B, H, n, D]."""
    n, D = shape
    _check_matrix(leaf.fields[0], n, D)
    leaf = changed(changed(leaf, constants.MAPPED, power(D)), constants.MAPPED_CHANNELS, D)
    return leaf._replace(matrix=matrix, origin=(*leaf.origin, *made_of))


def _spread(sketch: Any, D: int) -> Tensor:
    """Place the columns of S at their channels of the head: [M, D] or [B, H, M, D]."""
    S = sketch.sketch
    if sketch.channels is not None:
        index = sketch.channels.expand(-1, -1, S.shape[0], -1)
        S = S.new_zeros((*index.shape[:3], D)).scatter(-1, index, S.expand(index.shape))
    if sketch.dropped is not None:
        index = sketch.dropped.expand(-1, -1, S.shape[-2], -1)
        S = S.expand(*index.shape[:3], D).scatter(-1, index, 0.0)
    return S


_tables_of: weakref.WeakKeyDictionary[Any, dict[Any, Tensor]] = weakref.WeakKeyDictionary()
"""Cache per RoPE of the tables that `_pairs` and `_partners` make for a device."""


def _pairs(rope: Any, D: int, device: torch.device) -> Tensor:
    """Return `Rope.channels` on the device, int32 [D, 4]."""
    known = _tables_of.setdefault(rope, {})
    key = ("pairs", D, device)
    if key not in known:
        pairs = rope.channels(D)
        if pairs is None:
            raise UnreadableError("keys have a RoPE that does not rotate pairs of channels")
        known[key] = pairs.to(device)
    return known[key]


def _partners(rope: Any, D: int, device: torch.device) -> Tensor:
    """Return RoPE as a transform of the query, int32 [D, 4] with rows (column, partner, across,
    sign). Channel e of the key is multiplied with q[e]·cos[column] + sign·q[partner]·sin[across].
    If column is −1, it is multiplied with q[e] alone."""
    known = _tables_of.setdefault(rope, {})
    key = ("partners", D, device)
    if key not in known:
        partner, cos, sin, sign = _pairs(rope, D, torch.device("cpu")).long().unbind(1)
        moved, own = partner >= 0, torch.arange(D)
        back = torch.where(moved, partner.clamp(min=0), own)
        if not back[back].equal(own):
            raise UnreadableError("keys have a RoPE that does not rotate pairs of channels")
        rows = [torch.where(moved, cos, -1), back, torch.where(moved, sin[back], 0), torch.where(moved, sign[back], 0)]
        known[key] = torch.stack(rows, 1).to(device, torch.int32)
    return known[key]


class Values(NamedTuple):
    """Leaves of values and their outputs.

    channels: of all outputs together.
    join: makes the output [B, H, R, Dv] from the leaves' outputs [B, H, R, channels].
    plain: True if the leaves' output is already the output.
    origin: equal for values whose `join` does the same.
    """

    leaves: list[Leaf]
    channels: int
    join: Callable[[Tensor], Tensor]
    plain: bool = True
    origin: tuple[Any, ...] = ()

    @property
    def latent(self) -> bool:
        """True if they are the first leaf of the keys."""
        return bool(self.leaves) and not self.leaves[0].fields


NO_VALUES = Values([], 0, _whole)


def values(operand: Operand, device: torch.device, dry: bool = False) -> Values:
    """Build the leaves of values. dry: checks only, see `Readable`.

    Raises:
        UnreadableError: the kernels cannot read them.
    """
    leaves: list[Leaf] = []
    origin: list[Any] = []
    join = _value_leaves(Readable("values", device, dry), operand, leaves, origin)
    return Values(leaves, _end(leaves), join, isinstance(join, _Slice), tuple(origin))


def latents(operand: Operand, device: torch.device) -> tuple[Keys, Values]:
    """Build the leaves of latents with rotated keys, which are keys, and of the latents, which are values.

    Grids of both are packed as those of values. The leaf of the values has no fields.

    Raises:
        UnreadableError: the kernels cannot read them.
    """
    view: Any = operand
    if getattr(operand, "kind", None) != "concat":
        raise UnreadableError(f"latents with rotated keys are packed as {getattr(view, 'kind', 'exact tokens')}")
    R, at, leaves = view.dims[0], 0, []
    for part, dim in zip(view.views, view.dims, strict=True):
        leaf = Readable("values", device).leaf(part.operand)
        leaves.append(leaf._replace(query=functools.partial(_channels, _whole, at, dim), origin=(at, dim)))
        at += dim
    join: Any = _Slice(0, R)
    return Keys(leaves), Values([Leaf(leaves[0].spec, ())], R, join, origin=(R,))


class _Slice(NamedTuple):
    """Selects the outputs of consecutive leaves."""

    first: int
    end: int

    def __call__(self, out: Tensor) -> Tensor:
        return out if out.shape[-1] == self.end - self.first else out[..., self.first : self.end]


def _value_leaves(readable: Readable, operand: Operand, leaves: list[Leaf], origin: list[Any]) -> Any:
    """Append the operand's leaves; return the function that computes its output from all outputs."""
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
    """Return the function that adds the parts' outputs. If each part is one leaf of the same
    channels, the kernel adds them, because their outputs have the same place."""
    added = leaves[before:]
    alike = len({leaf.spec[1:3] for leaf in added}) == 1 and len(added) == len(parts)
    if not alike or not all(isinstance(part, _Slice) for part in parts):
        return lambda out: _sum(part(out) for part in parts)
    leaves[before:] = [changed(leaf, constants.FIRST, parts[0].first) for leaf in added]
    return parts[0]


def _end(leaves: list[Leaf]) -> int:
    """Return the number of channels of the outputs of leaves."""
    return max((leaf.spec[constants.FIRST.value] + leaf.spec[1] for leaf in leaves), default=0)


def _placed(leaf: Leaf, leaves: list[Leaf]) -> Leaf:
    """Return a leaf whose output begins after those of the existing leaves."""
    return changed(leaf, constants.FIRST, _end(leaves))


def _own(leaves: list[Leaf]) -> _Slice:
    """Return the slice of the last leaf's output."""
    end = _end(leaves)
    return _Slice(end - leaves[-1].spec[1], end)


def _sum(parts: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, parts)
