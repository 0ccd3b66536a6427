"""Decoding packed tokens to floats, for attention of many queries: contract and torch reference."""

from __future__ import annotations

import torch
from torch import Tensor

from tersekv.kernels.attend_grid import GridSide
from tersekv.kernels.attend_packed import Packed
from tersekv.kernels.registry import operator


@operator()
def decode(operand: GridSide | Packed, dtype: torch.dtype) -> Tensor:
    """Decode packed tokens to x̂ [B, H, T, D] of a dtype, without their linear map."""
    return operand.decode().to(dtype)
