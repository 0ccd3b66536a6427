"""Left-padded batches: rows whose first tokens stand at different positions."""

from __future__ import annotations

import torch
from torch import Tensor


def own_sinks(padding: Tensor, sinks: int) -> Tensor:
    """Positions [B, sinks] of each row's own first tokens; padding int64 [B]: leading positions without a token."""
    return padding[:, None] + torch.arange(sinks, device=padding.device)


def without_padding(x: Tensor, padding: Tensor, sinks: int) -> Tensor:
    """All tokens so far, [B, H, T, D], ready to be packed: what stands in the padding is replaced by the row's last
    token, so that neither scales nor fitted channels see it, and the first `sinks` places hold each row's own first
    tokens."""
    hidden = (torch.arange(x.shape[2], device=x.device) < padding[:, None])[:, None, :, None]
    x = torch.where(hidden, x[:, :, -1:], x)
    if sinks == 0:
        return x
    index = own_sinks(padding, sinks)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1])
    return torch.cat([x.gather(2, index), x[:, :, sinks:]], dim=2)
