"""Attention over arbitrary trellis streams: any bits per head, extreme gains, shared codebooks."""

import pytest
import torch

from native_calls import ROUNDING_ISAS, why_not
from packed_views import interleaved_rope, magnitude, make_mask, rope
from tersekv.cache.rotary import Rotary
from tersekv.codecs.codebooks.trellis import trellis_entries
from tersekv.kernels import backends, cpu
from tersekv.kernels.attend_packed import attend_packed as reference
from tersekv.kernels.cpu import attend as cpu_attend
from tersekv.layouts.base import Concat
from tersekv.layouts.exact import ExactView
from tersekv.layouts.mean_removed import RotatedMean
from tersekv.layouts.roped import Roped
from tersekv.layouts.trellis import TrellisView
from test_ops_parity import compare, expectation, isa, one_thread, poisoned_outputs, pytestmark  # noqa: F401
from test_ops_trellis import mixed_bits

INTEGERS = 3e-4
"""Error of 16-bit queries and weights where the kernel multiplies integers, relative to the largest
norm."""


def bits_of(rows, H, D, words):
    """Return uint8 [rows, H, D], separate for each head, with a sum of 16·words."""
    bits = torch.zeros(rows * H, D, dtype=torch.uint8)
    for row in bits:
        row[:] = mixed_bits(1, D, int(torch.randint(10**6, ())))[0]
        while (rest := 16 * words - int(row.sum())) != 0:
            d = int(torch.randint(D, ()))
            row[d] = min(6, max(0, int(row[d]) + (1 if rest > 0 else -1)))
    return bits.view(rows, H, D)


def stream_view(B=1, H=2, T=96, D=64, words=8, shared=True, bits=None):
    """Return a view of random streams, in tensors larger than the view."""
    N, rows = T // 32, 1 if shared else B
    bits = bits_of(rows, H, D, words) if bits is None else bits
    stream = torch.randint(-(2**15), 2**15, (B, H + 1, N + 2, words, 32)).to(torch.int16)
    gain = torch.randint(100, 170, (B, H + 1, N + 1, 32)).to(torch.uint8)
    planes = {"stream": stream[:, :H, :N], "gain": gain[:, :H, :N]}
    return TrellisView(planes, bits, torch.rand(rows, H, D) + 0.2, trellis_entries("cpu"))


def run(keys, values, R=3, mask=None, scaling=None, softcap=None):
    shape = *values.decode().shape[:2], R, keys.decode().shape[-1]
    return check(torch.randn(shape), keys, values, mask, scaling or 0.3 / shape[-1], softcap, close)


def check(query, keys, values, mask, scaling, softcap, close):
    """Compare with decoding: by `close` if the kernel multiplies integers, else within float32's
    bounds."""
    key, value = keys.decode(), values.decode()
    args = query, keys.operand, values.operand, mask, scaling, softcap
    assert why_not(cpu_attend.attend_packed, *args) is None
    out, lse = cpu_attend.attend_packed(*args)
    if cpu.isa() in ROUNDING_ISAS:
        expected = reference.reference(query, key, value, mask, *args[4:])
        close(out, expected[0])
        seen = expected[1].isfinite()
        close(lse[seen], expected[1][seen])
        assert torch.equal(lse[~seen], expected[1][~seen])
    else:
        sizes = magnitude(keys), magnitude(values)
        compare((out, lse), expectation(query, key, value, sizes, mask, *args[4:]))
    return args, (out, lse)


def close(x, expected):
    assert (x - expected).norm() <= INTEGERS * expected.norm() + 1e-6


@pytest.mark.parametrize("rate", range(1, 9))
def test_one_rate(isa, rate):  # noqa: F811
    torch.manual_seed(rate)
    bits = torch.full((1, 2, 64), rate, dtype=torch.uint8)
    run(stream_view(words=4 * rate, bits=bits), stream_view(words=4 * rate, bits=bits))


SIZES = [
    (1, 1, 32, 32, 1, 1), (2, 3, 192, 128, 16, 4), (1, 2, 1088, 80, 11, 5), (3, 1, 544, 96, 30, 8),
    (1, 2, 64, 256, 33, 33), (2, 2, 96, 64, 24, 2),
]  # fmt: skip


