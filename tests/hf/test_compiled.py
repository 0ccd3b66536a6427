"""Compiled decode steps over a compressed cache: the tokens of eager mode, one graph, no
recompilation."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import CompileConfig, DynamicCache

import tersekv
from conftest import HEAD, LOSSLESS, SHAPE, build, prompt
from tersekv.errors import CacheError
from tersekv.hf import traced
from tersekv.hf.attention import attention_forward, attention_mask_for
from tersekv.hf.cache import CompressedCache
from tersekv.hf.layer import CompressedLayer
from tersekv.versions import cache_argument, release

GREEDY = {"max_new_tokens": 160, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Reset graphs and counters of other tests."""
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


@pytest.fixture
def model() -> Any:
    """Return a separate Llama, because `generate` keeps the compiled call on the model."""
    return build("llama")


@pytest.fixture
def one_layer() -> Any:
    """Return a Llama of one layer, whose calls are whole forward passes."""
    return tf.LlamaForCausalLM(tf.LlamaConfig(**(SHAPE | {"num_hidden_layers": 1}), **HEAD)).eval()


def config(backend: str = "eager", **options: Any) -> CompileConfig:
    """Return a config that compiles one graph, also on the CPU."""
    made = CompileConfig(fullgraph=True, backend=backend, mode=None, options=options or None)
    made._compile_all_devices = True
    return made


def batch(rows: int, tokens: int = 60) -> dict[str, Tensor]:
    """Return prompts. With three rows, two are padded on the left."""
    ids = prompt(tokens, batch=rows)
    mask = torch.ones_like(ids)
    if rows == 3:
        mask[0, :17] = 0
        mask[2, :3] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def assert_one_graph(graphs: int = 1) -> None:
    """Check that there was no graph break and no recompilation since the test began."""
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]
    assert not counters["recompile_limit"]


F32, BF16 = torch.float32, torch.bfloat16
CASES = [
    ("llama", "kivi:bits=4", BF16, 3),
    ("gemma2", "default", F32, 3),
    ("qwen3", "trellis:calibration=prompt", BF16, 1),
    ("qwen3", "h2o:budget=64+kivi:bits=4", BF16, 3),
    ("qwen3", "h2o:budget=96,evict=block,rest=2+kivi:bits=4", BF16, 1),
    ("llama", "mixed:recent=16+trellis:bits=4,calibration=prompt", F32, 1),
    ("gpt_oss", "kivi:bits=4,pre_rope=true", BF16, 1),
    ("gpt_oss", "window:generated=exact,recent=16,start=0+kivi:bits=4", F32, 3),
]


