"""KVQuant's memory tables (arXiv 2401.18079v6, Tables 7 and 8), as the paper counts (Appendix M).

The paper counts b bits per element. Values add a 16-bit scale and a 16-bit offset per token over
all heads of a layer. Outliers add a 16-bit value and a 16-bit index each, and a 32-bit pointer per
token and layer. The average bits contain these pointers (4.32 to 4.35 with 4 bits). The GB of Table
8 are without them. Keys' scales and the codebooks are calibrated offline and do not grow with the
context.

GB are 2^30 bytes. 32K, 128K and 1M are powers of two: 7B with nuq2 takes 64 GB at 1M. 10M is 10^7,
which then takes 611.5 GB and fits into 640 GB, as the paper says. This is the paper's estimate;
`our_bits` are those of our stores, by `estimate.predict`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tersekv.sizes.cache_size import CacheShape
from tersekv.sizes.estimate import KNOWN, predict

GIB = 2**30
FORMATS = {
    "fp16": (16, 0.0), "nuq4": (4, 0.0), "nuq4-1%": (4, 0.01), "nuq3": (3, 0.0), "nuq3-1%": (3, 0.01),
    "nuq2": (2, 0.0), "nuq2-1%": (2, 0.01),
}  # fmt: skip
TABLE_7_TOKENS = {"32K": 32 * 2**10, "128K": 128 * 2**10, "1M": 2**20, "10M": 10**7}
TABLE_8_TOKENS = {"128K": 128 * 2**10, "1M": 2**20, "10M": 10**7}
INTERMEDIATE = {"LLaMA-7B": 11008, "LLaMA-13B": 13824, "LLaMA-30B": 17920, "LLaMA-65B": 22016}
VOCABULARY = 32000


class Row(NamedTuple):
    """One line of a table.

    gigabytes: by column. bits: per key or value element, in the paper's count and in our stores at
    128K tokens.
    """

    model: str
    label: str
    gigabytes: dict[str, float]
    bits: tuple[float, float] | None = None


def average_bits(shape: CacheShape, bits: int, outliers: float, pointers: bool = True) -> float:
    """Return the bits per key or value element. pointers: count those of the lists of outliers."""
    if bits == 16:
        return 16.0
    per_token = 32 / (shape.kv_heads * shape.key_dim) / 2  # of values only, so of half of all elements
    return bits + per_token + outliers * 32 + (per_token if outliers and pointers else 0)


def our_bits(shape: CacheShape, bits: int, outliers: float, tokens: int = TABLE_8_TOKENS["128K"]) -> float:
    """Return the bits per element of our store, everything counted, with one exact token."""
    if bits == 16:
        return 16.0
    recipe = f"window:sinks=1,recent=0,start=0+kvquant:bits={bits},outliers={outliers:g}"
    return predict(shape, recipe, tokens).bits_per_element


def cache_gigabytes(shape: CacheShape, bits: int, outliers: float, tokens: int, batch: int = 1) -> float:
    """Return the size of the cache in GB, as Table 8 counts."""
    return average_bits(shape, bits, outliers, pointers=False) * shape.elements(tokens, batch) / 8 / GIB


def model_gigabytes(name: str, bits: int) -> float:
    """Return the size of the weights in GB at `bits` bits: attention, gated MLP, and two
    embeddings.
    """
    shape = KNOWN[name]
    hidden = shape.kv_heads * shape.key_dim
    per_layer = 4 * hidden**2 + 3 * hidden * INTERMEDIATE[name]
    return (len(shape.windows) * per_layer + 2 * VOCABULARY * hidden) * bits / 8 / GIB


def table_7(batches: Sequence[int] = (1, 4)) -> list[Row]:
    """Return weights and cache at 16 and at 2 bits. The paper has batches of 1 and 4."""
    rows = []
    for batch in batches:
        for name, shape in KNOWN.items():
            for bits in (16, 2):
                sizes = {c: shape.elements(t, batch) * bits / 8 / GIB for c, t in TABLE_7_TOKENS.items()}
                rows.append(Row(name, f"batch {batch}, {bits} bits", {"model": model_gigabytes(name, bits), **sizes}))
    return rows


def table_8(batch: int = 1) -> list[Row]:
    """Return the cache size by format and context length. The paper has batch 1."""
    return [
        Row(
            name,
            label,
            {c: cache_gigabytes(shape, *spec, t, batch) for c, t in TABLE_8_TOKENS.items()},
            (average_bits(shape, *spec), our_bits(shape, *spec)),
        )
        for name, shape in KNOWN.items()
        for label, spec in FORMATS.items()
    ]
