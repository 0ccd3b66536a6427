"""Read a prompt twice, so that the policy `mixed` can rank its tokens by the second reading.

The decoder gets the prompt's tokens twice in one pass. Layers store the first half only. The second
half attends to it and to itself. Its queries show which tokens a later text would come back to
(`attention/importance.py`). Outputs of the second half are cut off.

Reading twice at once needs no layer to keep its prompt exact until the next layer is done.
"""

from __future__ import annotations

import inspect
import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from tersekv.hf.base import ModelCache
from tersekv.hf.traced import is_traced
from tersekv.models.config import longest_context
from tersekv.versions import CACHE_NAMES, given_cache

FEWEST = 256
"""Minimum number of new tokens that are read twice. Fewer are ranked by moved queries."""

RECORDED = "output_attentions", "output_hidden_states", "output_router_logits"
"""Options of a call that return results of all tokens. They are not read twice, because only the last
hidden states are cut."""


def install(model: PreTrainedModel) -> list[RemovableHandle]:
    """Add the hooks to the decoder of a model, and return their handles: none without a decoder."""
    decoder: Any = model.get_decoder()
    if not isinstance(decoder, torch.nn.Module) or not {*CACHE_NAMES} & {*_parameters(decoder)}:
        return []
    before = decoder.register_forward_pre_hook(partial(_double, weakref.ref(model)), with_kwargs=True)
    return [before, decoder.register_forward_hook(_cut, with_kwargs=True)]


def _parameters(module: torch.nn.Module) -> list[str]:
    return list(inspect.signature(module.forward).parameters)


def _double(owner: weakref.ref[PreTrainedModel], module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Double the tokens of a call whose cache asks for it. This is a pre-forward hook."""
    given = dict(zip(_parameters(module), args, strict=False)) | kwargs if args else kwargs
    cache = given_cache(given)
    if not isinstance(cache, ModelCache):
        return args, kwargs
    cache.read_again = 0
    tokens = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
    if not cache.reads_twice or is_traced() or tokens is None or not _fits(module, cache, given, tokens):
        return args, kwargs
    cache.read_again = n = tokens.shape[1]
    given = dict(given)
    for name in ("input_ids", "inputs_embeds"):
        if given.get(name) is not None:
            given[name] = torch.cat([given[name]] * 2, dim=1)
    if (mask := given.get("attention_mask")) is not None:
        given["attention_mask"] = torch.cat([mask, mask[:, -n:]], dim=1)
    if (places := given.get("position_ids")) is not None:
        step = places.amax(dim=-1, keepdim=True) + 1 - places.amin(dim=-1, keepdim=True)
        given["position_ids"] = torch.cat([places, places + step], dim=1)
    if (places := given.get("cache_position")) is not None:
        given["cache_position"] = torch.cat([places, places + n])
    return (), given


def _fits(module: Any, cache: ModelCache, given: dict[str, Any], tokens: Tensor) -> bool:
    """True if the call can be doubled: a prompt with plain masks and positions, and room for both."""
    n, mask, places = tokens.shape[1], given.get("attention_mask"), given.get("position_ids")
    plain = (mask is None or (isinstance(mask, Tensor) and mask.dim() == 2)) and (places is None or places.dim() == 2)
    others = any(_wanted(module, given, name) for name in RECORDED) or module.training
    room = longest_context(module.config)
    end = cache.get_seq_length() + 2 * n
    return n >= FEWEST and plain and not others and cache.hands_out_handles and (room is None or end <= room)


def _wanted(module: Any, given: dict[str, Any], name: str) -> Any:
    """Return the value of an option of a call, by default that of the config."""
    return getattr(module.config, name, None) if given.get(name) is None else given[name]


def _cut(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """Cut the second reading off the output, and let the cache go on as usual. This is a forward hook."""
    cache = given_cache(kwargs)
    if not isinstance(cache, ModelCache) or not (n := cache.read_again):
        return None
    cache.read_again = 0
    if isinstance(output, tuple):
        return (output[0][:, :n], *output[1:])
    output.last_hidden_state = output.last_hidden_state[:, :n]
    return output