@pytest.mark.parametrize(("name", "recipe", "dtype", "rows"), CASES)
def test_generate_gives_eager_tokens_with_one_graph(name, recipe, dtype, rows):
    """160 tokens include several packing steps, and the second call compiles nothing.

    Gemma 2 has softcaps and sliding windows, GPT-OSS attention sinks.
    """
    model, inputs = build(name).to(dtype), batch(rows)
    with tersekv.compress(model, recipe):
        expected = model.generate(**inputs, **GREEDY)
        assert not counters["stats"]
        for _ in range(2):
            got = model.generate(**inputs, **GREEDY, compile_config=config("aot_eager" if rows == 3 else "eager"))
            assert torch.equal(got, expected)
    assert_one_graph()


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("prefill", ["eager", "compiled"])
def test_compiled_model_without_generate(name, prefill):
    """`torch.compile(model)` without `generate`: positions come from the cache, and the operator
    makes the masks."""
    model, ids = build(name), batch(2)["input_ids"]
    compiled = torch.compile(model, backend="eager", fullgraph=True)

    @torch.no_grad()
    def decode(step: Any, first: Any) -> list[int]:
        cache, token, taken = CompressedCache(model.config, "kivi:bits=4"), ids, []
        for _ in range(100):
            call = step if taken else first
            token = call(input_ids=token, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
            taken.append(token)
        return torch.cat(taken).tolist()

    with tersekv.compress(model, "kivi:bits=4"):
        assert decode(compiled, compiled if prefill == "compiled" else model) == decode(model, model)
    assert_one_graph(2 if prefill == "compiled" else 1)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_compiled_model_with_a_padding_mask_that_grows(name):
    model, inputs = build(name), batch(3)
    compiled = torch.compile(model, backend="eager", fullgraph=True)

    @torch.no_grad()
    def decode(step: Any) -> list[int]:
        cache, mask, taken = CompressedCache(model.config, "kivi:bits=4"), inputs["attention_mask"], []
        token = model(**inputs, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
        for _ in range(60):
            mask = torch.cat([mask, torch.ones_like(token)], dim=1)
            torch._dynamo.mark_dynamic(mask, 1)
            out = step(input_ids=token, attention_mask=mask, past_key_values=cache)
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            taken.append(token)
        return torch.cat(taken).tolist()

    with tersekv.compress(model, "kivi:bits=4"):
        assert decode(compiled) == decode(model)
    assert_one_graph()


def test_inductor(model):
    """By default Inductor keeps sums of fused bfloat16 operations in float32, with or without our
    cache."""
    model, inputs = model.to(BF16), batch(3)
    with tersekv.compress(model, "kivi:bits=4"):
        expected = model.generate(**inputs, **GREEDY)
        compiled = config("inductor", emulate_precision_casts=True)
        assert torch.equal(model.generate(**inputs, **GREEDY, compile_config=compiled), expected)
    assert_one_graph()


def test_chat_of_three_turns_with_one_cache(model):
    """Turns alternate between compiled and eager steps on one cache."""
    with tersekv.compress(model, "kivi:bits=4"):
        chats = []
        for configs in ([None] * 3, [config(), None, config()], [config()] * 3):
            cache, ids = CompressedCache(model.config, "kivi:bits=4"), prompt(50)
            for turn, compiled in enumerate(configs):
                ids = model.generate(ids, past_key_values=cache, **GREEDY, compile_config=compiled)
                ids = torch.cat([ids, prompt(20, seed=turn)], dim=1)
            chats.append(ids.tolist())
            assert cache.get_seq_length() == ids.shape[1] - 21
    assert chats[0] == chats[1] == chats[2]
    assert_one_graph()


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3}, {"prompt_lookup_num_tokens": 5}, {"do_sample": True, "num_return_sequences": 2}],
    ids=["beams", "lookup", "sampling"],
)
def test_other_ways_of_decoding(model, options):
    """Beams run eager in transformers, with or without `compile_config`, and assisted decoding before 5.24."""
    found = []
    with tersekv.compress(model, LOSSLESS):
        for compiled in (None, config()):
            torch.manual_seed(5)
            inputs = batch(1 if "prompt_lookup_num_tokens" in options else 2)
            kwargs = GREEDY | {"max_new_tokens": 40} | options
            found.append(model.generate(**inputs, **kwargs, compile_config=compiled))
    assert torch.equal(*found)
    graphs = {"num_beams": 0, "prompt_lookup_num_tokens": 2 * (release(tf.__version__) >= (5, 24)), "do_sample": 1}
    assert counters["stats"]["unique_graphs"] == graphs[next(iter(options))]


def test_cache_operations_after_compiled_steps(model, tmp_path):
    """Crop, copy, save, load, row selection and reset, each followed by compiled steps."""
    ids, compiled = prompt(70), config()

    def go_on(cache: CompressedCache, ids: Tensor, how: CompileConfig | None) -> list[int]:
        kwargs = GREEDY | {"max_new_tokens": 30}
        return model.generate(ids, past_key_values=cache, compile_config=how, **kwargs)[0].tolist()

    with tersekv.compress(model, "kivi:bits=4"):
        cache = CompressedCache(model.config, "kivi:bits=4")
        read = model.generate(ids, past_key_values=cache, **GREEDY, compile_config=compiled)
        cache.crop(-5)
        cropped = read[:, : cache.get_seq_length() + 1]
        cache.save(tmp_path / "file.cache", cropped[:, :-1], model)
        expected = go_on(copy.deepcopy(cache), cropped, None)
        copied = copy.deepcopy(cache)
        assert go_on(copied, cropped, compiled) == expected
        assert cache.get_seq_length() + 1 == cropped.shape[1]  # the copy has its own handle
        assert go_on(CompressedCache.load(tmp_path / "file.cache", model), cropped, compiled) == expected
        rows = copy.deepcopy(cache)
        rows.batch_repeat_interleave(2)
        two = model.generate(
            cropped.repeat(2, 1), past_key_values=rows, **(GREEDY | {"max_new_tokens": 30}), compile_config=compiled
        )
        assert two.tolist() == [expected, expected]
        assert go_on(cache, cropped, compiled) == expected
        cache.reset()
        assert go_on(cache, ids, compiled) == go_on(CompressedCache(model.config, "kivi:bits=4"), ids, None)


