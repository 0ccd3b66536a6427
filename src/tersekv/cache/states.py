"""What the states of stores may say: each value by itself, and what values must have in common.

A file may claim anything, so both are checked before a store is read: values by the dictionaries here
(`Stateful.STATE`) before they are used, then what they add up to by the functions (`Stateful.RULES`).
"""

from __future__ import annotations

import itertools
import operator
from typing import TYPE_CHECKING, Any

import torch

from tersekv.cache.clusters import Clusters
from tersekv.cache.reservoir import Reservoir
from tersekv.cache.schema import (
    MOST,
    Check,
    each,
    flag,
    of_spec,
    one_of,
    optional,
    positions,
    record,
    require,
    tensor,
    whole,
)
from tersekv.tensors import TensorSpec

if TYPE_CHECKING:
    from tersekv.cache.kept import KeptStore
    from tersekv.cache.layer import LayerStore
    from tersekv.cache.pool import Pool
    from tersekv.cache.pool_side import PoolSide
    from tersekv.cache.rotary import Rotary
    from tersekv.cache.selective import SelectiveStore
    from tersekv.cache.side import SideStore
    from tersekv.cache.sketch import SketchStore


def _rows(store: Any) -> Check:
    """A number ≥ 0 for each row of the batch."""
    return tensor(torch.int64, store.batch_size, low=0, high=MOST)


def _heads(store: Any, dtype: torch.dtype) -> Check:
    """A number ≥ 0 for each head and each of some tokens."""
    return tensor(dtype, store.batch_size, store.kv_heads, None, low=0)


# ---------------------------------------------------------------- layers that keep all tokens

LAYER = {
    "padding": lambda store: optional(_rows(store)),
    "waits": lambda store: flag,
    "record_past": lambda store: flag,
    "seen": lambda store: whole(),
    "dropped": lambda store: one_of(0) if store.window is None else whole(),
}


def layer_tokens(store: LayerStore, place: str) -> None:
    """What a layer holds adds up to the tokens that it has seen."""
    counts = {(side.sinks.shape[2], side.packed.tokens, side.tail.tokens) for side in store.sides}
    require(len(counts) == 1, place, f"holds other tokens of keys than of values {sorted(counts)}")
    sinks, packed, tail = counts.pop()
    held = sinks + store.dropped + packed + tail
    require(held == store.seen, place, f"holds {held} tokens of {store.seen} that it has seen")
    require(store.dropped % store.flush_tokens == 0, f"{place}.dropped", f"is no multiple of {store.flush_tokens}")
    left = 0 if store.window is None else max(0, store.seen - store.window + 1)
    require(store.dropped <= left, f"{place}.dropped", f"is {store.dropped}, and must be at most {left}")
    wanted = 0 if store.waits else min(store.policy.sink_tokens(store.window), store.seen)
    require(sinks == wanted, f"{place}.sides.0.sinks", f"has {sinks} tokens, and must have {wanted}")
    require(not store.waits or held == tail, place, "waits for tokens, and has packed some")


def layer_padding(store: LayerStore, place: str) -> None:
    """Each row has the tokens that its padding leaves room for."""
    if store.rotary is not None and store.rotary.padding is not None:
        padding = store.rotary.padding
        fits = len(padding) == store.batch_size and (store.waits or int(padding.max()) <= store.seen)
        require(fits, f"{place}.rotary.0.padding", f"is not that of {store.batch_size} rows of {store.seen} tokens")
        same = store.padding is None or store.padding.tolist() == padding.tolist()
        require(same, f"{place}.rotary.0.padding", "is not the layer's")
    if store.padding is not None and not store.waits:
        sinks = store.keys.sinks.shape[2]
        fits = sinks > 0 and int(store.padding.max()) + sinks <= store.seen
        require(fits, f"{place}.padding", f"leaves no room for {sinks} tokens of {store.seen}")


def exact_tokens(side: SideStore) -> Check:
    """Tokens as floats."""
    return tensor(side.dtype, *side.sinks.shape[:2], None, side.head_dim)


def side_learnt(side: SideStore, place: str) -> None:
    """The codec has learnt what decoding needs."""
    lacks = side.codec.lacks
    ready = lacks is None or (lacks == "prompt" and not side.packed.tokens)
    require(ready, f"{place}.fitted", "is not what the codec must have learnt")


ROTARY = {
    "padding": lambda rotary: optional(tensor(torch.int64, None, low=0, high=MOST)),
    "starts": lambda rotary: each(whole()) if rotary.rope.varies else each(one_of(0), 1),
    "lengths": lambda rotary: each(whole()) if rotary.rope.varies else each(one_of(0), 1),
}


