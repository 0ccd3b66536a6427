"""Self-contained chunks: round trip, exact size, and errors for anything but the packed chunk."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from random_calibration import calibration, scales
from tersekv.codecs import methods
from tersekv.errors import CacheError, UserError
from tersekv.recipe import Recipe
from tersekv.serving.chunks import ChunkCoder, why_not_chunks

RECIPES = ["turboquant:bits=4", "polarquant", "kivi:bits=2", "uniform:bits=3", "normalfloat", "exact:dtype=bf16"]
RECIPES += [
    "int4",
    "kivi:bits=4/turboquant:bits=3",
    "turboquant:bits=2;0=exact;-1=kivi",
    "uniform:axis=channel,group=64",
]


def coder(recipe: str, head_dim: int = 64) -> ChunkCoder:
    return ChunkCoder(Recipe.parse(recipe), head_dim)


@pytest.mark.parametrize("sides", [1, 2])
@pytest.mark.parametrize("recipe", RECIPES)
def test_round_trip_is_the_codecs_own(recipe, sides):
    torch.manual_seed(0)
    x = torch.randn(sides, 3, 70, 2 * 64).bfloat16()
    packer = coder(recipe)
    data, out = packer.pack([x]), torch.full_like(x, float("nan"))
    assert data.numel() == packer.size([x.shape])
    packer.unpack(torch.cat([data, data[:100]]), [out])
    for layer in range(3):
        plan = Recipe.parse(recipe).plan(layer, 3)
        for side in range(sides):
            codec = (plan.keys, plan.values)[side]
            heads = x[side, layer].float().unflatten(-1, (2, 64)).transpose(0, 1)[None]
            t = codec.layout(64).block_tokens
            whole = torch.cat([heads, heads[:, :, -1:].expand(-1, -1, -70 % t, -1)], 2)
            want = codec.decode(codec.encode(whole), 64)[0, :, :70].transpose(0, 1).flatten(1)
            assert torch.equal(out[side, layer], want.bfloat16())


def test_four_bits_take_a_fraction_of_the_chunk():
    shape = (2, 30, 256, 3 * 64)
    assert coder("turboquant:bits=4").size([shape]) < 2 * 30 * 256 * 192 * 2 / 3.7


def test_groups_of_layers_count_on():
    recipe = "turboquant:bits=4;0-1=exact:dtype=fp32;-1=exact:dtype=fp32"
    first, second = torch.randn(2, 2, 40, 64), torch.randn(2, 3, 40, 128)
    packer, outs = coder(recipe), [torch.empty(2, 2, 40, 64), torch.empty(2, 3, 40, 128)]
    packer.unpack(packer.pack([first, second]), outs)
    assert torch.equal(outs[0], first)
    assert torch.equal(outs[1][:, 2], second[:, 2])
    assert not torch.equal(outs[1][:, 1], second[:, 1])


@pytest.mark.parametrize("name", methods())
def test_codecs_with_state_are_refused(name):
    pair = methods()[name].build()
    reasons = [why_not_chunks(codec, 64) for codec in (pair.keys, pair.values)]
    if any(reasons):
        with pytest.raises(UserError, match="cannot encode self-contained chunks"):
            coder(name)
    else:
        assert coder(name).size([(2, 1, 1, 64)]) > 0


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("kvquant:bits=3", "does not contain their positions; use pre_rope=false"),
        ("kvquant:bits=3,pre_rope=false", "a list of no fixed size; use room=1.5, or outliers=0"),
        ("kvquant:bits=3,pre_rope=false,room=1.5", "give the file of `tersekv calibrate` as calibration"),
        ("trellis", "does not contain their positions; use centre=false"),
        ("trellis:centre=false", "give the file of `tersekv calibrate` as calibration"),
        ("qjl", "is fitted on the prompt.*; use calibration=corpus"),
        ("turboquant:bits=2.5", "is fitted on the prompt"),
        ("polarquant:codebook=online", "is fitted on the prompt"),
        ("kivi:bits=4,pre_rope=true", "positions"),
        ("streaming:budget=64+kivi:bits=4", "token policy"),
        ("kivi:bits=4;0=qjl", "is fitted on the prompt"),
    ],
)
def test_recipes_that_are_not_self_contained(recipe, words):
    with pytest.raises(UserError, match=words):
        coder(recipe)


@given(where=st.integers(0, 10**6), bit=st.integers(0, 7))
@settings(max_examples=60, deadline=None)
def test_a_flipped_bit_is_an_error(where, bit):
    packer, x = coder("turboquant:bits=3", 16), torch.linspace(-1, 1, 2 * 33 * 16).view(2, 1, 33, 16)
    data = packer.pack([x])
    data[where % data.numel()] ^= 1 << bit
    with pytest.raises(CacheError):
        packer.unpack(data, [torch.empty_like(x)])


def test_other_recipes_shapes_and_lengths_are_errors():
    x = torch.randn(2, 2, 40, 64)
    data = coder("turboquant:bits=4").pack([x])
    with pytest.raises(CacheError, match="another recipe"):
        coder("turboquant:bits=4,seed=1").unpack(data, [torch.empty_like(x)])
    with pytest.raises(CacheError, match="another recipe"):
        coder("turboquant:bits=4").unpack(data, [torch.empty(2, 2, 39, 64)])
    with pytest.raises(CacheError, match="bytes, got"):
        coder("turboquant:bits=4").unpack(data[:-1], [torch.empty_like(x)])
    with pytest.raises(UserError, match="check head_dim"):
        coder("turboquant:bits=4", 128).pack([x])
    with pytest.raises(UserError, match="check head_dim"):
        coder("turboquant:bits=4").size([(3, 1, 1, 64)])


CALIBRATED = [
    "trellis:bits=3,centre=false/trellis:bits=2",
    "trellis:bits=4,centre=false;0=exact:dtype=fp32",
    "kvquant:outliers=0,pre_rope=false",
    "kvquant:bits=4,pre_rope=false,outliers=0.02,room=1.5",
    "qjl:outliers=3,calibration=corpus,initial_layers=1",
    "turboquant:bits=2.5,calibration=corpus",
    "oscar:bits=3",
]


def chunk(layers: int = 3, H: int = 2, D: int = 64, T: int = 70) -> torch.Tensor:
    """Return a chunk whose layers have other scales, as `calibration` has seen them."""
    x = torch.randn(2, layers, T, H, D, generator=torch.Generator().manual_seed(7)) * scales(D)
    return (x * torch.arange(1, layers + 1).view(-1, 1, 1, 1)).flatten(3)


@pytest.mark.parametrize("recipe", CALIBRATED)
def test_round_trip_with_a_calibration_is_the_codecs_own(recipe):
    x, made = chunk(), calibration(recipe, 3, 2, 64)
    packer, out = ChunkCoder(Recipe.parse(recipe), 64, made), torch.empty_like(x)
    data = packer.pack([x])
    assert data.numel() == packer.size([x.shape])
    packer.unpack(data, [out])
    for layer, plan in made.plans_by_shape(Recipe.parse(recipe), 3, 2, 64).items():
        for side, codec in enumerate((plan.keys, plan.values)):
            heads = x[side, layer].unflatten(-1, (2, 64)).transpose(0, 1)[None]
            whole = torch.cat([heads, heads[:, :, -1:].expand(-1, -1, -70 % 32, -1)], 2)
            want = codec.decode(codec.encode(whole), 64)[0, :, :70].transpose(0, 1).flatten(1)
            torch.testing.assert_close(out[side, layer], want)
            assert (out[side, layer] - x[side, layer]).norm() < 0.6 * x[side, layer].norm()


@given(where=st.integers(0, 10**6), bit=st.integers(0, 7), recipe=st.sampled_from(CALIBRATED[:4]))
@settings(max_examples=40, deadline=None)
def test_a_flipped_bit_in_a_calibrated_chunk_is_an_error(where, bit, recipe):
    x = chunk(2, 1, 64, 33)
    packer = ChunkCoder(Recipe.parse(recipe), 64, calibration(recipe, 2, 1, 64))
    data = packer.pack([x])
    data[where % data.numel()] ^= 1 << bit
    with pytest.raises(CacheError):
        packer.unpack(data, [torch.empty_like(x)])


@pytest.mark.parametrize("recipe", [r for r in CALIBRATED if "calibration=corpus" not in r])
def test_chunks_are_bound_to_their_calibration(recipe):
    x, parsed = chunk(), Recipe.parse(recipe)
    data = ChunkCoder(parsed, 64, calibration(recipe, 3, 2, 64)).pack([x])
    other = ChunkCoder(parsed, 64, calibration(recipe, 3, 2, 64, seed=1))
    with pytest.raises(CacheError, match="another recipe, calibration, head dim or shape"):
        other.unpack(data, [torch.empty_like(x)])
    for short in (data[:-1], data[: len(data) // 2], data[:3]):
        with pytest.raises(CacheError, match="bytes, got"):
            ChunkCoder(parsed, 64, calibration(recipe, 3, 2, 64)).unpack(short, [torch.empty_like(x)])
    half = data.clone()
    half[len(data) // 2 :] = 0  # a file of full size that was written in part
    with pytest.raises(CacheError, match="is damaged"):
        ChunkCoder(parsed, 64, calibration(recipe, 3, 2, 64)).unpack(half, [torch.empty_like(x)])


def test_calibrations_that_do_not_fit():
    recipe = "trellis:bits=3,centre=false"
    packer = ChunkCoder(Recipe.parse(recipe), 64, calibration(recipe, 3, 2, 64))
    for wrong, words in (
        (chunk(2), "tensors of layer 2"),
        (chunk(4), "lacks tensors"),
        (chunk(3, 1), "tensor parallel"),
    ):
        with pytest.raises(UserError, match=words):
            packer.pack([wrong])
    with pytest.raises(UserError, match="all layers have the same number of KV heads"):
        packer.pack([chunk(1, 1), chunk(2, 2)])
    with pytest.raises(UserError, match="which has other options than"):
        ChunkCoder(Recipe.parse("oscar"), 64, packer.calibration).pack([chunk()])
