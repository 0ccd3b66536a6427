"""Refusals of the packed operator, and damaged bytes: none of them ends the process."""

import pytest
import torch

from native_calls import why_not
from packed_views import FORMATS, packed, rope, roped, tokens
from tersekv.kernels import backends, cpu
from tersekv.kernels.cpu import attend as cpu_attend
from tersekv.layouts.roped import Roped
from tersekv.layouts.sparse import SparseBlocksView, SparseView

native = pytest.mark.skipif(cpu.why_not_built() is not None, reason="the native extension is not built")
pytestmark = native


@pytest.fixture
def call():
    torch.manual_seed(0)
    x = tokens(1, 2, 64, 64)
    views = {name: packed(name, "keys", x).inner for name in FORMATS}
    return lambda keys, query=None: cpu_attend.attend_packed(
        torch.randn(1, 2, 3, 64) if query is None else query,
        views[keys].operand if isinstance(keys, str) else keys.operand,
        packed("grid", "values", x).operand, None, 0.125, None,
    ), views  # fmt: skip


def overlay(starts, places, D=64):
    """Return two blocks of two heads with the given starts and places."""
    planes = {"outlier_starts": torch.tensor(starts, dtype=torch.int32).view(1, 2, 2)}
    planes["outlier_places"] = torch.tensor(places).to(torch.int16)
    planes["outlier_values"] = torch.ones(len(places), dtype=torch.float16)
    return SparseView(planes, D)


@pytest.mark.parametrize("starts", [
    [0, 10**9, 0, 2], [0, -5, -(2**31), 2**31 - 1], [7, 0, 2, 1], [2**31 - 1, 0, 0, 0], [-(2**31), 5, 5, 5],
    [3, 2, 1, 0],
])  # fmt: skip
def test_starts_out_of_bounds_are_cut(call, starts):
    run, _ = call
    view = overlay(starts, [0, 63, 31 << 11, 31 << 11 | 63])
    for keys in (view, roped(view, "halves", 64, 64)):
        assert run(keys)[0].isfinite().all()


def test_channels_out_of_bounds_are_left_out(call):
    run, _ = call
    far = overlay([0, 1, 2, 3], [2047, 31 << 11 | 2047, 64, 1000])
    near = overlay([0, 0, 0, 0], [])
    query = torch.randn(1, 2, 3, 64)
    for wrap in (lambda view: view, lambda view: roped(view, "halves", 64, 64)):
        torch.testing.assert_close(run(wrap(far), query), run(wrap(near), query), rtol=0, atol=0)


def test_channels_of_blocks_out_of_bounds_are_left_out(call):
    run, _ = call
    places = torch.tensor([[2047, 31 << 11 | 2047], [64, 1000]] * 2).to(torch.int16).view(1, 2, 2, 2)
    far = SparseBlocksView({"outlier_places": places, "outlier_values": torch.ones(1, 2, 2, 2).half()}, 64)
    near = SparseBlocksView({"outlier_places": places % 64, "outlier_values": torch.zeros(1, 2, 2, 2).half()}, 64)
    assert not far.decode().any()
    query = torch.randn(1, 2, 3, 64)
    for wrap in (lambda view: view, lambda view: roped(view, "halves", 64, 64)):
        torch.testing.assert_close(run(wrap(far), query), run(wrap(near), query), rtol=0, atol=0)


def test_channels_of_a_sketch_are_checked(call):
    run, views = call
    view = views["signs"]
    sketch = view.sketches[1]
    view.sketches[1] = sketch._replace(channels=sketch.channels + 60)
    with pytest.raises(ValueError, match=r"channels: expected 0 to 63, got"):
        run(view)


@pytest.mark.parametrize("row", [-1, 2])
def test_rows_that_do_not_exist_are_refused(row):
    x = torch.randn(2, 1, 5, 64)
    exact = ((x, x, 0, torch.tensor([0, row])),)
    with pytest.raises(ValueError, match=f"rows: expected 0 to 1, got {row}"):
        cpu_attend.attend(torch.randn(2, 1, 1, 64), exact, None, None, None, 0.125)


