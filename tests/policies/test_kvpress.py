"""Our policies keep the same tokens as NVIDIA's kvpress on one model and prompt
(make_kvpress_fixture.py)."""

from __future__ import annotations

import json

import pytest
import torch

import tersekv
from make_kvpress_fixture import FILE, PROMPT, RECIPES, tiny_llama
from test_claims_selection import kept

KEPT = json.loads(FILE.read_text())


@pytest.mark.parametrize("method", RECIPES)
@pytest.mark.parametrize("codec", ["exact", "kivi:bits=2"])
def test_same_tokens_as_kvpress(method, codec):
    model, recipe = tiny_llama(), f"{RECIPES[method]}+{codec}"
    with tersekv.compress(model, recipe), torch.no_grad():
        cache = model(PROMPT).past_key_values
    ours = [[kept(layer.store, 0, head) for head in range(2)] for layer in cache.layers]
    assert ours == KEPT[method]


def test_the_fixture_differs_by_method_and_head():
    assert len({json.dumps(layers) for layers in KEPT.values()}) == len(KEPT) == len(RECIPES)
    assert KEPT["snapkv"][0][0] != KEPT["snapkv"][0][1]
    assert [len(layer[0]) for layer in KEPT["snapkv"]] == [76] * 4
    assert [len(layer[0]) for layer in KEPT["pyramidkv"]] == [134, 96, 58, 19]
