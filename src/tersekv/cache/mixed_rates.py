"""The cache of one layer that packs a prompt's tokens at two rates; no token is evicted.

    sinks | packed tokens of both rates | exact recent window

Packed tokens of the codec's own rate are in `side.packed`, those of the lower rate in `side.rest`,
each in order of position. `high` has one bit per token: 1 for the codec's rate. Positions follow from
it. Tokens packed after the last prompt have the codec's rate and need no bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tersekv.cache import coding
from tersekv.cache.blocks import BlockBuffer
from tersekv.cache.coding import Tokens
from tersekv.cache.footprint import Footprint
from tersekv.cache.layer import LayerStore
from tersekv.cache.layer_checks import LAYER
from tersekv.cache.parallel import HeadShard
from tersekv.cache.pool import gathered
from tersekv.cache.schema import Check, of_spec, record, refuse, require, tensor
from tersekv.cache.segments import PackedSegment
from tersekv.cache.side import Prepared, SideStore, extents
from tersekv.cache.state import State, own
from tersekv.codecs import Codec
from tersekv.codecs.transforms.moments import TokenLoss
from tersekv.codecs.transforms.rope import Angles, Rope
from tersekv.errors import CacheError, UserError
from tersekv.policies.base import PROMPT_TOKENS
from tersekv.policies.mixed import Mixed
from tersekv.recipe import LayerPlan
from tersekv.tensors import plain

BITS = 8
"""Tokens per byte of `high`."""

UNRANKED = (
    "the policy mixed ranks a prompt's tokens by its queries, which only tersekv's attention sees; use "
    "`with tersekv.compress(model, recipe):`, or the policy window"
)


class Ranking(NamedTuple):
    """What the queries of a prompt show.

    importance: float32 [B, H, T], of the tokens in the tail and then of the new tokens.
    losses: of errors in the keys and in the values of all tokens so far, or None.
    """

    importance: Tensor
    losses: Sequence[TokenLoss] | None = None


class Split(NamedTuple):
    """Tokens to pack at each rate, for one side.

    high, rest: int64 [B, H, n], indices among the tokens to pack, ascending.
    loss: of errors in the side's tokens, or None.
    """

    high: Tensor
    rest: Tensor
    loss: TokenLoss | None


class MixedSide(SideStore):
    """One side of the layer.

    rest: packed tokens of the lower rate.
    low: codec of the lower rate, with the same fit.
    """

    PARTS = ("packed", "tail", "rest")

    def __init__(self, codec: Codec, rest_bits: float, *arguments: Any) -> None:
        super().__init__(codec, *arguments)
        self.rest_bits = rest_bits
        self.restart()

    def restart(self) -> None:
        """Set the lower rate of the present codec, with no token in it."""
        B, H, _, D = self.sinks.shape
        self.low = self.codec.at_rate(self.rest_bits)
        self.rest = BlockBuffer(self.low.layout(D), B, H, self.sinks.device, self.packed.sizes)

    @property
    def packed_tokens(self) -> int:
        """Number of packed tokens of both rates."""
        return self.packed.tokens + self.rest.tokens

    def prepare(
        self,
        x: Tensor,
        sinks: int,
        own: range,
        flush: int,
        restart: bool,
        place: int = 0,
        loss: TokenLoss | Split | None = None,
        hidden: Tensor | None = None,
    ) -> Prepared:
        """Compute the changes of appending tokens, see `SideStore`. loss: a `Split` for two rates."""
        if not isinstance(loss, Split):
            return super().prepare(x, sinks, own, flush, restart, place, loss, hidden)
        # without tokens to pack, all tokens enter the tail
        made = super().prepare(x, sinks, range(0), 0, restart, place, None, hidden)
        old = self.tail.data[:, :, : 0 if restart else self.tail.tokens]
        waiting = torch.cat([old, made.enter_tail], dim=2)
        codec, low = self.codec, self.low
        if codec.needs_fit == "prompt":
            codec = self._fitted(codec, torch.cat([self.sinks, made.sinks], dim=2), waiting, place, loss.loss)
            low = codec.at_rate(self.rest_bits)
        planes = [self._encoded(c, waiting, at, place) for c, at in ((codec, loss.high), (low, loss.rest))]
        leave = self.tail.tokens if restart else min(flush, old.shape[2])
        return Prepared(codec, made.sinks, planes[0], leave, waiting[:, :, max(flush, old.shape[2]) :], None, planes[1])

    def _encoded(self, codec: Codec, x: Tensor, index: Tensor, place: int) -> list:
        """Encode the tokens `index` [B, H, n] of x [B, H, T, D], whose first one is at `place`."""
        parts = []
        for start, stop in coding.chunks(0, index.shape[2], self.packed.sizes.unit, x):
            at = index[:, :, start:stop]
            parts.append(coding.encode(codec, Tokens(gathered(x, at), self.angles_at(place + at))))
        return parts

    def commit(self, new: Prepared) -> None:
        """Apply prepared changes."""
        fitted = new.codec is not self.codec
        super().commit(new)
        if fitted:
            self.restart()
        self.rest.append(*new.rest)

    def angles_at(self, positions: Tensor) -> Angles | None:
        """Return the RoPE angles at positions int [B, H, n] of the cache."""
        if self.rotary is None:
            return None
        rope, padding = self.rotary.rope, self.rotary.padding
        if rope.varies:  # the table has a row for each token
            given = self.rotary.angles(0, int(positions.max()) + 1, positions.device)
            places = (given.places + positions).to(torch.int32)
            return given._replace(places=places, tokens=positions.shape[2])
        first = 0 if padding is None else padding.to(positions)[:, None, None]
        return rope.angles_at((positions - first).clamp(min=0))

    def view_of(self, rest: bool, first: int, tokens: int, where: Tensor | int) -> Any:
        """Return the view of packed tokens of one rate. where: int [B, H, tokens], or the first position."""
        if not rest and isinstance(where, int):
            return self.view(first, tokens, where - first)
        codec, buffer = (self.low, self.rest) if rest else (self.codec, self.packed)
        t = buffer.layout.block_tokens
        planes = buffer.planes(first // t, (first + tokens) // t)
        assert isinstance(where, Tensor)
        return coding.view(codec, planes, self.head_dim, self.angles_at(where))

    def unpack_back(self, tokens: int, keep: int, place: int) -> None:
        """Remove the latest packed tokens, see `SideStore`. All of them came after the ranked ones."""
        super().unpack_back(tokens, keep, place + self.rest.tokens)

    @staticmethod
    def _rates(low: Codec) -> dict[str, Tensor]:
        """Return the tensors that differ at the lower rate."""
        return {name: low.fitted[name] for name in low.rate_tensors if name in low.fitted}

    def _share(self, rates: dict[str, Tensor]) -> None:
        """Let both codecs share all fitted tensors but `rates`, which are of the lower rate."""
        self.low = dataclasses.replace(self.low, fitted=self.codec.fitted | rates)

    def live_state(self) -> State:
        """Return the state with the tensors that differ at the lower rate."""
        return super().live_state() | {"low": self._rates(self.low)}

    def schema(self) -> dict[str, Check]:
        B, H, _, D = self.sinks.shape
        specs = {n: of_spec(spec) for n, spec in self.low.learns(B, H, D).items() if n in self.low.rate_tensors}
        return super().schema() | {"low": record(specs, may_lack=True)}

    def _hold(self, state: State, place: str) -> None:
        super()._hold(state, place)
        B, H, _, D = self.sinks.shape
        self._share(own(state["low"]))
        if fault := self.low.learnt_fault(B, H, D):
            refuse(f"{place}.low", fault)
        self.rest = BlockBuffer(self.low.layout(D), B, H, self.sinks.device, self.packed.sizes)

    def to(self, device: torch.device | str) -> None:
        """Move everything to a device."""
        super().to(device)
        self.rest.to(device)
        self._share(self._rates(self.low.to(device)))

    def select(self, rows: Tensor) -> None:
        """Keep these batch rows."""
        super().select(rows)
        self.rest.select(rows)
        self._share(self._rates(self.low.select(rows)))

    def tables(self) -> list[Tensor]:
        """Return the tensors that decoding and attention need next to the packed ones."""
        return [*super().tables(), *(self.low.tables(self.head_dim) if self.rest.tokens else [])]

    def count(self, footprint: Footprint) -> None:
        """Add the bytes held to `footprint`, without tables."""
        super().count(footprint)
        self.rest.count(footprint)


def rates_agree(store: MixedRatesStore, place: str) -> None:
    """Check that `high` has one bit per ranked token, with as many tokens of each rate in every head."""
    held = {(side.packed.tokens, side.rest.tokens) for side in store.sides}
    require(len(held) == 1, f"{place}.sides", f"hold different numbers of tokens at each rate {sorted(held)}")
    packed, rest = held.pop()
    ranked = store.ranked
    require(ranked % store.flush_tokens == 0 and rest <= ranked <= packed + rest, f"{place}.high", "has a wrong length")
    count = store.is_high().sum(-1)
    require(bool((count == ranked - rest).all()), f"{place}.high", f"must name {ranked - rest} tokens in every head")


class MixedRatesStore(LayerStore):
    """Full-attention layer under the policy `mixed`.

    high: uint8 [B, H, ranked / 8], bit i % 8 of byte i // 8 is 1 if packed token i has the codec's rate.
    """

    STATE = LAYER | {"high": lambda store: tensor(torch.uint8, store.batch_size, store.kv_heads, None)}
    RULES = (*LayerStore.RULES, rates_agree)

    sides: tuple[MixedSide, MixedSide]

    def __init__(
        self,
        plan: LayerPlan,
        keys: Tensor,
        values: Tensor,
        window: int | None = None,
        rope: Rope | None = None,
        heads: HeadShard | None = None,
    ) -> None:
        assert isinstance(plan.policy, Mixed) and window is None
        self.mixed = plan.policy
        # heads store different tokens, so nothing is stored jointly for all of them
        own = {side: dataclasses.replace(getattr(plan, side), per_head=True) for side in ("keys", "values")}
        super().__init__(plan._replace(**own), keys, values, None, rope, heads)
        self.high = keys.new_empty((*keys.shape[:2], 0), dtype=torch.uint8)

    def _side(self, codec: Codec, *arguments: Any) -> SideStore:
        return MixedSide(codec, self.mixed.rest, *arguments)

    @property
    def ranked(self) -> int:
        """Number of packed tokens up to the end of the latest ranked prompt."""
        return self.high.shape[2] * BITS

    # ------------------------------------------------------------------ growing

    def ranks(self, n: int) -> bool:
        """True if appending n tokens packs some of them at the lower rate."""
        waiting = self.num_tokens + n - self.policy.sink_tokens(None) - self.packed_tokens
        return self._is_prompt(n) and self._counts(self._due(waiting, n, self.num_tokens + n)[0])[1] > 0

    def _is_prompt(self, n: int) -> bool:
        return self.num_tokens == 0 or n >= PROMPT_TOKENS

    def _counts(self, flush: int) -> tuple[int, int]:
        """Return how many of `flush` tokens of a prompt have each rate."""
        high = self.mixed.chosen(flush, self.flush_tokens)
        return high, flush - high

    def _add(self, new: list[Tensor], restart: bool, losses: Any) -> None:
        """Distribute new tokens, see `LayerStore`. losses: a `Ranking`, losses alone, or None."""
        n, tail = new[0].shape[2], self.keys.tail.tokens
        added, before = n - (tail if restart else 0), 0 if restart else self.num_tokens - tail
        sinks = min(self.policy.sink_tokens(None) - self.keys.sinks.shape[2], n)
        waiting = n + (0 if restart else tail) - sinks
        flush = self._due(waiting, added, before + sinks + waiting)[0]
        prompt, ranking = self._is_prompt(added), losses if isinstance(losses, Ranking) else None
        losses = ranking.losses if ranking is not None else losses
        if not prompt or self._counts(flush)[1] == 0:
            return super()._add(new, restart, losses)
        if ranking is None:
            raise UserError(UNRANKED)
        high = self._choice(ranking.importance[:, :, sinks : sinks + flush], before + sinks)
        index = tuple(_places(mask) for mask in (high, ~high))
        earlier, packed = self.is_high(), self.packed_tokens
        split = [Split(*index, loss) for loss in losses or (None, None)]
        super()._add(new, restart, split)  # type: ignore[arg-type]  # `MixedSide.prepare` takes them
        unranked = earlier.new_ones(*earlier.shape[:2], packed - earlier.shape[2])
        self.high = _bytes(torch.cat([earlier, unranked, high], dim=2))
        return None

    def _choice(self, importance: Tensor, place: int) -> Tensor:
        """Return the mask [B, H, n] of the tokens from `place` on that have the codec's rate.

        Every row has as many. A row with padding has fewer tokens to choose, and padding fills up.
        """
        n = importance.shape[2]
        most = self._counts(n)[0]
        score = importance.float()
        if self.padding is not None:
            hidden = (self.padding + self.policy.sink_tokens(None) - place).clamp(0, n)
            own = torch.tensor([self.mixed.chosen(n - p, 1) for p in hidden.tolist()], device=score.device)
            filled = most - torch.maximum(own.clamp(max=most), most - hidden)
            at = torch.arange(n, device=score.device)
            score = score.masked_fill((at < hidden[:, None])[:, None], float("-inf"))
            score = score.masked_fill((at < filled[:, None])[:, None], float("inf"))
        order = score.argsort(dim=-1, descending=True, stable=True)[:, :, :most]
        return torch.zeros_like(score, dtype=torch.bool).scatter_(2, order, True)

    # ------------------------------------------------------------------ reading

    def is_high(self) -> Tensor:
        """Return `high` as bool [B, H, ranked]."""
        shifts = torch.arange(BITS, dtype=torch.uint8, device=self.device)
        return (self.high.unsqueeze(-1) >> shifts & 1).flatten(2).bool()

    def _extents(self) -> Iterator[tuple[bool, int, int, Tensor | int]]:
        """Yield, for pages of each rate: is it the lower one, first slot, number of slots, and positions.

        Positions are int32 [B, H, slots], or that of the first slot.
        """
        ranked = self.ranked
        high = self.is_high() if ranked else None
        before = ranked - self.sides[0].rest.tokens  # ranked tokens of the codec's rate
        places = [] if high is None else [_places(x).to(torch.int32) + self.packed_first for x in (high, ~high)]
        for first, tokens in extents(self.sides):
            cut = min(max(before - first, 0), tokens)  # a page may hold ranked and later tokens
            if cut:
                yield False, first, cut, places[0][:, :, first : first + cut]
            if tokens > cut:
                yield False, first + cut, tokens - cut, self.packed_first + ranked + first + cut - before
        ends = [0, *self.sides[0].rest.ends]
        for first, last in zip(ends, ends[1:], strict=False):
            yield True, first, last - first, places[1][:, :, first:last]

    def packed_pages(self) -> Iterator[PackedSegment]:
        """Return packed tokens page by page, those of the codec's rate first."""
        return (self._segment(*extent) for extent in self._extents())

    def packed_segment(self, first: int = 0, tokens: int | None = None) -> PackedSegment | None:
        """Return slots `first` to `first + tokens`, or up to the end of a page, or None.

        Slots count those of the codec's rate first.
        """
        offset = 0
        for rest, start, length, where in self._extents():
            if first < offset + length:
                skip = first - offset
                take = length - skip if tokens is None else min(tokens, length - skip)
                where = where + skip if isinstance(where, int) else where[:, :, skip : skip + take]
                return self._segment(rest, start + skip, take, where)
            offset += length
        return None

    def _segment(self, rest: bool, first: int, tokens: int, where: Tensor | int) -> PackedSegment:
        keys, values = (side.view_of(rest, first, tokens, where) for side in self.sides)
        if isinstance(where, int):
            return PackedSegment(keys, values, where, tokens)
        if self.hidden is not None:
            where = where.masked_fill(where < self.hidden[:, None, None], -1)
        return PackedSegment(keys, values, 0, tokens, where)

    def _in_order(self, side: SideStore, dtype: torch.dtype) -> Tensor:
        assert isinstance(side, MixedSide)
        out = side.sinks.new_empty((*side.sinks.shape[:2], self.packed_tokens, side.head_dim), dtype=dtype)
        for rest, first, tokens, where in self._extents():
            x = side.view_of(rest, first, tokens, where).decode().to(dtype)
            if isinstance(where, int):
                out[:, :, where - self.packed_first :][:, :, :tokens] = x
            else:
                at = (where - self.packed_first).long().unsqueeze(-1)
                out.scatter_(2, at.expand_as(x), x)
        return torch.cat([side.sinks.to(dtype), out, side.tail.data.to(dtype)], dim=2)

    # ------------------------------------------------------------------ changing

    def check_crop(self, n: int) -> None:
        """Raise CacheError unless n tokens can be rolled back: all, or those after the latest prompt's
        packed ones.
        """
        super().check_crop(n)
        most = self.num_tokens - self.packed_first - self.ranked
        if self.ranked and most < n < self.num_tokens:
            raise CacheError(
                f"cannot roll back {n} of {self.num_tokens} tokens; under the policy mixed the latest {most} can be "
                "rolled back, or all"
            )

    @plain
    def crop(self, n: int) -> None:
        """Roll back the n latest tokens, see `check_crop`."""
        self.check_crop(n)
        everything = n == self.num_tokens
        if everything:
            self.high = self.high[:, :, :0]
            for side in self.sides:
                side.restart()
        super().crop(n)
        if everything:
            for side in self.sides:
                side.restart()

    @plain
    def select(self, rows: Tensor) -> None:
        """Keep the batch rows `rows` (int64, repeats allowed) in that order."""
        super().select(rows)
        self.high = self.high.index_select(0, rows.to(self.device))

    @plain
    def to(self, device: torch.device | str) -> None:
        """Move everything to `device`."""
        super().to(device)
        self.high = self.high.to(device)

    def footprint(self) -> Footprint:
        """Return the bytes held, without tables."""
        footprint = super().footprint()
        footprint.parts["selection"] += self.high.numel()
        return footprint


def _places(mask: Tensor) -> Tensor:
    """Return the indices int64 [B, H, n] of a mask [B, H, T] with n in every head, ascending."""
    B, H, _ = mask.shape
    return mask.nonzero()[:, 2].view(B, H, -1)


def _bytes(mask: Tensor) -> Tensor:
    """Return bool [B, H, T], T a multiple of 8, as bits: uint8 [B, H, T / 8]."""
    weights = (1 << torch.arange(BITS, device=mask.device)).to(torch.uint8)
    return (mask.unflatten(2, (-1, BITS)) * weights).sum(-1, dtype=torch.uint8)
