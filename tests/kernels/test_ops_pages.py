"""Attention over pages anywhere in a pool: every layout, on every instruction set, against the
reference."""

from __future__ import annotations

import pytest
import torch

from native_calls import why_not
from packed_views import FORMATS
from tersekv.codecs import methods
from tersekv.kernels import backends, cpu
from tersekv.kernels.attend_packed import attend_packed
from tersekv.kernels.attend_pages import attend_pages
from tersekv.kernels.cpu import attend as cpu_attend

MISSING = cpu.why_not_built()
ISAS = [] if MISSING else [name for name, missing in cpu.isas().items() if missing is None]
PAGEABLE = [
    "grid", "grid 3", "grid 5", "grid 7", "grid 5 with factors", "polar", "polar other bits", "joined",
    "signs without codes", "sparse blocks",
]  # fmt: skip


def pool(name: str, B: int, tokens: int, D: int = 64):
    """Return operands of keys and values of `tokens` tokens, shared by B rows."""
    method, options = FORMATS[name]
    pair, sides = methods()[method].build(**options), []
    with backends.forced("auto"):  # encoding has its own kernels
        for codec in (pair.keys, pair.values):
            x = torch.randn(1, 2, tokens, D)
            codec = codec.fit(x)
            planes = {key: plane.contiguous().expand(B, *plane.shape[1:]) for key, plane in codec.encode(x).items()}
            sides.append(codec.view(planes, D).inner.operand)
    return sides


def call(name: str, p: int, R: int = 6, q: int = 2):
    """Return a call of two rows with pages in any order, one of them short, and some tokens masked."""
    torch.manual_seed(0)
    keys, values = pool(name, 2, 7 * p)
    pages = torch.tensor([[5, 0, 3, 6], [2, 1, -1, -1]], dtype=torch.int32)
    mask = torch.rand(2, q, 4 * p) < 0.9
    mask[1, :, 2 * p - 3 :] = False
    mask[0, 0, : 2 * p] = False
    return torch.randn(2, 2, R, 64), keys, values, pages, p, mask, 0.125, None


@pytest.mark.skipif(MISSING is not None, reason=f"{MISSING}")
@pytest.mark.parametrize("p", [32, 96])
@pytest.mark.parametrize("name", PAGEABLE)
@pytest.mark.parametrize("isa", ISAS)
def test_kernels_read_pages_in_any_order(isa, name, p):
    args = call(name, p)
    assert why_not(cpu_attend.attend_pages, *args) is None
    cpu.set_isa(isa)
    try:
        out, lse = cpu_attend.attend_pages(*args)
    finally:
        cpu.set_isa("auto")
    want, want_lse = attend_pages.reference(*args)
    torch.testing.assert_close(out, want, atol=2e-2, rtol=2e-2)  # integers multiply in bfloat16
    torch.testing.assert_close(lse, want_lse, atol=2e-2, rtol=2e-2)


def test_consecutive_pages_are_a_segment():
    query, keys, values, _, p, _, scaling, cap = call("grid", 32)
    mask = torch.ones(2, 1, 7 * p, dtype=torch.bool)
    pages = torch.arange(7, dtype=torch.int32).expand(2, 7)
    got = attend_pages.reference(query, keys, values, pages, p, mask, scaling, cap)
    for x, y in zip(got, attend_packed.reference(query, keys, values, mask, scaling, cap), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.skipif(MISSING is not None, reason=f"{MISSING}")
@pytest.mark.parametrize("isa", ISAS)
def test_a_table_may_be_longer_than_the_pool(isa):
    query, keys, values, _, p, *rest = call("joined", 32)
    pages = torch.full((2, 200_000), -1, dtype=torch.int32)
    pages[:, 0] = 3
    mask = (pages >= 0).repeat_interleave(p, 1).unsqueeze(1)
    cpu.set_isa(isa)
    try:
        got = [
            cpu_attend.attend_pages(query, keys, values, pages[:, :n], p, mask[..., : n * p], *rest[1:])
            for n in (1, pages.shape[1])
        ]
    finally:
        cpu.set_isa("auto")
    for x, y in zip(*got, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.skipif(MISSING is not None, reason=f"{MISSING}")
def test_invalid_calls():
    query, keys, values, pages, p, mask, *rest = call("grid", 32)
    for wrong, words in ((7, "expected -1 to 6, got 7"), (-2, "got -2")):
        bad = pages.clone()
        bad[1, 0] = wrong
        with pytest.raises(ValueError, match=words):
            cpu_attend.attend_pages(query, keys, values, bad, p, mask, *rest)
    with pytest.raises(ValueError, match="multiple of 32"):
        cpu_attend.attend_pages(query, keys, values, pages, 16, mask[:, :, :64], *rest)
    with pytest.raises(ValueError, match="mask: expected"):
        cpu_attend.attend_pages(query, keys, values, pages, p, mask[:, :, :-32], *rest)
    assert "int64" in why_not(cpu_attend.attend_pages, query, keys, values, pages.long(), p, mask, *rest)
    sparse = methods()["kvquant"].build(calibration="prompt").keys
    x = torch.randn(*values.decode().shape[:3], 64)
    sparse = sparse.fit(x)
    view = sparse.view(sparse.encode(x), 64).operand
    assert "order" in why_not(cpu_attend.attend_pages, query, view, values, pages, p, mask, *rest)
