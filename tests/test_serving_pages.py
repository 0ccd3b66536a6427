"""Pools of pages: tokens written one by one, in any order, are read as if all had been encoded at
once."""

from __future__ import annotations

import itertools

import pytest
import torch

from tersekv.codecs import methods
from tersekv.errors import UserError
from tersekv.kernels import backends, cpu
from tersekv.layouts.base import BLOCK_TOKENS
from tersekv.serving.pages import PagePool
from tersekv.serving.slots import Slots, why_not_slots
from tersekv.serving.steps import EngineStep, Rows

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


def pool_of(slots: Slots, pages: int, page_tokens: int, H: int = 2) -> PagePool:
    """Return a pool whose memory contains the remains of other sequences."""
    memory = torch.randint(0, 120, (pages, H, page_tokens, slots.token_bytes), dtype=torch.uint8)
    return PagePool(slots, memory, 0.125)


def plan(starts, seen, tables, p, rows):
    """Return a step whose slots follow from the pages of its requests."""
    slots = []
    for (first, last), tokens, table in zip(itertools.pairwise(starts), seen, tables, strict=True):
        position = torch.arange(tokens - (last - first), tokens)
        slots.append(table[position // p].long() * p + position % p)
    return EngineStep.plan(list(starts), list(seen), tables, torch.cat(slots), p, rows)


def expected(slots: Slots, query, keys, values, p):
    """Return the attention of a sequence's last queries, [q, Hq, D].

    Each query reads its own page exact and earlier pages decoded.
    """
    T, H, D = keys.shape
    q, position = query.shape[0], torch.arange(T)
    own = position >= position[-q:, None] // p * p
    rows = query.view(q, H, -1, D).permute(1, 2, 0, 3)  # [H, G, q, D]
    sides = []
    for codec, x in ((slots.keys, keys), (slots.values, values)):
        whole = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -T % BLOCK_TOKENS)).transpose(0, 1)[None]
        sides.append((x.transpose(0, 1)[:, None], codec.decode(codec.encode(whole), D)[0, :, None, :T]))
    (key, key_hat), (value, value_hat) = sides
    scores = torch.where(own, rows @ key.transpose(-1, -2), rows @ key_hat.transpose(-1, -2)) * 0.125
    weight = scores.masked_fill(position > position[-q:, None], float("-inf")).softmax(-1)
    out = (weight * own) @ value + (weight * ~own) @ value_hat
    return out.permute(2, 0, 1, 3).reshape(query.shape)


@pytest.fixture(params=["reference", "cpu"])
def backend(request):
    if request.param == "cpu" and (missing := cpu.why_not_built()):
        pytest.skip(missing)
    with backends.forced(request.param):
        yield request.param


def steps_of(pool, counts_of_steps, tables, p, rows, keys, values, queries):
    """Run steps with these numbers of tokens per request. Yield the request, its length and its new
    outputs."""
    lengths = [0] * len(tables)
    for counts in counts_of_steps:
        starts = [0, *itertools.accumulate(counts)]
        lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
        step = plan(starts, lengths, tables, p, rows)
        key, value, query = (
            torch.cat([x[i, lengths[i] - n : lengths[i]] for i, n in enumerate(counts)])
            for x in (keys, values, queries)
        )
        pool.write(key, value, step)
        out = pool.attend(query, key, value, step)
        for i, (first, last) in enumerate(itertools.pairwise(starts)):
            if first < last:
                yield i, lengths[i], out[first:last]


@pytest.mark.parametrize("p", [32, 64])
@pytest.mark.parametrize("name", CODECS)
def test_each_query_reads_its_page_exact_and_others_packed(name, p, backend):
    torch.manual_seed(0)
    slots, D = slots_of(name), 64
    pool, rows = pool_of(slots, 12, p), Rows(4)
    keys, values, queries = torch.randn(2, 140, 2, D), torch.randn(2, 140, 2, D), torch.randn(2, 140, 6, D)
    tables = torch.tensor([[7, 2, 5, 0, 8], [1, 6, 3, 4, 9]], dtype=torch.int32)
    counts = [(37, 5), (1, 60), (9, 1), (1, 1), (0, 1), (16, 1), (1, 1), (60, 30)]
    for i, seen, out in steps_of(pool, counts, tables, p, rows, keys, values, queries):
        own = expected(slots, queries[i, seen - len(out) : seen], keys[i, :seen], values[i, :seen], p)
        torch.testing.assert_close(out, own, atol=4e-3, rtol=4e-3)


