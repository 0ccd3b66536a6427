"""Kernels that search trellis codes (`kernels/trellis.py`): Viterbi over 256 states, whatever bits a component has.

A component of b bits is b rounds of one bit: states 2i and 2i + 1 go to i and i + 128, the cheaper one with its cost,
and after the last round the component's error is added. A round leaves 128 bits, which of each two it took, and the way
back reads one of them. Costs are added in the reference's order, so that codes are its codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

STATES: tl.constexpr = tl.constexpr(256)
TIE: tl.constexpr = tl.constexpr(1.00001)
"""As in `kernels/trellis.py`."""
ROUND_BYTES: tl.constexpr = tl.constexpr(16)
"""128 bits of a round."""


@triton.jit
def _halved(cost, VECTORS: tl.constexpr):
    """One round: costs [VECTORS, 256], and where the odd one of two states was cheaper as bytes [VECTORS, 16]."""
    even, odd = tl.split(tl.reshape(cost, (VECTORS, STATES // 2, 2)))
    least = tl.where(odd < even, odd, even)
    bit = tl.reshape((odd < even).to(tl.int32), (VECTORS, ROUND_BYTES, 8)) << tl.arange(0, 8)[None, None, :]
    cost = tl.reshape(tl.permute(tl.join(least, least), (0, 2, 1)), (VECTORS, STATES))
    return cost, tl.sum(bit, axis=2).to(tl.uint8)


@triton.jit
def search(
    taken, ends, y, weight, bits, tables, warm_up, n, D, rounds, CLOSED: tl.constexpr, VECTORS: tl.constexpr
):  # fmt: skip
    """Grid (tiles of vectors, R). y float32 [R, n, D], weight float32 and bits uint8 [R, D], to taken uint8
    [R, n, rounds, 16], of which a row's first Σ bits are written. CLOSED: paths begin in `ends` int32 [R, n]. Else they
    begin anywhere, warm_up int32 [R] components before the first (some of the last ones), and ends is written: where
    the best path ends."""
    row = tl.program_id(1).to(tl.int64)
    v = tl.program_id(0) * VECTORS + tl.arange(0, VECTORS)
    vector = row * n + v
    state = tl.arange(0, STATES)
    cost = tl.zeros((VECTORS, STATES), tl.float32)
    begin = 0
    if CLOSED:
        end = tl.load(ends + vector, mask=v < n, other=0)
        cost = tl.where(state[None, :] == end[:, None], 0.0, float("inf"))
    else:
        begin -= tl.load(warm_up + row)
    place = taken + (vector * rounds * ROUND_BYTES)[:, None] + tl.arange(0, ROUND_BYTES)[None, :]
    for step in range(begin, D):
        d = tl.where(step < 0, step + D, step)
        width = tl.load(bits + row * D + d).to(tl.int32)
        for _ in range(width):
            cost, odd = _halved(cost, VECTORS)
            tl.store(place, odd, mask=(v < n)[:, None] & (step >= 0))
            place += tl.where(step >= 0, ROUND_BYTES, 0)
        error = tl.load(y + vector * D + d, mask=v < n, other=0.0)[:, None]
        error -= tl.load(tables + width * STATES + state)[None, :]
        cost += error * error * tl.where(width > 0, tl.load(weight + row * D + d), 0.0)
    if not CLOSED:
        tied = cost <= tl.min(cost, axis=1)[:, None] * TIE
        lowest = tl.min(tl.where(tied, state[None, :], STATES), axis=1)
        tl.store(ends + vector, lowest & (STATES - 1), mask=v < n)


@triton.jit
def trace(windows, ends, taken, bits, n, D, rounds, CLOSED: tl.constexpr, VECTORS: tl.constexpr):
    """Grid (tiles of vectors, R). From `ends` back over what `search` took. CLOSED: windows uint8 [R, n, D] are
    written; else ends is written over: where the path began."""
    row = tl.program_id(1).to(tl.int64)
    v = tl.program_id(0) * VECTORS + tl.arange(0, VECTORS)
    vector = row * n + v
    state = tl.load(ends + vector, mask=v < n, other=0)
    total = 0
    for d in range(D):
        total += tl.load(bits + row * D + d).to(tl.int32)
    place = taken + (vector * rounds + total) * ROUND_BYTES
    for back in range(D):
        d = D - 1 - back
        width = tl.load(bits + row * D + d).to(tl.int32)
        if CLOSED:
            tl.store(windows + vector * D + d, tl.where(width > 0, state, 0).to(tl.uint8), mask=v < n)
        for _ in range(width):
            place -= ROUND_BYTES
            state = state & (STATES // 2 - 1)
            byte = tl.load(place + (state >> 3), mask=v < n, other=0).to(tl.int32)
            state = (state << 1) | ((byte >> (state & 7)) & 1)
    if not CLOSED:
        tl.store(ends + vector, state, mask=v < n)
