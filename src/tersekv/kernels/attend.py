"""Attention of a layer's queries over everything that it holds: contract, and the composition of other operators.

Shapes: B batch, H key-value heads, G = Hq/H query heads each, q queries, R = G·q rows per key-value head (row
r = g·q + i for grouped head g and query i), T tokens of a segment, D head dim of keys, Dv of values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tersekv.kernels.attend_packed import Operand
from tersekv.kernels.attend_segments import Segment, attend_segments
from tersekv.kernels.registry import NotTaken, operator
from tersekv.kernels.softmax import merge_segments

Where = int | Tensor
"""Where a segment's tokens stand: position of the first one; positions int [T], [B, T], or [B, H, T] with −1 for none;
or a mask of their own, bool [B, q, T] or [B, H, q, T]."""


Table = tuple[Tensor, int]
"""Pages int32 [B, P] of each row's tokens in a pool, −1 for none, and tokens per page."""


class Map(Protocol):
    """A linear map between inner vectors and those that were coded, see `tersekv.layouts.base.LinearMap`."""

    @property
    def rotation(self) -> Tensor | None:
        """float32 [D, D] or [B, H, D, D]."""

    @property
    def basis(self) -> Tensor | None:
        """See `kernels/basis.py`."""

    @property
    def channels(self) -> Tensor | None:
        """See `kernels/basis.py`."""

    @property
    def mean(self) -> Tensor | None:
        """float [1 or B, H, D], added to outputs."""

    @property
    def keeps_query(self) -> bool:
        """True if the query itself stands behind the mapped one."""

    def query(self, query: Tensor) -> Tensor:
        """What inner vectors are multiplied with."""

    def output(self, out: Tensor) -> Tensor:
        """Outputs from weighted means of inner vectors."""


class PackedPages:
    """Packed pages of a layer that attention reads at every step, until they change.

    keys, values: inner vectors of each page; where, tokens: of each page; maps: of all keys and of all values; heads:
    H. made: what backends made of them once, by the backend's name.
    """

    def __init__(
        self,
        keys: Sequence[Operand],
        values: Sequence[Operand],
        where: Sequence[Where],
        tokens: Sequence[int],
        maps: tuple[Map, Map],
        heads: int,
    ) -> None:
        self.keys, self.values, self.where, self.maps = tuple(keys), tuple(values), tuple(where), maps
        self.tokens, self.heads = tuple(tokens), heads
        self.is_consecutive = all(isinstance(place, int) for place in where)
        self.is_mapped = maps[0].keeps_query or any(
            x is not None for of in maps for x in (of.rotation, of.basis, of.mean)
        )
        self.made: dict[str, Any] = {}

    def located(self, where: Sequence[Where]) -> PackedPages:
        """These pages with other positions or masks; what was made of them is shared."""
        other = PackedPages(self.keys, self.values, where, self.tokens, self.maps, self.heads)
        other.made = self.made
        return other

    def __getstate__(self) -> dict[str, Any]:
        """Copies begin with nothing made: their tensors are elsewhere."""
        return self.__dict__ | {"made": {}}


class Masks(NamedTuple):
    """The mask of a call, cut to segments. mask bool [B, q, tokens seen] (True: seen) or None for all; hidden int64
    [B]: positions of each row before which no token is seen, or None."""

    mask: Tensor | None
    hidden: Tensor | None

    def at(self, where: Where, tokens: int) -> Tensor | None:
        """bool [B, q, T] or [B, H, q, T] of a segment; None: all tokens are seen."""
        if isinstance(where, Tensor) and where.dtype == torch.bool:
            return where
        if isinstance(where, Tensor) and where.dim() == 3:
            return self._per_head(where)
        mask = self.mask
        if mask is None and self.hidden is not None:
            ones = torch.ones(1, 1, 1, dtype=torch.bool, device=self.hidden.device)
            last = where + tokens if isinstance(where, int) else int(where.max()) + 1
            mask = ones.expand(len(self.hidden), 1, last)
        if mask is None:
            return None
        if isinstance(where, Tensor) and where.dim() == 2:
            return mask.expand(len(where), -1, -1).gather(2, where[:, None].long().expand(-1, mask.shape[1], -1))
        if isinstance(where, Tensor):
            places, columns = where, mask.index_select(2, where)
        else:
            columns = mask[:, :, where : where + tokens]
            places = torch.arange(where, where + tokens, device=columns.device)
        return columns if self.hidden is None else columns & (places >= self.hidden[:, None])[:, None]

    def _per_head(self, positions: Tensor) -> Tensor | None:
        held = positions >= 0
        if self.mask is None:
            return None if bool(held.all()) else held.unsqueeze(2)
        B, H = positions.shape[:2]
        index = positions.clamp(min=0).long().unsqueeze(2).expand(-1, -1, self.mask.shape[1], -1)
        mask = self.mask.unsqueeze(1).expand(B, H, *self.mask.shape[1:])
        return mask.gather(3, index) & held.unsqueeze(2)


