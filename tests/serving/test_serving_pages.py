"""Pools of pages: full pages are read as the codec decodes them, others exactly, in any order of steps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from tersekv.cache import coding
from tersekv.codecs import methods
from tersekv.codecs.common.centred import with_centre
from tersekv.errors import CacheError, UserError
from tersekv.kernels import backends, cpu
from tersekv.layouts.base import BLOCK_TOKENS
from tersekv.serving.dense import AttentionKind
from tersekv.serving.pages import PagePool
from tersekv.serving.slots import Slots, why_not_slots
from tersekv.serving.spans import SINKS
from tersekv.serving.steps import IDLE_STEPS, EngineStep, Rows, SinkRows
from tersekv.transforms.rope import standard_rope

CODECS = {
    "turboquant": ("turboquant", {}),
    "turboquant 3": ("turboquant", {"bits": 3.0}),
    "turboquant prod": ("turboquant", {"bits": 2.0, "variant": "prod", "rotation": "hadamard"}),
    "polarquant": ("polarquant", {}),
    "polarquant no rotation": ("polarquant", {"bits": "5-3-2", "rotation": "none", "radii": "bf16"}),
    "uniform": ("uniform", {}),
    "uniform 5": ("uniform", {"bits": 5, "group": 16}),
    "normalfloat": ("normalfloat", {"bits": 6}),
    "kivi": ("kivi", {"bits": 2}),
    "qjl": ("qjl", {"outliers": 0}),
    "kvarn": ("kvarn", {"bits": 3, "tile": 32}),
}


CALIBRATED = {
    "trellis": ("trellis", {"bits": 3.0}),
    "trellis before RoPE": ("trellis", {"bits": 2.0, "basis": "rotation", "centre": False}),
    "trellis rotated": ("trellis", {"bits": 2.0, "basis": "rotation", "code": "scalar", "centre": False}),
    "kvquant": ("kvquant", {"outliers": 0.0}),
    "kvquant room": ("kvquant", {"outliers": 0.02, "room": 1.1}),
    "kvquant room after RoPE": ("kvquant", {"bits": 4, "outliers": 0.02, "room": 0.5, "value_axis": "channel"}),
    "oscar": ("oscar", {"bits": 3}),
    "qjl": ("qjl", {"calibration": "corpus"}),
    "turboquant": ("turboquant", {"bits": 2.5, "calibration": "corpus"}),
    "turboquant prod": ("turboquant", {"bits": 3.25, "variant": "prod", "calibration": "corpus"}),
    "turboquant centred": ("turboquant", {"bits": 4.0, "calibration": "corpus"}),
    "polarquant centred": ("polarquant", {}),
}
"""Codecs that are fitted on a corpus."""

ROPE = standard_rope(64)


def slots_of(name: str, head_dim: int = 64, values: str | None = None) -> Slots:
    method, options = CODECS[name]
    other, other_options = CODECS[values or name]
    return Slots(methods()[method].build(**options).keys, methods()[other].build(**other_options).values, head_dim)


def calibrated(name: str, H: int = 2, D: int = 64) -> Slots:
    """Return slots of codecs fitted on random tokens with a mean."""
    method, options = CALIBRATED[name]
    pair = methods()[method].build(**options)
    pair = pair.with_pre_rope("before" in name or (pair.keys.pre_rope and "after" not in name))
    pair = with_centre(pair, "corpus") if "centred" in name else pair
    x = torch.randn(1, H, 300, D) * torch.linspace(0.2, 2, D) + torch.randn(H, 1, D)
    keys = pair.keys.with_mean(x) if pair.keys.centred else pair.keys
    sides = keys.fit_corpus(x, torch.randn_like(x)), pair.values.fit_corpus(x, torch.randn_like(x))
    keys, values = (type(side).share_across_layers([side])[0] for side in sides)
    return Slots(keys, values, D)


PLAIN = AttentionKind(0.125)


def pool_of(
    slots: Slots, pages: int, page_tokens: int, exactness="step", rope=None, H: int = 2, kind=PLAIN
) -> PagePool:
    """Return a pool whose memory contains the remains of other sequences."""
    memory = torch.randint(0, 120, (pages, H, page_tokens, slots.token_bytes), dtype=torch.uint8)
    return PagePool(slots, memory, kind, rope=rope, exactness=exactness)


def decoded(slots: Slots, keys, values, rope=None):
    """Return a sequence's keys and values [T, H, D] as they are decoded after packing by the backend in use: a gain of
    one trellis vector in some thousands is rounded otherwise by another backend.

    The end of the sequence may be too short for a block. No page of such tokens is full.
    """
    sides = []
    for codec, x in ((slots.keys, keys), (slots.values, values)):
        whole = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -len(x) % BLOCK_TOKENS)).transpose(0, 1)[None]
        angles = rope.angles(0, whole.shape[2]) if codec.needs_rope else None
        packed = coding.view(codec, coding.encode(codec, coding.Tokens(whole, angles)), slots.head_dim, angles)
        sides.append(packed.decode()[0, :, : len(x)].transpose(0, 1))
    return sides


def expected(query, keys, values, hats, p, exactness, kind=PLAIN):
    """Return the attention of a sequence's last queries, [q, Hq, D].

    hats: the longer sequence's decoded keys and values. Attention sinks are exact. So is each
    query's own page, or with "step" all pages from that of the first query on.
    """
    T, H, D = keys.shape
    q, position = query.shape[0], torch.arange(T)
    own = position >= position[-q:, None] // p * p
    if exactness == "step":
        own = (position >= (T - q) // p * p).expand(q, T)
    own = own | (position < SINKS)
    rows = query.view(q, H, -1, D).permute(1, 2, 0, 3)  # [H, G, q, D]
    key, value, key_hat, value_hat = (x[:T].transpose(0, 1)[:, None] for x in (keys, values, *hats))
    scores = torch.where(own, rows @ key.transpose(-1, -2), rows @ key_hat.transpose(-1, -2)) * 0.125
    scores = scores.masked_fill(~kind.visible(position[-q:], position), float("-inf"))
    if kind.sink_logits is not None:
        logits = kind.sink_logits.view(H, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, logits], dim=-1)
    weight = scores.softmax(-1)[..., :T]
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
        step = EngineStep.plan(starts, lengths, tables, p, rows)
        key, value, query = (
            torch.cat([x[i, lengths[i] - n : lengths[i]] for i, n in enumerate(counts)])
            for x in (keys, values, queries)
        )
        pool.write(key, value, step)
        out = pool.attend(query, key, value, step)
        for i, (first, last) in enumerate(itertools.pairwise(starts)):
            if first < last:
                yield i, lengths[i], out[first:last]


@pytest.mark.parametrize(("p", "exactness"), [(32, "step"), (64, "step"), (32, "page"), (64, "page")])
@pytest.mark.parametrize("name", CODECS)
def test_full_pages_are_read_packed_and_others_exactly(name, p, exactness, backend):
    torch.manual_seed(0)
    slots, D = slots_of(name), 64
    pool, rows = pool_of(slots, 12, p, exactness), Rows(4)
    keys, values, queries = torch.randn(2, 140, 2, D), torch.randn(2, 140, 2, D), torch.randn(2, 140, 6, D)
    tables = torch.tensor([[7, 2, 5, 0, 8], [1, 6, 3, 4, 9]], dtype=torch.int32)
    counts = [(37, 5), (1, 60), (9, 1), (1, 1), (0, 1), (16, 1), (1, 1), (60, 30)]
    hats = [decoded(slots, *sides) for sides in zip(keys, values, strict=True)]
    for i, seen, out in steps_of(pool, counts, tables, p, rows, keys, values, queries):
        own = expected(queries[i, seen - len(out) : seen], keys[i, :seen], values[i, :seen], hats[i], p, exactness)
        torch.testing.assert_close(out, own, atol=4e-3, rtol=4e-3)


ISAS = [] if cpu.why_not_built() else [name for name, missing in cpu.isas().items() if missing is None]


@pytest.mark.parametrize("exactness", ["step", "page"])
@pytest.mark.parametrize("isa", ["reference", *ISAS])
@pytest.mark.parametrize("name", CALIBRATED)
def test_calibrated_codecs_read_positions_of_their_request(name, isa, exactness):
    """Keys' means and RoPE depend on positions in the request, not on places in the pool."""
    torch.manual_seed(4)
    slots, p = calibrated(name), 64
    keys, values, queries = torch.randn(2, 400, 2, 64), torch.randn(2, 400, 2, 64), torch.randn(2, 400, 6, 64)
    tables = torch.arange(14, dtype=torch.int32)[torch.randperm(14)].view(2, 7)
    pool, rows = pool_of(slots, 14, p, exactness, ROPE), Rows(4)
    counts = [(137, 5), (120, 60), (1, 1), (3, 1), (64, 8), (60, 1), (1, 30)]
    with backends.forced("reference" if isa == "reference" else "cpu"):
        if isa != "reference":
            cpu.set_isa(isa)
        try:  # components are rounded as the instruction set does, so codes at a boundary are its own
            hats = [decoded(slots, *sides, ROPE) for sides in zip(keys, values, strict=True)]
            for i, seen, out in steps_of(pool, counts, tables, p, rows, keys, values, queries):
                of = queries[i, seen - len(out) : seen], keys[i, :seen], values[i, :seen]
                own = expected(*of, hats[i], p, exactness)
                torch.testing.assert_close(out, own, atol=1e-2, rtol=1e-2)
        finally:
            if isa != "reference":
                cpu.set_isa("auto")


