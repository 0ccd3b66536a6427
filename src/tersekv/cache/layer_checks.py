"""Checks of a loaded layer."""

from __future__ import annotations

from typing import Any

from tersekv.cache.schema import flag, one_of, optional, per_row, require, whole

LAYER = {
    "padding": lambda store: optional(per_row(store)),
    "deferred": lambda store: flag,
    "record_past": lambda store: flag,
    "num_tokens": lambda store: whole(),
    "num_evicted": lambda store: one_of(0) if store.window is None else whole(),
}


def layer_tokens(store: Any, place: str) -> None:
    """Check that the numbers of sinks, packed and tail tokens add up to the tokens received."""
    counts = {(side.sinks.shape[2], side.packed_tokens, side.tail.tokens) for side in store.sides}
    require(len(counts) == 1, place, f"holds different numbers of keys and values {sorted(counts)}")
    sinks, packed, tail = counts.pop()
    held = sinks + store.num_evicted + packed + tail
    require(held == store.num_tokens, place, f"holds {held} tokens, and must hold {store.num_tokens}")
    require(
        store.num_evicted % store.flush_tokens == 0,
        f"{place}.num_evicted",
        f"is not a multiple of {store.flush_tokens}",
    )
    left = 0 if store.window is None else max(0, store.num_tokens - store.window + 1)
    require(store.num_evicted <= left, f"{place}.num_evicted", f"is {store.num_evicted}, and must be at most {left}")
    wanted = 0 if store.deferred else min(store.policy.sink_tokens(store.window), store.num_tokens)
    require(sinks == wanted, f"{place}.sides.0.sinks", f"has {sinks} tokens, and must have {wanted}")
    require(not store.deferred or held == tail, place, "is deferred, and must not hold sinks or packed tokens")


def layer_padding(store: Any, place: str) -> None:
    """Check that the padding of each row leaves room for its tokens."""
    if store.rotary is not None and store.rotary.padding is not None:
        padding = store.rotary.padding
        fits = len(padding) == store.batch_size and (store.deferred or int(padding.max()) <= store.num_tokens)
        require(fits, f"{place}.rotary.0.padding", f"does not fit {store.batch_size} rows of {store.num_tokens} tokens")
        same = store.padding is None or store.padding.tolist() == padding.tolist()
        require(same, f"{place}.rotary.0.padding", "is not the layer's")
    if store.padding is not None and not store.deferred:
        sinks = store.keys.sinks.shape[2]
        fits = sinks > 0 and int(store.padding.max()) + sinks <= store.num_tokens
        require(fits, f"{place}.padding", f"leaves no room for {sinks} tokens of {store.num_tokens}")
