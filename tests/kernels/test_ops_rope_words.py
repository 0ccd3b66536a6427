"""RoPE in int16: grid keys before RoPE, and rotated means, at consecutive positions.

With AVX-512 VNNI, keys and rotated queries are rounded to 16 bits. The bounds are worst cases of
these roundings, added to float32's. `test_ops_packed.py` tests the same layouts at any positions,
which stay in float32.
"""

import pytest
import torch

from native_calls import ROUNDING_ISAS, why_not
from packed_views import magnitude, packed, rope, tokens
from tersekv.kernels import cpu
from tersekv.kernels.cpu import attend as cpu_attend
from tersekv.layouts.base import Concat
from tersekv.layouts.exact import ExactView
from tersekv.layouts.grid import GridView
from tersekv.layouts.mean_removed import RotatedMean
from tersekv.layouts.roped import Roped
from tersekv.transforms.rope_offsets import INT16_OFFSETS, int16_rope_offset_table
from test_ops_parity import (  # noqa: F401
    compare,
    expectation,
    isa,
    make_mask,
    make_side,
    one_thread,
    poisoned_outputs,
    pytestmark,
)

MOST_ENTRY, MOST_WORD, MOST_QUERY = 23160, 32767, 65000
"""Limits in the kernel: int16 keys, other int16 numbers, and the sum of absolute values of a query."""


def grid(bits, t, D, B=1, H=2, N=3, **options):
    view = object.__new__(GridView)  # blocks of any size
    view.side = make_side("keys", bits, "channel", t, t, D, B, H, N, **options)
    return view


def apart(D, T, bits=4):
    """Return KVQuant's keys: fixed scales, a codebook, and outliers."""
    return packed("sparse", "keys", tokens(1, 2, T, D))


def at(view, kind, first=5, factor=1.0):
    """Apply RoPE, with another first position in each batch row."""
    B, _, T, D = view.decode().shape
    of = rope(kind, D)
    angles = of.angles(first, T, 9 * torch.arange(B))
    scaled = torch.cat([angles.table[:-1], factor * angles.table[-1:]])
    assert of.int16_offset_table(D) is None or kind == "halves"
    return Roped(view, of, angles._replace(table=scaled))


def step_of(total, most):
    """Return the quantisation step of numbers whose sum is `total` and whose maximum is `most`."""
    return (total / MOST_QUERY).maximum(most / MOST_WORD)