@pytest.mark.skipif(cpu.why_not_built() is not None, reason="the C++ extension is not built")
@pytest.mark.parametrize("name", ["turboquant 4", *CALIBRATED])
def test_requests_with_one_query_are_one_native_call(name, monkeypatch):
    """Exact copies, packed pages anywhere in the pool, and linear maps, for all requests of a
    layer."""
    torch.manual_seed(0)
    slots, native, calls = calibrated(name) if name in CALIBRATED else slots_of("turboquant"), cpu.loaded(), []
    pool, rows = pool_of(slots, 12, 32, rope=ROPE), Rows(4)
    keys, values, queries = torch.randn(2, 90, 2, 64), torch.randn(2, 90, 2, 64), torch.randn(2, 90, 6, 64)
    tables = torch.tensor([[7, 2, 5], [1, 6, 3]], dtype=torch.int32)
    list(steps_of(pool, [(80, 70), (1, 1)], tables, 32, rows, keys, values, queries))

    class Counted:
        def __getattr__(self, name):
            calls.append(name)
            return getattr(native, name)

    step = EngineStep.plan([0, 1, 2], [82, 72], tables, 32, rows)
    key, value, query = (torch.stack([x[0, 81], x[1, 71]]) for x in (keys, values, queries))
    pool.write(key, value, step)
    monkeypatch.setattr(cpu, "_module", Counted())
    pool.attend(query, key, value, step)
    assert [name for name in calls if name != "Moved"] == ["attend"]


