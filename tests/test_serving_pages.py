"""Pools of pages: tokens written one by one, in any order, are read as if all had been coded at once."""

from __future__ import annotations

import pytest
import torch

from tersekv.codecs import methods
from tersekv.errors import UserError
from tersekv.formats.base import BLOCK_TOKENS
from tersekv.ops import backends, cpu
from tersekv.ops.softmax import attend_scores
from tersekv.serving.pages import KERNEL_ROWS, Pool, Step
from tersekv.serving.slots import Slots, why_not_slots

CODECS = {
    "turboquant": ("turboquant", {}),
    "turboquant 3": ("turboquant", {"bits": 3.0}),
    "turboquant prod": ("turboquant", {"bits": 2.0, "variant": "prod", "rotation": "hadamard"}),
    "polarquant": ("polarquant", {}),
    "polarquant no rotation": ("polarquant", {"bits": "5-3-2", "rotation": "none", "radii": "bf16"}),
    "uniform": ("uniform", {}),
    "uniform 5": ("uniform", {"bits": 5, "group": 16}),
    "normalfloat": ("normalfloat", {"bits": 6}),
}


def slots_of(name: str, head_dim: int = 64, values: str | None = None) -> Slots:
    method, options = CODECS[name]
    other, other_options = CODECS[values or name]
    return Slots(methods()[method].build(**options).keys, methods()[other].build(**other_options).values, head_dim)


def pool_of(slots: Slots, pages: int, page_tokens: int, H: int = 2) -> Pool:
    """A pool whose memory holds what other sequences have left behind."""
    memory = torch.randint(0, 120, (pages, H, page_tokens, slots.token_bytes), dtype=torch.uint8)
    return Pool(slots, memory)


def plan(pool: Pool, starts, seen, tables, page_tokens):
    """A step whose slots follow from the pages of its requests."""
    slots = []
    for i, (first, last) in enumerate(zip(starts, starts[1:], strict=False)):
        position = torch.arange(seen[i] - (last - first), seen[i])
        slots.append(tables[i][position // page_tokens].long() * page_tokens + position % page_tokens)
    return Step.plan(list(starts), list(seen), tables, torch.cat(slots), page_tokens)


def expected(slots: Slots, query, keys, values, scaling):
    """Attention of the last queries of a sequence over its tokens, coded at once and decoded: [q, Hq, D]."""
    T, H, D = keys.shape
    q = query.shape[0]
    decoded = []
    for codec, x in ((slots.keys, keys), (slots.values, values)):
        whole = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -T % BLOCK_TOKENS)).transpose(0, 1)[None]
        decoded.append(codec.decode(codec.encode(whole), D)[:, :, :T])
    rows = query.view(q, H, -1, D).permute(1, 2, 0, 3).flatten(1, 2)[None]
    mask = (torch.arange(T) <= torch.arange(T - q, T)[:, None])[None]
    out, _ = attend_scores(rows @ decoded[0].transpose(-1, -2), decoded[1], mask, scaling, None)
    return out[0].unflatten(1, (-1, q)).permute(2, 0, 1, 3).reshape(query.shape)


@pytest.fixture(params=["reference", "cpu"])
def backend(request):
    if request.param == "cpu" and (missing := cpu.why_not_built()):
        pytest.skip(missing)
    with backends.forced(request.param):
        yield request.param


@pytest.mark.parametrize("page_tokens", [32, 64])
@pytest.mark.parametrize("name", CODECS)
def test_tokens_one_by_one_are_tokens_at_once(name, page_tokens, backend):
    torch.manual_seed(0)
    slots, G, D = slots_of(name), 3, 64
    pool = pool_of(slots, 9, page_tokens)
    keys, values = torch.randn(2, 140, 2, D), torch.randn(2, 140, 2, D)
    queries = torch.randn(2, 140, 2 * G, D)
    tables = torch.tensor([[7, 2, 5, 0, 8], [1, 6, 3, 4, 4]], dtype=torch.int32)
    lengths = [0, 0]
    if page_tokens == 32:
        tables = tables[:, :5]
    for counts in [(37, 5), (1, 60), (9, 1), (1, 1), (1, 1), (60, 30)]:
        starts = [0, counts[0], sum(counts)]
        lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
        step = plan(pool, starts, lengths, tables, page_tokens)
        parts = [x[i, lengths[i] - counts[i] : lengths[i]] for x in (keys, values, queries) for i in (0, 1)]
        key, value, query = (torch.cat(parts[i : i + 2]) for i in (0, 2, 4))
        pool.write(key, value, step)
        out = pool.attend(query, step, 0.125)
        for i in (0, 1):
            own = expected(
                slots, query[starts[i] : starts[i + 1]], keys[i, : lengths[i]], values[i, : lengths[i]], 0.125
            )
            torch.testing.assert_close(out[starts[i] : starts[i + 1]], own, atol=2e-3, rtol=2e-3)
