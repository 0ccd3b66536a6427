"""Packed tokens of one rate of a layer, and their positions if each head holds its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from tersekv.cache.packed_side import Encoded, PackedSide
from tersekv.cache.schema import flag, require
from tersekv.cache.slots import POSITIONS, Slots, in_front
from tersekv.cache.state import Rules, Spec, Stateful
from tersekv.codecs import Codec
from tersekv.layouts.base import Concat, Mapped, PackedTensors, View
from tersekv.tensors import gathered
from tersekv.transforms.angles import Angles
from tersekv.transforms.marked_angles import MarkedAngles

WEIGHT = "weight"
"""Field of the slots: whole blocks with the lowest total weight are evicted first."""

SPARE, SPARE_MOVING = 1.5, 1.125
"""Maximum packed slots of a tier, as a multiple of the tokens that each head may hold, and the same if
its layouts can move tokens.

This limits how many slots can become empty before whole blocks are evicted, or tokens are moved.
"""


def same_in_both(tier: Tier, place: str) -> None:
    """Check that both sides, and the slots if heads differ, hold the same number of tokens."""
    counts, slots = {side.packed.tokens for side in tier.sides}, tier.slots
    require(len(counts) == 1, place, f"holds different numbers of keys and values {sorted(counts)}")
    if slots is None:
        return
    held = counts.pop()
    if slots.held:
        require(slots.held[POSITIONS].shape[-1] == held, f"{place}.slots.0.positions", f"must have {held} slots")
    pages = [int(count.sum()) * slots.unit for count in slots.counts]
    for side in tier.sides if slots.unit else ():
        own = [len(page) * side.packed.layout.block_tokens for page in side.packed.pages]
        require(own == pages, f"{place}.slots.0.counts", f"must have the pages of {own} tokens")


class Tier(Stateful):
    """Packed tokens of one rate: keys and values of a layer, or keys alone.

    Where heads hold different tokens, a token is evicted by clearing its position. A block that is empty
    in every head is freed, or in its own one if heads have different numbers of blocks. If there are
    more blocks than allowed, each head loses those with the lowest total weight. Tokens are packed again
    only if that changes no bit.

    latent: see `LayerPlan`.
    slots: positions of the tokens if each head holds its own, see `differ`.
    moves: True if packing a token again gave the same bits so far.
    """

    STATE: ClassVar[Spec] = {"moves": lambda tier: flag}
    RULES: ClassVar[Rules] = (same_in_both,)
    PARTS: ClassVar[tuple[str, ...]] = ("sides", "slots")

    def __init__(self, *sides: PackedSide, latent: bool = False) -> None:
        self.latent = latent
        self.sides, self.keys, self.block = sides, sides[0], sides[0].packed.sizes.unit
        self.slots: Slots = None  # type: ignore[assignment]  # all heads hold the same tokens
        self.moves = True

    def differ(self, slots: Slots) -> None:
        """Let each head hold tokens of its own. There are none yet."""
        self.slots, self.moves = slots, True
        for side in self.sides if slots.unit else ():
            side.differ(slots)

    @property
    def ragged(self) -> bool:
        """True if each head has its own number of blocks."""
        return self.slots is not None and self.slots.unit > 0

    @property
    def tokens(self) -> int:
        """Number of packed tokens, or slots."""
        return len(self.slots) if self.ragged else self.keys.packed.tokens

    @property
    def blocks(self) -> Tensor:
        """Number of blocks of each head if the tier is ragged, int64 [B, H]."""
        return sum(self.slots.counts, torch.zeros(self.slots.heads, dtype=torch.int64))

    @property
    def extents(self) -> Iterator[tuple[int, int]]:
        """First token and number of tokens of pages, cut where a page of either side ends."""
        if self.ragged:
            sizes = (int(count.max()) * self.block for count in self.slots.counts)
            ends = [0, *itertools.accumulate(sizes)]
        else:
            ends = sorted({0}.union(*(side.packed.ends for side in self.sides)))
        return ((first, last - first) for first, last in itertools.pairwise(ends))

    def views(
        self, first: int, tokens: int, angles: Angles | MarkedAngles | None = None, joint: bool = True
    ) -> list[View]:
        """Return packed tokens `first` to `first + tokens`, whole blocks, as attention reads them.

        angles: RoPE angles of these tokens, if the keys need them.
        joint: if False, latents and rotated keys are returned instead of keys and values.
        """
        views = [side.view(first, tokens, None if i else angles) for i, side in enumerate(self.sides)]
        return self._joint(views) if joint else views

    def page_views(self, number: int, angles: Angles | MarkedAngles | None, alike: bool) -> list[View]:
        """Return a page as kernels read it, see `PackedSide.page_view`."""
        return self._joint([side.page_view(number, None if i else angles, alike) for i, side in enumerate(self.sides)])

    def _joint(self, views: list[View]) -> list[View]:
        """Return the keys and values of latents and rotated keys."""
        if not self.latent:
            return views
        latents, (R, D) = views[0], (side.head_dim for side in self.sides)
        # the map of the latents stays outside the loop over tokens; rotated keys have none
        return [Mapped(Concat([(latents.inner, R), (views[1], D)]), latents.linear._replace(rest=D)), latents]

    def append(
        self, encoded: Sequence[tuple[Codec, Encoded]], slots: Mapping[str, Tensor] | None, blocks: Tensor | None
    ) -> None:
        """Append blocks.

        encoded: codec and blocks of each side. slots: positions and fields of the tokens, [B, H, n·block], if each head
            holds its own.
        blocks: int64 [B, H], number of them that a head has. All heads get those of the head with most of them if the
            tier is not ragged.
        """
        if not self.ragged:
            for side, changes in zip(self.sides, encoded, strict=True):
                side.append(*changes)
            if slots is not None:
                self.slots.add(slots)
            return
        assert blocks is not None
        for side, (codec, (_, lost)) in zip(self.sides, encoded, strict=True):
            side.codec, side.lost = codec, lost
        if not bool(blocks.any()):
            return
        first = self.slots.small_pages(int(blocks.sum()))
        _, kept = self.slots.index(first)
        new = torch.arange(int(blocks.max()), device=kept.device) < blocks.to(kept.device).unsqueeze(-1)
        both = zip(self.sides, encoded, strict=True)
        planes = [side.packed.layout.join(parts) for side, (_, (parts, _)) in both]
        self._replace(first, torch.cat([kept, new], dim=2), planes, slots)

    def _replace(
        self,
        first: int,
        kept: Tensor,
        planes: Sequence[PackedTensors] | None = None,
        slots: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Make one page of the pages from number `first` on and of new blocks, see `PackedSide.replace`.

        planes: new packed tensors of each side. slots: their positions and fields.
        """
        for side, new in zip(self.sides, planes or (None,) * len(self.sides), strict=True):
            side.replace(first, kept, new)
        self.slots.replace(first, kept, slots)

    def keep(self, alive: Tensor) -> None:
        """Empty all slots except those in the mask `alive` [B, H, n]."""
        self.slots.keep(alive)

    def most_blocks(self, tokens: Tensor) -> Tensor:
        """Return how many blocks there may be for so many tokens, int64 [...]."""
        spare = SPARE_MOVING if all(side.packed.layout.moves_tokens for side in self.sides) else SPARE
        most = (spare * tokens.clamp(min=0).double() / self.block).ceil().long() + 1
        return most if self.ragged else most.max()

    def compact(self, most: Tensor | None) -> None:
        """Move tokens together if half of the slots are empty, or if a head has more than `most` blocks.

        This is done only if it changes no bit of the decoded tokens: if the layout can move tokens, or
        if coding them again gives the same.
        """
        n, alive, (_, there) = self.tokens, self.slots.alive, self.slots.index()
        blocks = -(-alive.sum(-1) // self.block)
        held = there.sum(-1) if self.ragged else torch.full_like(blocks, n // self.block)
        if not self.ragged:
            blocks = blocks.max().expand_as(blocks)
        wanted = 2 * int(blocks.sum()) <= int(held.sum()) or (most is not None and bool((most < held).any()))
        if not self.moves or not wanted or torch.equal(blocks, held):
            return
        order = in_front(alive, int(blocks.max()) * self.block)
        taken = alive.gather(2, order)
        order = torch.where(taken, order, order[:, :, :1])
        planes = []
        for side in self.sides:
            if side.packed.layout.moves_tokens:
                planes.append(side.packed.layout.select_tokens(side.planes(0, n), order))
                continue
            x = gathered(side.view(0, n).decode(), order)
            planes.append(side.codec.encode(x))
            self.moves = self.moves and torch.equal(side.codec.decode(planes[-1], side.head_dim), x)
        if not self.moves:
            return
        if self.ragged:
            own = torch.arange(int(blocks.max()), device=order.device) < blocks.unsqueeze(-1)
            kept = torch.cat([torch.zeros_like(there), own], dim=2)
            new = {name: x.gather(2, order) for name, x in self.slots.fields.items()}
            new[POSITIONS] = self.slots.positions.gather(2, order).masked_fill(~taken, -1)
            self._replace(0, kept, planes, new)
            return
        for side, moved in zip(self.sides, planes, strict=True):
            side.packed.hold(moved)
        self.slots.gather(order)
        self.slots.keep(taken)

    def give_back(self, most: Tensor | None) -> None:
        """Free blocks that are empty, in every head unless the tier is ragged, and evict those above the limit."""
        alive = self.slots.alive.unflatten(2, (-1, self.block))
        filled, (_, there) = alive.any(-1), self.slots.index()
        room = filled.sum(-1) if most is None else filled.sum(-1).clamp(max=most)
        if not self.ragged:
            room, there = room.max().expand_as(room), torch.ones_like(filled)
        if torch.equal(room, there.sum(-1)):
            return
        sums = self.slots.fields[WEIGHT].unflatten(2, (-1, self.block)).masked_fill(~alive, 0.0).sum(-1)
        order = sums.masked_fill(~filled, -torch.inf).argsort(dim=-1, descending=True, stable=True)
        kept = order.argsort(dim=-1) < room.unsqueeze(-1)
        if self.ragged:
            self._replace(0, kept)
            return
        index = in_front(kept)
        for side in self.sides:
            side.packed.keep(_slots_of(index, self.block // side.packed.layout.block_tokens))
        self.slots.gather(_slots_of(index, self.block))

    def restart(self, codecs: Sequence[Codec]) -> None:
        """Remove all packed tokens. codecs: of each side, as they were before a fit."""
        if self.ragged:
            self.slots.counts = []
        for side, codec in zip(self.sides, codecs, strict=True):
            side.restart(codec)

    def tables(self) -> list[Tensor]:
        """Return the tensors that decoding and attention need next to the packed ones."""
        return [table for side in self.sides for table in side.tables()]


def _slots_of(blocks: Tensor, t: int) -> Tensor:
    """Return the indices of each block's t slots, [B, H, n·t], for block indices [B, H, n]."""
    return (blocks.unsqueeze(-1) * t + torch.arange(t, device=blocks.device)).flatten(2)
