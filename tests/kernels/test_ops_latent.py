"""Attention over latents: tiles that serve as keys and as values, for every instruction set."""

from __future__ import annotations

import pytest
import torch

from native_calls import ROUNDING_ISAS
from tersekv.attention.read import AttentionCall, attend_store
from tersekv.cache.layer import LayerStore
from tersekv.recipe import Recipe
from test_ops_parity import BF16_ULP, isa, one_thread, pytestmark  # noqa: F401

LATENTS, ROTATED = 48, 32
"""Neither their sum nor the latents fill the last panel of a product."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [3, 20, 41])
@pytest.mark.parametrize("recipe", ["kivi:bits=4,group=16", "trellis:bits=3,calibration=prompt", "exact:dtype=bf16"])
def test_any_number_of_heads(isa, recipe, rows, dtype):  # noqa: F811
    """Heads are multiplied in tiles of up to eight, and the last tokens fill no tile."""
    made = torch.Generator().manual_seed(0)
    latents = torch.randn(2, 1, 333, LATENTS, generator=made).to(dtype)
    rotated = torch.randn(2, 1, 333, ROTATED, generator=made).to(dtype)
    store = LayerStore(Recipe.parse(recipe).plan(0, 1).of_latents(0), latents[:, :, :0], rotated[:, :, :0], None, None)
    store.append(latents, rotated)
    query = torch.randn(2, rows, 1, LATENTS + ROTATED, generator=made).to(dtype)
    mask = torch.ones(2, 1, 333, dtype=torch.bool)
    mask[0, :, :100] = False
    got = attend_store(store, AttentionCall(query, mask, 0.3)).float()
    held, turned = (x.float() for x in store.decoded(torch.float32))
    scores = (query.float() @ torch.cat([held, turned], dim=-1).mT * 0.3).masked_fill(~mask[:, None], -torch.inf)
    expected = (scores.softmax(-1) @ held).transpose(1, 2)
    rounded = BF16_ULP if dtype == torch.bfloat16 or isa in ROUNDING_ISAS else 1e-6
    # rounding both factors of 80 products moves a score by 0.3·√80·2^-9 or so, and weights by that much
    torch.testing.assert_close(got, expected, atol=8 * rounded, rtol=8 * rounded)
