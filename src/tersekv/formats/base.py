"""What every packed layout states: its planes, and how attention reads them.

Shapes: B batch, H key-value heads, N blocks, t tokens per block, T = N·t, R query rows per head, D head dim.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["codes", "scales and norms"]
Side = Literal["keys", "values"]
Planes = dict[str, Tensor]

BLOCK_TOKENS = 32


@dataclass(frozen=True)
class PlaneSpec:
    """One tensor of a packed block: `shape` and `dtype` per block, and the part of the footprint it counts to."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: Kind

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one head."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """The planes of a packed segment; every plane is [B, H, N, *shape]."""

    block_tokens: int
    planes: dict[str, PlaneSpec]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one head, all planes."""
        return sum(spec.block_bytes for spec in self.planes.values())

    def bits(self, head_dim: int) -> float:
        """Stored bits per element."""
        return self.block_bytes * 8 / (self.block_tokens * head_dim)


class View(ABC):
    """A packed segment as attention reads it. `scores` and `weighted_sum` default to decoding everything."""

    @abstractmethod
    def decode(self) -> Tensor:
        """x̂ as float32 [B, H, T, D]."""

    def scores(self, query: Tensor) -> Tensor:
        """q·k̂ for query float32 [B, H, R, D]: float32 [B, H, R, T], unscaled."""
        return torch.matmul(query, self.decode().transpose(-1, -2))
