"""Attention of a transformers model over plain tensors, and its arguments as an `AttentionCall`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tersekv.attention.read import AttentionCall, attend_chunk, attend_floats
from tersekv.attention.weights import attention_weights
from tersekv.errors import UserError
from tersekv.tensors import last_contiguous

OWN = ("softcap", "s_aux")
"""Arguments of the attention function that sdpa does not support."""

QUERY_TYPES = torch.float32, torch.bfloat16, torch.float16
"""Types of queries that our kernel reads."""

LEAST_ROWS = 32
"""Query rows per KV head from which our kernel is used."""


def attend_tensors(
    module: torch.nn.Module,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend to tensors [B, Hkv, n, D] as a model without a compressed cache does.

    Returns [B, q, Hq, Dv], and with `output_attentions` the weights [B, Hq, q, n], else None.
    """
    wants_weights = kwargs.get("output_attentions")
    own = wants_weights or any(kwargs.get(name) is not None for name in OWN)
    if own and mask is None and not _is_causal(module, kwargs):
        mask = torch.ones(1, 1, query.shape[2], keys.shape[2], dtype=torch.bool, device=keys.device)
    if own and mask is None and 1 < query.shape[2] < keys.shape[2]:
        # no mask means causal from the first position: the later slots of a static cache are empty
        keys, values = keys[:, :, : query.shape[2]], values[:, :, : query.shape[2]]
    call = call_of(query, mask, keys.shape[2], scaling, kwargs) if wants_weights else None
    weights = None if call is None else attention_weights(None, keys, call)
    return attend_plain(module, query, keys, values, mask, dropout, scaling, **kwargs), weights


def attend_plain(
    module: torch.nn.Module,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    **kwargs: Any,
) -> Tensor:
    """Attend to tensors [B, Hkv, n, D], with dropout and gradients. Returns [B, q, Hq, Dv]."""
    if (
        not dropout
        and (out := _natively(query, keys, values, mask, _is_causal(module, kwargs), scaling, **kwargs)) is not None
    ):
        return out
    if all(kwargs.get(name) is None for name in OWN) and not kwargs.get("output_attentions"):
        # torch's fused attention for CPUs takes values as wide as keys alone, and its other one holds all scores
        wider = keys.shape[-1] - values.shape[-1] if query.device.type == "cpu" else 0
        values = values if wider <= 0 else torch.nn.functional.pad(values, (0, wider))
        out = sdpa_attention_forward(module, query, keys, values, mask, dropout, scaling, **kwargs)[0]
        return out if wider <= 0 else out[..., :-wider].contiguous()
    call = call_of(query, mask, keys.shape[2], scaling, kwargs)
    if not dropout:
        return attend_chunk(None, keys, values, call)
    weights = torch.nn.functional.dropout(attention_weights(None, keys, call), dropout)
    groups = query.shape[1] // keys.shape[1]
    return torch.matmul(weights, values.repeat_interleave(groups, dim=1)).transpose(1, 2).contiguous()


def _natively(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool, scaling: float | None, **kwargs: Any
) -> Tensor | None:
    """Return `attend_plain` without dropout, computed by our kernel; None if it is slower or does not support the call.

    causal: True if a call without a mask is causal.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return None
    (B, Hq, q, _), (n, H) = query.shape, (keys.shape[2], keys.shape[1])
    sinks = kwargs.get("s_aux")
    learns = torch.is_grad_enabled() and sinks is not None and sinks.requires_grad
    if learns or q * Hq < LEAST_ROWS * H:
        return None
    if kwargs.get("output_attentions") or kwargs.get("position_bias") is not None:
        return None
    if query.dtype not in QUERY_TYPES or not B == len(keys) == len(values):
        return None
    where: Tensor | int | None = 0
    if mask is not None:
        if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2:] != (q, n):
            return None
        where = last_contiguous(mask[:, 0]).expand(B, -1, -1)
    elif q > 1 and causal:
        if q != n:
            return None
        where = None
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    out: Tensor | None = attend_floats(query, keys, values, where, scaling, kwargs.get("softcap"), sinks)
    return out


def _is_causal(module: torch.nn.Module, kwargs: dict[str, Any]) -> bool:
    """True if a call without a mask is causal, as in transformers."""
    given = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


def call_of(
    query: Tensor, mask: Tensor | None, tokens: int, scaling: float | None, kwargs: dict[str, Any]
) -> AttentionCall:
    """Build the `AttentionCall` over `tokens` keys from the arguments of an attention function."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return AttentionCall(query, _bool_mask(mask, query, tokens), scaling, kwargs.get("softcap"), kwargs.get("s_aux"))


def _bool_mask(mask: Tensor | None, query: Tensor, tokens: int) -> Tensor | None:
    """Convert transformers' mask [B, 1, q, kv] to bool [B, q, tokens].

    Raises:
        UserError: the mask has another shape, or holds biases.
    """
    if mask is None:
        return None
    B, _, q, _ = query.shape
    if mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2] != q or mask.shape[3] < tokens:
        raise UserError(
            f"attention mask of shape {tuple(mask.shape)}; a compressed cache reads masks of shape "
            f"(batch, 1, {q}, {tokens}), the same for all heads"
        )
    if mask.dtype != torch.bool:
        blocked = mask <= torch.finfo(mask.dtype).min / 2
        # on an accelerator this check would synchronise at every token, so decode steps skip it
        if (mask.is_cpu or q > 1) and not bool(((mask == 0) | blocked).all()):
            raise UserError(
                "the attention mask holds biases; a compressed cache reads masks that only hide tokens "
                "(bool, or 0 and -inf)"
            )
        mask = ~blocked
    return mask[:, 0, :, :tokens].expand(B, -1, -1)
