"""transformers' operations on a cache, with tiny models of nine architectures.

With `LOSSLESS` (every token in float32, but in the packed store) each run must give the tokens of
transformers' own cache.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch
import transformers as tf
from transformers import AttentionInterface, DynamicCache, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import tersekv
from conftest import LOSSLESS, MODELS, SHAPE, prompt
from tersekv.cache.layer import LayerStore
from tersekv.errors import CacheError, UserError
from tersekv.hf.cache import CompressedLayer

GREEDY = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
NAMES = list(MODELS)
KINDS = ["llama", "gemma3", "gpt_oss", "deepseek_v3"]
"""Full attention, sliding windows, attention sinks, and latent attention."""


def pair(model, ids, recipe=LOSSLESS, **kwargs):
    """Return the tokens with transformers' cache and with ours."""
    kwargs = GREEDY | kwargs
    kwargs.setdefault("attention_mask", torch.ones_like(ids))
    expected = model.generate(ids, **kwargs)
    with warnings.catch_warnings(), tersekv.compress(model, recipe):
        warnings.simplefilter("ignore")
        got = model.generate(ids, **kwargs)
    return expected, got


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tokens", [1, 5, 150])
def test_greedy_tokens_equal(models, name, tokens):
    expected, got = pair(models[name], prompt(tokens))
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_left_padded_batch_equal(models, name):
    ids = prompt(150, batch=3)
    mask = torch.ones_like(ids)
    mask[0, :37] = 0
    mask[2, :3] = 0
    expected, got = pair(models[name], ids * mask, attention_mask=mask)
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_fallback_without_our_attention(models, name):
    """Any attention implementation works with decoded tensors, and the user is warned once."""
    model, ids = models[name], prompt(250)
    expected = model.generate(ids, **GREEDY)
    cache = tersekv.CompressedCache(model.config, LOSSLESS)
    with pytest.warns(UserWarning, match="decodes all tokens at every step") as caught:
        got = model.generate(ids, past_key_values=cache, **GREEDY)
    assert got.tolist() == expected.tolist()
    assert len([w for w in caught if "decodes all tokens" in str(w.message)]) == 1


@pytest.mark.parametrize("name", KINDS)
def test_beam_search_equal(models, name):
    expected, got = pair(models[name], prompt(60, batch=2), num_beams=3, num_return_sequences=2)
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("name", KINDS)
def test_sampling_equal(models, name):
    model, ids = models[name], prompt(90)
    runs = []
    for recipe in (None, LOSSLESS):
        torch.manual_seed(7)
        kwargs = GREEDY | {"do_sample": True, "num_return_sequences": 3}
        if recipe is None:
            runs.append(model.generate(ids, **kwargs))
        else:
            with warnings.catch_warnings(), tersekv.compress(model, recipe):
                warnings.simplefilter("ignore")
                runs.append(model.generate(ids, **kwargs))
    assert runs[0].tolist() == runs[1].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_chunked_prefill_equal(models, name):
    expected, got = pair(models[name], prompt(310), prefill_chunk_size=64)
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("name", KINDS)
def test_several_turns_with_one_cache(models, name):
    """A second turn feeds only new tokens and gives the result of one long prompt."""
    model, ids = models[name], prompt(120)
    with warnings.catch_warnings(), tersekv.compress(model, LOSSLESS):
        warnings.simplefilter("ignore")
        cache = tersekv.CompressedCache(model.config, LOSSLESS)
        first = model.generate(ids, past_key_values=cache, **GREEDY)
        second_prompt = torch.cat([first, prompt(90, seed=1)], dim=1)
        got = model.generate(second_prompt, past_key_values=cache, **GREEDY)
    assert got.tolist() == model.generate(second_prompt, **GREEDY).tolist()
    assert cache.get_seq_length() == got.shape[1] - 1


@pytest.mark.parametrize(("name", "proposed"), [*((name, 10) for name in NAMES), ("llama", 5), ("gemma3", 5)])
def test_assisted_decoding_with_rejections(models, name, proposed, monkeypatch):
    """Prompt lookup proposes tokens, most of which are rolled back."""
    model, taken_back = models[name], []
    crop = CompressedLayer.crop
    monkeypatch.setattr(CompressedLayer, "crop", lambda self, n: (taken_back.append(-int(n)), crop(self, n))[1])
    expected, got = pair(model, prompt(43).repeat(1, 6), prompt_lookup_num_tokens=proposed)
    assert got.tolist() == expected.tolist()
    assert max(taken_back) > 0


