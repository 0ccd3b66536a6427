"""Caches of other packages on PyPI, which benchmarks/three_models.py compares with recipes.

Each function gets the exact keys and values of a prompt [1, H, T, D] by layer, and the ids [1, T] of the tokens
after it. It fills the package's cache through its public interface, with 4 bits and otherwise its defaults. Then
the model reads the tokens through that cache. Packages are imported when they are used, so none is a dependency.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, QuantizedCache

from tersekv.calibration.capture import LayerTokens
from tersekv.errors import UserError


class Reading(NamedTuple):
    """Logits [T, vocabulary] of tokens, and the bytes that the cache then holds and that its package counts."""

    logits: Tensor
    held: int
    counted: float | None = None


class Rival(NamedTuple):
    """A package on PyPI, the version that is measured, the module that is imported of it, and its function here."""

    package: str
    version: str
    module: str
    read: Callable[[Any, Any, Sequence[LayerTokens], Tensor], Reading]


def needed(name: str) -> Any:
    """Import the rival's module. It is a UserError if the package, or one that it needs, is not installed."""
    rival = RIVALS[name]
    try:
        return importlib.import_module(rival.module)
    except ImportError as error:
        raise UserError(f"{name} cannot be imported ({error}): pip install {rival.package}=={rival.version}") from error


def read(name: str, model: Any, prompt: Sequence[LayerTokens], ids: Tensor) -> Reading:
    """Read ids after the prompt through the named rival's cache."""
    return RIVALS[name].read(needed(name), model, prompt, ids)


def through(cache: Cache, model: Any, ids: Tensor) -> Tensor:
    """Read ids through a cache of transformers' kind, and return their logits."""
    return torch.cat([model(part, past_key_values=cache).logits[0] for part in ids.split(64, dim=1)])


def filled(cache: Cache, prompt: Sequence[LayerTokens]) -> Any:
    """Fill an empty cache with a prompt, and return it."""
    for index, (keys, values) in enumerate(prompt):
        cache.update(keys, values, index)
    return cache


def quanto(module: Any, model: Any, prompt: Sequence[LayerTokens], ids: Tensor) -> Reading:
    """Read through transformers' own `QuantizedCache` with quanto."""
    cache = filled(QuantizedCache("quanto", model.config, nbits=4), prompt)
    return Reading(through(cache, model, ids), held(cache.layers))


def hqq(module: Any, model: Any, prompt: Sequence[LayerTokens], ids: Tensor) -> Reading:
    """Read through transformers' own `QuantizedCache` with hqq, which allows axis 1 only."""
    cache = filled(QuantizedCache("hqq", model.config, nbits=4, axis_key=1, axis_value=1), prompt)
    return Reading(through(cache, model, ids), held(cache.layers))


def turboquant(module: Any, model: Any, prompt: Sequence[LayerTokens], ids: Tensor) -> Reading:
    """Read through turboquant's `TurboQuantCache`. The rotation and the codebook are shared by all layers."""
    if not hasattr(np, "trapz"):
        np.trapz = np.trapezoid  # the package uses the name that NumPy 2.4 removed
    cache = filled(module.TurboQuantCache(bits=4), prompt)
    logits = through(cache, model, ids)
    shared = module.cache._get_quantizer(prompt[0].keys.shape[3], 4, str(ids.device))
    return Reading(logits, held([cache.layers, shared]), cache.memory_usage_bytes()["total_bytes"])


def turbo_attn(module: Any, model: Any, prompt: Sequence[LayerTokens], ids: Tensor) -> Reading:
    """Read through codes of turbo-attn's `TkvCodec` without a calibration, because its own attention needs a GPU.

    New tokens attend to each other exactly, as with its `TKV_FRESH_DIAGONAL`. They are held as codes alone.
    """
    codec = module.TkvCodec(head_dim=prompt[0].keys.shape[3], bit_width=4)
    cache = DynamicCache(config=model.config)
    for layer in cache.layers:
        hold_codes(layer, codec)
    logits = through(filled(cache, prompt), model, ids)
    counted = sum(layer.keys.shape[:3].numel() for layer in cache.layers)
    counted *= codec.bytes_per_k_vector + codec.bytes_per_v_vector
    return Reading(logits, held([cache.layers, codec]), counted)


