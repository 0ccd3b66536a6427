"""Golden bytes of the layouts: positions of codes, scales and signs, computed by hand from the
drawings."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tersekv.errors import UserError
from tersekv.kernels.lanes import half_words, pack_lanes
from tersekv.layouts.exact import ExactView, exact_layout
from tersekv.layouts.grid import Grid, nearest_code, round_scale
from tersekv.layouts.polar import Polar, PolarView
from tersekv.layouts.signs import pack_blocks, pack_signs, signs_planes


def block(D: int = 64, bits: int = 4) -> torch.Tensor:
    """Return codes of one block [1, 1, 32, D], each a small hash of token and channel."""
    t, c = torch.arange(32)[:, None], torch.arange(D)
    return ((7 * t + 3 * c) % 2**bits).to(torch.uint8)[None, None]


@pytest.mark.parametrize(("axis", "group"), [("token", 32), ("channel", 32)])
@pytest.mark.parametrize("side", ["keys", "values"])
def test_grid_layout_is_as_drawn(side, axis, group):
    """Layout of 4-bit codes: (token t, channel c) is in lane t, slot c for keys and lane c, slot t
    for values.

    In a lane, slot p = 2i + j is half-word j, bits 4·(i mod 4), of word i // 4.
    """
    grid = Grid(4, side, axis, group, True, 64)
    codes = block()
    groups = grid.groups(codes)
    scale = torch.arange(groups.shape[:-1].numel()).reshape(groups.shape[:-1]).half()
    planes = grid.pack(groups, scale, -scale)
    words = planes["codes"][0, 0, 0].numpy().view(np.uint32)
    for t, c in [(0, 0), (1, 0), (0, 1), (5, 9), (17, 40), (31, 63)]:
        lane, p = (t, c) if side == "keys" else (c, t)
        i, j = divmod(p, 2)
        word = words[lane // 16, i // 4, lane % 16]
        assert word >> (16 * j + 4 * (i % 4)) & 15 == codes[0, 0, t, c]
        at = (c // 32, t) if axis == "token" else (t // 32, c)
        where = groups.shape[3:5]
        assert planes["scale"][0, 0, 0][at] == at[0] * where[1] + at[1]
        assert planes["offset"][0, 0, 0][at] == -(at[0] * where[1] + at[1])


def test_first_bytes_of_a_grid_block():
    """Channels 0 to 7 of token 0 have codes 0 3 6 9 12 15 2 5.

    Even channels fill the low half-word, 0x2C60, and odd ones the high half-word, 0x5F93.
    """
    grid = Grid(4, "keys", "channel", 32, True, 64)
    planes = grid.pack(grid.groups(block()), torch.zeros(1, 1, 1, 1, 64).half(), None)
    assert planes["codes"].numpy().view(np.uint32).ravel()[0] == 0x5F932C60
    assert planes["codes"].numpy().tobytes()[:4].hex() == "602c935f"


@pytest.mark.parametrize(
    ("bits", "codes", "half_words_expected"),
    [
        # 16 codes of 5 bits in five half-words: three each; the last code uses the spare bit 15 of
        # each.
        (5, [1, 2, 3] + [0] * 12 + [0b10011], [1 | 2 << 5 | 3 << 10 | 1 << 15, 1 << 15, 0, 0, 1 << 15]),
        # 8 codes of 6 bits in three half-words: two each. The spare four bits of each hold two more
        # codes: 63 = low 6, 1 = next 6.
        (6, [1, 2, 0, 0, 0, 0, 63, 1], [1 | 2 << 6 | 0xF << 12, 0b0111 << 12, 0]),
        # 16 codes of 7 bits in seven half-words: two each with two spare bits; 127 fills three and
        # a half, then 1.
        (7, [5] + [0] * 13 + [127, 1], [5 | 3 << 14, 3 << 14, 3 << 14, (1 | 1 << 1) << 14, 0, 0, 0]),
    ],
)
def test_spare_bits_are_as_drawn(bits, codes, half_words_expected):
    n = len(codes)
    matrix = torch.zeros(2 * n, 16, dtype=torch.uint8)
    matrix[0::2, 3] = torch.tensor(codes, dtype=torch.uint8)  # even p: the low half-words, lane 3
    words = pack_lanes.reference(matrix, bits).numpy().view(np.uint32)[0, :, 3]
    assert words.tolist() == half_words_expected
    assert half_words(bits, n).words == len(half_words_expected)


def test_signs_block_is_as_drawn():
    planes = signs_planes(20, torch.float16, "outlier_")
    assert planes["outlier_signs"].shape == (3, 32)
    assert planes["outlier_norms"].shape == (32,)
    x = torch.full((32, 20), -1.0)
    x[4, [0, 9, 19]] = 1.0
    packed = pack_signs(x)
    assert packed.shape == (32, 3)
    assert packed[4].tolist() == [0b1, 0b10, 0b1000]
    assert packed[5].tolist() == [0, 0, 0]
    assert torch.equal(pack_blocks(x), packed.T)


def test_exact_block_is_as_drawn():
    layout = exact_layout(3, torch.float16)
    assert layout.planes["x"].shape == (32, 3)
    x = torch.arange(96.0).reshape(1, 1, 1, 32, 3).half()
    assert x.numpy().tobytes()[:6].hex() == "0000003c0040"
    assert torch.equal(ExactView({"x": x}).decode()[0, 0], torch.arange(96.0).reshape(32, 3))


def test_nearest_code():
    table = torch.tensor([-1.0, 0.0, 0.25, 1.0])
    x = torch.tensor([-9.0, -0.51, -0.49, 0.12, 0.13, 0.6, 0.7, 9.0])
    assert nearest_code(x, table).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_round_scale():
    assert round_scale(torch.tensor([1.0]), torch.float16, "a scale").dtype == torch.float16
    with pytest.raises(UserError, match="a scale of 7e\\+04 exceeds float16"):
        round_scale(torch.tensor([7e4]), torch.float16, "a scale")


@pytest.mark.parametrize(
    ("level_bits", "D", "codes", "expected"),
    [
        # angle bytes [a1 a0] … [b3 b2 b1 b0] … [c3 c2 c1 c0] [d…]: 11.5 bytes for 32 channels, the
        # last half empty
        ((4, 2, 2, 2), 32, [[*range(16)], [1, 2, 3, 0, 0, 0, 0, 2], [3, 0, 0, 1], [2, 1]],
         "1032547698badcfe39804306"),
        # 3-bit codes cross bytes: 1, 2, 3, 4 and then 5, 6 of level 2
        ((3, 3), 8, [[1, 2, 3, 4], [5, 6]], "d158 03".replace(" ", "")),
        ((8, 1), 4, [[0xAB, 0xCD], [1]], "abcd01"),
    ],
)  # fmt: skip
def test_polar_block_is_as_drawn(level_bits, D, codes, expected):
    polar = Polar(level_bits, D)
    planes = [torch.tensor(level).unsqueeze(-1).expand(-1, 32) for level in codes]
    packed = polar.pack(planes)
    layout = polar.layout()
    assert packed.shape == layout.planes["angles"].shape
    assert packed[:, 7].numpy().tobytes().hex() == expected
    assert layout.planes["radii"].shape == (D >> len(level_bits), 32)
    for level, code in enumerate(codes):
        assert polar.unpack(packed, level)[:, 31].tolist() == code


def test_polar_radii_are_norms_over_a_power_of_two():
    polar = Polar((1, 1, 1), 16)
    assert polar.radius_unit == 4
    planes = {"angles": torch.zeros(1, 1, 1, *polar.layout().planes["angles"].shape, dtype=torch.uint8)}
    planes["radii"] = torch.tensor([1.0, 2.0]).half()[:, None].expand(2, 32)[None, None, None]
    x = PolarView(polar, planes, [torch.tensor([0.0, math.pi])] * 3).decode()
    assert x.shape == (1, 1, 32, 16)
    assert x[0, 0, 5].tolist() == [4.0] + [0.0] * 7 + [8.0] + [0.0] * 7