def test_steps_may_be_cut_anywhere_if_pages_are_exact(backend):
    """Kernels read few queries and matrix products many. With the reference both are equal up to
    rounding."""
    torch.manual_seed(1)
    slots, tables = slots_of("turboquant"), torch.tensor([[3, 1, 0, 2, 4]], dtype=torch.int32)
    keys, values, queries = (torch.randn(1, 140, n, 64) for n in (2, 2, 6))
    outs = []
    for counts in ([(140,)], [(1,)] * 140, [(50,), (14,), (1,), (75,)]):
        pool = pool_of(slots, 5, 32, "page")
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
    whole = torch.cat([out for *_, out in steps_of(pool, [(64,), (36,)], first, p, rows, keys, values, queries)])
    second = torch.tensor([[4, 2, 1, 3]], dtype=torch.int32)
    step = EngineStep.plan([0, 36], [100], second, p, rows)
    pool.write(keys[0, 64:], values[0, 64:], step)
    assert torch.equal(pool.attend(queries[0, 64:], keys[0, 64:], values[0, 64:], step), whole[64:])


def test_tokens_that_are_taken_back_leave_no_trace(backend):
    """Speculation: the last 5 of 8 tokens of a step are replaced, with a page boundary among them."""
    torch.manual_seed(3)
    slots, p = slots_of("turboquant"), 32
    keys, values, queries = (torch.randn(1, 100, n, 64) for n in (2, 2, 6))
    tables, outs = torch.tensor([[4, 2, 0, 5]], dtype=torch.int32), []
    for wrong in (False, True):
        pool, rows = pool_of(slots, 6, p), Rows(4, keeps_full=True)
        list(steps_of(pool, [(60,)], tables, p, rows, keys, values, queries))
        if wrong:
            step = EngineStep.plan([0, 8], [65], tables, p, rows)
            pool.write(*(torch.cat([x[0, 57:60], torch.randn(5, 2, 64)]) for x in (keys, values)), step)
        for first, last in ((60, 63), (63, 66), (66, 67)):
            step = EngineStep.plan([0, last - first], [last], tables, p, rows)
            pool.write(keys[0, first:last], values[0, first:last], step)
            outs.append(pool.attend(queries[0, first:last], keys[0, first:last], values[0, first:last], step))
    assert all(torch.equal(a, b) for a, b in zip(outs[:3], outs[3:], strict=True))


