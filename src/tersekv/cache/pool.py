"""Tokens chosen for each KV head: packed blocks, then loose exact tokens, with their positions.

All heads have the same number of slots. An empty slot has position −1 and is never attended to. A
packed token is evicted by clearing its position. A block that is empty in every head is freed. If
there are more blocks than allowed, each head loses those with the lowest total weight. Tokens are
packed again only if that changes no bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tersekv.cache import coding
from tersekv.cache.coding import Tokens
from tersekv.cache.footprint import Footprint
from tersekv.cache.parallel import HeadShard
from tersekv.cache.schema import Check, flag, listed, of_spec, record, require, tensor
from tersekv.cache.segments import ExactSegment
from tersekv.cache.state import Stateful
from tersekv.cache.tier import Tier
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


def _fields(pool: TokenPool) -> Check:
    """Return the check of the fields. An empty slot may hold any number."""
    B, H, _ = pool.positions.shape
    return record({name: of_spec(TensorSpec(x.dtype, (B, H, None), anything=True)) for name, x in pool.fields.items()})


def _loose(pool: TokenPool) -> Check:
    """Return the check of the exact tokens."""
    return listed([tensor(x.dtype, *x.shape[:2], None, x.shape[3]) for x in pool.loose])


POOL = {
    "loose": _loose,
    "positions": lambda pool: tensor(torch.int32, *pool.positions.shape[:2], None),
    "fields": _fields,
    "moves": lambda pool: flag,
}


def pool_slots(pool: TokenPool, place: str) -> None:
    """Check that tiers, positions and fields have the same slots."""
    counts = {(tier.packed.tokens, x.shape[2]) for tier, x in zip(pool.tiers, pool.loose, strict=True)}
    require(len(counts) == 1, place, f"holds different numbers of slots for keys and values {sorted(counts)}")
    slots = sum(counts.pop())
    for name, x in {"positions": pool.positions, **pool.fields}.items():
        where = f"{place}.{name}" if name == "positions" else f"{place}.fields.{name}"
        require(x.shape[2] == slots, where, f"has {x.shape[2]} slots of {slots}")
        require(bool(x[pool.alive].isfinite().all()), where, "has a NaN or Inf where a slot holds a token")


class TokenPool(Stateful):
    """Chosen tokens of a layer. Tiers hold the packed ones, different ones in each head.

    tiers: of each side, or of the keys alone.
    like: for each of them, a tensor [B, H, ·, D] in the dtype of exact tokens.
    loose: for each of them [B, H, L, D], exact tokens: attention sinks, and tokens that do not fill a block yet.
    positions: int32 [B, H, slots], packed slots first, then loose ones.
    fields: further numbers per slot, by name.
    rope: RoPE of the keys, needed if they are coded before RoPE. Exact tokens are stored after
        RoPE.
    padding: int64 [B], positions before each row's first token, or None.
    moves: True if packing a token again gave the same bits so far.
    """

    STATE, RULES = POOL, (pool_slots,)

    def __init__(
        self,
        tiers: Sequence[Tier],
        like: Sequence[Tensor],
        fields: dict[str, torch.dtype] | None = None,
        rope: Rope | None = None,
        heads: HeadShard | None = None,
    ) -> None:
        self.tiers, self.heads = tiers, heads
        self.flush_tokens = math.lcm(*(tier.packed.layout.block_tokens for tier in tiers))
        self.loose = [x[:, :, :0].clone() for x in like]
        new, shape = like[0].new_empty, (*like[0].shape[:2], 0)
        self.positions = new(shape, dtype=torch.int32)
        self.fields = {name: new(shape, dtype=kind) for name, kind in (fields or {}).items()}
        self.rope = rope if tiers[0].codec.needs_rope else None
        self.padding: Tensor | None = None
        self.moves = True

    @property
    def packed_tokens(self) -> int:
        """Number of packed slots."""
        return self.tiers[0].packed.tokens

    @property
    def alive(self) -> Tensor:
        """Mask of slots that hold a token, bool [B, H, slots]."""
        return self.positions >= 0

    def add(self, tokens: Sequence[Tensor], positions: Tensor, fields: dict[str, Tensor]) -> None:
        """Append loose tokens: [B, H, n, D] for each tier, positions [B, H, n] (−1 if a head has
        none).
        """
        self.loose = [torch.cat([old, x.to(old.dtype)], dim=2) for old, x in zip(self.loose, tokens, strict=True)]
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
            self.loose = [gathered(x, order) for x in self.loose]
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
        return [tier.view(first, tokens, None if i else at) for i, tier in enumerate(self.tiers)]

    def exact_segment(self) -> list[ExactSegment]:
        """Return loose tokens of keys and values, if there are any."""
        keys, values = self.loose
        return [ExactSegment(keys, values, self.positions[:, :, self.packed_tokens :])] if keys.shape[2] else []

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
            tier.encoded(tier.codec, self._chunks(i, gathered(self.loose[i], order), positions, taken))
            for i, tier in enumerate(self.tiers)
        ]
        for tier, changes in zip(self.tiers, encoded, strict=True):
            tier.append(tier.codec, changes)
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
        for i, (tier, sample) in enumerate(zip(self.tiers, samples, strict=True)):
            if tier.codec.needs_fit == "prompt":
                tier.codec = coding.fitted(tier.codec, [self._tokens(i, sample, positions)], heads=self.heads)

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
        for tier in self.tiers:
            if tier.packed.layout.moves_tokens:
                planes.append(tier.packed.layout.select_tokens(tier.planes(0, P), order))
                continue
            x = gathered(tier.view(0, P).decode(), order)
            planes.append(tier.codec.encode(x))
            self.moves = self.moves and torch.equal(tier.codec.decode(planes[-1], tier.head_dim), x)
        if not self.moves:
            return
        for tier, moved in zip(self.tiers, planes, strict=True):
            tier.packed.hold(moved)
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
        for tier in self.tiers:
            per_flush = t // tier.packed.layout.block_tokens
            tier.packed.keep(_slots_of(kept, per_flush))
        slots = _slots_of(kept, t)
        loose = torch.arange(P, self.positions.shape[2], device=slots.device).expand(*slots.shape[:2], -1)
        index = torch.cat([slots, loose], dim=2)
        self._map_figures(lambda x: x.gather(2, index))
        self._tidy()

    def mark(self) -> Any:
        """Return a mark for `undo`.

        Nothing is copied, because later appends do not change marked data.
        """
        tiers = [(tier.codec, tier.lost, tier.packed.mark()) for tier in self.tiers]
        return tiers, self.loose, self.positions, dict(self.fields)

    def undo(self, mark: Any) -> None:
        """Undo everything since `mark()`."""
        tiers, self.loose, self.positions, self.fields = mark
        for tier, (codec, lost, packed) in zip(self.tiers, tiers, strict=True):
            tier.codec, tier.lost = codec, lost
            tier.packed.undo(packed)

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply a function to all tensors but those of the tiers: keep rows, or move to a device."""
        self.loose = [fn(x) for x in self.loose]
        self._map_figures(fn)

    def _map_figures(self, fn: Callable[[Tensor], Tensor]) -> None:
        self.positions = fn(self.positions)
        self.fields = {name: fn(x) for name, x in self.fields.items()}

    def count(self, footprint: Footprint, sinks: int) -> None:
        """Add the bytes held to `footprint`, without the tiers'. `sinks` loose slots per head count as sinks."""
        for x in self.loose:
            slots, held = x.shape[2], x.nbytes
            as_sinks = held * min(sinks, slots) // slots if slots else 0
            footprint.parts["exact sinks"] += as_sinks
            footprint.parts["exact window"] += held - as_sinks
        for x in (self.positions, *self.fields.values()):
            footprint.parts["selection"] += x.numel() * x.element_size()


def _slots_of(blocks: Tensor, t: int) -> Tensor:
    """Return the indices of each block's t slots, [B, H, n·t], for block indices [B, H, n]."""
    return (blocks.unsqueeze(-1) * t + torch.arange(t, device=blocks.device)).flatten(2)