@pytest.mark.parametrize("shared", [True, False], ids=["shared bits", "bits per row"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(isa, size, shared):  # noqa: F811
    B, H, T, D, words, R = size
    torch.manual_seed(T)
    keys, values = (stream_view(B, H, T, D, words, shared) for _ in range(2))
    run(keys, values, R, None if R % 2 else make_mask(B, R // 2, T), softcap=20.0 if R == 5 else None)


def test_one_component_holds_all_bits(isa):  # noqa: F811
    torch.manual_seed(0)
    bits = torch.zeros(1, 1, 64, dtype=torch.uint8)
    bits[..., [3, 40, 63]] = torch.tensor([6, 6, 4], dtype=torch.uint8)
    run(stream_view(H=1, words=1, bits=bits), stream_view(H=1, words=1, bits=bits))


def test_no_bits_at_all(isa):  # noqa: F811
    torch.manual_seed(0)
    view = stream_view(words=0, bits=torch.zeros(1, 2, 64, dtype=torch.uint8))
    for rows in (3, 7):
        _, (out, lse) = run(view, view, rows)
        assert torch.equal(out, torch.zeros_like(out))
        assert lse.isfinite().all()


def test_gains_of_any_size(isa):  # noqa: F811
    torch.manual_seed(1)
    view = stream_view(H=1, T=256)
    view.gain[:] = torch.arange(256, dtype=torch.uint8).view(1, 1, 8, 32)
    flat = stream_view(H=1, T=256)
    flat.gain[:] = 0
    run(view, flat, scaling=1e-4)
    run(flat, view)
    run(view, view, scaling=1e-4)


def test_tables_that_are_no_whole_numbers(isa):  # noqa: F811
    torch.manual_seed(2)
    keys, values = stream_view(), stream_view()
    keys.tables = values.tables = torch.randn(9, 256) * (torch.arange(9) > 0)[:, None]
    run(keys, values)


@pytest.mark.parametrize("sides", ["keys", "both"])
def test_combined_with_other_views(isa, sides):  # noqa: F811
    torch.manual_seed(3)
    exact = ExactView({"x": torch.randn(1, 2, 3, 32, 24)}) if sides == "both" else None
    keys = stream_view(bits=None)
    if exact is not None:
        keys = Concat([(keys, 64), (exact, 24)])
    for rows in (3, 7, 11):
        run(keys, Concat([(stream_view(), 64), (stream_view(D=40, words=5), 40)]), rows)


@pytest.mark.parametrize("kind", ["halves", "pairs"])
def test_before_rope(isa, kind):  # noqa: F811
    torch.manual_seed(4)
    of = rope("halves", 64) if kind == "halves" else interleaved_rope(48)
    run(Roped(stream_view(B=2), of, of.angles(7, 96)), stream_view(B=2))


ROTATED_MEANS = {
    "shared": (1, 1, "halves", 64), "one mean": (2, 1, "halves", 64), "a mean per row": (2, 2, "halves", 32),
    "pairs": (2, 1, "pairs", 48), "positions per head": (2, 2, "any", 48),
}  # fmt: skip


def rotated_mean(case, T, consecutive=False):
    """Return batch rows and a rotated vector per head as described by `ROTATED_MEANS`."""
    B, rows, kind, R = ROTATED_MEANS[case]
    of = rope("halves", R) if kind == "halves" else interleaved_rope(R)
    if kind == "any":
        angles = of.angles_at(torch.randint(0, 3000, (B, 3, T)))
    else:  # each row of the batch begins elsewhere
        angles = of.angles(7, T, 40 * torch.arange(B))
        angles = angles if consecutive else of.given(*angles.cos_sin())
    return B, RotatedMean(torch.randn(rows, 3, 64), of, angles)


@pytest.mark.parametrize("consecutive", [False, True], ids=["given cosines", "consecutive"])
@pytest.mark.parametrize("case", ROTATED_MEANS)
@pytest.mark.parametrize("T", [96, 1088])
def test_combined_with_a_rotated_vector(isa, case, T, consecutive):  # noqa: F811
    torch.manual_seed(8)
    B, part = rotated_mean(case, T, consecutive)
    run(Concat([(stream_view(B, 3, T), 64), (part, 64)]), stream_view(B, 3, T), R=9)


@pytest.mark.parametrize("T", [96, 1088])
def test_rows_that_begin_elsewhere(isa, T):  # noqa: F811
    """Cosines and sines of the first token of a block serve all of it, also if padding ends in a
    block."""
    torch.manual_seed(9)
    rotary = Rotary(rope("halves", 64))
    rotary.note(0, T + 4, torch.tensor([0, 3, 70]))
    mean = RotatedMean(torch.randn(1, 3, 64), rotary.rope, rotary.angles(4, T, torch.device("cpu")))
    assert mean.angles.places.tolist() == [[[4]], [[1]], [[-66]]]
    run(Concat([(stream_view(3, 3, T), 64), (mean, 64)]), stream_view(3, 3, T), R=2)


def test_rope_in_one_part_only():
    of = rope("halves", 64)
    angles = of.angles(0, 96)
    keys, mean = stream_view(), RotatedMean(torch.randn(1, 2, 64), of, angles)
    call = torch.randn(1, 2, 3, 128), Concat([(mean, 64), (mean, 64)]), keys, None, 1.0, None
    assert "several parts have RoPE" in why_not(cpu_attend.attend_packed, *call)
    call = torch.randn(1, 2, 3, 128), Concat([(keys, 64), (Roped(keys, of, angles), 64)]), keys, None, 1.0, None
    assert "a part is a view with RoPE" in why_not(cpu_attend.attend_packed, *call)
    call = torch.randn(1, 2, 3, 64), keys, mean, None, 1.0, None
    assert why_not(cpu_attend.attend_packed, *call) == "values have RoPE, which only keys have"


def test_many_threads_and_batches_agree(isa):  # noqa: F811
    torch.manual_seed(5)
    keys, values = stream_view(B=2, T=2048), stream_view(B=2, T=2048)
    args, (out, lse) = run(keys, values)
    torch.set_num_threads(3)
    again = cpu_attend.attend_packed(*args)
    torch.testing.assert_close(again[0], out, rtol=1e-4, atol=1e-4 * float(out.abs().max()))
    torch.testing.assert_close(again[1], lse, rtol=1e-4, atol=1e-4)


def test_nan_stays_visible(isa):  # noqa: F811
    torch.manual_seed(6)
    keys, values = stream_view(), stream_view()
    query = torch.randn(1, 2, 3, 64)
    query[0, 1, 2, 5] = float("nan")
    out, _ = cpu_attend.attend_packed(query, keys, values, None, 0.01, None)
    assert out[0, 1, 2].isnan().any()
    assert out[0, 0].isfinite().all()
    assert out[0, 1, :2].isfinite().all()


CHANGES = {
    "sum of bits": (
        lambda v: v.bits.view(-1)[:1].add_(1 if v.bits.view(-1)[0] < 6 else -1),
        r"bits: expected a sum of",
    ),
    "rate": (lambda v: v.bits.view(-1)[:1].fill_(9), r"bits: expected 0 to 8, got 9"),
    "gain": (lambda v: setattr(v, "gain", v.gain[:, :, :2]), r"gain: .* with N = 3, got 2"),
    "scale": (lambda v: setattr(v, "scale", v.scale[:, :1]), r"scale: .* with H = 2, got 1"),
    "stream": (lambda v: setattr(v, "stream", v.stream[..., :16]), r"stream: .* with t = 32, got 16"),
    "tables": (lambda v: setattr(v, "tables", v.tables[:6]), r"tables: .* with 9 = 9, got 6"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_refused(change):
    torch.manual_seed(7)
    keys, values = stream_view(), stream_view()
    CHANGES[change][0](keys)
    with pytest.raises(ValueError, match=CHANGES[change][1]):
        cpu_attend.attend_packed(torch.randn(1, 2, 3, 64), keys, values, None, 1.0, None)


def test_why_not():
    keys, values = stream_view(), stream_view()
    keys.scale = keys.scale.double()
    call = torch.randn(1, 2, 3, 64), keys, values, None, 1.0, None
    assert why_not(cpu_attend.attend_packed, *call) == "scale is torch.float64, not float32 or float16 or bfloat16"
    assert backends.explain(*call[:3]).startswith("reference: scale is")
