"""Eviction policies with codecs that take keys before RoPE and store outliers; each head keeps its
own tokens."""

from __future__ import annotations

import pytest
import torch

import tersekv
from conftest import prompt
from tersekv.cache.blocks import BlockBuffer
from tersekv.codecs.kvquant import KVQuant
from tersekv.layouts.base import Layout

POLICIES = [
    "streaming:budget=120,recent=32", "h2o:budget=96,recent=16", "snapkv:budget=80,recent=16",
    "pyramidkv:budget=96,recent=16", "subgen:budget=96,recent=16", "subgen:variant=stream,budget=160,recent=16",
]  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES)
def test_keys_before_rope_add_no_error(llama, policy):
    """Kept tokens get the RoPE of their own positions: the same tokens as with keys after RoPE."""
    ids = prompt(300, 2)
    mask = torch.ones_like(ids)
    ids[1, :40] = mask[1, :40] = 0
    outs = []
    for pre_rope in ("false", "true"):
        recipe = f"{policy},exact=fp32+exact:dtype=fp32,pre_rope={pre_rope}"
        with tersekv.compress(llama, recipe):
            outs.append(llama.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False))
    assert torch.equal(*outs)


@pytest.mark.parametrize("policy", POLICIES)
def test_kvquant_follows_every_policy(llama, policy):
    recipe = f"{policy}+kvquant:bits=4,outliers=0.05,calibration=prompt"
    cache = tersekv.CompressedCache(llama.config, recipe)
    with tersekv.compress(llama, recipe), torch.no_grad():
        llama(prompt(400, 2), past_key_values=cache)
        for token in range(40):
            out = llama(prompt(1, 2, seed=token), past_key_values=cache)
        assert out.logits.isfinite().all()
        cache.reorder_cache(torch.tensor([1, 1]))
        out = llama(prompt(40, 1, seed=99).expand(2, -1), past_key_values=cache)
        torch.testing.assert_close(out.logits[0], out.logits[1])
    footprint = cache.footprint()
    assert footprint.parts["codes"] > 0
    held = footprint.total_bytes - footprint.parts["tables"]  # cos and sin are large in a tiny model
    assert held * 8 / footprint.elements < 0.6 * 16


def test_blocks_are_chosen_by_each_head():
    x = torch.randn(2, 3, 32 * 6, 64, generator=torch.Generator().manual_seed(0))
    codec = KVQuant(3, "int", 0.05, calibration="prompt", axis="token", per_head=True, side="values")
    layout: Layout = codec.layout(64)
    assert not any(spec.shared for spec in layout.planes.values())
    buffer = BlockBuffer(layout, 2, 3, x.device)
    buffer.append(codec.encode(x))
    whole = codec.decode(buffer.planes(), 64).unflatten(2, (6, 32))
    index = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(s))[:4] for s in range(6)]).view(
        2, 3, 4
    )
    before = buffer.mark()
    buffer.keep(index)
    expected = whole.gather(2, index[..., None, None].expand(-1, -1, -1, 32, 64)).flatten(2, 3)
    assert torch.equal(codec.decode(buffer.planes(), 64), expected)
    buffer.append(codec.encode(x[:, :, :64]))
    assert torch.equal(codec.decode(buffer.planes(4), 64), whole[:, :, :2].flatten(2, 3))
    buffer.undo(before)
    assert torch.equal(codec.decode(buffer.planes(), 64), whole.flatten(2, 3))
