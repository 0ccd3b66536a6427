"""Encode tokens that leave a layer's recent window, before anything is changed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tersekv.cache import coding
from tersekv.cache.coding import Tokens
from tersekv.cache.lost_variance import LostVariance
from tersekv.cache.packed_side import Encoded
from tersekv.cache.pages import blank
from tersekv.cache.parallel import ContextParallel
from tersekv.cache.ranked_tokens import OfTier
from tersekv.cache.slots import in_turn
from tersekv.codecs import Codec
from tersekv.layouts.base import PackedTensors
from tersekv.tensors import gathered, joined
from tersekv.transforms.moments import TokenLoss

if TYPE_CHECKING:
    from tersekv.cache.store import Store

log = logging.getLogger(__name__)


class Packing(NamedTuple):
    """A call that packs tokens.

    which: the tokens that are packed here, of those that leave the window.
    leave: number of tokens that leave the window, from it and then the new ones, in whole blocks.
    place: position in the cache of the first of them.
    hidden: int64 [B], tokens at smaller positions are padding or sinks of a row, or None.
    processes: those that pack the other tokens that leave, or None.
    tiers: the tokens of each tier if the store ranks them, else None.
    """

    which: range
    leave: int
    place: int
    hidden: Tensor | None
    processes: ContextParallel | None
    tiers: list[OfTier] | None


def encoded_sides(
    store: Store,
    old: Sequence[Tensor],
    sinks: Sequence[Tensor],
    new: Sequence[Tensor],
    call: Packing,
    losses: Sequence[TokenLoss | None],
) -> list[list[tuple[Codec, Encoded]]]:
    """Return the codec and the new blocks of each tier, for the keys and for the values.

    Codecs that are fitted on the prompt are fitted before they pack for the first time, on all tokens
    available.

    old: tokens [B, H, n, D] of the window. sinks, new: new sinks, and other new tokens.
    losses: of errors in all tokens so far, by their position.

    Raises:
        UserError: a scale is too large for its dtype.
    """
    ahead = [_ahead(store, i, old[i], new[i], call) for i in range(len(store.sides))]
    made = [side.codec for side in store.sides]
    unfitted = [
        i for i, codec in enumerate(made) if codec.needs_fit == "prompt" and not new[i].is_meta and not ahead[i]
    ]
    to_fit = [_to_fit(store, i, old[i], sinks[i], new[i], call, losses[i]) for i in unfitted]
    for i, codec in zip(unfitted, coding.fitted_sides(to_fit, store.heads), strict=True):
        made[i] = codec
    return [of or encoded_side(store, i, made[i], old[i], new[i], call) for i, of in enumerate(ahead)]


def _ahead(store: Store, side: int, old: Tensor, x: Tensor, call: Packing) -> list[tuple[Codec, Encoded]] | None:
    """Return what was encoded before for this call, and forget it."""
    made = []
    for packed in (tier.sides[side] for tier in store.tiers):
        ahead, packed.ahead = packed.ahead, None
        if ahead is not None and ahead.is_of(packed.codec, call.place, old, x, call.leave):
            made.append((ahead.codec, (ahead.planes, ahead.lost)))
    return made if len(made) == len(store.tiers) else None


def codecs_of_tiers(store: Store, side: int, codec: Codec) -> list[Codec]:
    """Return the codec of each tier of a side. codec: of the first one, perhaps newly fitted."""
    sides = [tier.sides[side] for tier in store.tiers]
    if codec is sides[0].codec or len(sides) == 1:
        return [codec, *(packed.codec for packed in sides[1:])]
    codec = codec.at_rate(sides[0].codec.bits)  # type: ignore[attr-defined]  # codecs with several rates have bits
    return [codec, *(codec.at_rate(packed.bits) for packed in sides[1:])]


def encoded_side(
    store: Store, side: int, codec: Codec, old: Tensor, x: Tensor, call: Packing
) -> list[tuple[Codec, Encoded]]:
    """Return the codec and the new blocks of each tier of a side (0: keys, 1: values).

    codec: of the side, perhaps newly fitted.
    """
    sides, codecs = [tier.sides[side] for tier in store.tiers], codecs_of_tiers(store, side, codec)
    log.debug("packing %d tokens with %s", call.leave, codecs[0].label)
    if call.tiers is not None:
        return list(zip(codecs, by_rate(store, side, codecs, joined(old, x), call, call.tiers), strict=True))
    processes = call.processes
    share = None if processes is None else lambda sums: sums.share(processes, x)
    parts = _consecutive(store, side, call.which, old, x, call)
    return [(codecs[0], sides[0].encoded(codecs[0], parts, store.heads, share))]


class Piece(NamedTuple):
    """Tokens `start` to `stop` of some heads of a tier, in the order of their positions, that are encoded at a time."""

    tier: int
    heads: slice
    start: int
    stop: int


def by_rate(
    store: Store, side: int, codecs: Sequence[Codec], x: Tensor, call: Packing, tiers: Sequence[OfTier]
) -> list[Encoded]:
    """Return the new blocks of each tier, with room for as many in every head as the head with the most of them has.

    codecs: of the tiers. x: tokens [B, H, leave or more, D].
    """
    (B, H, _, D), n = x.shape, call.leave
    counts = [of.counts for of in tiers]
    layouts = [codec.layout(D) for codec in codecs]
    device = "meta" if x.is_meta else x.device
    planes = [
        blank(layout, B, H, max(count) // layout.block_tokens, device)
        for layout, count in zip(layouts, counts, strict=True)
    ]
    lost = [tier.sides[side].lost for tier in store.tiers]
    if x.is_meta:
        return [([new], variance) for new, variance in zip(planes, lost, strict=True)]
    most = coding.MOST_INPUT_ON_GPU if x.is_cuda else coding.MOST_INPUT
    step = max(1, most // (B * n * D))
    for first in range(0, H, step):
        heads = slice(first, min(first + step, H))
        of = codecs if step >= H else [codec.of_heads(first, heads.stop - first) for codec in codecs]
        own = x[:, heads, :n]
        before = inputs(store, side, of[0], own, call.place)
        for some in _together(store, own, counts, heads):
            parts = []
            for tier, which, start, stop in some:
                inner = before[:, which.start - first : which.stop - first]
                parts.append((codecs[tier], which, gathered(inner, tiers[tier].tokens[:, which, start:stop])))
            for piece, made in zip(some, type(codecs[0]).encode_all(parts), strict=True):
                at = piece.start // layouts[piece.tier].block_tokens
                for name, plane in made.items():
                    planes[piece.tier][name][:, piece.heads, at : at + plane.shape[2]] = plane
        for tier, of_tier in enumerate(store.tiers):
            if of_tier.sides[side].corrected:
                blocks = {name: plane[:, heads] for name, plane in planes[tier].items()}
                new = OfHeads(of[tier], blocks, tiers[tier].tokens[:, heads], counts[tier][heads])
                lost[tier] = _lost(store, tier, heads, lost[tier], new, (own, before), call)
    return [([new], variance) for new, variance in zip(planes, lost, strict=True)]


def inputs(store: Store, side: int, codec: Codec, x: Tensor, place: int) -> Tensor:
    """Return what the codecs of all tiers encode for tokens x [B, h, n, D] from `place` on, float32."""
    parts = coding.chunks(0, x.shape[2], store.flush_tokens, x)
    tokens = (with_angles(store, side, x[:, :, start:stop], place + start) for start, stop in parts)
    return joined(*(coding.codec_input(codec, part) for part in tokens))


def _together(store: Store, x: Tensor, counts: Sequence[Sequence[int]], heads: slice) -> Iterator[list[Piece]]:
    """Yield pieces of all tiers that are encoded together.

    Few tokens are encoded in one call, because each call takes longer than their search. x: tokens of these heads.
    counts: tokens of all heads in each tier.
    """
    (B, _, _, D), most = x.shape, most_together(x)
    some: list[Piece] = []
    elements = 0
    for which in store.ranked[0].alike(counts, heads):
        for tier, count in enumerate(counts):
            own = x[:, : which.stop - which.start]
            for start, stop in coding.chunks(0, count[which.start], store.flush_tokens, own):
                size = B * (which.stop - which.start) * (stop - start) * D
                if some and elements + size > most:
                    yield some
                    some, elements = [], 0
                some.append(Piece(tier, which, start, stop))
                elements += size
    if some:
        yield some


def most_together(x: Tensor) -> int:
    return coding.TOGETHER_ON_GPU if x.is_cuda else coding.TOGETHER


LOST_BLOCKS = 8
"""Blocks of each head and rate that its lost variance is measured on, spread over its tokens."""


class OfHeads(NamedTuple):
    """Tokens that a tier packs of some heads: the codec, new blocks, and which they are, see `OfTier`."""

    codec: Codec
    planes: PackedTensors
    tokens: Tensor
    counts: list[int]


def _lost(
    store: Store,
    tier: int,
    heads: slice,
    known: Tensor | None,
    packed: OfHeads,
    tokens: tuple[Tensor, Tensor],
    call: Packing,
) -> Tensor | None:
    """Return the lost variance of a tier's keys with that of the heads that pack their first tokens in it now.

    known: that of all heads so far. tokens: all tokens of `heads`, and the codec's input.
    """
    codec, planes, places, count = packed
    earlier = store.tiers[tier].blocks[0, heads].tolist()
    new = [h for h, n in enumerate(count) if n and not earlier[h]]
    if not new:
        return known
    if len(new) < len(count):
        codec = type(codec).joined([codec.of_heads(h, 1) for h in new])
        planes, places = {name: plane[:, new] for name, plane in planes.items()}, places[:, new]
    x, before = (of if len(new) == len(count) else of[:, new] for of in tokens)
    B, D = before.shape[0], before.shape[3]
    layout = codec.layout(D)
    unit, chosen, used = layout.block_tokens, [], []
    for blocks in (count[h] // unit for h in new):
        last = min(blocks, LOST_BLOCKS) - 1
        chosen.append([min(i, last) * (blocks - 1) // max(last, 1) for i in range(LOST_BLOCKS)])
        used.append([i <= last for i in range(LOST_BLOCKS)])
    few = torch.tensor(chosen).to(x.device)
    measured = (few[..., None] * unit + torch.arange(unit, device=x.device)).flatten(1)
    counts = torch.tensor(used).repeat_interleave(unit, 1).to(x.device)
    coded = layout.select_blocks(planes, few.expand(B, -1, -1))
    index = places.gather(2, measured.expand(B, -1, -1))
    shown = _shown(call.place + index, call.hidden)
    sums, counts = LostVariance(), counts.expand(B, -1, -1) if shown is None else counts & shown
    if codec.pre_rope and store.rotary is not None:
        sums.add(gathered(x, index), coding.view(codec, coded, D, store.rotary.at(call.place + index)), counts)
    else:  # without the rotated mean, which is not coded
        sums.add(gathered(before, index), codec.view(coded, D), counts)
    found = sums.value()
    assert found is not None
    users = store.tiers[tier].keys.users
    made = x.new_zeros((B, len(users), D), dtype=torch.float32) if known is None else known.clone()
    made[:, [users.index(heads.start + h) for h in new]] = found
    return made


def _consecutive(
    store: Store, side: int, which: range, old: Tensor, x: Tensor, call: Packing
) -> Iterator[tuple[Tokens, Tensor | None]]:
    """Yield tokens of old and x in parts, and which of them count, see `PackedSide.encoded`."""
    n, place = old.shape[2], call.place
    for start, stop in coding.chunks(which.start, which.stop, store.flush_tokens, x[:, : store.kv_heads]):
        new = x[:, :, max(0, start - n) : max(0, stop - n)]
        part = joined(old[:, :, start : min(stop, n)], new) if start < n else new
        yield with_angles(store, side, part, place + start), _shown(range(place + start, place + stop), call.hidden)


def _to_fit(
    store: Store, side: int, old: Tensor, sinks: Tensor, x: Tensor, call: Packing, loss: TokenLoss | None
) -> coding.ToFit:
    """Return the codec of a side with the tokens of the prompt that it is fitted on, see `encoded_sides`."""
    codec = store.sides[side].codec
    log.debug("fitting %s to a prompt of %d tokens", codec.label, old.shape[2] + x.shape[2])
    x = torch.cat([old, x], dim=2) if old.shape[2] else x
    held = store.sinks.data[side]
    sinks = joined(held, sinks) if held.shape[2] else sinks
    place, stretches = call.place, coding.fit_stretches(x.shape[2])
    if loss is None and codec.observes:
        log.debug("no queries were observed: all tokens of the prompt have the same weight in the fit")
    elif loss is not None:  # few tokens may have most of the weight: none is left out
        loss, stretches = loss.tokens(place), list(coding.chunks(0, x.shape[2], 1, x[:, : store.kv_heads]))
    rotary = None if side else store.rotary
    if call.hidden is not None:
        at = torch.arange(place, place + x.shape[2], device=x.device)
        shown = in_turn(at >= call.hidden.to(x.device)[:, None, None]).expand(x.shape[:3])
        loss = loss and loss._replace(weights=loss.weights.gather(2, shown))
        each = (shown[:, :, start:stop] for start, stop in stretches)
        parts = [Tokens(gathered(x, own), None if rotary is None else rotary.at(place + own[:, :1])) for own in each]
    elif (
        loss is None and len(stretches) > 1 and rotary is not None and not rotary.rope.varies and rotary.padding is None
    ):
        places = torch.cat([torch.arange(place + start, place + stop) for start, stop in stretches])
        kept = torch.cat([x[:, :, start:stop] for start, stop in stretches], dim=2)
        parts = [Tokens(kept, rotary.at(places.to(x.device)))]
    else:
        parts = [with_angles(store, side, x[:, :, start:stop], place + start) for start, stop in stretches]
    return coding.ToFit(codec, parts, with_angles(store, side, sinks, 0, own_sinks=True), loss)


def with_angles(store: Store, side: int, x: Tensor, place: int, own_sinks: bool = False) -> Tokens:
    """Return tokens from `place` on with their RoPE angles.

    own_sinks: x holds each row's own first tokens, after its padding.
    """
    if side or store.rotary is None or not x.shape[2]:
        return Tokens(x)
    return Tokens(x, store.rotary.angles(place, x.shape[2], x.device, own_sinks))


def _shown(positions: Tensor | range, hidden: Tensor | None) -> Tensor | None:
    """Return which tokens at these positions, consecutive or int [B, H, n], are not hidden; None for all."""
    if hidden is None:
        return None
    if isinstance(positions, range):
        positions = torch.arange(positions.start, positions.stop, device=hidden.device)
    return positions >= hidden[:, None, None]
