"""The fast Hadamard transform (`kernels/rotate.py`): D·log₂D additions per vector, in registers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def hadamard(
    out, x, matrix, order, signs, rows, D, ROWS: tl.constexpr, BLOCK: tl.constexpr, LOG: tl.constexpr
):  # fmt: skip
    """Grid (tiles of rows, blocks of the matrix). x float32 [rows, D] to out of its shape, BLOCK = 2^LOG channels of
    it."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    taken = row * D + tl.load(order + channel)[None, :]
    y = tl.load(x + taken, mask=row < rows, other=0.0).to(tl.float64) * tl.load(signs + channel)[None, :]
    for _ in tl.static_range(LOG):  # the lowest bit of a channel's number is done, and becomes the highest
        first, second = tl.split(tl.reshape(y, (ROWS, BLOCK // 2, 2)))
        y = tl.reshape(tl.permute(tl.join(first + second, first - second), (0, 2, 1)), (ROWS, BLOCK))
    entry = matrix + tl.program_id(1) * BLOCK * D + tl.load(order + tl.program_id(1) * BLOCK)
    y *= tl.abs(tl.load(entry)).to(tl.float64)
    tl.store(out + row * D + channel[None, :], y.to(tl.float32), mask=row < rows)
