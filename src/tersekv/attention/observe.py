"""Sums over the attention of a call's queries, for token policies and for codecs fitted on prompts.

Policies get attention weights summed per token. Codecs get the loss of errors in keys and values
(`attention/prompt_loss.py`). They see queries only through this module.

Softmax weights are computed for a few queries at a time and reduced at once. The full matrix of all
queries by all tokens is never in memory.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tersekv.attention.importance import importance
from tersekv.attention.prompt_loss import prompt_loss
from tersekv.attention.read import AttentionCall, grouped
from tersekv.attention.spread import importance_and_spread
from tersekv.cache.segments import UNSEEN, Observed, PackedSegment
from tersekv.cache.store import LEAST_QUERIES, Store
from tersekv.errors import UserError
from tersekv.kernels.attend import Masks
from tersekv.kernels.softmax import softmax_weights

OBSERVED_QUERIES = 64
"""Number of query positions whose weights are in memory at a time."""

Held = tuple[Tensor, Tensor]


def observe(store: Store, keys: Tensor, values: Tensor, call: AttentionCall, again: int = 0) -> Observed:
    """Return the sums that the store needs before it appends keys and values [B, Hkv, n, D].

    again: number of the last tokens that are a second reading of the others, and are not appended.
    """
    n, q, both = keys.shape[2] - again, call.query.shape[2] - again, (keys, call)
    if again:
        keys, values, call = keys[:, :, :n], values[:, :, :n], call.without_last(again)
    ranks = spread = None
    if store.ranks(n):
        if store.policy.waits:
            ranks, spread = importance_and_spread(store, *both, again)
        else:
            ranks = importance(store, *both, again)
    losses = prompt_loss(store, keys, values, call) if q >= LEAST_QUERIES and store.observes(n) else None
    votes = _votes(store, keys, call) if store.by_head and store.observed(q) else None
    if store.keeps_queries and votes is None:
        store.keep(call.query, call.mask is not None)
    return UNSEEN if ranks is losses is votes is None else Observed(votes, ranks, losses, spread)


@torch.no_grad()
def _votes(store: Store, keys: Tensor, call: AttentionCall) -> Tensor | None:
    """Return the attention that tokens receive from the observed latest queries, as votes.

    Votes are float32 [B, Hkv, held + n]: first the tokens held, in the store's order, then the new
    keys [B, Hkv, n, D]. They are softmax weights summed over queries and averaged over the query
    heads of a KV head. Queries in the padding do not count.
    """
    q = call.query.shape[2]
    n = store.observed(q)
    if (waiting := store.waiting_queries()) is not None:  # no mask is known for these, and no padding is among them
        call = replace(call, query=torch.cat([waiting.to(call.query.dtype), call.query], dim=2), mask=None)
        n, q = n + waiting.shape[2], q + waiting.shape[2]
    total = store.num_tokens + keys.shape[2]
    first = total - q  # position of the first query
    votes, held = None, _held(store, keys)
    for start in range(q - n, q, OBSERVED_QUERIES):
        tile = slice(start, min(q, start + OBSERVED_QUERIES))
        weights = _weights(store, held, call, total, tile)
        if call.mask is not None:  # a query that does not see itself is in the padding
            itself = torch.arange(first + start, first + tile.stop, device=keys.device)
            is_token = call.mask[:, tile].gather(2, itself.expand(len(call.mask), -1).unsqueeze(-1))
            weights = weights * is_token[:, None, None]
        added = weights.sum(3).mean(2)
        votes = added if votes is None else votes + added
    return votes


def kept_weights(store: Store, keys: Tensor, call: AttentionCall) -> Tensor:
    """Return softmax weights [B, Hq, q, past + new tokens] in the query's dtype.

    Evicted tokens have weight 0.

    Raises:
        UserError: the store holds samples, which have no weights per token.
    """
    if store.estimates:
        raise UserError(
            "output_attentions: a policy that samples tokens has no weights per token; leave the option out"
        )
    held = _held(store, keys)
    weights = _weights(store, held, call, store.num_tokens + keys.shape[2], slice(0, call.query.shape[2]))
    B, H, G, q, _ = weights.shape
    index = held[1].clamp(min=0)[:, :, None, None].expand(-1, -1, G, q, -1).long()
    out = weights.new_zeros((B, H, G, q, store.num_tokens + keys.shape[2])).scatter_add_(-1, index, weights)
    return out.flatten(1, 2).to(call.query.dtype)


def _held(store: Store, keys: Tensor) -> Held:
    """Return keys float32 [B, H, T, D] and positions [B, H, T] of the tokens held, in order, and of new ones."""
    parts = []
    for segment in store.held():
        key = segment.keys.floats(torch.float32) if isinstance(segment, PackedSegment) else segment.keys.float()
        place = segment.where if isinstance(segment, PackedSegment) else segment.positions
        if isinstance(place, int):
            place = _span(store, place, key.shape[2])
        assert isinstance(place, Tensor)
        parts.append((key, place))
    parts.append((keys.float(), _span(store, store.num_tokens, keys.shape[2])))
    joined, positions = (torch.cat(each, dim=2) for each in zip(*parts, strict=True))
    return joined, positions


def _span(store: Store, first: int, n: int) -> Tensor:
    """Return positions first to first + n, expanded to all heads."""
    positions = torch.arange(first, first + n, dtype=torch.int32, device=store.device)
    return positions.expand(store.batch_size, store.kv_heads, -1)


def _weights(store: Store, held: Held, call: AttentionCall, total: int, tile: slice) -> Tensor:
    """Return softmax weights of one tile of queries, float32 [B, Hkv, G, tile, held + n]. total: tokens so far."""
    query, (key, positions) = grouped(call.query[:, :, tile], store.kv_heads), held
    scores = torch.matmul(query, key.unsqueeze(2).transpose(-1, -2)) * call.scaling
    mask = call.mask[:, tile] if call.mask is not None else _causal(store, total, call.query.shape[2], tile)
    seen = Masks(mask, store.hidden).at(positions, positions.shape[2])
    assert seen is not None
    logits = None if call.sink_logits is None else call.sink_logits.view(1, *query.shape[1:3], 1, 1)
    return softmax_weights(scores, call.softcap, ~seen.unsqueeze(2), logits)


def _causal(store: Store, total: int, q: int, tile: slice) -> Tensor:
    tokens = torch.arange(total, device=store.device)
    mask = (tokens <= tokens[total - q :][tile, None])[None]  # of the tile alone: that of all queries is large
    if store.padding is not None:
        mask = mask & (tokens >= store.padding[:, None])[:, None]
    return mask.expand(store.batch_size, -1, -1)
