"""Spread of attention over the tokens of a prompt, from its own queries (`mixed` with `allot=prompt`).

The queries of the first three quarters of a call rank the tokens of these quarters, as `importance`
does. Queries of the last quarter show how much attention the ranked tokens receive later. Tokens that
they would read from a recent window do not count. A measurement of the model
(`calibration/attention_spread.py`) does the same with texts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tersekv.attention.importance import importances, joined_keys, rows_in_turn, tiles
from tersekv.attention.read import AttentionCall
from tersekv.cache.segments import STEPS
from tersekv.cache.store import Store
from tersekv.kernels import backends
from tersekv.tensors import plain

FEWEST = 64
"""Minimum number of queries of a call that show how attention spreads."""

QUERIES = 128
"""Number of later query positions observed, one query head of each group in turn."""


@plain
@torch.no_grad()
def importance_and_spread(
    store: Store, keys: Tensor, call: AttentionCall, again: int = 0
) -> tuple[Tensor, Tensor | None]:
    """Return the importance of tokens, see `importances`, and the spread of attention.

    The store has packed nothing yet.

    The spread is float32 [Hkv, STEPS + 1]: entry k is the sum of squared softmax weights of the k/STEPS
    most important tokens, mean over later queries and batch rows. It is None if there are too few queries.
    """
    q = call.query.shape[2] - again
    if q < FEWEST or keys.is_meta:
        return importances(store, keys, call, again)[-1], None
    early, sinks = 3 * q // 4, store.sinks.keys.shape[2]
    rank, importance = importances(store, keys, call, again, early)
    key = joined_keys(store, keys[:, :, : keys.shape[2] - again])
    last = store.num_tokens + early  # position of the first later query
    last -= min(store.policy.recent, (last - sinks) // 2)
    first = torch.full((len(key),), store.policy.sink_tokens(store.window), device=key.device)
    if call.mask is not None:
        seen = call.mask.any(dim=1)
        first = first + torch.where(seen.any(-1), seen.int().argmax(-1), 0).expand(len(key))
    received, queries = _later(key, call, early, q)
    hidden = (torch.arange(sinks, last, device=key.device) < first[:, None])[:, None]
    counted = (last - first.clamp(min=sinks)).clamp(min=0)
    sums = in_order(
        received[:, :, sinks:last].masked_fill(hidden, 0.0),
        rank[:, :, : last - sinks].masked_fill(hidden, float("-inf")),
        counted,
    )
    shows = (counted >= STEPS) & (queries > 0)
    if not bool(shows.any()):
        return importance, None
    return importance, (sums / queries.clamp(min=1)[:, None, None])[shows].mean(0)


def _later(key: Tensor, call: AttentionCall, early: int, q: int) -> tuple[Tensor, Tensor]:
    """Return Σ weight² of each token [B, Hkv, T] over queries of the call from `early` to `q`, and how
    many count in each row [B]. Those in the padding do not.
    """
    past = key.shape[2] - q
    at = torch.linspace(early, q - 1, min(QUERIES, q - early), device=key.device).long()
    rows, logits = rows_in_turn(call.query[:, :, at].float(), call.sink_logits, key.shape[1])
    counts = torch.ones((1, len(at)), dtype=torch.bool, device=key.device)
    if call.mask is None:  # all see the tokens up to the first of them
        seen = (torch.arange(past + early + 1, key.shape[2], device=key.device) <= (past + at)[:, None])[None]
    else:
        own = call.mask[:, at, : key.shape[2]]
        counts = own.gather(2, (past + at).expand(len(own), -1).unsqueeze(-1)).squeeze(2)
        seen = own & counts.unsqueeze(-1)
    received = key.new_zeros(key.shape[:3], dtype=torch.float32)
    for tile in tiles(key, 0, len(at)):
        own_logits = None if logits is None else logits[:, tile]
        received += backends.squared_weights(
            rows[:, :, tile], key, seen[:, tile], call.scaling, call.softcap, own_logits
        )
    return received, counts.sum(-1).expand(len(key))


def in_order(received: Tensor, rank: Tensor, tokens: Tensor | None = None) -> Tensor:
    """Return what the first k/STEPS of the tokens received, in order of rank, float32 [..., H, STEPS + 1].

    received, rank: [..., H, n]. tokens: int64 [...], number of tokens that count, which rank first; all by
    default.
    """
    ordered = received.gather(-1, rank.argsort(dim=-1, descending=True, stable=True))
    sums = torch.nn.functional.pad(ordered.cumsum(-1), (1, 0))
    steps = torch.arange(STEPS + 1, device=sums.device)
    count = torch.tensor(rank.shape[-1], device=sums.device) if tokens is None else tokens
    at = (steps * count[..., None] // STEPS).unsqueeze(-2).expand(*sums.shape[:-1], -1)
    return sums.gather(-1, at).float()
