"""Attention of prompts over unpacked tokens. Engines may have a faster one.

Shapes: T queries of n requests, S tokens of the same requests, Hq query heads, H KV heads, D head dim.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tersekv.kernels import softmax
from tersekv.kernels.attend import attend_floats


class Lengths(NamedTuple):
    """Numbers of queries and of tokens of each request. The queries are its last tokens."""

    queries: list[int]
    tokens: list[int]


class AttentionKind(NamedTuple):
    """Kind of attention of a layer.

    scaling: factor of the scores. softcap: soft cap of the scores, or None.
    window: number of latest tokens that a query sees, its own included; None for all.
    sink_logits: float [Hq], one logit per head in the denominator of the softmax, or None.
    """

    scaling: float
    softcap: float | None = None
    window: int | None = None
    sink_logits: Tensor | None = None

    def with_sinks(self, out: Tensor, lse: Tensor) -> Tensor:
        """Add the sink logits to the denominator of out [B, Hkv, G·q, D] with log-sum-exp [B, Hkv, G·q]."""
        if self.sink_logits is None:
            return out
        kv_heads, rows = lse.shape[1:]
        logits = self.sink_logits.float().view(kv_heads, -1)
        share = torch.sigmoid(lse - logits.repeat_interleave(rows // logits.shape[1], dim=1))
        return out * share.unsqueeze(-1)

    def sees_all(self, tokens: int) -> bool:
        """True if the window hides none of so many tokens."""
        return self.window is None or self.window >= tokens

    def visible(self, queries: Tensor, tokens: Tensor) -> Tensor:
        """Return which tokens each query sees, bool [queries, tokens], from their positions."""
        seen = tokens <= queries[:, None]
        return seen if self.window is None else seen & (tokens > queries[:, None] - self.window)


class DenseAttention(Protocol):
    """Causal attention of several requests at once."""

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, lengths: Lengths, kind: AttentionKind) -> Tensor:
        """Attend with queries [T, Hq, D] to keys and values [S, H, D]. Requests follow each other.

        Returns [T, Hq, D] in the query's type.
        """


def attend_dense(query: Tensor, keys: Tensor, values: Tensor, lengths: Lengths, kind: AttentionKind) -> Tensor:
    """`DenseAttention` request by request, by our kernel or torch's fused attention, see `softmax.prefers_native`."""
    outs, q, s = [], 0, 0
    for n, tokens in zip(*lengths, strict=True):
        rows, key, value = (
            x.transpose(0, 1)[None] for x in (query[q : q + n], keys[s : s + tokens], values[s : s + tokens])
        )
        place = torch.arange(tokens, device=rows.device)
        mask = None if kind.sees_all(tokens) else kind.visible(place[tokens - n :], place)[None]
        out = attend_floats(rows, key, value, mask, kind.scaling, kind.softcap, kind.sink_logits)
        if out is None:
            out = _by_torch(rows, key, value, mask, kind).transpose(1, 2)
        outs.append(out[0])
        q, s = q + n, s + tokens
    return torch.cat(outs)


def _by_torch(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kind: AttentionKind) -> Tensor:
    """Attend with queries [1, Hq, q, D] to keys and values [1, H, S, D]. mask: bool [1, q, S], None for causal."""
    n, tokens = query.shape[2], key.shape[2]
    plain = kind.softcap is None and kind.sink_logits is None
    if mask is None and not (plain and n == tokens):
        place = torch.arange(tokens, device=query.device)
        mask = kind.visible(place[tokens - n :], place)[None]
    if plain:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=kind.scaling, enable_gqa=True
        )
    assert mask is not None
    return _with_lse(query, key, value, mask, kind)


def _with_lse(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, kind: AttentionKind) -> Tensor:
    """Attend with a softcap or sink logits, see `_by_torch`."""
    H = key.shape[1]
    rows = query.float().unflatten(1, (H, -1)).flatten(2, 3)
    found = softmax.attend_many(rows, key, value, mask, kind.scaling, kind.softcap)
    return kind.with_sinks(*found).unflatten(2, (query.shape[1] // H, -1)).flatten(1, 2).to(query.dtype)
