"""Loss of errors in a prompt's keys and values, as its own queries show it. No gradients are needed.

A query q gives token n the attention weight p_n, and its output is o = Σ_n p_n·v_n. To first order,

- an error e in the key k_n changes o by scaling·p_n·(q·e)·(v_n − o),
- an error e in the value v_n changes o by p_n·e.

Squared and summed over the query heads of a KV head and over some queries, with independent errors:

- keys: token n has the weight Σ_q p_n²·|v_n − o|², and channel d the metric Σ_q w_q·q_d², with
  w_q = scaling²·Σ_n p_n²·|v_n − o|²;
- values: token n has the weight Σ_q p_n².

Keys with two rates have the whole metric Σ_q w_q·q·qᵀ. At a low rate, errors are as large as the keys' own
variance, which is small along the mean query of some heads: there the diagonal lets through errors that change a
score by 25 (layer 0 of Qwen2.5).

Codecs that observe scores get another loss, `score_loss`, from all queries of the second half.

Tokens that stay exact, or are hidden, have weight 0. Attention functions do not see the projection
of outputs to the residual stream, so it is left out; so is the slope of a softcap.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tersekv.attention.read import AttentionCall, grouped
from tersekv.cache.coding import own_sinks
from tersekv.cache.segments import latent_key
from tersekv.cache.store import Store
from tersekv.kernels import backends
from tersekv.tensors import cached_table
from tersekv.threads import one_thread
from tersekv.transforms.moments import Observes, TokenLoss, score_loss

QUERIES = 32
"""Number of query positions observed, from the second half of a call. Later ones see more tokens."""

PRODUCTS = 4
"""An element of the keys costs about as much here as so many elements cost packing."""

MOST_WEIGHTS, TILE = 1 << 20, 16
"""Most elements of weights that are held at a time, but of at least TILE query positions."""


def prompt_loss(
    store: Store, keys: Tensor, values: Tensor, call: AttentionCall
) -> tuple[TokenLoss | None, TokenLoss | None]:
    """Return the loss of errors in the keys and in the values of all tokens so far.

    They are of interest if appending these keys and values [B, Hkv, n, D] fits a codec that observes
    queries, see `store.observes`.
    """
    if store.num_tokens:
        held = store.decoded(keys.dtype)  # all of them are exact, in every process
        held = (latent_key(*held), held[0]) if store.latent else held
        keys, values = torch.cat([held[0], keys], dim=2), torch.cat([held[1], values], dim=2)
    kinds = store.keys.codec.observes, store.values.codec.observes
    with one_thread(PRODUCTS * keys.numel()):
        of_keys, of_values = losses_for(
            kinds, keys, values, call, _coded(store, call, keys.shape[2]), bool(store.ranked)
        )
    if store.latent and of_keys is not None and of_keys.metric is not None:
        own = slice(store.keys.head_dim)  # of the latents, without the rotated channels
        metric = of_keys.metric[..., own]
        of_keys = of_keys._replace(metric=metric if metric.dim() == 3 else metric[:, :, own])
    return of_keys, of_values


@torch.no_grad()
def losses_for(
    kinds: tuple[Observes | None, Observes | None],
    keys: Tensor,
    values: Tensor,
    call: AttentionCall,
    coded: Tensor,
    whole: bool = False,
) -> tuple[TokenLoss | None, TokenLoss | None]:
    """Return the loss that the codecs of keys and values observe, None for one that observes nothing.

    kinds: of both codecs, see `Codec.observes`. keys, values, coded, whole: see `observed_loss`.
    """
    found: dict[str | None, tuple[TokenLoss | None, TokenLoss | None]] = {None: (None, None)}
    if "loss" in kinds:
        found["loss"] = observed_loss(keys, values, call, coded, whole)
    if "scores" in kinds:
        seen = call.query[:, :, call.query.shape[2] // 2 :]
        of_keys, of_values = score_loss(keys.float(), grouped(seen, keys.shape[1]).flatten(2, 3).float())
        weights = of_values.weights * coded[:, None]
        found["scores"] = of_keys._replace(weights=of_keys.weights * coded[:, None]), TokenLoss(weights)
    return found[kinds[0]][0], found[kinds[1]][1]


@torch.no_grad()
def observed_loss(
    keys: Tensor, values: Tensor, call: AttentionCall, coded: Tensor, whole: bool = False
) -> tuple[TokenLoss, TokenLoss]:
    """Return the loss of errors in keys and values [B, Hkv, T, D], as queries of the call show it.

    The call's queries are those of the latest tokens.

    coded: float32 [B or 1, T], 1 for tokens that are coded, 0 for exact ones.
    whole: return the metric of keys [B, Hkv, D, D], not only its diagonal [B, Hkv, D].
    """
    keys, values, q = keys.detach(), values.detach(), call.query.shape[2]
    H, T = keys.shape[1:3]
    past = T - q
    at = _positions(q)
    sums: list[Tensor] = []
    for tile in at.split(max(TILE, MOST_WEIGHTS // (call.query[:, :, 0, 0].numel() * T))):
        query = grouped(call.query[:, :, tile], H)
        sinks = (
            None if call.sink_logits is None else call.sink_logits.float().view(H, -1).repeat_interleave(len(tile), 1)
        )
        query = query.flatten(2, 3).float()
        if call.mask is None:  # all positions see the tokens up to the first of them
            last = torch.arange(past + int(tile[0]) + 1, T, device=keys.device)
            mask = (last <= (past + tile[:, None]).to(keys.device))[None]
        else:
            mask = call.mask[:, tile]
        found = backends.observed_loss(query, keys, values, mask, coded, call.scaling, call.softcap, sinks)
        share = found[2].unsqueeze(-1)
        new = [*found[:2], (share * query).mT @ query if whole else (share * query.square()).sum(2)]
        sums = [a.add_(b) for a, b in zip(sums, new, strict=True)] if sums else new
    return TokenLoss(sums[0], call.scaling**2 * sums[2]), TokenLoss(sums[1])


@cached_table
def _positions(queries: int) -> Tensor:
    """Return the positions of the queries that are observed, int64 on the CPU, to wait for no device."""
    return torch.linspace(queries // 2, queries - 1, min(QUERIES, queries - queries // 2)).long()


def _coded(store: Store, call: AttentionCall, tokens: int) -> Tensor:
    """Return float32 [B, tokens]: 0 for sinks, which stay exact, else 1."""
    sinks = store.policy.sink_tokens(store.window)
    coded = torch.ones(call.query.shape[0], tokens, device=call.query.device)
    if call.mask is None:
        coded[:, :sinks] = 0
        return coded
    seen = call.mask.any(dim=1)
    padding = torch.where(seen.any(-1), seen.int().argmax(-1), 0)
    if store.padding is None and not store.deferred:
        padding = torch.zeros_like(padding)  # a sliding window hides tokens, too
    elif store.padding is not None:
        padding = store.padding
    return coded.scatter_(1, own_sinks(padding, sinks).clamp(max=tokens - 1), 0)
