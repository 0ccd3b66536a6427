"""Softmax functions that the references share: attention from raw scores, dense attention, merging
by log-sum-exp."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from tersekv.kernels import cpu
from tersekv.kernels.registry import operator
from tersekv.tensors import last_contiguous

FUSED_ROWS = 32
"""Minimum number of query rows for torch's fused attention."""

MOST_SCORES = 1 << 23
"""Most scores, or elements of a mask of floats, that attention of many queries holds at a time."""


def shows_all(mask: Tensor) -> bool:
    """Return `mask.all()`. torch is up to 40 times faster on bytes than on bools."""
    return not mask.numel() or bool(mask.view(torch.uint8).amin())


def shows_any(mask: Tensor) -> bool:
    """Return `mask.any()`, see `shows_all`."""
    return mask.numel() > 0 and bool(mask.view(torch.uint8).amax())


def softmax_weights(
    scores: Tensor, softcap: float | None, hidden: Tensor | None, sink_logits: Tensor | None = None
) -> Tensor:
    """Return softmax weights of scores [..., T], which may be changed. A row that sees no token has weights 0.

    hidden: bool, which of the last tokens, or of all, have no weight, broadcast to their scores; None for none.
    sink_logits: score of a token without value, broadcast to [..., 1], or None.
    """
    tokens = scores.shape[-1]
    scores = _capped(scores, softcap)
    if hidden is not None:
        scores[..., tokens - hidden.shape[-1] :].masked_fill_(hidden, float("-inf"))
    if sink_logits is not None:
        own = sink_logits.to(scores.dtype).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, own], dim=-1)
    weights = scores.softmax(-1)
    sees_some = hidden is None or hidden.shape[-1] < tokens
    return (weights if sees_some else weights.nan_to_num(0.0))[..., :tokens]


