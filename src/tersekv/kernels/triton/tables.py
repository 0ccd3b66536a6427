"""Tables that kernels look entries up in: float16, at addresses to which places are or-ed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tersekv.kernels.trellis_search import BINS, MOST_BITS, STATES, near_entries, scaled_entries

_halves, _near = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()


ALIGNMENT = 8192
"""Bytes that divide the address of a copied table. No table of a trellis, and no row of a table of
polar directions, has more."""


def aligned(x: Tensor, shape: Sequence[int] = (), places: Any = ...) -> Tensor:
    """Return a table as float16 at a multiple of ALIGNMENT, the same tensor each time. With a shape,
    the table is at `places` of a table of that shape."""
    if x not in _halves:
        shape = shape or x.shape
        room = torch.zeros(math.prod(shape) + ALIGNMENT // 2, dtype=torch.float16, device=x.device)
        first = -room.data_ptr() % ALIGNMENT // 2
        _halves[x] = room[first : first + math.prod(shape)].view(shape)
        _halves[x][places] = x.half()
    found: Tensor = _halves[x]
    return found


def near(entries: Tensor) -> Tensor:
    """Return `near_entries` of a trellis's tables [9, 256] as uint8 [9, 9, 2·BINS + 1, 256], by bits of a component and
    of the one after it; the same tensor each time.

    The host waits for the device at the first call with a tensor.
    """
    if entries not in _near:
        rates, scaled = range(MOST_BITS + 1), scaled_entries(entries.float())
        _near[entries] = torch.ones(
            len(rates), len(rates), 2 * BINS + 1, STATES, dtype=torch.uint8, device=entries.device
        )
        for bits, after in itertools.product(rates, rates):
            some = near_entries(scaled, bits, after)
            if some is not None:
                _near[entries][bits, after] = some
    found: Tensor = _near[entries]
    return found


@triton.constexpr_function
def first_entry(bits, level):
    """Return the place of a level's first entry in a row of a table of polar directions: a multiple
    of its number of entries."""
    end = 0
    for size in (1 << b for b in bits[: level + 1]):
        end = -(-end // size) * size + size
    return end - (1 << bits[level])
