"""The native encoders on every instruction set of this machine give the same bytes as the torch
reference.

Sums of products have another order than torch's. They are in float64, or doubtful ones are
recomputed in float64. One rotated element in a thousand may therefore differ by its last bit. A
polar code may differ if its angle is equally near to two entries (`test_ops_triton_polar`).
"""

from __future__ import annotations

import pytest
import torch

from native_calls import why_not
from packed_views import tokens
from tersekv.codecs.codebooks.fixed import normal_quantiles
from tersekv.codecs.polarquant import offline_table
from tersekv.errors import UserError
from tersekv.kernels import backends, encode_grid, encode_polar, encode_signs, lanes, rotate
from tersekv.kernels.cpu import encode
from tersekv.kernels.encode_grid import GridPlace
from tersekv.layouts.polar import Polar
from tersekv.transforms.rotation import hadamard_parts, random_rotation
from test_ops_parity import isa, pytestmark  # noqa: F401
from test_ops_triton_encode import CODECS, PLACES, call_with_one_range, grid_calls, poisoned, same, vectors  # noqa: F401
from test_ops_triton_polar import CASES, NEAR, compare, distance, fitted

IDS = list(map(str, PLACES))


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize(("P", "L", "dtype"), [
    (64, 32, torch.uint8), (80, 20, torch.int64), (50, 96, torch.int32), (1056, 16, torch.int16), (1, 1, torch.int8)
], ids=str)  # fmt: skip
def test_pack_lanes(isa, bits, P, L, dtype):  # noqa: F811
    torch.manual_seed(P + bits)
    most = 2 ** min(bits, 7) if dtype is torch.int8 else 2**bits
    codes = torch.randint(most, (2, 3, P, L)).to(dtype).mT.contiguous().mT[:, 1:]
    same([encode.pack_lanes(codes, bits)], [lanes.pack_lanes.reference(codes, bits)])


@pytest.mark.parametrize("place", PLACES, ids=IDS)
def test_group_ranges(isa, place):  # noqa: F811
    axis, group, t, D = place
    torch.manual_seed(group)
    x = vectors(2, 2, 2 * t, D)
    x[0, 1, 5] = float("nan")
    x[1, 0, 3] = float("-inf")
    call = x, GridPlace("keys", 4, axis, group, t)
    same(encode.group_ranges(*call), encode_grid.group_ranges.reference(*call))


@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("number", range(len(PLACES)), ids=IDS)
def test_encode_grid(isa, number, side):  # noqa: F811
    for call in grid_calls(number, side):
        same([encode.encode_grid(*call)], [encode_grid.encode_grid.reference(*call)])