def test_assistant_model(models):
    model, ids = models["llama"], prompt(200)
    torch.manual_seed(3)
    assistant = type(model)(model.config).eval()
    expected = model.generate(ids, assistant_model=assistant, **GREEDY)
    with tersekv.compress(model, LOSSLESS):
        got = model.generate(ids, assistant_model=assistant, **GREEDY)
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["llama", "gemma3"])  # without and with types of layers
def test_drafts_by_early_exit(models, name, monkeypatch):
    """The draft is made by the first layers, whose cache has no others."""
    record, recorded = CompressedLayer.activate_past_recording, []
    monkeypatch.setattr(
        CompressedLayer,
        "activate_past_recording",
        lambda self, past=True: (recorded.append((len(self.cache.layers), past)), record(self, past))[1],
    )
    expected, got = pair(models[name], prompt(200), assistant_early_exit=2)
    assert got.tolist() == expected.tolist()
    assert (2, False) not in recorded  # drafts are taken back
    assert recorded[-1] == (2, True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("use_cache", [True, False])
def test_output_attentions(models, name, use_cache):
    """Weights equal those of eager attention, over a prompt longer than sliding windows and their
    margin."""
    model, ids = models[name], prompt(500)
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    expected = model(ids, output_attentions=True).attentions
    model.set_attn_implementation(before)
    with tersekv.compress(model, LOSSLESS):
        got = model(ids, output_attentions=True, use_cache=use_cache).attentions
    assert len(got) == len(expected) == 3
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=2e-3)


def test_output_attentions_while_decoding(models):
    """One more token: a weight for every token, 0 for those that a sliding window has evicted."""
    model, ids = models["gemma3"], prompt(501)
    with tersekv.compress(model, LOSSLESS), torch.no_grad():
        cache = model(ids[:, :500]).past_key_values
        got = model(ids[:, 500:], past_key_values=cache, output_attentions=True).attentions
    for weights in got:
        assert weights.shape == (1, 4, 1, 501)
        torch.testing.assert_close(weights.sum(-1), torch.ones(1, 4, 1))
    assert got[0][..., : 501 - 48].abs().max() == 0


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_in_every_position(models, name):
    """Prefill, one more chunk, then single tokens: logits as with transformers' cache."""
    model, ids = models[name], prompt(250, batch=2)
    expected = model(ids).logits
    with warnings.catch_warnings(), tersekv.compress(model, LOSSLESS), torch.no_grad():
        warnings.simplefilter("ignore")
        cache = tersekv.CompressedCache(model.config, LOSSLESS)
        cuts = [0, 170, 210, *range(211, 251)]
        parts = [model(ids[:, a:b], past_key_values=cache, use_cache=True).logits for a, b in itertools.pairwise(cuts)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=2e-4, rtol=2e-3)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("recipe", ["kivi:bits=4", "qjl", "int4:group=32", "normalfloat:group=32"])
def test_lossy_recipes_run_and_stay_close(models, name, recipe):
    """Logits after a packed prefix stay near the full cache's: the error is the codec's, not a
    bug's."""
    model, ids = models[name], prompt(260)
    with torch.no_grad():
        expected = model(ids).logits[:, -1]
        with tersekv.compress(model, f"window:recent=16+{recipe}"):
            cache = tersekv.CompressedCache(model.config, f"window:recent=16+{recipe}")
            model(ids[:, :-1], past_key_values=cache)
            got = model(ids[:, -1:], past_key_values=cache).logits[:, -1]
    assert cache.footprint().parts["codes"] > 0
    assert str(cache) == f"CompressedCache(window:recent=16+{recipe}): {cache.footprint()}"
    assert torch.isfinite(got).all()
    assert torch.nn.functional.cosine_similarity(got, expected).item() > 0.98


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_model_types(models, dtype):
    model = MODELS["llama"]().to(dtype).eval()
    with tersekv.compress(model, "kivi:bits=4"):
        out = model.generate(prompt(220), return_dict_in_generate=True, **GREEDY)
    layer = out.past_key_values.layers[0].store
    assert layer.recent.keys.dtype == (torch.float16 if dtype == torch.float32 else dtype)
    assert out.sequences.shape == (1, 240)


