"""The Triton search for trellis codes gives the reference's codes, because costs are added in the
same order.

Without a GPU it runs in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

from tersekv.kernels import backends
from tersekv.kernels.trellis import encode_trellis as reference
from tersekv.kernels.triton import encode as encode_trellis
from tersekv.kernels.triton import pack
from test_ops_trellis import mixed_bits, squared_error, tables
from test_ops_triton import device, pytestmark, right  # noqa: F401
from test_ops_triton_encode import poisoned  # noqa: F401


@pytest.fixture(autouse=True)
def large_programs(device, monkeypatch):  # noqa: F811
    """Interpreted programs take 16 vectors, because an instruction takes as long for one."""
    if device == "cpu":
        for module in (encode_trellis, pack):
            monkeypatch.setattr(module, "VECTORS", 16)


def check(device, y, weight, bits):  # noqa: F811
    call = y, weight, bits, tables()
    windows = backends.encode_trellis(*(x.to(device) for x in call)).cpu()
    expected = right(reference, *call)
    assert windows.dtype is torch.uint8
    assert torch.equal(windows, expected)


@pytest.mark.parametrize("rate", [1, 2, 3, 4, 5, 6, 7, 8])
def test_one_rate(device, rate):  # noqa: F811
    """Half of 48 components are searched in advance, and all of 8."""
    torch.manual_seed(rate)
    D = 48 if rate == 1 else 8
    check(device, torch.randn(1, 5, D), torch.rand(1, D) + 0.1, torch.full((1, D), rate, dtype=torch.uint8))


def test_falling_rates(device):  # noqa: F811
    """Paths take near entries but for the first components around the ring. Some components have no bits."""
    bits = torch.tensor([[6, 6, 5, 5, 5, 0, 4, 4, 0, 4, 3, 3, 3, 0], [4, 4, 4, 0, 4, 3, 3, 3, 3, 3, 3, 4, 4, 4]])
    torch.manual_seed(0)
    check(device, torch.randn(2, 5, 14), torch.rand(2, 14) + 0.1, bits.to(torch.uint8))


def test_near_entries_between_rates(device):  # noqa: F811
    """Weights follow the bits, and there are more components than costs are left to grow over."""
    bits = torch.tensor([[3, 8, 5, 7, 6, 4, 3, 3, 4, 6, 8, 7, 5, 3, 4, 5, 3, 2, 4, 1]], dtype=torch.uint8)
    torch.manual_seed(0)
    check(device, torch.randn(1, 5, 20), 4.0 ** (bits.float() - 4), bits)


def test_rows_of_mixed_rates(device):  # noqa: F811
    torch.manual_seed(0)
    y = torch.randn(2, 36, 3).transpose(1, 2)
    check(device, y, torch.rand(2, 36) ** 4, mixed_bits(2, 36))


def test_edges(device):  # noqa: F811
    """No bits at all, rings shorter than a window, weights of 0, single components."""
    torch.manual_seed(1)
    for one in ((0, 0, 0), (0, 3, 0), (6,), (4, 4, 4, 4)):
        bits = torch.tensor([one, one[::-1]], dtype=torch.uint8)
        check(device, torch.randn(2, 3, len(one)), torch.tensor([[1.0], [0.5]]).expand(2, len(one)), bits)
    nothing = torch.empty(2, 0, 3), torch.ones(2, 3), torch.ones(2, 3, dtype=torch.uint8), tables()
    none = backends.encode_trellis(*(x.to(device) for x in nothing))
    assert none.shape == (2, 0, 3)


def test_paths_that_tie(device):  # noqa: F811
    """Any of them may win."""
    y, weight, bits = torch.zeros(1, 3, 8), torch.ones(1, 8), torch.full((1, 8), 2, dtype=torch.uint8)
    windows = backends.encode_trellis(*(x.to(device) for x in (y, weight, bits, tables()))).cpu()
    errors = [squared_error(y, weight, bits, found) for found in (windows, right(reference, y, weight, bits, tables()))]
    torch.testing.assert_close(*errors, rtol=1e-6, atol=0)


def test_some_vectors_at_a_time(device, monkeypatch):  # noqa: F811
    monkeypatch.setattr(encode_trellis, "VECTORS_AT_A_TIME", 6)
    torch.manual_seed(2)
    check(device, torch.randn(2, 7, 8), torch.rand(2, 8), mixed_bits(2, 8))


def test_why_not(device):  # noqa: F811
    if device == "cuda":
        pytest.skip("refusals do not depend on the device")
    why_not = encode_trellis.why_not_encode_trellis
    call = torch.randn(1, 2, 8), torch.ones(1, 8), torch.ones(1, 8, dtype=torch.uint8), tables()
    assert why_not(*call) is None
    assert "bits is torch.int64, not uint8" in str(why_not(*call[:2], call[2].long(), call[3]))
    assert "y is torch.int64, not a float" in str(why_not(call[0].long(), *call[1:]))
    assert "tables on meta" in str(why_not(*call[:3], call[3].to("meta")))
    assert "y needs a gradient" in str(why_not(call[0].clone().requires_grad_(), *call[1:]))
