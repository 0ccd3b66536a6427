"""Segments prepared once and read by one launch, for many pages, masks, RoPE and tables per row.

The number of launches is counted. On a machine without a GPU Triton interprets the kernels.
"""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import benchmark
from packed_views import FORMATS, codec_of, roped, tokens
from tersekv.kernels import backends, triton
from tersekv.kernels.attend import PackedPages
from tersekv.kernels.attend_packed import decoded
from tersekv.kernels.attend_segments import Segment
from tersekv.kernels.attend_segments import attend_segments as reference
from tersekv.layouts.base import Concat
from tersekv.layouts.mean_removed import RotatedMean
from test_ops_triton import Counted, compare, device, moved, pytestmark, right  # noqa: F401

B, H, D, R = 1, 2, 64, 3


@pytest.fixture
def two_rows(monkeypatch):
    """Give the test two batch rows. Others have one, because the interpreter runs a program for each row and head."""
    monkeypatch.setattr(f"{__name__}.B", 2)


def pages_of(name, side, sizes):
    """Return views of one layer's pages of these sizes. The codec is fitted on all tokens."""
    with backends.forced("auto"):  # encoding has its own tests
        x = tokens(B, H, sum(sizes), D)
        codec = codec_of(name, side).fit(x)
        return [codec.view(codec.encode(part), D).inner for part in x.split(list(sizes), dim=2)]


def segments_of(keys, values, masks=None):
    """Return packed segments as a layer's store passes them."""
    masks = masks or [None] * len(keys)
    return [Segment(k.operand, v.operand, m, True) for k, v, m in zip(keys, values, masks, strict=True)]


def exact(n, dtype=torch.bfloat16, mask=None):
    return Segment(torch.randn(B, H, n, D).to(dtype), torch.randn(B, H, n, D).to(dtype), mask)


def on(device, segments):  # noqa: F811
    """Move the segments to a device."""
    return [Segment(*(moved(x, device) for x in s[:3]), s.is_page) for s in segments]


def check(device, segments, softcap=None, query=None):  # noqa: F811
    """Compare all segments with the reference."""
    query = torch.randn(B, H, R, D).bfloat16().float() if query is None else query
    expected = right(reference, query, segments, D**-0.5, softcap)
    result = backends.attend_segments(query.to(device), on(device, segments), D**-0.5, softcap)
    most = max(float((query @ decoded(s.keys).mT).abs().max()) for s in segments)
    compare(result, expected, most * D**-0.5)
    return result


@pytest.fixture
def launched(monkeypatch):
    """Record the names of launched attention kernels."""
    from tersekv.kernels.triton import launch

    names = []
    for module, name in ((launch.kernels, "attend"), (launch.kernels, "merge_parts"), (launch.maps, "finish")):
        monkeypatch.setattr(module, name, Counted(getattr(module, name), name, names))
    return names


@pytest.fixture
def short_splits(monkeypatch):
    """Use splits of 64 or 128 tokens, which begin and end within pages and cross their ends."""
    from tersekv.kernels.triton import launch

    plan = launch.plan
    monkeypatch.setattr(launch, "plan", lambda *call: (p := plan(*call))._replace(split_tokens=max(64, 32 * p.blocks)))


def sizes_of(name):
    """Return three page sizes; two blocks each if channels of blocks differ (else another launch)."""
    wide = "grid 6 per channel", "grid per channel with factors", "signs per group"
    return (64, 128, 64) if name in wide else (32, 96, 64)


@pytest.mark.parametrize("number", range(len(FORMATS)), ids=list(FORMATS))
def test_pages_of_different_sizes(device, number, launched, short_splits):  # noqa: F811
    """Each layout on both sides, together with attention sinks and a recent window."""
    name = list(FORMATS)[number]
    torch.manual_seed(number)
    sizes = sizes_of(name)
    keys, values = (pages_of(name, side, sizes) for side in ("keys", "values"))
    check(device, [exact(4), *segments_of(keys, values), exact(37)], softcap=(None, 20.0)[number % 2])
    assert launched.count("attend") == 2


@pytest.mark.parametrize("name", ["grid", "polar", "sparse", "sparse blocks", "signs", "trellis"])
@pytest.mark.parametrize("rows", ["shared", "per row"])
def test_pages_before_rope(device, name, rows, launched, two_rows):  # noqa: F811
    """Each page begins at its own position; `shared` positions are consecutive in a page."""
    torch.manual_seed(len(name))
    sizes = (32, 96, 64)
    keys, values = pages_of(name, "keys", sizes), pages_of("grid", "values", sizes)
    moved = []
    for i, (view, n) in enumerate(zip(keys, sizes, strict=True)):
        page = roped(view, "halves", D, n, "shared")
        first = torch.tensor([100 * i + 7]) if rows == "shared" else None
        of = page.rope
        places = of.angles(int(first), n) if first is not None else of.angles_at(torch.randint(0, 3000, (B, n)))
        moved.append(type(page)(view, of, places))
    check(device, segments_of(moved, values))
    assert launched.count("attend") == 1


