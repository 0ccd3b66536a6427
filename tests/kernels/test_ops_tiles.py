"""Attention of many queries over tiles of unpacked tokens, on every instruction set, against float64.

Queries and keys of 16 bits are multiplied exactly, so only the weights are rounded, to bfloat16: an output is
off by at most 2⁻⁸·Σ weight·|value|. In float32 the bound is some ulps.
"""

import pytest
import torch

from tersekv.errors import UserError
from tersekv.kernels import backends, cpu, softmax
from tersekv.kernels.cpu import attend as cpu_attend
from test_ops_parity import isa, one_thread, poisoned_outputs, pytestmark  # noqa: F401

SHAPES = [  # B, H, G, q, T, D, Dv
    (1, 1, 1, 32, 32, 64, 64),
    (2, 3, 2, 40, 300, 48, 80),  # no multiple of a tile
    (1, 2, 3, 257, 257, 16, 16),  # a row block ends within a head
    (1, 1, 4, 33, 1100, 64, 32),
    (2, 1, 1, 600, 601, 40, 24),  # channels are no multiple of 16
    (1, 1, 2, 64, 700, 320, 256),  # tiles have fewer tokens
]


def seen_by(kind, B, H, q, T):
    """Return the argument `where`, and which tokens each query sees, bool [B, H, q, T]."""
    if kind == "all":
        return 0, torch.ones(B, H, q, T, dtype=torch.bool)
    if kind == "causal":
        return None, torch.ones(B, H, q, T, dtype=torch.bool).tril(T - q)
    mask = torch.rand((B, H, q, T) if kind == "heads" else (B, q, T)) > 0.6
    place = torch.arange(T)
    if kind == "window":  # whole tiles are hidden, and some rows see nothing
        last = torch.arange(q) + T - q
        mask = ((place <= last[:, None]) & (place > last[:, None] - 70)).repeat(B, 1, 1)
    mask[..., 3, :] = False
    mask[..., 5, :-1] = False
    return mask, mask if kind == "heads" else mask[:, None].expand(B, H, q, T)


def expected(query, keys, values, seen, scaling, softcap):
    """Return out and lse in float64, and Σ weight·|value|: [B, H, G·q, ·]."""
    B, Hq, _, D = query.shape
    H = keys.shape[1]
    rows = query.double().reshape(B, H, -1, D)
    scores = rows @ keys.double().mT * scaling
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~seen.repeat(1, 1, Hq // H, 1), float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - lse.nan_to_num(neginf=0.0).unsqueeze(-1)).exp()
    return weights @ values.double(), lse, weights @ values.double().abs()


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("kind", ["all", "causal", "rows", "heads", "window"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parity(isa, shape, dtype, kind, softcap):  # noqa: F811
    torch.manual_seed(0)
    B, H, G, q, T, D, Dv = shape
    query, keys, values = (torch.randn(B, n, m, d).to(dtype) for n, m, d in ((H * G, q, D), (H, T, D), (H, T, Dv)))
    where, seen = seen_by(kind, B, H, q, T)
    scaling = 1.7 * D**-0.5
    want, want_lse, size = expected(query, keys, values, seen, scaling, softcap)
    segments = ((keys.transpose(1, 2).contiguous().transpose(1, 2), values, where),)
    out, lse = cpu_attend.attend(query, segments, None, None, None, scaling, softcap, None, True)
    torch.testing.assert_close(lse.double(), want_lse, atol=2e-5, rtol=2e-6)
    rounding = 2**-8 if dtype is torch.bfloat16 and isa == "avx512bf16" else 2e-6
    assert ((out.double() - want).abs() <= rounding * size + 1e-6).all()
    whole = cpu_attend.attend(query, segments, None, None, None, scaling, softcap)
    torch.testing.assert_close(whole, out.view(B, H * G, q, Dv).transpose(1, 2).to(dtype), rtol=0, atol=0)
    reference = backends.attend.reference(query, segments, None, None, None, scaling, softcap, None, True)
    torch.testing.assert_close(out, reference[0], atol=3 * rounding * float(size.amax()) + 2e-6, rtol=0)


def test_any_threads_and_rows(isa):  # noqa: F811
    """Other rows of its block, and the number of threads, change a row's output by rounding alone."""
    torch.manual_seed(0)
    query, keys, values = torch.randn(1, 4, 700, 64), torch.randn(1, 2, 700, 64), torch.randn(1, 2, 700, 64)
    out = cpu_attend.attend(query, ((keys, values, None),), None, None, None, 0.125)
    torch.set_num_threads(3)
    torch.testing.assert_close(cpu_attend.attend(query, ((keys, values, None),), None, None, None, 0.125), out)
    last = cpu_attend.attend(query[:, :, -100:], ((keys, values, None),), None, None, None, 0.125)
    torch.testing.assert_close(last, out[:, -100:], atol=2e-6, rtol=1e-5)


def test_scalings_without_a_power_of_two(isa):  # noqa: F811
    torch.manual_seed(0)
    query, keys, values = (torch.randn(1, 1, 40, 32).bfloat16() for _ in range(3))
    for scaling in (0.0, 1e-30, 3.0):
        out = cpu_attend.attend(query, ((keys, values, None),), None, None, None, scaling)
        wanted = expected(query, keys, values, torch.ones(1, 1, 40, 40, dtype=torch.bool).tril(), scaling, None)[0]
        torch.testing.assert_close(out[:, :, 0].double(), wanted[:, 0], atol=2e-2, rtol=2e-2)


def test_calls_that_contradict_themselves():
    keys = torch.randn(1, 1, 40, 32)
    with pytest.raises(ValueError, match="expected at least 64 tokens"):
        cpu_attend.attend(torch.randn(1, 1, 64, 32), ((keys, keys, None),), None, None, None, 1.0)
    mask = torch.ones(1, 32, 40, dtype=torch.bool)
    with backends.forced("cpu"), pytest.raises(UserError, match="causal tokens with a mask"):
        backends.attend(torch.randn(1, 1, 32, 32), ((keys, keys, None),), None, mask, None, 1.0)


def test_amx_keeps_torchs_kernel(monkeypatch):
    """In bfloat16 only, and the portable build is slower than torch in any type."""
    monkeypatch.setattr(cpu, "isa", lambda: "avx2")
    x = torch.randn(1, 1, 64, 32)
    assert softmax.prefers_native(x, x, x)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert softmax.prefers_native(x, x, x)
    assert not softmax.prefers_native(x.bfloat16(), x, x)
    assert not softmax.prefers_native(x.clone().requires_grad_(), x, x)
    monkeypatch.setattr(cpu, "isa", lambda: "scalar")
    assert not softmax.prefers_native(x, x, x)
