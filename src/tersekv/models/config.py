"""Read attention shapes and kinds of layers from a model's config; refuse models that are not
supported."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel, cache_utils
from transformers.configuration_utils import PreTrainedConfig

from tersekv.errors import UserError
from tersekv.models.convert import quiet
from tersekv.models.rope import Ropes, modelling
from tersekv.sizes.cache_size import CacheShape

ATTENTION_TYPES = {
    "full_attention": None,
    "sliding_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}
INDEXED = "indexed_attention"
"""Type of layers of latent attention that read the tokens which an indexer chooses."""
WINDOW_MASKS = {"create_sliding_window_causal_mask", "create_chunked_causal_mask", "create_masks_for_generate"}
"""Mask functions of transformers that modelling files with sliding windows use."""
EXPAND = "expand_kv"
"""Method of modules with latent attention that makes the keys and values of all heads."""
OWN_CACHE = "use transformers' own cache"
LINEAR_TYPES = ("linear_attention", "conv")
DUMMY_TYPES = ("moe", "mlp", "dummy")
KEY_MODULE = re.compile(r"(^|_|w)(k|key|keys|kv|qk|qkv)(_|$)|^c_attn$", re.IGNORECASE)
"""Names of modules that make keys, alone or with queries and values, or normalise them."""
OTHER_KEYS = re.compile(r"vision|audio|image|indexer|linear_attn|cross_attn|encoder_attn")
"""Parts of a model whose keys are not in the cache of a decoder."""


class LayerKind(NamedTuple):
    """Kind of a layer. type: "attention", "linear" or "dummy"; window: sliding window in tokens, or
    None; index_dim: see `LayerPlan`."""

    type: str
    window: int | None = None
    index_dim: int = 0


class AttentionShape(NamedTuple):
    """Numbers of layers and heads, and head dims of the tensors that the cache receives.

    passes_handles: True if attention modules pass the result of `update` to the attention function
    unchanged.
    latent: True for latent attention (MLA). The cache then receives latents in place of keys, and
    keys with RoPE, which all heads share, in place of values.
    """

    layers: int
    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    passes_handles: bool
    latent: bool = False

    @staticmethod
    def of(config: PreTrainedConfig) -> AttentionShape:
        """Read the shape from a (text) config.

        Raises:
            UserError: the config has no attention heads, or its layers differ in their heads.
        """
        try:
            heads = getattr(config, "num_attention_heads", None)
            if not isinstance(heads, int):
                raise UserError(
                    f"{config.model_type} has no attention heads in its config; tersekv serves decoder models"
                )
            layers = number_of_layers(config)
            heads = _of_decoder(config, "decoder_attention_heads", heads)
            if getattr(config, "kv_lora_rank", None):
                dims = config.kv_lora_rank, config.qk_rope_head_dim
                return AttentionShape(layers, heads, 1, *dims, _expands_latents(config) and not _shares(config), True)
            head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
            value_dim = getattr(config, "v_head_dim", None) or head_dim
            kv_heads = _of_decoder(
                config, "decoder_attention_heads", getattr(config, "num_key_value_heads", None) or heads
            )
        except RuntimeError as error:  # transformers raises it if layers differ
            raise UserError(
                f"the layers of {config.model_type} differ in their heads or head dims; tersekv serves models with "
                "equal layers, use transformers' own cache"
            ) from error
        return AttentionShape(layers, heads, kv_heads, head_dim, value_dim, not _shares(config))


def _shares(config: PreTrainedConfig) -> bool:
    """True if some layers read the keys and values of others."""
    modes = getattr(config, "kv_sharing_modes", None) or ()
    return bool(getattr(config, "num_kv_shared_layers", 0)) or any(str(mode).startswith("reuse") for mode in modes)


def _expands_latents(config: PreTrainedConfig) -> bool:
    """True if the model's attention makes keys and values from latents by `expand_kv`, after `update`."""
    return any(hasattr(made, EXPAND) for made in _modelling(config).values())


def longest_context(config: PreTrainedConfig) -> int | None:
    """Return the model's longest context in tokens, None if it has no limit."""
    longest: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return longest