def test_codes_with_a_rotated_mean(device, launched, two_rows):  # noqa: F811
    """The mean of each page is rotated to the page's own positions."""
    torch.manual_seed(0)
    sizes = (64, 32, 96)
    of = roped(pages_of("grid", "keys", (32,))[0], "halves", D, 32).rope
    mean, first, keys = torch.randn(1, H, D), 5, []
    for view, n in zip(pages_of("trellis", "keys", sizes), sizes, strict=True):
        keys.append(Concat([(view, D), (RotatedMean(mean, of, of.angles(first, n)), D)]))
        first += n
    query = torch.randn(B, H, R, 2 * D)
    check(device, segments_of(keys, pages_of("trellis", "values", sizes)), query=query)
    assert launched.count("attend") == 1


@pytest.mark.parametrize("q", [1, R])
@pytest.mark.parametrize("masked", [(True,) * 3, (False, True, False), (True, False, True)], ids=str)
def test_masked_pages(device, q, masked, launched, short_splits, two_rows):  # noqa: F811
    torch.manual_seed(q)
    sizes = (32, 160, 96)
    masks = [torch.rand(B, q, n) < 0.6 if there else None for n, there in zip(sizes, masked, strict=True)]
    if all(masked):
        masks[1][:] = False  # a fully masked page
        for mask in masks:
            mask[0, -1] = False  # and a fully masked row
    keys, values = pages_of("grid", "keys", sizes), pages_of("grid 7", "values", sizes)
    result = check(device, segments_of(keys, values, masks))
    if all(masked):
        hidden = range(q - 1, R, q)
        assert torch.equal(result[0][0][:, hidden], torch.zeros_like(result[0][0][:, hidden]))
        assert result[1][0][:, hidden].isneginf().all()
    check(device, [*segments_of(keys, values, masks), exact(5, mask=torch.rand(B, H, q, 5) < 0.6)])
    assert launched.count("attend") == 3


def test_columns_of_one_mask_are_read_where_they_are(two_rows):
    from tersekv.kernels.triton.page_set import joined_mask

    mask, sizes = torch.rand(B, R, 40) < 0.5, (7, 1, 20)
    columns = [mask[..., 4:11], mask[..., 11:12], mask[..., 12:32]]
    joined = joined_mask(columns, sizes)
    assert joined.untyped_storage().data_ptr() == mask.untyped_storage().data_ptr()
    assert torch.equal(joined[:, 0], mask[..., 4:32])
    apart = [mask[..., 4:11], mask[..., 12:13], mask[..., 12:32]]
    for others in (apart, [*columns[:2], None], [columns[0], columns[1].clone(), columns[2]]):
        whole = [torch.ones(B, R, n, dtype=torch.bool) if m is None else m for m, n in zip(others, sizes, strict=True)]
        assert torch.equal(joined_mask(others, sizes)[:, 0], torch.cat(whole, -1))
    heads = [torch.rand(B, H, R, n) < 0.5 for n in sizes]
    assert torch.equal(joined_mask(heads, sizes), torch.cat(heads, -1))
    assert joined_mask([None] * 3, sizes) is None


@pytest.mark.parametrize("name", ["polar online", "sparse", "trellis"])
def test_batch_rows_with_their_own_tables(device, name, launched, two_rows):  # noqa: F811
    """Tables are fitted per row: one row's pages with the other's tables are far off."""
    torch.manual_seed(3)
    sizes = (64, 32)
    with backends.forced("auto"):
        x = tokens(B, H, sum(sizes), D) * torch.tensor([1.0, 5.0]).view(B, 1, 1, 1)
        codec = codec_of(name, "keys").fit(x)
        keys = [codec.view(codec.encode(part), D).inner for part in x.split(list(sizes), dim=2)]
    check(device, segments_of(keys, pages_of("grid", "values", sizes)))
    assert launched.count("attend") == 1


def test_pages_of_different_layouts(device, launched, two_rows):  # noqa: F811
    """One launch each. Outputs that need their own map are merged separately."""
    torch.manual_seed(4)
    segments = [
        *segments_of(pages_of("grid", "keys", (32, 64)), pages_of("grid", "values", (32, 64))),
        *segments_of(pages_of("polar", "keys", (32, 64)), pages_of("signs alone", "values", (32, 64))),
        exact(3), exact(2, torch.float32), exact(1),
    ]  # fmt: skip
    check(device, segments)
    assert launched.count("attend") == 4


