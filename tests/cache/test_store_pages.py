"""Pages of packed blocks: an append moves no existing data, and no operation changes the kept
tokens.

Attention over many pages equals attention over one.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tersekv.attention.read import AttentionCall, attend_store
from tersekv.cache.blocks import BlockBuffer
from tersekv.cache.footprint import Footprint
from tersekv.cache.layer import LayerStore
from tersekv.cache.pages import GROWTH, MIN_PAGE_TOKENS, ROLLBACK_TOKENS, Page, PageSizes
from tersekv.cache.segments import Observed
from tersekv.codecs.kvquant import KVQuant
from tersekv.layouts.base import PackedTensors
from tersekv.recipe import Recipe
from tersekv.sizes.cache_size import CacheShape
from tersekv.sizes.estimate import predict

RECIPES = ["kivi:bits=2", "kvquant:bits=3,table=int,calibration=prompt", "polarquant"]
UNEQUAL_BLOCKS = "uniform:bits=6,axis=channel,group=128/int4:group=32"


def tokens(T: int, B: int = 1, H: int = 1, D: int = 32, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, H, T, D, generator=generator), torch.randn(B, H, T, D, generator=generator)


def store(recipe: str, keys: Tensor, values: Tensor, window: int | None = None) -> LayerStore:
    return LayerStore(Recipe.parse(recipe).plan(0, 1), keys, values, window)


class WrittenBytes(TorchDispatchMode):
    """Counts the bytes written by operations: the sizes of results except views and uninitialised
    memory."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in func.name():
            for x in out if isinstance(out, (tuple, list)) else [out]:
                self.total += x.numel() * x.element_size() if isinstance(x, Tensor) else 0
        return out


