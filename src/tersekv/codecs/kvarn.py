"""KVarN (arXiv 2606.03458): a Hadamard rotation and variance normalisation of tiles, then integers.

A tile is `tile` tokens of one head. Its rotated vectors y = H·x are divided by a factor per token
(keys) or per channel (values), and then rounded with one range along the other axis:

    keys    ŷ = factor[token]   · (min[channel] + scale[channel] · code)
    values  ŷ = factor[channel] · (min[token]   + scale[token]   · code)

Factors come from Sinkhorn's algorithm on the tile (`transforms/sinkhorn.py`): tokens and channels
are divided by their standard deviations in turns. Scales of the ranges' axis are part of the range,
so only the factors are stored. Range and factors are rounded to 16 bits before codes are chosen.

Sources. The paper's text was not at hand. The steps follow the public description and the reference
computation in the authors' repository. Published are 2 bits for keys and values, and 4 bits for
keys with 2 for values (`kvarn:bits=4/kvarn:bits=2`), in tiles of 128 tokens with 16 steps.

Differences: the authors bound the logarithm of a factor to −0.3 … 10, so tokens and channels whose
standard deviation is below 0.74 are not scaled up. Here factors are relative to the tile's root mean
square, within 10^±3. A head dim that is not a power of two is rotated in blocks. The rotation is
applied to the query and to the output, never to the cache.

Good for: 2 to 4 bits without data: it diverges less than kivi with fewer bits.
Bad for: texts without room for tiles: a tile of 128 tokens is packed at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tersekv.codecs.base import Codec, Method, TableBytes, check_range, for_both_sides
from tersekv.codecs.codebooks.fixed import integers
from tersekv.errors import UserError
from tersekv.kernels import backends
from tersekv.layouts.base import BLOCK_TOKENS, Layout, PackedTensors, Rotated
from tersekv.layouts.grid import Grid, GridView, round_scale
from tersekv.transforms.rotation import random_rotation, rotated
from tersekv.transforms.sinkhorn import column_scales

TOO_LARGE = "keep that layer exact: put ;LAYER=exact:dtype=bf16 after the recipe"


@dataclass(frozen=True)
class KVarN(Codec):
    """One side of KVarN.

    bits: 1 to 8.
    tile: tokens that are normalised together, a multiple of 32.
    steps: of Sinkhorn's algorithm, 0 for no normalisation.
    """

    bits: int = 2
    tile: int = 128
    steps: int = 16

    def __post_init__(self) -> None:
        check_range("bits", self.bits, 1, 8)
        check_range("tile", self.tile, BLOCK_TOKENS, 1024)
        check_range("steps", self.steps, 0, 1000)
        if self.tile % BLOCK_TOKENS:
            raise UserError(f"tile={self.tile} does not fit blocks of {BLOCK_TOKENS} tokens; give a multiple of it")

    def grid(self, head_dim: int) -> Grid:
        """Return the memory layout: keys have one range per channel, values one per token."""
        if self.side == "keys":
            return Grid(self.bits, "keys", "channel", self.tile, True, head_dim, tile=self.tile)
        return Grid(self.bits, "values", "token", 0, True, head_dim, tile=self.tile)

    def layout(self, head_dim: int) -> Layout:
        """Return the packed tensors: codes, scale, offset and factor."""
        return self.grid(head_dim).layout()

    def encode(self, x: Tensor) -> PackedTensors:
        """Encode x float32 [B, H, N·t, D] as packed tensors."""
        grid = self.grid(x.shape[-1])
        tiles = rotated(x, None, "hadamard").unflatten(2, (-1, self.tile))  # [B, H, N, t, D]
        factor = column_scales(tiles.mT if self.side == "keys" else tiles, self.steps)
        half = torch.finfo(torch.float16)
        factor = factor.clamp(half.smallest_normal, half.max).half()
        tiles = tiles / factor.float().unsqueeze(-1 if self.side == "keys" else -2)
        y = tiles.flatten(2, 3)
        low, high = backends.group_ranges(y, grid.place)
        scale = round_scale((high - low) / (2**self.bits - 1), torch.float16, "a scale", TOO_LARGE)
        offset = round_scale(low, torch.float16, "a minimum", TOO_LARGE)
        return grid.encode(y, None, scale, offset) | {"factor": factor}

    def view(self, planes: PackedTensors, head_dim: int) -> Rotated:
        """Return the view of codes with the codebook 0 … 2^b − 1 and the rotation."""
        device = str(planes["codes"].device)
        grid = GridView(self.grid(head_dim), planes, integers(self.bits, device), integers=True)
        return Rotated(grid, random_rotation(head_dim, None, "hadamard", device))

    def table_bytes(self, head_dim: int) -> TableBytes:
        """Return the bytes of the integers as floats, and of the rotation."""
        return TableBytes({f"integers {self.bits}": 4 * 2**self.bits, f"hadamard {head_dim}": 4 * head_dim**2})

    def tables(self, head_dim: int) -> list[Tensor]:
        """Return the tensors counted by `table_bytes`."""
        return [integers(self.bits, "cpu"), random_rotation(head_dim, None, "hadamard", "cpu")]


METHOD = Method(
    "KVarN",
    "arXiv 2606.03458",
    for_both_sides(KVarN),
    variants=({"bits": 4, "tile": 64}, {"bits": 3, "tile": 32, "steps": 0}),
)
