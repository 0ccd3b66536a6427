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
from tersekv.kernels import backends
from tersekv.tensors import plain
from tersekv.transforms.rope import Rope

QUERIES = 512
"""Number of query positions observed, spread over the call. Kept queries come before these. Of each
position one query head of a KV head's group is observed, in turn."""

LEAST_ROWS, MOST_WEIGHTS = 64, 1 << 22
"""Query rows whose weights are summed at a time: at most so many weights, but at least so many rows."""


def importance(store: Store, keys: Tensor, call: AttentionCall, again: int = 0) -> Tensor:
    """Return the importance of the tokens in the tail and of new keys [B, Hkv, n, D], see `importances`."""
    return importances(store, keys, call, again)[-1]


@plain
@torch.no_grad()
def importances(
    store: Store, keys: Tensor, call: AttentionCall, again: int = 0, early: int | None = None
) -> list[Tensor]:
    """Return the importance of the tokens in the tail and of new keys [B, Hkv, n, D].

    The queries are those of the call, and with few of them also those that the store has kept.

    The results are float32 [B, Hkv, T]. Attention sinks of the store compete with these tokens, and
    tokens packed before do not. Padding has importance 0, and its queries do not count.

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
    seen = counts = None
    if call.mask is not None:
        seen = call.mask.any(dim=1)[:, -tokens:].expand(len(keys), -1)
        seen = torch.nn.functional.pad(seen, (sinks.shape[2], 0), value=True)[:, None]
        itself = (past + at).expand(len(call.mask), -1).unsqueeze(-1)
        counts = call.mask[:, at].gather(2, itself).expand(len(keys), -1, -1)  # [B, queries, 1]
        counts = torch.nn.functional.pad(counts, (0, 0, kept.shape[2], 0), value=True)
    total = key.new_zeros(key.shape[:3], dtype=torch.float32)
    rows, logits = rows_in_turn(query, call.sink_logits, key.shape[1], every=bool(again))
    rows = rows if again else moved(rows, ranked.query_rope, past + keys.shape[2])
    heads = rows.shape[2] // query.shape[2]
    later, counts = (x if x is None else x.repeat_interleave(heads, dim=-2) for x in (later, counts))
    cut = 0 if early is None else (kept.shape[2] + int((at < first + early).sum())) * heads
    found = []
    for tile in (*tiles(key, 0, cut), *tiles(key, cut, rows.shape[2])):
        if early is not None and tile.start == cut:
            found.append(total.clone())
        mask = key.new_empty((1, 1, 0), dtype=torch.bool) if later is None else ~later[tile][None]
        if seen is not None and counts is not None:
            whole = torch.nn.functional.pad(mask, (key.shape[2] - mask.shape[2], 0), value=True)
            mask = whole & seen & counts[:, tile]
        own = None if logits is None else logits[:, tile]
        total += backends.squared_weights(rows[:, :, tile], key, mask, call.scaling, call.softcap, own)
    return [sums[:, :, sinks.shape[2] : sums.shape[2] - again].sqrt() for sums in (*found, total)]


def joined_keys(store: Store, keys: Tensor) -> Tensor:
    """Return the keys of sinks and window and new ones, in bfloat16 of a bfloat16 model, else in float32."""
    key = torch.cat([store.sinks.keys, store.recent.keys, keys.to(store.sinks.keys.dtype)], dim=2)
    return key if key.dtype == torch.bfloat16 else key.float()


def tiles(key: Tensor, start: int, stop: int) -> list[slice]:
    """Return slices of query rows whose weights of keys [B, Hkv, T, D] are summed at a time."""
    step = max(LEAST_ROWS, MOST_WEIGHTS // max(1, key[..., 0].numel()))
    return [slice(at, min(stop, at + step)) for at in range(start, stop, step)]


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
