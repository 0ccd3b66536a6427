"""Encode tokens that leave a layer's recent window, before anything is changed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tersekv.cache import coding
from tersekv.cache.coding import Tokens
from tersekv.cache.lost_variance import LostVariance
from tersekv.cache.packed_side import Encoded
from tersekv.cache.pages import blank
from tersekv.cache.parallel import ContextParallel
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
    high: bool [B, H, leave], tokens with their head's higher rate if the store ranks them, else None.
    """

    which: range
    leave: int
    place: int
    hidden: Tensor | None
    processes: ContextParallel | None
    high: Tensor | None


def encoded_side(
    store: Store, side: int, old: Tensor, sinks: Tensor, x: Tensor, call: Packing, loss: TokenLoss | None
) -> list[tuple[Codec, Encoded]]:
    """Return the codec and the new blocks of each tier, for the keys (side 0) or the values (1).

    A codec that is fitted on the prompt is fitted before it packs for the first time, on all tokens
    available.

    old: tokens [B, H, n, D] of the window. sinks, x: new sinks, and other new tokens.
    loss: of errors in all tokens so far, by their position.

    Raises:
        UserError: a scale is too large for its dtype.
    """
    sides = [tier.sides[side] for tier in store.tiers]
    codecs = [packed.codec for packed in sides]
    if codecs[0].needs_fit == "prompt" and not x.is_meta:
        log.debug("fitting %s to a prompt of %d tokens", codecs[0].label, old.shape[2] + x.shape[2])
        waiting = torch.cat([old, x], dim=2) if old.shape[2] else x
        sinks = torch.cat([store.sinks.data[side], sinks], dim=2)
        codecs[0] = _fitted(store, side, codecs[0], sinks, waiting, call.place, loss)
        codecs[1:] = [codecs[0].at_rate(packed.bits) for packed in sides[1:]]
    log.debug("packing %d tokens with %s", call.leave, codecs[0].label)
    if call.high is not None:
        return list(zip(codecs, by_rate(store, side, codecs, joined(old, x), call), strict=True))
    processes = call.processes
    share = None if processes is None else lambda sums: sums.share(processes, x)
    parts = _consecutive(store, side, call.which, old, x, call)
    return [(codecs[0], sides[0].encoded(codecs[0], parts, store.heads, share))]


