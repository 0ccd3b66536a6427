"""Keys whose mean before RoPE is removed, by codecs of their own and by `centre=true` of every method."""

from __future__ import annotations

from copy import deepcopy as copied
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import pytest
import torch
import transformers as tf

import tersekv
from conftest import prompt
from tersekv.attention.read import AttentionCall, attend_store
from tersekv.cache.layer import LayerStore
from tersekv.codecs import methods
from tersekv.codecs.base import FitsOn, Method, Pair
from tersekv.codecs.exact import Exact
from tersekv.errors import UserError
from tersekv.hf.simulate import SimulatedCache
from tersekv.kernels import cpu
from tersekv.kernels.attend_packed import native_view
from tersekv.recipe import Recipe
from tersekv.transforms.rope import standard_rope
from test_attention import check, dense

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


CENTRED = [
    *("turboquant:bits=4", "turboquant:bits=2.5", "turboquant:bits=3,variant=prod", "polarquant", "qjl", "int4"),
    *("polarquant:codebook=online", "qjl:outliers_per=group", "normalfloat", "kvarn", "kivi:bits=4", "uniform:bits=3"),
    *("oscar:calibration=prompt", "kvquant:calibration=prompt,pre_rope=false", "kvquant:calibration=prompt"),
    *("turboquant:bits=4,pre_rope=true", "oscar:calibration=prompt,pre_rope=true", "uniform:axis=channel,group=0"),
]


def centred(recipe: str) -> str:
    return f"{recipe}{',' if ':' in recipe else ':'}centre=true"


def biased_keys(mean: float, T: int = 256) -> Tensor:
    """Keys after RoPE, whose first channels have this mean before it and a spread of 1."""
    rope, x = standard_rope(64), torch.randn(1, 2, T, 64, generator=torch.Generator().manual_seed(0))
    x[..., :3] += mean * torch.tensor([1.0, -0.7, 0.4])
    return rope.apply(x, *rope.angles(0, T).cos_sin())


def stored(recipe: str, keys: Tensor) -> LayerStore:
    plan = Recipe.parse(f"window:sinks=0,recent=0,exact=fp32+{recipe}").plan(0, 1)
    made = LayerStore(plan, keys, keys, rope=standard_rope(64) if plan.keys.needs_rope else None)
    made.append(keys, keys)
    return made


@pytest.mark.parametrize("recipe", CENTRED)
def test_the_error_does_not_depend_on_the_mean(recipe):
    """A method with `centre=true` codes keys with a large mean as well as keys without one."""
    errors = []
    for mean in (0.0, 300.0):
        keys = biased_keys(mean)
        errors.append(float((stored(centred(recipe), keys).decoded(torch.float32)[0] - keys).square().mean()))
    assert errors[1] < 1.1 * errors[0] + 1e-3


@pytest.mark.parametrize("recipe", [r for r in CENTRED if "pre_rope=true" not in r and r != CENTRED[-4]])
@pytest.mark.parametrize("q", [1, 5])
def test_kernels_read_centred_keys(recipe, q):
    """Attention of the C++ kernels, and of the reference, equals dense attention over decoded tokens."""
    keys, values = biased_keys(4.0, 300), torch.randn(1, 2, 300, 64, generator=torch.Generator().manual_seed(1))
    plan = Recipe.parse(centred(recipe)).plan(0, 1)
    s = LayerStore(plan, keys, values, rope=standard_rope(64))
    s.append(keys, values)
    call = AttentionCall(torch.randn(1, 4, q, 64, generator=torch.Generator().manual_seed(q)), None, 0.125)
    past = s.decoded(torch.float32)
    expected = dense(call.query, *past, None, call)
    check(attend_store(s, call), expected, recipe.startswith("qjl"))
    if cpu.why_not_built() is None:
        for page in s.packed_pages():
            native_view(cpu.loaded(), page.keys.inner.operand)  # raises if the kernels do not read it


@pytest.mark.parametrize("recipe", ["turboquant:bits=4", "polarquant", "kivi:bits=2", "qjl"])
def test_centred_methods_live_a_whole_life(llama, tmp_path, recipe):
    """Short prompt, padded batch, second turn, rollback, beams, save and load, estimate."""
    recipe = f"window:recent=16,sinks=2+{centred(recipe)}"
    ids = prompt(150, 2)
    mask = torch.ones_like(ids)
    ids[1, :40] = mask[1, :40] = 0
    with tersekv.compress(llama, recipe), torch.no_grad():
        short = llama.generate(ids[:, :3], max_new_tokens=60, do_sample=False)
        assert short.shape == (2, 63)
        cache = tersekv.CompressedCache(llama, recipe)
        llama.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=30, do_sample=False)
        alone = tersekv.CompressedCache(llama, recipe)
        one = llama.generate(ids[1:, 40:], past_key_values=alone, max_new_tokens=30, do_sample=False)
        alone.save(tmp_path / "one.cache", ids=one[:, :-1])
        again = tersekv.CompressedCache.load(tmp_path / "one.cache", llama)
        copy = copied(alone)
        for turn in (torch.full((1, 40), 7), torch.full((1, 5), 9)):
            logits = [llama(turn, past_key_values=each).logits for each in (alone, again, copy)]
            assert torch.equal(logits[0], logits[1])
            assert torch.equal(logits[0], logits[2])
        alone.crop(-3)
        cache.reorder_cache(torch.tensor([1, 1]))
        same = llama(ids[:1, :4].expand(2, -1), past_key_values=cache).logits
        torch.testing.assert_close(same[0], same[1])
    held = alone.footprint()
    means = sum(layer.store.keys.codec.fitted["mean"].nbytes for layer in alone.layers)
    assert 0 < means <= held.parts["tables"]


def test_a_mean_from_a_calibration(llama, tmp_path):
    """`calibration=corpus` fits the mean once; prompts then share it, and short ones have it."""
    recipe = "window:recent=8,sinks=1+polarquant:centre=true,calibration=corpus"
    with pytest.raises(UserError, match="needs a calibration"):
        tersekv.CompressedCache(llama.config, recipe)
    caches = [tersekv.CompressedCache(llama, recipe) for _ in range(2)]  # calibrated at first use
    with tersekv.compress(llama, recipe), torch.no_grad():
        for i, cache in enumerate(caches):
            llama(prompt(60, seed=i), past_key_values=cache)
    means = [[layer.store.keys.codec.fitted["mean"] for layer in cache.layers] for cache in caches]
    for one, other in zip(*means, strict=True):
        assert torch.equal(one, other)
        assert one.shape == (1, 2, 32)
        assert bool(one.any())


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("exact:centre=true", "not quantised; leave it out"),
        ("kivi:calibration=prompt", "needs centre=true"),
        ("kivi:centre=true,calibration=file", "choose one of prompt, corpus"),
        ("kvquant:pre_rope=false,centre=true", "calibration=prompt or pre_rope=true"),
        ("kivi:centre=2", "centre takes true or false"),
    ],
)
def test_wrong_uses_of_centre(recipe, said):
    with pytest.raises(UserError, match=said):
        Recipe.parse(recipe)


def test_unsupported_rope_error_says_what_to_do():
    config = tf.GPTJConfig(n_embd=64, n_head=2, n_layer=1, vocab_size=97, rotary_dim=16)
    with pytest.raises(UserError, match="centre=false"):
        tersekv.CompressedCache(config, "trellis:calibration=prompt")
    tersekv.CompressedCache(config, "trellis:calibration=prompt,centre=false")
