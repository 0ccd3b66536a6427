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

import functools
from typing import Any

import torch
from torch import Tensor

from tersekv.kernels.registry import operator
from tersekv.kernels.trellis_search import STATE_BITS, STATES, CostUnits, cost_units, near_entries, search

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

    Costs are integers, see `cost_units`, so all kernels give the same windows. Of the best open path
    over the first components of the ring, the state at a place among them is kept, see
    `first_search`. Among ties, the path that ends in the lowest window wins. The result is the best
    path around the ring from that place that begins and ends with that state's bits. Among paths that
    meet with equal costs, the one with the lowest older bits wins.

    Paths take only entries near the component, see `near_entries`. Few of the entries left out are on the
    best path: the squared error of N(0, 1) is .02 % larger at 3 bits, .04 % at 4, .3 % at 5, and the same
    from 6 on.

    Args:
        y: float32 [R, n, D]. weight: float32 [R, D], not negative. bits: uint8 [R, D], 0 to 8.
        tables: float32 [9, 256], row b for b bits.

    Returns:
        uint8 [R, n, D]; 0 where a component has no bits.
    """
    out = torch.zeros(y.shape, dtype=torch.uint8, device=y.device)
    units = cost_units(weight, bits, tables)
    near = functools.cache(functools.partial(near_entries, units.entries))
    for r in range(len(y)):
        active = bits[r].nonzero()[:, 0].tolist()
        if not active:
            continue
        own = CostUnits(units.entries, *(x[r, active] for x in units[1:]))
        for start in range(0, y.shape[1], VECTORS_AT_A_TIME):
            part = y[r, start : start + VECTORS_AT_A_TIME].float()
            out[r, start : start + len(part), active] = search(part[:, active], bits[r, active].tolist(), own, near)
    return out


def _fake_packed(y: Tensor, weight: Tensor, bits: Tensor, tables: Tensor, words: int, *rest: Any) -> Any:
    R, n, _ = y.shape
    return y.new_empty((R, n, words), dtype=torch.int16), y.new_empty((R, n), dtype=torch.uint8)


@operator(
    "(Tensor y, Tensor weight, Tensor bits, Tensor tables, int words, int[] steps, Tensor enough) -> (Tensor, Tensor)",
    _fake_packed,
)
def pack_trellis(
    y: Tensor, weight: Tensor, bits: Tensor, tables: Tensor, words: int, steps: list[int], enough: Tensor
) -> tuple[Tensor, Tensor]:
    """Encode vectors with a gain each: find gain and windows of y ≈ gain·tables[b_d, window_d], and pack them.

    The error is Σ_d weight_d·(y_d − gain·x_d)² over the components that have bits. The first gain
    is `first_gains`. Gains `steps` above the one of least squares follow, until the error is below
    `enough` times the square of the root mean square. Windows found with a gain may also be kept
    with their own gain of least squares. The pair with the least error stays.

    Args:
        y, weight, bits, tables: see `encode_trellis`.
        words: of a stream. A row needs S/16, where S is the sum of its bits, and the others are 0.
        steps: distances of gain codes, see `gain_codes`.
        enough: float32 [R].

    Returns:
        stream int16 [R, n, words], see `pack_stream`, and gain codes uint8 [R, n].
    """
    rates, weight = bits.long().unsqueeze(1), weight * (bits > 0)
    codes = gain_codes(_lengths(y, bits))
    least, last = torch.full(codes.shape, torch.inf, device=y.device), enough.unsqueeze(1) * gains(codes).square()
    tried = first_gains(codes, y, weight, bits, tables)
    windows, kept, middle = torch.zeros_like(y, dtype=torch.uint8), codes, codes
    for step in [None, *steps]:
        due = least >= last
        if step is not None:
            tried = (middle.int() + step).clamp(0, 255).to(torch.uint8)
        found = encode_trellis(y / gains(tried.clamp_min(1)).unsqueeze(-1), weight, bits, tables)
        entries = tables[rates, found.long()]
        own = gain_codes(_dot(weight, entries, y) / _dot(weight, entries, entries).clamp_min(1e-20))
        for gain in (tried, own):
            off = y - gains(gain).unsqueeze(-1) * entries
            error = _dot(weight, off, off)
            better = due & (error < least)
            least, kept = torch.where(better, error, least), torch.where(better, gain, kept)
            windows = torch.where(better.unsqueeze(-1), found, windows)
        if step is None:
            middle = own
    return pack_stream(windows, bits, words), kept


def _fake_vectors(x: Tensor, shift: Tensor, inverse: Tensor, of: Tensor, *rest: Any) -> Any:
    return *_fake_packed(x, *rest), x.new_empty(x.shape[:2], dtype=torch.float32)


@operator(
    "(Tensor x, Tensor shift, Tensor inverse, Tensor of, Tensor weight, Tensor bits, Tensor tables, int words, "
    "int[] steps, Tensor enough) -> (Tensor, Tensor, Tensor)",
    _fake_vectors,
)
def pack_vectors(
    x: Tensor,
    shift: Tensor,
    inverse: Tensor,
    of: Tensor,
    weight: Tensor,
    bits: Tensor,
    tables: Tensor,
    words: int,
    steps: list[int],
    enough: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Encode vectors x of row r by their components y = (x − shift_r)·inverse_of_r, see `pack_trellis`.

    Codes of a vector do not depend on the other vectors.

    Args:
        x: float32 [R, n, D]. shift: float32 [R, D].
        inverse: float32 [K, D, D]. of: int64 [R], 0 to K − 1; several rows may have one inverse.
        weight, bits, tables, words, steps, enough: see `pack_trellis`.

    Returns:
        stream int16 [R, n, words], gain codes uint8 [R, n], and float32 [R, n]: root mean squares of
        the components that have bits.
    """
    y = ((x - shift.unsqueeze(1)).double() @ inverse.double()[of]).float()
    return *pack_trellis(y, weight, bits, tables, words, steps, enough), _lengths(y, bits)


