"""The attention function that transformers calls under the name "tersekv"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tersekv.attention.read import Call, attend_chunk, attend_store, attention_weights
from tersekv.errors import UserError
from tersekv.hf.handle import PendingTokens

if TYPE_CHECKING:
    from tersekv.hf.cache import CompressedLayer


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of query [B, Hq, q, D] over a compressed cache (key and value are handles) or over plain tensors.

    Returns [B, q, Hq, Dv], and the weights [B, Hq, q, tokens] where `output_attentions` asks for them.
    """
    softcap, sink_logits = kwargs.get("softcap"), kwargs.get("s_aux")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    wants_weights = kwargs.get("output_attentions")
    pending = isinstance(key, PendingTokens)
    if not pending and softcap is None and sink_logits is None and not wants_weights:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    layer: CompressedLayer | None = key.layer if pending else None
    store = layer.store if layer is not None else None
    keys, values = (key.keys, key.values) if pending else (key, value)
    past = store.seen if store is not None else 0
    call = Call(query, _bool_mask(attention_mask, query, past + keys.shape[2]), scaling, softcap, sink_logits)
    weights = attention_weights(store, keys, call) if wants_weights else None  # before the store may forget tokens
    if layer is None or store is None:
        return attend_chunk(None, keys, values, call), weights
    if past and keys.shape[2] == 1:
        layer.append(keys, values)
        return attend_store(store, call), weights
    if past or softcap is not None or sink_logits is not None:
        out = attend_chunk(store, keys, values, call)
    else:
        out, _ = sdpa_attention_forward(module, query, keys, values, attention_mask, dropout, scaling)
    layer.append(keys, values, None if past else _padding(call.mask))
    return out, weights


def _bool_mask(mask: Tensor | None, query: Tensor, tokens: int) -> Tensor | None:
    """[B, 1, q, kv] as transformers makes it -> bool [B, q, tokens]."""
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
        if not bool(((mask == 0) | blocked).all()):
            raise UserError(
                "the attention mask holds biases; a compressed cache reads masks that only hide tokens "
                "(bool, or 0 and -inf)"
            )
        mask = ~blocked
    return mask[:, 0, :, :tokens].expand(B, -1, -1)


def _padding(mask: Tensor | None) -> Tensor | None:
    """Leading positions of each row that no query sees: int64 [B]; None without a mask."""
    if mask is None:
        return None
    seen = mask.any(dim=1)
    return torch.where(seen.any(dim=-1), seen.int().argmax(dim=-1), 0)