@pytest.mark.skipif(cpu.why_not_built() is not None, reason="the C++ extension is not built")
def test_requests_with_one_query_are_one_native_call(monkeypatch):
    """Exact copies, packed pages anywhere in the pool, and linear maps, for all requests of a
    layer."""
    torch.manual_seed(0)
    slots, native, calls = slots_of("turboquant"), cpu.loaded(), []
    pool, rows = pool_of(slots, 12, 32), Rows(4)
    keys, values, queries = torch.randn(2, 90, 2, 64), torch.randn(2, 90, 2, 64), torch.randn(2, 90, 6, 64)
    tables = torch.tensor([[7, 2, 5], [1, 6, 3]], dtype=torch.int32)
    list(steps_of(pool, [(80, 70), (1, 1)], tables, 32, rows, keys, values, queries))

    class Counted:
        def __getattr__(self, name):
            calls.append(name)
            return getattr(native, name)

    step = plan([0, 1, 2], [82, 72], tables, 32, rows)
    key, value, query = (torch.stack([x[0, 81], x[1, 71]]) for x in (keys, values, queries))
    pool.write(key, value, step)
    monkeypatch.setattr(cpu, "_module", Counted())
    pool.attend(query, key, value, step)
    assert [name for name in calls if name != "Moved"] == ["attend"]


def test_steps_may_be_cut_anywhere(backend):
    """Kernels read few queries and matrix products many. With the reference both are equal up to
    rounding."""
    torch.manual_seed(1)
    slots, tables = slots_of("turboquant"), torch.tensor([[3, 1, 0, 2, 4]], dtype=torch.int32)
    keys, values, queries = (torch.randn(1, 140, n, 64) for n in (2, 2, 6))
    outs = []
    for counts in ([(140,)], [(1,)] * 140, [(50,), (14,), (1,), (75,)]):
        pool = pool_of(slots, 5, 32)
        parts = steps_of(pool, counts, tables, 32, Rows(2), keys, values, queries)
        outs.append(torch.cat([out for _, _, out in parts]))
    bound = 1e-5 if backend == "reference" else 2e-3
    torch.testing.assert_close(outs[1], outs[0], atol=bound, rtol=bound)
    torch.testing.assert_close(outs[2], outs[0], atol=bound, rtol=bound)


def test_pages_filled_by_another_request_are_read():
    torch.manual_seed(2)
    slots, p = slots_of("turboquant"), 32
    keys, values, queries = (torch.randn(1, 100, n, 64) for n in (2, 2, 6))
    pool, rows = pool_of(slots, 6, p), Rows(2)
    first = torch.tensor([[4, 2, 0, 5]], dtype=torch.int32)
    whole = torch.cat([out for *_, out in steps_of(pool, [(100,)], first, p, rows, keys, values, queries)])
    second = torch.tensor([[4, 2, 1, 3]], dtype=torch.int32)
    step = plan([0, 36], [100], second, p, rows)
    pool.write(keys[0, 64:], values[0, 64:], step)
    assert torch.equal(pool.attend(queries[0, 64:], keys[0, 64:], values[0, 64:], step), whole[64:])


def test_rows_that_were_taken_over_are_read_packed():
    rows = Rows(1)
    assert rows.put(7, 0, 5).row == 0
    assert rows.of(7, 5).first == 0
    assert rows.of(7, 6) is None
    assert rows.put(8, 0, 3).row == 0
    assert rows.of(7, 5) is None
    assert rows.put(7, 5, 6).first == 5
    assert rows.put(7, 6, 7).first == 5
    assert rows.put(7, 0, 2).first == 0


def test_rows_are_as_many_as_pages_are_being_filled():
    rows = Rows(64)
    for step in range(2000):  # two requests, whose pages change every 128 steps
        rows.step += 1
        for request in (0, 1):
            assert rows.put(1000 * request + step // 128, step % 128, step % 128 + 1).first == 0
    assert len(rows) <= 4
    assert rows.put(5000, 0, 1).row not in {rows.of(1000 * i + 1999 // 128, 1).row for i in (0, 1)}


def test_a_row_that_is_read_in_a_step_is_not_taken_over_in_it():
    rows = Rows(3)
    old = rows.put(1, 0, 5).row
    rows.put(2, 0, 5)
    rows.step += 1000
    assert rows.of(1, 5).row == old
    assert rows.put(3, 0, 1).row != old


@pytest.mark.parametrize("name", methods())
def test_codecs_without_slots_give_a_reason(name):
    pair = methods()[name].build()
    if any(why_not_slots(codec, 64) for codec in (pair.keys, pair.values)):
        with pytest.raises(UserError, match="cannot be used in an engine's pages"):
            Slots(pair.keys, pair.values, 64)
    else:
        slots = Slots(pair.keys, pair.values, 64)
        bits = (pair.keys.true_bits(64) + pair.values.true_bits(64)) / 2
        assert slots.token_bytes * 8 / 128 == pytest.approx(bits, abs=0.15)  # true bits distribute tables over a length


def test_four_bits_hold_more_than_three_times_the_tokens():
    assert 256 / slots_of("turboquant").token_bytes > 3.7


def test_memory_of_another_shape():
    slots = slots_of("turboquant")
    with pytest.raises(UserError, match="multiple of 32"):
        PagePool(slots, torch.zeros(2, 2, 48, slots.token_bytes, dtype=torch.uint8), 1.0)
    with pytest.raises(UserError, match="do not fit"):
        PagePool(slots, torch.zeros(2, 2, 32, slots.token_bytes + 1, dtype=torch.uint8), 1.0)
