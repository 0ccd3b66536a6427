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

GAIN_STEPS = 16
"""Steps of a gain per factor of two."""

UNIT_GAIN = 144
"""The code of gain 1."""


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


def _fake_packed(y: Tensor, weight: Tensor, bits: Tensor, tables: Tensor, words: int, steps: Any) -> Any:
    R, n, _ = y.shape
    return y.new_empty((R, n, words), dtype=torch.int16), y.new_empty((R, n), dtype=torch.uint8)


@operator(
    "(Tensor y, Tensor weight, Tensor bits, Tensor tables, int words, int[] steps) -> (Tensor, Tensor)", _fake_packed
)
def pack_trellis(
    y: Tensor, weight: Tensor, bits: Tensor, tables: Tensor, words: int, steps: list[int]
) -> tuple[Tensor, Tensor]:
    """Encode vectors with a gain each: find gain and windows of y ≈ gain·tables[b_d, window_d], and pack them.

    The first gain is the root mean square of the components that have bits. Then the gains `steps` above the one of
    least squares are tried. The one with the least Σ_d weight_d·(y_d − gain·x_d)² stays.

    Args:
        y, weight, bits, tables: see `encode_trellis`.
        words: S/16, where S is the sum of each row's bits.
        steps: distances of gain codes, see `gain_codes`.

    Returns:
        stream int16 [R, n, words], see `pack_stream`, and gain codes uint8 [R, n].
    """
    held = (bits > 0).float().unsqueeze(1)
    rates = bits.long().unsqueeze(1)
    codes = gain_codes(((y.square() * held).sum(-1) / held.sum(-1).clamp_min(1)).sqrt())

    def search(gain: Tensor) -> tuple[Tensor, Tensor]:
        windows = encode_trellis(y / gains(gain.clamp_min(1)).unsqueeze(-1), weight, bits, tables)
        return windows, tables[rates, windows.long()]

    windows, entries = search(codes)
    best = gain_codes(_dot(weight, entries, y) / _dot(weight, entries, entries).clamp_min(1e-20)).int()
    off = y - gains(codes).unsqueeze(-1) * entries
    least = _dot(weight, off, off)
    for step in steps:
        tried = (best + step).clamp(0, 255).to(torch.uint8)
        found, entries = search(tried)
        off = y - gains(tried).unsqueeze(-1) * entries
        error = _dot(weight, off, off)
        better = error < least
        least, codes = torch.where(better, error, least), torch.where(better, tried, codes)
        windows = torch.where(better.unsqueeze(-1), found, windows)
    return pack_stream(windows, bits), codes


def _dot(weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Σ_d weight_d·a_d·b_d of vectors [R, n, D]; a matrix product, whose sums do not depend on the batch."""
    return ((weight.unsqueeze(1) * a).unsqueeze(-2) @ b.unsqueeze(-1)).flatten(1)


def gain_codes(gain: Tensor) -> Tensor:
    """Nearest codes uint8 of gains ≥ 0. Larger gains get the largest code, those below half the smallest get 0."""
    codes = (gain.clamp_min(1e-30).log2() * GAIN_STEPS).round() + UNIT_GAIN
    return codes.clamp(0, 255).to(torch.uint8)


def gains(codes: Tensor) -> Tensor:
    """Gains float32 of codes uint8."""
    return torch.where(codes > 0, torch.exp2((codes.float() - UNIT_GAIN) / GAIN_STEPS), 0.0)


def largest_gain() -> float:
    """2^((255 − 144)/16), a factor of 122 over what was fitted."""
    return float(gains(torch.tensor(255)))


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
