"""Caches of other packages on PyPI, which benchmarks/three_models.py compares with recipes.

Each function gets the exact keys and values of a prompt [1, H, T, D] by layer, and the ids [1, T] of the tokens
after it. It fills the package's cache through its public interface, with 4 bits and otherwise its defaults. Then
the model reads the tokens through that cache. Packages are imported when they are used, so none is a dependency.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, QuantizedCache

from tersekv.errors import UserError
from tersekv.hf.capture import LayerTokens

CHUNK = 64
"""Tokens that are read at a time."""


class Rival(NamedTuple):
    """A package on PyPI, the version that is measured, and the module that is imported of it."""

    package: str
    version: str
    module: str


RIVALS = {
    "quanto": Rival("optimum-quanto", "0.2.7", "optimum.quanto"),
    "hqq": Rival("hqq", "0.2.8.post1", "hqq.core.quantize"),
    "turboquant": Rival("turboquant", "0.2.0", "turboquant"),
    "turbo-attn": Rival("turbo-attn", "0.70.1", "tkv"),
    "nexusquant-kv": Rival("nexusquant-kv", "0.6.3", "nexusquant"),
    "tri-tier": Rival("tri-tier", "0.1.0", "tri_tier"),
}


class Reading(NamedTuple):
    """Logits [T, vocabulary] of the tokens read, the bytes that the cache then holds, and the bytes that the package
    counts. counted is None if it counts none."""

    logits: Tensor
    held: int
    counted: float | None = None


def needed(name: str) -> Any:
    """Import the rival's module.

    Raises:
        UserError: the package, or one that it needs, is not installed.
    """
    rival = RIVALS[name]
    try:
        return importlib.import_module(rival.module)
    except ImportError as error:
        raise UserError(f"{name} cannot be imported ({error}): pip install {rival.package}=={rival.version}") from error


def installed(name: str) -> str:
    """Return the version of the rival's package."""
    return version(RIVALS[name].package)


def read(name: str, model: Any, prompt: Sequence[LayerTokens], ids: Tensor) -> Reading:
    """Read ids after the prompt through the named rival's cache."""
    module = needed(name)
    if name in ("quanto", "hqq"):
        return quantized_cache(name, model, prompt, ids)
    readers = {"turboquant": turboquant, "turbo-attn": turbo_attn, "nexusquant-kv": nexusquant, "tri-tier": tri_tier}
    return readers[name](module, model, prompt, ids)


def through(cache: Cache, model: Any, ids: Tensor) -> Tensor:
    """Read ids through a cache of transformers' kind, and return their logits."""
    return torch.cat([model(part, past_key_values=cache).logits[0] for part in ids.split(CHUNK, dim=1)])


def filled(cache: Cache, prompt: Sequence[LayerTokens]) -> Any:
    """Fill an empty cache with a prompt, and return it."""
    for index, (keys, values) in enumerate(prompt):
        cache.update(keys, values, index)
    return cache


def quantized_cache(backend: str, model: Any, prompt: Sequence[LayerTokens], ids: Tensor) -> Reading:
    """Read through transformers' own `QuantizedCache`."""
    axes = {"axis_key": 1, "axis_value": 1} if backend == "hqq" else {}  # hqq allows no others
    cache = filled(QuantizedCache(backend, model.config, nbits=4, **axes), prompt)
    return Reading(through(cache, model, ids), held(cache.layers))


def turboquant(module: Any, model: Any, prompt: Sequence[LayerTokens], ids: Tensor) -> Reading:
    """Read through turboquant's `TurboQuantCache`. The rotation and the codebook are shared by all layers."""
    numpy = importlib.import_module("numpy")
    if not hasattr(numpy, "trapz"):
        numpy.trapz = numpy.trapezoid  # version 0.2.0 uses the name that NumPy 2.4 removed
    cache = filled(module.TurboQuantCache(bits=4), prompt)
    logits = through(cache, model, ids)
    shared = [quantizer for (_, bits, _), quantizer in module.cache._quantizers.items() if bits == 4]
    return Reading(logits, held([cache.layers, shared]), cache.memory_usage_bytes()["total_bytes"])


