"""Attention of prompts over unpacked tokens, in torch. Engines may have a faster one.

Shapes: T queries of n requests, S tokens of the same requests, Hq query heads, H KV heads, D head dim.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tersekv.kernels import softmax

QUERY_TILE = 256
"""Queries processed at a time with a softcap, which bounds the memory for scores."""


class Lengths(NamedTuple):
    """Numbers of queries and of tokens of each request. The queries are its last tokens."""

    queries: list[int]
    tokens: list[int]


class DenseAttention(Protocol):
    """Causal attention of several requests at once."""

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, lengths: Lengths, scaling: float, softcap: float | None
    ) -> Tensor:
        """Attend with queries [T, Hq, D] to keys and values [S, H, D]. Requests follow each other.

        Returns [T, Hq, D] in the query's type.
        """


def attend_dense(
    query: Tensor, keys: Tensor, values: Tensor, lengths: Lengths, scaling: float, softcap: float | None
) -> Tensor:
    """`DenseAttention` by torch's fused attention, request by request."""
    outs, q, s = [], 0, 0
    for n, tokens in zip(*lengths, strict=True):
        rows, key, value = (
            x.transpose(0, 1)[None] for x in (query[q : q + n], keys[s : s + tokens], values[s : s + tokens])
        )
        if softcap is not None:
            out = _capped(rows, key, value, scaling, softcap)
        elif n == tokens:
            out = torch.nn.functional.scaled_dot_product_attention(
                rows, key, value, is_causal=True, scale=scaling, enable_gqa=True
            )
        else:
            out = torch.nn.functional.scaled_dot_product_attention(
                rows, key, value, attn_mask=_causal(n, tokens, rows.device), scale=scaling, enable_gqa=True
            )
        outs.append(out[0].transpose(0, 1))
        q, s = q + n, s + tokens
    return torch.cat(outs)


def _causal(queries: int, tokens: int, device: torch.device) -> Tensor:
    """Return the mask bool [queries, tokens] of the last queries of a sequence."""
    place = torch.arange(tokens, device=device)
    return place <= place[tokens - queries :, None]


def _capped(query: Tensor, key: Tensor, value: Tensor, scaling: float, softcap: float) -> Tensor:
    """Attend with scores limited by a softcap: query [1, Hq, q, D], key and value [1, H, S, D]."""
    H, tokens = key.shape[1:3]
    q = query.shape[2]
    mask = _causal(q, tokens, query.device)
    parts = []
    for at in range(0, q, QUERY_TILE):
        rows = query[:, :, at : at + QUERY_TILE].float().unflatten(1, (H, -1)).flatten(2, 3)
        out, _ = softmax.attend_exact.reference(rows, key, value, mask[None, at : at + QUERY_TILE], scaling, softcap)
        parts.append(out.unflatten(2, (query.shape[1] // H, -1)).flatten(1, 2))
    return torch.cat(parts, dim=2).to(query.dtype)