def test_prefill_in_chunks_is_compiled_as_transformers_does(model):
    """The first chunk meets an empty layer inside the compiled call."""
    inputs = batch(3, tokens=100)
    with tersekv.compress(model, "kivi:bits=4"):
        kwargs = inputs | GREEDY | {"max_new_tokens": 40, "prefill_chunk_size": 25}
        assert torch.equal(model.generate(**kwargs, compile_config=config()), model.generate(**kwargs))
    assert not counters["graph_break"]


def test_generate_compiles_only_on_request(model, monkeypatch):
    """transformers would compile by itself on a GPU. The test pretends to have one; nothing may be
    traced."""
    inputs = batch(1) | GREEDY | {"max_new_tokens": 5}
    with tersekv.compress(model, "kivi:bits=4"):
        out = model.generate(**inputs, return_dict_in_generate=True)
        for given in ({}, {"compile_config": config(), "disable_compile": True}):
            model.generate(**inputs, **given)
            assert not out.past_key_values.is_compileable
        feigned = type("Feigned", (), {"type": "cuda"})()
        monkeypatch.setattr(type(model), "device", property(lambda self: feigned))
        kwargs = cache_argument(model, out.past_key_values)
        plain = copy.deepcopy(model.generation_config)
        assert not model._valid_auto_compile_criteria(kwargs, plain)
        out.past_key_values.compiles = True  # `generate` sets this if it gets a `compile_config`
        assert model._valid_auto_compile_criteria(kwargs, plain)
        monkeypatch.setattr(out.past_key_values, "context_parallel", object())  # context parallelism
        assert not out.past_key_values.is_compileable
        monkeypatch.undo()
        monkeypatch.setattr(model.config, "attention_chunk_size", 64, raising=False)
        assert not out.past_key_values.is_compileable
    assert not counters["stats"]


@pytest.mark.parametrize("why", ["not installed", "opens keys and values", "recurrent state", "weights"])
def test_uncompilable_caches_run_eager_with_a_warning(why, monkeypatch):
    """A `compile_config` that cannot be followed does not change the tokens."""
    said = []
    monkeypatch.setattr("transformers.generation.utils.logger.warning_once", lambda text, *_: said.append(text))
    model = recurrent() if why == "recurrent state" else build("llama")
    if why == "opens keys and values":
        model.config.num_kv_shared_layers = 1  # as Gemma 3n has it
    kwargs = batch(1) | GREEDY | {"max_new_tokens": 5}
    if why == "weights":
        kwargs |= {"output_attentions": True, "return_dict_in_generate": True}
    found = []
    for compiled in (None, config()):
        cache = CompressedCache(model.config, LOSSLESS)
        if why == "not installed":
            found.append(model.generate(**kwargs, past_key_values=cache, compile_config=compiled))
        else:
            with tersekv.compress(model, LOSSLESS):
                found.append(model.generate(**kwargs, past_key_values=cache, compile_config=compiled))
    first, second = (x.sequences if why == "weights" else x for x in found)
    assert torch.equal(first, second)
    assert any("unable to meet the criteria for compilation" in text for text in said)
    assert not counters["stats"]


def recurrent() -> Any:
    """Return a model with a layer of linear attention."""
    torch.manual_seed(0)
    types = ["linear_attention", "full_attention", "linear_attention"]
    config = tf.Qwen3NextConfig(**(SHAPE | HEAD), layer_types=types, num_experts=2, num_experts_per_tok=1)
    return tf.Qwen3NextForCausalLM(config).eval()


@pytest.mark.parametrize("option", [{"dropout": 0.5}, {"output_attentions": True}, {"position_bias": torch.ones(1)}])
def test_the_operator_says_what_it_refuses(one_layer, option):
    layer = CompressedCache(one_layer.config, LOSSLESS).layers[0]

    @torch.compile(backend="eager", fullgraph=True)
    def attend(keys: Tensor) -> Any:
        return attention_forward(one_layer, keys, *layer.traced(keys, keys), None, **option)

    with torch.no_grad(), pytest.raises(Exception, match=f"does not serve a compiled model with {next(iter(option))}"):
        attend(torch.randn(1, 2, 1, 32))