def attend_scores(
    scores: Tensor, value: Tensor, mask: Tensor | None, scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attention from unscaled scores [B, H, R, T] and values [B, H, T, D], both float32.

    `mask` is bool [B, q, T], or [B, H, q, T] if heads differ, with R % q == 0 and row r on mask row
    r % q. Returns out [B, H, R, D] and lse [B, H, R]; a row that sees no token has out 0 and lse
    -inf.
    """
    scores = _masked(_capped(scores * scaling, softcap), mask)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.where(lse.isneginf(), 0.0, lse)[..., None])
    return torch.matmul(weights, value), lse


def attend_many(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attention of many query rows over decoded or exact tokens.

    query: float32 or bfloat16 [B, H, R, D]; key [B, H, T, D] and value [B, H, T, Dv] of any float
    dtype. Mask, scaling, softcap, returns: see `attend_scores`.

    Where `prefers_native`, the kernel of `attend_exact` computes it. Else torch's fused attention does on a CPU, in the
    query's dtype, if Dv ≤ D, and neither a softcap nor a gradient is needed. It never holds the scores of all rows. A
    mask or scores are made for some rows at a time.
    """
    if mask is not None and shows_all(mask):
        mask = None
    if prefers_native(query, key, value):
        every = None if mask is None else mask.expand(len(query), *mask.shape[1:])
        if (found := attend_exact.direct(query, key, value, every, scaling, softcap)) is not None:
            return found[0], found[1]
    fused = _is_fused(query, key, value, softcap) and query.shape[2] >= FUSED_ROWS and key.shape[2] > 0
    attend = _attend_fused if fused else _attend_composed
    R, T = query.shape[2], key.shape[2]
    q = R if mask is None or mask.shape[-2] == 1 else mask.shape[-2]
    held = (0 if mask is None else mask[0].numel()) if fused else len(query) * query.shape[1] * R * T
    step = max(1, q * MOST_SCORES // max(1, held))
    if step >= q:
        return attend(query, key, value, mask, scaling, softcap)
    parts: list[list[Tensor]] = []
    for rows in query.unflatten(2, (-1, q)).split(step, dim=3):
        own = mask
        if mask is not None and mask.shape[-2] > 1:
            first = sum(part[1].shape[3] for part in parts)
            own = mask[..., first : first + rows.shape[3], :]
        found = attend(rows.flatten(2, 3), key, value, own, scaling, softcap)
        parts.append([x.unflatten(2, (R // q, -1)) for x in found])
    out, lse = (torch.cat(found, dim=3).flatten(2, 3) for found in zip(*parts, strict=True))
    return out, lse


def dtype_of_products(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of products of many queries: bfloat16 if a model of this dtype and the CPU have it, else
    float32.
    """
    return torch.bfloat16 if dtype == torch.bfloat16 and device.type == "cpu" and _fast_bfloat16() else torch.float32


def prefers_native(query: Tensor, *others: Tensor) -> bool:
    """True if our kernel attends with many queries faster than torch's fused attention: with AVX2, AVX-512 or AMX.

    It has no gradients. others: keys and values.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, *others)):
        return False
    return query.device.type == "cpu" and cpu.why_not_built() is None and cpu.isa() != "scalar"


@functools.cache
def _fast_bfloat16() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def attend_causal(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor] | None:
    """Attention of grouped queries [B, H, G, q, D] over their own q tokens, or None if torch's fused
    attention does not compute it. Others: see `attend_many`.
    """
    return _of_groups(query, key, value, None, scaling, True) if _is_fused(query, key, value, softcap) else None


def _is_fused(query: Tensor, key: Tensor, value: Tensor, softcap: float | None) -> bool:
    """True if torch's fused attention computes it. Its log-sum-exp, which merging needs, has no gradient."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        return False
    return query.device.type == "cpu" and softcap is None and query.shape[-1] >= value.shape[-1]


def _flash(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scaling: float, causal: bool = False
) -> tuple[Tensor, Tensor]:
    batch = (len(query), query.shape[1], -1, -1)
    Dv = value.shape[-1]
    if Dv < query.shape[-1]:  # torch's kernel takes equal sizes alone
        value = functional.pad(value, (0, query.shape[-1] - Dv))
    # torch does not check strides here
    operands = [last_contiguous(x.to(query.dtype).expand(batch)) for x in (query, key, value)]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *operands, is_causal=causal, attn_mask=bias, scale=scaling
    )
    return out[..., :Dv], lse


def _attend_fused(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    if mask is None:  # all rows of a head read its keys together
        out, lse = _flash(query, key, value, None, scaling)
        return out.float(), lse
    return _of_groups(query.unflatten(2, (-1, mask.shape[-2])), key, value, mask, scaling, False)


def _of_groups(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention of grouped queries [B, H, G, q, D] by torch's fused attention. Its batch are the queries of a group,
    which share their keys, values and mask without copies.
    """
    parts = []
    for b, queries in enumerate(query):
        bias, unseen = (None, None) if mask is None else _bias(mask[b if len(mask) > 1 else 0], query)
        keys, values = (x[b : b + 1] if len(x) > 1 else x for x in (key, value))
        out, lse = _flash(queries.transpose(0, 1), keys, values, bias, scaling, causal)
        out = out.float()
        if unseen is not None:
            out.masked_fill_(unseen.unsqueeze(-1), 0.0)
            lse.masked_fill_(unseen, float("-inf"))
        parts.append([x.transpose(0, 1).flatten(1, 2).unsqueeze(0) for x in (out, lse)])
    out, lse = parts[0] if len(parts) == 1 else (torch.cat(x) for x in zip(*parts, strict=True))
    return out, lse


def _bias(mask: Tensor, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return what is added to scores, [1, 1 or H, q, T], for a mask [q, T] or [H, q, T] of one batch row, and the
    queries that see nothing, or None. These see all here, because no softmax has only infinite scores.
    """
    unseen = mask.view(torch.uint8).amax(-1) == 0
    some = bool(unseen.any())
    shown = mask | unseen.unsqueeze(-1) if some else mask
    bias = torch.where(shown, like.new_zeros(()), like.new_full((), float("-inf")))
    return bias.view(1, -1, *mask.shape[-2:]), unseen if some else None


def _attend_composed(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    scores = torch.matmul(query.float(), key.float().transpose(-1, -2))
    return attend_scores(scores, value.float(), mask, scaling, softcap)


def score_bias(mapped: Tensor, correction: Tensor, scaling: float) -> Tensor:
    """Return scaling²·Σ_d mapped_d²·correction_d, float32 [B, H, R], added to all scores of a row.

    mapped: query in the components of the coded vectors, float32 [B, H, R, ≥ D]; further channels
    are ignored. correction: float32 [1 or B, H, D], see `cache/lost_variance.py`.
    """
    squares = mapped[..., : correction.shape[-1]].square()
    return scaling**2 * torch.matmul(squares, correction.unsqueeze(-1)).squeeze(-1)


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def _masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return scores
    return scores.masked_fill(~_mask_of_rows(mask, scores.shape[2]), float("-inf"))


def _mask_of_rows(mask: Tensor, rows: int) -> Tensor:
    """Return the mask of each of R rows: [B, q, T] or [B, H, q, T] -> [B, 1 or H, R, T]."""
    B, H, q, T = (mask if mask.dim() == 4 else mask[:, None]).shape
    return mask.reshape(B, H, 1, q, T).expand(B, H, rows // q, q, T).reshape(B, H, -1, T)


def attend_weighted(
    scores: Tensor,
    value: Tensor | None,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
    numerator: Tensor | None,
    denominator: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Attention over tokens that represent several others, with log-weights a (numerator) and b
    (denominator) [B, H, T].

    Scores, value, mask, scaling, softcap: see `attend_scores`. Returns Σ e^{s+a}·v / Σ e^{s+a}
    [B, H, R, D] with log Σ e^{s+a} [B, H, R], and log Σ e^{s+b} [B, H, R]. A result is None if its
    weights are None. Nothing overflows, because only differences to the largest score are
    exponentiated.
    """
    out = above = below = None
    if numerator is not None:
        assert value is not None
        cap = _capped(scores * scaling, softcap) + numerator.unsqueeze(2)
        out, above = attend_scores(cap, value, mask, 1.0, None)
    if denominator is not None:
        cap = _capped(scores * scaling, softcap) + denominator.unsqueeze(2)
        below = torch.logsumexp(_masked(cap, mask), dim=-1)
    return out, above, below


@operator()
def attend_exact(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attention over unpacked tokens: query float32 [B, H, R, D], key and value [B, H, T, D] of any
    float dtype.

    The two leading axes and T of key and value may have any stride. Mask, scaling, softcap,
    returns: see `attend_scores`.
    """
    scores = torch.matmul(query, key.float().transpose(-1, -2))
    return attend_scores(scores, value.float(), mask, scaling, softcap)


def _fake_merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    return torch.empty_like(outs[0]), torch.empty_like(lses[0])


@operator("(Tensor[] outs, Tensor[] lses) -> (Tensor, Tensor)", _fake_merge)
def merge_segments(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge attention over disjoint sets of tokens: outs [B, H, R, D] and lses [B, H, R] to one out
    and one lse.

    out = Σ_s e^{lse_s}·out_s / Σ_s e^{lse_s}; a row that no segment sees has out 0 and lse -inf.
    """
    if len(outs) == 1:
        return outs[0].clone(), lses[0].clone()  # operators must not return their arguments
    stacked = torch.stack(lses)
    lse = torch.logsumexp(stacked, dim=0)
    weights = torch.exp(stacked - torch.where(lse.isneginf(), 0.0, lse))
    return torch.einsum("sbhr,sbhrd->bhrd", weights, torch.stack(outs)), lse
