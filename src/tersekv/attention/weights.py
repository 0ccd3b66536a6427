"""Attention weights for `output_attentions`."""

from __future__ import annotations

import torch
from torch import Tensor

from tersekv.attention import masks
from tersekv.attention.read import AttentionCall, grouped
from tersekv.cache.segments import latent_key
from tersekv.cache.store import Store
from tersekv.kernels.softmax import softmax_weights


def attention_weights(store: Store | None, keys: Tensor, call: AttentionCall) -> Tensor:
    """Return softmax(scaling·q·K̂ᵀ) [B, Hq, q, past + new tokens] in the query's dtype.

    All past keys are decoded from the store (None: no past). The new keys [B, Hkv, q, D] are exact,
    as in the output. Tokens evicted by a sliding window have weight 0.
    """
    query = grouped(call.query, keys.shape[1])
    dropped = 0
    if store is not None and store.num_tokens:
        past = store.decoded(torch.float32)
        keys = torch.cat([latent_key(*past) if store.latent else past[0], keys.float()], dim=2)
        dropped = store.num_evicted
    scores = torch.matmul(query, keys.float().unsqueeze(2).transpose(-1, -2)) * call.scaling
    q, T = scores.shape[-2:]
    mask = call.mask[:, :, dropped:] if call.mask is not None else masks.causal(q, T, scores.device)
    logits = None if call.sink_logits is None else call.sink_logits.view(1, *query.shape[1:3], 1, 1)
    weights = softmax_weights(scores, call.softcap, ~mask[:, None, None], logits)
    return torch.nn.functional.pad(weights.flatten(1, 2), (dropped, 0)).to(call.query.dtype)
