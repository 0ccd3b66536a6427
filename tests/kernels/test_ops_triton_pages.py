"""The Triton kernel over pages anywhere in a pool against the torch reference.

Without a GPU it runs in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

from tersekv.codecs import methods
from tersekv.kernels import backends, triton
from tersekv.kernels.attend_pages import attend_pages as reference
from test_ops_pages import PAGEABLE, call, pool
from test_ops_trellis_attend import stream_view
from test_ops_triton import compare, device, moved, pytestmark, right  # noqa: F401


def attend(device, *args):  # noqa: F811
    """Attend on the device."""
    args = [moved(x, device) for x in args]
    return backends.attend_pages.direct(*args)


def run(device, args):  # noqa: F811
    """Attend on the device and compare with the reference."""
    result, expected = attend(device, *args), right(reference, *args)
    key = getattr(args[1], "operand", args[1])
    key = key.float() if isinstance(key, torch.Tensor) else key.decode()
    compare(result, expected, float((args[0] @ key.mT).abs().max()) * args[6])
    return result


PAGE_TOKENS = {"grid 3": 96, "grid 7": 32}
"""Page sizes instead of 64, which no tile of 64 tokens divides."""


@pytest.mark.parametrize("number", range(len(PAGEABLE)), ids=PAGEABLE)
def test_pages_in_any_order(device, number):  # noqa: F811
    name = PAGEABLE[number]
    run(device, call(name, PAGE_TOKENS.get(name, 64), *((6, 2), (5, 1))[number % 2]))


def test_softcap(device):  # noqa: F811
    run(device, (*call("grid", 32)[:-1], 1.0))


@pytest.mark.parametrize("form", ["exact", "signs", "trellis", "blocks of 64"])
def test_other_layouts(device, form):  # noqa: F811
    p = 64 if form == "blocks of 64" else 32
    query, _, values, pages, p, mask, *rest = call("grid", p)
    x = torch.randn(1, 2, 7 * p, 64)
    if form == "exact":
        keys = values = x.half().expand(2, -1, -1, -1)
    elif form == "trellis":
        keys = stream_view(2, 2, 7 * p)
    else:
        method, options = ("qjl", {"outliers": 0}) if form == "signs" else ("uniform", {"axis": "channel", "group": 64})
        codec = methods()[method].build(**options).keys
        planes = {name: plane.expand(2, *plane.shape[1:]) for name, plane in codec.encode(x).items()}
        keys = codec.view(planes, 64).operand
    run(device, (query, keys, values, pages, p, mask, *rest))


def test_splits_that_begin_inside_a_page(device, monkeypatch):  # noqa: F811
    from tersekv.kernels.triton import launch

    plan = launch.plan
    monkeypatch.setattr(launch, "plan", lambda *call: plan(*call)._replace(splits=3, split_tokens=160))
    run(device, call("grid", 96))


def test_unused_pages_are_not_read(device):  # noqa: F811
    """A page of the pool that no row uses is all NaN. The table has unused entries at its end and
    between others."""
    query, keys, values, pages, p, mask, *rest = call("grid 3", 32)
    for side in (keys, values):
        side.scale[:1, :, 4] = float("nan")
    pages = torch.nn.functional.pad(pages, (0, 66), value=-1)
    pages[0, 5], pages[0, 1] = pages[0, 1], -1
    seen = torch.zeros(2, 2, 70 * p, dtype=torch.bool)
    seen[..., : 4 * p] = mask
    seen[0, :, 5 * p : 6 * p] = True
    seen[0, :, p : 2 * p] = False
    assert run(device, (query, keys, values, pages, p, seen, *rest))[0].isfinite().all()


def test_fully_masked_rows(device):  # noqa: F811
    query, keys, values, pages, p, mask, *rest = call("polar", 32)
    pages[1] = -1
    mask[1] = False
    mask[0, 1] = False
    out, lse = run(device, (query, keys, values, pages, p, mask, *rest))
    for nothing in (slice(1, 2), slice(0, 1)):
        rows = slice(None) if nothing.start else slice(1, None, 2)
        assert torch.equal(out[nothing, :, rows], torch.zeros_like(out[nothing, :, rows]))
        assert lse[nothing, :, rows].isneginf().all()
    out, lse = attend(device, query, keys, values, pages[:, :0], p, mask[..., :0], *rest)
    assert torch.equal(out, torch.zeros_like(out))
    assert lse.isneginf().all()


def test_invalid_page_numbers(device):  # noqa: F811
    """They are treated as empty: nothing outside the pool is read, for any mask."""
    query, keys, values, pages, p, mask, *rest = call("grid", 32)
    without, wild = pages.clone(), pages.clone()
    without[0, 1], wild[0, 1], wild[1, 2], wild[1, 3] = -1, 7, -5, 2**31 - 1
    mask[1, :, 2 * p :] = True
    hidden = mask.clone()
    hidden[0, :, p : 2 * p] = hidden[1, :, 2 * p :] = False
    expected = run(device, (query, keys, values, without, p, hidden, *rest))
    got = attend(device, query, keys, values, wild, p, mask, *rest)
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y)


def test_a_table_of_more_tokens_than_the_pool(device):  # noqa: F811
    """As of a sliding window, whose earlier pages are −1. The latest page is read."""
    query, keys, values, pages, p, mask, *rest = call("grid", 32)
    before = pages.new_full((len(pages), 12), -1)
    hidden = torch.zeros((*mask.shape[:-1], 12 * p), dtype=torch.bool)
    longer = torch.cat([before, pages], 1), p, torch.cat([hidden, mask], -1)
    expected = attend(device, query, keys, values, pages, p, mask, *rest)
    for x, y in zip(attend(device, query, keys, values, *longer, *rest), expected, strict=True):
        torch.testing.assert_close(x, y)


def test_queries_of_any_strides(device):  # noqa: F811
    """One query row, whose axis has the stride of a transposed tensor."""
    query, keys, values, pages, p, mask, *rest = call("grid", 32)
    one = query[:, :, :1].transpose(1, 2).contiguous().transpose(1, 2)
    assert one.is_contiguous()
    mask = mask[:, :1]
    expected = run(device, (query[:, :, :1].clone(), keys, values, pages, p, mask, *rest))
    for x, y in zip(attend(device, one, keys, values, pages, p, mask, *rest), expected, strict=True):
        torch.testing.assert_close(x, y)


def test_invalid_calls(device):  # noqa: F811
    query, keys, values, pages, p, mask, *rest = call("grid", 32)
    for p_, words in ((16, "multiple of 32"), (64, "mask: expected")):
        with pytest.raises(ValueError, match=words):
            attend(device, query, keys, values, pages, p_, mask, *rest)
    wide = methods()["uniform"].build(bits=3, axis="channel", group=64).keys
    x = torch.randn(2, 2, 7 * 64, 64)
    keys, values = wide.view(wide.encode(x), 64).operand, pool("grid", 2, 7 * 64)[1]
    with pytest.raises(ValueError, match="multiple of 64"):
        attend(device, query, keys, values, pages, p, mask, *rest)


def test_why_not(device):  # noqa: F811
    if device == "cuda":
        pytest.skip("refusals do not depend on the device")
    from packed_views import packed, roped, tokens

    query, keys, values, pages, p, mask, *rest = call("grid", 32)
    why_not = triton.why_not_attend_pages
    assert "int64" in str(why_not(query, keys, values, pages.long(), p, mask, *rest))
    with backends.forced("auto"):  # encoding has its own kernels
        outliers = packed("sparse", "keys", tokens(2, 2, 64, 64))
    assert "have a list of outliers, so a page table cannot reorder" in str(
        why_not(query, outliers.operand, values, pages, p, mask, *rest)
    )
    keys_with_rope = roped(packed("grid", "keys", tokens(2, 2, 64, 64)), "halves", 64, 64)
    assert "RoPE" in str(why_not(query, keys_with_rope, values, pages, p, mask, *rest))


def test_a_pool_of_an_engine(device, monkeypatch):  # noqa: F811
    """Requests of three lengths, one within its first page. Packed pages are passed to the kernel
    on their own device."""
    from tersekv.kernels.triton import launch
    from tersekv.serving.dense import AttentionKind
    from tersekv.serving.pages import PagePool
    from tersekv.serving.steps import EngineStep, Rows
    from test_serving_pages import decoded, expected, slots_of

    torch.manual_seed(3)
    slots, p, seen = slots_of("turboquant"), 32, (70, 9, 33)
    keys, values, queries = (torch.randn(3, 70, n, 64) for n in (2, 2, 6))
    tables = torch.tensor([[4, 2, 0], [1, -1, -1], [3, 5, -1]], dtype=torch.int32)
    memory = torch.zeros(6, 2, p, slots.token_bytes, dtype=torch.uint8, device=device)
    pool, rows = PagePool(slots, memory, AttentionKind(0.125)), Rows(6)
    sides = [torch.cat([x[i, : n - 1] for i, n in enumerate(seen)]).to(device) for x in (keys, values)]
    with backends.forced("auto"):
        pool.write(*sides, EngineStep.plan([0, 69, 77, 109], [69, 8, 32], tables, p, rows).to(memory.device))
    called = []
    run_kernel = launch.attend_pages
    monkeypatch.setattr(launch, "attend_pages", lambda *call: called.append(call) or run_kernel(*call))
    step = EngineStep.plan([0, 1, 2, 3], list(seen), tables, p, rows).to(memory.device)
    latest = [torch.stack([x[i, n - 1] for i, n in enumerate(seen)]).to(device) for x in (queries, keys, values)]
    pool.write(*latest[1:], step)
    out = pool.attend(*latest, step).cpu()
    assert len(called) == 1
    for i, n in enumerate(seen):
        hats = right(decoded, slots, keys[i, :n], values[i, :n])
        own = right(expected, queries[i, n - 1 : n], keys[i, :n], values[i, :n], hats, p, "step")
        torch.testing.assert_close(out[i : i + 1], own, atol=4e-3, rtol=4e-3)