def test_many_exact_segments(device, launched):  # noqa: F811
    """A launch takes at most four as arguments, because each number of arguments is compiled."""
    torch.manual_seed(5)
    check(device, [exact(n) for n in (1, 32, 5, 33, 64, 2)])
    assert launched == ["attend", "attend", "finish"]


def test_values_of_other_channels_than_exact_ones_are_not_mixed(device):  # noqa: F811
    """The kernel adds sums of two layouts if their channels are the same."""
    from tersekv.kernels.triton import trees

    view = pages_of("sparse", "values", (32,))[0]
    made = trees.values(view.operand, torch.device("cpu"))
    assert (made.plain, made.channels, len(made.leaves)) == (True, D, 2)
    sketched = trees.values(pages_of("signs", "values", (32,))[0].operand, torch.device("cpu"))
    assert not sketched.plain


@pytest.mark.parametrize("name", benchmark("launches").ATTENDED)
def test_launches_do_not_depend_on_the_number_of_pages(device, name):  # noqa: F811
    """One launch reads exact tokens and maps the query, one reads all pages, one merges and maps the output back."""
    if device == "cuda":
        pytest.skip("only counted with interpreted kernels")
    launches = benchmark("launches")
    few, many = (launches.attending(launches.ATTENDED[name], pages) for pages in (1, 20))
    sketches = 8 if name == "signs" else 0  # torch sketches the query
    assert few == many == {"kernels": {"attend": 2, "finish": 1}, "torch": sketches, "waits": 0}


class NoWork(TorchDispatchMode):
    """A mode in which torch may only allocate or view."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        assert op.is_view or "empty" in op.name(), f"{op} ran"
        return op(*args, **(kwargs or {}))


@pytest.fixture
def kernels_alone(monkeypatch):
    """Run interpreted kernels outside the counting mode."""
    from torch.utils._python_dispatch import _disable_current_modes
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def outside(kernel, *args, **options):
        with _disable_current_modes():
            run(kernel, *args, **options)

    monkeypatch.setattr(InterpretedFunction, "run", outside)


@pytest.mark.parametrize("name", ["grid", "polar", "sparse", "trellis"])
def test_a_step_builds_nothing(device, name, kernels_alone, monkeypatch):  # noqa: F811
    """After the first call with as many query rows there are only launches, for any page count."""
    if device == "cuda":
        pytest.skip("only checked with interpreted kernels")
    from tersekv.kernels.triton import leaves, trees

    torch.manual_seed(6)
    sizes = (32, 64, 32)
    segments = segments_of(pages_of(name, "keys", sizes), pages_of(name, "values", sizes))
    page_set = triton.prepare(segments)
    query = torch.randn(B, H, R, D)
    first = triton.attend(query, page_set, None, 0.125, None)
    for module, called in ((trees, "keys"), (trees, "values"), (leaves, "field_codes")):
        monkeypatch.setattr(module, called, None)
    with NoWork():
        again = triton.attend(query, page_set, None, 0.125, None)
    for x, y in zip(first, again, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("name", FORMATS)
def test_why_not_does_no_work(device, side, name):  # noqa: F811
    if device == "cuda":
        pytest.skip("checks do not depend on the device")
    torch.manual_seed(7)
    view = pages_of(name, side, sizes_of(name)[:1])[0]
    grid = pages_of("grid", "values" if side == "keys" else "keys", sizes_of(name)[:1])[0]
    keys, values = (view, grid) if side == "keys" else (grid, view)
    query = torch.randn(B, H, R, D)
    operands = [keys.operand]
    if side == "keys":
        before_rope = roped(keys, "halves", D, sizes_of(name)[0])
        triton.why_not_attend_packed(query, before_rope, values.operand, None, 0.1, None)  # RoPE's own tables
        operands.append(before_rope)
    with NoWork():
        for operand in operands:
            assert triton.why_not_attend_packed(query, operand, values.operand, None, 0.1, None) is None


def test_a_page_set_is_built_when_pages_change_and_not_otherwise(device, monkeypatch):  # noqa: F811
    from tersekv.attention.read import AttentionCall, attend_store
    from tersekv.kernels.triton import page_set
    from test_store import fed
    from test_store import tokens as inputs

    made, group = [], page_set.Group

    class Noted(group):
        def __init__(self, parts, numbers, tabled, device):
            super().__init__(parts, numbers, tabled, device)
            if tabled:
                made.append([part.tokens for part in parts])

    monkeypatch.setattr(page_set, "Group", Noted)
    keys, values = inputs(400)
    store = fed("window:sinks=4,recent=32+kivi:bits=4", keys[:, :, :290], values[:, :, :290], [0, 160, 290])
    store.to(device)
    query, packed = torch.randn(1, 4, 1, 64), []
    for at in range(290, 368):
        with backends.forced("auto"):
            store.append(*(x[:, :, at : at + 1].to(device) for x in (keys, values)))
        if at % 6:
            continue
        got = attend_store(store, AttentionCall(query.to(device), None, 0.125)).cpu()
        tokens_packed = [page.tokens for page in store.packed_pages()]
        packed += [tokens_packed] if packed[-1:] != [tokens_packed] else []
        assert made == packed
        if at % 24 == 0:
            with backends.forced("reference"):
                expected = attend_store(store, AttentionCall(query.to(device), None, 0.125)).cpu()
            assert (got - expected).norm() <= 4e-3 * expected.norm()
    assert len(packed) == 3
    store.select(torch.tensor([0]))
    attend_store(store, AttentionCall(query.to(device), None, 0.125))
    assert len(made) == 4, "rows were copied to other places"


def test_other_pages_in_the_same_call_are_another_set(device):  # noqa: F811
    """The first page stays, and other pages follow it."""
    torch.manual_seed(8)
    sizes = (32, 64, 96)
    segments = segments_of(pages_of("grid", "keys", sizes), pages_of("grid", "values", sizes))
    for chosen in (segments, segments[:2], [segments[0], segments[2]], segments[::-1], segments):
        check(device, chosen)


def test_a_page_set_is_freed_with_its_pages(device):  # noqa: F811
    """No reference cycle keeps the prepared data of a layer's pages alive until garbage collection."""
    keys, values = pages_of("sparse", "keys", (32, 64)), pages_of("sparse", "values", (32, 64))
    views = [[moved(x.operand, device) for x in side] for side in (keys, values)]
    pages = PackedPages(*views, [0, 32], [32, 64], (keys[0].linear, values[0].linear), H)
    call = torch.randn(B, H, 1, D, device=device), (), pages, None, None, 1.0
    backends.attend(*call)
    (held,) = (weakref.ref(page_set) for page_set in pages.made["triton"].values())
    backends.attend(*call)
    assert list(pages.made["triton"].values()) == [held()]
    del pages, call
    assert held() is None


