"""Packed tokens of one rate of a layer, and their positions if each head holds its own."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from tersekv.cache import coding
from tersekv.cache.blocks import BlockBuffer
from tersekv.cache.coding import Tokens
from tersekv.cache.lost_variance import LostVariance
from tersekv.cache.pages import PageSizes
from tersekv.cache.parallel import HeadShard
from tersekv.cache.schema import Check, flag, of_spec, optional, record, refuse, require, tensor
from tersekv.cache.slots import Slots, in_front
from tersekv.cache.state import Rules, Spec, State, Stateful, own
from tersekv.codecs import Codec
from tersekv.layouts.base import Concat, Mapped, PackedTensors, View
from tersekv.tensors import gathered
from tersekv.transforms.marked_angles import MarkedAngles
from tersekv.transforms.rope import Angles

Encoded = tuple[list[PackedTensors], Tensor | None]
"""Packed tensors to append, and the lost variance after that."""


WEIGHT = "weight"
"""Field of the slots: whole blocks with the lowest total weight are evicted first."""

SPARE, SPARE_MOVING = 1.5, 1.125
"""Maximum packed slots of a tier, as a multiple of the tokens that each head may hold, and the same if
its layouts can move tokens.

This limits how many slots can become empty before whole blocks are evicted, or tokens are moved.
"""


def side_learnt(side: PackedSide, place: str) -> None:
    """Check that the codec has the fitted tensors that decoding needs."""
    needs_fit = side.codec.needs_fit
    ready = needs_fit is None or (needs_fit == "prompt" and not side.packed.tokens)
    require(ready, f"{place}.fitted", "is not what the codec must have learnt")


class PackedSide(Stateful):
    """The keys, or the values, of a tier: blocks of tokens [B, H, n, D], and the codec that has coded them.

    like: tensor [B, H, ·, D]. sizes: sizes of pages.
    corrected: share of the bias of softmax weights that is corrected (keys only).
    base: the same side at the codec's own rate. This one has `bits` bits from the same fit, and shares
        all fitted tensors but those that differ by the rate. None if it is that side.
    lost: float32 [B, H, D], lost variance of the tokens packed first (`cache/lost_variance.py`).
        None if the share is 0 or nothing has been packed.
    """

    RULES: ClassVar[Rules] = (side_learnt,)
    PARTS: ClassVar[tuple[str, ...]] = ("packed",)
    HELD: ClassVar[tuple[str, ...]] = ("codec", "lost")
    MADE: ClassVar[tuple[str, ...]] = ("_factors",)

    def __init__(
        self,
        codec: Codec,
        like: Tensor,
        sizes: PageSizes,
        corrected: float = 0.0,
        bits: float = 0.0,
        base: PackedSide | None = None,
    ) -> None:
        B, H, _, self.head_dim = like.shape
        self.shape = B, H, 0, self.head_dim
        self.corrected, self.bits, self.base = corrected, bits, base
        self.codec = codec if base is None else codec.at_rate(bits)
        self.packed = BlockBuffer(self.codec.layout(self.head_dim), B, H, like.device, sizes)
        self.lost: Tensor | None = None
        self._factors: tuple[Tensor, Tensor] | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickle, which has a copy of each tensor."""
        self.__dict__.update(state)
        self._share()

    # ------------------------------------------------------------------ growing

    def encoded(
        self,
        codec: Codec,
        parts: Iterable[tuple[Tokens, Tensor | None]],
        heads: HeadShard | None = None,
        share: Callable[[LostVariance], None] | None = None,
    ) -> Encoded:
        """Encode tokens without appending them.

        codec: this side's codec, perhaps newly fitted.
        parts: tokens, and which of them count for the lost variance, bool [B, 1 or H, n]; None for all.
        heads: this process's heads under tensor parallelism, or None.
        share: adds the sums of processes that encode the other tokens of the call, or None.

        Raises:
            UserError: a scale is too large for its dtype.
        """
        planes, sums = [], LostVariance() if self.corrected and self.lost is None else None
        try:
            for tokens, counts in parts:
                planes.append(coding.encode(codec, tokens, heads))
                if sums is not None and not tokens.x.is_meta:
                    view = coding.view(codec, planes[-1], self.head_dim, tokens.angles)
                    sums.add(tokens.x, view, counts)
        finally:
            if sums is not None and share is not None:  # other processes wait for it, also after an error
                share(sums)
        return planes, self.lost if sums is None else sums.value()

    def append(self, codec: Codec, encoded: Encoded) -> None:
        """Append what `encoded` has returned for this codec."""
        planes, self.lost = encoded
        self.codec = codec
        self.packed.append(*planes)

    def restart(self, codec: Codec) -> None:
        """Remove all tokens. codec: as it was before a fit."""
        self.codec, self.lost = codec if self.base is None else codec.at_rate(self.bits), None
        self.packed.drop_back(len(self.packed))

    # ------------------------------------------------------------------ reading

    def view(self, first: int, tokens: int, angles: Angles | MarkedAngles | None = None) -> View:
        """Return packed tokens `first` to `first + tokens`, whole blocks, as attention reads them.

        angles: RoPE angles of these tokens, if the codec needs them.
        """
        return coding.view(self.codec, self.planes(first, tokens), self.head_dim, angles)

    def planes(self, first: int, tokens: int) -> PackedTensors:
        """Return the packed tensors of tokens `first` to `first + tokens`, whole blocks."""
        t = self.packed.layout.block_tokens
        return self.packed.planes(first // t, (first + tokens) // t)

    @property
    def correction(self) -> Tensor | None:
        """Return the factors of `softmax.score_bias`, float32 [B, H, D], or None; each time the same tensor."""
        if self.lost is None:
            return None
        if self._factors is None or self._factors[0] is not self.lost:
            self._factors = self.lost, self.lost * (0.5 * self.corrected)
        return self._factors[1]

    # ------------------------------------------------------------------ changing

    def _own(self) -> dict[str, Tensor]:
        """Return the fitted tensors that `base` has not."""
        fitted, codec = self.codec.fitted, self.codec
        return fitted if self.base is None else {name: fitted[name] for name in codec.rate_tensors if name in fitted}

    def _share(self) -> None:
        if self.base is not None:
            self.codec = dataclasses.replace(self.codec, fitted=self.base.codec.fitted | self._own())

    def live_state(self) -> State:
        """Return the state with the codec's fitted tensors, see `Stateful`."""
        lost = {"lost": self.lost} if self.corrected else {}
        return super().live_state() | {"fitted": self._own()} | lost

    def schema(self) -> dict[str, Check]:
        B, H, _, D = self.shape
        learns = self.codec.learns(B, H, D)
        names = learns if self.base is None else set(self.codec.rate_tensors)
        fitted = record({n: of_spec(spec) for n, spec in learns.items() if n in names}, may_lack=True)
        lost = {"lost": optional(tensor(torch.float32, B, H, D))} if self.corrected else {}
        return super().schema() | {"fitted": fitted} | lost

    def _hold(self, state: State, place: str) -> None:
        super()._hold(state, place)
        self.codec = dataclasses.replace(self.codec, fitted=own(state["fitted"]))
        self._share()
        self.lost = own(state.get("lost"))
        B, H, _, D = self.shape
        if fault := self.codec.learnt_fault(B, H, D):
            refuse(f"{place}.fitted", fault)
        same = self.codec.layout(self.head_dim) == self.packed.layout
        require(same, f"{place}.fitted", "gives codes of another length than the recipe")

    def to(self, device: torch.device | str) -> None:
        """Move everything to a device."""
        super().to(device)
        self._share()

    def select(self, rows: Tensor) -> None:
        """Keep these batch rows (int64, repeats allowed)."""
        self.shape = (len(rows), *self.shape[1:])
        self.packed.select(rows)
        self.codec = self.codec.select(rows)
        self._share()
        self.lost = None if self.lost is None else self.lost.index_select(0, rows)

    def tables(self) -> list[Tensor]:
        """Return the tensors that decoding and attention need next to the packed ones."""
        lost = [] if self.lost is None else [self.lost]
        used = self.base is None or self.packed.tokens
        return [*(self.codec.tables(self.head_dim) if used else []), *lost]


def same_in_both(tier: Tier, place: str) -> None:
    """Check that both sides, and the slots if heads differ, hold the same number of tokens."""
    counts = {side.packed.tokens for side in tier.sides}
    require(len(counts) == 1, place, f"holds different numbers of keys and values {sorted(counts)}")
    if tier.slots is not None:
        require(counts == {len(tier.slots)}, f"{place}.slots.0.positions", f"must have {tier.tokens} slots")


class Tier(Stateful):
    """Packed tokens of one rate: keys and values of a layer, or keys alone.

    Where heads hold different tokens, a token is evicted by clearing its position. A block that is empty
    in every head is freed. If there are more blocks than allowed, each head loses those with the lowest
    total weight. Tokens are packed again only if that changes no bit.

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

    @property
    def tokens(self) -> int:
        """Number of packed tokens, or slots."""
        return self.keys.packed.tokens

    @property
    def extents(self) -> Iterator[tuple[int, int]]:
        """First token and number of tokens of pages, cut where a page of either side ends."""
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
        if not (self.latent and joint):
            return views
        latents, (R, D) = views[0], (side.head_dim for side in self.sides)
        # the map of the latents stays outside the loop over tokens; rotated keys have none
        return [Mapped(Concat([(latents.inner, R), (views[1], D)]), latents.linear._replace(rest=D)), latents]

    def keep(self, alive: Tensor) -> None:
        """Empty all slots except those in the mask `alive` [B, H, n]."""
        self.slots.keep(alive)

    def most_blocks(self, tokens: int) -> int:
        """Return how many blocks there may be for so many tokens per head."""
        spare = SPARE_MOVING if all(side.packed.layout.moves_tokens for side in self.sides) else SPARE
        return math.ceil(spare * max(0, tokens) / self.block) + 1

    def compact(self, most: int | None) -> None:
        """Move tokens together if half of the slots are empty, or if there are more than `most` blocks.

        This is done only if it changes no bit of the decoded tokens: if the layout can move tokens, or
        if coding them again gives the same.
        """
        n, alive = self.tokens, self.slots.alive
        slots = -(-int(alive.sum(-1).max()) // self.block) * self.block
        wanted = 2 * slots <= n or (most is not None and most * self.block < n)
        if not self.moves or not wanted or slots == n:
            return
        order = in_front(alive, slots)
        held = alive.gather(2, order)
        order = torch.where(held, order, order[:, :, :1])
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
        for side, moved in zip(self.sides, planes, strict=True):
            side.packed.hold(moved)
        self.slots.gather(order)
        self.slots.keep(held)

    def give_back(self, most: int | None) -> None:
        """Free blocks that are empty in every head, and evict those above the limit."""
        alive = self.slots.alive.unflatten(2, (-1, self.block))
        filled = alive.any(-1)
        blocks = filled.shape[2]
        drop = int((~filled).sum(-1).min())
        drop = max(drop, blocks - most) if most is not None else drop
        if drop == 0:
            return
        sums = self.slots.fields[WEIGHT].unflatten(2, (-1, self.block)).masked_fill(~alive, 0.0).sum(-1)
        sums = sums.masked_fill(~filled, -torch.inf)
        kept = sums.topk(blocks - drop, dim=-1).indices.sort(dim=-1).values
        for side in self.sides:
            side.packed.keep(_slots_of(kept, self.block // side.packed.layout.block_tokens))
        self.slots.gather(_slots_of(kept, self.block))

    def restart(self, codecs: Sequence[Codec]) -> None:
        """Remove all packed tokens. codecs: of each side, as they were before a fit."""
        for side, codec in zip(self.sides, codecs, strict=True):
            side.restart(codec)

    def tables(self) -> list[Tensor]:
        """Return the tensors that decoding and attention need next to the packed ones."""
        return [table for side in self.sides for table in side.tables()]


def _slots_of(blocks: Tensor, t: int) -> Tensor:
    """Return the indices of each block's t slots, [B, H, n·t], for block indices [B, H, n]."""
    return (blocks.unsqueeze(-1) * t + torch.arange(t, device=blocks.device)).flatten(2)
