"""Conformance of every codec in the folder, on both sides, at every head dim that it supports."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from tersekv.cache.blocks import BlockBuffer
from tersekv.codecs import Codec, methods
from tersekv.codecs.codebooks.fixed import normal_quantiles
from tersekv.codecs.normalfloat import NormalFloat
from tersekv.codecs.uniform import Uniform
from tersekv.errors import UserError

HEAD_DIMS = [32, 64, 80, 96, 128, 256]


def codecs(name: str) -> list[Codec]:
    """Build a method's codecs with its defaults and its variants, first layers included."""
    method = methods()[name]
    pairs = [method.build(**options) for options in ({}, *method.variants)]
    return [codec for pair in pairs for codec in (pair.keys, pair.values, *(pair.initial or ()))]


def build(name: str, D: int) -> list[Codec]:
    """Build the codecs that support head dim D, with smaller groups where the usual ones do not
    divide it."""
    taken = []
    for codec in codecs(name):
        try:
            codec.layout(D)
        except UserError:
            codec = dataclasses.replace(codec, group=16)  # type: ignore[call-arg]
            codec.layout(D)
        taken.append(codec)
    return taken


def sample(D: int, T: int = 128, B: int = 2, H: int = 3, kind: str = "normal") -> Tensor:
    x = torch.randn(B, H, T, D, generator=torch.Generator().manual_seed(D))
    if kind == "zeros":
        x = torch.zeros_like(x)
    elif kind == "constant":
        x = torch.full_like(x, 0.75)
    elif kind == "huge":
        x = x.sign() * 1e4
    elif kind == "outlier channels":
        x[..., 3] *= 50
        x[..., D // 2] += 30
    return x


def encode(codec: Codec, x: Tensor) -> tuple[Codec, dict[str, Tensor]]:
    fitted = codec.fit(x)
    return fitted, fitted.encode(x)


@pytest.mark.parametrize("name", methods())
def test_every_method_states_what_it_is(name):
    method = methods()[name]
    assert method.title
    assert method.paper or name == "exact"
    assert all(p.default is not p.empty for p in method.parameters.values())
    assert all(build(name, D) for D in HEAD_DIMS)


@pytest.mark.parametrize("name", [name for name in methods() if any(codec.encodes_halves for codec in codecs(name))])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tokens_of_16_bits_have_the_bytes_of_their_float32_copy(name, dtype):
    x = sample(80).to(dtype)
    for codec in (codec.fit(x.float()) for codec in build(name, 80) if codec.encodes_halves):
        made, wanted = codec.encode(x), codec.encode(x.float())
        assert all(torch.equal(made[key], plane) for key, plane in wanted.items())


@pytest.mark.parametrize("name", methods())
@pytest.mark.parametrize("D", HEAD_DIMS)
def test_bytes_held_are_bits_declared(name, D):
    for codec in build(name, D):
        x = sample(D, T=256)
        fitted, planes = encode(codec, x)
        layout = codec.layout(D)
        assert set(planes) == set(layout.planes)
        for key, spec in layout.planes.items():
            assert planes[key].dtype == spec.dtype
            if spec.ragged is None:
                assert planes[key].shape == (2, 1 if spec.shared else 3, 256 // layout.block_tokens, *spec.shape)
        held = sum(plane.numel() * plane.element_size() for plane in planes.values())
        # The number of sparse entries depends on the data; a declared size is the average for a
        # long input.
        expected = layout.bits(D, 3)
        for key, spec in layout.planes.items():
            if spec.ragged is not None:
                share = planes[key].numel() / x.numel()
                declared = spec.block_bytes(3) / spec.dtype.itemsize / (layout.block_tokens * D)
                assert share == declared if spec.share else share <= declared + 4 / 256
                expected += (share - declared) * 8 * spec.dtype.itemsize
        assert held * 8 / x.numel() == pytest.approx(expected)
        tables = codec.table_bytes(D)
        of_the_prompt = sum(t.numel() * t.element_size() for t in fitted.fitted.values())
        assert of_the_prompt == tables._replace(of_sequence=True).of_layer(3, 2)  # fitted here on both rows
        shared = [t for t in fitted.tables(D) if not any(t is f for f in fitted.fitted.values())]
        assert sum(t.numel() * t.element_size() for t in shared) == sum(tables.shared.values())
        spread = (tables.per_head + tables.per_layer / 3) * 8 / (256 * D)
        assert codec.true_bits(D, 256, 3) == pytest.approx(layout.bits(D, 3) + spread)


@pytest.mark.parametrize("name", methods())
@pytest.mark.parametrize("kind", ["zeros", "constant", "huge", "outlier channels", "normal"])
def test_finite_on_extremes(name, kind):
    for codec in build(name, 64):
        x = sample(64, kind=kind)
        fitted, planes = encode(codec, x)
        decoded = fitted.decode(planes, 64)
        assert decoded.dtype == torch.float32
        assert torch.isfinite(decoded).all()
        if kind == "zeros":
            assert decoded.abs().max() == 0


@pytest.mark.parametrize("name", methods())
def test_blocks_do_not_depend_on_each_other(name):
    """Encoding all at once or block by block gives the same bytes once the codec is fitted."""
    for codec in build(name, 64):
        x = sample(64, T=256)
        fitted, whole = encode(codec, x)
        t = codec.layout(64).block_tokens
        buffer = BlockBuffer(codec.layout(64), 2, 3, x.device)
        for start in range(0, 256, t):
            buffer.append(fitted.encode(x[:, :, start : start + t]))
        for key, plane in buffer.planes().items():
            assert torch.equal(plane, whole[key])


@pytest.mark.parametrize("name", methods())
def test_rows_do_not_depend_on_the_batch(name):
    for codec in build(name, 64):
        x = sample(64, B=3)
        fitted, planes = encode(codec, x)
        rows = torch.tensor([2, 0])
        alone, alone_planes = encode(codec, x[rows])
        for key, plane in codec.layout(64).select_rows(planes, rows).items():
            assert torch.equal(plane, alone_planes[key])
        chosen = fitted.select(rows)
        assert torch.equal(chosen.decode(alone_planes, 64), alone.decode(alone_planes, 64))


@pytest.mark.parametrize("name", methods())
def test_scores_are_products_with_the_decoded(name):
    for codec in build(name, 64):
        x = sample(64, kind="outlier channels")
        fitted, planes = encode(codec, x)
        view = fitted.view(planes, 64)
        query = torch.randn(2, 3, 5, 64)
        expected = query @ view.decode().transpose(-1, -2)
        torch.testing.assert_close(view.scores(query), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("name", methods())
def test_codecs_are_frozen_values(name):
    for codec in codecs(name):
        assert codec == dataclasses.replace(codec)
        assert hash(codec) == hash(dataclasses.replace(codec))
        with pytest.raises(dataclasses.FrozenInstanceError):
            codec.side = "values"  # type: ignore[misc]


@pytest.mark.parametrize(("bits", "expected"), [(2, 3.0), (4, 5.0)])
def test_kivi_true_bits(bits, expected):
    pair = methods()["kivi"].build(bits=bits)
    assert (pair.keys.true_bits(128), pair.values.true_bits(128)) == (expected, expected)


def test_qjl_true_bits():
    """Design values at head dim 128: 4.27 with indices per group of 32 tokens, and 5.27 in the
    first layers.

    Values take 3.0.
    """
    pair = methods()["qjl"].build(outliers_per="group")
    assert pair.initial is not None
    assert pair.keys.true_bits(128) == pytest.approx(4.27, abs=0.005)
    assert pair.initial[0].true_bits(128) == pytest.approx(5.27, abs=0.005)
    assert pair.values.true_bits(128) == 3.0
    assert (pair.initial_layers, pair.keys.rows(128), pair.initial[0].rows(128)) == (15, 256, 512)
    assert (pair.keys.outlier_rows(128), pair.initial[0].outlier_rows(128)) == (256, 128)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize("side", ["keys", "values"])
def test_uniform_error_is_at_most_half_a_step(bits, axis, side):
    codec = Uniform(bits, axis, 32, side=side)
    x = sample(64)
    groups = codec.grid(64).groups(x)
    error = codec.grid(64).groups((codec.decode(codec.encode(x), 64) - x).abs())
    step = (groups.amax(-1) - groups.amin(-1)) / (2**bits - 1)
    # float16 rounds the step and the minimum: at most 2^-11 of each, over the codes
    slack = (groups.amax(-1).abs() + groups.amin(-1).abs()) * 2**-10
    assert (error.amax(-1) <= step / 2 * 1.001 + slack).all()


def test_exact_refuses_what_its_dtype_cannot_hold():
    x = torch.full((1, 1, 32, 32), 7e4)
    with pytest.raises(UserError, match="exceeds float16's 65504; use the method's option dtype=bf16"):
        methods()["exact"].build().keys.encode(x)
    for dtype in ("bf16", "fp32"):
        assert methods()["exact"].build(dtype=dtype).keys.encode(x)["x"].isfinite().all()


def test_constant_group_decodes_exactly():
    for axis in ("token", "channel"):
        codec = Uniform(2, axis, 32)
        x = torch.full((1, 1, 32, 64), 0.3).half().float()
        assert torch.equal(codec.decode(codec.encode(x), 64), x)


def test_uniform_range_of_the_prompt_clamps_later_values():
    codec = Uniform(4, "channel", 0)
    assert codec.fits_on == "prompt"
    x = sample(64)
    fitted = codec.fit(x)
    later = fitted.decode(fitted.encode(x * 10), 64)
    assert (later <= x.amax(2, keepdim=True) + 0.01).all()
    assert codec.layout(64).bits(64) == 4.0


@pytest.mark.parametrize("bits", range(2, 9))
def test_normalfloat_table(bits):
    table = normal_quantiles(bits, "cpu")
    assert len(table) == 2**bits
    assert torch.equal(table, table.sort().values)
    assert (table[0], table[-1]) == (-1, 1)
    assert (table == 0).sum() == 1


def test_normalfloat_4_bits_is_nf4():
    """The table published by bitsandbytes (QLoRA, appendix E)."""
    nf4 = [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]  # fmt: skip
    torch.testing.assert_close(normal_quantiles(4, "cpu"), torch.tensor(nf4), atol=2e-6, rtol=0)


def test_normalfloat_beats_integers_on_long_gaussian_groups():
    """For 1,024 values a group's range reaches far into the tails, and quantiles waste fewer codes
    than even steps."""
    x = torch.randn(1, 1, 2048, 64, generator=torch.Generator().manual_seed(0))

    def error(codec: Codec) -> float:
        return float((codec.decode(codec.encode(x), 64) - x).square().mean())

    for bits in (3, 4):
        assert error(NormalFloat(bits, "channel", 1024, zero_point=True)) < error(Uniform(bits, "channel", 1024))


@pytest.mark.parametrize(
    ("build_codec", "text"),
    [
        (lambda: Uniform(0), "bits=0 is out of range; allowed are 1 to 8"),
        (lambda: Uniform(9), "bits=9 is out of range"),
        (lambda: Uniform(4, "row"), "axis=row is not allowed; choose one of token, channel"),
        (lambda: Uniform(4, scales="fp8"), "scales=fp8 is not allowed"),
        (lambda: Uniform(4, group=48).layout(64), "group=48 does not divide the head dim 64"),
        (lambda: Uniform(4, "channel", 48).layout(64), "does not fit blocks of 32"),
        (lambda: NormalFloat(1), "bits=1 is out of range; allowed are 2 to 8"),
        (lambda: methods()["exact"].build(dtype="fp8"), "dtype=fp8 is not allowed"),
        (lambda: methods()["qjl"].build(outliers=64).keys.layout(64), "outliers=64 must be less than the head dim 64"),
        (lambda: methods()["qjl"].build(outliers_per="token"), "outliers_per=token is not allowed"),
        (lambda: methods()["qjl"].build(initial_layers=-1), "initial_layers=-1 is out of range"),
    ],
)
def test_wrong_options(build_codec, text):
    with pytest.raises(UserError, match=text):
        build_codec()


def test_scale_that_float16_cannot_hold():
    x = torch.full((1, 1, 32, 64), 1e5)
    with pytest.raises(UserError, match="scales=bf16"):
        Uniform(4).encode(x)
    decoded = Uniform(4, scales="bf16").decode(Uniform(4, scales="bf16").encode(x), 64)
    assert (decoded / x - 1).abs().max() < 0.005