def _lengths(y: Tensor, bits: Tensor) -> Tensor:
    held = (bits > 0).float().unsqueeze(1)
    return ((y.square() * held).sum(-1) / held.sum(-1).clamp_min(1)).sqrt()


def _dot(weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Σ_d weight_d·a_d·b_d of vectors [R, n, D]; a matrix product, whose sums do not depend on the batch."""
    return ((weight.unsqueeze(1) * a).unsqueeze(-2) @ b.unsqueeze(-1)).flatten(1)


def first_gains(codes: Tensor, y: Tensor, weight: Tensor, bits: Tensor, tables: Tensor) -> Tensor:
    """Return the codes of the gains that vectors are searched with first.

    This is a step above the root mean square, or more if a component lies far beyond the end of its
    table. With gain g, its error is about weight·(|y| − g·end)², and that of all components is about
    g²·Σ_d weight_d·4^−bits_d. The g with the least sum of both is taken.

    codes: uint8 [R, n], of root mean squares. weight: float32 [R, D], 0 without bits.
    """
    end = tables.abs().amax(1)[bits.long()]
    expected = (weight * torch.exp2(-2.0 * bits.float())).sum(1, keepdim=True)
    reach = weight * end / (weight * end * end + expected).clamp_min(1e-30)
    return torch.maximum(codes.clamp_max(254) + 1, gain_codes((y.abs() * reach.unsqueeze(1)).amax(-1)))


def gain_codes(gain: Tensor) -> Tensor:
    """Nearest codes uint8 of gains ≥ 0. Larger gains get the largest code, those below half the smallest get 0."""
    codes = (gain.clamp_min(1e-30).log2() * GAIN_STEPS).round() + UNIT_GAIN
    return codes.clamp(0, 255).to(torch.uint8)


def gains(codes: Tensor) -> Tensor:
    """Gains float32 of codes uint8."""
    return torch.where(codes > 0, torch.exp2((codes.float() - UNIT_GAIN) / GAIN_STEPS), 0.0)


def largest_gain() -> float:
    """2^((255 − 144)/16), a factor of 122 over what was fitted."""
    return float(2.0 ** ((255 - UNIT_GAIN) / GAIN_STEPS))


def pack_stream(windows: Tensor, bits: Tensor, words: int) -> Tensor:
    """Pack windows uint8 [R, n, D] into streams int16 [R, n, words]. bits is uint8 [R, D]; each
    row's sum is a multiple of 16, and at most 16·words.

    The newest bits of component d, the b highest of its window, are bits p_d to p_d + b − 1 of the
    stream, where p_d = Σ_{e<d} b_e. Bit i of the stream is bit i % 16 of word i // 16.
    """
    width = bits.long()
    place = width.cumsum(1) - width
    new = windows.long() >> (STATE_BITS - width)[:, None]
    stream = new.new_zeros((*windows.shape[:2], words + 1))
    spread = new << (place & 15)[:, None]
    index = (place >> 4)[:, None].expand_as(new).clamp(max=words - 1)
    stream.scatter_add_(2, index, spread & 0xFFFF)  # no two codes share a bit, so adding is OR
    stream.scatter_add_(2, index + 1, spread >> 16)
    return stream[..., :words].to(torch.int32).to(torch.int16)


def windows_of(words: Tensor, bits: Tensor) -> Tensor:
    """Inverse of `pack_stream`: streams int16 [R, n, S/16] to windows int64 [R, n, D]. A component
    without bits gets an arbitrary window."""
    width, total = bits.long(), 16 * words.shape[-1]
    begin = (width.cumsum(1) - STATE_BITS) % total
    plain = words.to(torch.int64) & 0xFFFF
    both = plain | plain.roll(-1, -1) << 16
    pair = both.gather(2, (begin >> 4)[:, None].expand(-1, words.shape[1], -1))
    return pair >> (begin & 15)[:, None] & (STATES - 1)
