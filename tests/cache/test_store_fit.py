"""The part of the prompt on which a codec is fitted, and memory freed after packing a prompt."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

import tersekv
from conftest import prompt
from tersekv.cache import coding
from tersekv.cache.coding import FIT_TOKENS
from tersekv.cache.layer import LayerStore
from tersekv.cache.segments import UNSEEN, Observed
from tersekv.codecs.qjl import Qjl
from tersekv.hf import layer
from tersekv.recipe import Recipe
from tersekv.transforms.moments import TokenLoss
from tersekv.transforms.rope import standard_rope
from test_store import fed, tokens


@pytest.mark.parametrize("T", [700, 2049, 9000])
def test_a_long_prompt_is_fitted_on_parts_of_it(monkeypatch, T):
    """From the first token after the sinks to the last, of bounded size because fitting is in
    float64."""
    seen: list[Tensor] = []
    fit = Qjl.fit
    monkeypatch.setattr(Qjl, "fit", lambda codec, x: seen.append(x) or fit(codec, x))
    keys, values = tokens(T, H=1)
    fed("window:sinks=4+qjl:outliers=1", keys, values, [0, T])
    (x,) = seen
    assert x.shape[2] == 4 + min(T - 4, FIT_TOKENS)
    rounded = keys.half().float()
    assert torch.equal(x[:, :, :5], rounded[:, :, :5])
    assert torch.equal(x[:, :, -1], rounded[:, :, -1])


@pytest.mark.parametrize("T", [300, 5000])
def test_the_constant_part_of_keys_is_found_before_rope(T):
    rope = standard_rope(64)
    mean = 5 * torch.randn(1, 2, 1, 64)
    keys = rope.apply(mean.expand(1, 2, T, 64), *(x.unsqueeze(0) for x in rope.cos_sin(0, T, 0, torch.device("cpu"))))
    keys = keys + 0.1 * torch.randn_like(keys)
    s = LayerStore(Recipe.parse("trellis:bits=2,calibration=prompt").plan(0, 1), keys, keys, None, rope)
    s.append(keys, keys)
    assert (s.keys.codec.fitted["mean"].float() - mean[:, :, 0]).abs().max() < 0.1


def test_freed_memory_is_returned_only_after_prompts(monkeypatch, llama):
    """Not after a decoding step, where a large batch would pay for it, nor after a few tokens."""
    calls: list[None] = []
    monkeypatch.setattr(layer, "malloc_trim", lambda: calls.append(None))
    monkeypatch.setattr(layer, "MUCH_MEMORY", 1)
    with tersekv.compress(llama, "kivi:bits=4"), torch.inference_mode():
        cache = tersekv.CompressedCache(llama.config, "kivi:bits=4")
        for tokens, layers in ((200, len(cache.layers)), (1, 0), (20, 0)):
            llama(prompt(tokens), past_key_values=cache)
            assert len(calls) == layers
            calls.clear()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_prompt_of_one_repeated_token(bits):
    """Fitted on constant data, a codec still encodes later tokens, as coarsely as with a rotation."""
    rope, g = standard_rope(64), torch.Generator().manual_seed(0)
    store = LayerStore(
        Recipe.parse(f"trellis:bits={bits},calibration=prompt").plan(0, 1), *[torch.empty(1, 2, 0, 64)] * 2, rope=rope
    )
    same, other = torch.randn(1, 2, 1, 64, generator=g), torch.randn(1, 2, 400, 64, generator=g)
    angles = (x for x in rope.angles(0, 400).cos_sin())
    keys = torch.cat([rope.apply(same.expand(-1, -1, 400, -1), *angles), other], 2)
    values = torch.cat([same.expand(-1, -1, 400, -1), other], 2)
    for at in range(0, 800, 100):
        store.append(keys[:, :, at : at + 100], values[:, :, at : at + 100])
    held = [x[:, :, 400:600] for x in store.decoded(torch.float32)]
    bound = {2: 0.3, 3: 0.1, 4: 0.03}[bits]
    for x in held:
        assert float((x - other[:, :, :200]).square().mean() / other.square().mean()) < bound


@pytest.mark.parametrize("recipe", ["trellis:bits=3.5,calibration=prompt", "uniform:bits=4,axis=channel,group=0"])
@pytest.mark.parametrize("kept", [4, 30])
def test_a_cache_without_packed_tokens_is_fitted_anew(recipe, kept):
    """As after a conversation of which only the template's beginning is kept."""
    g = torch.Generator().manual_seed(0)
    plan = Recipe.parse(f"window:recent=32,sinks=4+{recipe}").plan(0, 1)
    first, second = (torch.randn(1, 2, 400, 64, generator=g) * torch.rand(64, generator=g) ** 4 for _ in range(2))
    used, fresh = (LayerStore(plan, *[torch.empty(1, 2, 0, 64)] * 2, rope=standard_rope(64)) for _ in range(2))
    used.append(first, first)
    used.crop(400 - kept)
    fresh.append(first[:, :, :kept], first[:, :, :kept])
    errors = []
    for store in (used, fresh):
        store.append(second, second)
        errors.append([(x[:, :, kept:] - second).square().mean() for x in store.decoded(torch.float32)])
    for a, b in zip(*errors, strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0 if kept == 4 else 0.05)  # beyond sinks, tokens return decoded


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("recipe", ["trellis:bits=3.5,calibration=prompt", "turboquant:bits=3,centre=true"])
def test_a_padded_row_is_fitted_on_its_own_tokens(recipe, observed):
    """In a batch with a longer prompt its keys are coded about as well as alone."""
    g, rope, n, longer = torch.Generator().manual_seed(0), standard_rope(64), 300, 1500
    plan = Recipe.parse(f"window:recent=32,sinks=4+{recipe}").plan(0, 1)
    plain = torch.randn(1, 2, longer, 64, generator=g) * torch.rand(64, generator=g) ** 2 + 2
    other, own = (rope.apply(plain[:, :, :T], *rope.angles(0, T).cos_sin()) for T in (longer, n))
    filler = torch.randn(1, 2, longer - n, 64, generator=g)
    padded = torch.cat([other, torch.cat([filler, own], 2)])
    errors = []
    for keys, padding in ((own, None), (padded, torch.tensor([0, longer - n]))):
        weights = torch.rand(keys.shape[:3], generator=g)
        weights[1:, :, : longer - n] = 0
        seen = Observed(losses=(TokenLoss(weights, torch.ones(len(keys), 2, 64)), TokenLoss(weights)))
        store = LayerStore(plan, *[keys[:, :, :0]] * 2, rope=rope)
        store.append(keys, keys, padding, seen if observed else UNSEEN)
        held = store.decoded(torch.float32)[0][-1:, :, -n:]
        errors.append((held - own)[:, :, 4:-64].square().mean())
    assert errors[1] < 1.2 * errors[0]


def test_a_policy_that_evicts_fits_a_padded_row_on_its_own_tokens(monkeypatch):
    seen, fitted = [], coding.fitted
    monkeypatch.setattr(
        coding, "fitted", lambda codec, parts, **of: (seen.append(parts), fitted(codec, parts, **of))[1]
    )
    x = torch.randn(2, 2, 200, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    store = LayerStore(Recipe.parse("h2o:budget=0.5+uniform:axis=channel,group=0").plan(0, 1), *[x[:, :, :0]] * 2)
    store.append(x, x, torch.tensor([0, 120]), Observed(votes=torch.rand(2, 2, 200)))
    assert len(seen) == 2
    for ((given, _),) in seen:
        times = Counter(tuple(token) for token in given[1, 0].tolist())
        assert times.keys() <= {tuple(token) for token in x[1, 0, 120:].tolist()}
        assert max(times.values()) - min(times.values()) <= 1
