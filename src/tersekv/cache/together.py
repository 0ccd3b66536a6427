"""Encode tokens of several layers in one call, before the layers pack them.

A layer often has so few tokens that the calls for them take longer than their work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tersekv.cache.packed_side import Ahead, PackedSide
from tersekv.cache.packing import Packing, encoded_side, fitted_codecs, inputs, most_together
from tersekv.cache.segments import Observed
from tersekv.codecs import Codec
from tersekv.errors import UserError
from tersekv.kernels import backends
from tersekv.tensors import plain
from tersekv.transforms.moments import TokenLoss

if TYPE_CHECKING:
    from tersekv.cache.layer import LayerStore
    from tersekv.cache.store import Store


class Call(NamedTuple):
    """Arguments of a call of `LayerStore.append` with several tokens."""

    keys: Tensor
    values: Tensor
    padding: Tensor | None
    observed: Observed


def kind_of(store: LayerStore, call: Call) -> Any:
    """Return what layers have in common that pack a call together; None if this one packs alone, or packs nothing."""
    placement, losses = store.placement, call.observed.losses or (None, None)
    alone = store.chosen or store.ranked or store.own or store.heads or store.padding is not None
    if alone or (store.rotary is not None and (store.rotary.rope.varies or store.rotary.padding is not None)):
        return None
    if not placement.move(call.keys.shape[2]).leave:
        return None
    if store.deferred and call.padding is not None and bool((call.padding > 0).any()):
        return None
    kinds: list[Any] = []
    for side, x, loss in zip(store.sides, call[:2], losses, strict=True):
        codec, layout = side.codec, side.packed.layout
        spans = codec.fit_spans_heads or codec.encode_spans_heads or layout.starts is not None
        unknown = codec.needs_fit == "corpus" or (codec.needs_fit is not None and store.sinks.tokens > 0)
        measures = side.corrected > 0 and side.lost is None
        if spans or unknown or measures or x.is_meta or not codec.joins:
            return None
        shapes = {name: (len(t), *t.shape[2:]) for name, t in codec.fitted.items()}
        kinds += codec, layout, shapes, x.shape, x.dtype, loss is None, loss is not None and loss.metric is None
    rope = None if store.rotary is None else id(store.rotary.rope)
    placed = placement.live_state(), placement.policy, placement.window, placement.block
    return *kinds, rope, placed, store.recent.buffers[0].dtype, store.device


@plain
def encode_calls(stores: Sequence[LayerStore], calls: Sequence[Call]) -> Sequence[Call]:
    """Encode calls of several layers, which are of one kind, together. `encoded_sides` uses what was encoded.

    Return the calls with their tokens rounded to the dtype of exact ones. If there is an error, nothing is encoded or
    rounded: the layer says why, when it packs them.
    """
    store, H = stores[0], calls[0].keys.shape[1]
    placement, dtype = store.placement, store.recent.buffers[0].dtype
    sides = [call.keys for call in calls], [call.values for call in calls]
    new = [torch.cat([x.detach() for x in side], dim=1).to(dtype) for side in sides]
    if not all(backends.all_finite(x) for x in new):
        return calls
    old = [torch.cat([of.recent.data[i] for of in stores], dim=1) for i in range(2)]
    move, place = placement.move(new[0].shape[2]), placement.tokens - placement.tail
    packing = Packing(range(move.skip, move.leave), move.leave, place + move.sinks, None, None, None)
    sinks, rest = [x[:, :, : move.sinks] for x in new], [x[:, :, move.sinks :] for x in new]
    losses = [_loss_of_all(of) for of in zip(*(call.observed.losses or (None, None) for call in calls), strict=True)]
    asked = [[of.sides[i].codec for of in stores] for i in range(2)]
    try:
        joint = [type(of[0]).joined(of) for of in asked]
        codecs = fitted_codecs(store, joint, old, sinks, rest, packing, losses)
        made = [encoded_side(store, i, codec, old[i], rest[i], packing)[0][1][0] for i, codec in enumerate(codecs)]
    except UserError:
        return calls
    done = []
    for number, (of, call) in enumerate(zip(stores, calls, strict=True)):
        heads = slice(number * H, (number + 1) * H)
        for i, codec in enumerate(codecs):
            own = of.sides[i].codec
            planes = [codec.layout(new[i].shape[3]).select_heads(part, heads.start, H) for part in made[i]]
            fitted = own if codec is joint[i] else _copied(codec.of_heads(heads.start, H))
            of.sides[i].ahead = Ahead(own, packing.place, None, fitted, planes)
        done.append(call._replace(keys=new[0][:, heads], values=new[1][:, heads]))
    return done


def _copied(codec: Codec) -> Codec:
    """Return the codec with tensors of its own."""
    return replace(codec, fitted={name: t.clone() for name, t in codec.fitted.items()})


def _loss_of_all(losses: Sequence[TokenLoss | None]) -> TokenLoss | None:
    """Return the loss of errors in the tokens of all layers, head after head."""
    given = [loss for loss in losses if loss is not None]
    if not given:
        return None
    metrics = [loss.metric for loss in given if loss.metric is not None]
    return TokenLoss(torch.cat([loss.weights for loss in given], 1), torch.cat(metrics, 1) if metrics else None)


@plain
def encode_ahead(stores: Sequence[Store | None]) -> None:
    """Encode the blocks that leave the windows of several layers when each receives one more token.

    `encoded_sides` uses what was encoded if the layer then packs these tokens with this codec.
    """
    alike: dict[Any, list[tuple[PackedSide, Ahead, Tensor]]] = {}
    for store in filter(None, stores):
        leave, place = store.leaves(), store.num_tokens - store.placement.tail
        for number, side in enumerate(store.sides if leave else ()):
            x = store.recent.data[number][:, :, :leave]
            if not x.is_meta and 2 * x.numel() <= most_together(x):
                before = inputs(store, number, side.codec, x, place)
                ahead = Ahead(side.codec, place, x.clone(), side.codec, [])
                alike.setdefault((side.codec, x.device, x.shape), []).append((side, ahead, before))
    for (codec, _, shape), parts in alike.items():
        step = most_together(parts[0][2]) // shape.numel()
        for some in (parts[first : first + step] for first in range(0, len(parts), step)):
            try:
                made = codec.encode_all([(side.codec, slice(0, shape[1]), x) for side, _, x in some])
            except UserError:  # the layer says why, when it packs them
                continue
            for (side, ahead, _), planes in zip(some, made, strict=True):
                side.ahead = ahead._replace(planes=[planes])