CHANGES = {
    "signs": ("signs", lambda v: sketched(v, signs=v.sketches[0].signs[:, :, :, :-1]), "signs: .* M/8 = 32, got 31"),
    "norms": ("signs", lambda v: sketched(v, norms=v.sketches[0].norms[:, :, :1]), "norms: .* with N = 2, got 1"),
    "sketch": ("signs alone", lambda v: sketched(v, sketch=torch.ones(100, 60)), "expected n = 64, got 60"),
    "rows": ("signs alone", lambda v: sketched(v, sketch=v.sketches[0].sketch.mT.contiguous().mT), "stride 1 along n"),
    "angles": ("polar", lambda v: changed(v, angles=v.angles[:, :, :, 1:]), "angles: .* with bytes = 23, got 22"),
    "radii": ("polar", lambda v: changed(v, radii=v.radii[:, :1]), "radii: .* with H = 2, got 1"),
    "table": ("polar", lambda v: changed(v, tables=[v.tables[0][:15], *v.tables[1:]]), "table: .* = 16, got 15"),
    "entries": ("sparse", lambda v: parts(v, values=v.views[1].values[1:]), "outlier_values: .* with entries"),
    "values": ("sparse blocks", lambda v: parts(v, values=v.views[1].values[..., 1:]), "values: .* got 45"),
    "blocks": ("sparse blocks", lambda v: parts(v, values=v.views[1].values[:, :, :1]), "values: .* N = 2, got 1"),
    "none": ("sparse blocks", lambda v: parts(v, places=v.views[1].places[..., :0]), "per block: expected 1 to"),
    "starts": ("sparse", lambda v: parts(v, starts=v.views[1].starts[:, :, :1]), "T = 64 tokens, got 32"),
    "joined": ("joined", lambda v: changed(v, views=v.views[:1]), "expected head_dim 64 of the query, got 16"),
}  # fmt: skip


def changed(view, **fields):
    vars(view).update(fields)
    return view


def sketched(view, **fields):
    view.sketches[0] = view.sketches[0]._replace(**fields)
    return view


def parts(view, **fields):
    changed(view.views[1], **fields)
    return view


@pytest.mark.parametrize("what", CHANGES)
def test_errors_name_the_size(call, what):
    run, views = call
    name, change, text = CHANGES[what]
    with pytest.raises(ValueError, match=text):
        run(change(views[name]))


def test_rope_of_another_length_or_kind(call):
    run, views = call
    with pytest.raises(ValueError, match=r"places: .* with T = 64, got 32"):
        run(roped(views["grid"], "halves", 64, 32))
    mixing = rope("halves", 64).__class__(
        rope("halves", 64)._cos_sin, lambda x, cos, sin: x.flip(-1) * cos.sum(-1)[:, None, :, None]
    )
    view = Roped(views["grid"], mixing, mixing.angles(0, 64))
    query = torch.randn(1, 2, 3, 64)
    assert why_not(cpu_attend.attend_packed, query, view, views["exact"].operand, None, 1.0, None) == (
        "the RoPE does not rotate pairs of channels"
    )


def test_types_that_are_not_read(call):
    _, views = call
    query = torch.randn(1, 2, 3, 64)
    told = lambda keys: why_not(cpu_attend.attend_packed, query, keys, views["exact"].operand, None, 1.0, None)  # noqa: E731
    assert "radii is torch.float32" in told(changed(views["polar"], radii=views["polar"].radii.float()))
    assert "norms is torch.float64" in told(sketched(views["signs"], norms=views["signs"].sketches[0].norms.double()))
    assert "outlier_places is torch.int32" in told(parts(views["sparse"], places=views["sparse"].views[1].places.int()))


def test_masks_that_differ_by_head(call):
    _, views = call
    torch.manual_seed(1)
    query, mask = torch.randn(1, 2, 4, 64), torch.rand(1, 2, 2, 64) < 0.5
    args = query, views["polar"], views["exact"].operand, mask, 0.125, None
    with backends.forced("reference"):
        expected, expected_lse = backends.attend_packed(*args)
    out, lse = cpu_attend.attend_packed(*args)
    torch.testing.assert_close(out, expected, rtol=0, atol=3e-5 * float(views["exact"].x.abs().max()))
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
