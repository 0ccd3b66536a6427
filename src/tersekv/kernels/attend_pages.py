"""Paged attention: packed tokens are in pages of one pool, in any order; contract and torch
reference.

Shapes: B batch, H key-value heads, R query rows per head, D head dim, P pages per row, p tokens per
page, S pages in the pool; T = P·p tokens of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tersekv.kernels.attend_packed import Operand, decoded
from tersekv.kernels.registry import operator
from tersekv.kernels.softmax import attend_scores


@operator()
def attend_pages(
    query: Tensor,
    keys: Operand,
    values: Operand,
    pages: Tensor,
    page_tokens: int,
    mask: Tensor,
    scaling: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """softmax(scaling · q·K̂ᵀ)·V̂ with its log-sum-exp, over the pages of each row in their order.

    Args:
        query: float32 [B, H, R, D], contiguous.
        keys, values: the pool, S·p tokens. Tensors are [B, H, …]; the first axis usually has stride
            0, because all rows share the pool. A page is a whole number of blocks.
        pages: int32 [B, P]. Entry [b, i] is the page, 0 to S − 1, with the tokens of row b from i·p
            on; −1: none.
        mask: bool [B, q, T] with R % q == 0 (row r uses mask row r % q), True where a token is
            visible. Never True in a page −1.
        scaling: factor on the scores. softcap: s -> softcap·tanh(s/softcap), or None.

    Returns:
        out float32 [B, H, R, Dv] and lse float32 [B, H, R]; a row that sees no token has out 0 and
        lse -inf.
    """
    place = pages.long().clamp_min(0).unsqueeze(-1) * page_tokens + torch.arange(page_tokens, device=pages.device)
    key, value = (_rows(decoded(side), place.flatten(1)) for side in (keys, values))
    return attend_scores(query @ key.transpose(-1, -2), value, mask, scaling, softcap)


def _rows(x: Tensor, place: Tensor) -> Tensor:
    """Gather the tokens with indices `place` [B, T] from x [B, H, S·p, D]."""
    return x.gather(2, place[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