def hold_codes(layer: Any, codec: Any) -> None:
    """Make a layer of transformers hold the codec's codes, which are decoded when the layer is read."""
    exact = layer.update

    def update(keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        codes = [*codec.compress_k(keys), *codec.compress_v(values)]  # two of bytes [1, H, T, B], and norms [1, H, T]
        if layer.is_initialized:
            old = [layer.keys, layer.key_norms, layer.values, layer.value_norms]
            codes = [torch.cat(parts, dim=2) for parts in zip(old, codes, strict=True)]
            layer.keys, layer.values = codec.decompress_k(*old[:2]), codec.decompress_v(*old[2:])
        whole = exact(keys, values)
        kept = layer.keys.shape[2]  # a sliding layer drops the oldest tokens
        layer.keys, layer.key_norms, layer.values, layer.value_norms = (one[:, :, -kept:].clone() for one in codes)
        return whole

    layer.update = update


def nexusquant(module: Any, model: Any, prompt: Sequence[LayerTokens], ids: Tensor) -> Reading:
    """Read through a cache that nexusquant-kv's `compress_kv_cache` rounded after the prompt. Later tokens are exact.

    The call is the one of its README. Of the prompt it counts 4 bits per element and a float16 scale per vector.
    """
    cache = filled(DynamicCache(config=model.config), prompt)
    base = getattr(model.config, "rope_theta", 10000.0)
    module.compress_kv_cache(cache, mode="quant_only", key_bits=4, value_bits=4, rope_base=base)
    logits = through(cache, model, ids)
    counted, later = 0, ids.shape[1]
    for layer in cache.layers:
        heads, tokens, channels = layer.keys.shape[1:]
        counted += 2 * heads * ((tokens - later) * (channels // 2 + 2) + later * 4 * channels)
    return Reading(logits, held(cache.layers), counted)


def tri_tier(module: Any, model: Any, prompt: Sequence[LayerTokens], ids: Tensor) -> Reading:
    """Read through tri-tier's `TriTierCache`, which replaces the model's attention and reads one token at a time.

    The cache has room for the tokens that are read, and otherwise the sizes that the package's patch gives it.
    """
    patch = importlib.import_module("tri_tier.integration.patch_model")
    _, heads, length, channels = prompt[0].keys.shape
    queries = model.config.num_attention_heads
    patch.apply_patch()
    try:
        layers = [one for one in model.modules() if type(one).forward is patch.patched_forward]
        if len(layers) != len(prompt):
            raise ValueError("its patch covers the attention of Llama, Mistral, Qwen2 and Qwen3 only")
        for layer, (keys, values) in zip(layers, prompt, strict=True):
            sizes = length + ids.shape[1], channels, heads, patch.R_SIZE, patch.H_RATIO, queries
            layer.tri_tier_cache = module.TriTierCache(*sizes)
            layer.tri_tier_cache.prefill(keys[0].transpose(0, 1), values[0].transpose(0, 1))
        steps = [(ids[:, at : at + 1], torch.tensor([[length + at]])) for at in range(ids.shape[1])]
        logits = [model(one, position_ids=place, use_cache=False).logits[0] for one, place in steps]
        caches = [layer.tri_tier_cache for layer in layers]
        counted = sum(cache.get_buffer_bytes() for cache in caches)
        # The C++ engine has stores of its own, which it counts. These are the tensors beside them.
        beside = [side for cache in caches for key, side in vars(cache).items() if key.startswith(("WR_", "PBS_"))]
        return Reading(torch.cat(logits), counted + held(beside), counted)
    finally:
        patch.remove_patch()
        patch.reset_caches(model)


def held(value: Any) -> int:
    """Return the bytes of all tensors in an object. Storage that several of them share is counted once."""
    return sum({one.data_ptr(): one.nbytes() for one in storages(value, set())}.values())


def storages(value: Any, seen: set[int]) -> Iterator[torch.UntypedStorage]:
    """Return the storages of the tensors in an object, in its parts and in quantised tensors. seen: ids of objects."""
    if id(value) in seen or isinstance(value, type):
        return
    seen.add(id(value))
    if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__") and type(value) is not Tensor:
        parts = [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    elif isinstance(value, Tensor):
        parts = []
        yield value.untyped_storage()
    elif isinstance(value, (list, tuple)):
        parts = list(value)
    else:
        parts = list((value if isinstance(value, dict) else getattr(value, "__dict__", {})).values())
    for part in parts:
        yield from storages(part, seen)


RIVALS = {
    "quanto": Rival("optimum-quanto", "0.2.7", "optimum.quanto", quanto),
    "hqq": Rival("hqq", "0.2.8.post1", "hqq.core.quantize", hqq),
    "turboquant": Rival("turboquant", "0.2.0", "turboquant", turboquant),
    "turbo-attn": Rival("turbo-attn", "0.70.1", "tkv", turbo_attn),
    "nexusquant-kv": Rival("nexusquant-kv", "0.6.3", "nexusquant", nexusquant),
    "tri-tier": Rival("tri-tier", "0.1.0", "tri_tier", tri_tier),
}