def by_rate(store: Store, side: int, codecs: Sequence[Codec], x: Tensor, call: Packing) -> list[Encoded]:
    """Return the new blocks of each tier, with room for as many in every head as the head with the most of them has.

    codecs: of the tiers. x: tokens [B, H, leave or more, D].
    """
    ranked, (B, H, _, D), n = store.ranked[0], x.shape, call.leave
    blocks = [count.amax(0).tolist() for count in ranked.blocks(n)]
    layouts = [codec.layout(D) for codec in codecs]
    per_block = [store.flush_tokens // layout.block_tokens for layout in layouts]
    device = "meta" if x.is_meta else x.device
    planes = [
        blank(layout, B, H, max(count) * per, device)
        for layout, count, per in zip(layouts, blocks, per_block, strict=True)
    ]
    lost = [tier.sides[side].lost for tier in store.tiers]
    most = coding.MOST_INPUT_ON_GPU if x.is_cuda else coding.MOST_INPUT
    assert call.high is not None
    for heads in () if x.is_meta else ranked.alike(n, max(1, most // (B * n * D))):
        own = x[:, heads, :n]
        before = _inputs(store, side, codecs[0].of_heads(heads.start, own.shape[1]), own, call.place)
        for tier, index in ranked.parts(call.high, heads):
            codec, packed = codecs[tier].of_heads(heads.start, own.shape[1]), store.tiers[tier].sides[side]
            taken, made = gathered(before, index), []
            for start, stop in coding.chunks(0, index.shape[2], store.flush_tokens, own):
                made.append(codec.encode(taken[:, :, start:stop]))
            parts = layouts[tier].join(made)
            for name, plane in parts.items():
                planes[tier][name][:, heads, : plane.shape[2]] = plane
            if packed.corrected:
                lost[tier] = _lost(store, tier, lost[tier], heads, codec, parts, own, taken, index, call)
    return [([new], variance) for new, variance in zip(planes, lost, strict=True)]


def _inputs(store: Store, side: int, codec: Codec, x: Tensor, place: int) -> Tensor:
    """Return what the codecs of all tiers encode for tokens x [B, h, n, D] from `place` on, float32."""
    parts = coding.chunks(0, x.shape[2], store.flush_tokens, x)
    tokens = (with_angles(store, side, x[:, :, start:stop], place + start) for start, stop in parts)
    return joined(*(coding.codec_input(codec, part) for part in tokens))


LOST_BLOCKS = 8
"""Blocks of each head and rate that its lost variance is measured on, spread over its tokens."""


def _lost(
    store: Store,
    tier: int,
    known: Tensor | None,
    heads: slice,
    codec: Codec,
    planes: PackedTensors,
    x: Tensor,
    taken: Tensor,
    index: Tensor,
    call: Packing,
) -> Tensor | None:
    """Return the lost variance of a tier's keys with that of some heads, which pack their first tokens in it now.

    planes, taken: their blocks, and the codec's input. x: all their tokens. index: places of those that are packed.
    """
    old = store.tiers[tier].blocks[0, heads] > 0
    if bool(old.all()):
        return known
    B, H, _, D = taken.shape
    layout = codec.layout(D)
    count = index.shape[2] // layout.block_tokens
    few = torch.linspace(0, count - 1, min(count, LOST_BLOCKS), device=x.device).long()
    some = (few[:, None] * layout.block_tokens + torch.arange(layout.block_tokens, device=x.device)).flatten()
    coded, places = layout.select_blocks(planes, few.expand(B, H, -1)), index[:, :, some]
    sums, shown = LostVariance(), _shown(call.place + places, call.hidden)
    if codec.pre_rope and store.rotary is not None:
        sums.add(gathered(x, places), coding.view(codec, coded, D, store.rotary.at(call.place + places)), shown)
    else:  # without the rotated mean, which is not coded
        sums.add(taken[:, :, some], codec.view(coded, D), shown)
    found = sums.value()
    assert found is not None
    users = store.tiers[tier].keys.users
    first = users.index(heads.start)
    made = x.new_zeros((B, len(users), D), dtype=torch.float32) if known is None else known.clone()
    these = slice(first, first + H)
    made[:, these] = torch.where(old.to(x.device)[:, None], made[:, these], found)
    return made


def _consecutive(
    store: Store, side: int, which: range, old: Tensor, x: Tensor, call: Packing
) -> Iterator[tuple[Tokens, Tensor | None]]:
    """Yield tokens of old and x in parts, and which of them count, see `PackedSide.encoded`."""
    n, place = old.shape[2], call.place
    for start, stop in coding.chunks(which.start, which.stop, store.flush_tokens, x):
        new = x[:, :, max(0, start - n) : max(0, stop - n)]
        part = joined(old[:, :, start : min(stop, n)], new) if start < n else new
        yield with_angles(store, side, part, place + start), _shown(range(place + start, place + stop), call.hidden)


def _fitted(
    store: Store, side: int, codec: Codec, sinks: Tensor, x: Tensor, place: int, loss: TokenLoss | None
) -> Codec:
    """Return the codec fitted on the prompt. x: the tokens from `place` on."""
    stretches: Iterable[tuple[int, int]] = coding.fit_stretches(x.shape[2])
    if loss is None and codec.observes:
        log.debug("no queries were observed: all tokens of the prompt have the same weight in the fit")
    elif loss is not None:  # few tokens may have most of the weight: none is left out
        loss, stretches = loss.tokens(place), coding.chunks(0, x.shape[2], 1, x)
    rotary = None if side else store.rotary
    if loss is None and rotary is not None and not rotary.rope.varies and rotary.padding is None:
        stretches = list(stretches)
        places = torch.cat([torch.arange(place + start, place + stop) for start, stop in stretches])
        kept = torch.cat([x[:, :, start:stop] for start, stop in stretches], dim=2)
        parts = [Tokens(kept, rotary.at(places.to(x.device)))]
    else:
        parts = [with_angles(store, side, x[:, :, start:stop], place + start) for start, stop in stretches]
    return coding.fitted(codec, parts, with_angles(store, side, sinks, 0, own_sinks=True), store.heads, loss)


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
