"""Codebooks of the trellis codes for N(0, 1): 256 entries, one per state, for 1 to 8 bits per
component.

Each entry is the mean of the samples that the best path assigns to its state, which changes the
paths. This is a generalised Lloyd iteration (Linde, Buzo & Gray 1980). At its start the 2^b
successors of every state are spread over the density, with 2^(8−b) such subsets, as in Ungerboeck's
partition. Entries are int8 times a scale, so that integer kernels can use them directly.

Squared errors of 64 components in a circular stream at 1 to 8 bits: .288, .0771, .0207, .0057,
.0018, .00064, .00019, .000095. Scalar float codebooks have .363, .1175, .0345, .0095, .0025,
.00064, .00016, .000041 (tests/codecs/test_claims_trellis.py).

    python -m tersekv.codecs.codebooks.trellis FILE      # makes the file that is shipped; minutes
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tersekv.codecs.codebooks.lloyd_max import gaussian_table
from tersekv.kernels.trellis_search import MOST_BITS, STATES
from tersekv.tensors import cached_table

SHIPPED = Path(__file__).with_suffix(".safetensors")
TRAINED = 6
"""Maximum bits of a trained codebook.

With 7 and 8 bits few bits of a state are old, and Lloyd-Max codebooks are as good.
"""

Encode = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@cached_table
def trellis_entries(device: str) -> Tensor:
    """Return the codebooks float32 [9, 256]: row b is for b bits, row 0 is zeros."""
    return (entries_int8().float() * entry_scale()[:, None]).to(device)


@cached_table
def entries_int8() -> Tensor:
    """Return the codebooks as int8, to be multiplied by `entry_scale`."""
    return load_file(SHIPPED)["entries"]


@cached_table
def entry_scale() -> Tensor:
    """Return the scale of each codebook, float32 [9]."""
    return load_file(SHIPPED)["scale"]


@cached_table
def scalar_entries(device: str) -> Tensor:
    """Return Lloyd-Max codebooks indexed by windows, float32 [9, 256].

    The newest b bits are the code.
    """
    entries = torch.zeros(MOST_BITS + 1, STATES)
    for bits in range(1, MOST_BITS + 1):
        entries[bits] = _scalar(bits)
    return entries.to(device)


def trained(bits: int, encode: Encode, seed: int, rounds: int = 60, vectors: int = 2000, dim: int = 128) -> Tensor:
    """Train a codebook float32 [256] for `bits` bits by generalised Lloyd on normal samples.

    encode: a function like `kernels.trellis.encode_trellis`.
    """
    generator = torch.Generator().manual_seed(seed)
    tables = torch.zeros(MOST_BITS + 1, STATES)
    tables[bits] = _first(bits, generator)
    widths = torch.full((1, dim), bits, dtype=torch.uint8)
    for _ in range(rounds):
        y = torch.randn(1, vectors, dim, generator=generator)
        windows = encode(y, torch.ones(1, dim), widths, tables).flatten().long()
        count = torch.bincount(windows, minlength=STATES)
        total = torch.zeros(STATES).index_add_(0, windows, y.flatten())
        tables[bits] = torch.where(count > 50, total / count.clamp_min(1), tables[bits])
    return tables[bits]


def _first(bits: int, generator: torch.Generator) -> Tensor:
    """Return quantiles of the normal density, dealt to the successors of each older state."""
    quantiles = torch.special.ndtri((torch.arange(STATES, dtype=torch.float64) + 0.5) / STATES).float()
    older = STATES >> bits
    dealt = torch.empty(1 << bits, older)
    for state, subset in enumerate(torch.randperm(older, generator=generator).tolist()):
        own = quantiles[subset::older]
        dealt[:, state] = own[torch.randperm(len(own), generator=generator)]
    return dealt.flatten()


def _scalar(bits: int) -> Tensor:
    """Return the Lloyd-Max codebook with one entry per state, selected by its newest bits."""
    return torch.tensor(gaussian_table(bits), dtype=torch.float32).repeat_interleave(STATES >> bits)


def squared_error(bits: int, encode: Encode, tables: Tensor, vectors: int = 2000, dim: int = 128) -> float:
    """Return the mean squared error on new normal samples."""
    y = torch.randn(1, vectors, dim, generator=torch.Generator().manual_seed(12345))
    widths = torch.full((1, dim), bits, dtype=torch.uint8)
    windows = encode(y, torch.ones(1, dim), widths, tables)
    return float((y - tables[bits][windows.long()]).square().mean())


def main(path: Path) -> None:
    """Train every codebook from three starts and write the best of each, with the best of some
    scales.
    """
    from tersekv.kernels.backends import encode_trellis

    entries, scales = torch.zeros(MOST_BITS + 1, STATES, dtype=torch.int8), torch.ones(MOST_BITS + 1)
    for bits in range(1, MOST_BITS + 1):
        found = []
        for table in [trained(bits, encode_trellis, seed) for seed in range(3)] if bits <= TRAINED else [_scalar(bits)]:
            for largest in table.abs().unique()[-8 if bits > TRAINED else -1 :]:
                scale = largest / 127
                rounded = (table / scale).round().clamp(-127, 127)
                tables = torch.zeros(MOST_BITS + 1, STATES)
                tables[bits] = rounded * scale
                found.append((squared_error(bits, encode_trellis, tables), rounded.to(torch.int8), scale))
        error, entries[bits], scales[bits] = min(found, key=lambda one: one[0])
        print(f"{bits} bits: squared error {error:.5f}")
    save_file({"entries": entries, "scale": scales}, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