def roped_error(view, query):
    """Return the error of q·k̂ from the int16 codes, cosines, two rounded products per channel, and
    the query."""
    keys = view.before.views[0] if view.before.kind == "sum" else view.before
    side, D = keys.side, query.shape[-1]
    factor = float(torch.hypot(*view.angles.cos_sin()).amax())
    most = [x.float().abs().amax(2).amax(2) if x is not None else 0 for x in (side.scale, side.offset)]
    bound = (most[0] * side.table.abs().amax(-1).max() + most[1]).unflatten(-1, (2, D // 2)).amax(-2)  # [B, H, pairs]
    unit = factor * bound / MOST_ENTRY
    size = torch.hypot(*query.chunk(2, -1)) * unit[:, :, None]
    total, rounded = 2**0.5 * size.sum(-1), 0.5 * 2**0.5 + 1 + MOST_ENTRY / MOST_WORD
    return float((rounded * total + 0.5 * step_of(total, size.amax(-1)) * D * MOST_ENTRY * 2**0.5).max())


def rotated_error(view, query):
    """Return the error of q·k̂ from rounded coefficients of cosines, sines and polynomials, and
    their rounded table."""
    steps, D = view.rope.offset_table(), query.shape[-1]
    factor = float(torch.hypot(*view.angles.cos_sin()).amax())
    size = factor * torch.hypot(*query.chunk(2, -1)) * torch.hypot(*view.mean.float().unsqueeze(2).chunk(2, -1))
    place = steps.place[: D // 2].long()
    slow = steps.matrix.abs().sum(1).unflatten(0, (2, -1)).sum(0)
    weight = torch.where(place < 0, slow[(-1 - place).clamp(min=0)] if len(slow) else 0.0, 2**0.5)
    total = (size * weight).sum(-1)
    return float((0.5 * step_of(total, total) * len(steps.table) + total * 0.5 / MOST_WORD).max())


def run(keys, R, error, mask=None, query_scale=1.0, softcap=None):
    """Compare with decoding, with float32 values, and check the total error of 16 bits."""
    key = keys.decode()
    B, H, T, D = key.shape
    query, value = torch.randn(B, H, R, D) * query_scale, torch.randn(B, H, T, 64)
    values = ExactView({"x": value.unsqueeze(3)})
    args = query, keys.operand, values.operand, mask, D**-0.5, softcap
    assert why_not(cpu_attend.attend_packed, *args) is None
    result = cpu_attend.attend_packed(*args)
    expected = expectation(query, key, value, (magnitude(keys), magnitude(values)), mask, *args[4:])
    lost = result[0] - expected.out
    if cpu.isa() in ROUNDING_ISAS:
        added = error(query) * args[4]
        bound = expected.out_bound + 2 * added * float(value.abs().max())
        expected = expected._replace(out_bound=bound, lse_bound=expected.lse_bound + added)
    compare(result, expected)
    assert lost.norm() <= 2e-3 * expected.out.norm()
    return result


@pytest.mark.parametrize(
    ("bits", "t", "D", "options"),
    [
        (1, 32, 64, {}),
        (2, 128, 128, {"shared": True}),
        (2, 48, 96, {"dtype": torch.bfloat16}),
        (3, 64, 64, {"offset": False}),
        (3, 32, 128, {}),
        (4, 16, 64, {"B": 2}),
        (4, 64, 256, {"H": 1}),
        (4, 192, 48, {"shared": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("R", [1, 3, 6])
def test_grids(isa, bits, t, D, options, R):  # noqa: F811
    torch.manual_seed(t + R)
    view = at(grid(bits, t, D, **options), "halves")
    run(view, R, lambda query: roped_error(view, query), query_scale=0.3)


@pytest.mark.parametrize("T", [32, 160, 1088])
@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_outliers(isa, T, factor):  # noqa: F811
    torch.manual_seed(T)
    view = at(apart(64, T), "halves", factor=factor)
    run(view, 4, lambda query: roped_error(view, query), query_scale=0.1)


def test_mask_softcap_and_large_positions(isa):  # noqa: F811
    torch.manual_seed(0)
    view = at(grid(4, 32, 64, B=2, N=5), "halves", first=100_000)
    run(view, 4, lambda query: roped_error(view, query), mask=make_mask(2, 2, 160), softcap=20.0)


def test_interleaved_pairs_stay_in_float32(isa):  # noqa: F811
    torch.manual_seed(1)
    run(at(grid(4, 32, 64), "pairs"), 3, lambda query: 0.0)


@pytest.mark.parametrize("factor", [0.0, 1e-30, 1e30])
def test_extreme_queries(isa, factor):  # noqa: F811
    """No query is too small or too large. One beyond float32's range gives the result of float32
    products."""
    torch.manual_seed(2)
    view = at(grid(2, 32, 64), "halves")
    query, values = torch.randn(1, 2, 3, 64) * factor, ExactView({"x": torch.randn(1, 2, 96, 1, 64)})
    out, _ = cpu_attend.attend_packed(query, view.operand, values.operand, None, 1.0, None)
    if factor <= 1e-30:
        torch.testing.assert_close(out, values.decode().mean(2, keepdim=True).expand_as(out), rtol=0, atol=1e-5)
    assert out.isfinite().all()
    out, _ = cpu_attend.attend_packed(query * float("nan"), view.operand, values.operand, None, 1.0, None)
    assert out.isnan().all()


def test_one_wrong_scale_is_detected(isa):  # noqa: F811
    torch.manual_seed(3)
    keys, values = grid(4, 32, 64, N=4), ExactView({"x": torch.randn(1, 2, 128, 1, 64)})
    keys.side.scale[0, 1, 2] = float("nan")
    out, _ = cpu_attend.attend_packed(
        torch.randn(1, 2, 3, 64), at(keys, "halves").operand, values.operand, None, 1.0, None
    )
    assert out[0, 0].isfinite().all()
    assert out[0, 1].isnan().all()


@pytest.mark.parametrize("D", [16, 64, 128])
@pytest.mark.parametrize("T", [16, 96, 1088])
def test_rotated_mean(isa, T, D):  # noqa: F811
    torch.manual_seed(T + D)
    of = rope("halves", D)
    part = RotatedMean(torch.randn(1, 2, D), of, of.angles(700, T, torch.tensor([697, 0])))
    keys = Concat([(ExactView({"x": torch.randn(2, 2, T, 1, 32)}), 32), (part, D)])
    run(keys, 5, lambda query: rotated_error(part, query[..., 32:]), query_scale=0.3)


@pytest.mark.parametrize("gap", [1, 4, 15, 40])
@pytest.mark.parametrize("T", [1, 33, 1088])
def test_rotated_mean_of_tokens_with_gaps(isa, T, gap):  # noqa: F811
    """Tokens in order of position, others in each row and head; padding repeats position 0.

    With a gap of 40 positions the angles of each token are computed instead, in float32.
    """
    torch.manual_seed(T + gap)
    of = rope("halves", 64)
    places = torch.randint(0, 2 * gap, (2, 2, T)).cumsum(-1) + 3
    places[1, :, : T // 5] = 0
    part = RotatedMean(torch.randn(1, 2, 64), of, of.angles_at(places))
    keys = Concat([(ExactView({"x": torch.randn(2, 2, T, 1, 32)}), 32), (part, 64)])
    run(keys, 5, lambda query: rotated_error(part, query[..., 32:]), query_scale=0.3)


def test_threads_begin_anywhere(isa):  # noqa: F811
    """With exact tokens too, a thread may begin at any token. A read after the last offset would be
    another's data."""
    torch.manual_seed(4)
    of = rope("halves", 64)
    part = RotatedMean(torch.randn(1, 2, 64), of, of.angles(0, 5001))
    keys = Concat([(ExactView({"x": torch.randn(1, 2, 5001, 1, 32)}), 32), (part, 64)])
    torch.set_num_threads(3)  # `one_thread` resets it
    run(keys, 4, lambda query: rotated_error(part, query[..., 32:]), query_scale=0.3)


def test_offset_tables_of_other_layouts():
    """The table exists only if channels d and d + D/2 share a column."""
    of = rope("halves", 64)
    cos, sin = (x[0] for x in of.angles(0, INT16_OFFSETS).rows())
    channels = of.channels(64)
    offsets = int16_rope_offset_table(cos, sin, channels)
    assert offsets.shape == (16, 2, INT16_OFFSETS, 2)
    got = offsets.double().transpose(2, 3) / 32767  # [D/4, 2, 2, steps]
    for i, x in enumerate((cos, sin)):
        torch.testing.assert_close(got[:, i].flatten(0, 1), x[:, :32].T.double(), rtol=0, atol=1 / 32767)
    for wrong in (channels.flip(0), channels[:62], rope("pairs", 64).channels(64)):
        assert int16_rope_offset_table(cos, sin, wrong) is None
