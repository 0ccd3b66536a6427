"""Causal masks."""

from __future__ import annotations

import torch
from torch import Tensor


def causal(q: int, T: int, device: torch.device) -> Tensor:
    """Return the causal mask, bool [1, q, T], with query i at position T − q + i."""
    return (torch.arange(T, device=device) <= torch.arange(T - q, T, device=device)[:, None])[None]


def is_causal(mask: Tensor) -> bool:
    """True if a mask, bool [B, q, T], is the causal one in all rows."""
    _, q, T = mask.shape
    return torch.equal(mask, causal(q, T, mask.device).expand_as(mask))
