"""The search for trellis codes on every instruction set against the torch reference.

Costs are integers, so codes are equal. They are also equal in any batch and on any number of threads.
"""

import functools

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tersekv.codecs.codebooks.trellis import scalar_entries, trellis_entries
from tersekv.errors import UserError
from tersekv.kernels import backends
from tersekv.kernels import trellis_search as search
from tersekv.kernels.cpu import encode as native
from tersekv.kernels.trellis import (
    _lengths,
    encode_trellis,
    first_gains,
    gain_codes,
    gains,
    pack_stream,
    pack_trellis,
    pack_vectors,
    windows_of,
)
from test_ops_parity import isa, one_thread, pytestmark  # noqa: F401


@functools.cache
def tables():
    return trellis_entries("cpu")


def mixed_bits(R, D, seed=0):
    """Return bits of every rate, zero included; each row's sum is a multiple of 16."""
    bits = torch.randint(0, 9, (R, D), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    for row in bits:
        while row.sum() % 16:
            row[int(torch.randint(D, ()))] = int(torch.randint(7, ()))
    return bits


def following(bits):
    """Weights with which all components have about the same error."""
    return 4.0 ** (bits.float() - 5)


def squared_error(y, weight, bits, windows):
    """Return the squared error per vector, float64 [R, n]."""
    entries = tables()[bits.long()[:, None], windows.long()].double()
    return ((y.double() - entries).square() * weight.double()[:, None] * (bits > 0)[:, None]).sum(-1)


def check(y, weight, bits, entries=None):
    entries = tables() if entries is None else entries
    windows, expected = (
        native.encode_trellis(y, weight, bits, entries),
        encode_trellis.reference(y, weight, bits, entries),
    )
    assert windows.shape == y.shape
    assert windows.dtype is torch.uint8
    assert torch.equal(windows, expected)
    if (bits.long().sum(1) < 8).any():
        return windows  # a ring shorter than a window may have no path at all
    held = (bits > 0)[:, None].expand_as(windows)
    assert (windows[~held] == 0).all()
    if not (bits.long().sum(1) % 16).any() and len({*bits.long().sum(1).tolist()}) == 1:
        back = windows_of(pack_stream(windows, bits, int(bits[0].sum()) // 16), bits)
        assert torch.equal(back[held], windows.long()[held]), "the windows are no ring"
    return windows


@pytest.mark.parametrize("rate", range(1, 9))
def test_one_rate(isa, rate):  # noqa: F811
    torch.manual_seed(rate)
    y, weight = torch.randn(2, 40, 32), torch.rand(2, 32) + 0.1
    check(y, weight, torch.full((2, 32), rate, dtype=torch.uint8))


@pytest.mark.parametrize("D", [32, 64, 80, 128, 256])
def test_mixed_rates(isa, D):  # noqa: F811
    torch.manual_seed(D)
    for seed in range(3):
        bits = mixed_bits(1, D, seed)
        check(torch.randn(1, 7, D), torch.rand(1, D) ** 4, bits)


RATES = [3, 8, 5, 7, 6, 4, 3, 3, 4, 6, 8, 7, 5, 3, 4, 5, 3, 2, 4, 1, 7, 2, 6]


@pytest.mark.parametrize("order", [1, -1])
def test_near_entries_between_rates(isa, order):  # noqa: F811
    """Each pair of rates has near entries of its own. Costs are subtracted on the way."""
    torch.manual_seed(0)
    bits = torch.tensor([RATES[::order] * 3], dtype=torch.uint8)
    check(torch.randn(1, 60, bits.shape[1]), following(bits), bits)


def test_other_codebooks(isa):  # noqa: F811
    """Entries of scalar codebooks are equal for many windows. The tables of the last two sets are kept."""
    torch.manual_seed(0)
    bits = mixed_bits(1, 64)
    for entries in (scalar_entries("cpu"), tables(), scalar_entries("cpu"), tables() * 2, tables()):
        check(torch.randn(1, 20, 64), following(bits), bits, entries)


def test_edges(isa):  # noqa: F811
    def bits(*rates):
        return torch.tensor([rates], dtype=torch.uint8)

    torch.manual_seed(0)
    for one in (bits(0, 0, 0), bits(0, 3, 0), bits(6), bits(1), bits(4, 4, 4, 4), bits(*[1] * 16, *[0] * 16)):
        check(torch.randn(1, 3, one.shape[1]), torch.ones(one.shape), one)
        check(torch.zeros(1, 3, one.shape[1]), torch.ones(one.shape), one)
        check(torch.randn(1, 3, one.shape[1]), torch.zeros(one.shape), one)
    assert native.encode_trellis(torch.empty(2, 0, 3), torch.ones(2, 3), torch.ones(2, 3, dtype=torch.uint8), tables())\
        .shape == (2, 0, 3)  # fmt: skip
    far = check(torch.full((1, 2, 32), 1e4), torch.ones(1, 32), torch.full((1, 32), 2, dtype=torch.uint8))
    assert (tables()[2][far.long()] > 1).float().mean() > 0.9


def test_infinite_inputs_end(isa):  # noqa: F811
    two = torch.full((1, 32), 2, dtype=torch.uint8)
    for bad in (float("nan"), float("inf"), 1e30):
        y = torch.full((1, 2, 32), bad)
        assert native.encode_trellis(y, torch.ones(1, 32), two, tables()).shape == y.shape


def test_any_batch_any_threads(isa):  # noqa: F811
    torch.manual_seed(1)
    y, weight, bits = torch.randn(3, 200, 64), torch.rand(3, 64), mixed_bits(3, 64)
    whole = native.encode_trellis(y, weight, bits, tables())
    torch.set_num_threads(3)
    assert torch.equal(native.encode_trellis(y, weight, bits, tables()), whole)
    torch.set_num_threads(1)
    one = native.encode_trellis(y[1:2, 77:78], weight[1:2], bits[1:2], tables())
    assert torch.equal(one[0, 0], whole[1, 77])


def test_strides_and_dtypes(isa):  # noqa: F811
    torch.manual_seed(2)
    y, weight, bits = torch.randn(64, 6, 4).permute(2, 1, 0), torch.rand(64, 4).T, mixed_bits(4, 64)
    whole = native.encode_trellis(y.contiguous(), weight.contiguous(), bits, tables())
    assert torch.equal(native.encode_trellis(y, weight, bits.T.contiguous().T, tables()), whole)
    assert torch.equal(native.encode_trellis(y[:, ::2], weight, bits, tables()), whole[:, ::2])
    half = y.bfloat16()
    assert torch.equal(
        native.encode_trellis(half, weight, bits, tables()),
        native.encode_trellis(half.float(), weight, bits, tables()),
    )


def test_what_is_refused():
    y, weight, bits = torch.zeros(2, 3, 8), torch.zeros(2, 8), torch.ones(2, 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"bits: expected 0 to 8, got 9"):
        native.encode_trellis(y, weight, bits * 9, tables())
    with pytest.raises(ValueError, match=r"weight: expected \[R, D\] with D = 8, got 7"):
        native.encode_trellis(y, weight[:, :7], bits, tables())
    with pytest.raises(ValueError, match=r"tables: expected \[9, 256\] with 9 = 9, got 6"):
        native.encode_trellis(y, weight, bits, tables()[:6])
    with backends.forced("cpu"), pytest.raises(UserError, match=r"bits is torch\.int64, not uint8"):
        backends.encode_trellis(y, weight, bits.long(), tables())
    with backends.forced("reference"):
        assert backends.encode_trellis(y, weight, bits, tables()).shape == y.shape


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 8), min_size=1, max_size=40), st.integers(0, 2**32 - 1))
@example(rates=[3, 3, 3, 7, 0, 0, 0, 4, 3], seed=703)  # the factor of the last component is nearly 21999.5
def test_any_rates(rates, seed):
    """Every vector's windows are a ring, and those of the reference."""
    if sum(rates) < 8:  # a ring shorter than a window may have no path at all
        return
    generator = torch.Generator().manual_seed(seed)
    y, weight = torch.randn(1, 64, len(rates), generator=generator), torch.rand(1, len(rates), generator=generator)
    bits = torch.tensor([rates], dtype=torch.uint8)
    windows = check(y, weight, bits)
    active = [d for d, b in enumerate(rates) if b]
    states = windows[0].int()
    for d, before in zip(active, [active[-1], *active], strict=False):
        assert ((states[:, d] & ((256 >> rates[d]) - 1)) == states[:, before] >> rates[d]).all(), "no ring"


