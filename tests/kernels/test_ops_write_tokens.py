"""New tokens written into a window's room: the native operator rounds as torch does, to the bit."""

import pytest
import torch

from tersekv.kernels import backends
from tersekv.kernels.cpu import attend as cpu_attend
from test_ops_parity import pytestmark  # noqa: F401

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HALVES = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(1, 2, -1, 64)


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """Every number of 16 bits; random bits of float32, and those around float16's subnormal numbers."""
    if dtype != torch.float32:
        return HALVES.view(dtype)
    small = torch.arange(1 << 15) * 2.0**-27 + torch.rand(1 << 15) * 2.0**-27
    drawn = torch.randint(-(1 << 31), (1 << 31) - 1, (1 << 15,)).to(torch.int32).view(torch.float32)
    return torch.cat([small, drawn]).view(1, 2, -1, 64)


@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("target", DTYPES, ids=str)
def test_rounding(source, target):
    torch.manual_seed(0)
    x = numbers(source)
    n, expected = x.shape[2], x.to(target)
    room = [torch.full((1, 2, n + 5, 64), -3.0, dtype=target) for _ in range(2)]
    assert cpu_attend.write_tokens(x, x.transpose(1, 2).contiguous().transpose(1, 2), *room, 2) is False
    for buffer in room:
        written = buffer[:, :, 2 : 2 + n]
        finite = expected.isfinite()
        assert torch.equal(written.isfinite(), finite)
        assert torch.equal(written.isnan(), expected.isnan())
        assert torch.equal(written[finite].signbit(), expected[finite].signbit())
        assert torch.equal(written[finite], expected[finite])
        assert bool((buffer[:, :, :2] == -3).all())
        assert bool((buffer[:, :, 2 + n :] == -3).all())
    ordinary = torch.randn(2, 3, 1, 8, dtype=source)
    room = [torch.zeros(2, 3, 4, 8, dtype=target) for _ in range(2)]
    assert backends.write_tokens.direct(ordinary, ordinary, *room, 3) is True
    assert backends.write_tokens.reference(ordinary, ordinary, *room, 3) is True


@pytest.mark.parametrize(
    ("shape", "at", "fault"),
    [
        ((1, 2, 1, 8), 4, "has no room for tokens 4 to 5"),
        ((1, 2, 1, 8), -1, "no room"),
        ((1, 3, 1, 8), 0, "with H = 3"),
    ],
)
def test_wrong_calls_are_refused(shape, at, fault):
    x, room = torch.zeros(shape), torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match=fault):
        cpu_attend.write_tokens(x, x, room, room, at)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_all_finite(dtype):
    x = torch.full((2, 5, 3, 24), torch.finfo(dtype).max, dtype=dtype).transpose(1, 2)  # their sum is infinite
    for odd in (None, torch.nan, torch.inf, -torch.inf):
        for place in ((0, 0, 0, 0), (1, 2, 4, 23)) if odd else ((0, 0, 0, 0),):
            given = x.clone()
            if odd:
                given[place] = odd
            found = [all_finite(given) for all_finite in (backends.all_finite, backends.all_finite.reference)]
            assert found == [odd is None] * 2
            assert cpu_attend.all_finite(given) is (odd is None)
    assert cpu_attend.all_finite(x[:, :, :0])
