"""Every operator on every instruction set of this machine against the float64 reference, with odd
shapes.

Bounds: a score is a float32 sum whose error is a few ulps of Σ|q|·|k̂|, so e_s = 8·2⁻²⁴·max
Σ|q|·|k̂|·scaling. The relative error of a weight is then e_s. The error of an output is 2·e_s +
32·2⁻²⁴ of the largest |v̂|, and that of the log-sum-exp is e_s and its own ulps. Magnitudes count
scale·table and offset separately, because the kernels add them separately.

Grids in bfloat16: coefficients are rounded to 8 bits. Each error is at most 2⁻⁸ of the coefficient,
and its root mean square is less than u = 2⁻⁹. The standard deviation of a score's error is then
below u·√Σ(q·scale·table)²·scaling; the bound is four of them. A weight has an additional error of
u. Codebook entries that bfloat16 cannot represent have an error of at most 2·u of the largest one,
about the middle of the codebook. Where rounding changes nothing, the bounds of float32 hold.
"""

import functools
import math
import multiprocessing
import os
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from native_calls import ROUNDING_ISAS, why_not
from packed_views import make_mask
from tersekv.kernels import cpu
from tersekv.kernels.attend_grid import GridSide, decode_grid
from tersekv.kernels.attend_packed import attend_packed, decoded
from tersekv.kernels.cpu import attend as cpu_attend
from tersekv.kernels.lanes import pack_lanes
from tersekv.kernels.softmax import attend_scores
from tersekv.kernels.softmax import merge_segments as merge_reference
from tersekv.recipe import Recipe

MISSING = cpu.why_not_built()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=f"{MISSING}")
ISAS = [] if MISSING else [name for name, missing in cpu.isas().items() if missing is None]
ULP = 2.0**-24
BF16_ULP = 2.0**-9


