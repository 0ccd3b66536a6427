"""Capture the keys and values that a model computes for a text, as a cache receives them (keys
after RoPE)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.configuration_utils import PreTrainedConfig
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from tersekv.attention.read import AttentionCall
from tersekv.cache.rotary import angles_at_once
from tersekv.errors import CacheError
from tersekv.models.attention import attend_tensors, call_of
from tersekv.models.config import attention_layers, cache_layers, text_config
from tersekv.models.rope import Ropes
from tersekv.versions import cache_argument

RECORDER = "tersekv-recorder"


class LayerTokens(NamedTuple):
    """One layer's keys [B, Hkv, T, D] and values [B, Hkv, T, Dv]."""

    keys: Tensor
    values: Tensor


Through = Callable[[int, Tensor, Tensor], LayerTokens]


class OnePassLayer(CacheLayerMixin):
    """A layer that receives all tokens in one call and returns the result of `through`. It stores
    no tokens."""

    def __init__(self, index: int, window: int | None, through: Through) -> None:
        super().__init__()
        self.index, self.sliding_window, self.through = index, window, through
        self.is_sliding = window is not None
        self.seen = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing; there is no state to prepare."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the keys and values [B, H, T, D] for attention.

        Raises:
            CacheError: the layer is called a second time.
        """
        if self.seen:
            raise CacheError(f"layer {self.index} got tokens twice; this cache serves one forward pass, make a new one")
        self.seen = key_states.shape[2]
        return self.through(self.index, key_states, value_states)

    def get_seq_length(self) -> int:
        """Return the number of tokens seen."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (number of keys, offset) of the mask, which spans all tokens."""
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """Return the sliding window, or -1 for no maximum."""
        return -1 if self.sliding_window is None else self.sliding_window


class OnePassCache(Cache):
    """A cache for one forward pass: attention in layer i uses `through(i, keys, values)` in place
    of keys and values.

    It works with every attention implementation and does not modify the model.
    """

    def __init__(self, config: PreTrainedConfig, through: Through) -> None:
        super().__init__(layers=cache_layers(text_config(config), lambda i, window: OnePassLayer(i, window, through)))


@torch.no_grad()
def capture(model: PreTrainedModel, ids: Tensor) -> list[LayerTokens]:
    """Return keys and values of ids [B, T], one entry per attention layer with a key-value cache.
    Layers with a sliding window return all tokens."""
    return _one_pass(model, model.base_model, ids)[0]


def keys_before_rope(config: PreTrainedConfig, keys: Sequence[Tensor]) -> list[Tensor]:
    """Return the keys [H, T, D] of all attention layers, in the order of `capture`, before RoPE.

    Raises:
        UserError: the model has no RoPE, or one that cannot be removed from keys.
    """
    text = text_config(config)
    ropes = Ropes(text, keys[0].shape[-1])
    places = [index for index, kind in enumerate(attention_layers(text)) if kind.type == "attention"]
    found = []
    for index, x in zip(places, keys, strict=True):
        angles = angles_at_once(ropes.of(index), x.shape[1], x.device)
        found.append(angles.rope.invert(x[None], *angles.cos_sin())[0])
    return found


@torch.no_grad()
def capture_calls(model: PreTrainedModel, ids: Tensor) -> list[tuple[LayerTokens, AttentionCall]]:
    """Return the same entries as `capture`, each with the arguments of its attention call: queries,
    mask, scaling."""
    captured: list[tuple[LayerTokens, AttentionCall]] = []
    watch_calls(model, ids, lambda layer, tokens, call: captured.append((tokens, call)))
    return captured


@torch.no_grad()
def watch_calls(model: PreTrainedModel, ids: Tensor, see: Callable[[int, LayerTokens, AttentionCall], None]) -> None:
    """Run the model on ids [B, T], and call `see(layer, tokens, call)` in each attention layer.

    Nothing is kept, so memory holds the tokens of one layer. If layers share keys, the first one
    counts.
    """
    latest: dict[int, tuple[int, LayerTokens]] = {}  # the layer whose attention has not been called yet, by its keys

    def keep(layer: int, keys: Tensor, values: Tensor) -> LayerTokens:
        latest.clear()
        latest[id(keys)] = layer, LayerTokens(keys, values)
        return latest[id(keys)][1]

    def note(keys: Tensor, call: AttentionCall) -> None:
        if id(keys) in latest:
            see(*latest.pop(id(keys)), call)

    with _recording(model, note):
        cache = cache_argument(model.base_model, OnePassCache(model.config, keep))
        model.base_model(input_ids=ids, use_cache=True, **cache)


@torch.no_grad()
def capture_prompt(
    model: PreTrainedModel, ids: Tensor, with_calls: bool, logits_to_keep: int | Tensor = 1
) -> tuple[list[tuple[LayerTokens, AttentionCall | None]], Tensor]:
    """Return the entries of `capture_calls`, or those of `capture` with None, and logits of ids [1, T].

    logits_to_keep: number of last tokens, or positions int64 [n]; logits are [n, vocabulary].
    """
    calls: dict[int, AttentionCall] = {}
    with _recording(model, lambda keys, call: calls.setdefault(id(keys), call)) if with_calls else nullcontext():
        # forward itself, because the hook of `compress` warns of a cache that is not compressed
        captured, output = _one_pass(model, model.forward, ids, logits_to_keep=logits_to_keep)
    return [(tokens, calls.get(id(tokens.keys))) for tokens in captured], output.logits[0]


def _one_pass(model: PreTrainedModel, run: Any, ids: Tensor, **options: Any) -> tuple[list[LayerTokens], Any]:
    """Call `run`, the model or a part of it, once. Return keys and values of its layers, and its output."""
    captured: list[LayerTokens] = []

    def keep(layer: int, keys: Tensor, values: Tensor) -> LayerTokens:
        captured.append(LayerTokens(keys, values))
        return captured[-1]

    cache = cache_argument(model, OnePassCache(model.config, keep))
    output = run(input_ids=ids, use_cache=True, **cache, **options)
    return captured, output


@contextmanager
def _recording(model: PreTrainedModel, note: Callable[[Tensor, AttentionCall], object]) -> Iterator[None]:
    """Run the model with the attention function of `compress` on plain tensors, and call `note`
    with each call's keys and arguments."""

    def attend(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        note(key, call_of(query, mask, key.shape[2], scaling, kwargs))
        return attend_tensors(module, query, key, value, mask, dropout, scaling, **kwargs)

    config = text_config(model.config)
    before = config._attn_implementation
    AttentionInterface.register(RECORDER, attend)
    AttentionMaskInterface.register(RECORDER, sdpa_mask)
    config._attn_implementation = RECORDER
    try:
        yield
    finally:
        config._attn_implementation = before
        AttentionInterface._global_mapping.pop(RECORDER, None)
        AttentionMaskInterface._global_mapping.pop(RECORDER, None)