class CodedLayer(DynamicLayer):
    """A layer that holds codes of turbo-attn's codec. New tokens attend to each other exactly, as its
    `TKV_FRESH_DIAGONAL` has it; they are held as codes alone."""

    def __init__(self, codec: Any) -> None:
        super().__init__()
        self.codec = codec
        self.codes: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values [1, H, T, D]. Return those decoded from codes, and after them the new ones."""
        new, codec = (*self.codec.compress_k(key_states), *self.codec.compress_v(value_states)), self.codec
        old, self.codes = self.codes, list(new)
        if not old:
            return key_states, value_states
        self.codes = [torch.cat(parts, dim=2) for parts in zip(old, new, strict=True)]
        keys, values = codec.decompress_k(*old[:2]), codec.decompress_v(*old[2:])
        return torch.cat([keys, key_states], dim=2), torch.cat([values, value_states], dim=2)

    def get_seq_length(self) -> int:
        """Return the number of tokens held."""
        return self.codes[0].shape[2] if self.codes else 0


def turbo_attn(module: Any, model: Any, prompt: Sequence[LayerTokens], ids: Tensor) -> Reading:
    """Read through codes of turbo-attn's `TkvCodec` without a calibration. Its kernels need a GPU."""
    codec = module.TkvCodec(head_dim=prompt[0].keys.shape[3], bit_width=4)
    cache = filled(Cache(layers=[CodedLayer(codec) for _ in prompt]), prompt)
    logits = through(cache, model, ids)
    vectors = sum(layer.codes[0].shape[:3].numel() for layer in cache.layers)
    return Reading(logits, held(cache.layers), vectors * (codec.bytes_per_k_vector + codec.bytes_per_v_vector))


def nexusquant(module: Any, model: Any, prompt: Sequence[LayerTokens], ids: Tensor) -> Reading:
    """Read through a cache that nexusquant-kv's `compress_kv_cache` rounded after the prompt. Later tokens are exact.

    It counts 4 bits per element and a float16 scale per vector of the prompt, as its README says.
    """
    found = module.E8QuantizedCache.from_model(model)  # the package's own reading of the model's RoPE
    rope = {"rope_base": found.rope_base, "rope_scaling": found.rope_scaling, "model_config": model.config}
    cache = filled(DynamicCache(), prompt)
    module.compress_kv_cache(cache, mode="quant_only", key_bits=4, value_bits=4, **rope)
    logits = through(cache, model, ids)
    vectors = sum(2 * keys.shape[:3].numel() for keys, _ in prompt)
    later = sum(2 * layer.keys[:, :, -ids.shape[1] :].nbytes for layer in cache.layers)
    return Reading(logits, held(cache.layers), later + vectors * (prompt[0].keys.shape[3] // 2 + 2))


def tri_tier(module: Any, model: Any, prompt: Sequence[LayerTokens], ids: Tensor) -> Reading:
    """Read through tri-tier's `TriTierCache`, which replaces the model's attention and reads one token at a time.

    The cache has room for the tokens that are read, and otherwise the sizes that the package's patch gives it.
    """
    patch = importlib.import_module("tri_tier.integration.patch_model")
    shape, length = prompt[0].keys.shape, prompt[0].keys.shape[2]
    patch.apply_patch()
    try:
        layers = [one for one in model.modules() if type(one).forward is patch.patched_forward]
        if len(layers) != len(prompt):
            raise ValueError("its patch covers the attention of Llama, Mistral, Qwen2 and Qwen3 only")
        for layer, (keys, values) in zip(layers, prompt, strict=True):
            layer.tri_tier_cache = module.TriTierCache(
                *(length + ids.shape[1], shape[3], shape[1], patch.R_SIZE, patch.H_RATIO),
                num_q_heads=model.config.num_attention_heads,
            )
            layer.tri_tier_cache.prefill(*(side[0].transpose(0, 1).contiguous() for side in (keys, values)))
        places = torch.arange(length, length + ids.shape[1])[None, :, None]
        steps = zip(ids[0, :, None, None], places[0, :, :, None], strict=True)
        logits = [model(one, position_ids=at, use_cache=False).logits[0] for one, at in steps]
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
        yield value.untyped_storage()
        return
    elif isinstance(value, (dict, list, tuple)):
        parts = list(value.values()) if isinstance(value, dict) else list(value)
    else:
        parts = list(getattr(value, "__dict__", {}).values())
    for part in parts:
        yield from storages(part, seen)
