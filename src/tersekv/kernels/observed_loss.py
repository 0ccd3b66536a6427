"""The loss of errors in keys and values that queries show, and squared attention weights: contracts and torch
references.

Shapes: B batch, H key-value heads, T tokens, R query rows per key-value head (row g·q + i for head g of
its group and position i of q), D and Dv head dims of keys and values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tersekv.kernels.registry import operator
from tersekv.kernels.softmax import softmax_weights


def _fake(query: Tensor, keys: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(keys.shape[:3]), query.new_empty(keys.shape[:3]), query.new_empty(query.shape[:3])


@operator(
    "(Tensor query, Tensor keys, Tensor values, Tensor mask, Tensor counts, float scaling, float? softcap, "
    "Tensor? sinks) -> (Tensor, Tensor, Tensor)",
    _fake,
)
def observed_loss(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    counts: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over softmax weights p of rows with outputs o, see `attention/prompt_loss.py`.

    Args:
        query: float32 [B, H, R, D]. keys, values: float [B, H, T, D] and [B, H, T, Dv].
        mask: bool [1 or B, q, n], True where a position sees one of the last n tokens. It sees all before them.
        counts: float32 [1 or B, T], factors of tokens.
        scaling, softcap: see `attend_packed`.
        sinks: float32 [H, R], scores of a token without value, or None.

    Returns:
        counts_t·Σ_r p_rt²·|v_t − o_r|² and counts_t·Σ_r p_rt², float32 [B, H, T], and
        Σ_t counts_t·p_rt²·|v_t − o_r|², float32 [B, H, R].
    """
    values = values.to(query.dtype)
    p = _weights(query, keys, mask, scaling, softcap, sinks)
    out = torch.matmul(p, values)
    # |v − o|² = |v|² − 2·v·o + |o|²
    lengths = values.square().sum(-1).unsqueeze(2)
    far = torch.add(lengths, torch.matmul(out, values.transpose(-1, -2)), alpha=-2)
    far += out.square().sum(-1, keepdim=True)
    squared = p.square_().mul_(counts[:, None, None])
    of_values = squared.sum(2)
    lost = squared.mul_(far.clamp_(min=0))
    return lost.sum(2), of_values, lost.sum(-1)


def _sums(query: Tensor, keys: Tensor, *rest: Any) -> Tensor:
    return query.new_empty(keys.shape[:3])


@operator("(Tensor query, Tensor keys, Tensor mask, float scaling, float? softcap, Tensor? sinks) -> Tensor", _sums)
def squared_weights(
    query: Tensor, keys: Tensor, mask: Tensor, scaling: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Σ_r p_rt² over softmax weights p of rows, float32 [B, H, T].

    Args: see `observed_loss`. Scores of bfloat16 keys may be computed in bfloat16.
    """
    return _weights(query, keys, mask, scaling, softcap, sinks).square_().sum(2)


def _weights(
    query: Tensor, keys: Tensor, mask: Tensor, scaling: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    scores = torch.matmul(query * scaling, keys.to(query.dtype).transpose(-1, -2))
    hidden = ~mask.repeat(1, query.shape[2] // mask.shape[1], 1)[:, None] if mask.shape[2] else None
    return softmax_weights(scores, softcap, hidden, None if sinks is None else sinks[None, ..., None])
