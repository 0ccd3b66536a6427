"""Keys whose constant part before RoPE is stored separately: no operation on the cache adds an
error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import pytest
import torch
import transformers as tf

import tersekv
from conftest import prompt
from tersekv.codecs import methods
from tersekv.codecs.base import FitsOn, Method, Pair
from tersekv.codecs.exact import Exact
from tersekv.errors import UserError
from tersekv.hf.simulate import SimulatedCache

if TYPE_CHECKING:
    from torch import Tensor

POLICIES = [
    "streaming:budget=120,recent=32", "h2o:budget=96,recent=16", "snapkv:budget=80,recent=16",
    "subgen:budget=96,recent=16",
]  # fmt: skip
LOSSLESS = "window:sinks=4,recent=16,exact=fp32+centred"


@dataclass(frozen=True)
class CentredFloats(Exact):
    """Exact mean-removed keys."""

    dtype: Literal["bf16", "fp16", "fp32"] = "fp32"

    @property
    def fits_on(self) -> FitsOn | None:
        return "prompt"

    @property
    def centred(self) -> bool:
        return True

    def fit(self, x: Tensor) -> CentredFloats:
        assert "mean" in self.fitted
        return self


@pytest.fixture(autouse=True)
def centred_floats(monkeypatch):
    monkeypatch.setitem(
        methods(), "centred", Method("", "", lambda: Pair(CentredFloats(), Exact("fp32", side="values")))
    )


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3", "phi3", "mistral"])
@pytest.mark.parametrize("batch", [1, 3])
def test_tokens_equal_the_full_cache(models, name, batch):
    """Greedy tokens over several packed pages; batches of several rows are padded on the left."""
    model, ids = models[name], prompt(150, batch)
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        mask[row, : 17 * row] = 0
        ids[row, : 17 * row] = 0
    options = {"attention_mask": mask, "max_new_tokens": 80, "do_sample": False}
    expected = model.generate(ids, **options)
    with tersekv.compress(model, LOSSLESS):
        out = model.generate(ids, **options)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(("batch", "policy"), [(1, "window:sinks=4,recent=16"), (3, "h2o:budget=96,recent=16")])
def test_keys_without_rope(batch, policy):
    """The constant part of such keys needs no RoPE. Other options for keys before RoPE are refused."""
    torch.manual_seed(0)
    config = tf.GPT2Config(n_embd=64, n_head=2, n_layer=2, vocab_size=97, bos_token_id=1, eos_token_id=2)
    model, ids = tf.GPT2LMHeadModel(config).eval(), prompt(150, batch)
    mask = torch.ones_like(ids)
    mask[-1, : 10 * batch - 10] = 0
    options = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    outs = []
    for codec in ("exact:dtype=fp32", "centred"):
        with tersekv.compress(model, f"{policy},exact=fp32+{codec}"):
            outs.append(model.generate(ids, **options))
    assert torch.equal(*outs)
    with tersekv.compress(model, "default"):
        model.generate(ids, **options)
    with pytest.raises(UserError, match="gpt2 models cannot be coded before RoPE"):
        tersekv.CompressedCache(config, "trellis:calibration=prompt,pre_rope=true")


@pytest.mark.parametrize("policy", POLICIES)
def test_eviction_adds_no_error(llama, policy):
    ids = prompt(300, 2)
    mask = torch.ones_like(ids)
    ids[1, :40] = mask[1, :40] = 0
    outs = []
    for codec in ("exact:dtype=fp32", "centred"):
        with tersekv.compress(llama, f"{policy},exact=fp32+{codec}"):
            outs.append(llama.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False))
    assert torch.equal(*outs)


def test_rollback_second_turn_and_beams(llama):
    ids = prompt(200, 2)
    cache = tersekv.CompressedCache(llama.config, LOSSLESS)
    with tersekv.compress(llama, LOSSLESS), torch.no_grad():
        llama(ids[:, :180], past_key_values=cache)
        cache.crop(-70)
        again = llama(ids[:, 110:], past_key_values=cache).logits
        cache.reorder_cache(torch.tensor([1, 1]))
        swapped = llama(ids[1:, :5].expand(2, -1), past_key_values=cache).logits
    with torch.no_grad():
        expected = llama(ids).logits[:, 110:]
    torch.testing.assert_close(again, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(swapped[0], swapped[1])


def test_simulation_adds_the_mean(llama):
    ids = prompt(150)
    with torch.no_grad():
        seen = llama(ids, past_key_values=SimulatedCache(llama.config, "centred", sinks=4)).logits
        torch.testing.assert_close(seen, llama(ids).logits, atol=5e-4, rtol=1e-4)


@pytest.mark.parametrize("prompt_tokens", [1, 5, 40, 200])
@pytest.mark.parametrize("options", ["", ",basis=channels", ",basis=rotation,code=scalar", ",pre_rope=true"])
def test_trellis_supports_prompts_of_any_length(llama, prompt_tokens, options):
    recipe = f"window:sinks=2,recent=8+trellis:bits=6,calibration=prompt{options}"
    ids = prompt(prompt_tokens)
    with tersekv.compress(llama, recipe):
        out = llama.generate(ids, max_new_tokens=90, do_sample=False)
    assert out.shape == (1, prompt_tokens + 90)


def test_unsupported_rope_error_says_what_to_do():
    config = tf.GPTJConfig(n_embd=64, n_head=2, n_layer=1, vocab_size=97, rotary_dim=16)
    with pytest.raises(UserError, match="centre=false"):
        tersekv.CompressedCache(config, "trellis:calibration=prompt")
    tersekv.CompressedCache(config, "trellis:calibration=prompt,centre=false")
