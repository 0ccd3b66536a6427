"""Attention of many queries over tiles of tokens, on every instruction set, against float64.

Queries and keys of 16 bits are multiplied exactly, so only the weights are rounded, to bfloat16: an output is
off by at most 2⁻⁸·Σ weight·|value|. In float32 the bound is some ulps.
"""

import pytest
import torch

from native_calls import ROUNDING_ISAS
from packed_views import FORMATS, packed, rope, roped, tokens
from tersekv.errors import UserError
from tersekv.kernels import backends, cpu, softmax
from tersekv.kernels.attend import PackedPages
from tersekv.kernels.cpu import attend as cpu_attend
from tersekv.lab.bench.memory import PeakMemory
from tersekv.layouts.mean_removed import MeanRemoved, RotatedMean
from tersekv.layouts.roped import Roped
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
    rounding = 2**-8 if dtype is torch.bfloat16 and isa in ROUNDING_ISAS else 2e-6
    assert ((out.double() - want).abs() <= rounding * size + 1e-6).all()
    whole = cpu_attend.attend(query, segments, None, None, None, scaling, softcap)
    torch.testing.assert_close(whole, out.view(B, H * G, q, Dv).transpose(1, 2).to(dtype), rtol=0, atol=0)
    reference = backends.attend.reference(query, segments, None, None, None, scaling, softcap, None, True)
    torch.testing.assert_close(out, reference[0], atol=3 * rounding * float(size.amax()) + 2e-6, rtol=0)


def coded_keys(name, kind, x):
    """Return a view of keys x, coded alone, before RoPE at positions in order or scattered, or without their mean."""
    (_, H, T, D), view = x.shape, packed(name, "keys", x)
    if kind == "plain":
        return view
    if kind != "mean":
        return roped(view, "halves" if kind == "roped" else "pairs", D, T, "shared" if kind == "roped" else "per row")
    of = rope("halves", D)
    return MeanRemoved(view, RotatedMean(torch.randn(1, H, D), of, of.angles(5, T)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "roped", "roped by row", "mean"])
@pytest.mark.parametrize("name", FORMATS)
def test_packed_tokens(isa, name, kind, dtype):  # noqa: F811
    """Codes of every layout are decoded in tiles, next to exact tokens, with a mask that hides whole tiles.

    In float32 the error is some ulps. In bfloat16 a score is a sum of products that are each rounded up to four times
    (component, basis, key, query), independently; and a weight is rounded too.
    """
    torch.manual_seed(len(name))
    B, H, G, q, T, D = 2, 2, 3, 30, 320, 64
    keys, values = coded_keys(name, kind, tokens(B, H, T, D)), packed(name, "values", tokens(B, H, T, D))
    operands = [keys.inner.operand], [values.inner.operand]
    pages = PackedPages(*operands, [3], [T], (keys.linear, values.linear), H)
    query = (0.3 * torch.randn(B, H * G, q, D)).to(dtype)
    mask = torch.rand(B, q, T + 3) > 0.3
    mask[0, :, 10:290] = False
    mask[1, 4] = False
    own = torch.randn(B, H, 3, D), torch.randn(B, H, 3, D), 0
    args = query, (own,), pages, mask, torch.tensor([0, 20]), D**-0.5
    got, wanted = cpu_attend.attend(*args), backends.attend.reference(*args)
    rows, decoded = query.float().reshape(B, H, -1, D), keys.decode().double()
    products = rows.double().abs().square() @ decoded.square().mT
    ulp = 2**-9 if dtype is torch.bfloat16 and isa in ROUNDING_ISAS else 2**-20
    error = 8 * ulp * D**-0.5 * float(products.sqrt().amax()) + 4 * ulp
    rounding = 2**-8 if dtype is torch.bfloat16 else 0.0
    bound = (error + rounding) * max(float(values.decode().abs().amax()), float(own[1].abs().amax()))
    assert (got.float() - wanted.float()).abs().amax() <= bound
    assert got.isfinite().all()


def test_memory_of_keys_before_rope_is_that_of_the_result(isa):  # noqa: F811
    """Fewer queries split these tokens into parts that share angles, each with a result of its own."""
    torch.manual_seed(0)
    T, of = 16384, rope("halves", 64)
    view, values = packed("polar", "keys", torch.randn(1, 1, T, 64)), packed("grid", "values", torch.randn(1, 1, T, 64))
    keys = Roped(view, of, of.angles(0, T))
    pages = PackedPages([keys.inner.operand], [values.inner.operand], [0], [T], (keys.linear, values.linear), 1)
    query = torch.randn(1, 32, 256, 64)
    cpu_attend.attend(query[:, :, :8].contiguous(), (), pages, None, None, 0.125)  # allocates what is kept
    with PeakMemory() as peak:
        cpu_attend.attend(query, (), pages, None, None, 0.125)
    assert peak.peak_bytes < 16 << 20


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


def test_torch_attends_where_ours_cannot_or_is_slower(monkeypatch):
    monkeypatch.setattr(cpu, "isa", lambda: "avx2")
    x = torch.randn(1, 1, 64, 32)
    assert softmax.prefers_native(x, x, x)
    assert softmax.prefers_native(x.bfloat16(), x, x)
    assert not softmax.prefers_native(x.clone().requires_grad_(), x, x)
    monkeypatch.setattr(cpu, "isa", lambda: "scalar")
    assert not softmax.prefers_native(x, x, x)