def inner_model(model: Any) -> Any:
    """Return the transformers model in a wrapper that has changed its layers in place, such as PEFT's, or compiled it.

    Anything else is returned as it is.
    """
    while not isinstance(model, PreTrainedModel):
        if hasattr(model, "_orig_mod"):  # of torch.compile
            model = model._orig_mod
        elif hasattr(model, "get_base_model"):
            model = model.get_base_model()
        else:
            break
    return model


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the decoder's part of a config.

    Raises:
        UserError: the config is of an encoder-decoder.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"{config.model_type} is an encoder-decoder; tersekv serves decoder-only models, "
            "use transformers' own cache"
        )
    return config.get_text_config(decoder=True)


def number_of_layers(config: PreTrainedConfig) -> int:
    """Return the number of layers of the decoder."""
    return _of_decoder(config, "decoder_layers", config.num_hidden_layers)


def _of_decoder(config: PreTrainedConfig, field: str, usual: int) -> int:
    """Return `field` of a config with encoder layers, else `usual`. For the decoder of an
    encoder-decoder used alone (WhisperForCausalLM) the usual names refer to the encoder."""
    return getattr(config, field, usual) if hasattr(config, "encoder_layers") else usual


def layers_without_own_tokens(config: PreTrainedConfig) -> set[int]:
    """Return the indices of layers that read the keys of another layer."""
    shared: int = getattr(config, "num_kv_shared_layers", None) or 0
    layers = number_of_layers(config)
    return set(range(layers - shared, layers))


def masks_windows(config: PreTrainedConfig) -> bool:
    """True if the model's masks hide tokens outside its sliding windows. Moshi's config has a
    window, but its only mask is causal, so its layers see all tokens."""
    names = _modelling(config)
    return "create_causal_mask" not in names or not WINDOW_MASKS.isdisjoint(names)


def _modelling(config: PreTrainedConfig) -> dict[str, Any]:
    """Return what a config's modelling file defines by name; nothing if there is no such file."""
    try:
        return vars(modelling(config))
    except ImportError:
        return {}


def attention_layers(config: PreTrainedConfig) -> list[LayerKind]:
    """Return the kind of each layer. Windows that the model's masks do not apply are left out.

    Raises:
        UserError: the model has cross-attention, or layers whose state is not keys and values.
    """
    if getattr(config, "cross_attention_layers", None):
        raise UserError(f"{config.model_type} has layers of cross-attention; tersekv serves decoder-only models")
    if (getattr(config, "n_recurrent_loops", None) or 1) > 1:
        raise UserError(f"{config.model_type} reads its layers several times for a token; {OWN_CACHE}")
    types = getattr(config, "layer_types", None)
    if types is None:
        windowed = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
        chunked = getattr(config, "attention_chunk_size", None) is not None
        name = "sliding_attention" if windowed else "chunked_attention" if chunked else "full_attention"
        types = [name] * number_of_layers(config)
    modes = getattr(config, "kv_sharing_modes", None) or [None] * len(types)
    indexers = getattr(config, "indexer_types", None) or [None] * len(types)
    # a draft by early exit (`assistant_early_exit`) has the first layers only
    types, modes, indexers = (each[: number_of_layers(config)] for each in (types, modes, indexers))
    if "reuse_but_indexer" in modes:
        raise UserError(f"{config.model_type} has layers with an indexer and the latents of another layer; {OWN_CACHE}")
    kinds = [_kind(config, "dummy" if mode == "reuse" else name) for name, mode in zip(types, modes, strict=True)]
    for i, (name, of) in enumerate(zip(types, indexers, strict=True)):
        if name == INDEXED and of != "shared":
            kinds[i] = kinds[i]._replace(index_dim=config.index_head_dim)
    if any(kind.window is not None for kind in kinds) and not masks_windows(config):
        kinds = [kind._replace(window=None) for kind in kinds]
    return kinds


