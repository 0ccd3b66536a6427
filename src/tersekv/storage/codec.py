"""Codes of a group's tokens: one step for all bases of a file, chosen for a rate; pages of 256 tokens.

Errors of all groups and sides are in one unit, so a component gets the bits by which its variance
exceeds the common water level (reverse water-filling, Cover & Thomas, §10.3).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tersekv.errors import UserError
from tersekv.storage import streams
from tersekv.storage.basis import Basis

PAGE = 256
"""Tokens of a page. Pages begin at multiples of it, and the last tokens are a page of their own."""

FIRST = 4
"""First tokens that are stored exactly: attention sinks."""

LAST, FINER = 128, 2.0
"""Number of last tokens, the recent window, and the octaves by which their steps are finer."""

FADE = 1.5
"""Octaves by which the steps of the tokens before the recent window are finer, at its edge; 0 at 16 windows."""

WEIGHED = 1.5
"""Most octaves by which a token's weight makes its step finer or coarser."""

PER_OCTAVE = 4
"""Steps of tokens are powers of 2^(1/4) times the step of a file."""

SAMPLE = 512
"""Tokens that the step is chosen on."""

RATES = 0.1, 8.0
"""Least and most bits per number."""

MOST_CODE, MOST_EXPONENT = 2**15 - 1, 64


def check_rate(rate: float, least: float = RATES[0]) -> None:
    """Raise UserError unless a rate has an allowed number of bits."""
    if not least <= rate <= RATES[1]:
        raise UserError(f"storage={rate:g} is not allowed; give {least} to {RATES[1]:g} bits per number")


class Span(NamedTuple):
    """Tokens of a group's layers: first to last are held, start to last of them are coded, others exact."""

    first: int
    start: int
    last: int

    @staticmethod
    def of(first: int, last: int) -> Span:
        """Return the span of tokens first to last of a sequence of `last` tokens."""
        start = max(first, FIRST)
        return Span(first, start if start < last - LAST else last, last)

    @property
    def coded(self) -> int:
        """Number of coded tokens."""
        return self.last - self.start

    @property
    def pages(self) -> dict[int, tuple[int, int]]:
        """First and last coded token of each page, by its number in the sequence. The last page has the last tokens."""
        recent = max(self.last - LAST, 0)
        cuts = [*range(0, recent, PAGE), recent, self.last]
        ends = {n: (max(self.start, first), last) for n, (first, last) in enumerate(itertools.pairwise(cuts))}
        return {n: (first, last) for n, (first, last) in ends.items() if first < last}

    def exponents(self, weights: Tensor) -> Tensor:
        """Return int16 [coded]: the steps of coded tokens are 2^(−exponent / PER_OCTAVE) times a file's step.

        weights: float32 [coded], log2 of the weight of each token's errors. A weight four times as large
        halves the step. Later tokens read recent tokens more than others.
        """
        ago = torch.arange(self.coded, 0, -1)
        recent = (FADE * (1 - (ago / LAST).log2() / 4)).clamp_min(0)
        octaves = recent + _finer(weights)
        return (PER_OCTAVE * torch.where(ago > LAST, octaves, FINER)).round().to(torch.int16)


def chunk_exponents(weights: Tensor) -> Tensor:
    """Return the exponents of `Span.exponents` for tokens of which no later ones are known to be recent."""
    return (PER_OCTAVE * _finer(weights)).round().to(torch.int16)


def _finer(weights: Tensor) -> Tensor:
    """Return the octaves by which steps are finer for the weights of tokens' errors."""
    return ((weights - weights.mean()) / 2).clamp(-WEIGHED, WEIGHED)


def scaled(y: Tensor, exponents: Tensor) -> Tensor:
    """Return components [k, T] in units of their token's step, relative to a file's."""
    return y * (exponents / PER_OCTAVE).exp2()


def quantised(y: Tensor, step: float) -> Tensor:
    """Return codes int16 of scaled components.

    Rounding small components to 0 where that saves bits errs 16 % less at equal bits in the metric,
    and diverges 1.5 to 2 times as much (SmolLM2-135M, two windows): such errors of tokens are alike
    and do not average out in attention.
    """
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

    parts: scaled components [k, sample], and the number of tokens that they stand for.
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
        (codes.long() - low + bands[:, None] * width).flatten(), minlength=int(bands[-1] + 1) * width
    )
    counts = counts.view(-1, width).double()
    p = counts / counts.sum(1, keepdim=True)
    return float(-(counts * p.clamp_min(1e-300).log2()).sum())


def sample(tokens: int) -> Tensor:
    """Return the places of those of so many tokens that a step is chosen on."""
    return torch.linspace(0, tokens - 1, min(SAMPLE, tokens)).long()


def pack(codes: Sequence[Tensor], exponents: Sequence[Tensor]) -> tuple[bytes, list[bytes]]:
    """Return the bytes of a table and of each of some pages: codes int16 [k, tokens], exponents int16 [tokens]."""
    return streams.pack([(e[None], q) for q, e in zip(codes, exponents, strict=True)])


class Page(NamedTuple):
    """Codes int16 [k, tokens] of a page of one side of a group, and the steps of its tokens, float32 [tokens]."""

    codes: Tensor
    steps: Tensor

    @staticmethod
    def of(table: bytes, page: bytes, components: int, tokens: int, step: float) -> Page:
        """Return a page of `pack`. components: at most so many. step: of the file.

        Raises:
            UserError: bytes are not those of a page.
        """
        exponents, codes = streams.unpack(table, page, (1, components), tokens)
        if int(exponents.abs().max()) > MOST_EXPONENT:
            raise UserError("has exponents that are not possible")
        return Page(codes, step * (-exponents[0] / PER_OCTAVE).exp2())


class Components(NamedTuple):
    """Components y [tokens, k] of pages that follow each other, in steps of their tokens, float32 [tokens].

    y is bfloat16 where products of it are fast. Rounding it errs as much as rounding rows to int8.
    """

    y: Tensor
    steps: Tensor

    @staticmethod
    def of(pages: Sequence[Page], basis: Basis) -> Components:
        """Return the components of some pages of a group's side with this basis."""
        steps = torch.cat([page.steps for page in pages])
        dtype = torch.bfloat16 if _fast_bfloat16() else torch.float32
        y, at = torch.zeros((len(steps), max(len(page.codes) for page in pages)), dtype=dtype), 0
        for codes, own in pages:
            y[at : at + len(own), : len(codes)] = (codes * basis.scale[: len(codes), None]).T
            at += len(own)
        return Components(y, steps)

    def vectors(self, basis: Basis, first: int, last: int) -> Tensor:
        """Return numbers first to last of the vectors, float32 [tokens, last − first]."""
        x = self.y @ basis.rows[: self.y.shape[1], first:last].to(self.y.dtype)  # int8 is exact in bfloat16
        return basis.mean[first:last].float() + self.steps[:, None] * basis.channels[first:last] * x


@functools.cache
def _fast_bfloat16() -> bool:
    """True if the CPU multiplies bfloat16 matrices faster than float32 ones."""
    return bool(torch.cpu._is_avx512_bf16_supported())


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
