"""Bytes held, by part, and the ratios that follow from them. Nothing is left out: scales, tables, windows, slack,
positions and counts of selected tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tersekv.units import human_bytes

PARTS = ("codes", "scales and norms", "tables", "exact sinks", "exact window", "selection", "slack")


@dataclass
class Footprint:
    """What a cache, or a layer of it, holds.

    parts: bytes by part. tokens: tokens seen. elements: key and value elements of the tokens that a full cache would
    hold (batch × layers × heads × tokens × (Dk + Dv), in layers with a sliding window its tokens); ratios and bits are
    per such element.
    """

    tokens: int = 0
    elements: int = 0
    parts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))

    @property
    def total_bytes(self) -> int:
        """All parts."""
        return sum(self.parts.values())

    @property
    def bits_per_element(self) -> float:
        """Stored bits per key or value element, everything counted; 0 for an empty cache."""
        return self.total_bytes * 8 / self.elements if self.elements else 0.0

    def ratio(self, bits: int = 16) -> float:
        """How many times smaller than a cache with `bits` per element (16: bfloat16, 8: fp8); 0 for an empty cache."""
        return self.elements * bits / (self.total_bytes * 8) if self.total_bytes else 0.0

    def __str__(self) -> str:
        """Tokens, bytes, bits and ratio in one line."""
        if not self.elements:
            return "empty"
        ratio = self.ratio()
        compared = f"{ratio:.2f} times smaller than" if ratio >= 1.005 else f"{1 / ratio:.2f} times the size of"
        return (
            f"{self.tokens:,} tokens, {human_bytes(self.total_bytes)}, {self.bits_per_element:.2f} bits per element, "
            f"{compared} bfloat16"
        )

    def to_dict(self) -> dict[str, Any]:
        """The figures of the program's JSON documents and of records."""
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
        """Layers added up; `tokens` is the largest."""
        total = Footprint()
        for footprint in footprints:
            total.tokens = max(total.tokens, footprint.tokens)
            total.elements += footprint.elements
            for part, size in footprint.parts.items():
                total.parts[part] += size
        return total
