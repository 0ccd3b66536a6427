"""Attention weights for `output_attentions`."""

from __future__ import annotations

import torch
from torch import Tensor

from tersekv.attention import masks
from tersekv.attention.masks import Store
from tersekv.attention.read import AttentionCall, grouped


def attention_weights(store: Store | None, keys: Tensor, call: AttentionCall) -> Tensor:
    """Return softmax(scaling·q·K̂ᵀ) [B, Hq, q, past + new tokens] in the query's dtype.

    All past keys are decoded from the store (None: no past). The new keys [B, Hkv, q, D] are exact,
    as in the output. Tokens evicted by a sliding window have weight 0.
    """
    query = grouped(call.query, keys.shape[1])
    dropped = 0
    if store is not None and store.num_tokens:
        keys = torch.cat([store.decoded(torch.float32)[0], keys.float()], dim=2)
        dropped = store.num_evicted
    scores = torch.matmul(query, keys.float().unsqueeze(2).transpose(-1, -2)) * call.scaling
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    q, T = scores.shape[-2:]
    mask = call.mask[:, :, dropped:] if call.mask is not None else masks.causal(q, T, scores.device)
    scores = scores.masked_fill(~mask[:, None, None], float("-inf"))
    if call.sink_logits is not None:
        logits = call.sink_logits.float().reshape(1, *query.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, logits], dim=-1)
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)[..., :T]
    return torch.nn.functional.pad(weights.flatten(1, 2), (dropped, 0)).to(call.query.dtype)