def heads_by_layer(config: PreTrainedConfig, ropes: Ropes | None = None) -> list[int]:
    """Return the number of KV heads of each layer. Sliding layers of MiMo-V2-Flash have twice as many as the others."""
    shape, kinds = AttentionShape.of(config), attention_layers(config)
    ropes = ropes or Ropes(config, shape.key_dim)
    return [(kind.type == "attention" and ropes.heads(i)) or shape.kv_heads for i, kind in enumerate(kinds)]


def has_key_bias(config: PreTrainedConfig) -> bool | None:
    """Return True if the model adds a bias to its keys, so that their mean is large; None if unknown.

    The modelling class is built on the meta device, which needs no memory. It has a bias if a key
    projection or a norm of keys has a parameter of that name.
    """
    config = copy.deepcopy(config if config.is_encoder_decoder else config.get_text_config(decoder=True))
    config._attn_implementation = "eager"  # a constructor refuses ours outside `compress`
    for auto in (AutoModelForCausalLM, AutoModel):
        if type(config) not in auto._model_mapping:
            continue
        try:
            with torch.device("meta"), quiet():
                model = auto.from_config(config)
        except Exception:  # the constructor of a model may raise any error
            return None
        modules = [name.split(".")[:-1] for name, _ in model.named_parameters() if name.endswith(".bias")]
        return any(KEY_MODULE.search(path[-1]) and not OTHER_KEYS.search(".".join(path)) for path in modules)
    return None


def cache_shape(config: PreTrainedConfig) -> CacheShape:
    """Return the shapes that `cache.estimate.predict` needs."""
    config = text_config(config)
    shape = AttentionShape.of(config)
    kinds = attention_layers(config)
    windows = tuple(kind.window for kind in kinds if kind.type == "attention")
    if not windows:
        raise UserError(f"this {config.model_type} has no attention layers, so there is no cache to pack")
    known_ropes = Ropes(config, shape.key_dim)
    ropes = tuple(known_ropes.known(i) for i, kind in enumerate(kinds) if kind.type == "attention")
    dtype = getattr(config, "dtype", None)
    known = dtype if isinstance(dtype, torch.dtype) else torch.bfloat16
    dims = shape.key_dim, shape.value_dim
    index_dims = tuple(kind.index_dim for kind in kinds if kind.type == "attention")
    index_dims = index_dims if any(index_dims) else ()
    by_layer = zip(heads_by_layer(config, known_ropes), kinds, strict=True)
    heads = tuple(held for held, kind in by_layer if kind.type == "attention")
    heads = heads if {*heads} != {shape.kv_heads} else ()
    return CacheShape(windows, shape.kv_heads, *dims, known, ropes, shape.query_heads, shape.latent, index_dims, heads)


def _kind(config: PreTrainedConfig, name: str) -> LayerKind:
    if name in ATTENTION_TYPES:
        field = ATTENTION_TYPES[name]
        return LayerKind("attention", getattr(config, field) if field else None)
    # transformers' own layers count tokens of pools, and other models' indexers cache positions, too
    if name == INDEXED and AttentionShape.of(config).latent and not getattr(config, "index_kpool", None):
        return LayerKind("attention")
    if name in LINEAR_TYPES:
        return LayerKind("linear")
    if name in DUMMY_TYPES:
        return LayerKind("dummy")
    raise UserError(
        f"{config.model_type} has layers of type '{name}', whose state is not plain keys and values; tersekv serves "
        f"{', '.join((*ATTENTION_TYPES, *LINEAR_TYPES))}, use transformers' own cache"
    )


def cache_layers(config: PreTrainedConfig, of_attention: Callable[[int, int | None], Any]) -> list[Any]:
    """Return the layers of a cache: of_attention(index, window) for those of attention, transformers' own for others.

    Releases before 5.17 have no `DummyLayer` for layers that cache nothing; an unused dynamic layer serves there.
    """
    others: Any = {
        "linear": cache_utils.LinearAttentionLayer,
        "dummy": getattr(cache_utils, "DummyLayer", cache_utils.DynamicLayer),
    }
    kinds = enumerate(attention_layers(config))
    return [of_attention(i, kind.window) if kind.type == "attention" else others[kind.type]() for i, kind in kinds]
