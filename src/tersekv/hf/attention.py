"""Attention and mask functions that transformers calls under the name "tersekv"."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers.masking_utils import sdpa_mask

from tersekv.attention.observe import kept_weights, observe
from tersekv.attention.past import is_readable, with_past
from tersekv.attention.read import AttentionCall, attend_chunk, attend_new, attend_store
from tersekv.attention.weights import attention_weights
from tersekv.cache.segments import UNSEEN, latent_key
from tersekv.cache.store import Store
from tersekv.errors import CacheError, UserError
from tersekv.hf.handle import Pending, PendingTokens, opened
from tersekv.hf.latent import UpProjection
from tersekv.hf.traced import NewTokens, append_and_attend, is_traced
from tersekv.models.attention import OWN, attend_plain, attend_tensors, call_of
from tersekv.models.config import EXPAND


def attention_forward(
    module: Any,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend with query [B, Hq, q, D] to a compressed cache (key and value are handles) or to plain
    tensors.

    Returns [B, q, Hq, Dv], and with `output_attentions` the weights [B, Hq, q, tokens], else None.
    """
    if (indices := kwargs.pop("indices", None)) is not None:
        attention_mask = _of_indices(attention_mask, indices)
    if isinstance(key, PendingTokens) and key.copies > 1 and _are_repeated(query, key, value, kwargs):
        return _repeated(module, query, key.pending, attention_mask, dropout, scaling, **kwargs)
    are_handles = isinstance(key, (NewTokens, PendingTokens))
    up = UpProjection.of(module, query.device) if are_handles and hasattr(type(module), EXPAND) else None
    if isinstance(key, NewTokens):
        query = query if up is None else up.query(query)
        out = _traced(query, key, value, attention_mask, dropout, scaling, kwargs)
        return out if up is None else up.output(out), None
    wants_weights = kwargs.get("output_attentions")
    # position biases are only supported on decoded tokens
    pending = _untouched(key, value) if kwargs.get("position_bias") is None else None
    if pending is None:
        key, value = opened((key, value))
        if up is not None:
            key, value = module.expand_kv(key, value)
        return attend_tensors(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    store, keys, values = pending.layer.store, pending.keys, pending.values
    assert store is not None
    past, held = store.num_tokens, (keys, values)
    if store.latent:
        keys, values = latent_key(keys, values), keys
    call = absorbed = call_of(query, attention_mask, past + keys.shape[2], scaling, kwargs)
    watched = query.shape[2] >= store.least_queries and (not store.latent or store.watches(keys.shape[2]))
    if up is not None:
        call = replace(call, expand=partial(_expanded, module))
        if wants_weights or watched or query.shape[2] <= up.most_queries:
            absorbed = replace(call, query=up.query(query), expand=None)
    reading = call if up is not None and query.shape[2] > up.most_queries else absorbed
    weights = _weights(store, keys, absorbed) if wants_weights else None  # before the store may evict tokens
    again = pending.layer.cache.read_again
    padding = _padding(call.without_last(again).mask) if store.deferred else None
    seen = pending.layer.cache.of_all_heads(absorbed) if watched and store.latent else absorbed
    observed = observe(store, keys, values, seen, again) if watched else UNSEEN
    if again:
        pending.drop_last(again)
    has_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (query, *held))
    if not past or dropout:
        if past and not is_readable(store):
            raise UserError(f"attention dropout over a filled cache with {pending.layer.cache.recipe}: {NO_DROPOUT}")
        key, value, mask = with_past(store, *held, call.mask) if past else (*held, attention_mask)
        if store.latent:
            key, value = (keys, values) if up is None else module.expand_kv(key, value)
        out, up = attend_plain(module, query, key, value, mask, dropout, scaling, **_own(kwargs)), None
    elif has_gradient and store.context_parallel is not None:
        with torch.no_grad():
            out = attend_chunk(store, keys, values, reading)
        out = NoGradient.apply(out, query, keys, values)
    elif has_gradient:
        with saved_tensors_hooks(_unchanging, lambda x: x):
            out = attend_chunk(store, keys, values, reading)
    elif keys.shape[2] == 1 and observed is UNSEEN:
        written = None if keys.is_cpu else attend_new(store, *held, reading)  # C++ appends in less time
        pending.commit(padding)
        out = attend_store(store, reading) if written is None else written
    else:
        out = attend_chunk(store, keys, values, reading)
    if not pending.committed:
        pending.commit(padding, observed)
    return (out if up is None or reading.expand is not None else up.output(out)), weights


def _are_repeated(query: Tensor, key: PendingTokens, value: Any, kwargs: dict[str, Any]) -> bool:
    """True if the heads of both handles are repeated to those of the queries, and the call depends on no head."""
    alike = _untouched(key, value, key.copies) is not None and query.shape[1] == key.shape[1]
    return alike and kwargs.get("s_aux") is None and kwargs.get("position_bias") is None