def test_segments_of_a_step_are_added(device, two_rows):  # noqa: F811
    """`with_segments` does not change the page set; masks are in the order of preparation."""
    torch.manual_seed(9)
    sizes = (64, 32)
    pages = on(device, segments_of(pages_of("grid", "keys", sizes), pages_of("grid", "values", sizes)))
    page_set, query = triton.prepare(pages), torch.randn(B, H, R, D)
    for n in (3, 4):
        more = [exact(n), exact(9)]
        masks = [torch.rand(B, 1, s) < 0.7 for s in (*sizes, n, 9)]
        whole = page_set.with_segments(on(device, more))
        got = triton.attend(query.to(device), whole, [m.to(device) for m in masks], 0.125, None)
        all_of_them = [s._replace(mask=m) for s, m in zip([*moved(pages, "cpu"), *more], masks, strict=True)]
        compare(got, right(reference, query, all_of_them, 0.125, None), 10.0)
    assert (page_set.segments, len(page_set.groups)) == (2, 1)


def test_prepare_says_why_not(device):  # noqa: F811
    keys, values = pages_of("grid", "keys", (32, 64)), pages_of("grid", "values", (32, 64))
    segments = on(device, segments_of(keys, values))
    scale = segments[1].keys._replace(scale=segments[1].keys.scale.float())
    assert "a scale of torch.float32" in str(triton.prepare([segments[0], segments[1]._replace(keys=scale)]))
    assert not isinstance(triton.prepare(segments), str)
    with pytest.raises(ValueError, match="expected T = 32 tokens like the keys, got 64"):
        triton.prepare([segments[0]._replace(values=segments[1].values)])


def test_types_of_fields():
    """A 64-bit integer anywhere makes the field 64-bit. Common multiples of 16 are declared."""
    from tersekv.kernels.triton import leaves

    x = torch.zeros(64, dtype=torch.float16)
    pages = [(x, x[1:], 16, 48, 2**31, 0.5), (x[8:], x, 32, 3, 16, 2.0)]
    constants = leaves.ADDRESS_OF_FLOAT16, leaves.INT32_FIELD, leaves.INT64_FIELD, leaves.FLOAT_FIELD
    address, int32, int64, real = (constant.value for constant in constants)
    aligned = int(x.data_ptr() % 16 == 0)
    assert leaves.field_codes(pages) == (address + aligned, address, int32 + 1, int32, int64 + 1, real)
    assert leaves.number(0.5) == int(torch.tensor(0.5).view(torch.int32))
    assert leaves.number(-2.0) == int(torch.tensor(-2.0).view(torch.int32)) + 2**32
