"""How a call is cut into programs: a choice per shape class and layouts, made once and kept.

None of the choices was measured on a GPU yet. Those for sm_90 (H100, H200) are what code compiled for it asks for:
tiles that leave its shared memory room for a program, most of them for two. Elsewhere a program takes the least that
it can, which fits the 64 to 99 KiB of other GPUs, AMD's included. `TABLE` is the place for what measurements find.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tersekv.kernels.triton import leaves as constants
from tersekv.kernels.triton.leaves import Leaf

PROGRAMS_PER_MULTIPROCESSOR = 4
"""Programs that a launch aims at, so that each multiprocessor has several to switch between."""

SMALL = {
    kind.value
    for kind in (
        constants.POLAR, constants.SPARSE, constants.SIGNS, constants.SKETCH, constants.TRELLIS, constants.TURNED
    )
}  # fmt: skip
"""Layouts that are decoded element by element."""


class Shape(NamedTuple):
    """Tokens taken at a time, in blocks of 32, and warps and stages as Triton counts them."""

    blocks: int
    warps: int
    stages: int


class Key(NamedTuple):
    """What choices are kept for: the GPU's architecture ("" for any), kinds and bits of leaves, whether keys have RoPE,
    rows and padded channels."""

    architecture: str
    keys: tuple[tuple[int, int], ...]
    values: tuple[tuple[int, int], ...]
    has_rope: bool
    rows: int
    channels: int


TABLE: dict[Key, Shape] = {}
"""Measured choices; an architecture's own entry goes before one for any."""

HOPPER = ("sm_90", "")
"""H100 and H200; interpreted kernels go the same way."""

TILES = {(False, False): 128 * 128, (True, False): 64 * 128, (False, True): 32 * 128, (True, True): 32 * 128}
"""There: tokens × channels taken at a time, where layouts are decoded element by element or there are many rows, and
where keys have RoPE, whose cosines take shared memory too."""

LEAST = Shape(1, 4, 1)
"""The least that a program takes: what is safe."""


class LaunchPlan(NamedTuple):
    """rows: of queries per program. blocks: of 32 tokens taken at a time. splits of split_tokens each. warps and stages
    as Triton counts them."""

    rows: int
    blocks: int
    splits: int
    split_tokens: int
    warps: int
    stages: int


def plan(
    heads: int,
    R: int,
    T: int,
    keys: Sequence[Leaf],
    values: Sequence[Leaf],
    device: torch.device,
    page_tokens: int | None = None,
    has_rope: bool = False,
) -> LaunchPlan:
    """For `heads` batch rows × key-value heads, R query rows each, over T tokens; no tile is longer than a page."""
    rows = 8 if R <= 8 else 16 if R <= 16 else 32
    channels = max(leaf.spec[2] for leaf in (*keys, *values))
    shape = chosen(Key(architecture(device), _kinds(keys), _kinds(values), has_rope, rows, channels))
    if page_tokens is not None:
        shape = shape._replace(blocks=math.gcd(shape.blocks, page_tokens // 32))
    tile = 32 * shape.blocks
    tiles, programs = max(1, -(-T // tile)), max(1, heads * -(-R // rows))
    splits = max(1, min(tiles, PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device) // programs))
    split_tokens = -(-tiles // splits) * tile
    return LaunchPlan(rows, shape.blocks, max(1, -(-T // split_tokens)), split_tokens, shape.warps, shape.stages)


def _kinds(leaves: Sequence[Leaf]) -> tuple[tuple[int, int], ...]:
    """Kind and the first number of its own: bits of a grid, levels of polar."""
    return tuple((leaf.spec[0], leaf.spec[7] if len(leaf.spec) > 7 else 0) for leaf in leaves)


@functools.lru_cache(maxsize=1024)
def chosen(key: Key) -> Shape:
    """The measured choice, or a reasoned one."""
    for known in (key, key._replace(architecture="")):
        if known in TABLE:
            return TABLE[known]
    if key.architecture not in HOPPER:
        return LEAST
    kinds = {kind for kind, _ in (*key.keys, *key.values)}
    small = key.rows > 16 or bool(kinds & SMALL)
    blocks = TILES[small, key.has_rope] // (32 * key.channels)
    return Shape(min(blocks, 2 if small else 4), 4, 2) if blocks else LEAST


def most_matrix(architecture: str) -> int:
    """Elements, with padding, of the largest matrix in front of RoPE that a program finds shared memory for: compiled,
    one of 256 × 128 takes 152 KiB, one of 256 × 64 takes 69."""
    return 256 * (128 if architecture in HOPPER else 64)


@functools.cache
def architecture(device: torch.device) -> str:
    """Of the GPU, like sm_90 or gfx942; "" where kernels are interpreted."""
    if device.type != "cuda":
        return ""
    properties = torch.cuda.get_device_properties(device)
    of_amd = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
    return of_amd.partition(":")[0] or f"sm_{properties.major}{properties.minor}"


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of the GPU; few where there is none and kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
