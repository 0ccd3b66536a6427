"""Trellis windows in a stream: golden bytes, and the round trip for any bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tersekv.codecs.codebooks.trellis import trellis_entries
from tersekv.kernels.trellis import gain_codes, gains, largest_gain, pack_stream, windows_of
from tersekv.layouts.trellis import TrellisView, trellis_layout


def ring(bits, seed):
    """Return windows [1, n, D] of random streams. Each is the last 8 bits of the ring up to its
    component's newest."""
    total = int(bits.long().sum())
    stream = torch.randint(0, 2, (3, total), generator=torch.Generator().manual_seed(seed))
    end = bits.long().cumsum(0)
    at = (end[:, None] - 8 + torch.arange(8)) % total
    return (stream[:, at] << torch.arange(8)).sum(-1).to(torch.uint8).unsqueeze(0), stream


@st.composite
def rates(draw):
    """Draw uint8 [D] with a sum that is a positive multiple of 16."""
    bits = draw(st.lists(st.integers(0, 6), min_size=4, max_size=140))
    return torch.tensor([*bits, *_rest(-sum(bits) % 16 or (16 if not any(bits) else 0))], dtype=torch.uint8)


def _rest(bits):
    return [min(6, bits - at) for at in range(0, bits, 6)]


@settings(max_examples=150, deadline=None)
@given(rates(), st.integers(0, 2**32 - 1))
def test_round_trip(bits, seed):
    windows, stream = ring(bits, seed)
    words = pack_stream(windows, bits[None], int(bits.sum()) // 16)
    assert words.dtype is torch.int16
    assert words.shape == (1, 3, int(bits.long().sum()) // 16)
    held = bits > 0
    assert torch.equal(windows_of(words, bits[None])[..., held], windows.long()[..., held])
    expected = (stream.unflatten(1, (-1, 16)) << torch.arange(16)).sum(-1)
    assert torch.equal(words[0].long() & 0xFFFF, expected), "bit i of a stream is bit i % 16 of word i // 16"


@settings(max_examples=30, deadline=None)
@given(rates(), rates(), st.integers(0, 2**32 - 1))
def test_rows_have_their_own_bits(first, second, seed):
    if first.long().sum() != second.long().sum() or len(first) != len(second):
        second = first.flip(0)
    windows = torch.cat([ring(first, seed)[0], ring(second, seed + 1)[0]])
    both = torch.stack([first, second])
    words = pack_stream(windows, both, int(both[0].sum()) // 16)
    for row in range(2):
        assert torch.equal(words[row], pack_stream(windows[row : row + 1], both[row : row + 1], words.shape[-1])[0])
        held = both[row] > 0
        assert torch.equal(windows_of(words, both)[row][:, held], windows[row].long()[:, held])


def test_golden_bytes():
    """Eight components of 2 bits with newest bits 1, 2, 3, 0, 1, 2, 3, 0 make one word,
    0b00_11_10_01_00_11_10_01."""
    bits = torch.full((1, 8), 2, dtype=torch.uint8)
    new = [1, 2, 3, 0, 1, 2, 3, 0]
    windows = [[new[d] << 6 | new[d - 1] << 4 | new[d - 2] << 2 | new[d - 3] for d in range(8)]]
    words = pack_stream(torch.tensor([windows], dtype=torch.uint8), bits, int(bits.sum()) // 16)
    assert words.tolist() == [[[0b0011100100111001]]]
    assert windows_of(words, bits)[0, 0].tolist() == windows[0]


def test_golden_bytes_of_mixed_rates():
    """6, 0, 1, 4 and 5 bits: a component's newest bits are above those before it; 0 bits take no
    place."""
    bits = torch.tensor([[6, 0, 1, 4, 5]], dtype=torch.uint8)
    stream = 0b10011_0110_1_110001
    words = torch.tensor([[[stream - 2**16]]], dtype=torch.int16)
    windows = windows_of(words, bits)[0, 0]
    # The first one's oldest bits are the ring's last.
    assert windows[[0, 2, 3, 4]].tolist() == [0b110001_10, 0b1_110001_1, 0b0110_1_110, 0b10011_011]
    assert torch.equal(pack_stream(windows.to(torch.uint8).view(1, 1, 5), bits, words.shape[-1]), words)


def test_tokens_are_lanes():
    bits = torch.tensor([[[2] * 8] * 2], dtype=torch.uint8)
    windows = torch.cat([ring(bits[0, 0], seed)[0] for seed in range(2 * 64 // 3 + 1)], 1)[0, : 2 * 64]
    stream = pack_stream(windows.view(2, 64, 8), bits[0], 1).view(1, 2, 2, 32, 1)
    planes = {"stream": stream.transpose(-1, -2).contiguous()}
    assert planes["stream"].shape == (1, 2, 2, 1, 32) == (1, 2, 2, *trellis_layout(1).planes["stream"].shape)
    planes["gain"] = torch.full((1, 2, 2, 32), 144, dtype=torch.uint8)
    planes["gain"][0, 1, 1, 5] = 0
    view = TrellisView(planes, bits, torch.full((1, 2, 8), 2.0), trellis_entries("cpu"))
    expected = 2 * trellis_entries("cpu")[2][windows.long()].view(1, 2, 64, 8)
    expected[0, 1, 37] = 0
    assert torch.equal(view.decode(), expected)


def test_gains():
    codes = torch.arange(256, dtype=torch.uint8)
    assert gains(codes)[[0, 144, 160, 128]].tolist() == [0.0, 1.0, 2.0, 0.5]
    assert torch.equal(gain_codes(gains(codes)), codes)
    assert gain_codes(torch.tensor([0.0, 1e9])).tolist() == [0, 255]
    assert largest_gain() == pytest.approx(2 ** (111 / 16))
