"""Launch sizes of a call: chosen once per shape class and layouts, and cached.

The derived choices for sm_90 (H100, H200) follow from the compiled code. With these tiles a
multiprocessor's shared memory has room for one program, in most cases for two. On other GPUs grids
take these tiles, too: they need 20 to 49 KiB, and a third of the instructions per code. Signs have
tiles of 64 tokens there: they need 41 KiB, and half of the instructions. All other layouts have the
smallest size there, which fits 64 KiB. If a kernel still does not fit, `shrink` makes its tiles smaller.
`TABLE` is for choices measured by `benchmarks/launch_sizes.py`; it has none yet.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tersekv.kernels.triton import leaves as constants
from tersekv.kernels.triton.grid_slices import sliced
from tersekv.kernels.triton.leaves import Leaf

PROGRAMS_PER_MULTIPROCESSOR = 4
"""Programs per multiprocessor that a launch aims at where nothing was measured, so that each
multiprocessor can switch between several."""

SMALL = {
    kind.value
    for kind in (
        constants.POLAR, constants.SPARSE, constants.SKETCH, constants.TRELLIS, constants.ROTATED_MEAN
    )
}  # fmt: skip
"""Layouts that are decoded element by element."""


class Shape(NamedTuple):
    """Tokens handled at a time, in blocks of 32; Triton's number of warps and stages; programs per
    multiprocessor that a launch aims at."""

    blocks: int
    warps: int
    stages: int
    programs: int = PROGRAMS_PER_MULTIPROCESSOR


class Key(NamedTuple):
    """Key of the cached choices: the GPU's architecture ("" for any), kinds and bits of leaves,
    True if keys have RoPE, query rows, padded channels, and how grids are read."""

    architecture: str
    keys: tuple[tuple[int, int], ...]
    values: tuple[tuple[int, int], ...]
    has_rope: bool
    rows: int
    channels: int
    slices: int = 0


INTEGERS, SLICES = 2, 1
"""Ways to read grids: all as slices of integers, with scales of groups; all as slices, see
`grid_slices.py`. 0 is for all others."""

TABLE: dict[Key, Shape] = {}
"""Measured choices. An architecture's own entry takes precedence over one for any."""

HOPPER = ("sm_90", "")
"""Architectures of H100 and H200; interpreted kernels use the same sizes."""

TILES = {(False, False): 128 * 128, (True, False): 64 * 128, (False, True): 32 * 128, (True, True): 32 * 128}
"""Tokens × channels that are handled at a time on `HOPPER`. The key is (small, has RoPE). Tiles are
small if layouts are decoded element by element or there are many rows. With RoPE, cosines also need
shared memory."""

LEAST = Shape(1, 4, 1)
"""The smallest launch size, which fits every GPU."""

WIDE = 256
"""Padded channels up to which tiles grow. Of latents, 32 tokens are handled at a time: by 4 warps with the fewest
instructions, by 8 where 4 have too few registers."""


