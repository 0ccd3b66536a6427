"""`compress` as a call, as a context, on copies of a model, and with other cache settings."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
import weakref

import pytest
import torch
import transformers as tf
from transformers import AttentionInterface, DynamicCache, StaticCache

import tersekv
from conftest import LOSSLESS, build, prompt
from tersekv.errors import UserError
from tersekv.hf.compress import remove_all
from tersekv.versions import cache_argument

GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


def state(model):
    """Return the state that `compress` changes on a model."""
    return (
        model.config._attn_implementation,
        dict(model.__dict__),
        dict(model.model.__dict__),
        len(model._forward_pre_hooks),
    )


def recipe_in_use(model):
    cache = model.generate(prompt(5), return_dict_in_generate=True, **GREEDY).past_key_values
    return str(cache.recipe) if isinstance(cache, tersekv.CompressedCache) else None


@pytest.fixture
def llama():
    """Return a model that no other test uses."""
    return build("llama")


def test_a_call_without_with_takes_effect_until_removed(llama):
    before = state(llama)
    handle = tersekv.compress(llama, "kivi")
    assert recipe_in_use(llama) == "kivi"
    assert repr(handle) == "<tersekv.compress of LlamaForCausalLM with kivi: installed>"
    handle.remove()
    handle.remove()  # a second call does nothing
    assert repr(handle).endswith("removed>")
    assert recipe_in_use(llama) is None
    assert state(llama) == before


def test_a_discarded_handle_stays_in_force(llama):
    before = state(llama)
    tersekv.compress(llama, "kivi")
    tersekv.compress(llama, "int4:group=32")
    gc.collect()
    assert recipe_in_use(llama) == "int4:group=32"
    remove_all(llama)
    remove_all(llama)
    assert state(llama) == before
    assert "tersekv" not in AttentionInterface().valid_keys()


def test_with_inside_a_call_and_entered_again(llama):
    handle = tersekv.compress(llama, "kivi")
    with tersekv.compress(llama, "int4:group=32") as inner:
        assert inner is llama
        assert recipe_in_use(llama) == "int4:group=32"
    assert recipe_in_use(llama) == "kivi"
    with handle:  # installed already: once is enough
        assert recipe_in_use(llama) == "kivi"
    assert recipe_in_use(llama) is None
    with handle:
        assert recipe_in_use(llama) == "kivi"
    assert recipe_in_use(llama) is None


def test_left_by_a_generator_and_by_other_threads(llama):
    before = state(llama)

    def steps():
        with tersekv.compress(llama, "kivi"):
            yield recipe_in_use(llama)
            yield None

    generator = steps()
    assert next(generator) == "kivi"
    generator.close()
    assert state(llama) == before
    errors = []

    def work(recipe):
        try:
            for _ in range(5):
                with tersekv.compress(llama, recipe), torch.no_grad():
                    llama(prompt(20))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(recipe,)) for recipe in ("kivi", "int4:group=32", "qjl")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert state(llama) == before


def test_a_model_is_freed_while_it_is_installed():
    model = build("llama")
    tersekv.compress(model, "kivi")
    with torch.no_grad():
        model(prompt(20))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("recipe", ["default", "h2o:budget=96+kivi", "small"])
def test_a_cache_is_freed_when_it_is_dropped(llama, recipe):
    """Its memory is not held until Python collects cycles, which takes many prompts. A copy outlives its original."""
    gc.collect()
    gc.disable()
    try:
        with tersekv.compress(llama, recipe):
            out = llama.generate(prompt(300), max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
            copied = copy.deepcopy(out.past_key_values)
            dropped = [weakref.ref(out.past_key_values), weakref.ref(out.past_key_values.layers[0].store)]
            ids = torch.cat([out.sequences, prompt(20)], dim=1)
            del out
            assert [gone() for gone in dropped] == [None, None]
            llama.generate(ids, **cache_argument(llama, copied), max_new_tokens=3, do_sample=False)
            store = weakref.ref(copied.layers[0].store)
            del copied
            assert store() is None
    finally:
        gc.enable()


def test_a_call_that_fails_installs_nothing(llama):
    before = state(llama)
    with pytest.raises(UserError):
        tersekv.compress(llama, "kivi:group=7")
    assert state(llama) == before


# ---------------------------------------------------------------- copies of the model


@pytest.mark.parametrize("part", ["model", "base"])
def test_a_copy_is_made_without_packed_attention(llama, part):
    """Copies made during the context and after it behave like one made before."""
    attention = llama.config._attn_implementation
    expected = llama(prompt(30), use_cache=False)[0]
    with tersekv.compress(llama, "kivi"):
        copied = copy.deepcopy(llama if part == "model" else llama.model)
        assert recipe_in_use(llama) == "kivi"
        during = copied(prompt(30), use_cache=True)
    after = copied(prompt(30), use_cache=True)
    assert copied.config._attn_implementation == attention
    for out in (during, after):
        assert isinstance(out.past_key_values, DynamicCache)
    if part == "model":
        assert torch.equal(after.logits, expected)
        assert recipe_in_use(copied) is None
        assert (len(copied._forward_pre_hooks), len(copied._forward_pre_hooks_with_kwargs)) == (0, 0)
        with tersekv.compress(copied, "qjl"):
            assert recipe_in_use(copied) == "qjl"
            assert recipe_in_use(llama) is None
    assert not {"__deepcopy__", "_prepare_cache_for_generation"} & copied.__dict__.keys()


@torch.no_grad()
def test_a_compiled_pass_without_a_cache_is_one_graph(llama):
    with tersekv.compress(llama, "kivi"):
        got = torch.compile(llama, backend="eager", fullgraph=True)(prompt(30), use_cache=False).logits
    torch.testing.assert_close(got, llama(prompt(30), use_cache=False).logits, atol=1e-5, rtol=1e-4)


def test_a_shallow_copy_works_after_the_context(llama):
    with tersekv.compress(llama, "kivi"):
        copied = copy.copy(llama)
        assert recipe_in_use(copied) == "kivi"
    assert recipe_in_use(copied) is None
    assert isinstance(copied(prompt(5), use_cache=True).past_key_values, DynamicCache)


def test_saving_a_model_inside(llama, tmp_path):
    with tersekv.compress(llama, "kivi"):
        llama.save_pretrained(tmp_path)
    again = type(llama).from_pretrained(tmp_path)
    assert torch.equal(again(prompt(9)).logits, llama(prompt(9)).logits)


# ---------------------------------------------------------------- other wishes about the cache


def test_a_cache_keeps_its_own_recipe_with_a_warning(llama):
    ids = prompt(200)
    results = []
    for installed in ("qjl", "kivi:bits=2"):
        cache = tersekv.CompressedCache(llama.config, "kivi:bits=2")
        with warnings.catch_warnings(record=True) as caught, tersekv.compress(llama, installed), torch.no_grad():
            warnings.simplefilter("always")
            for part in (ids[:, :150], ids[:, 150:199], ids[:, 199:]):
                logits = llama(part, **cache_argument(llama, cache)).logits
        results.append((logits, [str(w.message) for w in caught]))
    assert torch.equal(results[0][0], results[1][0])
    said = "the cache that was passed keeps its own recipe, kivi:bits=2, not qjl"
    assert [messages for _, messages in results] == [[said], []]


def test_a_cache_of_another_architecture_is_refused(models):
    cache = tersekv.CompressedCache(models["qwen3"].config, "kivi:bits=4")
    with (
        tersekv.compress(models["llama"], "kivi:bits=4"),
        pytest.raises(UserError, match="made for a qwen3 of another architecture"),
    ):
        models["llama"](prompt(5), past_key_values=cache)


@pytest.mark.parametrize(
    ("kind", "names", "said"),
    [("OpenAIGPTConfig", ("n_embd", "n_layer", "n_head"), "has no cache"),
     ("MptConfig", ("d_model", "n_layers", "n_heads"), "pass past_key_values=.* without compress")],
)  # fmt: skip
def test_models_without_attention_functions_are_refused(kind, names, said):
    """The message does not offer a cache to a model that takes none."""
    config = getattr(tf, kind)(vocab_size=97, **dict(zip(names, (32, 1, 1), strict=True)))
    model = tf.AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserError, match=said):
        tersekv.compress(model, "kivi")


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_a_transformers_cache_is_used_with_a_warning(llama, kind):
    cache = kind(config=llama.config, **({"max_cache_len": 50} if kind is StaticCache else {}))
    with warnings.catch_warnings(record=True) as caught, tersekv.compress(llama, LOSSLESS):
        warnings.simplefilter("always")
        got = llama.generate(prompt(20), past_key_values=cache, **GREEDY)
    assert got.tolist() == llama.generate(prompt(20), **GREEDY).tolist()
    said = f"a {kind.__name__} was passed while compress is installed; it is not compressed"
    assert [str(w.message) for w in caught if "compress" in str(w.message)] == [said]


@pytest.mark.parametrize("place", ["argument", "config"])
@pytest.mark.parametrize("implementation", ["static", "offloaded_static", "offloaded", "quantized"])
def test_another_cache_implementation_is_refused(llama, monkeypatch, implementation, place):
    """In the call, and in the model's generation config. Without `compress` it works as usual."""
    given = {"cache_implementation": implementation} if place == "argument" else {}
    if place == "config":
        monkeypatch.setattr(llama.generation_config, "cache_implementation", implementation)
    with (
        tersekv.compress(llama, "kivi"),
        pytest.raises(UserError, match=f"cache_implementation='{implementation}'.*leav"),
    ):
        llama.generate(prompt(20), **GREEDY, **given)
    if implementation == "static":
        llama.generate(prompt(20), **GREEDY, **given)


def test_use_cache_false_is_no_error(llama):
    with tersekv.compress(llama, "kivi"):
        out = llama.generate(prompt(20), use_cache=False, return_dict_in_generate=True, **GREEDY)
    assert out.past_key_values is None