@pytest.mark.parametrize("rates", [[2] * 8, [4] * 8, [5, 5, 5, 4, 4, 4, 3, 2], [2] * 12, [3] * 10 + [2] * 8 + [1] * 2],
                         ids=lambda rates: f"{len(rates)} components of {sum(rates)} bits")  # fmt: skip
def test_short_rings(isa, rates):  # noqa: F811
    """All components are searched in advance, some of them twice. The lowest window decides ties."""
    torch.manual_seed(0)
    bits = torch.tensor([rates], dtype=torch.uint8)
    check(torch.randn(1, 2000, len(rates)), torch.rand(1, len(rates)) + 0.1, bits)


def test_costs_that_saturate_leave_a_ring(isa):  # noqa: F811
    """Far components, weights of any size, and many bits: all costs are at their largest."""
    torch.manual_seed(0)
    for rate in (1, 3, 5, 8):
        bits, far = torch.full((1, 32), rate, dtype=torch.uint8), torch.randn(1, 50, 32) * 30
        check(far, torch.rand(1, 32).log().mul(20).exp(), bits)


FALLING = [5] * 2 + [4] * 15 + [3] * 30 + [2] * 15 + [1] * 2
"""Bits as a fitted basis has them."""


def times_the_error(monkeypatch, rates, vectors, **constants):
    """Return the squared error relative to that of a search with other constants, whose codes must differ."""
    torch.manual_seed(0)
    bits = torch.tensor([rates], dtype=torch.uint8)
    y, weight = torch.randn(1, vectors, 64), following(bits)
    ours = native.encode_trellis(y, weight, bits, tables())
    for name, value in constants.items():
        monkeypatch.setattr(search, name, value)
    other = encode_trellis.reference(y, weight, bits, tables())
    assert max(rates) > 5 or not torch.equal(ours, other)
    ours, other = (squared_error(y, weight, bits, found).sum() for found in (ours, other))
    return ours / other


