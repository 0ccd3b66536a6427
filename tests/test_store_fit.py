"""What a codec that learns from the prompt is shown of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tersekv.recipe import Recipe
from tersekv.store.layer import LayerStore
from tersekv.store.side import FIT_TOKENS, SideStore
from tersekv.transforms.rope import standard_rope
from test_store import fed, tokens


@pytest.mark.parametrize("T", [700, 2049, 9000])
def test_a_long_prompt_is_fitted_on_stretches_of_it(monkeypatch, T):
    """From its first token that is no sink to its last, and bounded, since fitting works in float64."""
    seen: list[Tensor] = []
    monkeypatch.setattr(SideStore, "fitted", lambda side, codec, x: seen.append(x) or codec.fit(x))
    keys, values = tokens(T, H=1)
    fed("window:sinks=4+qjl:outliers=1", keys, values, [0, T])
    (x,) = seen
    assert x.shape[2] == 4 + min(T - 4, FIT_TOKENS)
    rounded = keys.half().float()
    assert torch.equal(x[:, :, :5], rounded[:, :, :5])
    assert torch.equal(x[:, :, -1], rounded[:, :, -1])


@pytest.mark.parametrize("T", [300, 5000])
def test_what_keys_have_in_common_is_found_before_rope(T):
    rope = standard_rope(64)
    mean = 5 * torch.randn(1, 2, 1, 64)
    keys = rope.put(mean.expand(1, 2, T, 64), *(x.unsqueeze(0) for x in rope.cos_sin(0, T, 0, torch.device("cpu"))))
    keys = keys + 0.1 * torch.randn_like(keys)
    s = LayerStore(Recipe.parse("trellis:bits=2,calibration=prompt").plan(0, 1), keys, keys, None, rope)
    s.append(keys, keys)
    assert (s.keys.codec.fitted["mean"].float() - mean[:, :, 0]).abs().max() < 0.1
