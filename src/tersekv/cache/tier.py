"""Packed tokens of one rate: the keys, or the values, of a layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from tersekv.cache import coding
from tersekv.cache.blocks import BlockBuffer
from tersekv.cache.coding import Tokens
from tersekv.cache.lost_variance import LostVariance
from tersekv.cache.pages import PageSizes
from tersekv.cache.parallel import HeadShard
from tersekv.cache.schema import Check, of_spec, optional, record, refuse, require, tensor
from tersekv.cache.state import Rules, State, Stateful, own
from tersekv.codecs import Codec
from tersekv.layouts.base import PackedTensors, View
from tersekv.transforms.marked_angles import MarkedAngles
from tersekv.transforms.rope import Angles

Encoded = tuple[list[PackedTensors], Tensor | None]
"""Packed tensors to append, and the lost variance after that."""


def tier_learnt(tier: Tier, place: str) -> None:
    """Check that the codec has the fitted tensors that decoding needs."""
    needs_fit = tier.codec.needs_fit
    ready = needs_fit is None or (needs_fit == "prompt" and not tier.packed.tokens)
    require(ready, f"{place}.fitted", "is not what the codec must have learnt")


class Tier(Stateful):
    """Packed blocks of tokens [B, H, n, D], and the codec that has coded them.

    like: tensor [B, H, ·, D]. sizes: sizes of pages.
    corrected: share of the bias of softmax weights that is corrected (keys only).
    base: the tier of the codec's own rate. This one has `bits` bits from the same fit, and shares all
        fitted tensors but those that differ by the rate. None if it is that tier.
    lost: float32 [B, H, D], lost variance of the tokens packed first (`cache/lost_variance.py`).
        None if the share is 0 or nothing has been packed.
    """

    RULES: ClassVar[Rules] = (tier_learnt,)
    PARTS: ClassVar[tuple[str, ...]] = ("packed",)
    MADE: ClassVar[tuple[str, ...]] = ("_factors",)

    def __init__(
        self,
        codec: Codec,
        like: Tensor,
        sizes: PageSizes,
        corrected: float = 0.0,
        bits: float = 0.0,
        base: Tier | None = None,
    ) -> None:
        self.B, self.H, _, self.head_dim = like.shape
        self.corrected, self.bits, self.base = corrected, bits, base
        self.codec = codec if base is None else codec.at_rate(bits)
        self.packed = BlockBuffer(self.codec.layout(self.head_dim), self.B, self.H, like.device, sizes)
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

        codec: this tier's codec, perhaps newly fitted.
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
        """Remove all tokens. codec: of the tier's rate, as it was before a fit."""
        self.codec, self.lost = codec, None
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
        learns = self.codec.learns(self.B, self.H, self.head_dim)
        names = learns if self.base is None else set(self.codec.rate_tensors)
        fitted = record({n: of_spec(spec) for n, spec in learns.items() if n in names}, may_lack=True)
        lost = {"lost": optional(tensor(torch.float32, self.B, self.H, self.head_dim))} if self.corrected else {}
        return super().schema() | {"fitted": fitted} | lost

    def _hold(self, state: State, place: str) -> None:
        super()._hold(state, place)
        self.codec = dataclasses.replace(self.codec, fitted=own(state["fitted"]))
        self._share()
        self.lost = own(state.get("lost"))
        if fault := self.codec.learnt_fault(self.B, self.H, self.head_dim):
            refuse(f"{place}.fitted", fault)
        same = self.codec.layout(self.head_dim) == self.packed.layout
        require(same, f"{place}.fitted", "gives codes of another length than the recipe")

    def to(self, device: torch.device | str) -> None:
        """Move everything to a device."""
        self.packed.to(device)
        self.codec = self.codec.to(device)
        self._share()
        self.lost = None if self.lost is None else self.lost.to(device)

    def select(self, rows: Tensor) -> None:
        """Keep these batch rows (int64, repeats allowed)."""
        self.B = len(rows)
        self.packed.select(rows)
        self.codec = self.codec.select(rows)
        self._share()
        self.lost = None if self.lost is None else self.lost.index_select(0, rows)

    def tables(self) -> list[Tensor]:
        """Return the tensors that decoding and attention need next to the packed ones."""
        lost = [] if self.lost is None else [self.lost]
        used = self.base is None or self.packed.tokens
        return [*(self.codec.tables(self.head_dim) if used else []), *lost]
