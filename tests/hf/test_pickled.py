"""Pickled caches: each copy continues like the original, and the original does not change."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
import torch.multiprocessing
import transformers as tf
from transformers.configuration_utils import PreTrainedConfig

import tersekv
from conftest import LOSSLESS, SHAPE, build, prompt
from tersekv.cache.parallel import ContextParallel
from tersekv.errors import CacheError, UserError
from test_interrupted import HYBRID, interrupted


def through_torch(cache):
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
    "torch": through_torch,
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}
RECIPES = [
    LOSSLESS,
    "kivi:bits=2;0=exact",
    "kvquant:bits=2,calibration=prompt",
    "trellis:bits=2,calibration=prompt",
    "qjl",
    "h2o:budget=64+kivi:bits=4",
    "h2o:budget=64,evict=block+kivi:bits=4",
    "h2o:budget=128,recent=16,rest=2+trellis:bits=4,calibration=prompt",
    "subgen:budget=64,variant=stream+exact",
]


def filled(model, recipe, ids, mask):
    cache = tersekv.CompressedCache(model, recipe)
    model(ids, attention_mask=mask, past_key_values=cache)
    return cache


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "recipe"), [("llama", r) for r in RECIPES] + [("gemma3", "kivi:bits=2")])
def test_a_copy_continues_independently(models, name, recipe, way):
    """A left-padded batch. Bytes and logits equal the original's, in either order of continuing."""
    model, ids, mask = models[name], prompt(310, 2), torch.ones(2, 310, dtype=torch.long)
    mask[0, :17] = 0
    with tersekv.compress(model, recipe), torch.no_grad():
        cache, untouched = (filled(model, recipe, ids[:, :300], mask[:, :300]) for _ in range(2))
        copied = WAYS[way](cache)
        assert copied.footprint().parts == cache.footprint().parts
        results = [
            [model(ids[:, i : i + 5], attention_mask=mask[:, : i + 5], past_key_values=c).logits for i in (300, 305)]
            for c in (copied, cache, untouched)
        ]
        assert copied.hands_out_handles
        assert (copied.get_seq_length(), cache.get_seq_length()) == (310, 310)
    for got in results[:2]:
        assert all(torch.equal(a, b) for a, b in zip(got, results[2], strict=True))


def tensors_of(held, seen):
    """Return every tensor that an object holds in attributes, lists, tuples and dicts, native
    kernel arguments included."""
    if id(held) in seen or isinstance(held, (type, torch.nn.Module, PreTrainedConfig)):
        return
    seen[id(held)] = held
    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, dict):
        for part in held.values():
            yield from tensors_of(part, seen)
    elif isinstance(held, (list, tuple)):
        for part in held:
            yield from tensors_of(part, seen)
    elif hasattr(held, "__dict__"):
        yield from tensors_of(vars(held), seen)


def addresses(cache):
    """Return object, memory address and sharing of every live tensor.

    The result holds the tensors, so that no other object gets their ids.
    """
    found = list(tensors_of(cache, {}))
    return found, [(id(x), x.data_ptr(), x.is_shared()) for x in found]


def through_a_queue(held):
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    queue.put(held)
    return queue.get()


def saved_and_loaded(cache, model, path):
    cache.save(path, model=model)
    return tersekv.CompressedCache.load(path, model)


LEAVES_ALONE = {
    **{name: lambda cache, model, path, way=way: way(cache) for name, way in WAYS.items()},
    "queue": lambda cache, model, path: through_a_queue(cache),
    "state": lambda cache, model, path: cache.layers[1].state(),
    "state in a queue": lambda cache, model, path: through_a_queue([layer.state() for layer in cache.layers]),
    "store in a queue": lambda cache, model, path: through_a_queue(cache.layers[1].store),
    "file": saved_and_loaded,
}