@pytest.mark.parametrize(
    ("rates", "most"), [([1] * 64, 1.02), ([2] * 64, 1.02), ([3] * 64, 1.02), ([5] * 64, 1.01), (FALLING, 1.015)]
)
def test_a_first_state_from_some_components_costs_little(monkeypatch, rates, most):
    """The bound is relative to a first state from all components twice."""
    all_bits = {"WARM_UP_BITS": sum(rates), "LOOK_AHEAD_BITS": sum(rates)}
    assert times_the_error(monkeypatch, rates, 400, **all_bits) < most


@pytest.mark.parametrize(
    ("rates", "most"),
    [
        ([3] * 64, 1.001),
        ([4] * 64, 1.001),
        ([5] * 64, 1.004),
        ([6] * 64, 1.0005),
        ([7, 8] * 32, 1.0005),
        (FALLING, 1.001),
    ],
)
def test_near_entries_cost_little(monkeypatch, rates, most):
    """The bound is relative to paths that may take any entry."""
    assert times_the_error(monkeypatch, rates, 2000, LEAST_NEAR=9) < most


def test_bins_are_rounded_as_kernels_do():
    """Components are often half-way between two bins, so a quotient that is rounded twice finds another one."""
    factor = np.arange(search.LEAST_FACTOR, 32768, dtype=np.float32)
    y = np.random.default_rng(0).integers(-32767, 32768, (20, len(factor))).astype(np.float32)
    expected = np.clip(np.rint(y * (np.float32(63) / factor)), -63, 63) + 63
    found = search.bins_of(torch.from_numpy(y).int(), torch.from_numpy(factor).to(torch.int16))
    assert np.array_equal(found.numpy(), expected)


def test_components_without_weight_take_any_entry(isa):  # noqa: F811
    """They choose the bits that suit the windows of their neighbours."""
    torch.manual_seed(0)
    y, ones, bits = torch.randn(1, 500, 64), torch.ones(1, 64), torch.full((1, 64), 4, dtype=torch.uint8)
    weight = ones.clone()
    weight[:, ::2] = 0
    windows = check(y, weight, bits)
    plain = native.encode_trellis(y, ones, bits, tables())
    assert squared_error(y, weight, bits, windows).sum() < 0.2 * squared_error(y, weight, bits, plain).sum()


def packed_error(y, weight, bits, stream, gain):
    """Σ weight·(y − gain·x)² per vector, float64 [R, n], from a stream alone; components without bits are 0."""
    entries = tables()[bits.long()[:, None], windows_of(stream, bits)].double() * (bits > 0)[:, None]
    off = y.double() - gains(gain).double().unsqueeze(-1) * entries
    return (off.square() * weight.double()[:, None]).sum(-1)


