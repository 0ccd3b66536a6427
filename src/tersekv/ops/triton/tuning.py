"""How a call is cut into programs: what is known to be good, and a safe choice elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tersekv.ops.triton.leaves import Leaf


class Plan(NamedTuple):
    """rows: of queries per program. blocks: of 32 tokens taken at a time. splits of split_tokens each. warps and stages
    as Triton counts them."""

    rows: int
    blocks: int
    splits: int
    split_tokens: int
    warps: int
    stages: int


def plan(heads: int, R: int, T: int, keys: Sequence[Leaf], values: Sequence[Leaf], device: torch.device) -> Plan:
    """For `heads` batch rows × key-value heads, R query rows each, over T tokens."""
    rows = 16 if R <= 16 else 32
    blocks, warps, stages = 4, 4, 2
    tile = 32 * blocks
    tiles = max(1, -(-T // tile))
    programs = heads * -(-R // rows)
    splits = max(1, min(tiles, -(-4 * multiprocessors(device) // max(1, programs))))
    split_tokens = -(-tiles // splits) * tile
    return Plan(rows, blocks, max(1, -(-T // split_tokens)), split_tokens, warps, stages)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of the GPU; few where there is none and kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
