"""Self-contained chunks: round trip, exact size, and errors for anything but the packed chunk."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
        ("kvquant:bits=3", "is fitted on the corpus"),
        ("qjl", "is fitted on the prompt"),
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
