"""What can be taken back of a layer's tokens, and what can be forgotten for good."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tersekv.errors import CacheError

if TYPE_CHECKING:
    from tersekv.cache.layer import LayerStore
    from tersekv.cache.selective import SelectiveStore

ROLLBACK_TOKENS = 128
"""Tokens kept beyond a sliding window, so that assisted decoding can take back what it had proposed."""


def check_crop(store: LayerStore, n: int) -> None:
    """Check that the n latest tokens of a layer can be taken back.

    Raises:
        CacheError: more than was seen, or more than a sliding window or a padded batch can give back.
    """
    left = store.seen - n
    if left < 0:
        raise CacheError(f"cannot take back {n} tokens, only {store.seen} were seen")
    if store.padding is not None and 0 < left < int(store.padding.max()) + store.keys.sinks.shape[2]:
        raise CacheError(
            f"cannot take back {n} of {store.seen} tokens, rows of a left-padded batch would lose their first ones; "
            "reset the cache instead"
        )
    if store.window is not None and store.dropped > max(0, left - store.window + 1):
        raise CacheError(
            f"cannot take back {n} tokens of a layer with sliding window {store.window}; "
            f"{ROLLBACK_TOKENS} are kept for that"
        )


def out_of_window(held: int, window: int, flush: int) -> int:
    """How many of the oldest of `held` tokens no query can see in a sliding window, a rollback included: a multiple of
    `flush`."""
    return max(0, (held - window - ROLLBACK_TOKENS) // flush * flush)


def outside(store: LayerStore, seen: int, flush: int) -> tuple[int, int]:
    """Packed tokens that no query after `seen` tokens can see in a layer's sliding window, a rollback of
    ROLLBACK_TOKENS included, and how many of the `flush` tokens about to be packed are outside too and need not be."""
    if store.window is None:
        return 0, 0
    tokens = out_of_window(seen - store.dropped, store.window, store.flush_tokens)
    packed = min(tokens, store.packed_tokens)
    return packed, min(tokens - packed, flush)


def is_whole(store: LayerStore | SelectiveStore, seen: int) -> bool:
    """True if a store that an interrupted append has left holds the `seen` tokens from before, in keys and values. Of
    stores that drop tokens this cannot be told."""
    if not hasattr(store, "window") or store.seen != seen:
        return False
    held = {store.dropped + side.sinks.shape[2] + side.packed.tokens + side.tail.tokens for side in store.sides}
    return held == {seen}