def written_by_appends(s: LayerStore, keys: Tensor, values: Tensor) -> list[int]:
    """Return the bytes written by the append of each token."""
    counts = []
    for i in range(keys.shape[2]):
        with WrittenBytes() as written:
            s.append(keys[:, :, i : i + 1], values[:, :, i : i + 1])
        counts.append(written.total)
    return counts


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_append_costs_the_same_at_any_length(recipe):
    """Appending a token writes the same number of bytes at 100,000 tokens as at 1,000.

    This holds for each of 400 tokens, with packing and new pages among them. Both caches were
    fitted on the same tokens and have the same latest ones, because outliers vary.
    """
    before, new = tokens(160, seed=1), tokens(400, seed=2)
    counts = []
    for more in (0, 99_008):
        s = store(recipe, *before)
        s.append(*tokens(1000))
        for start in range(0, more, 24_752):
            s.append(*tokens(24_752, seed=start + 3))
        s.append(*before)
        last = s.keys.packed.pages[-1]
        s.append(*tokens(max(0, last.capacity - last.stop - 7) * 32, seed=4))  # then two blocks of a page are free
        s.append(*before)
        pages = len(s.keys.packed.pages)
        counts.append(written_by_appends(s, *new))
        assert len(s.keys.packed.pages) > pages
    assert s.num_tokens > 100_000
    assert max(counts[0]) > 4 * min(counts[0])  # tokens are packed with every 32nd
    assert counts[1] == counts[0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_earlier_pages_stay_as_they_are(recipe):
    keys, values = tokens(6000, B=2, H=2)
    s = store(recipe, keys, values)
    s.append(keys[:, :, :1000], values[:, :, :1000])
    for n in range(1000, 6000, 100):
        pages = [page for side in s.sides for page in side.packed.pages]
        known = [(page, len(page), plane.data_ptr(), copies(page)) for page in pages for plane in page.planes.values()]
        s.append(keys[:, :, n : n + 100], values[:, :, n : n + 100])
        for page, blocks, place, was in known:
            assert place in [plane.data_ptr() for plane in page.planes.values()]
            assert all(torch.equal(plane, was[name]) for name, plane in page.cut(0, blocks).items())
    assert len(s.keys.packed.pages) > 10


def copies(page: Page) -> PackedTensors:
    return {name: plane.clone() for name, plane in page.cut(0, len(page)).items()}


@pytest.mark.parametrize("recipe", [*RECIPES, "qjl", "kivi:bits=4/int4:group=32", UNEQUAL_BLOCKS])
@pytest.mark.parametrize("padded", [False, True])
def test_attention_over_pages(recipe, padded):
    """Many pages, or one of a prompt: the same tokens, the same attention."""
    keys, values = tokens(1500, B=2, H=2)
    padding = torch.tensor([100, 0]) if padded else None
    once, parts = store(recipe, keys, values), store(recipe, keys, values)
    parts.append(keys[:, :, :300], values[:, :, :300], padding)
    once.append(keys[:, :, :300], values[:, :, :300], padding)  # codecs fitted on the prompt get the same data
    once.append(keys[:, :, 300:], values[:, :, 300:])
    for n in range(300, 1500, 32):
        parts.append(keys[:, :, n : n + 32], values[:, :, n : n + 32])
    assert len(list(parts.packed_pages())) > 3
    assert sum(page.tokens for page in parts.packed_pages()) == parts.packed_tokens
    for a, b in zip(parts.decoded(torch.float32), once.decoded(torch.float32), strict=True):
        assert torch.equal(a, b)
    mask = None
    if padded:
        mask = (torch.arange(1500) >= torch.tensor([[100], [0]]))[:, None]
    for q in (1, 40):
        call = AttentionCall(torch.randn(2, 4, q, 32), mask.expand(-1, q, -1) if mask is not None else None, 0.2)
        torch.testing.assert_close(attend_store(parts, call), attend_store(once, call), atol=1e-5, rtol=1e-4)


def test_any_operation_on_a_store():
    """Appends of any size, crops, row selections: the expected tokens are there, bit by bit."""
    for seed in range(12):
        chance = random.Random(seed)
        window = chance.choice([None, None, 200])
        recipe = chance.choice(["exact", "exact/uniform:bits=8,group=16", "uniform:axis=channel,group=128/exact"])
        expected = tokens(0, B=2, D=16)
        s = store(recipe, *expected, window)
        for step in range(40):
            held = expected[0].shape[2]
            if chance.random() < 0.7 or held < 10:
                n = chance.choice([1, 20, 32, 100, 700])
                new = [x.half().float() for x in tokens(n, B=2, D=16, seed=100 * seed + step)]
                s.append(*new)
                expected = tuple(torch.cat([x, y], dim=2) for x, y in zip(expected, new, strict=True))
            elif chance.random() < 0.5:
                most = 300 if window is None else s.num_tokens - s.num_evicted - window  # largest possible rollback
                n = chance.randrange(1, max(2, min(held, most)))
                s.crop(n)
                expected = tuple(x[:, :, : held - n] for x in expected)
            else:
                rows = torch.tensor(chance.choices([0, 1], k=2))
                s.select(rows)
                expected = tuple(x[rows] for x in expected)
            exact = "uniform" in recipe.split("/")[0]  # the lossless side
            decoded, whole = s.decoded(torch.float32)[exact], expected[exact]
            assert torch.equal(decoded, whole[:, :, s.num_evicted :])
            assert s.num_tokens == whole.shape[2]
            held_bytes = sum(x.numel() * x.element_size() for x in allocated(s))
            assert s.footprint().total_bytes == held_bytes


def allocated(s: LayerStore) -> list[Tensor]:
    planes = [plane for side in s.sides for page in side.packed.pages for plane in page.planes.values()]
    return [*planes, *s.sinks.buffers, *s.recent.buffers]


def test_a_sliding_window_frees_pages():
    """However the tokens came, a window holds at most two pages in addition to its tokens."""
    keys, values = tokens(9000, D=16)
    for prompt in (10, 3000):
        s = store("exact", keys, values, 2000)
        s.append(keys[:, :, :prompt], values[:, :, :prompt])
        page = s.keys.packed.sizes.next(9000, 0)
        assert page == 160  # a sixteenth of the tokens, in whole blocks
        for n in range(prompt, 9000, 30):
            s.append(keys[:, :, n : n + 30], values[:, :, n : n + 30])
            blocks = s.keys.packed
            assert blocks.capacity * 32 - blocks.tokens <= 2 * page
            assert len(blocks.pages) <= 2 * GROWTH
        kept = s.num_tokens - s.num_evicted
        assert 2000 + ROLLBACK_TOKENS <= kept <= 2000 + ROLLBACK_TOKENS + 64
        assert torch.equal(s.decoded(torch.float32)[0], keys[:, :, s.num_evicted : s.num_tokens].half().float())


def test_outliers_become_denser():
    """A page without room for more outliers ends at a block boundary, and the next one has more
    room."""
    x = tokens(32 * 120, B=2, H=2)[0]
    codec = KVQuant(4, "int", 0.02, calibration="prompt").fit(x[:, :, :2048])
    x[:, :, 2112:2560] *= 8  # all channels are outliers for a while
    layout = codec.layout(32)
    buffer = BlockBuffer(layout, 2, 2, x.device, PageSizes(64))
    buffer.append(codec.encode(x[:, :, :2048]))
    for n in range(2048, 32 * 120, 64):
        buffer.append(codec.encode(x[:, :, n : n + 64]))
    assert torch.equal(codec.decode(buffer.planes(), 32), codec.decode(codec.encode(x), 32))
    assert all(end % 64 == 0 for end in buffer.ends)
    assert len(buffer.pages[1]) == 2 < buffer.pages[1].capacity
    footprint = Footprint()
    buffer.count(footprint)
    assert (
        footprint.parts["slack"] < footprint.total_bytes / 5
    )  # most of it is the page in which they become rare again


def test_a_restored_buffer_continues():
    x = tokens(32 * 60, B=2, H=3, D=64)[0]
    codec = KVQuant(3, "int", 0.05, calibration="prompt", per_head=True, side="values").fit(x)
    buffer = BlockBuffer(codec.layout(64), 2, 3, x.device)
    for n in range(0, 32 * 30, 96):
        buffer.append(codec.encode(x[:, :, n : n + 96]))
    whole, pages = codec.decode(buffer.planes(), 64), list(buffer.pages)
    before = buffer.mark()
    buffer.append(codec.encode(x[:, :, 32 * 30 :]))
    buffer.keep(torch.arange(20, 50).expand(2, 3, -1))
    assert torch.equal(codec.decode(buffer.planes(), 64), codec.decode(codec.encode(x[:, :, 640:1600]), 64))
    buffer.undo(before)
    assert buffer.pages == pages
    assert torch.equal(codec.decode(buffer.planes(), 64), whole)
    buffer.append(codec.encode(x[:, :, 32 * 30 :]))
    assert torch.equal(codec.decode(buffer.planes(), 64), codec.decode(codec.encode(x), 64))


def test_selected_rows_are_in_one_page():
    """Beam search copies rows anyway, and here to one page."""
    keys, values = tokens(2000, B=2)
    s = store("kvquant:bits=3,table=int,calibration=prompt", keys, values)
    for n in range(0, 2000, 200):
        s.append(keys[:, :, n : n + 200], values[:, :, n : n + 200])
    whole = s.decoded(torch.float32)
    assert len(s.keys.packed.pages) > 5
    s.select(torch.tensor([1, 1]))
    assert len(s.keys.packed.pages) == 1
    for a, b in zip(s.decoded(torch.float32), whole, strict=True):
        assert torch.equal(a, b[[1, 1]])


@pytest.mark.parametrize("window", [None, 300, 3000])
@pytest.mark.parametrize("recipe", ["kivi:bits=2", UNEQUAL_BLOCKS, "snapkv:budget=200+kivi"])
def test_estimates_know_the_pages(window, recipe):
    shape = CacheShape((window,), 2, 32, 32, torch.float32)
    for n in (100, 200, 300, 500, 3000, 4100):
        keys, values = tokens(n, H=2)
        s = LayerStore(Recipe.parse(recipe).plan(0, 1), keys, values, window)
        s.append(keys, values, None, Observed(torch.rand(1, 2, n) if s.by_head else None))
        held, expected = s.footprint().parts, predict(shape, recipe, n).parts
        assert held | {"tables": 0} == expected | {"tables": 0}


def test_slack_stays_small():
    """During decoding at most a sixteenth of the packed bytes is slack, about 3 % on average.

    After a prompt it is none, and up to 2,048 tokens at most three blocks.
    """
    keys, values = tokens(12_000, H=1, D=16)
    s = store("kivi:bits=2,group=16", keys, values)
    s.append(keys[:, :, :3000], values[:, :, :3000])
    assert s.keys.packed.capacity * 32 == s.packed_tokens
    shares: list[float] = []
    for n in range(3000, 12_000, 32):
        s.append(keys[:, :, n : n + 32], values[:, :, n : n + 32])
        shares.append(s.keys.packed.capacity / len(s.keys.packed) - 1)
    assert max(shares) <= 1 / 16
    assert sum(shares) / len(shares) <= 1 / 32
    short = store("kivi:bits=2,group=16", keys, values)
    for n in range(0, 2048, 32):
        short.append(keys[:, :, n : n + 32], values[:, :, n : n + 32])
        assert short.keys.packed.capacity - len(short.keys.packed) <= 3


def test_pages_stay_few():
    """Decoding from an empty cache: pages and slack at a length where a page has just begun."""
    sizes, used, pages, reached = PageSizes(), 0, 0, {}
    while used < 1 << 20:
        new = sizes.next(32, used)
        if used >= 16 * MIN_PAGE_TOKENS:
            assert new <= used / GROWTH + 32
        used, pages = used + new, pages + 1
        reached |= {length: pages for length in (1 << 13, 1 << 17) if used >= length and length not in reached}
    assert reached == {1 << 13: 38, 1 << 17: 83}
    assert sizes.next(5000, 100) == 5024
    assert sizes.slack(4096) == 0