def _repeated(
    module: Any, query: Tensor, pending: Pending, mask: Tensor | None, dropout: float, scaling: float | None, **own: Any
) -> tuple[Tensor, Tensor | None]:
    """Attend where query head h reads head h % H, not h // copies: sort the queries by the heads that they read."""
    H = pending.keys.shape[1]
    query, handles = _sorted(query, -1, H), (PendingTokens(pending, False), PendingTokens(pending, True))
    as_ours = SimpleNamespace(num_key_value_groups=query.shape[1] // H, training=module.training)
    out, weights = attention_forward(as_ours, query, *handles, mask, dropout, scaling, **own)
    out = _sorted(out.transpose(1, 2), H, -1).transpose(1, 2).contiguous()  # modules use `view`
    return out, None if weights is None else _sorted(weights, H, -1)


def _sorted(x: Tensor, rows: int, columns: int) -> Tensor:
    """Return x [B, heads, …] with its heads, a table of rows and columns, in order of columns."""
    return x.unflatten(1, (rows, columns)).transpose(1, 2).flatten(1, 2)


def _expanded(module: Any, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Make keys and values of all heads from keys [B, 1, T, R + D] of latent attention."""
    keys = keys.to(module.kv_a_layernorm.weight.dtype)
    made: tuple[Tensor, Tensor] = module.expand_kv(*keys.split([module.kv_lora_rank, module.qk_rope_head_dim], dim=-1))
    return made


def _of_indices(mask: Tensor | None, indices: Tensor) -> Tensor | None:
    """Return the mask [B, 1, q, tokens] of a call that reads only the tokens `indices` int [B, q, n] of each query."""
    if mask is None:
        return None
    chosen = torch.zeros_like(mask, dtype=torch.bool).scatter_(-1, indices.long().unsqueeze(1), True)
    return mask & chosen if mask.dtype == torch.bool else mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)


EXPLICIT: set[int] = set()
"""Ids of the configs of models without sdpa support in transformers. They get explicit masks,
because their modules may not declare that they are causal (BigBird-Pegasus)."""


def attention_mask_for(*args: Any, **kwargs: Any) -> Any:
    """Return the mask for `attention_forward`: bool [B, 1, q, tokens], or None if plain causal
    attention suffices."""
    if is_traced() and kwargs["kv_length"] == 0:
        return _traced_mask(*args, **kwargs)
    for_compiled_step = not kwargs.get("allow_is_causal_skip", True) and kwargs["q_length"] == 1
    if id(kwargs.get("config")) in EXPLICIT:
        kwargs["allow_is_causal_skip"] = False
    mask = sdpa_mask(*args, **kwargs)
    if for_compiled_step and mask is not None:
        mask = mask.contiguous()  # otherwise transformers copies it later, and that copy is not marked
        torch._dynamo.maybe_mark_dynamic(mask, 3)
    return mask


def _traced_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return the mask of a traced pass over a compressed cache, whose number of tokens is unknown.

    It is made from the padding mask, which spans all tokens; None lets the operator make it.

    Raises:
        UserError: the model needs a mask of another kind.
    """
    padding, n = kwargs.get("attention_mask"), kwargs["q_length"]
    if padding is not None:
        tokens = padding.shape[1]
        return sdpa_mask(*args, **(kwargs | {"kv_length": tokens, "q_offset": tokens - n, "kv_offset": 0}))
    if not kwargs.get("allow_is_causal_skip", True):
        raise UserError(f"{COMPILED} that makes masks of its own kind; {REMEDY}")
    return None


def _traced(
    query: Tensor,
    key: NewTokens,
    value: NewTokens,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> Tensor:
    """Attend in a traced pass, by one operator that appends the new tokens and attends.

    Raises:
        UserError: the call uses dropout, attention weights or a position bias, which the operator
            does not support.
    """
    for name, given in (
        ("dropout", dropout),
        ("output_attentions", kwargs.get("output_attentions")),
        ("position_bias", kwargs.get("position_bias") is not None),
    ):
        if given:
            raise UserError(f"{COMPILED} with {name}; {REMEDY}")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return append_and_attend(key, value, query, mask, kwargs.get("s_aux"), scaling, kwargs.get("softcap"))


COMPILED, REMEDY = "a compressed cache does not serve a compiled model", "leave it out or do not compile"


def _own(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: kwargs.get(name) for name in OWN}


NO_DROPOUT = (
    "not all of its tokens can be decoded here; call model.eval(), use the policy window in one process, or train with "
    "an empty cache"
)


class NoGradient(torch.autograd.Function):
    """Attention output that may be computed outside `torch.no_grad()`; its backward pass raises an
    error."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *inputs: Tensor) -> Tensor:
        """Return `out` as if it had been computed from the inputs."""
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Raise CacheError."""
        raise CacheError(
            "gradients do not flow through a filled cache with context_parallel; train with an empty cache, or without "
            "context_parallel"
        )


def _unchanging(x: Tensor) -> Tensor:
    """Return what the backward pass saves for x: a copy if x may belong to the store, which is
    changed in place."""
    return x if x.requires_grad else x.clone()


def _untouched(key: Any, value: Any, copies: int = 1) -> Pending | None:
    """Return the pending tokens if both arguments are handles with so many copies of the heads that are not committed
    yet, else None."""
    if isinstance(key, PendingTokens) and isinstance(value, PendingTokens) and not key.pending.committed:
        return key.pending if key.copies == value.copies == copies else None
    return None


def _weights(store: Store, keys: Tensor, call: AttentionCall) -> Tensor:
    return kept_weights(store, keys, call) if store.by_head else attention_weights(store, keys, call)


def _padding(mask: Tensor | None) -> Tensor | None:
    """Return the number of leading positions that no query of the row sees, int64 [B]. For a row
    without tokens it is all positions."""
    if mask is None:
        return None
    seen = mask.any(dim=1)
    return torch.where(seen.any(dim=-1), seen.int().argmax(dim=-1), seen.shape[-1])
