"""Attention over every packed layout, on every instruction set of this machine, compared with
decoding in torch.

Bounds are those of `test_ops_parity.py`: float32's error of a sum is a few ulps of the sum of
absolute values. With AVX-512, scores of `signs` come from 16-bit tables, whose rounding is added.
"""

import functools

import pytest
import torch

from native_calls import ROUNDING_ISAS, why_not
from packed_views import FORMATS, magnitude, make_mask, packed, roped, table_error, tokens
from tersekv.kernels import cpu
from tersekv.kernels.cpu import attend as cpu_attend
from tersekv.layouts.exact import ExactView
from test_ops_parity import compare, expectation, isa, one_thread, poisoned_outputs, pytestmark  # noqa: F401


def run(keys, values, R, mask=None, scaling=None, softcap=None):
    """Compare views of keys and values with their decoding, without the linear map applied outside."""
    keys, values = keys.inner, values.inner
    key, value = keys.decode(), values.decode()
    query = torch.randn(*key.shape[:2], R, key.shape[-1])
    args = query, keys.operand, values.operand, mask, scaling or key.shape[-1] ** -0.5, softcap
    assert why_not(cpu_attend.attend_packed, *args) is None
    poison = torch.full((*query.shape[:2], 8, query.shape[3]), float("nan"))
    cpu_attend.attend_packed(poison, *args[1:3], None, *args[4:])  # the next call must not read data left by this one
    result = cpu_attend.attend_packed(*args)
    expected = expectation(query, key, value, (magnitude(keys), magnitude(values)), mask, *args[4:])
    if cpu.isa() not in ("scalar", "avx2"):
        error = table_error(keys, query) * args[4]
        out_bound = expected.out_bound + 2 * error * float(value.abs().max())
        expected = expected._replace(out_bound=out_bound, lse_bound=expected.lse_bound + error)
    if cpu.isa() in ROUNDING_ISAS:  # a part may be a grid, which rounds; test_ops_parity.py bounds it
        rounded = (result[0] - expected.out).abs() <= expected.out_bound
        assert (result[0] - expected.out)[~rounded].norm() <= 1e-2 * expected.out.norm()  # 0 for fully masked rows
    else:
        compare(result, expected)
    return args, result


@functools.cache
def view(name, side, B=1, H=2, T=128, D=64):
    torch.manual_seed(D + T + len(name))
    return packed(name, side, tokens(B, H, T, D))


NAMES = list(FORMATS)
PAIRS = [(NAMES[i], NAMES[(i + step) % len(NAMES)]) for i in range(len(NAMES)) for step in (0, 1, 7)]
"""Each layout of keys with three of values: kernels read the two sides with code of their own."""


@pytest.mark.parametrize(("keys", "values"), PAIRS)
def test_pairs(keys, values):
    torch.manual_seed(0)
    run(view(keys, "keys"), view(values, "values"), 3)


SHAPES = [
    (1, 1, 64, 64, 1),
    (2, 3, 192, 128, 4),
    (2, 1, 640, 96, 5),
    (1, 2, 64, 160, 8),
    (3, 2, 1088, 64, 2),
    (1, 1, 128, 256, 7),
]


@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sizes(isa, name, side, shape):  # noqa: F811
    B, H, T, D, R = shape
    torch.manual_seed(R)
    other = view("grid", "values" if side == "keys" else "keys", B, H, T, D)
    one = view(name, side, B, H, T, D)
    mask = None if R % 2 else make_mask(B, R // 2, T)
    run(*((one, other) if side == "keys" else (other, one)), R, mask, softcap=20.0 if R == 5 else None)


@pytest.mark.parametrize("rows", ["shared", "per row", "per head"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("kind", "R"), [("halves", 64), ("halves", 32), ("pairs", 64), ("pairs", 48)])
def test_keys_before_rope(isa, name, kind, R, rows):  # noqa: F811
    torch.manual_seed(R)
    T = 1088 if rows == "shared" else 128
    run(roped(view(name, "keys", 2, 3, T, 64), kind, R, T, rows), view("grid", "values", 2, 3, T, 64), 5)


@pytest.mark.parametrize("R", [2, 6, 10, 64])
@pytest.mark.parametrize("T", [1, 17, 33, 65, 513])
def test_any_number_of_keys_before_rope(isa, T, R):  # noqa: F811
    torch.manual_seed(T)
    keys, values = (ExactView({"x": torch.randn(2, 3, T, 1, 64)}) for _ in range(2))
    run(roped(keys, "halves", R, T), values, 3)
