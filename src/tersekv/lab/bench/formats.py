"""Formats that `tersekv bench attend` can time: packed segments of random keys and values."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from tersekv.cache.coding import Tokens, chunks, encode
from tersekv.codecs.base import Codec
from tersekv.errors import UserError
from tersekv.kernels.attend_packed import Operand
from tersekv.layouts.base import PackedTensors, Sum
from tersekv.layouts.mean_removed import RotatedMean
from tersekv.layouts.roped import Roped
from tersekv.recipe import Recipe
from tersekv.transforms.rope import Rope, standard_rope

# Recipe that packs both sides, by format name. Rotating the query is not timed. "-prerope" applies
# RoPE to decoded keys. "-centred" adds the keys' constant part, rotated by RoPE, as attention with
# `trellis` does ("trellis2" alone omits it).
FORMATS = {
    "grid4": "kivi:bits=4",
    "grid3": "kivi:bits=3",
    "grid2": "kivi:bits=2",
    "grid1": "kivi:bits=1",
    "turboquant4": "turboquant:bits=4",
    "qjl256": "qjl:sketch=256,outliers=0,value_bits=4,initial_layers=0",
    "qjl256+outliers": "qjl:sketch=256,outlier_sketch=256,value_bits=4,initial_layers=0",
    "polar": "polarquant",
    "trellis2": "trellis:bits=2,calibration=prompt",
    "trellis2-centred": "trellis:bits=2,calibration=prompt",
    "trellis3": "trellis:bits=3,calibration=prompt",
    "trellis3-centred": "trellis:bits=3,calibration=prompt",
    "nuq4": "kvquant:bits=4,calibration=prompt,outliers=0",
    "nuq4-1%": "kvquant:bits=4,calibration=prompt",
    "nuq4-1%-prerope": "kvquant:bits=4,calibration=prompt",
}
DRAWN_TOKENS = 4096
FIT_TOKENS = 1024


class Packer(NamedTuple):
    """A codec and tensors packed by it."""

    codec: Codec
    planes: PackedTensors
    head_dim: int
    rope: str = ""  # "prerope", "centred" or none

    def operand(self) -> Operand:
        """Return the kernel's operand for these tensors."""
        view = self.codec.view(self.planes, self.head_dim).inner
        if self.rope:
            rope = _rope(self.head_dim)
            plane = next(iter(self.planes.values()))
            tokens = plane.shape[2] * self.codec.layout(self.head_dim).block_tokens
            angles = rope.angles(0, tokens, device=plane.device)
            if self.rope == "prerope":
                view = Roped(view, rope, angles)
            else:
                ones = torch.ones(1, plane.shape[1], self.head_dim, device=plane.device)
                view = Sum([view, RotatedMean(ones, rope, angles)])
        return view.operand

    def copy(self) -> Packer:
        """Return a copy in other memory."""
        return self._replace(planes={name: plane.clone() for name, plane in self.planes.items()})

    @property
    def bytes(self) -> int:
        """Size of all packed tensors."""
        return sum(plane.numel() * plane.element_size() for plane in self.planes.values())


@functools.cache
def _rope(head_dim: int) -> Rope:
    """Return the RoPE of all copies. As in a model, its tables are made once and not at the first call of each."""
    return standard_rope(head_dim)


class PackedPair(NamedTuple):
    """Packed keys and values."""

    keys: Packer
    values: Packer

    def operands(self) -> tuple[Operand, Operand]:
        """Return the kernel's operands for keys and values."""
        return self.keys.operand(), self.values.operand()

    def copy(self) -> PackedPair:
        """Return a copy in other memory."""
        return PackedPair(self.keys.copy(), self.values.copy())

    @property
    def bytes(self) -> int:
        """Size of keys and values together."""
        return self.keys.bytes + self.values.bytes


def chosen(text: str) -> tuple[str, ...]:
    """Parse format names separated by commas, or "all".

    Raises:
        UserError: an unknown format.
    """
    if text.strip() == "all":
        return tuple(FORMATS)
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in FORMATS:
            raise UserError(f"--formats {name!r} is not a known format: choose from {', '.join(FORMATS)}, or all")
    return names


def make_segment(name: str, heads: int, tokens: int, D: int, seed: int, device: str = "cpu") -> PackedPair:
    """Pack normally distributed keys and values [1, heads, tokens, D], drawn on the device, as
    `name`."""
    plan = Recipe.parse(FORMATS[name]).plan(0, 1)
    g = torch.Generator(device).manual_seed(seed)
    keys, values = (_pack(codec, heads, tokens, D, g) for codec in (plan.keys, plan.values))
    _, _, rope = name.rpartition("-")
    return PackedPair(keys._replace(rope=rope if rope in ("prerope", "centred") else ""), values)


def _pack(codec: Codec, heads: int, tokens: int, D: int, g: torch.Generator) -> Packer:
    block_tokens = codec.layout(D).block_tokens
    if tokens % block_tokens:
        raise UserError(f"--tokens {tokens} is not valid: give a multiple of {block_tokens}, the tokens of a block")
    pieces: list[PackedTensors] = []
    for first in range(0, tokens, DRAWN_TOKENS):
        x = torch.randn(1, heads, min(DRAWN_TOKENS, tokens - first), D, generator=g, device=g.device)
        if codec.needs_fit == "prompt":
            codec = codec.fit(x[:, :, :FIT_TOKENS])
        pieces += [encode(codec, Tokens(x[:, :, start:stop])) for start, stop in chunks(0, x.shape[2], block_tokens, x)]
    return Packer(codec, codec.layout(D).join(pieces), D)