@pytest.mark.parametrize("name", KINDS)
def test_two_caches_on_one_model(models, name):
    """Two sequences in turns on one model do not affect each other."""
    model, ids = models[name], [prompt(150, seed=1), prompt(180, seed=2)]
    last = [None, None]
    with warnings.catch_warnings(), tersekv.compress(model, LOSSLESS), torch.no_grad():
        warnings.simplefilter("ignore")
        caches = [tersekv.CompressedCache(model.config, LOSSLESS) for _ in range(2)]
        for start in range(0, 200, 50):
            for i, cache in enumerate(caches):
                part = ids[i][:, start : start + 50]
                if part.shape[1]:
                    last[i] = model(part, past_key_values=cache).logits[:, -1]
    for i in range(2):
        torch.testing.assert_close(last[i], model(ids[i]).logits[:, -1], atol=2e-4, rtol=2e-3)


@pytest.mark.parametrize("name", KINDS)
def test_context_restores_everything(models, name):
    llama = models[name]
    before = (llama.config._attn_implementation, dict(llama.__dict__), len(llama._forward_pre_hooks))
    with warnings.catch_warnings(), tersekv.compress(llama, "kivi:group=16"):
        warnings.simplefilter("ignore")
        with tersekv.compress(llama, "int4:group=16"):
            inner = llama.generate(prompt(5), return_dict_in_generate=True, **GREEDY).past_key_values
            assert str(inner.recipe) == "int4:group=16"
        outer = llama.generate(prompt(5), return_dict_in_generate=True, **GREEDY).past_key_values
        assert str(outer.recipe) == "kivi:group=16"
    with pytest.raises(RuntimeError, match="inside"), tersekv.compress(llama, "kivi:group=16"):
        raise RuntimeError("inside")
    after = (llama.config._attn_implementation, dict(llama.__dict__), len(llama._forward_pre_hooks))
    assert after == before
    assert "tersekv" not in AttentionInterface().valid_keys()


def test_contexts_left_in_another_order(llama):
    """As two threads would: the latest open context decides, and the last one closed restores the
    model."""
    before = (llama.config._attn_implementation, dict(llama.__dict__))
    a, b = tersekv.compress(llama, "kivi"), tersekv.compress(llama, "int4:group=32")
    a.__enter__()
    b.__enter__()
    a.__exit__(None, None, None)
    cache = llama.generate(prompt(5), return_dict_in_generate=True, **GREEDY).past_key_values
    assert str(cache.recipe) == "int4:group=32"
    b.__exit__(None, None, None)
    assert (llama.config._attn_implementation, dict(llama.__dict__)) == before
    assert isinstance(llama(prompt(5), use_cache=True).past_key_values, DynamicCache)


@pytest.mark.parametrize("name", NAMES)
def test_dynamic_cache_implementation_is_ours(models, name):
    expected, got = pair(models[name], prompt(60), cache_implementation="dynamic")
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_static_cache_prefill_logits(models, name):
    model, ids = models[name], prompt(60)
    with torch.no_grad():
        expected = model(ids).logits
        with tersekv.compress(model, LOSSLESS):
            got = model(ids, past_key_values=StaticCache(config=model.config, max_cache_len=100)).logits
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-3)


def test_a_module_that_decodes_one_handle():
    """DiffLlama splits the values and calls attention twice: tokens enter the store only once."""
    config = tf.DiffLlamaConfig(**SHAPE)
    torch.manual_seed(0)
    model = tf.DiffLlamaForCausalLM(config).eval()
    ids = prompt(90)
    with tersekv.compress(model, LOSSLESS), torch.no_grad():
        cache = tersekv.CompressedCache(config, LOSSLESS)
        model(ids, past_key_values=cache)
        assert cache.get_seq_length() == 90
        with pytest.warns(UserWarning, match="diffllama models use keys or values outside of attention"):
            model(ids[:, :1], past_key_values=cache)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # it warns once
            model(ids[:, :1], past_key_values=cache)
    for kwargs in ({}, {"prefill_chunk_size": 32}):
        expected, got = pair(model, ids, **kwargs)
        assert got.tolist() == expected.tolist()


JETMOE = {"kv_channels": 32, "num_local_experts": 2, "num_experts_per_tok": 2}


