"""Numbers of tokens of a layer: the recent window, what leaves it, and what a sliding window forgets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tersekv.cache.layer import LayerStore, layer_tokens
from tersekv.cache.placement import Placement, placed_tokens
from tersekv.errors import CacheError
from tersekv.recipe import Recipe

POLICIES = [
    "window:recent=20",
    "window:recent=0,sinks=0,start=0",
    "window:generated=exact,recent=20",
    "window:recent=5,start=90",
    "mixed:recent=20,rest=2",
    "window:recent=300,start=90",
]
CALLS = st.lists(st.one_of(st.integers(1, 3), st.integers(1, 200), st.integers(-150, -1)), min_size=1, max_size=12)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("window", [None, 300, 40])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(calls=CALLS, late=st.booleans())
def test_numbers_fit_and_room_is_exact(policy: str, window: int | None, calls: list[int], late: bool) -> None:
    """`calls` adds tokens, or rolls them back if negative. late: the sliding window evicts at rollbacks."""
    placement = Placement(Recipe.parse(policy + "+kivi:bits=4").policy(), window, 32)
    placement.record_past = late
    for n in calls:
        if n < 0:
            try:
                placement.check_crop(-n)
            except CacheError:
                continue
            before = placement.packed
            removed, back = placement.crop(-n)
            assert removed == before - placement.packed
            assert 0 <= back < 32
            if late:
                placement.past()
        else:
            move = placement.move(n)
            assert move.skip <= move.leave
            placement.add(n, move)
        placed_tokens(placement, "placement")
        room = placement.room()
        assert not any(placement.move(n).leave or placement.move(n).forget for n in (1, room) if 0 < n <= room)
        least = 32 if placement.policy.packs_generated else 31
        if room < least and not (placement.sinks < placement.most_sinks or placement.continues or placement.deferred):
            for _ in range(room):
                placement.add(1, placement.move(1))
            assert any(placement.move(1)[1:])


def test_a_rollback_to_the_first_token_that_is_left() -> None:
    placement = Placement(Recipe.parse("window:sinks=0,recent=0+kivi:bits=4").policy(), 33, 32)
    placement.add(300, placement.move(300))
    least = placement.evicted + 33 - 1  # its query sees all tokens from the first one that was not evicted
    with pytest.raises(CacheError, match="cannot roll back"):
        placement.check_crop(300 - least + 1)
    placement.crop(300 - least)
    placed_tokens(placement, "placement")


@pytest.mark.parametrize("policy", POLICIES[:4])
@pytest.mark.parametrize("window", [None, 64])
@settings(max_examples=8, deadline=None, derandomize=True)
@given(calls=CALLS)
def test_a_store_holds_what_its_placement_says(policy: str, window: int | None, calls: list[int]) -> None:
    """Keys and values after each call, also where the recent window has room for it."""
    like = torch.randn(1, 1, 200, 32)
    store = LayerStore(Recipe.parse(policy + "+kivi:bits=4").plan(0, 1), like[:, :, :0], like[:, :, :0], window)
    for n in calls:
        try:
            store.append(like[:, :, :n], like[:, :, :n]) if n > 0 else store.crop(-n)
        except CacheError:
            continue
        layer_tokens(store, "store")
        assert store.decoded(torch.float32)[0].shape[2] == store.num_tokens - store.num_evicted
