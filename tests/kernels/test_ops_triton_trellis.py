"""Triton kernels over trellis streams and the rotated mean, against the torch reference."""

from __future__ import annotations

import pytest
import torch

from packed_views import interleaved_rope, make_mask, rope
from tersekv.kernels import backends, triton
from tersekv.kernels.softmax import attend_scores
from tersekv.layouts.base import Concat
from tersekv.layouts.exact import ExactView
from tersekv.layouts.mean_removed import MeanRemoved, RotatedMean
from tersekv.layouts.roped import Roped
from test_ops_trellis_attend import ROTATED_MEANS, SIZES, rotated_mean, stream_view
from test_ops_triton import compare, device, moved, pytestmark, run  # noqa: F401


@pytest.mark.parametrize("rate", [1, 8])
def test_one_rate(device, rate):  # noqa: F811
    torch.manual_seed(rate)
    bits = torch.full((1, 2, 64), rate, dtype=torch.uint8)
    run(device, stream_view(words=4 * rate, bits=bits), stream_view(words=4 * rate, bits=bits), 3)


@pytest.mark.parametrize("shared", [True, False], ids=["shared bits", "bits per row"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(device, size, shared):  # noqa: F811
    B, H, T, D, words, R = size
    T = min(T, 160)
    torch.manual_seed(T)
    keys, values = (stream_view(B, H, T, D, words, shared) for _ in range(2))
    run(device, keys, values, R, None if R % 2 else make_mask(B, R // 2, T), 20.0 if R == 5 else None)


def test_one_component_holds_all_bits(device):  # noqa: F811
    torch.manual_seed(0)
    bits = torch.zeros(1, 1, 64, dtype=torch.uint8)
    bits[..., [3, 40, 63]] = torch.tensor([6, 6, 4], dtype=torch.uint8)
    run(device, stream_view(H=1, words=1, bits=bits), stream_view(H=1, words=1, bits=bits), 3)


def test_no_bits_at_all(device):  # noqa: F811
    view = stream_view(words=0, bits=torch.zeros(1, 2, 64, dtype=torch.uint8))
    out, lse = run(device, view, view, 3)
    assert torch.equal(out, torch.zeros_like(out))
    assert lse.isfinite().all()


def test_gains_of_any_size(device):  # noqa: F811
    torch.manual_seed(1)
    view, flat = stream_view(H=1, T=256), stream_view(H=1, T=256)
    view.gain[:] = torch.arange(256, dtype=torch.uint8).view(1, 1, 8, 32)
    flat.gain[:] = 0
    run(device, flat, view, 3)
    view.scale *= 1e-3  # so that the softmax is not one token's
    run(device, view, flat, 3)
    run(device, view, view, 3)


def test_scales_that_span_three_decades(device):  # noqa: F811
    torch.manual_seed(2)
    keys, values = stream_view(), stream_view()
    keys.scale = values.scale = 10 ** (torch.rand(1, 2, 64) * 3 - 2)
    keys.scale = keys.scale / 4
    run(device, keys, values, 4)


@pytest.mark.parametrize("kind", ["halves", "pairs"])
def test_before_rope(device, kind):  # noqa: F811
    torch.manual_seed(4)
    of = rope("halves", 64) if kind == "halves" else interleaved_rope(48)
    run(device, Roped(stream_view(B=2), of, of.angles(7, 96)), stream_view(B=2), 3)


@pytest.mark.parametrize("consecutive", [False, True], ids=["given cosines", "consecutive"])
@pytest.mark.parametrize("case", ROTATED_MEANS)
def test_combined_with_a_rotated_vector(device, case, consecutive):  # noqa: F811
    torch.manual_seed(8)
    B, part = rotated_mean(case, 96, consecutive)
    run(device, Concat([(stream_view(B, 3, 96), 64), (part, 64)]), stream_view(B, 3, 96), 5)


def test_a_rotated_vector_alone(device):  # noqa: F811
    """It is not rounded together with anything else, and 100 tokens are not a whole tile."""
    torch.manual_seed(9)
    B, part = rotated_mean("pairs", 100)
    run(device, part, torch.randn(B, 3, 100, 64), 5)


def test_centred_keys_of_a_codec(device):  # noqa: F811
    """Keys as the store provides them: a basis, a rotated mean, and values with their own mean."""
    from tersekv.codecs import methods

    torch.manual_seed(10)
    x = torch.randn(1, 2, 64, 64) * torch.linspace(0.2, 3, 64)
    pair = methods()["trellis"].build(bits=2.0, calibration="prompt")
    with backends.forced("auto"):
        keys, values = pair.keys.fit(x), pair.values.fit(x + 1)
        packed = keys.view(keys.encode(x), 64), values.view(values.encode(x + 1), 64)
    of = rope("halves", 64)
    key, value = MeanRemoved(packed[0], RotatedMean(torch.randn(1, 2, 64), of, of.angles(0, 64))), packed[1]
    query = torch.randn(1, 2, 3, 64)
    call = key.query(query), key.inner.operand, value.inner.operand, None, 0.125, None
    out, lse = backends.attend_packed(*(moved(t, device) for t in call))
    scores = query @ key.decode().mT * 0.125
    expected = attend_scores(scores, value.decode(), None, 1.0, None)
    compare((value.output(out.cpu()), lse), expected, float(scores.abs().max()))


def test_combined_with_exact_channels(device):  # noqa: F811
    torch.manual_seed(3)
    exact = ExactView({"x": torch.randn(1, 2, 3, 32, 24)})
    run(device, Concat([(stream_view(), 64), (exact, 24)]), Concat([(stream_view(D=48, words=5), 48), (exact, 24)]), 3)


def test_unsupported_rope(device):  # noqa: F811
    if device == "cuda":
        pytest.skip("refusals do not depend on the device")
    of = rope("halves", 64)
    keys, part = stream_view(), RotatedMean(torch.randn(1, 2, 64), of, of.angles(0, 96))
    call = torch.randn(1, 2, 3, 64), Roped(part, of, of.angles(0, 96)), keys, None, 1.0, None
    assert "keys have RoPE twice" in triton.why_not_attend_packed(*call)
    call = torch.randn(1, 2, 3, 64), keys, part, None, 1.0, None
    assert triton.why_not_attend_packed(*call) == "values have RoPE, which only keys have"
