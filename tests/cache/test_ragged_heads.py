"""KV heads of one layer with different numbers of packed tokens: attention, bytes, copies and files."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from tersekv.attention.read import AttentionCall, attend_store
from tersekv.cache.layer import LayerStore
from tersekv.errors import UserError
from tersekv.kernels import backends
from tersekv.policies.headkv import HeadKV
from tersekv.recipe import Recipe
from tersekv.transforms.rope import standard_rope
from test_attention import check, dense
from test_claims_selection import feed, held_by_position, kept, masks_of

SCORES = torch.tensor([[1.0, 1.0, 1.0], [0.1, 2.0, 0.6]])
CODECS = [
    "exact", "kivi:bits=4", "kivi:bits=2,pre_rope=true", "qjl", "polarquant", "turboquant:bits=2.5",
    "turboquant:bits=4,centre=true", "trellis:bits=3,calibration=prompt", "uniform:axis=channel,group=0",
    "trellis:bits=3,basis=klt,calibration=prompt", "kvquant:bits=4,outliers=0.05,calibration=prompt", "kvarn",
]  # fmt: skip
"""Every layout of the kernels, keys with and without RoPE, linear maps of each head, and a list of outliers."""

PROMPT = [500]
PAGES = [*PROMPT, *range(501, 660)]
AGAIN = [*PAGES, 760]
"""Ends of calls: a prompt, then single tokens, then a prompt that evicts again."""


def fed(recipe: str, cuts: list[int], padding: list[int] | None = None) -> LayerStore:
    """Return a store of three heads that was fed random tokens in calls that end at `cuts`."""
    pad = None if padding is None else torch.tensor(padding)
    B, g = len(padding or [0]), torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, B, 3, 800, 64, generator=g)
    query = torch.randn(B, 6, 800, 64, generator=g)
    plan = Recipe.parse(recipe).plan(1, 2)._replace(scores=SCORES)
    store, start = LayerStore(plan, keys, values, rope=standard_rope(64)), 0
    for stop in cuts:
        feed(store, *(x[:, :, start:stop] for x in (keys, values, query)), pad)
        start = stop
    return store


def empty(like: LayerStore) -> LayerStore:
    """Return a store without tokens that is made like another one."""
    return LayerStore(like.plan, *[torch.empty(like.batch_size, 3, 0, 64)] * 2, rope=standard_rope(64))


def attended(store: LayerStore, q: int = 1, mask: Tensor | None = None) -> tuple[Tensor, AttentionCall]:
    call = AttentionCall(torch.randn(store.batch_size, 6, q, 64, generator=torch.Generator().manual_seed(q)), mask, 0.1)
    return attend_store(store, call), call


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("threads", [1, 3])
def test_attention_is_that_of_each_heads_tokens(codec, threads):
    """One token, several with a mask, and so many that tiles are decoded; rows with and without padding."""
    store = fed(f"headkv:budget=0.4,recent=16+{codec}", PAGES, [50, 0])
    keys, values = held_by_position(store)
    assert store.pages().padded is not None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for q in (1, 5, 80):
            shown = torch.rand(2, q, store.num_tokens, generator=torch.Generator().manual_seed(q)) < 0.5
            got, call = attended(store, q, None if q == 1 else shown)
            with backends.forced("reference"):
                reference = attend_store(store, call)
            for head in range(3):
                seen = masks_of(store, q)[:, head] & (shown if q > 1 else True)
                seen[0, :, :50] = False
                own = [x[:, head : head + 1].nan_to_num() for x in (keys, values)]
                expected = dense(call.query[:, 2 * head : 2 * head + 2], *own, seen, call)
                check(reference[:, :, 2 * head : 2 * head + 2], expected)
                check(got[:, :, 2 * head : 2 * head + 2], expected, codec == "qjl")
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("codec", ["kivi:bits=4", "exact", "trellis:bits=3,calibration=prompt"])
@pytest.mark.parametrize("cuts", [PROMPT, PAGES, AGAIN])
def test_packed_bytes_are_those_of_the_heads_own_tokens(codec, cuts):
    """No head has a block beyond its tokens. With equal heads there are as many bytes, but for one block of a head."""
    store = fed(f"headkv:budget=0.4,recent=16+{codec}", cuts)
    block, sizes = store.flush_tokens, [len(kept(store, 0, head)) for head in range(3)]
    assert max(sizes) > 1.3 * sum(sizes) / 3
    layouts = [side.packed.layout for side in store.sides]
    block_bytes = sum(layout.block_bytes() * block / layout.block_tokens for layout in layouts)
    blocks = sum(store.tiers[0].slots.counts)[0]
    for size, own in zip(sizes, blocks.tolist(), strict=True):
        assert own == (size - store.recent.tokens - 4) // block or cuts == AGAIN
    packed = sum(store.footprint().parts[part] for part in ("codes", "scales and norms", "slack"))
    recent = store.recent.buffers[0]
    spare = 2 * (recent.shape[2] - store.recent.tokens) * 3 * 64 * recent.element_size()
    assert packed - spare == int(blocks.sum()) * block_bytes
    equal = fed(f"snapkv:budget=0.4,recent=16+{codec}", PROMPT)
    if cuts == PROMPT:
        assert abs(int(blocks.sum()) - 3 * equal.packed_tokens // block) <= 3


def test_few_pages_and_unchanged_tokens():
    """Small pages are joined, which changes no bit of a token, and a new prompt frees what it evicts."""
    known: dict[tuple[int, int], Tensor] = {}
    for cuts in (PROMPT, [*PROMPT, *range(501, 580)], PAGES):
        store = fed("headkv:budget=0.4,recent=16+kivi:bits=2", cuts)
        assert len(list(store.packed_pages())) == len(store.tiers[0].slots.counts) <= 3
        for page in store.packed_pages():
            decoded = page.keys.decode()[0]
            for head, slot in (page.where[0] >= 0).nonzero().tolist():
                token = decoded[head, slot]
                assert torch.equal(known.setdefault((head, int(page.where[0, head, slot])), token), token)
    store = fed("headkv:budget=200,recent=16+kivi:bits=2", AGAIN)
    budget = HeadKV(budget=200, recent=16).of_heads(200, 760, SCORES)[1]
    for head, own in enumerate(budget.tolist()):  # blocks above the limit are evicted whole
        assert 0.9 * own < len(kept(store, 0, head)) <= own
    most = 1.5 * (budget - 16) / 32 + 2
    assert (store.tiers[0].slots.counts[0][0] <= most).all()


@pytest.mark.parametrize("recipe", [f"+{CODECS[2]}", f"+{CODECS[-2]}", ",rest=2,rest_share=0.3+kivi:bits=4"])
def test_copies_rows_and_files(recipe):
    store = fed(f"headkv:budget=0.4,recent=16{recipe}", PAGES, [50, 0])
    expected, _ = attended(store)
    again = empty(store)
    again.restore(store.state())
    assert again.footprint().parts == store.footprint().parts
    for one in (again, copy.deepcopy(store)):
        assert torch.equal(attended(one)[0], expected)
    one.to("meta")  # counts are read on the host, and index tensors there, wherever the tokens are
    assert {count.device.type for tier in one.tiers for count in tier.slots.counts} == {"cpu"}
    store.select(torch.tensor([1, 0, 1]))
    query = torch.randn(2, 6, 1, 64, generator=torch.Generator().manual_seed(1))[[1, 0, 1]]
    torch.testing.assert_close(attend_store(store, AttentionCall(query, None, 0.1)), expected[[1, 0, 1]])
    store.crop(store.num_tokens)
    assert store.packed_tokens == 0


def test_rows_without_blocks_are_saved_too():
    store = fed("headkv:budget=0.4,recent=16+kivi:bits=4", [100], [0, 64])
    assert store.packed_tokens
    store.select(torch.tensor([1]))
    expected, _ = attended(store)
    again = empty(store)
    again.restore(store.state())
    assert store.packed_tokens == 0
    assert torch.equal(attended(again)[0], expected)


def test_states_that_contradict_themselves():
    store = fed("headkv:budget=0.4,recent=16+kivi:bits=4", PROMPT)
    for change, words in (
        (lambda slots: slots["counts"][0].add_(1), r"counts must have the pages of \[\d+\] tokens"),
        (lambda slots: slots["counts"].append(slots["counts"][0]), "counts must have the pages of"),
        (lambda slots: slots.update(positions=slots["positions"][32:]), r"positions must have \d+ slots"),
    ):
        state = store.state()
        change(state["tiers"][0]["slots"][0])
        with pytest.raises(UserError, match=words):
            empty(store).restore(state)
