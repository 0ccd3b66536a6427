"""Triton kernels for encoding give the same bytes as the torch reference, with any rounding.

On a machine without a GPU Triton interprets them on the CPU. `pytest -m gpu` runs the same tests on
a CUDA device.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from packed_views import tokens
from tersekv.codecs.codebooks.fixed import normal_quantiles
from tersekv.kernels import backends, encode_grid, encode_signs, lanes, rotate, triton
from tersekv.kernels.encode_grid import GridPlace
from tersekv.kernels.registry import OPERATORS
from tersekv.kernels.triton import encode, pack
from tersekv.transforms.rotation import hadamard_parts, random_rotation
from test_ops_triton import Counted, device, pytestmark, right  # noqa: F401


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fill outputs with a value that no kernel writes everywhere."""
    empty = torch.Tensor.new_empty

    def filled(x, *size, **options):
        made = empty(x, *size, **options)
        return made.fill_(float("nan") if made.is_floating_point() else 77)

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)


def same(results, expected):
    """Compare bit by bit."""
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result.cpu(), wanted, rtol=0, atol=0, equal_nan=True)


def on(device, *call):  # noqa: F811
    return [x.to(device) if isinstance(x, torch.Tensor) else x for x in call]


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize(("P", "L"), [(64, 32), (80, 20)])
def test_pack_lanes(device, bits, P, L):  # noqa: F811
    torch.manual_seed(P + bits)
    codes = torch.randint(2**bits, (2, 1, P, L), dtype=torch.uint8).mT.contiguous().mT
    same([backends.pack_lanes(codes.to(device), bits)], [right(lanes.pack_lanes, codes, bits)])


@pytest.mark.parametrize(("P", "L", "dtype"), [(1, 1, torch.int64), (50, 96, torch.int32), (1056, 16, torch.int16)])
def test_pack_lanes_of_other_sizes(device, P, L, dtype):  # noqa: F811
    codes = torch.randint(32, (2, P, L)).to(dtype)[1:]
    same([backends.pack_lanes(codes.to(device), 5)], [right(lanes.pack_lanes, codes, 5)])


def vectors(B, H, T, D):
    """Return tokens in a slice of a larger tensor, heads after tokens, as a cache receives them."""
    return tokens(B, T, H, D + 16).transpose(1, 2)[..., 5 : 5 + D]


