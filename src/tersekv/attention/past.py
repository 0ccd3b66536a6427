"""Past and new tokens as plain tensors, for attention dropout, which needs every score."""

from __future__ import annotations

import torch
from torch import Tensor

from tersekv.attention import masks
from tersekv.cache.store import Store


def is_readable(store: Store) -> bool:
    """True if all tokens of the store can be decoded in this process, in order of position."""
    return not store.by_head and store.own is None


def with_past(store: Store, keys: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Append new tokens [B, Hkv, n, D] to the decoded tokens of a readable store.

    Returns keys, values and the mask, bool [1 or B, 1, n, tokens], or None if all tokens are
    visible.

    mask: bool [B, n, past + new tokens], or None for causal.
    """
    n, tokens = keys.shape[2], store.num_tokens + keys.shape[2]
    if mask is None and (n > 1 or store.padding is not None):
        mask = masks.causal(n, tokens, store.device)
        if store.padding is not None:
            mask = mask & (torch.arange(tokens, device=store.device) >= store.padding[:, None])[:, None]
    past = store.decoded(keys.dtype)
    keys, values = (torch.cat(both, dim=2) for both in zip(past, (keys, values), strict=True))
    return keys, values, None if mask is None else mask[:, None, :, store.num_evicted :]