def rotary_runs(rotary: Rotary, place: str) -> None:
    """Runs of tokens begin one after the other, each within its length."""
    rising = rotary.starts[:1] == [0] and all(a < b for a, b in itertools.pairwise(rotary.starts))
    known = len(rotary.starts) == len(rotary.lengths) and all(map(operator.le, rotary.starts, rotary.lengths))
    require(rising and known, place, "has starts and lengths that are not those of runs of tokens")


# ---------------------------------------------------------------- layers that keep some tokens


def _fields(pool: Pool) -> Check:
    """A slot without a token may hold anything."""
    B, H, _ = pool.positions.shape
    return record({name: of_spec(TensorSpec(x.dtype, (B, H, None), anything=True)) for name, x in pool.fields.items()})


POOL = {
    "positions": lambda pool: tensor(torch.int32, *pool.positions.shape[:2], None),
    "fields": _fields,
    "padding": lambda pool: optional(tensor(torch.int64, pool.positions.shape[0], low=0, high=MOST)),
    "moves": lambda pool: flag,
}


def pool_slots(pool: Pool, place: str) -> None:
    """Sides, positions and figures are of the same slots."""
    counts = {(side.packed.tokens, side.loose.shape[2]) for side in pool.sides}
    require(len(counts) == 1, place, f"holds other slots of keys than of values {sorted(counts)}")
    slots = sum(counts.pop())
    for name, x in {"positions": pool.positions, **pool.fields}.items():
        where = f"{place}.{name}" if name == "positions" else f"{place}.fields.{name}"
        require(x.shape[2] == slots, where, f"has {x.shape[2]} slots of {slots}")
        require(bool(x[pool.alive].isfinite().all()), where, "has a NaN or Inf where a slot holds a token")


def pool_side(side: PoolSide, place: str) -> None:
    """Exact tokens of a pool are its loose ones."""
    require(side.sinks.shape[2] == 0 == side.tail.tokens, place, "has sinks or a tail, which pools do not have")


SELECTIVE = {
    "padding": lambda store: optional(_rows(store)),
    "seen": lambda store: whole(),
    "tail_tokens": lambda store: whole(0, store.policy.recent),
    "budget": _rows,
    "latest": _rows,
    "record_past": lambda store: flag,
}


def selective_tokens(store: SelectiveStore, place: str) -> None:
    """Pools hold tokens from before the tail."""
    tails = {tail.tokens for tail in store.tails}
    require(len(tails) == 1, f"{place}.tails", f"hold {sorted(tails)} tokens of keys and of values")
    first = store.seen - tails.pop()
    require(first >= 0, place, f"holds more tokens than the {store.seen} that it has seen")
    most = max(store.seen + store.policy.recent + store.flush_tokens, int(store.policy.budget))
    fits = int(store.budget.max()) <= most and bool((store.latest <= store.budget).all())
    require(fits, f"{place}.budget", f"keeps more than {most} tokens, or fewer than the latest")
    for i, pool in enumerate(store.pools):
        positions(pool.positions, first, f"{place}.pools.{i}.positions")
        given = None if store.padding is None else store.padding.tolist()
        alike = (None if pool.padding is None else pool.padding.tolist()) == given
        require(alike, f"{place}.pools.{i}.padding", "is not the layer's")


KEPT = {**SELECTIVE, "tail_votes": lambda store: _heads(store, torch.float32)}


def kept_votes(store: KeptStore, place: str) -> None:
    """Votes of the tail are those of its tokens, where votes are remembered."""
    held, wanted = store.tail_votes.shape[2], store.tails[0].tokens if store.policy.remembers else 0
    require(held == wanted, f"{place}.tail_votes", f"has {held} tokens of {wanted}")


def _clusters(store: SketchStore) -> Check:
    return optional(Clusters.schema(store.keys.loose, store.subgen.slots, limited=not store.subgen.delta))


SKETCH = {
    **SELECTIVE,
    "longest": lambda store: tensor(torch.float32, store.batch_size, store.kv_heads, low=0),
    "draws": lambda store: whole(),
    "reservoir": lambda store: optional(Reservoir.schema(store.batch_size, store.kv_heads)),
    "clusters": _clusters,
}


def sketch_slots(store: SketchStore, place: str) -> None:
    """Samples name tokens that have left the tail."""
    first = store.seen - store.tails[0].tokens
    sampled = store.pool.positions.shape[2] + store.centers.positions.shape[2]
    require((store.reservoir is None) == (store.clusters is None), place, "has samples of values or of keys only")
    require(not sampled or store.reservoir is not None, place, "has sampled tokens without samples")
    require(store.first.packed_tokens == 0, f"{place}.pools.2", "packs tokens, and must keep all of them exact")
    if store.reservoir is not None and store.clusters is not None:
        store.reservoir.check(first, f"{place}.reservoir")
        store.clusters.check(first, f"{place}.clusters")
