"""Tokens chosen for each KV head: packed blocks, then loose exact tokens, with their positions.

All heads have the same number of slots. An empty slot has position −1 and is never attended to. A
packed token is evicted by clearing its position. A block that is empty in every head is freed. If
there are more blocks than allowed, each head loses those with the lowest total weight. Tokens are
packed again only if that changes no bit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from tersekv.cache import coding
from tersekv.cache.coding import Tokens
from tersekv.cache.footprint import Footprint
from tersekv.cache.pages import PageSizes
from tersekv.cache.parallel import HeadShard
from tersekv.cache.schema import MOST, Check, flag, of_spec, optional, record, require, tensor
from tersekv.cache.state import Spec, Stateful
from tersekv.cache.tier import Tier
from tersekv.codecs import Codec
from tersekv.layouts.base import Layout, View
from tersekv.tensors import TensorSpec, gathered
from tersekv.transforms.rope import Angles, Rope

WEIGHT = "weight"

SPARE, SPARE_MOVING = 1.5, 1.125
"""Maximum packed slots of a pool, as a multiple of the tokens that it may hold, and the same if its
layouts can move tokens.

This limits how many slots can become empty before whole blocks are evicted, or tokens are moved.
"""


def most_blocks(layouts: Iterable[Layout], tokens: int, flush: int) -> int:
    """Return how many blocks of `flush` slots a pool for so many tokens per head may have."""
    spare = SPARE_MOVING if all(layout.moves_tokens for layout in layouts) else SPARE
    return math.ceil(spare * max(0, tokens) / flush) + 1


class PoolSide(Tier):
    """One side of a pool. Packed blocks hold different tokens in each head.

    loose: [B, H, L, D], exact tokens: attention sinks, and tokens that do not fill a block yet.
    """

    STATE: ClassVar[Spec] = {"loose": lambda side: tensor(side.dtype, side.B, side.H, None, side.head_dim)}

    def __init__(self, codec: Codec, like: Tensor, dtype: torch.dtype, *arguments: Any) -> None:
        super().__init__(dataclasses.replace(codec, per_head=True), like, *arguments)
        self.dtype, self.loose = dtype, like.new_empty((self.B, self.H, 0, self.head_dim), dtype=dtype)

    def to(self, device: torch.device | str) -> None:
        """Move everything to a device."""
        super().to(device)
        self.loose = self.loose.to(device)

    def select(self, rows: Tensor) -> None:
        """Keep these batch rows."""
        super().select(rows)
        self.loose = self.loose.index_select(0, rows)


def _fields(pool: TokenPool) -> Check:
    """Return the check of the fields. An empty slot may hold any number."""
    B, H, _ = pool.positions.shape
    return record({name: of_spec(TensorSpec(x.dtype, (B, H, None), anything=True)) for name, x in pool.fields.items()})


POOL = {
    "positions": lambda pool: tensor(torch.int32, *pool.positions.shape[:2], None),
    "fields": _fields,
    "padding": lambda pool: optional(tensor(torch.int64, pool.positions.shape[0], low=0, high=MOST)),
    "moves": lambda pool: flag,
}


def pool_slots(pool: TokenPool, place: str) -> None:
    """Check that sides, positions and fields have the same slots."""
    counts = {(side.packed.tokens, side.loose.shape[2]) for side in pool.sides}
    require(len(counts) == 1, place, f"holds different numbers of slots for keys and values {sorted(counts)}")
    slots = sum(counts.pop())
    for name, x in {"positions": pool.positions, **pool.fields}.items():
        where = f"{place}.{name}" if name == "positions" else f"{place}.fields.{name}"
        require(x.shape[2] == slots, where, f"has {x.shape[2]} slots of {slots}")
        require(bool(x[pool.alive].isfinite().all()), where, "has a NaN or Inf where a slot holds a token")


class TokenPool(Stateful):
    """Chosen tokens of a layer.

    positions: int32 [B, H, slots], packed slots first, then loose ones.
    fields: further numbers per slot, by name.
    rope: RoPE of the keys, needed if they are coded before RoPE. Exact tokens are stored after
        RoPE.
    corrected: share of the bias of softmax weights that is corrected, see `Tier`.
    rest, base: bits of a lower rate, and the pool whose fit this one shares, see `Tier`.
    """

    STATE, RULES = POOL, (pool_slots,)
    PARTS = ("sides",)

    def __init__(
        self,
        codecs: Sequence[Codec],
        like: Sequence[Tensor],
        dtype: torch.dtype,
        fields: dict[str, torch.dtype] | None = None,
        rope: Rope | None = None,
        heads: HeadShard | None = None,
        corrected: float = 0.0,
        rest: float = 0.0,
        base: TokenPool | None = None,
    ) -> None:
        pairs, (B, H) = list(zip(codecs, like, strict=True)), like[0].shape[:2]
        self.flush_tokens = math.lcm(*(codec.layout(x.shape[-1]).block_tokens for codec, x in pairs))
        shares, sizes = (corrected, 0.0), PageSizes(self.flush_tokens)  # only keys have a bias to correct
        bases: Sequence[PoolSide | None] = (None, None) if base is None else base.sides
        self.heads = heads
        self.sides: list[PoolSide] = [
            PoolSide(codec, x, dtype, sizes, share, rest, own)
            for (codec, x), share, own in zip(pairs, shares, bases, strict=False)
        ]
        self.positions = like[0].new_empty((B, H, 0), dtype=torch.int32)
        self.fields = {name: like[0].new_empty((B, H, 0), dtype=kind) for name, kind in (fields or {}).items()}
        self.rope = rope if codecs[0].needs_rope else None
        self.padding: Tensor | None = None  # int64 [B], positions before each row's first token
        self.moves = True  # packing a token again gave the same bits so far

    @property
    def packed_tokens(self) -> int:
        """Number of packed slots."""
        return self.sides[0].packed.tokens

    @property
    def alive(self) -> Tensor:
        """Mask of slots that hold a token, bool [B, H, slots]."""
        return self.positions >= 0

    def add(self, tokens: Sequence[Tensor], positions: Tensor, fields: dict[str, Tensor]) -> None:
        """Append loose tokens: [B, H, n, D] for each side, positions [B, H, n] (−1 if a head has
        none).
        """
        for side, x in zip(self.sides, tokens, strict=True):
            side.loose = torch.cat([side.loose, x.to(side.dtype)], dim=2)
        self.positions = torch.cat([self.positions, positions.to(torch.int32)], dim=2)
        self.fields = {name: torch.cat([old, fields[name].to(old.dtype)], dim=2) for name, old in self.fields.items()}
        self._tidy()

    def take(self, tokens: Sequence[Tensor], positions: Tensor, chosen: Tensor, fields: dict[str, Tensor]) -> None:
        """Append those of tokens [B, H, n, D] that are in the mask chosen [B, H, n]."""
        order = (~chosen).int().argsort(dim=-1, stable=True)[:, :, : int(chosen.sum(-1).max())]
        entering = positions.masked_fill(~chosen, -1).gather(2, order)
        taken = {name: x.gather(2, order) for name, x in fields.items()}
        self.add([gathered(x, order) for x in tokens], entering, taken)

    def keep(self, alive: Tensor) -> None:
        """Empty all slots except those in the mask `alive` [B, H, slots]."""
        self.positions = self.positions.masked_fill(~alive, -1)
        self._tidy()

    def _tidy(self) -> None:
        """Move loose tokens to the front of their head and remove slots that no head uses."""
        P = self.packed_tokens
        alive = self.alive[:, :, P:]
        if not bool(alive.all()):
            order = (~alive).int().argsort(dim=-1, stable=True)[:, :, : int(alive.sum(-1).max())]
            for side in self.sides:
                side.loose = gathered(side.loose, order)
            self._rearrange(P + order)

    def _rearrange(self, loose: Tensor) -> None:
        """Reorder positions and fields: the packed slots, then the slots `loose` [B, H, n]."""
        P = self.packed_tokens

        def moved(x: Tensor) -> Tensor:
            return torch.cat([x[:, :, :P], x.gather(2, loose)], dim=2)

        self._map_figures(moved)

    def _angles(self, positions: Tensor) -> Angles:
        assert self.rope is not None
        first = 0 if self.padding is None else self.padding[:, None, None]
        return self.rope.angles_at((positions - first).clamp(min=0))

    def _tokens(self, side: int, x: Tensor, positions: Tensor) -> Tokens:
        """Return tokens [B, H, n, D] of a side with the RoPE angles at their positions."""
        return Tokens(x, None if self.rope is None or side or not x.shape[2] else self._angles(positions))

    def views(self, first: int, tokens: int) -> list[View]:
        """Return views of packed slots `first` to `first + tokens` of each side."""
        at = None if self.rope is None else self._angles(self.positions[:, :, first : first + tokens])
        return [side.view(first, tokens, None if i else at) for i, side in enumerate(self.sides)]

    def pack(
        self, movable: Tensor, samples: Sequence[Tensor], sample_positions: Tensor, most_blocks: int | None
    ) -> None:
        """Pack whole blocks of each head's movable loose tokens, oldest first.

        If blocks must be evicted, the field WEIGHT decides which.

        movable: bool [B, H, L], loose slots that may be packed.
        samples: for each side [B, H, n, D], tokens that a codec is fitted on if it needs the
            prompt.
        sample_positions: [B, H, n], their positions.
        most_blocks: allowed number of blocks of `flush_tokens`, or None.

        Raises:
            UserError: a scale is too large for its dtype. Nothing has changed.
        """
        t = self.flush_tokens
        waiting = movable.sum(-1) // t
        blocks = int(waiting.max()) if movable.shape[2] else 0
        if blocks == 0:
            return
        order = (~movable).int().argsort(dim=-1, stable=True)[:, :, : blocks * t]
        taken = torch.arange(blocks * t, device=order.device) < (waiting * t).unsqueeze(-1)
        order = torch.where(taken, order, order[:, :, :1])  # an empty slot repeats a token to keep the block's scales
        P = self.packed_tokens
        positions = self.positions[:, :, P:].gather(2, order)
        self.fit(samples, sample_positions)
        encoded = [
            side.encoded(side.codec, self._chunks(i, gathered(side.loose, order), positions, taken))
            for i, side in enumerate(self.sides)
        ]
        for side, changes in zip(self.sides, encoded, strict=True):
            side.append(side.codec, changes)
        self._move(P, order, taken)
        self._compact(most_blocks)
        self._give_back(most_blocks)

    def _chunks(self, side: int, x: Tensor, positions: Tensor, taken: Tensor) -> Iterator[tuple[Tokens, Tensor]]:
        """Yield tokens in parts, and which of them count."""
        for start, stop in coding.chunks(0, x.shape[2], self.flush_tokens, x):
            part = slice(start, stop)
            yield self._tokens(side, x[:, :, part], positions[:, :, part]), taken[:, :, part]

    def fit(self, samples: Sequence[Tensor], positions: Tensor) -> None:
        """Fit the codecs that need the prompt and have not been fitted, see `pack`."""
        for i, (side, sample) in enumerate(zip(self.sides, samples, strict=True)):
            if side.codec.needs_fit == "prompt":
                side.codec = coding.fitted(side.codec, [self._tokens(i, sample, positions)], heads=self.heads)

    def _move(self, P: int, order: Tensor, taken: Tensor) -> None:
        """Insert positions and fields of the loose slots `order` between packed and loose slots."""
        counts = torch.zeros_like(self.positions[:, :, P:]).scatter_add(2, order, taken.to(torch.int32))

        def moved(x: Tensor) -> Tensor:
            return torch.cat([x[:, :, :P], x[:, :, P:].gather(2, order), x[:, :, P:]], dim=2)

        self.fields = {name: moved(x) for name, x in self.fields.items()}
        packed = self.positions[:, :, P:].gather(2, order).masked_fill(~taken, -1)
        loose = self.positions[:, :, P:].masked_fill(counts > 0, -1)
        self.positions = torch.cat([self.positions[:, :, :P], packed, loose], dim=2)
        self._tidy()

    def _compact(self, most_blocks: int | None) -> None:
        """Move tokens together if half of the packed slots are empty, or if there are too many
        blocks.

        This is done only if it changes no bit of the decoded tokens: if the layout can move tokens, or
        if coding them again gives the same.
        """
        P, t = self.packed_tokens, self.flush_tokens
        alive = self.alive[:, :, :P]
        slots = -(-int(alive.sum(-1).max()) // t) * t
        wanted = 2 * slots <= P or (most_blocks is not None and most_blocks * t < P)
        if not self.moves or not wanted or slots == P:
            return
        order = (~alive).int().argsort(dim=-1, stable=True)[:, :, :slots]
        held = alive.gather(2, order)
        order = torch.where(held, order, order[:, :, :1])
        planes = []
        for side in self.sides:
            if side.packed.layout.moves_tokens:
                planes.append(side.packed.layout.select_tokens(side.planes(0, P), order))
                continue
            x = gathered(side.view(0, P).decode(), order)
            planes.append(side.codec.encode(x))
            self.moves = self.moves and torch.equal(side.codec.decode(planes[-1], side.head_dim), x)
        if not self.moves:
            return
        for side, moved in zip(self.sides, planes, strict=True):
            side.packed.hold(moved)
        self.positions = torch.cat(
            [self.positions.gather(2, order).masked_fill(~held, -1), self.positions[:, :, P:]], dim=2
        )
        self.fields = {name: torch.cat([x.gather(2, order), x[:, :, P:]], dim=2) for name, x in self.fields.items()}
        self._tidy()

    def _give_back(self, most_blocks: int | None) -> None:
        """Free blocks that are empty in every head, and evict those above the limit."""
        P, t = self.packed_tokens, self.flush_tokens
        alive = self.alive[:, :, :P].unflatten(2, (-1, t))
        filled = alive.any(-1)
        blocks = P // t
        drop = int((~filled).sum(-1).min())
        drop = max(drop, blocks - most_blocks) if most_blocks is not None else drop
        if drop == 0:
            return
        sums = self.fields[WEIGHT][:, :, :P].unflatten(2, (-1, t)).masked_fill(~alive, 0.0).sum(-1)
        sums = sums.masked_fill(~filled, -torch.inf)
        kept = sums.topk(blocks - drop, dim=-1).indices.sort(dim=-1).values
        for side in self.sides:
            per_flush = t // side.packed.layout.block_tokens
            side.packed.keep(_slots_of(kept, per_flush))
        slots = _slots_of(kept, t)
        loose = torch.arange(P, self.positions.shape[2], device=slots.device).expand(*slots.shape[:2], -1)
        index = torch.cat([slots, loose], dim=2)
        self._map_figures(lambda x: x.gather(2, index))
        self._tidy()

    def mark(self) -> Any:
        """Return a mark for `undo`.

        Nothing is copied, because later appends do not change marked data.
        """
        sides = [(side.codec, side.loose, side.lost, side.packed.mark()) for side in self.sides]
        return sides, self.positions, dict(self.fields)

    def undo(self, mark: Any) -> None:
        """Undo everything since `mark()`."""
        sides, self.positions, self.fields = mark
        for side, (codec, loose, lost, packed) in zip(self.sides, sides, strict=True):
            side.codec, side.loose, side.lost = codec, loose, lost
            side.packed.undo(packed)

    def to(self, device: torch.device | str) -> None:
        """Move everything to a device."""
        for side in self.sides:
            side.to(device)
        self._map_figures(lambda x: x.to(device))
        self.padding = None if self.padding is None else self.padding.to(device)

    def select(self, rows: Tensor) -> None:
        """Keep these batch rows (int64, repeats allowed)."""
        for side in self.sides:
            side.select(rows)
        self._map_figures(lambda x: x.index_select(0, rows))
        self.padding = None if self.padding is None else self.padding.index_select(0, rows)

    def _map_figures(self, fn: Callable[[Tensor], Tensor]) -> None:
        self.positions = fn(self.positions)
        self.fields = {name: fn(x) for name, x in self.fields.items()}

    def count(self, footprint: Footprint, sinks: int) -> None:
        """Add the bytes held to `footprint`. `sinks` loose slots per head count as sinks."""
        for side in self.sides:
            side.packed.count(footprint)
            slots = side.loose.shape[2]
            held = side.loose.nbytes
            as_sinks = held * min(sinks, slots) // slots if slots else 0
            footprint.parts["exact sinks"] += as_sinks
            footprint.parts["exact window"] += held - as_sinks
        for x in (self.positions, *self.fields.values()):
            footprint.parts["selection"] += x.numel() * x.element_size()


def _slots_of(blocks: Tensor, t: int) -> Tensor:
    """Return the indices of each block's t slots, [B, H, n·t], for block indices [B, H, n]."""
    return (blocks.unsqueeze(-1) * t + torch.arange(t, device=blocks.device)).flatten(2)