@pytest.mark.parametrize("way", LEAVES_ALONE)
@pytest.mark.parametrize("recipe", [*RECIPES, "window:recent=32+kivi:bits=2", "snapkv:budget=64+polarquant"])
def test_the_original_does_not_change(llama, recipe, way, tmp_path):
    """Its tensors are neither moved nor replaced, and the kernel arguments of its pages stay."""
    with tersekv.compress(llama, recipe), torch.no_grad():
        cache = filled(llama, recipe, prompt(300), None)
        llama(prompt(1), past_key_values=cache)  # read by kernels
        if way == "store in a queue" and cache.layers[1].plan.keys.needs_rope:
            pytest.skip("a model's RoPE cannot be pickled")
        held, before = addresses(cache)
        kept = [getattr(layer.store, "_pages", None) for layer in cache.layers]
        made = LEAVES_ALONE[way](cache, llama, tmp_path / "prompt.cache")
        after = addresses(cache)[1]
        assert after == before
        assert all(layer.store.__dict__.get("_pages") is pages for layer, pages in zip(cache.layers, kept, strict=True))
        theirs = {x.data_ptr() for x in addresses(made)[0] if x.numel()}
        tables = [x for layer in cache.layers for x in layer.store.tables()] + list(tensors_of(cache.ropes, {}))
        shared = {x.data_ptr() for x in tables}  # tables of codecs and of RoPE, which all caches of a model share
        assert theirs & {x.data_ptr() for x in held if x.numel()} <= shared


def test_linear_layers_do_not_change():
    torch.manual_seed(0)
    model = tf.Qwen3NextForCausalLM(tf.Qwen3NextConfig(**SHAPE, head_dim=32, **HYBRID)).eval()
    with tersekv.compress(model, "kivi:bits=2"), torch.no_grad():
        cache = filled(model, "kivi:bits=2", prompt(300), None)
        _, before = addresses(cache)
        through_a_queue(cache)
        assert addresses(cache)[1] == before


def test_it_holds_the_cache_and_nothing_else():
    model = build("llama")
    with tersekv.compress(model, "kivi:bits=2"), torch.no_grad():
        cache = filled(model, "kivi:bits=2", prompt(2000), None)
        held = cache.footprint()
        used = held.total_bytes - held.parts["slack"]
        data = pickle.dumps(cache)
        assert model.config._attn_implementation == "tersekv"
    assert used < len(data) < 1.1 * used
    weights = sum(p.nbytes for p in model.parameters())
    assert len(pickle.dumps(tersekv.CompressedCache(model.config, "kivi:bits=2"))) < weights / 20


def test_used_without_compress_it_decodes(llama):
    """A pickled cache made under `compress` does not assume that its attention is installed."""
    with tersekv.compress(llama, LOSSLESS), torch.no_grad():
        data = pickle.dumps(filled(llama, LOSSLESS, prompt(100), None))
        expected = llama(prompt(5, seed=1), past_key_values=pickle.loads(data)).logits
    cache = pickle.loads(data)
    assert not cache.hands_out_handles
    with pytest.warns(UserWarning, match="not installed"), torch.no_grad():
        got = llama(prompt(5, seed=1), past_key_values=cache).logits
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-3)


def test_on_another_device(llama):
    with tersekv.compress(llama, "kivi"), torch.no_grad():
        cache = filled(llama, "kivi", prompt(200), None)
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    moved = torch.load(file, weights_only=False, map_location="meta")
    assert moved.layers[0].store.sinks.keys.device.type == "meta"


def test_an_interrupted_cache_stays_interrupted(llama):
    with tersekv.compress(llama, "kivi"), torch.no_grad():
        cache = filled(llama, "kivi", prompt(50), None)
        with interrupted(llama.model.layers[1], KeyboardInterrupt()):
            llama(prompt(1), past_key_values=cache)
        for way in WAYS.values():
            with pytest.raises(CacheError, match=r"crop\(-1\)"):
                llama(prompt(1), past_key_values=way(cache))


def test_with_linear_layers():
    torch.manual_seed(0)
    model = tf.Qwen3NextForCausalLM(tf.Qwen3NextConfig(**SHAPE, head_dim=32, **HYBRID)).eval()
    with warnings.catch_warnings(), tersekv.compress(model, LOSSLESS), torch.no_grad():
        cache = filled(model, LOSSLESS, prompt(50), None)
        copied = WAYS["pickle"](cache)
        for i in range(3):
            a, b = (model(prompt(1, seed=i), past_key_values=c).logits for c in (copied, cache))
            assert torch.equal(a, b)


def test_a_context_parallel_cache_is_refused(llama):
    cache = tersekv.CompressedCache(llama.config, "kivi")
    cache.context_parallel = ContextParallel(0, 2, lambda x: [x, x])
    with pytest.raises(UserError, match="split among processes"):
        pickle.dumps(cache)
