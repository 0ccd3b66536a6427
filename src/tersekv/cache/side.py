"""The keys, or the values, of one layer: exact sinks | packed blocks | exact tail."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from tersekv.cache import coding
from tersekv.cache.blocks import BlockBuffer
from tersekv.cache.coding import Tokens
from tersekv.cache.footprint import Footprint
from tersekv.cache.lost_variance import LostVariance
from tersekv.cache.pages import PageSizes
from tersekv.cache.parallel import HeadShard
from tersekv.cache.placement import Move
from tersekv.cache.rotary import Rotary
from tersekv.cache.schema import Check, of_spec, optional, record, refuse, require, tensor
from tersekv.cache.state import Rules, Spec, State, Stateful, own
from tersekv.cache.tail import TailBuffer, first_tokens
from tersekv.codecs import Codec
from tersekv.codecs.transforms.moments import TokenLoss
from tersekv.errors import CacheError
from tersekv.layouts.base import PackedTensors, View
from tersekv.tensors import type_name

log = logging.getLogger(__name__)


def exact_tokens(side: SideStore) -> Check:
    """Return the check of a side's exact tokens."""
    return tensor(side.dtype, *side.sinks.shape[:2], None, side.head_dim)


def side_learnt(side: SideStore, place: str) -> None:
    """Check that the codec has the fitted tensors that decoding needs."""
    needs_fit = side.codec.needs_fit
    ready = needs_fit is None or (needs_fit == "prompt" and not side.packed.tokens)
    require(ready, f"{place}.fitted", "is not what the codec must have learnt")


class Prepared(NamedTuple):
    """Result of encoding new tokens of one side, before it is applied.

    codec: the codec, perhaps newly fitted.
    sinks: new sinks.
    planes: packed tensors to append.
    leave_tail: number of oldest tokens that leave the tail.
    enter_tail: [B, H, n, D], tokens that enter the tail.
    lost: lost variance of the keys, see `SideStore`.
    rest: packed tensors of tokens with a lower rate, see `MixedSide`.
    lost_rest: lost variance of such keys.
    """

    codec: Codec
    sinks: Tensor
    planes: list[PackedTensors]
    leave_tail: int
    enter_tail: Tensor
    lost: Tensor | None
    rest: Sequence[PackedTensors] = ()
    lost_rest: Tensor | None = None