class LaunchPlan(NamedTuple):
    """Launch sizes of a call.

    rows: query rows per program. blocks: of 32 tokens handled at a time. splits: number of splits
    of split_tokens tokens each. warps, stages: as in Triton.
    """

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
    """Plan a launch for `heads` batch rows × key-value heads, R query rows each, over T tokens. No
    tile is longer than a page."""
    key = key_of(R, keys, values, device, has_rope)
    rows, shape = key.rows, chosen(key)
    if page_tokens is not None:
        shape = shape._replace(blocks=math.gcd(shape.blocks, page_tokens // 32))
    tile = 32 * shape.blocks
    tiles, programs = max(1, -(-T // tile)), max(1, heads * -(-R // rows))
    splits = max(1, min(tiles, shape.programs * multiprocessors(device) // programs))
    split_tokens = -(-tiles // splits) * tile
    return LaunchPlan(rows, shape.blocks, max(1, -(-T // split_tokens)), split_tokens, shape.warps, shape.stages)


def key_of(R: int, keys: Sequence[Leaf], values: Sequence[Leaf], device: torch.device, has_rope: bool) -> Key:
    """Return the key of a call with R query rows."""
    channels, on = max(leaf.spec[2] for leaf in (*keys, *values)), architecture(device)
    most = 16 if channels > WIDE and on not in HOPPER else 32  # more would not fit 99 KiB of shared memory
    if channels <= WIDE and not has_rope and any(_scales_query(leaf) for leaf in keys):
        most = 16  # each block of tokens has a scaled query of its own, so 32 rows would spill
    rows = 8 if R <= 8 else 16 if R <= 16 else most
    return Key(on, _kinds(keys), _kinds(values), has_rope, rows, channels, 0 if has_rope else _slices(keys, values))


def _slices(keys: Sequence[Leaf], values: Sequence[Leaf]) -> int:
    """Return how grids are read: `INTEGERS`, `SLICES` or 0."""
    grids = [leaf.spec for leaf in (*keys, *values) if leaf.spec[0] == constants.GRID.value and leaf.fields]
    if not grids or not all(sliced(grids, i) for i in range(len(grids))):
        return 0
    integers, scales, of_groups = constants.IS_INTEGER.value, constants.SCALES.value, constants.TO_COEFFICIENTS.value
    return INTEGERS if all(spec[integers] and spec[scales] == of_groups for spec in grids) else SLICES


def _scales_query(leaf: Leaf) -> bool:
    """True if the scales of a grid of keys are multiplied with the query."""
    spec, scales = leaf.spec, constants.SCALES.value
    return spec[0] == constants.GRID.value and spec[scales] == constants.TO_COEFFICIENTS.value


def shrink(key: Key) -> bool:
    """Choose a smaller size for a key whose kernel did not fit the GPU. False if there is none."""
    now = chosen(key)
    if now.stages == now.blocks == 1:
        return False
    TABLE[key] = now._replace(stages=1) if now.stages > 1 else now._replace(blocks=now.blocks // 2)
    chosen.cache_clear()
    return True


def _kinds(leaves: Sequence[Leaf]) -> tuple[tuple[int, int], ...]:
    """Return the kind and the first constant of its own of each leaf: bits of a grid, levels of
    polar."""
    return tuple((leaf.spec[0], leaf.spec[7] if len(leaf.spec) > 7 else 0) for leaf in leaves)


@functools.lru_cache(maxsize=1024)
def chosen(key: Key) -> Shape:
    """Return the measured choice, or else a derived one."""
    for known in (key, key._replace(architecture="")):
        if known in TABLE:
            return TABLE[known]
    kinds = {kind for kind, _ in (*key.keys, *key.values)}
    small, signs = key.rows > 16 or bool(kinds & SMALL), constants.SIGNS.value in kinds
    if key.channels > WIDE:
        return LEAST._replace(warps=8) if small or signs else LEAST
    large = key.rows > 16 or key.has_rope or constants.ROTATED_MEAN.value in kinds
    if key.architecture not in HOPPER and (large or key.architecture.startswith("gfx")):
        return LEAST
    blocks, most = TILES[small, key.has_rope] // (32 * key.channels), 4
    if not blocks:
        return LEAST
    if kinds == {constants.GRID.value} and key.slices == INTEGERS and key.rows <= 8:
        blocks, most = 2 * blocks, 8  # the others would spill
    # decoding element by element is bound by instructions: words that wait in shared memory only cost programs
    if kinds & SMALL:
        return Shape(min(blocks, 2), 4, 1)
    of_grids, elsewhere = constants.GRID.value in kinds and not small, key.architecture not in HOPPER
    stages = 1 if of_grids and (key.rows > 8 or (elsewhere and not key.slices)) else 2  # 2 would spill
    return Shape(min(blocks, 2 if small or (signs and elsewhere) else most), 4, stages)


def most_matrix(architecture: str) -> int:
    """Return the number of elements, with padding, of the largest matrix before RoPE that fits a
    program's shared memory. Compiled, a matrix of 256 × 128 takes 152 KiB, one of 256 × 64 takes
    69."""
    return 256 * (128 if architecture in HOPPER else 64)


@functools.cache
def architecture(device: torch.device) -> str:
    """Return the GPU's architecture, like sm_90 or gfx942; "" if kernels are interpreted."""
    if device.type != "cuda":
        return ""
    properties = torch.cuda.get_device_properties(device)
    of_amd = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
    return of_amd.partition(":")[0] or f"sm_{properties.major}{properties.minor}"


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the GPU's number of multiprocessors; 1 if there is no GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
