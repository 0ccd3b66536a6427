"""TurboQuant-MSE (arXiv 2504.19874, Algorithm 1): a random rotation, then each coordinate to the nearest entry of the
table that is optimal for a coordinate of a uniform point on the sphere; the norm apart.

y = R·x/‖x‖ has coordinates with density ∝ (1 − y²)^{(D−3)/2} (Lemma 1); the table is that density's Lloyd-Max
solution in the head's own dimension. Stored: codes and the norm, as ‖x‖/√D in float16 so that it cannot overflow. The
rotation is applied to the query and to the output, never to the cache. `correct_norm` stores the norm that makes ‖x̂‖
= ‖x‖ instead (the table shrinks vectors by 1 − MSE on average).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tersekv.codecs.base import Codec, Method, TableBytes, check_choice, check_range, for_both_sides
from tersekv.formats.base import Layout, Planes, Rotated, View
from tersekv.formats.grid import Grid, GridView, nearest_code, round_scale
from tersekv.tables.lloyd_max import sphere_table
from tersekv.tensors import cached_table
from tersekv.transforms.rotation import random_rotation


@dataclass(frozen=True)
class TurboQuant(Codec):
    """bits: 1 to 8. rotation: qr or hadamard. correct_norm: keep the vector's length exactly. seed: of the rotation."""

    bits: int = 4
    rotation: Literal["qr", "hadamard"] = "qr"
    correct_norm: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("bits", self.bits, 1, 8)
        check_range("seed", self.seed, 0, 2**31)
        check_choice("rotation", self.rotation, ("qr", "hadamard"))

    def grid(self, head_dim: int) -> Grid:
        """The memory layout: one scale per token."""
        return Grid(self.bits, self.side, "token", 0, False, head_dim)

    def layout(self, head_dim: int) -> Layout:
        """codes and scale."""
        return self.grid(head_dim).layout()

    def encode(self, x: Tensor) -> Planes:
        """x float32 [B, H, N·t, D] to planes. Rotated in float64: no code hangs on how tokens are batched."""
        D = x.shape[-1]
        table = sphere_entries(self.bits, D, str(x.device))
        rotated = torch.matmul(x.double(), self._matrix(D, str(x.device)).T.double()).float()
        groups = self.grid(D).groups(rotated)
        scale = groups.square().mean(-1).sqrt()
        codes = nearest_code(groups / torch.where(scale == 0, 1.0, scale).unsqueeze(-1), table)
        if self.correct_norm:
            scale = scale / table[codes.long()].square().mean(-1).sqrt()
        return self.grid(D).pack(codes, round_scale(scale, torch.float16, "a norm"), None)

    def _matrix(self, head_dim: int, device: str) -> Tensor:
        return random_rotation(head_dim, self.seed, self.rotation, device)

    def view(self, planes: Planes, head_dim: int) -> View:
        """Codes of rotated vectors."""
        device = str(planes["codes"].device)
        grid = GridView(self.grid(head_dim), planes, sphere_entries(self.bits, head_dim, device))
        return Rotated(grid, self._matrix(head_dim, device))

    def table_bytes(self, head_dim: int) -> TableBytes:
        """The table and the rotation, float32."""
        return TableBytes(
            {
                f"sphere {self.bits} {head_dim}": 4 * 2**self.bits,
                f"rotation {self.rotation} {head_dim} {self.seed}": 4 * head_dim**2,
            }
        )

    def tables(self, head_dim: int) -> list[Tensor]:
        """The tensors behind `table_bytes`."""
        return [sphere_entries(self.bits, head_dim, "cpu"), self._matrix(head_dim, "cpu")]


@cached_table
def sphere_entries(bits: int, D: int, device: str) -> Tensor:
    """The optimal table for √D times a sphere's coordinate, float32 [2^bits]."""
    return torch.tensor(sphere_table(bits, D), dtype=torch.float32, device=device)


METHOD = Method("TurboQuant-MSE", "arXiv 2504.19874", for_both_sides(TurboQuant))
