"""Tables that kernels look entries up in: float16, at addresses to which places are or-ed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tersekv.kernels.trellis_search import near_entries, scaled_entries

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
    """Return `near_entries` of a trellis's tables [9, 256] as uint8, the same tensor each time.

    The host waits for the device at the first call with a tensor.
    """
    if entries not in _near:
        _near[entries] = near_entries(scaled_entries(entries.float())).to(torch.uint8)
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
