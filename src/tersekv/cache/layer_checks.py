"""Checks of a loaded layer."""

from __future__ import annotations

from typing import Any

from tersekv.cache.schema import optional, per_row, require

LAYER = {"padding": lambda store: optional(per_row(store))}


def layer_tokens(store: Any, place: str) -> None:
    """Check that keys and values hold the tokens that the placement names."""
    held, placed = (store.sinks.tokens, store.packed_tokens, store.recent.tokens), store.placement
    wanted = (0, *held[1:]) if store.chosen else (placed.sinks, placed.packed, placed.tail)
    require(held == wanted, place, f"holds {held} sinks, packed and recent tokens, and must hold {wanted}")


def layer_padding(store: Any, place: str) -> None:
    """Check that the padding of each row leaves room for its tokens."""
    if store.rotary is not None and store.rotary.padding is not None:
        padding = store.rotary.padding
        fits = len(padding) == store.batch_size and (store.deferred or int(padding.max()) <= store.num_tokens)
        require(fits, f"{place}.rotary.0.padding", f"does not fit {store.batch_size} rows of {store.num_tokens} tokens")
        same = store.padding is None or store.padding.tolist() == padding.tolist()
        require(same, f"{place}.rotary.0.padding", "is not the layer's")
    if store.padding is not None and not store.deferred:
        sinks = store.sinks.tokens
        fits = (sinks > 0 or store.by_head) and int(store.padding.max()) + sinks <= store.num_tokens
        require(fits, f"{place}.padding", f"leaves no room for {sinks} tokens of {store.num_tokens}")
