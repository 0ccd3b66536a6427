"""Attention of a layer's queries over all tokens of the layer: contract and torch reference.

The reference is composed of `attend_segments`, the linear maps and `merge_segments`.

Shapes: B batch, H key-value heads, G = Hq/H query heads per key-value head, q queries,
R = G·q query rows per key-value head (row r = g·q + i for grouped head g and query i),
T tokens of a segment, D head dim of keys, Dv of values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tersekv.kernels.attend_packed import Operand
from tersekv.kernels.attend_segments import Segment, attend_segments
from tersekv.kernels.marks import Marks, heads_of
from tersekv.kernels.registry import NotTaken, operator
from tersekv.kernels.softmax import merge_segments, prefers_native, score_bias

Where = int | Tensor | Marks
"""Positions or visibility of a segment's tokens. One of:

- int: position of the first token; the others follow.
- `Marks`: bits of the tokens' positions, ascending. Only for packed pages.
- int tensor [T] or [B, T], or [B, H, T] with −1 for an empty place: position of each token.
- bool tensor [B, q, T] or [B, H, q, T]: the segment's own mask.
"""


Room = tuple[Tensor, Tensor]
"""Places [B, H, n, D] for copies of keys and values."""

Table = tuple[Tensor, int]
"""Page table of a pool: page of each row's tokens, int32 [B, P] with −1 for none, and tokens per
page."""


class Map(Protocol):
    """Linear map between the decoded inner vectors and the original ones, see
    `tersekv.layouts.linear_map.LinearMap`."""

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
        """float [1 or B, H, D], added to the output."""

    @property
    def rest(self) -> int:
        """Number of channels after those of the map, which it leaves as they are."""

    @property
    def keeps_query(self) -> bool:
        """True if the query itself is needed too, next to the mapped one."""

    def query(self, query: Tensor) -> Tensor:
        """Return the query that inner vectors are multiplied with."""

    def output(self, out: Tensor) -> Tensor:
        """Return the output that belongs to weighted means of inner vectors."""


class PackedPages:
    """Packed pages of a layer, which attention reads at every step until they change.

    Attributes:
        keys, values: inner vectors of each page.
        where: positions of each page. tokens: number of tokens of each page.
        maps: linear map of all keys, and of all values.
        heads: H.
        listed: positions or masks that are tensors, with `ends` if there are; None for the other pages; None if no
            page has such.
        is_mapped: True if the query or the output must be transformed.
        corrections: float32 [1 or B, H, D] of each page, see `softmax.score_bias`, or None.
        shared: number of the first channels of keys that are the values, 0 if these are others.
        ends: of each page None, or int64 [B, H] if the page holds the tokens of one head after those of another: the
            token where each head's own ones end. All heads then share packed tensors, and positions int32 [T], marks
            that have the same ends, or a mask bool [q, T]. The torch reference does not read such pages.
        padded: function that returns the same tokens as pages without `ends`, in which heads with fewer tokens have
            empty places. It copies the packed tensors. None if no page has `ends`.
        alike: numbers of the pages with the same correction, for each of them.
        made: kernel arguments that backends built once, by the backend's name.
        kept: True if the store returns this same object until its packed tokens change.
    """

    kept = False

    def __init__(
        self,
        keys: Sequence[Operand],
        values: Sequence[Operand],
        where: Sequence[Where],
        tokens: Sequence[int],
        maps: tuple[Map, Map],
        heads: int,
        corrections: Sequence[Tensor | None] | None = None,
        shared: int = 0,
        ends: Sequence[Tensor | None] | None = None,
        padded: Callable[[], PackedPages | None] | None = None,
    ) -> None:
        self.keys, self.values, self.maps = tuple(keys), tuple(values), maps
        self.tokens, self.heads, self.shared = tuple(tokens), heads, shared
        self.corrections = (None,) * len(self.keys) if corrections is None else tuple(corrections)
        alike: dict[int, list[int]] = {}
        for i, correction in enumerate(self.corrections):
            alike.setdefault(id(correction), []).append(i)
        self.alike = list(alike.values())
        self.ends = (None,) * len(self.keys) if ends is None else tuple(ends)
        self._place(where, padded)
        self.is_mapped = maps[0].keeps_query or any(
            x is not None for of in maps for x in (of.rotation, of.basis, of.mean)
        )
        self.made: dict[str, Any] = {}

    def _place(self, where: Sequence[Where], padded: Callable[[], PackedPages | None] | None) -> None:
        """Set the positions or masks of the pages."""
        self.where, self.padded = tuple(where), padded
        listed = tuple(
            None if not isinstance(place, Tensor) else place if end is None else (place, end)
            for place, end in zip(self.where, self.ends, strict=True)
        )
        self.listed = listed if any(place is not None for place in listed) else None

    def located(self, where: Sequence[Where], padded: Callable[[], PackedPages | None] | None = None) -> PackedPages:
        """Return these pages with other positions or masks; both share the cached kernel arguments.

        padded: see above.
        """
        other = object.__new__(PackedPages)
        other.__dict__.update(self.__dict__, kept=False)
        other._place(where, padded)
        return other

    def __getstate__(self) -> dict[str, Any]:
        """A copy starts without cached kernel arguments, because its tensors have other addresses."""
        return self.__dict__ | {"made": {}}


class Masks(NamedTuple):
    """The mask of a call, from which each segment takes its columns.

    mask: bool [B, q, number of tokens], True where a token is visible; None: all are.
    hidden: int64 [B], tokens at smaller positions are invisible to that row; or None.
    """

    mask: Tensor | None
    hidden: Tensor | None

    def at(self, where: Where, tokens: int, ends: Tensor | None = None) -> Tensor | None:
        """Return the mask of a segment, bool [B, q, T] or [B, H, q, T]; None if all tokens are visible.

        ends: see `PackedPages`; those of marks need not be given. The mask is [q, T] then.
        """
        if isinstance(where, Tensor) and where.dtype == torch.bool:
            return where
        if isinstance(where, Marks):
            if self.mask is None and self.hidden is None:
                return None
            ends, where = where.ends, where.positions()
            if ends is None and self.hidden is not None:
                where = where.masked_fill(where < self.hidden[:, None, None], -1)
        if ends is not None:
            assert isinstance(where, Tensor)
            return self._in_turn(where.flatten(), ends)
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

    def _in_turn(self, positions: Tensor, ends: Tensor) -> Tensor | None:
        """Return the mask of a page with one head's tokens after another's. positions: int [T], −1 for none."""
        held, at = positions >= 0, positions.clamp(min=0).long()
        if self.mask is None and self.hidden is None and bool(held.all()):
            return None
        rows = heads_of(ends, at) // ends.shape[1]
        seen = held[None] if self.mask is None else self.mask[rows, :, at].T.contiguous() & held
        return seen if self.hidden is None else seen & (at >= self.hidden[rows])

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
    exact: tuple[tuple[Tensor, Tensor, Where | None], ...],
    pages: PackedPages | None,
    mask: Tensor | None,
    hidden: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    parts: bool = False,
    table: Table | None = None,
    room: Room | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scaling · q·K̂ᵀ)·V̂ over all segments, which hold disjoint tokens.

    Args:
        query: [B, Hq, q, D], any float type.
        exact: (keys, values [B, H, T, D], where) of unpacked tokens. where None, in calls without `mask` and
            `hidden`: they end with the queries' own tokens, and a query sees no later ones.
        pages: packed tokens.
        mask, hidden: see `Masks`.
        scaling: factor on the scores. softcap: s -> softcap·tanh(s/softcap), or None.
        sinks: float [Hq], logits that take part in the softmax without a value.
        parts: return float32 out and lse, which can be merged with attention over other tokens.
        table: page table, see `kernels/attend_pages.py`. Then `pages` is one pool for all rows, row
            b reads the pages in table entry b, and `where` of the pool is its mask.
        room: where the tokens of the last of `exact` are copied to. They have its types.

    Returns:
        [B, q, Hq, Dv] in the query's type. With `parts`: out float32 [B, H, R, Dv] and lse
        float32 [B, H, R]. A row that sees no token has out 0 and lse -inf.
    """
    if table is not None:
        raise NotTaken("attend does not read page tables; use attend_pages")
    if room is not None:
        copy_tokens(exact, room)
    if pages is not None and pages.padded is not None:
        pages = pages.padded()
    return composed(attend_segments.reference, query, exact, pages, mask, hidden, scaling, softcap, sinks, parts)


