"""Tiers and exact tokens filled without tokens, on the device meta, so that a store can count its bytes."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tersekv.cache.exact_tokens import ExactTokens
from tersekv.cache.pages import blank
from tersekv.cache.tier import Tier


class Stream(NamedTuple):
    """Tokens of a stream that a layer receives and must keep.

    tokens: number received, of which `left` had left the recent window after the prompt, and `late` more after it.
    budget: number that may stay.
    fullest: count the most slots that any stream of more tokens than the budget leaves.
    """

    tokens: int
    left: int
    budget: int
    late: int
    fullest: bool


def blank_tokens(like: list[Tensor], n: int) -> list[Tensor]:
    """Return tensors for n tokens."""
    return [x.new_empty((*x.shape[:2], n, x.shape[3])) for x in like]


def fill_slots(tier: Tier | None, loose: ExactTokens, added: list[int], exact: int, slots: int) -> None:
    """Let a tier hold tokens that are packed in calls of so many, whole blocks, and `exact` loose tokens.

    slots: number of slots of both.
    """
    for side in () if tier is None else tier.sides:
        layout, (rows, heads) = side.packed.layout, side.shape[:2]
        for tokens in filter(None, added):
            side.packed.append(blank(layout, rows, heads, tokens // layout.block_tokens, "meta"))
    loose.hold(blank_tokens(loose.buffers, exact))
    loose.slots.resize(slots)


def fill_ragged(tier: Tier, loose: ExactTokens, blocks: Tensor, exact: int) -> None:
    """Let each head hold its own number of blocks, int64 [H], and `exact` loose tokens.

    Heads are batch rows of the tier, repeated for each sequence.
    """
    rows = tier.slots.heads[0]
    count = blocks.repeat(rows // len(blocks)).unsqueeze(-1)
    packed = int(count.sum())
    for side in tier.sides if packed else ():
        layout = side.packed.layout
        side.packed.replace(0, blank(layout, 1, 1, packed * tier.block // layout.block_tokens, "meta"))
    tier.slots.counts = [count] if packed else []
    tier.slots.resize(packed * tier.block)
    loose.hold(blank_tokens(loose.buffers, exact))
    loose.slots.resize(exact)


def fill_chosen(tier: Tier, loose: ExactTokens, heads: list[int], late: int, sinks: int) -> None:
    """Let heads hold tokens of one rate.

    heads: tokens chosen of the prompt by each head, without sinks. late: generated tokens added one
    block at a time.
    """
    t = tier.block
    if tier.ragged:
        held = torch.tensor([n // t * t + n % t + late for n in heads])
        return fill_ragged(tier, loose, held // t, int((held % t).max()) + sinks)
    left = max(n % t for n in heads)
    added = [max(n // t for n in heads) * t, *[t] * ((left + late) // t)]
    exact = (left + late) % t + sinks
    return fill_slots(tier, loose, added, exact, sum(added) + exact)


def fill_most(tier: Tier, loose: ExactTokens, heads: list[int], ahead: int, demotes: bool, sinks: int) -> int:
    """Let heads hold the most slots that tokens of one rate can have. Return bytes of slack to add.

    heads: tokens of each head. ahead: tokens that may be added before it evicts. demotes: tokens move to another
    rate, a block at a time.
    """
    t = tier.block
    blocks = tier.most_blocks(torch.tensor(heads) + demotes * t) + 1
    blocks += math.ceil(ahead / t) + 1 if ahead else 0
    if tier.ragged:
        fill_ragged(tier, loose, blocks, 2 * t + sinks)
        return 0
    return fill_any(tier, loose, int(blocks) * t, t + sinks, (int(blocks) + 2) * t + sinks)


def fill_any(tier: Tier, loose: ExactTokens, tokens: int, more: int, slots: int) -> int:
    """Let heads hold at most so many tokens, and `more` exact ones. Return bytes of slack to add.

    Any number of them may fill no block, and a page may have only one block in use.
    """
    t, sizes = tier.block, tier.keys.packed.sizes
    packed = tokens // t * t
    fill_slots(tier, loose, [packed], min(tokens, t - 1) + more, slots)
    spare = sizes.next(t, packed) - t - sizes.slack(packed) if packed else 0
    layouts = [side.packed.layout for side in tier.sides]
    spare_bytes = sum(spare * layout.block_bytes() / layout.block_tokens for layout in layouts)
    return math.ceil(spare_bytes * tier.keys.shape[0])
