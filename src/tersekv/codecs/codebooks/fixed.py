"""Codebooks without fitting: integers, and normal quantiles (NormalFloat; QLoRA, arXiv
2305.14314).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tersekv.tensors import cached_table


@cached_table
def integers(bits: int, device: str) -> Tensor:
    """Return the codebook 0 … 2^bits − 1 as float32."""
    return torch.arange(2**bits, dtype=torch.float32, device=device)


@cached_table
def normal_quantiles(bits: int, device: str) -> Tensor:
    """Return the normal quantiles on [−1, 1], ascending, with an exact zero, float32 [2^bits]."""
    half = 2 ** (bits - 1)
    top = ((1 - 1 / (2 * (2 * half - 1))) + (1 - 1 / (4 * half))) / 2
    positive = torch.special.ndtri(torch.linspace(top, 0.5, half + 1, dtype=torch.float64))[:-1]
    negative = -torch.special.ndtri(torch.linspace(top, 0.5, half, dtype=torch.float64))[:-1]
    table = torch.cat([positive, torch.zeros(1, dtype=torch.float64), negative]).sort().values
    return (table / table.abs().max()).to(torch.float32).to(device)


def fixed_table(name: str, bits: int, device: str) -> Tensor:
    """Return evenly spaced entries ("int") or normal quantiles ("nf") on [−1, 1], float32
    [2^bits].
    """
    return normal_quantiles(bits, device) if name == "nf" else spaced(bits, device)


@cached_table
def spaced(bits: int, device: str) -> Tensor:
    """Return 2^bits evenly spaced entries from −1 to 1."""
    return torch.linspace(-1, 1, 2**bits, device=device)
