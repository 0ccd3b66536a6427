"""Trellis codes: the layout of their bit stream, and contract and torch reference of encoding.

A bit-shift trellis (TCQ: Marcellin & Fischer 1990; for weights: QTIP, arXiv 2406.11235) has 2^8
states. Component d of a vector brings b_d new bits c; the state moves to (c << (8 − b)) | (state >>
b). The component's value is the entry of that state in the table for b bits. A state is thus a
window of 8 bits in the vector's stream of S = Σ b_d bits, newest bits on top. Any component can be
decoded by itself. The stream is closed to a ring (tail-biting): the first windows begin in its last
bits.

Shapes: n vectors in each of R rows; the vectors of a row share bits and weights. D components.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tersekv.kernels.registry import operator

STATES = 256
STATE_BITS = 8
MOST_BITS = 8
"""Most bits of a component."""

WARM_UP = 24
"""Number of components at the end of the ring over which the search for the first state warms up."""

TIE = 1.00001
"""Costs up to this factor over the least one count as equal to it.

If the ring has few components, the search for its first state runs over all of them twice. A path
that alternates between two ways around the ring has equal costs in either order, and rounding would
decide between them.
"""

VECTORS_AT_A_TIME = 2048


def _fake(y: Tensor, *rest: Any) -> Tensor:
    return y.new_empty(y.shape, dtype=torch.uint8)


@operator("(Tensor y, Tensor weight, Tensor bits, Tensor tables) -> Tensor", _fake)
def encode_trellis(y: Tensor, weight: Tensor, bits: Tensor, tables: Tensor) -> Tensor:
    """Viterbi search for the windows with the least Σ_d weight_d·(y_d − tables[b_d, window_d])².

    The ring's first state comes from the best open path over the last components followed by all
    components; among ties, the path that ends in the lowest window. The result is the best path
    that begins and ends in that state.

    Args:
        y: float32 [R, n, D]. weight: float32 [R, D], not negative. bits: uint8 [R, D], 0 to 8.
        tables: float32 [9, 256], row b for b bits.

    Returns:
        uint8 [R, n, D]; 0 where a component has no bits.
    """
    out = torch.zeros(y.shape, dtype=torch.uint8, device=y.device)
    for r in range(len(y)):
        active = bits[r].nonzero()[:, 0].tolist()
        if not active:
            continue
        for start in range(0, y.shape[1], VECTORS_AT_A_TIME):
            part = y[r, start : start + VECTORS_AT_A_TIME].float()
            windows = _search(part[:, active], weight[r, active].float(), bits[r, active].tolist(), tables)
            out[r, start : start + len(part), active] = windows
    return out


def _search(y: Tensor, weight: Tensor, bits: list[int], tables: Tensor) -> Tensor:
    """Search windows uint8 [n, A] for the A components that have bits."""
    n, A = y.shape
    order = [*range(max(0, A - WARM_UP), A), *range(A)]
    free = torch.zeros(n, STATES, device=y.device)
    cost, chosen = _forward(free, order, y, weight, bits, tables)
    best = (cost <= TIE * cost.amin(1, keepdim=True)).int().argmax(1)
    first = _back(best, order, chosen, bits, stop=A)[0]
    closed = torch.full_like(free, torch.inf).scatter_(1, first[:, None], 0.0)
    _, chosen = _forward(closed, list(range(A)), y, weight, bits, tables)
    return _back(first, list(range(A)), chosen, bits, stop=A)[1]


def _forward(
    cost: Tensor, order: list[int], y: Tensor, weight: Tensor, bits: list[int], tables: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Return the least costs [n, 256] of the paths to each state, and for each step the bits
    shifted out on that path."""
    chosen = []
    for d in order:
        least, dropped = cost.view(len(cost), -1, 1 << bits[d]).min(-1)
        error = (y[:, d, None] - tables[bits[d]]).square() * weight[d]
        cost = least.repeat(1, 1 << bits[d]) + error
        chosen.append(dropped)
    return cost, chosen


def _back(state: Tensor, order: list[int], chosen: list[Tensor], bits: list[int], stop: int) -> tuple[Tensor, Tensor]:
    """Trace back from the last states int64 [n] over `stop` steps: the states before them, and the
    windows [n, stop]."""
    windows = torch.zeros(len(state), stop, dtype=torch.uint8, device=state.device)
    for i in range(stop):
        d = order[-1 - i]
        windows[:, stop - 1 - i] = state.to(torch.uint8)
        older = state & ((STATES >> bits[d]) - 1)
        state = (older << bits[d]) | chosen[-1 - i].gather(1, older[:, None])[:, 0]
    return state, windows


def pack_stream(windows: Tensor, bits: Tensor) -> Tensor:
    """Pack windows uint8 [R, n, D] into streams int16 [R, n, S/16]. bits is uint8 [R, D]; each
    row's sum S is a multiple of 16.

    The newest bits of component d, the b highest of its window, are bits p_d to p_d + b − 1 of the
    stream, where p_d = Σ_{e<d} b_e. Bit i of the stream is bit i % 16 of word i // 16.
    """
    width = bits.long()
    place = width.cumsum(1) - width
    new = windows.long() >> (STATE_BITS - width)[:, None]
    total = int(width[0].sum())
    words = new.new_zeros((*windows.shape[:2], total // 16 + 1))
    spread = new << (place & 15)[:, None]
    index = (place >> 4)[:, None].expand_as(new).clamp(max=total // 16 - 1)
    words.scatter_add_(2, index, spread & 0xFFFF)  # no two codes share a bit, so adding is OR
    words.scatter_add_(2, index + 1, spread >> 16)
    return words[..., : total // 16].to(torch.int32).to(torch.int16)


def windows_of(words: Tensor, bits: Tensor) -> Tensor:
    """Inverse of `pack_stream`: streams int16 [R, n, S/16] to windows int64 [R, n, D]. A component
    without bits gets an arbitrary window."""
    width, total = bits.long(), 16 * words.shape[-1]
    begin = (width.cumsum(1) - STATE_BITS) % total
    plain = words.to(torch.int64) & 0xFFFF
    both = plain | plain.roll(-1, -1) << 16
    pair = both.gather(2, (begin >> 4)[:, None].expand(-1, words.shape[1], -1))
    return pair >> (begin & 15)[:, None] & (STATES - 1)