def test_speculation_keeps_one_full_page_of_a_request():
    """Not all of its text, which lies there as exact copies."""
    table, rows = torch.arange(200, dtype=torch.int32)[None], Rows(512, keeps_full=True)
    seen = 0
    for n in (40, 1, *[3, 1, 4] * 400):
        seen += n
        EngineStep.plan([0, n], [seen], table, 32, rows)
    assert seen > 3000
    assert len(rows) <= 3
    rows = Rows(512, keeps_full=True)
    for seen in range(100, 6400, 100):  # a prompt in chunks
        EngineStep.plan([0, 100], [seen], table, 32, rows)
    assert len(rows) <= 3


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def test_rows_of_running_requests_are_never_reused():
    rows = Rows(2)
    first = rows.take(pages(7))
    rows.hold(first, pages(5))
    assert rows.find(pages(7), pages(5)) == first
    with pytest.raises(CacheError, match="are gone"):
        rows.find(pages(7), pages(6))
    others = rows.take(pages(1, 2, 3))
    assert len({*others, *first}) == 4
    rows.step += IDLE_STEPS + 1
    assert rows.find(pages(7), pages(5)) == first
    assert not {*rows.take(pages(11, 12))} & {*first}
    with pytest.raises(CacheError, match="are gone"):
        rows.find(pages(1), pages(1))


def test_an_idle_row_is_not_given_to_another_page_if_its_own_begins_again():
    """Page 2 has a row of an ended request, which is the oldest one."""
    rows = Rows(2)
    rows.take(pages(2, 1))
    rows.step += IDLE_STEPS + 1
    taken = rows.take(pages(4, 2))
    assert len({*taken}) == 2
    rows.hold(taken, pages(5, 6))
    assert rows.find(pages(4, 2), pages(5, 6)).tolist() == taken.tolist()


def test_sinks_last_until_their_page_is_written_again():
    sinks = SinkRows()
    first = sinks.take(pages(3, 9))
    assert sinks.take(pages(9)) == first[1]
    sinks.begin(pages(3, 70))
    assert sinks.of(pages(3, 9)).tolist() == [-1, first[1]]
    assert sinks.take(pages(100)) == first[0]
    assert sinks.count == 2


def test_rows_are_as_many_as_pages_are_being_filled():
    rows, p = Rows(64), 32
    for length in range(1, 400):  # two requests that grow by one token
        tables = torch.arange(26, dtype=torch.int32).view(2, 13)
        EngineStep.plan([0, 1, 2], [length, length], tables, p, rows)
    assert len(rows) <= 4


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
        PagePool(slots, torch.zeros(2, 2, 48, slots.token_bytes, dtype=torch.uint8), PLAIN)
    with pytest.raises(UserError, match="do not fit"):
        PagePool(slots, torch.zeros(2, 2, 32, slots.token_bytes + 1, dtype=torch.uint8), PLAIN)


def test_layers_of_different_heads_share_a_step(monkeypatch):
    """Angles of RoPE are made in parts, whose lengths depend on a layer's heads. A step may have no token."""
    monkeypatch.setattr("tersekv.serving.pages.PART_ELEMENTS", 4 * 64 * 64)
    T, p, heads = 256, 64, (2, 4)
    slots = {H: calibrated("polarquant centred", H=H) for H in heads}
    x = {H: torch.randn(3, T + 20, H, 64) for H in heads}

    def outputs(*layers):
        pools = [(x[H], pool_of(slots[H], T // p + 1, p, rope=ROPE, H=H)) for H in layers]
        rows, table = Rows(4), torch.arange(T // p + 1, dtype=torch.int32)[None]
        for first, last in ((0, T), (T, T), (T, T + 20)):
            step = EngineStep.plan([0, last - first], [last], table, p, rows)
            for (query, key, value), pool in pools:
                own = slice(first, last)
                pool.write(key[own], value[own], step)
                yield pool.attend(query[own], key[own], value[own], step)

    together = list(outputs(*heads))
    for i, H in enumerate(heads):
        assert all(map(torch.equal, together[i :: len(heads)], outputs(H)))
