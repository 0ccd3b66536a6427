"""Bit packing: the bytes drawn in `kernels/lanes.py`, shapes, and the round trip."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tersekv.kernels.lanes import half_words, pack_lanes, packed_shape, packed_words, unpack_lanes


def one_lane(codes: list[int], bits: int) -> list[int]:
    """Return the words of lane 0, as unsigned, with `codes` in it and zeros in the other lanes."""
    matrix = torch.zeros(len(codes), 16, dtype=torch.int64)
    matrix[:, 0] = torch.tensor(codes)
    words = pack_lanes.reference(matrix, bits)
    assert torch.count_nonzero(words[..., 1:]) == 0
    return [word & 0xFFFFFFFF for word in words[0, :, 0].tolist()]


def test_four_bits_golden():
    # low half-word: codes 0 2 4 6 from its low end; high half-word: 1 3 5 7
    assert one_lane([0x0, 0x1, 0x2, 0x3, 0x4, 0x5, 0x6, 0x7], 4) == [0x7531_6420]
    assert one_lane([0xF, 0x0, 0xE, 0x1, 0xD, 0x2, 0xC, 0x3, 0xB, 0xA], 4) == [0x3210_CDEF, 0x000A_000B]


def test_three_bits_golden():
    # Word 0 of one unit holds codes 0 to 9: low half 0 2 4 6 8 = codes 1 2 3 4 5 ->
    # 0b101_100_011_010_001.
    codes = [1, 7, 2, 0, 3, 0, 4, 0, 5, 6] + [0] * 22
    low, high = 0b101_100_011_010_001, 0b110_000_000_000_111
    assert one_lane(codes, 3) == [high << 16 | low, 0, 0]
    # Codes 30 and 31 are in the spare bits 15 and 31 of the three words, lowest bit in the first
    # word.
    codes = [0] * 30 + [0b011, 0b110]
    assert one_lane(codes, 3) == [0x0000_8000, 0x8000_8000, 0x8000_0000]


def test_three_bits_partial_unit_has_no_spare_codes():
    assert one_lane([0] * 10 + [5, 3], 3) == [0, 3 << 16 | 5]


@pytest.mark.parametrize(
    ("bits", "packed", "words"), [(1, 64, 2), (2, 64, 4), (3, 64, 6), (4, 64, 8), (5, 64, 10), (6, 64, 12), (7, 64, 14),
                                  (8, 64, 16), (3, 96, 9), (3, 80, 8), (4, 80, 10), (1, 16, 1), (3, 16, 2),
                                  (6, 14, 3), (7, 30, 7)]
)  # fmt: skip
def test_words(bits, packed, words):
    assert packed_words(bits, packed) == words


def test_shape():
    assert packed_shape(4, 64, 32) == (2, 8, 16)
    assert packed_shape(3, 64, 80) == (5, 6, 16)
    assert packed_shape(2, 32, 72) == (5, 2, 16)
    assert tuple(pack_lanes.reference(torch.zeros(2, 3, 64, 32, dtype=torch.uint8), 4).shape) == (2, 3, 2, 8, 16)


def test_bits_out_of_range():
    with pytest.raises(ValueError, match="1 to 8, got 9"):
        half_words(9, 4)


@settings(max_examples=60, deadline=None)
@given(bits=st.integers(1, 8), packed=st.integers(1, 150), lanes=st.integers(1, 70), seed=st.integers(0, 2**16))
def test_round_trip(bits, packed, lanes, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (2, packed, lanes), generator=generator)
    words = pack_lanes.reference(codes, bits)
    assert words.dtype == torch.int32
    assert tuple(words.shape) == (2, *packed_shape(bits, packed, lanes))
    assert torch.equal(unpack_lanes(words, bits, packed, lanes).long(), codes)


@pytest.mark.parametrize("bits", range(1, 9))
def test_no_bit_is_lost(bits):
    unit = 2 * half_words(bits, 1).unit_codes
    assert packed_words(bits, 4 * unit) * 32 == 4 * unit * bits
