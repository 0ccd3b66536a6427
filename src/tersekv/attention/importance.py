"""Importance of tokens that are packed: attention that they receive in a second reading of the text.

Every query that was observed is moved behind the text: RoPE rotates it further by the number of
tokens. It then attends to all tokens, also to those that follow it. So a token counts
that the text comes back to later, and no token is too late to be seen. A token's importance is the
root mean square of its attention weights over the queries. Query heads of a KV head take turns.
With `reread=true` the model does read a prompt twice, and all queries of the second reading are
observed.

Models without RoPE, or with frequencies that change with the length, have queries where they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tersekv.attention.read import AttentionCall, grouped
from tersekv.cache.store import Store
from tersekv.kernels.softmax import softmax_weights
from tersekv.transforms.rope import Rope

QUERIES = 512
"""Number of query positions observed, spread over the call. Kept queries come before these. Of each
position one query head of a KV head's group is observed, in turn."""

TILE = 128
"""Number of query rows whose weights are in memory at a time."""


def importance(store: Store, keys: Tensor, call: AttentionCall, again: int = 0) -> Tensor:
    """Return the importance of the tokens in the tail and of new keys [B, Hkv, n, D], see `importances`."""
    return importances(store, keys, call, again)[-1]


@torch.no_grad()
def importances(
    store: Store, keys: Tensor, call: AttentionCall, again: int = 0, early: int | None = None
) -> list[Tensor]:
    """Return the importance of the tokens in the tail and of new keys [B, Hkv, n, D].

    The queries are those of the call, and with few of them also those that the store has kept.

    The results are float32 [B, Hkv, T]. Attention sinks of the store compete with these tokens, and
    tokens packed before do not. Padding has importance 0, and its queries do not count. Weights of a
    bfloat16 model are computed in bfloat16, which CPUs multiply several times faster. Sums of `TILE`
    rows are rounded to bfloat16, and added in float32.

    again: number of the last keys and queries that are a second reading of the others. Then all of
        its queries are observed, where they are: the one before a token's second reading often is the
        only one that attends to the token. The result is without these keys, which compete.
    early: number of the call's first queries. The importance that these alone give comes first then.
    """
    q, sinks = call.query.shape[2], store.sinks.keys
    key = joined_keys(store, keys)
    tokens, past = key.shape[2] - sinks.shape[2], store.num_tokens
    first = q - again if again else 0
    at = torch.linspace(first, q - 1, q - first if again else min(QUERIES, q), device=keys.device).long()
    query, later = call.query[:, :, at].float(), None
    ranked = store.ranked[0]
    kept = ranked.queries[:, :, : 0 if again else max(0, QUERIES - q)]
    if again:
        later = torch.arange(first, q, device=keys.device) > at[:, None]
    else:
        query = torch.cat([kept.float(), query], dim=2) if kept.shape[2] else query
    hidden, counts = None, None
    if call.mask is not None:
        seen = call.mask.any(dim=1)[:, -tokens:].expand(len(keys), -1)
        hidden = ~torch.nn.functional.pad(seen, (sinks.shape[2], 0), value=True)[:, None, None]
        itself = (past + at).expand(len(call.mask), -1).unsqueeze(-1)
        counts = call.mask[:, at].gather(2, itself).float().expand(len(keys), -1, -1)  # [B, queries, 1]
        counts = torch.nn.functional.pad(counts, (0, 0, kept.shape[2], 0), value=1.0)
    total = key.new_zeros(key.shape[:3], dtype=torch.float32)
    rows, logits = rows_in_turn(query, call.sink_logits, key.shape[1], every=bool(again))
    rows = rows if again else moved(rows, ranked.query_rope, past + keys.shape[2])
    rows, heads = rows.to(key.dtype), rows.shape[2] // query.shape[2]
    later, counts = (x if x is None else x.repeat_interleave(heads, dim=-2) for x in (later, counts))
    cut = 0 if early is None else (kept.shape[2] + int((at < first + early).sum())) * heads
    found = []
    for tile in (*_tiles(0, cut), *_tiles(cut, rows.shape[2])):
        if early is not None and tile.start == cut:
            found.append(total.clone())
        unseen = hidden if later is None else _and_later(hidden, later[tile], key.shape[2])
        weights = key_weights(rows[:, :, tile], key, call, None if logits is None else logits[:, tile], unseen)
        total += sum_of_rows(weights.square_(), None if counts is None else counts[:, tile])
    return [sums[:, :, sinks.shape[2] : sums.shape[2] - again].sqrt() for sums in (*found, total)]


def joined_keys(store: Store, keys: Tensor) -> Tensor:
    """Return the keys of sinks and window and new ones, in bfloat16 of a bfloat16 model, else in float32."""
    key = torch.cat([store.sinks.keys, store.recent.keys, keys.to(store.sinks.keys.dtype)], dim=2)
    return key if key.dtype == torch.bfloat16 else key.float()


def sum_of_rows(x: Tensor, counts: Tensor | None = None) -> Tensor:
    """Return Σ_i counts_i·x_i for x [B, H, n, T] and counts [1 or B, n, 1], [B, H, T]; counts are 1 by default.

    A product sums rows faster than a reduction over this dimension.
    """
    counted = x.new_ones((1, 1, 1, x.shape[2])) if counts is None else counts[:, None].mT.to(x.dtype)
    return torch.matmul(counted, x).squeeze(2)


def _tiles(start: int, stop: int) -> list[slice]:
    return [slice(at, min(stop, at + TILE)) for at in range(start, stop, TILE)]


def _and_later(hidden: Tensor | None, later: Tensor, tokens: int) -> Tensor:
    """Add to the hidden tokens those of the second reading that are later than each query.

    hidden: bool [B, 1, 1, tokens] or None. later: bool [queries, n], for the last n tokens.
    """
    whole = torch.nn.functional.pad(later, (tokens - later.shape[1], 0))
    return whole if hidden is None else hidden | whole


def rows_in_turn(
    query: Tensor, sink_logits: Tensor | None, kv_heads: int, every: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the rows [B, Hkv, n, D] of queries [B, Hq, n, D]: of each position one query head of the
    group, in turn. Also return the rows' sink logits [Hkv, n].

    every: return all query heads of each position instead, G·n rows, position by position.
    """
    heads = grouped(query, kv_heads)
    rows = torch.arange(query.shape[2] * (heads.shape[2] if every else 1), device=query.device)
    place, turn = rows // heads.shape[2] if every else rows, rows % heads.shape[2]
    logits = None if sink_logits is None else sink_logits.float().view(kv_heads, -1)[:, turn]
    return heads[:, :, turn, place], logits


def moved(query: Tensor, rope: Rope | None, tokens: int) -> Tensor:
    """Return queries [B, H, n, D] after RoPE, rotated further by so many tokens."""
    if rope is None or rope.varies:
        return query
    cos, sin = rope.cos_sin(tokens, 1, tokens + 1, query.device)
    length = torch.hypot(cos, sin)  # some models scale keys and queries by a factor with RoPE
    return rope.apply(query, (cos / length)[None], (sin / length)[None])


def key_weights(
    rows: Tensor, keys: Tensor, call: AttentionCall, logits: Tensor | None, hidden: Tensor | None
) -> Tensor:
    """Return softmax weights [B, Hkv, n, T] of queries [B, Hkv, n, D] over all keys.

    logits: sink logits [Hkv, n], or None.
    """
    scores = torch.matmul(rows * call.scaling, keys.transpose(-1, -2))
    return softmax_weights(scores, call.softcap, hidden, None if logits is None else logits[None, :, :, None])