def in_halves(x, dtype):
    """Return x in a dtype of 16 bits, in a slice of a larger tensor."""
    wide = torch.zeros(*x.shape[:-1], x.shape[-1] + 3, dtype=dtype)
    return wide[..., 2:-1].copy_(x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("number", range(len(PLACES)), ids=IDS)
def test_tokens_of_16_bits(isa, number, dtype):  # noqa: F811
    for side in ("keys", "values"):
        for x, *rest in grid_calls(number, side):
            for halves in (in_halves(x, dtype), in_halves(x.mT, dtype).mT):
                same([encode.encode_grid(halves, *rest)], [encode_grid.encode_grid.reference(halves.float(), *rest)])
                same(encode.group_ranges(halves, rest[0]), encode_grid.group_ranges.reference(halves.float(), rest[0]))


@pytest.mark.parametrize("axis", ["token", "channel"])
def test_scales_of_any_size(isa, axis):  # noqa: F811
    """Quotients are those of a division, also where 1 / scale or the quotient is infinite."""
    sizes = torch.tensor([0, 1e-45, 1e-39, 2.0**-91, 2.0**-90, 1e-7, 0.3, 7, 1e20, 2.0**90, 2.0**91, 3e38])
    more = torch.tensor([float("inf"), float("nan"), 1e-45, 3.4e38, 2.0**24, 0])
    for scale in sizes.split(1):
        x = torch.cat([*(scale * f for f in (0.5, 1, 1.5, 2.4999998, 6.5, 1e9, 1e30)), more])
        x = torch.cat([x, -x]).repeat(40)[:1024].view(1, 1, 32, 32)
        for side in ("keys", "values"):
            for bits, table in ((3, None), (4, torch.linspace(-2, 9, 16)), (8, None)):
                call = x, GridPlace(side, bits, axis, 32, 32), scale.view(1, 1, 1, 1, 1), None, table
                same([encode.encode_grid(*call)], [encode_grid.encode_grid.reference(*call)])


@pytest.mark.parametrize("bits", range(1, 9))
def test_rounding_of_halves(isa, bits):  # noqa: F811
    """Halves are rounded to the even integer and to the lower of two codebook entries; NaN gets the
    last one.

    Some entries are equal.
    """
    x = (torch.arange(-2 * 256, 2 * 256) / 2).view(1, 1, 32, 32)
    place = GridPlace("values", bits, "token", 32, 32)
    same(
        [encode.encode_grid(x, place, None, None, None)],
        [encode_grid.encode_grid.reference(x, place, None, None, None)],
    )
    table = torch.arange(2**bits).float() // 2 * 2
    x[..., 3, 4] = float("nan")
    same(
        [encode.encode_grid(x, place, None, None, table)],
        [encode_grid.encode_grid.reference(x, place, None, None, table)],
    )


def test_one_range_for_all_blocks(isa):  # noqa: F811
    call = call_with_one_range()
    same([encode.encode_grid(*call)], [encode_grid.encode_grid.reference(*call)])


@pytest.mark.parametrize(("M", "D", "t"), [(128, 64, 32), (100, 80, 32), (1, 3, 5), (256, 8, 20), (9, 1, 1)])
def test_encode_signs(isa, M, D, t):  # noqa: F811
    torch.manual_seed(M)
    x, sketch = torch.randn(2, 1, t, D), torch.randn(M, D)
    x[0, 0, 0] = 0  # +1 each
    call = x.mT.contiguous().mT, sketch
    same([encode.encode_signs(*call)], [encode_signs.encode_signs.reference(*call)])


@pytest.mark.parametrize("size", [1.0, 1e-23, 1e-36, 1e-44, 3e38, float("inf"), float("nan")])
def test_signs_beyond_float32_precision(isa, size):  # noqa: F811
    """Signs of small remainders after large products cancel."""
    rest = torch.tensor([1.0, -1.0]).repeat(16)
    x = torch.stack([torch.ones(32), 1e-10 * rest, -torch.ones(32)], -1)[None] * size
    sketch = torch.tensor([[1.0, 1, 1], [3e-4, 5, 3e-4], [-1e3, 1, -1e3], [1, 0, 1], [1, 0.5, -1]])
    same([encode.encode_signs(x, sketch)], [encode_signs.encode_signs.reference(x, sketch)])


def close(result, expected):
    assert (result != expected).float().mean() <= 1e-3
    torch.testing.assert_close(result, expected, rtol=1.2e-7, atol=0)


@pytest.mark.parametrize("D", [128, 80, 64, 12, 7])
@pytest.mark.parametrize("kind", ["hadamard", "qr"])
def test_rotations(isa, D, kind):  # noqa: F811
    torch.manual_seed(D)
    x = (tokens(2, 1, 20, D) if D >= 8 else torch.randn(2, 1, 20, D)).mT.contiguous().mT
    matrix = random_rotation(D, 3, kind)
    if kind == "qr":
        close(encode.rotate_dense(x, matrix), rotate.rotate_dense.reference(x, matrix))
    else:
        call = x, matrix, *hadamard_parts(D, 3, "cpu")
        close(encode.rotate_hadamard(*call), rotate.rotate_hadamard.reference(*call))
    rotation = encode.rotate_dense if kind == "qr" else encode.rotate_hadamard
    rest = (matrix,) if kind == "qr" else call[1:]
    for dtype in (torch.float16, torch.bfloat16):
        halves = in_halves(x, dtype)
        same([rotation(halves, *rest)], [rotation(halves.float(), *rest)])


def test_a_rotation_does_not_depend_on_the_batch(isa):  # noqa: F811
    torch.manual_seed(0)
    x, matrix = torch.randn(37, 64), random_rotation(64, 0)
    assert torch.equal(encode.rotate_dense(x, matrix)[20:21], encode.rotate_dense(x[20:21], matrix))


@pytest.mark.parametrize("online", [False, True], ids=["offline", "tables per row"])
@pytest.mark.parametrize(("level_bits", "D"), CASES, ids=str)
def test_encode_polar(isa, level_bits, D, online):  # noqa: F811
    torch.manual_seed(D)
    x = torch.randn(2, 1, 20, D).mT.contiguous().mT * 10.0 ** torch.randint(-12, 12, (2, 1, 20, 1))
    tables = [
        fitted(level, bits, 2).sort(-1).values if online else offline_table(bits, level, "cpu")
        for level, bits in enumerate(level_bits, start=1)
    ]
    call = x, level_bits, tables
    compare(encode.encode_polar(*call), encode_polar.encode_polar.reference(*call), *call)


@pytest.mark.parametrize("turn", [0.0, 0.01, 2.0, 3.9])
def test_every_direction(isa, turn):  # noqa: F811
    """All directions, with boundaries and axes, any seam, and a zero vector, whose angle is 0."""
    angle = torch.arange(512, dtype=torch.float64) * 2 * torch.pi / 512
    x = torch.stack([angle.cos(), angle.sin()], -1).float().view(1, 1, 32, 32)
    x[..., 0, :] = 0
    tables = [offline_table(3, 1, "cpu") / 2 + turn / 2, offline_table(2, 2, "cpu")]
    angles, radii = encode.encode_polar(x, [3, 2], tables)
    torch.testing.assert_close(radii, encode_polar.encode_polar.reference(x, [3, 2], tables)[1], rtol=3e-7, atol=0)
    polar, exact = Polar((3, 2), 32), encode_polar.to_polar(x.double(), 2)[0]
    for level, table in enumerate(tables):
        angle, codes = exact[level].transpose(-1, -2), polar.unpack(angles, level)
        best = torch.stack([distance(angle, torch.full_like(codes, i), table, level == 0) for i in range(len(table))])
        assert float((distance(angle, codes, table, level == 0) - best.amin(0)).max()) <= NEAR


@pytest.mark.parametrize(("method", "options"), [(m, o) for m, all_ in CODECS.items() for o in all_], ids=str)
def test_codecs_make_the_same_planes(isa, method, options):  # noqa: F811
    from tersekv.codecs import methods

    torch.manual_seed(1)
    x = tokens(1, 2, 64, 64)
    pair = methods()[method].build(**options)
    for codec in (pair.keys, pair.values):
        with backends.forced("reference"):
            fitted = codec.fit(x)
            expected = fitted.encode(x)
        with backends.forced("cpu"):
            result = fitted.encode(x)
        assert result.keys() == expected.keys()
        same(result.values(), expected.values())


def calls(tokens: int = 1024) -> dict[str, tuple]:
    """Return one call of each operator; with many tokens, large enough to use threads."""
    torch.manual_seed(0)
    x, place = torch.randn(2, 2, tokens, 64), GridPlace("keys", 3, "token", 32, 32)
    scale, tables = torch.rand(2, 2, tokens // 32, 2, 32), [offline_table(2, level, "cpu") for level in (1, 2)]
    return {
        "group_ranges": (x, place), "encode_grid": (x, place, scale, None, torch.randn(8).sort().values),
        "pack_lanes": (torch.randint(8, (2, tokens // 16, 64, 32)), 3), "encode_signs": (x, torch.randn(64, 64)),
        "encode_polar": (x.unflatten(2, (-1, 32)), [2, 2], tables), "rotate_dense": (x, random_rotation(64, 0)),
        "rotate_hadamard": (x, random_rotation(64, 0, "hadamard"), *hadamard_parts(64, 0, "cpu")),
    }  # fmt: skip


def planes(made) -> list[torch.Tensor]:
    return list(made) if isinstance(made, tuple) else [made]


@pytest.mark.parametrize("op", sorted(calls()))
def test_threads(op, monkeypatch):
    call = calls()[op]
    alone = getattr(encode, op)(*call)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    same(planes(getattr(encode, op)(*call)), planes(alone))


@pytest.mark.parametrize("op", sorted(calls()))
def test_no_tokens(op):
    first, *rest = calls()[op]
    if op == "encode_grid":
        rest[1] = rest[1][:0]
    call = first[:0], *rest
    same(planes(getattr(encode, op)(*call)), planes(getattr(backends, op).reference(*call)))


X, PLACE = torch.zeros(2, 1, 64, 64), GridPlace("keys", 4, "token", 32, 32)
REFUSED = {
    "whole blocks of 32 tokens, got T = 40": ("group_ranges", (X[:, :, :40], PLACE)),
    r"expected \[B, H, T, D\]": ("group_ranges", (X[0], PLACE)),
    "group that divides 64, got 33": ("encode_grid", (X, PLACE._replace(group=33), None, None, None)),
    "at least 1": ("group_ranges", (X, PLACE._replace(block_tokens=0))),
    "scale: expected a shape that broadcasts": ("encode_grid", (X, PLACE, X[:, 0, 0], None, None)),
    "table: .* entries = 16, got 4": ("encode_grid", (X, PLACE, None, None, torch.zeros(4))),
    "bits must be 1 to 8, got 9": ("pack_lanes", (X.long(), 9)),
    r"codes: expected \[..., P, L\]": ("pack_lanes", (X[0, 0, 0].long(), 4)),
    "sketch: .* D = 64, got 32": ("encode_signs", (X, torch.zeros(8, 32))),
    r"x: expected \[..., t, D\]": ("encode_signs", (X[0, 0, 0], torch.zeros(8, 64))),
    "D to be a multiple of 2\\^7, got 64": ("encode_polar", (X, [1] * 7, [torch.zeros(2)] * 7)),
    "1 to 8 for each of 1 tables": ("encode_polar", (X, [9], [torch.zeros(512)])),
    "table: .* entries = 4, got 2": ("encode_polar", (X, [2], [torch.zeros(2)])),
    "table: .* rows = 2, got 3": ("encode_polar", (X, [1], [torch.zeros(3, 2)])),
    "matrix: .* D = 64, got 32": ("rotate_dense", (X, torch.zeros(64, 32))),
    "channels below 64, got 64": ("rotate_hadamard", (X, X[0, 0], torch.full((64,), 64).int(), X[0, 0, 0])),
    "signs: .* D = 64, got 8": ("rotate_hadamard", (X, X[0, 0], torch.zeros(64).int(), torch.zeros(8))),
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_wrong_sizes_are_named(text):
    op, call = REFUSED[text]
    with pytest.raises(ValueError, match=text):
        getattr(encode, op)(*call)


LEFT = {
    "x is torch.float64": ("encode_grid", (X.double(), PLACE, None, None, None)),
    "x needs a gradient": ("group_ranges", (X.clone().requires_grad_(), PLACE)),
    "scale is torch.float64": ("encode_grid", (X, PLACE, torch.ones(1, 1, 1, 1, 1).double(), None, None)),
    "table is torch.float16": ("encode_grid", (X, PLACE, None, None, normal_quantiles(4, "cpu").half())),
    "sketch is torch.float64": ("encode_signs", (X, torch.ones(8, 64).double())),
    "matrix is torch.float64": ("rotate_dense", (X, torch.eye(64).double())),
    "codes is torch.float32": ("pack_lanes", (X, 4)),
    "a table is torch.float64": ("encode_polar", (X, [1], [torch.tensor([1.0, 2.0]).double()])),
}


@pytest.mark.parametrize("text", LEFT)
def test_refused_calls_use_torch(text):
    """Kernels report the reason, and torch computes the result unless they are forced."""
    op, call = LEFT[text]
    assert text in why_not(getattr(encode, op), *call)
    with backends.forced("cpu"), pytest.raises(UserError, match=text):
        getattr(backends, op)(*call)
    same(planes(getattr(backends, op)(*call)), planes(getattr(backends, op).reference(*call)))