class SideStore(Stateful):
    """Tokens [B, H, n, D] of one side, in order of arrival.

    sizes: page sizes of packed tokens.
    tail_tokens: capacity of the tail.
    rotary: RoPE of keys that are coded before RoPE. Exact tokens are stored after RoPE.
    heads: this process's heads under tensor parallelism, or None.
    corrected: share of the bias of softmax weights that is corrected (keys only).
    lost: float32 [B, H, D], lost variance of the tokens packed first (`cache/lost_variance.py`).
        None if the share is 0 or nothing has been packed.
    """

    STATE: ClassVar[Spec] = {"sinks": exact_tokens}
    RULES: ClassVar[Rules] = (side_learnt,)
    PARTS: ClassVar[tuple[str, ...]] = ("packed", "tail")
    MADE: ClassVar[tuple[str, ...]] = ("_factors",)

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
    ) -> None:
        B, H, _, self.head_dim = like.shape
        self.corrected = corrected
        self.lost: Tensor | None = None
        self._factors: dict[int, tuple[Tensor, Tensor]] | None = None
        self.codec, self.rotary, self.heads = codec, rotary, heads
        self.dtype = dtype
        self.sinks = like.new_empty((B, H, 0, self.head_dim), dtype=dtype)
        self.packed = BlockBuffer(codec.layout(self.head_dim), B, H, like.device, sizes)
        self.tail = TailBuffer(B, H, self.head_dim, dtype, like.device, tail_tokens)

    @property
    def packed_tokens(self) -> int:
        """Number of packed tokens."""
        return self.packed.tokens

    def rounded(self, x: Tensor) -> Tensor:
        """Convert new tokens to the exact dtype.

        Raises:
            CacheError: they are not finite, or too large for that dtype.
        """
        rounded = (x.detach() if x.requires_grad else x).to(self.dtype)
        # except on a CPU, a check at every token would synchronise with the device
        checked = x.is_cpu or x.shape[2] > 1
        # the sum is cheap, and finite for ordinary tokens; the exact test runs only if it is not
        if checked and not math.isfinite(rounded.sum(dtype=torch.float32).item()) and not rounded.isfinite().all():
            raise CacheError(self._why_not_finite(x))
        return rounded

    def _why_not_finite(self, x: Tensor) -> str:
        if not bool(torch.isfinite(x).all()):
            return (
                "keys or values hold NaN or Inf; the model's own computation has overflowed (try bfloat16 or float32 "
                "weights)"
            )
        return (
            f"keys or values reach {float(x.abs().max()):.3g}, which {type_name(self.dtype)} cannot hold; use the "
            "policy option exact=bf16 or exact=fp32 (for example window:exact=bf16+kivi)"
        )

    def prepare(
        self,
        x: Tensor,
        sinks: int,
        own: range,
        flush: int,
        restart: bool,
        place: int = 0,
        loss: TokenLoss | None = None,
        hidden: Tensor | None = None,
    ) -> Prepared:
        """Compute the changes of appending tokens [B, H, n, D] without applying them.

        A codec that is fitted on the prompt is fitted before it packs for the first time, on all
        tokens available.

        sinks: number of first tokens that become sinks.
        own: range of the packed tokens that this process keeps.
        flush: number of tokens to pack, from the tail and then the new tokens, in whole blocks.
            Later tokens become the tail.
        restart: `x` includes the tokens of the tail.
        place: position in the cache of the first token to pack.
        loss: of errors in all tokens so far, by their position.
        hidden: int64 [B], tokens at smaller positions are padding or sinks of a row, or None.

        Raises:
            UserError: a scale is too large for its dtype.
        """
        first, x = x[:, :, :sinks], x[:, :, sinks:]
        tail = self.tail.data[:, :, :0] if restart else self.tail.data
        codec, planes, old = self.codec, [], tail.shape[2]
        sums = LostVariance() if self.corrected and self.lost is None else None
        if flush:
            if codec.needs_fit == "prompt":
                log.debug("fitting %s to a prompt of %d tokens", codec.label, old + x.shape[2])
                waiting = torch.cat([tail, x], dim=2) if old else x
                codec = self._fitted(codec, torch.cat([self.sinks, first], dim=2), waiting, place, loss)
            log.debug("packing %d tokens with %s", len(own), codec.label)
            for start, stop in coding.chunks(own.start, own.stop, self.packed.sizes.unit, x):
                parts = [tail[:, :, start : min(stop, old)], x[:, :, max(0, start - old) : max(0, stop - old)]]
                part = torch.cat(parts, dim=2) if start < old else parts[1]
                tokens = self._tokens(part, place + start)
                planes.append(coding.encode(codec, tokens, self.heads))
                if sums is not None:
                    sums.add(part, self._view(codec, planes[-1], tokens), self._counts(place + start, part, hidden))
        leave = self.tail.tokens if restart else min(flush, old)
        lost = self.lost if sums is None else sums.value()
        return Prepared(codec, first, planes, leave, x[:, :, max(0, flush - old) :], lost)

    def leaving(self, x: Tensor, held: int, move: Move) -> Tensor:
        """Return the tokens [B, H, n, D] that leave the window in a call. held: tokens in the window before."""
        return first_tokens(self.tail.data[:, :, :held], x[:, :, move.sinks :], move.leave)

    def _view(self, codec: Codec, planes: PackedTensors, tokens: Tokens) -> View:
        """Return the view of tokens that were just encoded."""
        return coding.view(codec, planes, self.head_dim, tokens.angles)

    @staticmethod
    def _counts(place: int, x: Tensor, hidden: Tensor | None) -> Tensor | None:
        """Return the mask of tokens [B, H, n, D] from `place` on that are not hidden, bool [B, 1, n]."""
        if hidden is None:
            return None
        positions = torch.arange(place, place + x.shape[2], device=x.device)
        return (positions >= hidden[:, None]).unsqueeze(1)

    def forget(self, tokens: int) -> None:
        """Remove that many of the oldest packed tokens, whole blocks."""
        self.packed.drop_front(tokens // self.packed.layout.block_tokens)

    def commit(self, new: Prepared) -> None:
        """Apply prepared changes."""
        self.codec, self.lost = new.codec, new.lost
        if new.sinks.shape[2]:
            self.sinks = torch.cat([self.sinks, new.sinks], dim=2)
        self.packed.append(*new.planes)
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

    def planes(self, first: int, tokens: int) -> PackedTensors:
        """Return the packed tensors of tokens `first` to `first + tokens`, whole blocks."""
        t = self.packed.layout.block_tokens
        return self.packed.planes(first // t, (first + tokens) // t)

    def view(self, first: int, tokens: int, place: int = 0, places: Tensor | None = None) -> View:
        """Return the view of packed tokens `first` to `first + tokens`, whole blocks.

        place: position in the cache of the first packed token.
        places: positions int [tokens], if they are not consecutive.
        """
        angles = None
        if self.rotary is not None and places is not None:
            angles = self.rotary.at(places)
        elif self.rotary is not None:
            angles = self.rotary.angles(place + first, tokens, self.sinks.device)
        return coding.view(self.codec, self.planes(first, tokens), self.head_dim, angles)

    def unpack_back(self, tokens: int, keep: int, place: int) -> None:
        """Remove the `tokens` latest packed tokens, whole blocks. The first `keep` of them are
        decoded and return to the tail.

        place: position of the first packed token.
        """
        if keep:
            latest = self.view(self.packed.tokens - tokens, tokens, place)
            self.tail.append(latest.decode()[:, :, :keep].to(self.dtype))
        self.packed.drop_back(tokens // self.packed.layout.block_tokens)

    def decoded(self, dtype: torch.dtype, place: int) -> Tensor:
        """Return sinks, packed tokens and tail as [B, H, n, D].

        place: position of the first packed token.
        """
        pages = [self.view(first, tokens, place).decode().to(dtype) for first, tokens in extents([self])]
        return torch.cat([self.sinks.to(dtype), *pages, self.tail.data.to(dtype)], dim=2)

    def live_state(self) -> State:
        """Return the state with the codec's fitted tensors, see `Stateful`."""
        lost = {"lost": self.lost} if self.corrected else {}
        return super().live_state() | {"fitted": self.codec.fitted} | lost

    def schema(self) -> dict[str, Check]:
        B, H = self.sinks.shape[:2]
        learnt = record({n: of_spec(spec) for n, spec in self.codec.learns(B, H, self.head_dim).items()}, may_lack=True)
        lost = {"lost": optional(tensor(torch.float32, B, H, self.head_dim))} if self.corrected else {}
        return super().schema() | {"fitted": learnt} | lost

    def _hold(self, state: State, place: str) -> None:
        super()._hold(state, place)
        B, H = self.sinks.shape[:2]
        self.codec = dataclasses.replace(self.codec, fitted=own(state["fitted"]))
        self.lost = own(state.get("lost"))
        if fault := self.codec.learnt_fault(B, H, self.head_dim):
            refuse(f"{place}.fitted", fault)
        same = self.codec.layout(self.head_dim) == self.packed.layout
        require(same, f"{place}.fitted", "gives codes of another length than the recipe")

    def to(self, device: torch.device | str) -> None:
        """Move everything to a device."""
        self.packed.to(device)
        self.tail.to(device)
        self.sinks = self.sinks.to(device)
        self.codec = self.codec.to(device)
        self.lost = None if self.lost is None else self.lost.to(device)
        self._factors = None

    def select(self, rows: Tensor) -> None:
        """Keep these batch rows (int64, repeats allowed)."""
        self.packed.select(rows)
        self.tail.select(rows)
        self.sinks = self.sinks.index_select(0, rows)
        self.codec = self.codec.select(rows)
        self.lost = None if self.lost is None else self.lost.index_select(0, rows)
        self._factors = None

    @property
    def correction(self) -> Tensor | None:
        """Return the factors of `softmax.score_bias`, float32 [B, H, D], or None."""
        return self._factors_of(self.lost)

    def _factors_of(self, lost: Tensor | None) -> Tensor | None:
        """Return the factors for a lost variance, which are the same tensor at every call."""
        if lost is None:
            return None
        made = self._factors = self._factors or {}
        if id(lost) not in made:
            made[id(lost)] = lost, lost * (0.5 * self.corrected)
        return made[id(lost)][1]

    def tables(self) -> list[Tensor]:
        """Return the tensors that decoding and attention need next to the packed ones."""
        lost = [] if self.lost is None else [self.lost]
        return [*self.codec.tables(self.head_dim), *lost]

    def count(self, footprint: Footprint) -> None:
        """Add the bytes held to `footprint`, without tables."""
        footprint.parts["exact sinks"] += self.sinks.numel() * self.sinks.element_size()
        self.packed.count(footprint)
        self.tail.count(footprint)


def extents(sides: Sequence[SideStore]) -> list[tuple[int, int]]:
    """Return first token and number of tokens of pages, cut where a page of any side ends.

    The sides must have the same tokens.
    """
    ends = sorted({0}.union(*(side.packed.ends for side in sides)))
    return [(first, last - first) for first, last in itertools.pairwise(ends)]
