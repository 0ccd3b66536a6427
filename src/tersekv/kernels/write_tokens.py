"""Write new tokens of a layer into the spare room of its recent window, or check them: contracts and references."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tersekv.kernels.registry import operator


@operator()
def write_tokens(keys: Tensor, values: Tensor, key_buffer: Tensor, value_buffer: Tensor, at: int) -> bool:
    """Write tokens `at` to `at + n` of both buffers, rounded to the buffers' dtypes.

    Args:
        keys, values: any float dtype, [B, H, n, D].
        key_buffer, value_buffer: [B, H, capacity, D] with capacity ≥ at + n.

    Returns:
        False if a rounded number is not finite. A single token is checked on a CPU only, because the
        check waits for the device.
    """
    finite = True
    for x, buffer in ((keys, key_buffer), (values, value_buffer)):
        room = buffer[:, :, at : at + x.shape[2]]
        room.copy_(x.detach())
        if x.is_cpu or (x.shape[2] > 1 and not x.is_meta):
            finite = finite and bool(room.isfinite().all())
    return finite


@operator()
def all_finite(x: Tensor) -> bool:
    """True if all numbers of x [B, H, n, D] are finite."""
    # the sum is cheap, and finite for ordinary tokens; the exact test runs only if it is not
    return math.isfinite(x.sum(dtype=torch.float32).item()) or bool(x.isfinite().all())
