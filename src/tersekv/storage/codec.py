"""Codes of a group's tokens: one step for all bases of a file, chosen for a rate; pages of 256 tokens.

Errors of all groups and sides are in one unit, so a component gets the bits by which its variance
exceeds the common water level (reverse water-filling, Cover & Thomas, §10.3).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tersekv.storage import streams
from tersekv.storage.basis import Basis

PAGE = 256
"""Tokens of a page. Pages begin at multiples of it."""

FIRST, LAST = 4, 128
"""First and last tokens that are stored exactly: attention sinks and the recent window."""

SAMPLE = 512
"""Tokens that the step is chosen on."""

MOST_CODE = 2**15 - 1


class Span(NamedTuple):
    """Tokens of a group's layers: first to last are held, start to stop of them are coded, others exact."""

    first: int
    start: int
    stop: int
    last: int

    @staticmethod
    def of(first: int, last: int) -> Span:
        """Return the span of tokens first to last of a sequence of `last` tokens."""
        start, stop = max(first, FIRST), max(last - LAST, 0)
        return Span(first, start, stop, last) if start < stop else Span(first, last, last, last)

    @property
    def coded(self) -> int:
        """Number of coded tokens."""
        return self.stop - self.start

    def page_numbers(self) -> range:
        """Return the numbers of the pages with coded tokens."""
        return range(self.start // PAGE, -(-self.stop // PAGE) if self.coded else 0)

    def pages(self) -> Iterator[tuple[int, int, int]]:
        """Yield number, first and last token of each page with coded tokens."""
        for page in self.page_numbers():
            yield page, max(self.start, page * PAGE), min(self.stop, (page + 1) * PAGE)

    def exact(self, x: Tensor) -> Tensor:
        """Return the exact tokens of x [H, tokens held, D]."""
        return torch.cat([x[:, : self.start - self.first], x[:, self.stop - self.first :]], dim=1)


def quantised(y: Tensor, step: float) -> Tensor:
    """Return codes int16 of components."""
    return (y / step).round().clamp(-MOST_CODE, MOST_CODE).to(torch.int16)


def level(parts: Sequence[tuple[Tensor, int]], bits: float, table_bits: Callable[[float], float]) -> float:
    """Return the water level at which components and tables of their bases have so many bits.

    parts: the variances of each basis, and the number of tokens. table_bits: bits of all tables at a level.
    """

    def total(at: float) -> float:
        return table_bits(at) + sum(n * float((v / at).clamp_min(1).log2().sum()) / 2 for v, n in parts)

    low, high = -100.0, math.log2(max(float(v.max()) for v, _ in parts) + 1e-30) + 1
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if total(2**middle) > bits else (low, middle)
    return float(2**high)


def step_for(parts: Sequence[tuple[Tensor, int]], bits: float) -> float:
    """Return the step with which all components have so many bits, by their entropy in bands.

    parts: components [k, sample] of each basis, and the number of tokens that they stand for.
    """
    largest = max((float(y.abs().max()) for y, _ in parts), default=0.0)
    if not largest:
        return 1.0
    low, high = math.log2(largest) - 15, math.log2(largest) + 1
    for _ in range(14):
        middle = (low + high) / 2
        found = sum(_bits(quantised(y, 2**middle)) * n / y.shape[1] for y, n in parts)
        low, high = (middle, high) if found > bits else (low, middle)
    return float(2**high)


def _bits(codes: Tensor) -> float:
    """Return the bits of codes [k, T], each band by its own entropy."""
    bands = torch.arange(len(codes)) // streams.BAND
    low, high = (int(end) for end in codes.aminmax())
    width = high - low + 1
    counts = torch.bincount(
        ((codes - low).long() + bands[:, None] * width).flatten(), minlength=int(bands[-1] + 1) * width
    )
    counts = counts.view(-1, width).double()
    p = counts / counts.sum(1, keepdim=True)
    return float(-(counts * p.clamp_min(1e-300).log2()).sum())


def sample(span: Span) -> Tensor:
    """Return the places, among the coded tokens, of those that a step is chosen on."""
    return torch.linspace(0, span.coded - 1, min(SAMPLE, span.coded)).long()


class Pages(NamedTuple):
    """Codes [k, tokens] of consecutive pages of one side of a group, in the smallest type that fits."""

    basis: Basis
    step: float
    codes: list[Tensor]

    @staticmethod
    def of(basis: Basis, step: float, pages: Sequence[tuple[bytes, int]]) -> Pages:
        """Return the codes of pages: their bytes and tokens.

        Raises:
            UserError: bytes are not those of a page.
        """
        codes = []
        for data, tokens in pages:
            page = streams.unpack(data, len(basis.rows), tokens)
            small = not page.numel() or int(page.abs().max()) < 128
            codes.append(page.to(torch.int8) if small else page)
        return Pages(basis, step, codes)

    def vectors(self, first: int, last: int) -> Iterator[Tensor]:
        """Yield numbers first to last of the vectors of each page, float32 [tokens, last − first]."""
        for page in self.codes:
            yield self.basis.head(len(page)).vectors(page.float() * self.step, first, last)


def exact_bytes(x: Tensor) -> bytes:
    """Return the bytes of exact tokens, a tensor with 16 bits per number."""
    return streams.pack_bytes(x.contiguous().view(torch.int16).numpy().tobytes())


def exact_tensor(data: bytes, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the tensor of `exact_bytes`.

    Raises:
        UserError: the bytes are not those of such a tensor.
    """
    raw = streams.unpack_bytes(data, 2 * math.prod(shape))
    return torch.frombuffer(bytearray(raw), dtype=dtype).view(*shape) if raw else torch.empty(*shape, dtype=dtype)


def offsets(widths: Sequence[int]) -> list[tuple[int, int]]:
    """Return first and last number of each layer in a group's vectors."""
    return list(itertools.pairwise([0, *itertools.accumulate(widths)]))
