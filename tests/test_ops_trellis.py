"""The search for trellis codes on every instruction set against the torch reference.

It also gives the same codes in any batch and on any number of threads.
"""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tersekv.codecs.codebooks.trellis import trellis_entries
from tersekv.errors import UserError
from tersekv.kernels import backends, cpu
from tersekv.kernels.cpu import encode as native
from tersekv.kernels.trellis import encode_trellis, gains, pack_stream, pack_trellis, windows_of
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


def squared_error(y, weight, bits, windows):
    """Return the squared error per vector, float64 [R, n]."""
    entries = tables()[bits.long()[:, None], windows.long()].double()
    return ((y.double() - entries).square() * weight.double()[:, None] * (bits > 0)[:, None]).sum(-1)


def check(y, weight, bits, rtol=1e-4):
    windows, expected = (
        native.encode_trellis(y, weight, bits, tables()),
        encode_trellis.reference(y, weight, bits, tables()),
    )
    assert windows.shape == y.shape
    assert windows.dtype is torch.uint8
    held = (bits > 0)[:, None].expand_as(windows)
    if (bits.long().sum(1) < 8).any():
        return windows  # a ring shorter than a window may have no path at all
    error = squared_error(y, weight, bits, windows)
    # Near-ties of the open path may begin the ring elsewhere, so single vectors may be better or
    # worse.
    torch.testing.assert_close(error.sum(), squared_error(y, weight, bits, expected).sum(), rtol=rtol, atol=1e-9)
    assert (windows[~held] == 0).all()
    if not (bits.long().sum(1) % 16).any() and len({*bits.long().sum(1).tolist()}) == 1:
        back = windows_of(pack_stream(windows, bits), bits)
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


def test_edges(isa):  # noqa: F811
    def bits(*rates):
        return torch.tensor([rates], dtype=torch.uint8)

    torch.manual_seed(0)
    for one in (bits(0, 0, 0), bits(0, 3, 0), bits(6), bits(1), bits(4, 4, 4, 4), bits(*[1] * 16, *[0] * 16)):
        check(torch.randn(1, 3, one.shape[1]), torch.ones(one.shape), one)
        check(torch.zeros(1, 3, one.shape[1]), torch.ones(one.shape), one, rtol=1)  # any of the tied paths may win
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


def test_instruction_sets_agree():
    torch.manual_seed(3)
    y, weight, bits = torch.randn(2, 50, 64), torch.rand(2, 64), mixed_bits(2, 64)
    errors = []
    for name, missing in cpu.isas().items():
        if missing is None:
            cpu.set_isa(name)
            errors.append(squared_error(y, weight, bits, native.encode_trellis(y, weight, bits, tables())).sum())
    cpu.set_isa("auto")
    torch.testing.assert_close(torch.stack(errors), errors[0].expand(len(errors)), rtol=1e-5, atol=0)


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
def test_any_rates(rates, seed):
    """Every vector's windows are a ring, and nearly all errors equal the reference's.

    Rings may begin elsewhere if the open path has near-ties, as in short rings.
    """
    if sum(rates) < 8:  # a ring shorter than a window may have no path at all
        return
    generator = torch.Generator().manual_seed(seed)
    y, weight = torch.randn(1, 64, len(rates), generator=generator), torch.rand(1, len(rates), generator=generator)
    bits = torch.tensor([rates], dtype=torch.uint8)
    windows, expected = (
        native.encode_trellis(y, weight, bits, tables()),
        encode_trellis.reference(y, weight, bits, tables()),
    )
    active = [d for d, b in enumerate(rates) if b]
    states = windows[0].int()
    for d, before in zip(active, [active[-1], *active], strict=False):
        assert ((states[:, d] & ((256 >> rates[d]) - 1)) == states[:, before] >> rates[d]).all(), "no ring"
    ours, theirs = (squared_error(y, weight, bits, w) for w in (windows, expected))
    assert torch.isclose(ours, theirs, rtol=1e-4, atol=1e-9).float().mean() >= 0.8


@pytest.mark.parametrize("rates", [[2] * 8, [4] * 8, [5, 5, 5, 4, 4, 4, 3, 2], [2] * 12, [3] * 10 + [2] * 8 + [1] * 2],
                         ids=lambda rates: f"{len(rates)} components of {sum(rates)} bits")  # fmt: skip
def test_short_rings_have_the_references_codes(isa, rates):  # noqa: F811
    """If all components are searched twice for the first state, two rounds of a path can tie with
    each other.

    The lowest window then decides, not rounding.
    """
    torch.manual_seed(0)
    bits = torch.tensor([rates], dtype=torch.uint8)
    y, weight = torch.randn(1, 2000, len(rates)), torch.rand(1, len(rates)) + 0.1
    expected = encode_trellis.reference(y, weight, bits, tables())
    assert torch.equal(native.encode_trellis(y, weight, bits, tables()), expected)


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
    stream, gain = native.pack_trellis(y, weight, bits, tables(), words, steps)
    expected = pack_trellis.reference(y, weight, bits, tables(), words, steps)
    assert [(x.shape, x.dtype) for x in (stream, gain)] == [(x.shape, x.dtype) for x in expected]
    ours, theirs = (packed_error(y, weight, bits, *found) for found in ((stream, gain), expected))
    torch.testing.assert_close(ours.sum(), theirs.sum(), rtol=2e-3, atol=1e-9)
    assert (gain == expected[1]).float().mean() > 0.95
    if steps:  # the tries are searched: never worse than the first gain alone
        plain = packed_error(y, weight, bits, *native.pack_trellis(y, weight, bits, tables(), words, []))
        assert (ours <= plain * (1 + 1e-5)).all()
        assert ours.sum() < plain.sum() or n == 1


def test_packing_does_not_depend_on_the_batch(isa):  # noqa: F811
    y, weight = torch.randn(2, 50, 64), torch.rand(2, 64)
    bits = torch.full((2, 64), 3, dtype=torch.uint8)
    stream, gain = native.pack_trellis(y, weight, bits, tables(), 12, [3])
    one = native.pack_trellis(y[1:, 7:8], weight[1:], bits[1:], tables(), 12, [3])
    assert torch.equal(one[0][0, 0], stream[1, 7])
    assert torch.equal(one[1][0, 0], gain[1, 7])
    zero = native.pack_trellis(torch.zeros(1, 2, 64), weight[:1], bits[:1], tables(), 12, [3])
    assert (zero[1] == 0).all()


def test_packing_refuses_rates_that_do_not_fill_the_stream():
    y, weight, bits = torch.randn(1, 4, 32), torch.ones(1, 32), torch.full((1, 32), 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match="expected a sum of 80, got 64"):
        native.pack_trellis(y, weight, bits, tables(), 5, [3])