PLACES = [
    ("token", 32, 32, 64), ("token", 80, 32, 80), ("token", 20, 32, 80), ("channel", 32, 32, 64),
    ("channel", 8, 32, 80), ("channel", 64, 64, 96), ("token", 1, 32, 16),
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_group_ranges(device, place):  # noqa: F811
    axis, group, t, D = place
    torch.manual_seed(group)
    x = vectors(2, 2, 2 * t, D)
    x[0, 1, 5] = float("nan")
    call = x, GridPlace("keys", 4, axis, group, t)
    same(backends.group_ranges(*on(device, *call)), right(encode_grid.group_ranges, *call))


def grid_calls(number, side):
    """Return two calls of `encode_grid` for place `number`: integers and a codebook, with two
    dtypes of range."""
    axis, group, t, D = PLACES[number]
    B, H, N = [(2, 1, 1), (1, 2, 1), (1, 1, 2)][number % 3]
    bits = 1 + (number + 3 * (side == "keys")) % 8
    torch.manual_seed(bits)
    x, place = vectors(B, H, N * t, D), GridPlace(side, bits, axis, group, t)
    low, high = right(encode_grid.group_ranges, x, place)
    scale, offset = ((high - low) / (2**bits - 1)).half(), low.bfloat16()
    scale[0, 0, 0, 0] = 0
    table = torch.randn(2**bits).sort().values
    return (x, place, scale, offset, None), (x, place, high, None, table)


@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("number", range(len(PLACES)), ids=map(str, PLACES))
def test_encode_grid(device, number, side):  # noqa: F811
    for call in grid_calls(number, side):
        same([backends.encode_grid(*on(device, *call))], [right(encode_grid.encode_grid, *call)])


def test_rounding_of_halves(device):  # noqa: F811
    """Halves are rounded to the even integer and to the lower entry."""
    x = torch.arange(-8, 24).view(1, 1, 1, 32).expand(1, 1, 32, 32) / 2
    place = GridPlace("values", 3, "token", 32, 32)
    same([backends.encode_grid(*on(device, x, place, None, None, None))], [
        right(lanes.pack_lanes, x.round().clamp(0, 7).long()[:, :, None], 3)
    ])  # fmt: skip
    table = torch.tensor([-3.0, -1, 0, 1, 2, 2, 5, 8])
    codes = (x.unsqueeze(-1) > (table[1:] + table[:-1]) / 2).sum(-1)
    same(
        [backends.encode_grid(*on(device, x, place, None, None, table))],
        [right(lanes.pack_lanes, codes[:, :, None], 3)],
    )


def call_with_one_range():
    """Return a call of `encode_grid` with one range for all blocks."""
    torch.manual_seed(0)
    x, place = vectors(1, 2, 64, 64), GridPlace("keys", 4, "channel", 32, 32)
    low, high = (r(2)[:, :, None, None] for r in (x.amin, x.amax))
    return x, place, ((high - low) / 15).half(), low.half(), None


def test_one_range_for_all_blocks(device):  # noqa: F811
    call = call_with_one_range()
    same([backends.encode_grid(*on(device, *call))], [right(encode_grid.encode_grid, *call)])


def test_no_tokens(device):  # noqa: F811
    x, place = torch.zeros(2, 3, 0, 64), GridPlace("keys", 4, "token", 32, 32)
    same([backends.encode_grid(*on(device, x, place, None, None, None))], [torch.zeros(2, 3, 0, 2, 8, 16).int()])
    assert backends.group_ranges(*on(device, x, place))[0].shape == (2, 3, 0, 2, 32)


@pytest.mark.parametrize(("M", "D", "t"), [(128, 64, 32), (100, 80, 32), (1, 3, 5), (256, 8, 20)])
def test_encode_signs(device, M, D, t):  # noqa: F811
    torch.manual_seed(M)
    x, sketch = torch.randn(2, 1, t, D), torch.randn(M, D)
    x[0, 0, 1] = 0  # +1 each
    call = x.mT.contiguous().mT, sketch
    same([backends.encode_signs(*on(device, *call))], [right(encode_signs.encode_signs, *call)])


@pytest.mark.parametrize("D", [128, 80, 64, 12, 7])
def test_rotate_hadamard(device, D):  # noqa: F811
    """In float64 another order of sums rarely changes a float32, and then only its last bit."""
    torch.manual_seed(D)
    x = tokens(2, 1, 20, D) if D >= 8 else torch.randn(2, 1, 20, D)
    call = x.mT.contiguous().mT, random_rotation(D, 3, "hadamard"), *hadamard_parts(D, 3, "cpu")
    result, expected = backends.rotate_hadamard(*on(device, *call)).cpu(), right(rotate.rotate_hadamard, *call)
    assert (result != expected).float().mean() <= 1e-3
    torch.testing.assert_close(result, expected, rtol=1.2e-7, atol=0)


CODECS = {
    "kivi": [{}], "uniform": [{"axis": "channel", "group": 0, "scales": "bf16"}],
    "normalfloat": [{}, {"zero_point": True, "axis": "channel"}],
    "turboquant": [
        {"rotation": "hadamard"}, {"bits": 2.5, "correct_norm": True}, {"bits": 3.25, "variant": "prod"},
    ],
    "kvquant": [{"calibration": "prompt"}, {"calibration": "prompt", "axis": "token", "table": "nf"}],
    "qjl": [{"initial_layers": 0}, {"initial_layers": 0, "outliers_per": "group", "sketch": 100}],
}  # fmt: skip


@pytest.mark.parametrize(("method", "options"), [(m, o) for m, all_ in CODECS.items() for o in all_], ids=str)
def test_codecs_make_the_same_planes(device, method, options):  # noqa: F811
    from tersekv.codecs import methods

    torch.manual_seed(1)
    x = tokens(1, 2, 32 if options.get("table") else 64, 64)
    pair = methods()[method].build(**options)
    for codec in (pair.keys, pair.values):
        with backends.forced("reference"):
            fitted = codec.fit(x).to(device)
            expected = fitted.encode(x.to(device))
        result = fitted.encode(x.to(device))
        assert result.keys() == expected.keys()
        same(result.values(), [plane.cpu() for plane in expected.values()])


LAUNCHES = {
    ("kivi", ()): ["ranges", "pack"], ("turboquant", (("rotation", "hadamard"),)): ["hadamard", "pack"],
    ("qjl", ()): ["signs", "signs"],
    ("kvquant", (("calibration", "prompt"), ("axis", "token"))):
        ["quantiles", "pack", "count_outliers", "pack_outliers"],
    ("polarquant", (("rotation", "hadamard"),)): ["hadamard", "polar_codes", "polar_pack"],
}  # fmt: skip


@pytest.mark.parametrize(("method", "options"), LAUNCHES, ids=str)
def test_launches_of_a_block(device, method, options, monkeypatch):  # noqa: F811
    """The number of launches does not depend on heads."""
    from tersekv.codecs import methods
    from tersekv.kernels.triton import encode_kernels

    launched, names = [], set().union(*LAUNCHES.values())
    for name in names:
        monkeypatch.setattr(encode_kernels, name, Counted(getattr(encode_kernels, name), name, launched))
    x = torch.randn(1, 2, 32, 64, device=device)  # 1 % of 128 values is one outlier
    codec = methods()[method].build(**dict(options)).keys.fit(x)
    launched.clear()
    codec.encode(x)
    assert launched == LAUNCHES[method, options]


def test_launches_go_to_the_tensors_device(device, monkeypatch):  # noqa: F811
    """Triton launches on the current device, but a model may be distributed over several."""
    current = []

    @contextmanager
    def on(device):
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", on)
    where = SimpleNamespace(is_cuda=True, device="cuda:1")
    run = triton.on_own_device(lambda *call: list(current))
    assert run(where) == run([where], 1) == ["cuda:1"]
    assert run(SimpleNamespace(is_cuda=False)) == current == []
    for name in OPERATORS:
        run = next((getattr(module, name) for module in (triton, encode, pack) if hasattr(module, name)), None)
        assert run is None or hasattr(run, "__wrapped__"), name


X, PLACE = torch.zeros(1, 1, 64, 64), GridPlace("keys", 4, "token", 32, 32)
REFUSALS = {
    "type": ((X.double(), PLACE, None, None, None), "x is torch.float64, not float32"),
    "blocks": ((X[:, :, :40], PLACE, None, None, None), "not [B, H, T, D] with T whole blocks of 32"),
    "scale": ((X, PLACE, X.long(), None, None), "scale is torch.int64"),
    "table": ((X, PLACE, None, None, X[0, 0, 0, :16].half()), "table is torch.float16, not float32"),
    "device": ((X, PLACE, X.to("meta"), None, None), "another argument on meta"),
    "gradient": ((X.clone().requires_grad_(), PLACE, None, None, None), "x needs a gradient"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_why_not(device, what):  # noqa: F811
    if device == "cuda":
        pytest.skip("refusals do not depend on the device")
    call, text = REFUSALS[what]
    assert encode.why_not_encode_grid(X, PLACE, None, None, normal_quantiles(4, "cpu")) is None
    assert text in str(encode.why_not_encode_grid(*call))
    if what in ("type", "blocks", "gradient"):
        assert text in str(encode.why_not_group_ranges(*call[:2]))


def test_codes_that_are_not_integers(device):  # noqa: F811
    if device == "cuda":
        pytest.skip("refusals do not depend on the device")
    assert "not integers" in str(encode.why_not_pack_lanes(X, 4))
