"""Packed keys, or values, of one rate of a layer, with the codec that has coded them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from tersekv.cache import coding
from tersekv.cache.blocks import BlockBuffer
from tersekv.cache.coding import Tokens
from tersekv.cache.lost_variance import LostVariance
from tersekv.cache.pages import PageSizes, blank
from tersekv.cache.parallel import HeadShard
from tersekv.cache.schema import Check, of_spec, optional, record, refuse, require, tensor
from tersekv.cache.slots import Slots
from tersekv.cache.state import Rules, State, Stateful, own
from tersekv.codecs import Codec
from tersekv.layouts.base import PackedTensors, View
from tersekv.tensors import joined
from tersekv.transforms.angles import Angles
from tersekv.transforms.marked_angles import MarkedAngles

Encoded = tuple[list[PackedTensors], Tensor | None]
"""Packed tensors to append, and the lost variance after that."""


class Ahead(NamedTuple):
    """Tokens [B, H, n, D] from position `place` on, and what will be packed of them.

    asked: the side's codec before it encoded them. tokens: None for those of the call that comes next. codec: that
    one, perhaps fitted on them. planes: packed tensors, part by part. lost: the lost variance after them.
    """

    asked: Codec
    place: int
    tokens: Tensor | None
    codec: Codec
    planes: list[PackedTensors]
    lost: Tensor | None

    def is_of(self, asked: Codec, place: int, old: Tensor, new: Tensor, n: int) -> bool:
        """Return True if the codec would make the same of the first n tokens, which may be others after a crop."""
        alike = self.asked is asked and self.place == place
        if self.tokens is None or not alike:
            return alike
        return torch.equal(self.tokens, (old if old.shape[2] >= n else joined(old, new))[:, :, :n])


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
    slots: those of the tier if each head has its own number of blocks, else None. Packed tensors are then
        [1, 1, N, ...]: page after page, and within a page one head after the other.
    users: heads that have tokens of this rate.
    lost: float32 [B, users, D], lost variance of the tokens packed first (`cache/lost_variance.py`).
        None if the share is 0 or nothing has been packed.
    ahead: tokens that were encoded together with those of other layers, until they are packed; or None.
    """

    RULES: ClassVar[Rules] = (side_learnt,)
    PARTS: ClassVar[tuple[str, ...]] = ("packed",)
    HELD: ClassVar[tuple[str, ...]] = ("codec", "lost")
    MADE: ClassVar[tuple[str, ...]] = ("_factors", "ahead")

    def __init__(
        self,
        codec: Codec,
        like: Tensor,
        sizes: PageSizes,
        corrected: float = 0.0,
        bits: float = 0.0,
        base: PackedSide | None = None,
        users: Sequence[int] | None = None,
    ) -> None:
        B, H, _, self.head_dim = like.shape
        self.users = list(range(H) if users is None else users)
        self.shape = B, H, 0, self.head_dim
        self.corrected, self.bits, self.base = corrected, bits, base
        self.codec = codec if base is None else codec.at_rate(bits)
        self.packed = BlockBuffer(self.codec.layout(self.head_dim), B, H, like.device, sizes)
        self.slots: Slots | None = None
        self.lost: Tensor | None = None
        self._factors: tuple[Tensor, Tensor] | None = None
        self.ahead: Ahead | None = None

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

    def differ(self, slots: Slots) -> None:
        """Let each head have its own number of blocks, as `slots` says. There are none yet."""
        self.slots, like = slots, self.packed
        self.packed = BlockBuffer(like.layout, 1, 1, slots.device, like.sizes)

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
        """Return the packed tensors of tokens `first` to `first + tokens`, whole blocks.

        Where heads have different numbers of blocks, this is a copy, in which any block stands for an empty one.
        """
        t = self.packed.layout.block_tokens
        if self.slots is None:
            return self.packed.planes(first // t, (first + tokens) // t)
        index = self.slots.index(unit=self._per_block)[0][:, :, first // t : (first + tokens) // t]
        begin, end = (int(end) for end in index.aminmax()) if index.numel() else (0, -1)
        return self.packed.layout.take_blocks(self.packed.planes(begin, end + 1), index - begin)

    def page_view(self, number: int, angles: Angles | MarkedAngles | None, alike: bool) -> View:
        """Return a page of heads with different numbers of blocks as kernels read it, without a copy: all heads have
        the blocks of all of them.

        angles: RoPE angles of its tokens, if the codec needs them.
        alike: True if all heads have the same number of blocks in it. Then each has its own only.
        """
        page, (B, H) = self.packed.pages[number], self.shape[:2]
        planes = page.cut(0, len(page))
        if self.packed.layout.starts is None and alike:
            planes = {name: plane.view(B, H, -1, *plane.shape[3:]) for name, plane in planes.items()}
        else:
            planes = {n: x if x.dim() < 3 else x.expand(B, H, *x.shape[2:]) for n, x in planes.items()}
        return coding.view(self.codec, planes, self.head_dim, angles)

    @property
    def _per_block(self) -> int:
        """Number of the layout's blocks in a block of the slots."""
        assert self.slots is not None
        return self.slots.unit // self.packed.layout.block_tokens

    @property
    def correction(self) -> Tensor | None:
        """Return the factors of `softmax.score_bias`, float32 [B, H, D], or None; each time the same tensor."""
        if self.lost is None:
            return None
        if self._factors is None or self._factors[0] is not self.lost:
            self._factors = self.lost, self._of_all_heads(self.lost) * (0.5 * self.corrected)
        return self._factors[1]

    def _of_all_heads(self, lost: Tensor) -> Tensor:
        """Return the lost variance of all heads, 0 in those without tokens of this rate."""
        B, H, _, D = self.shape
        return lost if len(self.users) == H else lost.new_zeros((B, H, D)).index_copy_(1, self._users(lost), lost)

    def _users(self, like: Tensor) -> Tensor:
        return torch.tensor(self.users, device=like.device)

    # ------------------------------------------------------------------ changing

    def replace(self, first: int, kept: Tensor, new: PackedTensors | None = None) -> None:
        """Make one page of the pages from number `first` on and of new blocks, of heads with different numbers of them.

        kept: bool [B, H, n], the blocks that stay: first those of the pages, then the new ones.
        new: packed tensors [B, H, m, ...].
        """
        assert self.slots is not None
        layout, parts = self.packed.layout, [page.cut(0, len(page)) for page in self.packed.pages[first:]]
        if any(plane.is_meta for plane in (new or {}).values()):  # shapes only
            self.packed.replace(first, blank(layout, 1, 1, int(kept.sum()) * self._per_block, "meta"))
            return
        blocks = kept.repeat_interleave(self._per_block, dim=2) if self._per_block > 1 else kept
        if new is not None and not parts:
            self.packed.replace(first, layout.take_blocks(new, blocks.flatten().nonzero().view(1, 1, -1)))
            return
        index, _ = self.slots.index(first, self._per_block)
        if new is not None:
            B, H, m = *self.slots.heads, blocks.shape[2] - index.shape[2]
            number = torch.arange(B * H * m, device=index.device)
            start = sum(len(page) for page in self.packed.pages[first:])
            index = torch.cat([index, number.view(B, H, m) + start], dim=2)
            parts.append(layout.take_blocks(new, number.view(1, 1, -1)))
        self.packed.replace(first, layout.take_blocks(layout.join(parts), index[blocks].view(1, 1, -1)))

    def _own(self) -> dict[str, Tensor]:
        """Return the fitted tensors that `base` has not."""
        fitted, codec = self.codec.fitted, self.codec
        return fitted if self.base is None else {name: fitted[name] for name in codec.rate_tensors if name in fitted}

    def _share(self) -> None:
        if self.base is not None:
            self.codec = dataclasses.replace(self.codec, fitted=self.base.codec.fitted | self._own())

    def live_state(self) -> State:
        """Return the state with the codec's fitted tensors, see `Stateful`."""
        lost = {"lost": None if self.lost is None else self._of_all_heads(self.lost)} if self.corrected else {}
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
        lost = state.get("lost")
        self.lost = None if lost is None else lost.index_select(1, self._users(lost))
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
        if self.slots is None:
            self.packed.select(rows)
        else:
            index, there = self.slots.index(unit=self._per_block)
            chosen = index[rows][there[rows]].view(1, 1, -1)
            self.packed.replace(0, self.packed.layout.take_blocks(self.packed.planes(), chosen))
        self.codec = self.codec.select(rows)
        self._share()
        self.lost = None if self.lost is None else self.lost.index_select(0, rows)

    def tables(self) -> list[Tensor]:
        """Return the tensors that decoding and attention need next to the packed ones."""
        lost = [] if self.lost is None else [self.lost]
        used = self.base is None or self.packed.tokens
        return [*(self.codec.tables(self.head_dim) if used else []), *lost]
