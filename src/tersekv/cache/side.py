"""The keys, or the values, of one layer: exact sinks | packed blocks | exact tail."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from tersekv.cache import coding
from tersekv.cache.blocks import BlockBuffer
from tersekv.cache.coding import Tokens
from tersekv.cache.footprint import Footprint
from tersekv.cache.pages import PageSizes
from tersekv.cache.parallel import ContextParallel, HeadShard
from tersekv.cache.placement import Move
from tersekv.cache.rotary import Rotary
from tersekv.cache.schema import tensor
from tersekv.cache.state import Spec, Stateful
from tersekv.cache.tail import TailBuffer, first_tokens
from tersekv.cache.tier import Encoded, Tier
from tersekv.codecs import Codec
from tersekv.kernels.attend import Where
from tersekv.layouts.base import View
from tersekv.tensors import gathered, joined
from tersekv.transforms.moments import TokenLoss

log = logging.getLogger(__name__)


class Prepared(NamedTuple):
    """Result of encoding new tokens of one side, before it is applied.

    codecs: of each tier, perhaps newly fitted.
    sinks: new sinks.
    encoded: of each tier, see `Tier`.
    leave_tail: number of oldest tokens that leave the tail.
    enter_tail: [B, H, n, D], tokens that enter the tail.
    """

    codecs: list[Codec]
    sinks: Tensor
    encoded: list[Encoded]
    leave_tail: int
    enter_tail: Tensor


class SideStore(Stateful):
    """Tokens [B, H, n, D] of one side: exact sinks, packed tokens, and the exact tail.

    sizes: page sizes of packed tokens.
    tail_tokens: capacity of the tail.
    rotary: RoPE of keys that are coded before RoPE. Exact tokens are stored after RoPE.
    heads: this process's heads under tensor parallelism, or None.
    corrected: share of the bias of softmax weights that is corrected (keys only).
    rest: bits of a lower rate that some packed tokens have, 0 for none.
    tiers: packed tokens of the codec's own rate, and perhaps of the lower one.
    """

    STATE: ClassVar[Spec] = {"sinks": lambda side: tensor(side.dtype, *side.sinks.shape[:2], None, side.head_dim)}
    PARTS: ClassVar[tuple[str, ...]] = ("tiers", "tail")

    def __init__(
        self,
        codec: Codec,
        like: Tensor,
        dtype: torch.dtype,
        sizes: PageSizes,
        tail_tokens: int,
        rotary: Rotary | None = None,
        heads: HeadShard | None = None,
        corrected: float = 0.0,
        rest: float = 0.0,
    ) -> None:
        B, H, _, self.head_dim = like.shape
        self.rotary, self.heads, self.dtype = rotary, heads, dtype
        self.sinks = like.new_empty((B, H, 0, self.head_dim), dtype=dtype)
        self.tiers = [Tier(codec, like, sizes, corrected)]
        if rest:
            self.tiers.append(Tier(codec, like, sizes, corrected, rest, self.tiers[0]))
        self.tail = TailBuffer(B, H, self.head_dim, dtype, like.device, tail_tokens)

    @property
    def codec(self) -> Codec:
        """The codec at its own rate."""
        return self.tiers[0].codec

    @property
    def packed(self) -> BlockBuffer:
        """Blocks of the codec's own rate."""
        return self.tiers[0].packed

    @property
    def packed_tokens(self) -> int:
        """Number of packed tokens of all rates."""
        return sum(tier.packed.tokens for tier in self.tiers)

    def prepare(
        self,
        x: Tensor,
        sinks: int,
        parts: Sequence[range | Tensor],
        flush: int,
        restart: bool,
        place: int = 0,
        loss: TokenLoss | None = None,
        hidden: Tensor | None = None,
        processes: ContextParallel | None = None,
    ) -> Prepared:
        """Compute the changes of appending tokens [B, H, n, D] without applying them.

        A codec that is fitted on the prompt is fitted before it packs for the first time, on all
        tokens available.

        sinks: number of first tokens that become sinks.
        parts: which of the tokens that leave the tail each tier packs; int64 [B, H, n], ascending, if
            heads differ.
        flush: number of tokens that leave the tail, from it and then the new ones, in whole blocks.
            Later tokens become the tail.
        restart: `x` includes the tokens of the tail.
        place: position in the cache of the first token to pack.
        loss: of errors in all tokens so far, by their position.
        hidden: int64 [B], tokens at smaller positions are padding or sinks of a row, or None.
        processes: those that pack the other tokens that leave the tail, or None.

        Raises:
            UserError: a scale is too large for its dtype.
        """
        first, x = x[:, :, :sinks], x[:, :, sinks:]
        tail = self.tail.data[:, :, :0] if restart else self.tail.data
        codecs, old = [tier.codec for tier in self.tiers], tail.shape[2]
        if flush and self.codec.needs_fit == "prompt" and not x.is_meta:
            log.debug("fitting %s to a prompt of %d tokens", self.codec.label, old + x.shape[2])
            waiting = torch.cat([tail, x], dim=2) if old else x
            codecs[0] = self._fitted(self.codec, torch.cat([self.sinks, first], dim=2), waiting, place, loss)
            codecs[1:] = [codecs[0].at_rate(tier.bits) for tier in self.tiers[1:]]
        if flush:
            log.debug("packing %d tokens with %s", flush, codecs[0].label)
        share = None if processes is None else lambda sums: sums.share(processes, self.sinks)
        encoded = [
            tier.encoded(codec, self._chunks(which, tail, x, place, hidden), self.heads, share)
            for tier, codec, which in zip(self.tiers, codecs, parts, strict=True)
        ]
        leave = self.tail.tokens if restart else min(flush, old)
        return Prepared(codecs, first, encoded, leave, x[:, :, max(0, flush - old) :])

    def _chunks(
        self, which: range | Tensor, tail: Tensor, x: Tensor, place: int, hidden: Tensor | None
    ) -> Iterator[tuple[Tokens, Tensor | None]]:
        """Yield tokens of tail and x in parts, and which of them are not hidden, see `prepare`."""
        old, unit = tail.shape[2], self.packed.sizes.unit
        if isinstance(which, range):
            for start, stop in coding.chunks(which.start, which.stop, unit, x):
                new = x[:, :, max(0, start - old) : max(0, stop - old)]
                part = joined(tail[:, :, start : min(stop, old)], new) if start < old else new
                yield self._tokens(part, place + start), _shown(range(place + start, place + stop), hidden)
            return
        x = torch.cat([tail, x], dim=2)
        for start, stop in coding.chunks(0, which.shape[2], unit, x):
            index = which[:, :, start:stop]
            angles = None if self.rotary is None else self.rotary.at(place + index)
            yield Tokens(gathered(x, index), angles), _shown(place + index, hidden)

    def leaving(self, x: Tensor, held: int, move: Move) -> Tensor:
        """Return the tokens [B, H, n, D] that leave the window in a call. held: tokens in the window before."""
        return first_tokens(self.tail.data[:, :, :held], x[:, :, move.sinks :], move.leave)

    def forget(self, tokens: int) -> None:
        """Remove that many of the oldest packed tokens, whole blocks."""
        self.packed.drop_front(tokens // self.packed.layout.block_tokens)

    def commit(self, new: Prepared) -> None:
        """Apply prepared changes."""
        if new.sinks.shape[2]:
            self.sinks = joined(self.sinks, new.sinks)
        for tier, codec, encoded in zip(self.tiers, new.codecs, new.encoded, strict=True):
            tier.append(codec, encoded)
        self.tail.drop_front(new.leave_tail)
        self.tail.append(new.enter_tail)

    def _fitted(self, codec: Codec, sinks: Tensor, x: Tensor, place: int, loss: TokenLoss | None) -> Codec:
        """Return the codec fitted on the prompt. x: the tokens from `place` on."""
        stretches: Iterable[tuple[int, int]] = coding.fit_stretches(x.shape[2])
        if loss is None and codec.observes:
            log.debug("no queries were observed: all tokens of the prompt have the same weight in the fit")
        elif loss is not None:  # few tokens may have most of the weight: none is left out
            loss, stretches = loss.tokens(place), coding.chunks(0, x.shape[2], 1, x)
        if loss is None and self.rotary is not None and not self.rotary.rope.varies and self.rotary.padding is None:
            stretches = list(stretches)
            places = torch.cat([torch.arange(place + start, place + stop) for start, stop in stretches])
            kept = torch.cat([x[:, :, start:stop] for start, stop in stretches], dim=2)
            parts = [Tokens(kept, self.rotary.at(places.to(x.device)))]
        else:
            parts = [self._tokens(x[:, :, start:stop], place + start) for start, stop in stretches]
        return coding.fitted(codec, parts, self._tokens(sinks, 0, own_sinks=True), self.heads, loss)

    def _tokens(self, x: Tensor, place: int, own_sinks: bool = False) -> Tokens:
        """Return tokens from `place` on with their RoPE angles.

        own_sinks: x holds each row's own first tokens, after its padding.
        """
        if self.rotary is None or not x.shape[2]:
            return Tokens(x)
        return Tokens(x, self.rotary.angles(place, x.shape[2], x.device, own_sinks))

    def view(self, rate: int, first: int, tokens: int, where: Where) -> View:
        """Return the view of packed tokens `first` to `first + tokens` of a tier, whole blocks.

        where: position of the first one, or the positions of all.
        """
        angles = None if self.rotary is None else self.rotary.of(where, tokens, self.sinks.device)
        return self.tiers[rate].view(first, tokens, angles)

    def unpack_back(self, tokens: int, keep: int, place: int) -> None:
        """Remove the `tokens` latest packed tokens, whole blocks. The first `keep` of them are
        decoded and return to the tail.

        place: position of the first packed token.
        """
        if keep:
            first = self.packed.tokens - tokens
            latest = self.view(0, first, tokens, place + first)
            self.tail.append(latest.decode()[:, :, :keep].to(self.dtype))
        self.packed.drop_back(tokens // self.packed.layout.block_tokens)

    def restart(self, codec: Codec) -> None:
        """Remove all packed tokens. codec: as it was before a fit."""
        for tier in self.tiers:
            tier.restart(codec if tier.base is None else codec.at_rate(tier.bits))

    def to(self, device: torch.device | str) -> None:
        """Move everything to a device."""
        for tier in self.tiers:
            tier.to(device)
        self.tail.to(device)
        self.sinks = self.sinks.to(device)

    def select(self, rows: Tensor) -> None:
        """Keep these batch rows (int64, repeats allowed)."""
        for tier in self.tiers:
            tier.select(rows)
        self.tail.select(rows)
        self.sinks = self.sinks.index_select(0, rows)

    def tables(self) -> list[Tensor]:
        """Return the tensors that decoding and attention need next to the packed ones."""
        return [table for tier in self.tiers for table in tier.tables()]

    def count(self, footprint: Footprint) -> None:
        """Add the bytes held to `footprint`, without tables."""
        footprint.parts["exact sinks"] += self.sinks.numel() * self.sinks.element_size()
        for tier in self.tiers:
            tier.packed.count(footprint)
        self.tail.count(footprint)


def extents(tiers: Sequence[Tier]) -> Iterator[tuple[int, int]]:
    """Yield first token and number of tokens of pages, cut where a page of any tier ends.

    The tiers must have the same tokens.
    """
    ends = sorted({0}.union(*(tier.packed.ends for tier in tiers)))
    return ((first, last - first) for first, last in itertools.pairwise(ends))


def _shown(positions: Tensor | range, hidden: Tensor | None) -> Tensor | None:
    """Return which tokens at these positions, consecutive or int [B, H, n], are not hidden; None for all."""
    if hidden is None:
        return None
    if isinstance(positions, range):
        positions = torch.arange(positions.start, positions.stop, device=hidden.device)
    return positions >= hidden[:, None, None]