@pytest.mark.parametrize("recipe", ["default", "small", "snapkv:budget=200,recent=32+kivi:bits=4"])
def test_heads_that_the_model_repeats_are_read_packed(recipe):
    """JetMoe repeats keys and values before attention, so query head h reads head h % H."""
    torch.manual_seed(0)
    model = tf.JetMoeForCausalLM(tf.JetMoeConfig(**SHAPE | JETMOE)).eval()
    ids, attentions = prompt(300), []
    for kwargs in ({}, {"prefill_chunk_size": 64}):
        expected, got = pair(model, ids, **kwargs)
        assert got.tolist() == expected.tolist()
    for codec in (None, LOSSLESS):
        cache = DynamicCache(config=model.config) if codec is None else tersekv.CompressedCache(model, codec)
        model.set_attn_implementation("eager" if codec is None else "sdpa")
        with contextlib.nullcontext() if codec is None else tersekv.compress(model, codec), torch.no_grad():
            model(ids[:, :-9], past_key_values=cache)
            attentions.append(model(ids[:, -9:], past_key_values=cache, output_attentions=True).attentions)
    for mine, own in zip(*attentions, strict=True):
        torch.testing.assert_close(mine, own, atol=1e-5, rtol=1e-4)
    with warnings.catch_warnings(), tersekv.compress(model, recipe):
        warnings.simplefilter("error", UserWarning)  # nothing is decoded
        assert model.generate(ids, **GREEDY).shape == (1, 320)