@operator()
def attend(
    query: Tensor,
    exact: tuple[tuple[Tensor, Tensor, Where], ...],
    pages: PackedPages | None,
    mask: Tensor | None,
    hidden: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    parts: bool = False,
    table: Table | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scaling · q·K̂ᵀ)·V̂ over all segments, which hold disjoint tokens.

    Args:
        query: [B, Hq, q, D], any float type.
        exact: (keys, values [B, H, T, D], where) of unpacked tokens.
        pages: packed ones.
        mask, hidden: see `Masks`.
        scaling: factor on the scores. softcap: s -> softcap·tanh(s/softcap), or None.
        sinks: float [Hq], logits that take part in the softmax without a value.
        parts: return the parts of a larger softmax.
        table: `pages` is one pool for all rows, of which row b reads the pages that entry b names, see
            `kernels/attend_pages.py`; then `where` of the pool is its mask.

    Returns:
        [B, q, Hq, Dv] in the query's type; or parts: out float32 [B, H, R, Dv] and lse float32 [B, H, R]. A row that
        sees no token has out 0 and lse -inf.
    """
    if table is not None:
        raise NotTaken("a pool is read by attend_pages")
    return composed(attend_segments.reference, query, exact, pages, mask, hidden, scaling, softcap, sinks, parts)


def composed(
    segments: Callable[..., tuple[Tensor, Tensor]],
    query: Tensor,
    exact: tuple[tuple[Tensor, Tensor, Where], ...],
    pages: PackedPages | None,
    mask: Tensor | None,
    hidden: Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
    parts: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attend` by an implementation of `attend_segments`; maps and merging in torch."""
    H = exact[0][0].shape[1] if pages is None else pages.heads
    B, Hq, q, D = query.shape
    rows, cut = query.float().reshape(B, H, Hq // H * q, D), Masks(mask, hidden)
    plain = [Segment(k, v, cut.at(where, k.shape[2])) for k, v, where in exact]
    packed = []
    if pages is not None:
        each = zip(pages.keys, pages.values, pages.where, pages.tokens, strict=True)
        packed = [Segment(k, v, cut.at(where, tokens), True) for k, v, where, tokens in each]
    if pages is None or not pages.is_mapped:
        out, lse = segments(rows, [*plain, *packed], scaling, softcap)
    else:
        keys, values = pages.maps
        inner, lse = segments(keys.query(rows), packed, scaling, softcap)
        out = values.output(inner)
        if plain:
            beside = segments(rows, plain, scaling, softcap)
            out, lse = merge_segments([beside[0], out], [beside[1], lse])
        elif values.mean is not None:
            out = out.masked_fill(lse.isneginf().unsqueeze(-1), 0.0)
    return (out, lse) if parts else finished(out, lse, query, sinks)


def finished(out: Tensor, lse: Tensor, query: Tensor, sinks: Tensor | None) -> Tensor:
    """out [B, H, R, Dv] with lse [B, H, R] as [B, q, Hq, Dv] in the query's type; sinks: see `attend`."""
    B, Hq, q, _ = query.shape
    out = out.reshape(B, Hq, q, -1)
    if sinks is not None:
        out = out * torch.sigmoid(lse.reshape(B, Hq, q) - sinks.float().view(1, Hq, 1)).unsqueeze(-1)
    return out.transpose(1, 2).to(query.dtype).contiguous()  # models call view