def test_errors_of_the_operator(model, monkeypatch):
    """A batch of another size, and an interruption between layers, which the next compiled pass
    detects."""
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with tersekv.compress(model, LOSSLESS), torch.no_grad():
        cache = CompressedCache(model.config, LOSSLESS)
        compiled(prompt(8), past_key_values=cache)
        with pytest.raises(CacheError, match="layer 0 holds batch 1"):
            compiled(prompt(1, batch=2), past_key_values=cache)
        append = CompressedLayer.add

        def interrupted(layer: CompressedLayer, *args: Any) -> None:
            if layer.index == 1:
                raise KeyboardInterrupt
            append(layer, *args)

        monkeypatch.setattr(CompressedLayer, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            compiled(prompt(1), past_key_values=cache)
        monkeypatch.undo()
        with pytest.raises(CacheError, match=r"undo the pass with cache.crop\(-1\)"):
            compiled(prompt(1), past_key_values=cache)
        cache.crop(-1)
        got = compiled(prompt(1), past_key_values=cache).logits
        expected = model(torch.cat([prompt(8), prompt(1)], dim=1)).logits[:, -1:]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-3)


def test_transformers_caches_still_compile(model):
    """`compress` is installed, and a compiled call gets another cache."""
    compiled, cache = torch.compile(model, backend="eager"), DynamicCache(config=model.config)
    with tersekv.compress(model, LOSSLESS), torch.no_grad():
        with pytest.warns(UserWarning, match="not compressed"):
            compiled(prompt(20), past_key_values=cache)
        got = compiled(prompt(1, seed=1), past_key_values=cache).logits
    expected = model(torch.cat([prompt(20), prompt(1, seed=1)], dim=1)).logits[:, -1:]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("gradients", [False, True])
def test_calls_that_break_the_graph_are_right(one_layer, gradients):
    """A compiled call that makes its own cache, and one with gradients."""
    compiled, more = torch.compile(one_layer, backend="eager"), prompt(3, seed=1)
    expected = one_layer(torch.cat([prompt(20), more], dim=1)).logits[:, -3:]
    with tersekv.compress(one_layer, LOSSLESS), torch.set_grad_enabled(gradients):
        cache = compiled(prompt(20)).past_key_values
        assert isinstance(cache, CompressedCache)
        got = compiled(more, past_key_values=cache).logits
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-3)
    assert got.requires_grad == gradients
    assert counters["graph_break"]


def test_operators_pass_torch_opcheck(one_layer):
    """With values of ones the output is ones, even if torch's checks run the operator several
    times."""
    with tersekv.compress(one_layer, LOSSLESS):
        cache = CompressedCache(one_layer.config, LOSSLESS)
        query, keys, values = torch.randn(1, 4, 1, 32), torch.randn(1, 2, 1, 32), torch.ones(1, 2, 1, 32)
        handle = cache.layers[0].handle
        args = (handle, query, keys, values, None, torch.full((4,), -1e9), 0.25, 30.0)
        torch.library.opcheck(torch.ops.tersekv.append_and_attend.default, args)
        appended = cache.layers[0].get_seq_length()
        assert appended > 0
        torch.library.opcheck(torch.ops.tersekv.num_tokens.default, (handle,))
        assert torch.ops.tersekv.num_tokens(handle).item() == appended


def test_an_operator_with_unused_output_still_appends(one_layer):
    """Dead code elimination must neither remove it nor merge two equal calls."""
    with tersekv.compress(one_layer, LOSSLESS), torch.no_grad():
        cache = CompressedCache(one_layer.config, LOSSLESS)
        layer = cache.layers[0]

        @torch.compile(backend="aot_eager", fullgraph=True)
        def append_twice(keys: Tensor) -> Tensor:
            for _ in range(2):
                pair = layer.traced(keys, keys)
                traced.append_and_attend(*pair, keys.repeat(1, 2, 1, 1), None, None, 1.0, None)
            return keys + 1

        append_twice(torch.randn(1, 2, 3, 32))
        assert layer.get_seq_length() == 6


def test_a_handle_of_a_deleted_cache():
    handle = torch.tensor(-1)
    with pytest.raises(CacheError, match="no longer exists"):
        torch.ops.tersekv.num_tokens(handle)


def test_unsupported_masks_are_refused():
    @torch.compile(backend="eager", fullgraph=True)
    def mask() -> Any:
        return attention_mask_for(batch_size=1, q_length=1, kv_length=0, allow_is_causal_skip=False)

    with torch.no_grad(), pytest.raises(Exception, match="masks of its own kind"):
        mask()