@pytest.fixture(params=ISAS or ["none"])
def isa(request):
    cpu.set_isa(request.param)
    yield request.param
    cpu.set_isa("auto")


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    """Fill outputs with NaN, so that an element that a kernel does not write is visible."""
    monkeypatch.setattr(torch, "empty", lambda shape: torch.full(tuple(shape), float("nan")))


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_side(side, bits, axis, group, t, D, B=1, H=2, N=3, offset=True, dtype=torch.float16, slack=2, shared=False):
    """Return a random side whose tensors are slices of larger ones with garbage codes and NaN
    scales beyond N."""
    P, L = (D, t) if side == "keys" else (t, D)
    grouped = D if axis == "token" else t
    group = grouped if group == "all" else group
    codes = pack_lanes.reference(torch.randint(0, 2**bits, (B, H, N + slack, P, L)), bits)

    def plane(low, high):
        shape = (D // group, t) if axis == "token" else (t // group, D)
        if shared:
            one = torch.zeros(B, H, 1, *shape).uniform_(low, high)
            return one.to(dtype).expand(B, H, N, *shape)
        full = torch.zeros(B, H, N + slack, *shape).uniform_(low, high).to(dtype)
        full[:, :, N:] = float("nan")
        return full[:, :, :N]

    # Entries that bfloat16 represents, also minus the middle of the table.
    table = ((torch.linspace(-1, 1, 2**bits) + 0.1 * torch.rand(2**bits)) * 64).round() / 64
    return GridSide(
        side, bits, axis, group, t, D, codes[:, :, :N], plane(0.5, 1.5), plane(-1, 1) if offset else None, table
    )


def magnitude(grid):
    apart = grid._replace(table=grid.table.abs(), scale=grid.scale.abs(), offset=None)
    total = decode_grid(apart).double()
    if grid.offset is not None:
        total += decode_grid(apart._replace(table=torch.ones_like(grid.table), scale=grid.offset.abs()))
    return total


class Expected(NamedTuple):
    out: Tensor
    lse: Tensor
    out_bound: float
    lse_bound: float
    bf16_score_error: float = 0.0
    bf16_value_size: float = 0.0
    bf16_value_error: float = 0.0

    def of_bfloat16(self):
        """Add the bounds of a grid's bfloat16 products."""
        error = self.bf16_score_error
        of_values = (2 * error + BF16_ULP) * self.bf16_value_size + self.bf16_value_error
        return self._replace(out_bound=self.out_bound + of_values, lse_bound=self.lse_bound + error)


def expectation(query, key, value, size, mask, scaling, softcap=None):
    """Compute the expected output and its bounds. size: magnitudes of keys and values."""
    out, lse = attend_scores(query.double() @ key.double().mT, value.double(), mask, scaling, softcap)
    if out.numel() == 0 or key.shape[2] == 0:
        return Expected(out, lse, 0.0, 0.0)
    score_error = 8 * ULP * ((query.abs().double() @ size[0].mT).max().item() * abs(scaling) + (softcap or 0))
    seen = lse[lse.isfinite()].abs()
    largest_lse = seen.max().item() if seen.numel() else 0
    out_bound = (2 * score_error + 32 * ULP) * max(1.0, size[1].max().item())
    return Expected(out, lse, out_bound, score_error + 16 * ULP * (1 + largest_lse))


def compare(result, expected):
    torch.testing.assert_close(result[0].double(), expected.out, rtol=0, atol=expected.out_bound)
    torch.testing.assert_close(result[1].double(), expected.lse, rtol=0, atol=expected.lse_bound)


def centred(grid):
    """Return the table shifted so that its middle is zero, if there is an offset to absorb the
    shift."""
    middle = 0.0 if grid.offset is None else (grid.table.min() + grid.table.max()) / 2
    return grid.table - middle


def multiplied(grid):
    """Return scale·table, the factors of the bfloat16 coefficients."""
    return decode_grid(grid._replace(table=centred(grid), offset=None)).double()


def table_error(grid):
    """Return the largest error of each element from rounding the table."""
    table = centred(grid)
    held = bool((table.bfloat16() == table).all())
    error = torch.full_like(table, 0.0 if held else 2 * BF16_ULP * float(table.abs().max()))
    return decode_grid(grid._replace(table=error, scale=grid.scale.abs(), offset=None)).double()


def grid_expectation(query, keys, values, mask, scaling, softcap):
    size = magnitude(keys), magnitude(values)
    expected = expectation(query, decode_grid(keys), decode_grid(values), size, mask, scaling, softcap)
    if expected.out.numel() == 0 or keys.codes.shape[2] == 0:
        return expected
    squares = BF16_ULP**2 * multiplied(keys) ** 2 + table_error(keys) ** 2
    variance = (query.double() ** 2 @ squares.mT).max().item()
    return expected._replace(
        bf16_score_error=4 * variance**0.5 * abs(scaling), bf16_value_size=size[1].max().item(),
        bf16_value_error=table_error(values).max().item(),
    )  # fmt: skip


def compare_grid(result, expected):
    compare(result, expected.of_bfloat16() if cpu.isa() in ROUNDING_ISAS else expected)


def run_grid(keys, values, R, mask=None, scaling=0.125, softcap=None, query_scale=1.0):
    query = torch.randn(*keys.codes.shape[:2], R, keys.head_dim) * query_scale
    args = query, keys, values, mask, scaling, softcap
    assert why_not(cpu_attend.attend_packed, *args) is None
    result = cpu_attend.attend_packed(*args)
    compare_grid(result, grid_expectation(*args))
    return args, result


DIMS = [64, 16, 80, 96, 128, 256, 72]
ROWS = [1, 3, 4, 5, 12, 32]
BLOCKS = [(3, 32), (1, 64), (40, 32), (3, 128), (1, 32), (5, 48), (2, 16)]
GROUPS = ["all", 16, "all", 32, 8]
AXES = [("channel", "token"), ("token", "channel"), ("channel", "channel"), ("token", "token")]


def pick(options, i, valid=lambda option: True):
    return next(option for k in range(len(options)) if valid(option := options[(i + k) % len(options)]))


def grid_case(i):
    """Return case i. Every list above cycles at its own length, so that combinations vary."""
    D, Dv = DIMS[i % 7], DIMS[(i // 2 + i // 7) % 7] if i % 3 == 0 else DIMS[i % 7]
    N, t = BLOCKS[(i + i // 7) % 7]
    if max(D, Dv) > 128 and N > 5:
        N = 3
    key_axis, value_axis = AXES[i % 4]

    def group(side, axis, D, i):
        grouped, on_lanes = (D, side == "values") if axis == "token" else (t, side == "keys")
        fits = lambda g: g == "all" or (grouped % g == 0 and (g % 16 == 0 or not on_lanes))  # noqa: E731
        return pick(GROUPS, i, fits)

    common = {"t": t, "B": 1 + i % 2, "H": 1 + i % 3, "N": N}
    return {
        "keys": {"side": "keys", "bits": 1 + i % 4, "axis": key_axis, "group": group("keys", key_axis, D, i), "D": D,
                 "offset": i % 5 != 0, "shared": i % 6 == 4, **common},
        "values": {"side": "values", "bits": 1 + (i // 4) % 4, "axis": value_axis, "D": Dv, "offset": i % 7 != 0,
                   "group": group("values", value_axis, Dv, i + 1), "shared": i % 8 == 5, **common},
        "R": ROWS[(i + i // 6) % 6],
        "dtype": torch.bfloat16 if i % 3 == 1 else torch.float16,
    }  # fmt: skip


def grid_id(i):
    case = grid_case(i)
    sides = "-".join(
        f"{s['side'][0]}{s['bits']}{s['axis'][0]}{s['group']}xD{s['D']}" for s in (case["keys"], case["values"])
    )
    return f"{sides}-R{case['R']}-N{case['keys']['N']}x{case['keys']['t']}"


@functools.cache
def grid_inputs(i):
    """Return arguments and expectation of case i, computed once for all instruction sets."""
    torch.manual_seed(i)
    case = grid_case(i)
    keys, values = (make_side(**case[side], dtype=case["dtype"]) for side in ("keys", "values"))
    query = torch.randn(*keys.codes.shape[:2], case["R"], keys.head_dim)
    args = query, keys, values, None, 0.125, None
    return args, grid_expectation(*args)


@pytest.mark.parametrize("i", range(56), ids=grid_id)
def test_attend_grid(isa, i):
    args, expected = grid_inputs(i)
    assert why_not(cpu_attend.attend_packed, *args) is None
    compare_grid(cpu_attend.attend_packed(*args), expected)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("axis", ["token", "channel"])
def test_attend_grid_each_layout(isa, bits, side, axis):
    torch.manual_seed(bits)
    other = "values" if side == "keys" else "keys"
    one = make_side(side, bits, axis, 32, 32, 64)
    two = make_side(other, 4, "channel", 32, 32, 64)
    run_grid(*((one, two) if side == "keys" else (two, one)), 3)


def exact_in_bfloat16(grid):
    """Return the side with a table of integers and scales that are powers of two."""
    scale = 2.0 ** torch.randint(-3, 3, grid.scale.shape)
    return grid._replace(scale=scale.to(grid.scale.dtype), table=torch.arange(2.0**grid.bits))


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize(("D", "t", "N"), [(64, 32, 20), (80, 48, 3), (72, 16, 2)])
def test_no_rounding_no_error(isa, bits, axes, D, t, N):
    """Powers of two times small integers: every code has its own coefficient, exact to float32's
    last bit."""
    torch.manual_seed(bits)
    group = {"token": 16 if D % 16 == 0 else "all", "channel": 16}
    keys, values = (
        exact_in_bfloat16(make_side(side, bits, axis, group[axis], t, D, N=N, offset=bits != 2))
        for side, axis in zip(("keys", "values"), axes, strict=True)
    )
    query = 2.0 ** torch.randint(-2, 2, (1, 2, 3, D)) * (1 - 2 * torch.randint(0, 2, (1, 2, 3, D)))
    scores = query, keys, values, None, 0.125, None
    _, lse = cpu_attend.attend_packed(*scores)
    expected = grid_expectation(*scores)
    torch.testing.assert_close(lse.double(), expected.lse, rtol=0, atol=expected.lse_bound)
    sums = query, keys, values, None, 0.0, None  # all weights are 1
    compare(cpu_attend.attend_packed(*sums), grid_expectation(*sums))


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("offset", [True, False])
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_tables_that_bfloat16_does_not_hold(isa, bits, offset, axis):
    torch.manual_seed(bits)
    keys = make_side("keys", bits, axis, 32, 32, 64, N=9, offset=offset)
    values = make_side("values", bits, axis, 32, 32, 64, N=9, offset=offset)
    keys, values = (side._replace(table=side.table + 1 / 300 * torch.rand(2**bits)) for side in (keys, values))
    args = torch.randn(1, 2, 3, 64), keys, values, None, 0.125, None
    compare_grid(cpu_attend.attend_packed(*args), grid_expectation(*args))
    rows = torch.stack([side.table for side in (keys, keys)]) * torch.tensor([[1.0], [0.7]])  # a table per batch row
    two = [side._replace(**{name: torch.cat([getattr(side, name)] * 2) for name in ("codes", "scale")}, table=rows)
           for side in (keys, values)]  # fmt: skip
    two = [side if side.offset is None else side._replace(offset=torch.cat([side.offset] * 2)) for side in two]
    args = args[0].expand(2, -1, -1, -1).contiguous(), *two, *args[3:]
    compare_grid(cpu_attend.attend_packed(*args), grid_expectation(*args))


def test_huge_scores_have_weights_of_at_most_one(isa):
    """The maximum of scores of 1e10 is rounded by hundreds, and no weight may exceed that of the maximum."""
    g = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(1, heads, n, 64, generator=g).bfloat16() for heads, n in ((4, 40), (2, 96), (2, 96))
    )
    out = cpu_attend.attend(query * 1e5, ((keys * 1e5, values, 0),), None, None, None, 0.13)
    assert bool(out.isfinite().all())
    assert float(out.abs().max()) <= float(values.abs().max())


@pytest.mark.parametrize("recipe", ["kvquant:bits=4,outliers=0", "kvquant:bits=3,outliers=0", "normalfloat"])
def test_rounded_tables_leave_no_mean_error(isa, recipe):
    """Values that cancel: the table's rounding error is the same for every token, and 16,384 tokens
    would show it."""
    g = torch.Generator().manual_seed(1)
    key, value = (torch.randn(1, 1, 16384, 64, generator=g) for _ in range(2))
    recipe += ",calibration=prompt" if recipe.startswith("kvquant") else ""
    plan = Recipe.parse(recipe).plan(0, 1)
    codecs = [codec.fit(x) if codec.needs_fit else codec for codec, x in ((plan.keys, key), (plan.values, value))]
    keys, values = (codec.view(codec.encode(x), 64).operand for codec, x in zip(codecs, (key, value), strict=True))
    args = torch.randn(1, 1, 4, 64, generator=g), keys, values, None, 0.125, None
    out, expected = cpu_attend.attend_packed(*args)[0], attend_packed.reference(*args)[0]
    assert (out - expected).norm() <= (5e-3 if isa in ROUNDING_ISAS else 1e-5) * expected.norm()


@pytest.mark.parametrize("recipe", ["kivi:bits=4", "uniform:bits=3"])
def test_many_small_weights_count(isa, recipe):
    """One token has nearly all of the weight, and 127 share the rest: in units of integer weights each has .64."""
    key, value = torch.zeros(1, 1, 128, 64), torch.ones(1, 1, 128, 64)
    key[..., 0, 0], value[..., ::32], query = 1, 0, torch.zeros(1, 1, 1, 64)
    query[..., 0] = math.log(32512 / 0.64)
    plan = Recipe.parse(recipe).plan(0, 1)
    keys, values = (codec.view(codec.encode(x), 64).operand for codec, x in ((plan.keys, key), (plan.values, value)))
    args = query, keys, values, None, 1.0, None
    out, expected = cpu_attend.attend_packed(*args)[0], attend_packed.reference(*args)[0]
    assert (out - expected).abs().max() <= (4e-3 if isa == "avx512bf16" else 3e-4)


def model_like(H, T, D, seed):
    """Return keys that drift, with four outlier channels off zero, values, and 12 queries similar
    to some keys.

    The outlier channels are ten times as large as the others.
    """
    g = torch.Generator().manual_seed(seed)
    drift = torch.randn(1, H, T, D, generator=g).cumsum(2) / torch.arange(1, T + 1)[:, None].sqrt()
    keys = torch.randn(1, H, T, D, generator=g) + drift
    outliers = torch.randperm(D, generator=g)[:4]
    keys[..., outliers] = 4 * keys[..., outliers] + 12 * torch.randn(4, generator=g).sign()
    values = torch.randn(1, H, T, D, generator=g)
    near = keys[:, :, torch.randint(0, T, (12,), generator=g)]
    return keys, values, 0.3 * near + torch.randn(1, H, 12, D, generator=g)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("recipe", ["kivi:bits=4", "kivi:bits=3", "kivi:bits=2", "uniform:bits=4", "normalfloat"])
def test_error_on_keys_with_outlier_channels(isa, recipe, seed):
    """Within 1e-2 of float32 attention over the decoded cache, though logits reach 40.

    It is also nearer to it than dense attention in bfloat16, which rounds keys of which one channel
    outweighs a hundred others.
    """
    key, value, query = model_like(2, 2048, 128, seed)
    plan = Recipe.parse(recipe).plan(0, 1)
    keys, values = (codec.view(codec.encode(x), 128).operand for codec, x in ((plan.keys, key), (plan.values, value)))
    out, _ = cpu_attend.attend_packed(query, keys, values, None, 128**-0.5, None)
    expected, _ = attend_packed.reference(query, keys, values, None, 128**-0.5, None)
    weights = torch.softmax(query.bfloat16() @ decoded(keys).bfloat16().mT * 128**-0.5, dim=-1)
    dense = (weights @ decoded(values).bfloat16()).float()
    error, dense_error = ((x - expected).norm().item() / expected.norm().item() for x in (out, dense))
    assert error < (1e-2 if isa in ROUNDING_ISAS else 2e-5)
    assert error < dense_error / 4


@pytest.mark.parametrize("q", [1, 2, 5])
def test_mask(isa, q):
    torch.manual_seed(q)
    keys = make_side("keys", 4, "channel", 32, 32, 64, B=2, N=40)
    values = make_side("values", 3, "token", 32, 32, 64, B=2, N=40)
    mask = make_mask(2, q, 40 * 32)
    _, (out, lse) = run_grid(keys, values, 3 * q, mask)
    assert torch.equal(out[:, :, ::q], torch.zeros_like(out[:, :, ::q]))
    assert lse[:, :, ::q].isneginf().all()
    run_grid(keys, values, q, mask[:1].expand(2, -1, -1))
    run_grid(keys, values, q, mask.mT.contiguous().mT)


@pytest.mark.parametrize(("softcap", "scaling"), [(50.0, 0.125), (2.0, 1.0), (None, 0.7), (None, -1.0)])
def test_softcap_and_scaling(isa, softcap, scaling):
    torch.manual_seed(0)
    keys, values = make_side("keys", 2, "channel", 32, 32, 64), make_side("values", 2, "token", 32, 32, 64)
    run_grid(keys, values, 4, make_mask(1, 4, 96), scaling, softcap)


@pytest.mark.parametrize("factor", [0.0, 1e-3, 2.5e3])
def test_extreme_scores(isa, factor):
    torch.manual_seed(0)
    keys, values = make_side("keys", 4, "channel", 32, 32, 64, N=40), make_side("values", 4, "token", 32, 32, 64, N=40)
    _, (out, lse) = run_grid(keys, values, 3, query_scale=factor)
    assert out.isfinite().all()
    assert factor < 1 or lse.max() > 1e3


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)], ids=["no tokens", "no rows"])
def test_empty(isa, shape):
    N, R = shape
    run_grid(make_side("keys", 4, "channel", 32, 32, 64, N=N), make_side("values", 4, "token", 32, 32, 64, N=N), R)


def test_nan_in_a_scale_reaches_only_its_rows(isa):
    torch.manual_seed(0)
    keys, values = make_side("keys", 4, "channel", 32, 32, 64), make_side("values", 4, "token", 32, 32, 64)
    keys.scale[:, 0, 1] = float("nan")
    out, lse = cpu_attend.attend_packed(torch.randn(1, 2, 3, 64), keys, values, None, 0.125, None)
    assert out[:, 0].isnan().all()
    assert lse[:, 0].isnan().all()
    assert out[:, 1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("D", "Dv", "T", "R"), [
    (64, 64, 129, 3), (16, 80, 1, 1), (80, 16, 40, 4), (96, 96, 257, 5), (128, 128, 600, 12), (256, 64, 3, 32),
    (40, 72, 17, 2), (64, 64, 0, 3), (7, 5, 33, 3),
])  # fmt: skip
def test_attend_exact(isa, dtype, D, Dv, T, R):
    torch.manual_seed(D + T)
    B, H = 2, 3

    def plane(D):
        # tokens before heads, with slack of NaN after each row and after the last token
        full = torch.full((B, T + 5, H, D + 8), float("nan"), dtype=dtype)
        full[:, :T, :, :D] = torch.randn(B, T, H, D)
        return full[:, :T, :, :D].transpose(1, 2)

    query, key, value = torch.randn(B, H, R, D), plane(D), plane(Dv)
    size = key.double().abs(), value.double().abs()
    for mask, softcap in ((None, None), (make_mask(B, R, T) if T else None, 20.0)):
        args = query, key, value, mask, D**-0.5, softcap
        assert why_not(cpu_attend.attend_exact, *args) is None
        compare(cpu_attend.attend_exact(*args), expectation(query, key, value, size, mask, D**-0.5, softcap))


@pytest.mark.parametrize("segments", [1, 2, 4])
@pytest.mark.parametrize("D", [16, 72])
def test_merge_segments(isa, segments, D):
    torch.manual_seed(segments)
    outs = [torch.randn(2, 3, 5, D) for _ in range(segments)]
    lses = [torch.randn(2, 3, 5) * 30 for _ in range(segments)]
    lses[0][0] = float("-inf")
    for out, lse in zip(outs, lses, strict=True):
        lse[1, 1] = float("-inf")
        out[1, 1] = 0
    outs[-1] = outs[-1].mT.contiguous().mT
    out, lse = cpu_attend.merge_segments(outs, lses)
    expected, expected_lse = merge_reference.reference([x.double() for x in outs], [x.double() for x in lses])
    # lse may be ±100: its ulp is 64 times that of 1, and weights inherit it
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)


@pytest.fixture
def two_threads(one_thread):
    torch.set_num_threads(2)


def test_threads_agree(isa, two_threads):
    torch.manual_seed(0)
    keys = make_side("keys", 4, "channel", 32, 32, 64, H=3, N=200)
    values = make_side("values", 4, "token", 32, 32, 64, H=3, N=200)
    args, (out, lse) = run_grid(keys, values, 3)
    assert torch.equal(cpu_attend.attend_packed(*args)[0], out), "same split, same bits"
    torch.set_num_threads(1)
    single, single_lse = cpu_attend.attend_packed(*args)
    # Weights relative to another chunk's maximum round to other bfloat16 neighbours; scores are the
    # same.
    torch.testing.assert_close(out, single, rtol=0, atol=2 * BF16_ULP if isa in ROUNDING_ISAS else 16 * ULP)
    torch.testing.assert_close(lse, single_lse, rtol=0, atol=16 * ULP * single_lse.abs().max().item())


def test_calls_from_several_python_threads(two_threads):
    from concurrent.futures import ThreadPoolExecutor

    torch.manual_seed(0)
    keys, values = (make_side(s, 4, "channel", 32, 32, 64, N=100) for s in ("keys", "values"))
    args, (out, _) = run_grid(keys, values, 3)
    with ThreadPoolExecutor(4) as pool:
        for other, _ in pool.map(lambda _: cpu_attend.attend_packed(*args), range(40)):
            assert torch.equal(other, out)


def _child(args, expected):
    out, _ = cpu_attend.attend_packed(*args)
    os._exit(0 if torch.equal(out, expected) else 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_fork(two_threads):
    torch.manual_seed(0)
    keys, values = (make_side(s, 4, "channel", 32, 32, 64, N=100) for s in ("keys", "values"))
    args, (out, _) = run_grid(keys, values, 3)  # the parent's pool exists by now
    child = multiprocessing.get_context("fork").Process(target=_child, args=(args, out))
    child.start()
    child.join(20)
    assert child.exitcode == 0
    assert torch.equal(cpu_attend.attend_packed(*args)[0], out)
