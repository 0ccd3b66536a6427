"""Bytes of a cache by part, and its compression ratios.

Everything is counted: scales, tables, windows, slack, and positions and counts of selected tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tersekv.units import human_bytes

PARTS = ("codes", "scales and norms", "tables", "exact sinks", "exact window", "selection", "slack")


@dataclass
class Footprint:
    """Bytes held by a cache or by one of its layers.

    tokens: tokens received.
    elements: key and value elements of a full cache: batch × layers × heads × tokens × (Dk + Dv).
        Layers with a sliding window count its tokens only. Ratios and bits are relative to this
        number.
    parts: bytes by part.
    coded: number of layers by method and bits, see `LayerPlan.coded`.
    """

    tokens: int = 0
    elements: int = 0
    parts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    coded: dict[str, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Sum of all parts."""
        return sum(self.parts.values())

    @property
    def bits_per_element(self) -> float:
        """Stored bits per key or value element, everything counted. 0 for an empty cache."""
        return self.total_bytes * 8 / self.elements if self.elements else 0.0

    def ratio(self, bits: int = 16) -> float:
        """Return the size of an uncompressed cache divided by this one's. 0 for an empty cache.

        bits: bits per element of the uncompressed cache (16: bfloat16, 8: fp8).
        """
        return self.elements * bits / (self.total_bytes * 8) if self.total_bytes else 0.0

    def __str__(self) -> str:
        """Return tokens, bytes, bits and ratio in one line."""
        if not self.elements:
            return "empty"
        ratio = self.ratio()
        compared = f"{ratio:.2f} times smaller than" if ratio >= 1.005 else f"{1 / ratio:.2f} times the size of"
        return (
            f"{self.tokens:,} tokens, {human_bytes(self.total_bytes)}, {self.bits_per_element:.2f} bits per element, "
            f"{compared} bfloat16"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the figures for the program's JSON output and for records."""
        return {
            "tokens": self.tokens,
            "bytes": self.total_bytes,
            "bytes_by_part": dict(self.parts),
            "bits_per_element": round(self.bits_per_element, 4),
            "ratio_bf16": round(self.ratio(16), 4),
            "ratio_fp8": round(self.ratio(8), 4),
        }

    @staticmethod
    def sum(footprints: Iterable[Footprint]) -> Footprint:
        """Add up the layers. `tokens` is the largest."""
        total = Footprint()
        for footprint in footprints:
            total.tokens = max(total.tokens, footprint.tokens)
            total.elements += footprint.elements
            for part, size in footprint.parts.items():
                total.parts[part] += size
            for name, layers in footprint.coded.items():
                total.coded[name] = total.coded.get(name, 0) + layers
        return total