@pytest.mark.parametrize("steps", [[], [3], [1, 4]])
@pytest.mark.parametrize(("R", "n", "D"), [(1, 1, 16), (3, 40, 64), (2, 9, 128)])
def test_packing_with_a_gain_is_as_good_as_the_reference(isa, steps, R, n, D):  # noqa: F811
    g = torch.Generator().manual_seed(D + len(steps))
    y = torch.randn(R, n, D, generator=g) * torch.rand(R, n, 1, generator=g).mul(6).exp2()
    weight = torch.rand(R, D, generator=g) + 0.1
    bits = torch.full((R, D), 2, dtype=torch.uint8)
    bits[:, : D // 4], bits[:, -D // 4 :] = 3, 1
    bits[:, 0], bits[:, 1] = 6, 0
    words = int(bits[0].sum()) // 16
    enough = torch.full((R,), 1e-9)
    stream, gain = native.pack_trellis(y, weight, bits, tables(), words, steps, enough)
    expected = pack_trellis.reference(y, weight, bits, tables(), words, steps, enough)
    assert [(x.shape, x.dtype) for x in (stream, gain)] == [(x.shape, x.dtype) for x in expected]
    ours, theirs = (packed_error(y, weight, bits, *found) for found in ((stream, gain), expected))
    torch.testing.assert_close(ours.sum(), theirs.sum(), rtol=2e-3, atol=1e-9)
    assert (gain == expected[1]).float().mean() > 0.95
    if steps:  # the tries are searched: never worse than the first gain alone
        plain = packed_error(y, weight, bits, *native.pack_trellis(y, weight, bits, tables(), words, [], enough))
        assert (ours <= plain * (1 + 1e-5)).all()
        assert ours.sum() < plain.sum() or n == 1


@pytest.mark.parametrize("rates", [[8] * 64, [7, 8, 1] * 16, [*RATES, 6], [1] * 16, [0, 7, 7, 2] * 3])
def test_windows_are_written_as_the_stream(isa, rates):  # noqa: F811
    """The first search of a vector writes the newest bits of its windows."""
    torch.manual_seed(0)
    bits = torch.tensor([rates], dtype=torch.uint8)
    y, weight, words = torch.randn(1, 30, len(rates)), following(bits) * (bits > 0), sum(rates) // 16
    stream, _ = native.pack_trellis(y, weight, bits, tables(), words, [], torch.zeros(1))
    codes = gain_codes(_lengths(y, bits))
    tried = gains(first_gains(codes, y, weight, bits, tables()))
    windows = native.encode_trellis(y / tried.unsqueeze(-1), weight, bits, tables())
    assert torch.equal(stream, pack_stream(windows, bits, words))


def test_packing_of_numbers_out_of_range_ends(isa):  # noqa: F811
    call = vector_call(64, 32)
    for bad in (float("nan"), float("inf"), 1e30, 1e-40):
        stream, gain, _ = native.pack_vectors(call[0] * bad, *call[1:])
        assert stream.shape[:2] == gain.shape == call[0].shape[:2]


def test_vectors_with_a_small_error_are_searched_once(isa):  # noqa: F811
    y, weight = torch.randn(1, 200, 64), torch.ones(1, 64)
    call = y, weight, torch.full((1, 64), 2, dtype=torch.uint8), tables(), 8
    once, always, some = (native.pack_trellis(*call, steps, torch.tensor([enough]))
                          for steps, enough in (([], 0.0), ([2, 5], 0.0), ([2, 5], 64 * 0.0771)))  # fmt: skip
    errors = [packed_error(y, weight, call[2], *found) for found in (once, some, always)]
    assert (errors[1] <= errors[0] * (1 + 1e-5)).all()
    assert errors[0].sum() > errors[1].sum() > errors[2].sum()
    kept = (some[0] == once[0]).all(-1)
    assert 0.2 < kept.float().mean() < 0.95
    torch.testing.assert_close(pack_trellis.reference(*call, [2, 5], torch.tensor([64 * 0.0771]))[1].float(),
                               some[1].float(), rtol=0, atol=12)  # fmt: skip


def vector_call(D, n, R=2):
    g = torch.Generator().manual_seed(D + n)
    x, shift = torch.randn(R, n, D, generator=g), torch.randn(R, D, generator=g)
    inverse = torch.eye(D) + 0.3 * torch.randn(R, D, D, generator=g) / D**0.5
    bits = torch.full((R, D), 2, dtype=torch.uint8)
    bits[:, : D // 4], bits[:, -(D // 4) :] = 4, 1
    bits[:, : -int(bits[0].sum()) % 16] += 1
    weight = torch.exp2(2.0 * bits)
    enough = 0.97 * (weight * torch.tensor([0, 0.288, 0.0771, 0.0207, 0.00572, 0.00175])[bits.long()]).sum(-1)
    return x, shift, inverse, torch.arange(R).flip(0), weight, bits, tables(), int(bits[0].sum()) // 16, [2, 5], enough


@pytest.mark.parametrize("D", [40, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("n", [1, 32, 45])
def test_packing_vectors(isa, D, n):  # noqa: F811
    call = vector_call(D, n)
    (stream, gain, length), expected = native.pack_vectors(*call), pack_vectors.reference(*call)
    assert [(x.shape, x.dtype) for x in (stream, gain, length)] == [(x.shape, x.dtype) for x in expected]
    torch.testing.assert_close(length, expected[2], rtol=1e-4, atol=1e-5)
    y = (call[0] - call[1][:, None]) @ call[2][call[3]]
    ours, theirs = (packed_error(y, *call[4:6], *found[:2]) for found in ((stream, gain), expected))
    torch.testing.assert_close(ours.sum(), theirs.sum(), rtol=5e-3, atol=1e-9)
    assert (stream == expected[0]).all(-1).float().mean() > 0.9


def test_packing_does_not_depend_on_the_batch(isa):  # noqa: F811
    call = vector_call(64, 50)
    whole = native.pack_vectors(*call)
    torch.set_num_threads(3)
    for ours, theirs in zip(native.pack_vectors(*call), whole, strict=True):
        assert torch.equal(ours, theirs)
    torch.set_num_threads(1)
    for first, last in ((7, 8), (13, 45)):
        own = call[0][1:, first:last], call[1][1:], call[2], call[3][1:], *(x[1:] for x in call[4:6])
        part = native.pack_vectors(*own, *call[6:9], call[9][1:])
        for ours, theirs in zip(part, whole, strict=True):
            assert torch.equal(ours[0], theirs[1, first:last])
    zero = native.pack_trellis(torch.zeros(1, 2, 64), *(x[:1] for x in call[4:6]), *call[6:9], call[9][:1])
    assert (zero[1] == 0).all()


@pytest.mark.parametrize(("last", "sum_"), [(2, 64), (3, 65)])
def test_packing_refuses_rates_that_do_not_fit_the_stream(last, sum_):
    y, weight, bits = torch.randn(1, 4, 32), torch.ones(1, 32), torch.full((1, 32), 2, dtype=torch.uint8)
    bits[0, -1] = last
    with pytest.raises(ValueError, match=f"expected a multiple of 16 up to 48, got {sum_}"):
        native.pack_trellis(y, weight, bits, tables(), 3, [3], torch.zeros(1))


def test_rows_may_fill_less_than_the_stream(isa):  # noqa: F811
    x, shift, inverse, of, weight, bits, tables_, words, steps, enough = vector_call(64, 32)
    bits = torch.cat([bits, bits - (bits == 2).byte()])
    bits[-len(bits) // 2 :, -(int(bits[-1].sum()) % 16 or 16) :] -= 1
    assert int(bits[-1].sum()) % 16 == 0
    assert int(bits[-1].sum()) < int(bits[0].sum())
    call = *(torch.cat([t, t]) for t in (x, shift)), inverse, *(torch.cat([t, t]) for t in (of, weight)), bits
    rest = tables_, words, steps, torch.cat([enough, enough])
    both, n = native.pack_vectors(*call, *rest), len(x)
    fewer = int(bits[-1].sum()) // 16
    alone = native.pack_vectors(x, shift, inverse, of, *(t[n:] for t in call[4:]), tables_, fewer, steps, enough)
    assert torch.equal(both[0][n:, :, :fewer], alone[0])
    assert not both[0][n:, :, fewer:].any()
    assert all(torch.equal(ours[n:], theirs) for ours, theirs in zip(both[1:], alone[1:], strict=True))
    expected = pack_vectors.reference(*call, *rest)
    assert (both[0] == expected[0]).all(-1).float().mean() > 0.9
