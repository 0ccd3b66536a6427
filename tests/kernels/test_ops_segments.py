"""One call over many segments, on every instruction set of this machine, compared with a loop over
single calls.

Each segment's bounds are in `test_ops_packed.py`. Merging adds an error of a few ulps of the
largest log-sum-exp.
"""

import pytest
import torch

from native_calls import ROUNDING_ISAS, why_not
from packed_views import packed, roped, tokens
from tersekv.kernels.attend import merge_chunk
from tersekv.kernels.attend_segments import Segment, attend_segments
from tersekv.kernels.cpu import attend as cpu_attend
from test_ops_parity import BF16_ULP, ULP, isa, one_thread, poisoned_outputs, pytestmark, two_threads  # noqa: F401

PAGES = {
    "pages": [("grid", "grid", 640), ("grid", "grid", 128), ("grid", "grid", 32)],
    "sinks, pages, tail": [("exact", "exact", 3), ("grid 3", "grid", 256), ("sparse", "grid 5", 128),
                           ("exact", "exact", 37)],
    "one": [("polar", "signs", 96)],
    "nothing in one": [("grid", "grid", 64), ("exact", "exact", 0)],
    "before RoPE": [("roped", "grid", 1088), ("exact", "exact", 5)],
}  # fmt: skip


def segment(kinds, T, mask):
    views = []
    for kind, side in zip(kinds, ("keys", "values"), strict=True):
        x = tokens(2, 3, T, 64)
        if kind == "exact":
            views.append(x.half() if side == "keys" else x)
        else:
            view = packed("sparse" if kind == "roped" else kind, side, x).inner
            views.append((roped(view, "halves", 64, T) if kind == "roped" else view).operand)
    return Segment(*views, mask)


def call(name, R, q):
    torch.manual_seed(len(name))
    masks = [None if q is None or not T else torch.rand(2, q, T) < 0.7 for *_, T in PAGES[name]]
    segments = [segment(kinds, T, mask) for (*kinds, T), mask in zip(PAGES[name], masks, strict=True)]
    return torch.randn(2, 3, R, 64), segments, 0.125, None if R == 4 else 2.0


@pytest.mark.parametrize(("R", "q"), [(1, None), (4, 2), (6, 3)])
@pytest.mark.parametrize("name", PAGES)
def test_segments(isa, name, R, q):  # noqa: F811
    args = call(name, R, q)
    assert why_not(cpu_attend.attend_segments, *args) is None
    out, lse = cpu_attend.attend_segments(*args)
    single = [cpu_attend.attend_packed(args[0], *one[:3], *args[2:]) for one in args[1]]
    joined, joined_lse = cpu_attend.merge_segments([o for o, _ in single], [s for _, s in single])
    # beside codes of 5 bits, those of 3 are multiplied in tiles, which do not round them
    unit = BF16_ULP if isa in ROUNDING_ISAS and name == "sinks, pages, tail" and R > 4 else 64 * ULP
    torch.testing.assert_close(out, joined, rtol=0, atol=unit * float(joined.abs().max()))
    torch.testing.assert_close(lse, joined_lse, rtol=0, atol=unit * float(joined_lse.abs().max()))
    if isa not in ROUNDING_ISAS:  # its bounds are in test_ops_parity.py
        expected, expected_lse = attend_segments.reference(*args)
        assert (out - expected).norm() <= 1e-4 * expected.norm()
        torch.testing.assert_close(lse, expected_lse, rtol=0, atol=2e-3)


def test_threads_share_the_segments(two_threads):  # noqa: F811
    args = call("pages", 4, None)
    out, _ = cpu_attend.attend_segments(*args)
    torch.set_num_threads(1)
    torch.testing.assert_close(out, cpu_attend.attend_segments(*args)[0], rtol=0, atol=0.02)


def test_a_fully_masked_row():
    query, segments, *rest = call("pages", 2, 1)
    hidden = [one._replace(mask=torch.zeros_like(one.mask)) for one in segments]
    out, lse = cpu_attend.attend_segments(query, hidden, *rest)
    assert torch.equal(out, torch.zeros_like(out))
    assert lse.isneginf().all()


def test_refusals_name_the_segment():
    query, segments, *rest = call("sinks, pages, tail", 2, None)
    other = segments[0]._replace(values=segments[0].values[..., :32])
    with pytest.raises(ValueError, match="pages: expected the same number of channels in all pages"):
        cpu_attend.attend_segments(query, [segments[1], other], *rest)
    wrong = segments[0]._replace(mask=torch.ones(2, 1, 3))
    told = why_not(cpu_attend.attend_segments, query, [*segments, wrong], *rest)
    assert told == "positions is torch.float32, not int64 or int32 or bool"
    double = segments[0]._replace(keys=segments[0].keys.double())
    assert "tokens is torch.float64" in why_not(cpu_attend.attend_segments, query, [*segments, double], *rest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize(("B", "H", "G", "q", "D"), [(1, 1, 4, 70, 80), (2, 3, 2, 1, 64), (1, 3, 1, 130, 16)])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_chunks_are_merged_from_any_strides(dtype, segments, B, H, G, q, D, with_sinks):
    """Some rows see nothing in one segment, the first rows see nothing at all, and the second ones NaN."""
    torch.manual_seed(0)
    lses = [torch.randn(B, G * q, H).transpose(1, 2) * 5 for _ in range(segments)]
    lses[-1][:, :, -1] = float("-inf")
    for lse in lses:
        lse[:, :, 0] = float("-inf")
    if segments > 1:  # one segment's output is taken as it is
        lses[0][0, :, 1] = float("nan")
    outs = [torch.randn(B, G * q, H, D).transpose(1, 2) for _ in range(segments)]
    outs = [out.masked_fill_(lse.isneginf()[..., None], 0.0) for out, lse in zip(outs, lses, strict=True)]
    query, sinks = torch.zeros(B, H * G, q, D, dtype=dtype), torch.randn(H * G) if with_sinks else None
    found = cpu_attend.merge_chunk(outs, lses, query, sinks)
    expected = merge_chunk.reference(outs, lses, query, sinks)
    atol = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(found, expected, rtol=0, atol=atol, equal_nan=True)
    assert found[0].isnan().any(-1).sum() == (H if segments > 1 else 0)
    with pytest.raises(ValueError, match="lses: expected"):
        cpu_attend.merge_chunk(outs, [lse[:, :, :0] for lse in lses], query, sinks)