def composed(
    segments: Callable[..., tuple[Tensor, Tensor]],
    query: Tensor,
    exact: tuple[tuple[Tensor, Tensor, Where | None], ...],
    pages: PackedPages | None,
    mask: Tensor | None,
    hidden: Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
    parts: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `attend` with any implementation of `attend_segments`; maps and merging run in torch."""
    H = exact[0][0].shape[1] if pages is None else pages.heads
    rows = query_rows(query, H).float()
    plain, packed = segments_of(query, exact, pages, mask, hidden)
    if pages is None or not (pages.is_mapped or any(x is not None for x in pages.corrections)):
        out, lse = segments(rows, [*plain, *packed], scaling, softcap)
    else:
        keys, values = pages.maps
        mapped = keys.query(rows)
        of_pages = []
        for numbers in pages.alike:
            inner, lse = segments(mapped, [packed[i] for i in numbers], scaling, softcap)
            if (correction := pages.corrections[numbers[0]]) is not None:
                lse = lse + score_bias(mapped, correction, scaling)
            of_pages.append((inner, lse))
        inner, lse = _merged(of_pages)
        out = values.output(inner)
        if plain:
            beside = segments(rows, plain, scaling, softcap)
            out, lse = merge_segments([beside[0], out], [beside[1], lse])
        elif values.mean is not None:
            out = out.masked_fill(lse.isneginf().unsqueeze(-1), 0.0)
    return (out, lse) if parts else finished(out, lse, query, sinks)


def copy_tokens(exact: tuple[tuple[Tensor, Tensor, Where | None], ...], room: Room) -> None:
    """Copy the last exact tokens to their `room`, see `attend`."""
    for x, place in zip(exact[-1][:2], room, strict=True):
        place.copy_(x)


def query_rows(query: Tensor, H: int) -> Tensor:
    """Return queries [B, Hq, q, D] as the rows of their key-value heads, [B, H, R, D]."""
    B, Hq, q, D = query.shape
    return query.reshape(B, H, Hq // H * q, D)


def segments_of(
    query: Tensor,
    exact: tuple[tuple[Tensor, Tensor, Where | None], ...],
    pages: PackedPages | None,
    mask: Tensor | None,
    hidden: Tensor | None,
) -> tuple[list[Segment], list[Segment]]:
    """Return the segments of exact tokens and of packed pages, with their masks."""
    q, cut = query.shape[2], Masks(mask, hidden)
    assert mask is hidden is None or all(where is not None for *_, where in exact)
    plain = [Segment(k, v, _own(q, k) if where is None else cut.at(where, k.shape[2])) for k, v, where in exact]
    if pages is None:
        return plain, []
    each = zip(pages.keys, pages.values, pages.where, pages.tokens, pages.ends, strict=True)
    return plain, [Segment(k, v, cut.at(where, tokens, ends), True, ends) for k, v, where, tokens, ends in each]


def causal(q: int, T: int, device: torch.device) -> Tensor:
    """Return the causal mask, bool [1, q, T], with query i at position T − q + i."""
    return (torch.arange(T, device=device) <= torch.arange(T - q, T, device=device)[:, None])[None]


def _own(q: int, keys: Tensor) -> Tensor:
    """Return the mask of keys [B, H, T, D] that end with the queries' own tokens, bool [B, q, T]."""
    return causal(q, keys.shape[2], keys.device).expand(len(keys), -1, -1)


def _merged(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(parts) == 1:
        return parts[0]
    return merge_segments([out for out, _ in parts], [lse for _, lse in parts])


def attend_floats(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    where: Tensor | int | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None = None,
    parts: bool = False,
) -> Any:
    """Return `attend` over unpacked tokens by our kernel; None where torch's is faster, or ours does not support it."""
    if not prefers_native(query, keys, values):
        return None
    return attend.direct(query, ((keys, values, where),), None, None, None, scaling, softcap, sinks, parts)


@operator()
def merge_chunk(outs: list[Tensor], lses: list[Tensor], query: Tensor, sinks: Tensor | None) -> Tensor:
    """Merge attention over disjoint sets of tokens to a layer's output [B, q, Hq, Dv] in the query's type.

    outs, lses: float32 [B, H, R, Dv] and [B, H, R] of any strides, see `softmax.merge_segments`.
    query: [B, Hq, q, D]. sinks: see `attend`.
    """
    out, lse = merge_segments(outs, lses)
    return finished(out, lse, query, sinks)


def finished(out: Tensor, lse: Tensor, query: Tensor, sinks: Tensor | None) -> Tensor:
    """Convert out [B, H, R, Dv] with lse [B, H, R] to [B, q, Hq, Dv] in the query's type; sinks:
    see `attend`."""
    B, Hq, q, _ = query.shape
    out = out.reshape(B, Hq, q, -1)
    if sinks is not None:
        out = out * torch.sigmoid(lse.reshape(B, Hq, q) - sinks.float().view(1, Hq, 1)).unsqueeze(-1)
    return out.transpose(1, 2).to(query.dtype).contiguous()  # models call view on the result
