"""Triton kernels that pack trellis codes, and that multiply with or invert a basis of 6-bit entries.

Without a GPU they run in Triton's interpreter. Sums are added in another order than the reference
adds them, so that a vector may get another gain if two gains have almost equal errors.
"""

from __future__ import annotations

import pytest
import torch

from tersekv.kernels import backends
from tersekv.kernels.basis import basis_components, basis_product, unpacked_basis
from tersekv.kernels.trellis import pack_trellis, pack_vectors
from tersekv.kernels.trellis_search import cost_units, first_search
from tersekv.kernels.triton import encode, pack
from test_ops_basis import drawn
from test_ops_trellis import packed_error, tables, vector_call
from test_ops_triton import Counted, device, pytestmark, right  # noqa: F401
from test_ops_triton_encode import on, poisoned  # noqa: F401
from test_ops_triton_trellis_search import large_programs  # noqa: F401

SAME = 0.99
"""Least share of vectors with equal stream and gain."""


def mixed_call(R, n, D, seed=0, steps=(2, 5)):
    """Return a call of `pack_trellis` with rates of 0 to 6 bits, and vectors of lengths 1 to 64."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randn(R, n, D, generator=g) * torch.rand(R, n, 1, generator=g).mul(6).exp2()
    bits = torch.full((R, D), 2, dtype=torch.uint8)
    bits[:, : D // 4], bits[:, -D // 4 :] = 3, 1
    bits[:, 0], bits[:, 1] = 6, 0
    bits[-1] = bits[-1].flip(0)
    weight = torch.rand(R, D, generator=g) + 0.1
    enough = (weight * torch.exp2(-2.0 * bits) * (bits > 0)).sum(-1)
    return y, weight, bits, tables(), int(bits[0].sum()) // 16, list(steps), enough


def check(device, call, expected=None):  # noqa: F811
    """Pack with the kernels and compare with the reference."""
    expected = right(pack_trellis, *call) if expected is None else expected
    found = [x.cpu() for x in backends.pack_trellis(*on(device, *call))]
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected]
    equal = (found[0] == expected[0]).all(-1) & (found[1] == expected[1])
    assert equal.float().mean() >= SAME
    ours, theirs = (packed_error(*call[:3], *packed).sum() for packed in (found, expected))
    assert ours <= theirs * (1 + 1e-3) + 1e-9
    return found


@pytest.mark.parametrize("steps", [(), (3,), (2, 5)], ids=str)
@pytest.mark.parametrize(("R", "n", "D"), [(1, 1, 16), (3, 5, 40), (2, 2, 128)])
def test_mixed_rates(device, steps, R, n, D):  # noqa: F811
    check(device, mixed_call(R, n, D, D + len(steps), steps))


@pytest.mark.parametrize("vectors", [1, 4])
def test_some_vectors_are_searched_again(device, vectors, monkeypatch):  # noqa: F811
    """Some programs search none of their vectors again, some all, and of four vectors one searches two."""
    if device == "cpu" and vectors == 1:
        pytest.skip("interpreting a program for each vector takes long")
    monkeypatch.setattr(encode, "VECTORS", vectors)
    y, *rest, steps, _ = mixed_call(1, 24, 64, 7)
    weight, bits, never = *rest[:2], torch.full((1,), torch.inf)
    once = right(pack_trellis, y, *rest, steps, never)
    size = packed_error(y, weight, bits, *once) / (y.square() * (bits > 0)[:, None]).sum(-1) * (bits > 0).sum()
    order = size[0].argsort()
    y, size, once = y[:, order], size[0, order], [x[:, order] for x in once]
    enough = size[9:11].mean().float().view(1)
    call = y, *rest, steps, enough
    expected = right(pack_trellis, *call)
    changed = (expected[0] != once[0]).any(-1)[0]
    assert changed[12:].any()
    assert not changed[:8].any()
    found = check(device, call, expected)
    assert torch.equal(found[0][:, :8].cpu(), once[0][:, :8])


def test_edges(device):  # noqa: F811
    """Vectors of zeros, large ones, single far components, and components that are not finite."""
    y, *rest = mixed_call(2, 6, 16, 1)
    y[0, 0], y[1, 3] = 0, 0
    y[0, 1] *= 1e4
    y[0, 2] *= 1e-6
    y[1, 4, 5] = 300
    found = check(device, (y, *rest))
    assert (found[1][0, 0], found[1][1, 3], found[1][0, 1]) == (0, 0, 255)
    y[1, 0, 2], y[1, 1, 3] = float("nan"), float("inf")
    stream, gain = (x.cpu() for x in backends.pack_trellis(*on(device, y, *rest)))
    other = torch.ones(2, 6, dtype=torch.bool)
    other[1, :2] = False
    assert torch.equal(stream[other], found[0][other])
    assert torch.equal(gain[other], found[1][other])


def test_nothing_to_code(device):  # noqa: F811
    y, weight, bits = torch.randn(2, 3, 16), torch.rand(2, 16), torch.zeros(2, 16, dtype=torch.uint8)
    found = backends.pack_trellis(*on(device, y, weight, bits, tables(), 0, [2], torch.ones(2)))
    assert [x.shape for x in found] == [(2, 3, 0), (2, 3)]
    bits[:] = 2
    found = backends.pack_trellis(*on(device, y[:, :0], weight, bits, tables(), 2, [2], torch.ones(2)))
    assert [x.shape for x in found] == [(2, 0, 2), (2, 0)]


def test_some_vectors_at_a_time(device, monkeypatch):  # noqa: F811
    call = mixed_call(2, 4, 16)
    whole = check(device, call)
    monkeypatch.setattr(encode, "VECTORS_AT_A_TIME", 6)
    for part, all_ in zip(check(device, call), whole, strict=True):
        assert torch.equal(part, all_)


@pytest.mark.parametrize(("D", "n", "empty"), [(40, 1, 0), (64, 3, 2), (128, 1, 0)])
def test_vectors(device, D, n, empty):  # noqa: F811
    call = vector_call(D, n)
    call = *call[:7], call[7] + empty, *call[8:]  # words that no row needs
    expected = right(pack_vectors, *call)
    stream, gain, length = (x.cpu() for x in backends.pack_vectors(*on(device, *call)))
    torch.testing.assert_close(length, expected[2], rtol=1e-5, atol=1e-6)
    equal = (stream == expected[0]).all(-1) & (gain == expected[1])
    assert equal.float().mean() >= SAME
    y = (call[0] - call[1][:, None]) @ call[2][call[3]]
    ours, theirs = (packed_error(y, *call[4:6], *found).sum() for found in ((stream, gain), expected[:2]))
    assert ours <= theirs * (1 + 1e-3)


@pytest.mark.parametrize("D", [16, 40, 128])
def test_units_are_the_references(device, D):  # noqa: F811
    """Weights of any size, components and whole rows without bits."""
    g = torch.Generator().manual_seed(D)
    weight = torch.rand(5, D, generator=g).log().mul(5).exp()
    bits = torch.randint(0, 9, (5, D), generator=g, dtype=torch.uint8)
    weight[1], bits[2], weight[3, ::3] = 1e-3, 0, 0
    bits[4, : D // 2] = 0
    expected = cost_units(weight, bits, tables())
    weight, bits, codebooks = on(device, weight, bits, tables())
    made = [codebooks.new_empty(x.shape, dtype=x.dtype) for x in expected]
    reach, (place, stop) = made[2].clone(), weight.new_empty((2, 5), dtype=torch.int32)
    options = {"CHANNELS": encode.power(D), "num_warps": 4, "enable_fp_fusion": False}
    pack._kernels().units[(5,)](*made, reach, place, stop, weight, bits, codebooks, D, **options)
    for ours, theirs, name in zip(made, expected, expected._fields, strict=True):
        coded = (bits > 0).cpu() if ours.shape == bits.shape else slice(None)
        torch.testing.assert_close(ours.cpu()[coded], theirs[coded], rtol=0, atol=0, msg=name)
    for ours, theirs in zip((place, stop), first_search(bits.cpu()), strict=True):
        assert torch.equal(ours.cpu(), theirs.int())


def test_launches_of_a_block(device, monkeypatch):  # noqa: F811
    """The number of launches does not depend on vectors and rows, and no other operation runs."""
    from tersekv.kernels.triton import pack_kernels, trellis

    launched, names = [], {"units", "first_gain", "keep_better", "write_stream", "search", "trace"}
    for name in names:
        module = trellis if hasattr(trellis, name) else pack_kernels
        monkeypatch.setattr(module, name, Counted(getattr(module, name), name, launched))
    backends.pack_trellis(*on(device, *mixed_call(2, 8, 16)))
    of_a_gain = ["search", "trace"] * 2 + ["keep_better"]
    assert launched == ["units", "first_gain", *of_a_gain * 3, "write_stream"]


@pytest.mark.parametrize("combine", [True, False])
@pytest.mark.parametrize(("B", "R", "D", "one_row"), [(2, 1, 128, False), (3, 5, 40, True), (1, 64, 16, True),
                                                      (2, 9, 6, False), (1, 65, 32, True)], ids=str)  # fmt: skip
def test_products_with_a_basis(device, combine, B, R, D, one_row):  # noqa: F811
    kept = drawn(1 if one_row else B, 2, D, seed=D)
    x = torch.randn(B, R, 2, D).transpose(1, 2)
    expected = right(basis_product, x, *kept.values(), combine)
    found = backends.basis_product(*on(device, x, *kept.values()), combine)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(("B", "R", "D", "one_row"), [(2, 3, 128, False), (3, 5, 40, True), (1, 7, 24, True),
                                                      (1, 2, 132, True)], ids=str)  # fmt: skip
def test_components_in_a_basis(device, B, R, D, one_row):  # noqa: F811
    kept = drawn(1 if one_row else B, 2, D, seed=D)
    y = torch.randn(B, 2, R, D)
    x = (y.double() @ unpacked_basis(**kept)).float()
    expected = right(basis_components, x, *kept.values())
    found = backends.basis_components(*on(device, x, *kept.values())).cpu()
    size = expected.abs().amax((-1, -2), keepdim=True)
    torch.testing.assert_close(found / size, expected / size, rtol=1e-5, atol=1e-5)


def test_entries_of_zero_on_the_diagonal(device):  # noqa: F811
    from tersekv.kernels.basis import packed_basis

    rows = torch.eye(32, dtype=torch.float64).flip(0).expand(1, 1, 32, 32)
    kept, x = packed_basis(rows, torch.ones(1, 1, 32).double()), torch.randn(1, 1, 3, 32)
    found = backends.basis_components(*on(device, x, *kept.values())).cpu()
    torch.testing.assert_close(found, x.flip(-1) / 31, rtol=1e-6, atol=1e-6)


def test_why_not(device):  # noqa: F811
    if device == "cuda":
        pytest.skip("refusals do not depend on the device")
    call, kept, x = mixed_call(1, 4, 16), drawn(1, 2, 16), torch.randn(1, 2, 3, 16)
    assert pack.why_not_pack_trellis(*call) is None
    assert "enough on meta" in str(pack.why_not_pack_trellis(*call[:-1], call[-1].to("meta")))
    assert "bits is torch.int64" in str(pack.why_not_pack_trellis(*call[:2], call[2].long(), *call[3:]))
    vectors = vector_call(40, 1)
    assert pack.why_not_pack_vectors(*vectors) is None
    assert "inverse on meta" in str(pack.why_not_pack_vectors(*vectors[:2], vectors[2].to("meta"), *vectors[3:]))
    assert pack.why_not_basis_components(x, **kept) is None
    assert "x is torch.float64" in str(pack.why_not_basis_components(x.double(), **kept))
    assert "channels on meta" in str(pack.why_not_basis_components(x, kept["basis"], kept["channels"].to("meta")))
    assert "basis is [1, 1, 192]" in str(pack.why_not_basis_components(x, kept["basis"][:, :1], kept["channels"]))
