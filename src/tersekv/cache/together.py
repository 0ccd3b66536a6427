"""Encode tokens of several layers in one call, before the layers pack them.

A layer often has so few tokens that the calls for them take longer than their work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tersekv.cache.layer import LayerStore
from tersekv.cache.packed_side import Ahead, PackedSide
from tersekv.cache.packing import Packing, codecs_of_tiers, encoded_sides, inputs, most_together
from tersekv.cache.ranked_tokens import tier_bits
from tersekv.cache.segments import Observed
from tersekv.codecs import Codec
from tersekv.errors import UserError
from tersekv.kernels import backends
from tersekv.tensors import plain
from tersekv.transforms.moments import TokenLoss

if TYPE_CHECKING:
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
    alone = store.chosen or store.own or store.heads or store.padding is not None
    if alone or (store.rotary is not None and (store.rotary.rope.varies or store.rotary.padding is not None)):
        return None
    if not placement.move(call.keys.shape[2]).leave:
        return None
    if store.deferred and call.padding is not None and bool((call.padding > 0).any()):
        return None
    kinds: list[Any] = []
    rated, ranked = _rated(store), len(store.ranked)
    for side, x, loss in zip(store.sides, call[:2], losses, strict=True):
        codec, layout = side.codec, side.packed.layout
        spans = codec.fit_spans_heads or codec.encode_spans_heads or layout.starts is not None
        unknown = codec.needs_fit == "corpus" or (codec.needs_fit is not None and store.sinks.tokens > 0)
        measures = side.corrected > 0 and side.lost is None and not ranked
        if spans or unknown or measures or x.is_meta or not codec.joins:
            return None
        shapes = {name: (len(t), *t.shape[2:]) for name, t in codec.fitted.items()}
        kinds += (codec.for_all_rates(), None) if rated else (codec, layout)
        kinds += shapes, x.shape, x.dtype, loss is None, loss is not None and loss.metric is None
    policy = placement.policy.with_shares(0.5, 1.0) if rated else placement.policy
    rope = None if store.rotary is None else id(store.rotary.rope)
    placed = placement.live_state(), policy, placement.window, placement.block
    return *kinds, rated, ranked, rope, placed, store.recent.buffers[0].dtype, store.device


@plain
def encode_calls(stores: Sequence[LayerStore], calls: Sequence[Call]) -> Sequence[Call]:
    """Encode calls of several layers, which are of one kind, together. `encoded_sides` uses what was encoded.

    Return the calls with their tokens rounded to the dtype of exact ones. If there is an error, nothing is encoded or
    rounded: the layer says why, when it packs them.
    """
    H, placement, dtype = calls[0].keys.shape[1], stores[0].placement, stores[0].recent.buffers[0].dtype
    sides = [call.keys for call in calls], [call.values for call in calls]
    new = [torch.cat([x.detach() for x in side], dim=1).to(dtype) for side in sides]
    if not all(backends.all_finite(x) for x in new):
        return calls
    old = [torch.cat([of.recent.data[i] for of in stores], dim=1) for i in range(2)]
    move, place = placement.move(new[0].shape[2]), placement.tokens - placement.tail
    sinks, rest = [x[:, :, : move.sinks] for x in new], [x[:, :, move.sinks :] for x in new]
    losses = [_loss_of_all(of) for of in zip(*(call.observed.losses or (None, None) for call in calls), strict=True)]
    importance = [call.observed.importance for call in calls if call.observed.importance is not None]
    observed = Observed(importance=torch.cat(importance, dim=1) if len(importance) == len(calls) else None)
    try:
        joint, numbers = _joint_store(stores, new)
        highs = [of.choose(observed, move.leave, place, move.sinks, None) for of in joint.ranked]
        parts = joint.ranked[0].by_tier(highs[0]) if highs else None
        packing = Packing(range(move.skip, move.leave), move.leave, place + move.sinks, None, None, parts)
        encoded = encoded_sides(joint, old, sinks, rest, packing, losses)
    except UserError:
        return calls
    done = []
    for layer, (of, call) in enumerate(zip(stores, calls, strict=True)):
        heads = slice(layer * H, (layer + 1) * H)
        for i, made in enumerate(encoded):
            codecs = [tier.sides[i].codec for tier in of.tiers]
            if made[0][0] is not joint.sides[i].codec:
                codecs = codecs_of_tiers(of, i, _copied(made[0][0].of_heads(heads.start, H)))
            used = [made[number][0].of_heads(heads.start, H) for number in numbers[layer]]
            if not all(map(_same_fit, codecs, used)):  # bits that were shared out over layers, or read from a file
                continue
            for tier, codec, number in zip(of.tiers, codecs, numbers[layer], strict=True):
                own, (_, (planes, lost)) = tier.sides[i], made[number]
                planes = [codec.layout(own.head_dim).select_heads(part, heads.start, H) for part in planes]
                if parts is not None:
                    blocks = max(parts[number].counts[heads]) // own.packed.layout.block_tokens
                    planes = [{name: plane[:, :, :blocks] for name, plane in part.items()} for part in planes]
                    lost = lost if blocks else None
                if lost is not None:
                    users = joint.tiers[number].sides[i].users
                    lost = lost[:, [users.index(heads.start + head) for head in own.users]]
                lost = own.lost if lost is None else lost
                own.ahead = Ahead(own.codec, packing.place, None, codec, planes, lost)
        done.append(call._replace(keys=new[0][:, heads], values=new[1][:, heads]))
    return done


def _joint_store(stores: Sequence[LayerStore], like: Sequence[Tensor]) -> tuple[LayerStore, list[list[int]]]:
    """Return a store of the heads of all layers, which holds no tokens, and the numbers of each layer's tiers in it.

    like: keys and values [B, H of all layers, n, D].
    """
    first, plan = stores[0], stores[0].plan
    codecs = [[of.sides[i].codec for of in stores] for i in range(2)]
    numbers = [list(range(len(of.tiers))) for of in stores]
    if _rated(first):
        rates = [of.plan.rates for of in stores if of.plan.rates is not None]
        bits = tier_bits(torch.cat(rates))
        numbers = [[bits.index(own) for own in tier_bits(of)] for of in rates]
        codecs = [[codec.at_rate(bits[0]) for codec in of] for of in codecs]
        plan = plan._replace(rates=torch.cat(rates))
    keys, values = (type(of[0]).joined(of) for of in codecs)
    rope = None if first.rotary is None else first.rotary.rope
    empty = [x[:, :, :0] for x in like]
    joint = LayerStore(plan._replace(keys=keys, values=values), empty[0], empty[1], first.window, rope)
    for number, tier in enumerate(joint.tiers):
        owns = [
            of.tiers[known.index(number)] if number in known else None
            for of, known in zip(stores, numbers, strict=True)
        ]
        for i, side in enumerate(tier.sides):
            side.lost = _lost_of_all([own.sides[i] for own in owns if own is not None])
        if tier.ragged:
            none = torch.zeros(first.shape[:2], dtype=torch.int64)
            tier.slots.counts = [torch.cat([none if own is None else own.blocks for own in owns], dim=1)]
    return joint, numbers


def _lost_of_all(sides: Sequence[PackedSide]) -> Tensor | None:
    """Return the lost variance of several layers, 0 where none is known, or None if none is."""
    like = next((side.lost for side in sides if side.lost is not None), None)
    if like is None:
        return None
    shapes = [(len(like), len(side.users), like.shape[2]) for side in sides]
    each = zip(sides, shapes, strict=True)
    return torch.cat([like.new_zeros(shape) if side.lost is None else side.lost for side, shape in each], dim=1)


def _rated(store: LayerStore) -> bool:
    """True if each head has rates of its own."""
    return bool(store.ranked) and store.plan.rates is not None


def _same_fit(codec: Codec, other: Codec) -> bool:
    """True if both have the same fitted tensors."""
    return all(torch.equal(t, other.fitted[name]) for name, t in codec.fitted.items())


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
                ahead = Ahead(side.codec, place, x.clone(), side.codec, [], side.lost)
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
