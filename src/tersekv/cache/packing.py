"""Encode tokens that leave a layer's recent window, before anything is changed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tersekv.cache import coding
from tersekv.cache.coding import Tokens
from tersekv.cache.packed_side import Encoded
from tersekv.cache.parallel import ContextParallel
from tersekv.codecs import Codec
from tersekv.tensors import joined
from tersekv.transforms.moments import TokenLoss

if TYPE_CHECKING:
    from tersekv.cache.store import Store

log = logging.getLogger(__name__)


class Packing(NamedTuple):
    """A call that packs tokens.

    which: the tokens that each tier packs, of those that leave the window; int64 [B, H, n],
        ascending, if heads differ.
    leave: number of tokens that leave the window, from it and then the new ones, in whole blocks.
    place: position in the cache of the first of them.
    hidden: int64 [B], tokens at smaller positions are padding or sinks of a row, or None.
    processes: those that pack the other tokens that leave, or None.
    """

    which: Sequence[range | Tensor]
    leave: int
    place: int
    hidden: Tensor | None
    processes: ContextParallel | None


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
    rotary = None if side else store.rotary
    if codecs[0].needs_fit == "prompt" and not x.is_meta:
        log.debug("fitting %s to a prompt of %d tokens", codecs[0].label, old.shape[2] + x.shape[2])
        waiting = torch.cat([old, x], dim=2) if old.shape[2] else x
        sinks = torch.cat([store.sinks.data[side], sinks], dim=2)
        codecs[0] = _fitted(store, side, codecs[0], sinks, waiting, call.place, loss)
        codecs[1:] = [codecs[0].at_rate(packed.bits) for packed in sides[1:]]
    log.debug("packing %d tokens with %s", call.leave, codecs[0].label)
    processes = call.processes
    share = None if processes is None else lambda sums: sums.share(processes, x)
    encoded = []
    for packed, codec, which in zip(sides, codecs, call.which, strict=True):
        if isinstance(which, range):
            parts = _consecutive(store, side, which, old, x, call)
        else:
            shown = _shown(call.place + which, call.hidden)
            angles = None if rotary is None else lambda index: rotary.at(call.place + index)
            parts = coding.by_head(torch.cat([old, x], dim=2), which, store.flush_tokens, angles, shown)
        encoded.append((codec, packed.encoded(codec, parts, store.heads, share)))
    return encoded


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