def test_heads_that_are_repeated_in_part_are_decoded(monkeypatch):
    """As by a model's own code that repeats them twice and leaves the rest to attention."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
    model, interface = (
        tf.LlamaForCausalLM(tf.LlamaConfig(**SHAPE | heads)).eval(),
        ALL_ATTENTION_FUNCTIONS.get_interface,
    )
    of = SimpleNamespace(num_key_value_groups=2, training=False, is_causal=True)

    def repeating(*names):
        def forward(module, query, key, value, *args, **kwargs):
            return interface(*names)(of, query, key.repeat(1, 2, 1, 1), value.repeat(1, 2, 1, 1), *args, **kwargs)

        return forward

    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "get_interface", repeating)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, got = pair(model, prompt(200))
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("recipe", ["uniform:bits=8,axis=channel,group=0", "qjl", "kivi:bits=2"])
def test_padding_longer_than_a_prefill_chunk_reaches_no_codec(llama, recipe):
    """The token in the padding has no effect, although the first chunks are all padding for one
    row."""
    ids, mask = prompt(300, 2), torch.ones(2, 300, dtype=torch.long)
    mask[0, :90] = 0
    logits = []
    for pad in (0, 50):
        with tersekv.compress(llama, f"window:recent=16+{recipe}"):
            out = llama.generate(
                torch.where(mask.bool(), ids, pad), attention_mask=mask, prefill_chunk_size=64, max_new_tokens=3,
                do_sample=False, output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
        logits.append(torch.stack(out.logits))
    assert torch.equal(logits[0], logits[1])


def test_any_number_of_proposals_can_be_rolled_back(models):
    """More than a sliding window normally keeps for rollback."""
    expected, got = pair(models["mistral"], prompt(40).repeat(1, 12), prompt_lookup_num_tokens=140)
    assert got.tolist() == expected.tolist()


def test_plain_call_in_context_uses_our_cache(llama):
    with tersekv.compress(llama, "kivi"), torch.no_grad():
        out = llama(prompt(200), use_cache=True)
        assert isinstance(out.past_key_values, tersekv.CompressedCache)
        assert llama(prompt(20), use_cache=False).past_key_values is None
        own = DynamicCache(config=llama.config)
        assert llama(prompt(20), past_key_values=own).past_key_values is own


def test_cache_survives_leaving_the_context(llama):
    """A cache filled under `compress` continues outside it, decoded."""
    ids = prompt(200)
    with tersekv.compress(llama, LOSSLESS):
        cache = tersekv.CompressedCache(llama.config, LOSSLESS)
        first = llama.generate(ids, past_key_values=cache, **GREEDY)
    with pytest.warns(UserWarning, match="not installed"):
        got = llama.generate(first, past_key_values=cache, **GREEDY)
    assert got.tolist() == llama.generate(first, **GREEDY).tolist()


def test_reset_offload_prefetch(llama, monkeypatch):
    ids = prompt(200)
    with tersekv.compress(llama, "kivi"), torch.no_grad():
        cache = tersekv.CompressedCache(llama.config, "kivi")
        first = llama(ids, past_key_values=cache).logits
        copied, moves = copy.deepcopy(cache), []
        expected = llama(prompt(3, seed=9), past_key_values=copied).logits
        to = LayerStore.to
        monkeypatch.setattr(LayerStore, "to", lambda self, device: (moves.append(str(device)), to(self, device)))
        for layer in cache.layers:
            layer.offload()
            layer.prefetch()
        assert moves == ["cpu", "cpu"] * 3
        assert torch.equal(llama(prompt(3, seed=9), past_key_values=cache).logits, expected)
        cache.reset()
        assert cache.get_seq_length() == 0
        assert cache.footprint().total_bytes == 0
        torch.testing.assert_close(llama(ids, past_key_values=cache).logits, first)


def test_prefill_keeps_one_layer_exact_at_a_time(llama):
    """After a layer has attended, its exact keys are freed, but for those of short prompts, which wait."""
    alive: list[weakref.ref] = []
    most = []

    def watch(module, args, kwargs, output):
        most.append(sum(ref() is not None for ref in alive))

    update = CompressedLayer.update

    def remember(self, keys, values, *args, **kwargs):
        alive.extend([weakref.ref(keys), weakref.ref(values)])
        return update(self, keys, values, *args, **kwargs)

    hooks = [layer.register_forward_hook(watch, with_kwargs=True) for layer in llama.model.layers]
    try:
        with pytest.MonkeyPatch.context() as patch, tersekv.compress(llama, "kivi"), torch.no_grad():
            patch.setattr(CompressedLayer, "update", remember)
            patch.setattr("tersekv.hf.waiting.MOST_WAITING", 400 * 2 * 32)  # elements of one layer
            llama(prompt(400), use_cache=True)
    finally:
        for hook in hooks:
            hook.remove()
    assert len(alive) == 6
    assert most == [0, 0, 0]


def test_inference_mode_and_back(llama):
    """A cache filled in one mode continues in another, and tables made in one work in the other."""
    ids, more = prompt(300), prompt(40, seed=3)
    recipes = ["kivi:bits=4", "qjl:seed=77", "normalfloat:group=16,bits=5", "turboquant:seed=77"]
    for recipe in recipes:
        with tersekv.compress(llama, recipe):
            results = []
            for first, second in ((torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)):
                cache = tersekv.CompressedCache(llama.config, recipe)
                with first():
                    llama(ids, past_key_values=cache)
                with second():
                    results.append(llama(more, past_key_values=cache).logits.clone())
                with first():
                    llama(more, past_key_values=cache)
            assert torch.equal(results[0], results[1])
            embeds = llama.get_input_embeddings()(ids).clone().requires_grad_(True)
            llama(inputs_embeds=embeds, past_key_values=cache).logits.sum().backward()
            assert torch.isfinite(embeds.grad).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_default_dtype_does_not_matter(llama, dtype):
    ids = prompt(300)
    with tersekv.compress(llama, "kivi:bits=4"):
        expected = llama.generate(ids, **GREEDY)
        torch.set_default_dtype(dtype)
        try:
            got = llama.generate(ids, **GREEDY)
        finally:
            torch.set_default_dtype(torch.float32)
    assert got.tolist() == expected.tolist()


def test_batch_operations(llama):
    """Repeat and select rows: each row continues as if it had been alone."""
    ids, more = prompt(200, batch=2), prompt(4, batch=2, seed=5)
    with tersekv.compress(llama, "qjl"), torch.no_grad():
        cache = tersekv.CompressedCache(llama.config, "qjl")
        llama(ids, past_key_values=cache)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0]))
        assert cache.batch_size == 2
        got = llama(more, past_key_values=cache).logits
        alone = tersekv.CompressedCache(llama.config, "qjl")
        llama(ids[[1, 0]], past_key_values=alone)
        torch.testing.assert_close(got, llama(more, past_key_values=alone).logits, atol=1e-4, rtol=1e-3)
        cache.batch_select_indices(torch.tensor([True, False]))
        assert cache.batch_size == 1


def test_copied_cache_continues_independently(llama):
    """The usual way to reuse a prompt: prefill once, deepcopy, continue."""
    ids, a, b = prompt(200), prompt(5, seed=1), prompt(5, seed=2)
    cache = tersekv.CompressedCache(llama.config, LOSSLESS)
    with tersekv.compress(llama, LOSSLESS), torch.no_grad():
        llama(ids, past_key_values=cache)
        for more in (a, b):
            own = copy.deepcopy(cache)
            got = llama(more, past_key_values=own).logits
            torch.testing.assert_close(got, llama(torch.cat([ids, more], 1)).logits[:, -5:], atol=2e-4, rtol=2e-3)
            assert (own.get_seq_length(), cache.get_seq_length()) == (205, 200)
            assert own.hands_out_handles
    assert not copy.deepcopy(cache).hands_out_handles


def test_sliding_layers_evict(models):
    """Packed tokens that no query can see are freed."""
    model = models["gemma3"]
    with tersekv.compress(model, "kivi:bits=4"), torch.no_grad():
        cache = tersekv.CompressedCache(model.config, "kivi:bits=4")
        for start in range(0, 1200, 300):
            model(prompt(1200)[:, start : start + 300], past_key_values=cache)
    sliding, full = cache.layers[0].store, cache.layers[1].store
    assert sliding.num_evicted > 900
    assert full.num_evicted == 0
    assert sliding.footprint().total_bytes < full.footprint().total_bytes / 2


@pytest.mark.parametrize("again", ["reset", "generate"])
def test_sliding_layers_evict_after_assisted_decoding(models, again):
    """Only while draft tokens may be removed do they keep all tokens."""
    model, recipe, options = models["gemma3"], "kivi:bits=4", {"max_new_tokens": 4, "do_sample": False}
    cache = tersekv.CompressedCache(model.config, recipe)
    with tersekv.compress(model, recipe), torch.no_grad():
        model.generate(prompt(300), past_key_values=cache, prompt_lookup_num_tokens=5, **options)
        assert cache.layers[0].store.placement.record_past
        if again == "reset":
            cache.reset()
            model(prompt(600), past_key_values=cache)
        else:
            ids = torch.cat([prompt(300), prompt(400, seed=1)], dim=1)
            cache.keep_common(ids)
            model.generate(ids, past_key_values=cache, **options)
    assert cache.layers[0].store.num_evicted > 300


def test_gradients_do_not_reach_the_store(llama):
    with tersekv.compress(llama, "kivi"):
        cache = tersekv.CompressedCache(llama.config, "kivi")
        embeds = llama.get_input_embeddings()(prompt(200)).requires_grad_(True)
        llama(inputs_embeds=embeds, past_key_values=cache).logits.sum().backward()
    store = cache.layers[0].store
    assert not store.sinks.keys.requires_grad
    assert not store.recent.keys.requires_grad


def test_errors_name_layer_and_remedy(llama):
    with tersekv.compress(llama, "kivi"), torch.no_grad():
        bad = llama.model.layers[1].self_attn.k_proj
        kept = bad.weight.clone()
        bad.weight[0, 0] = float("nan")
        try:
            with pytest.raises(CacheError, match=r"layer 1: keys or values hold NaN or Inf"):
                llama(prompt(30), past_key_values=tersekv.CompressedCache(llama.config, "kivi"))
        finally:
            bad.weight.copy_(kept)
        cache = tersekv.CompressedCache(llama.config, "kivi")
        llama(prompt(30), past_key_values=cache)
        with pytest.raises(CacheError, match="use a new cache for another batch"):
            llama(prompt(1, batch=2), past_key_values=cache)
        more = copy.deepcopy(cache)
        more.batch_repeat_interleave(2)  # as the message says
        llama(prompt(1, batch=2), past_key_values=more)
        llama(prompt(1, seed=1), past_key_values=cache)
        assert cache.keep_common(torch.cat([prompt(30), prompt(1, seed=1)], dim=1)) == 30
        with pytest.raises(UserError, match="minus the number"):
            cache.crop(3)
        with pytest.raises(CacheError, match="only 30 were seen"):
            cache.crop(-31)


def test_unsupported_models():
    import transformers as tf

    with pytest.raises(UserError, match="encoder-decoder"):
        tersekv.CompressedCache(tf.T5Config(), "kivi")
    with pytest.raises(UserError, match="does not divide the head dim"):
        tersekv.CompressedCache(tf.LlamaConfig(hidden_size=80, num_attention_heads=2), "kivi")
    with pytest.raises(UserError, match="takes a transformers model"), tersekv.compress(object(), "kivi"):
        pass


@pytest.mark.parametrize("compiled", [False, True])
def test_a_wrapper_of_a_model_such_as_pefts(llama, compiled):
    wrapper = SimpleNamespace(get_base_model=lambda: llama)
    wrapper = SimpleNamespace(_orig_mod=wrapper) if compiled else wrapper
    with tersekv.compress(wrapper, "kivi"), torch.no_grad():
        cache = tersekv.CompressedCache(wrapper, "kivi")
        llama(prompt(30), past_key_values=cache)
    assert cache.model is llama


def test_head_biased_masks_are_refused(llama):
    with tersekv.compress(llama, "kivi"), torch.no_grad():
        mask = torch.zeros(1, 1, 8, 8)
        mask[0, 0, 3, 1] = -0.5
        with pytest.raises(UserError, match="holds biases"):
            llama(prompt(8), attention_mask=mask, past_key_values=tersekv.CompressedCache(llama.config, "kivi"))
        with pytest.raises(UserError, match="the same for all heads"):
            llama(
                prompt(8),
                attention_mask=torch.ones(1, 4, 8, 8, dtype=torch.bool),
                past_key_values=tersekv.CompressedCache(llama.config, "kivi"),
            )
        float_mask = torch.full((8, 8), torch.finfo(torch.float32).min).triu(1)[None, None]
        cache = tersekv.CompressedCache(llama.config, "kivi")
        got = llama(prompt(8), attention_mask=float_mask, past_key_values=cache).logits
    torch.testing.assert_close(got, llama(prompt(8)).logits, atol=1e-4, rtol=1e-3)


def test_torch_compile_eager_backend(llama):
    ids = prompt(40)
    with tersekv.compress(llama, LOSSLESS), torch.no_grad():
        cache = tersekv.CompressedCache(llama.config, LOSSLESS)
        compiled = torch.compile(llama.forward, backend="eager")
        got = compiled(ids, past_key_values=cache).logits
    torch.testing.assert_close(got, llama(ids).logits, atol=2e-4, rtol=2e-3)


# ---------------------------------------------------------------- how a cache is made


def test_a_cache_of_a_model_is_one_of_its_config(llama):
    of_model, of_config = (tersekv.CompressedCache(x, "kivi:bits=4") for x in (llama, llama.config))
    assert of_model.config is of_config.config
    assert str(of_model.recipe) == str(of_config.recipe)


@pytest.mark.parametrize(
    ("arguments", "keywords", "words"),
    [
        (["kivi"], {}, r"takes a model or its config first, got str; write for example CompressedCache\(model, "),
        ([], {"bits": 4}, "takes no bits; it takes a model or its config, recipe, .* options belong into the recipe"),
        ([], {}, "a recipe is a string like 'kivi:bits=4', got None"),
        ([], {"recipe": 4}, "a recipe is a string like 'kivi:bits=4', got 4"),
    ],
)
def test_wrong_arguments_of_a_cache(llama, arguments, keywords, words):
    with pytest.raises(tersekv.UserError, match=words):
        tersekv.CompressedCache(*(arguments or [llama]), **keywords)


@pytest.mark.parametrize(
    ("recipe", "value", "words"),
    [
        ("kivi", float("inf"), "^layer 0: keys or values hold NaN or Inf; the model's own computation has overflowed"),
        ("kivi", 1e5, "^layer 0: keys or values reach 1e.05, which float16 cannot hold; use the policy option exact="),
        ("window:recent=0,exact=fp32+kivi", 1e6, "^layer 0: a scale of .* exceeds float16's 65504; use the codec's"),
    ],
)
def test_values_that_cannot_be_stored_are_one_sentence(llama, recipe, value, words):
    cache = tersekv.CompressedCache(llama, recipe)
    keys = torch.zeros(1, 2, 64, 32)
    keys[0, 0, 7, 3] = value
    with pytest.raises((CacheError, tersekv.UserError), match=words):
        cache.update(keys, keys, 0)
