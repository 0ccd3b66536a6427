"""Causal masks."""

from __future__ import annotations

import torch
from torch import Tensor

from tersekv.kernels.attend import causal as causal


def is_causal(mask: Tensor) -> bool:
    """True if a mask, bool [B, q, T], is the causal one in all rows."""
    _, q, T = mask.shape
    return torch.equal(mask, causal(q, T, mask.device).expand_as(mask))
