"""Chunks of a cache in the storage codec (`tersekv.storage`), for LMCache: one page that can be read alone.

A chunk has the header of `chunks.py`, and as many bytes as its rate and shape give:

```text
position  of the chunk's first token, uint32
step      float32
lengths   of the streams, uint32 each
streams   for each group of layers: of keys, then of values, exact tokens, table and page
zeros     up to the size
```

LMCache does not pass positions, and the codec's keys are those before RoPE. The position is the one
with which the mean of the chunk's keys is closest to that of the calibration. A wrong one costs
accuracy alone, because decoding applies RoPE with the position that the chunk holds.
"""

from __future__ import annotations

import itertools
import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tersekv.calibration.storage_basis import SIDES, layer_groups, read_bases
from tersekv.errors import CacheError, UserError
from tersekv.layouts.base import Side
from tersekv.models.config import AttentionShape, longest_context, text_config
from tersekv.models.loading import load_config, resolve
from tersekv.models.rope import Ropes
from tersekv.serving.chunks import HEADER, Shape, checked_body, header
from tersekv.storage import codec, streams
from tersekv.storage.codec import FIRST, Components, Page
from tersekv.transforms.rope import NO_ROPE, Rope

LEAST = 0.5
"""Least bits per number. The first chunk of a prompt has exact tokens within its size."""

BLOCK = 16
"""Chunks begin at multiples of it: the engines' pages of tokens."""

LONGEST = 2**17
"""Positions that are considered, of models without a longest context."""

COARSER = 2**0.125
"""Ratio of steps that are tried until a chunk fits into its size."""


class StoredChunkCoder:
    """Packs and unpacks chunks at `rate` bits per number, as `ChunkCoder` does.

    model: folder, file or name whose config gives layers and RoPE. calibration: of `tersekv calibrate --storage`.

    Raises:
        UserError: the rate, the model or its calibration does not support chunks.
    """

    def __init__(self, rate: float, model: str, calibration: str | Path) -> None:
        streams.require_packages("storage in chunks")
        codec.check_rate(rate, LEAST)
        config = text_config(load_config(str(resolve(model))))  # that of a known name lacks the base of RoPE
        found, shape = read_bases(Path(calibration).expanduser(), config), AttentionShape.of(config)
        self.rate, self.bases, self.digest = rate, found.bases, found.digest
        self.groups = layer_groups(config, found.numbers)
        self.dims = {"keys": shape.key_dim, "values": shape.value_dim}
        self.width = shape.kv_heads * shape.key_dim
        ropes = Ropes(config, shape.key_dim)
        self.ropes = [ropes.known(i) or NO_ROPE for i in range(sum(map(len, self.groups)))]
        if shape.key_dim != shape.value_dim or sorted(itertools.chain(*self.groups)) != list(range(len(self.ropes))):
            raise UserError(f"{model} has keys and values of other widths, or layers without any: use a recipe")
        if any(rope.varies for rope in self.ropes):
            raise UserError(
                f"the RoPE of {model} depends on the prompt's length, which chunks do not have: use a recipe"
            )
        self.context = min(longest_context(config) or LONGEST, LONGEST)
        self._analyses = {where: basis.analysis() for where, basis in self.bases.items()}

    def size(self, shapes: Sequence[Shape]) -> int:
        """Return the exact size of a chunk in bytes."""
        _, L, T, width = self._checked(shapes)
        return HEADER.size + self._fixed() + math.ceil(2 * L * T * width * self.rate / 8)

    def _fixed(self) -> int:
        return 8 + 4 * 3 * 2 * len(self.groups)

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Pack a tensor [2, L, T, H·D] of any float dtype into uint8 [size]."""
        shapes = [tuple(x.shape) for x in tensors]
        room = self.size(shapes) - HEADER.size
        x = tensors[0].detach().cpu()
        at = self._position(x[0])
        first = min(FIRST, x.shape[2]) if at == 0 else 0
        exact = {
            (g, side): codec.exact_bytes(_half(x[SIDES.index(side), layers, :first]))
            for g, layers in enumerate(self.groups)
            for side in SIDES
        }
        codes, exponents = {}, {}
        for where in exact if first < x.shape[2] else ():
            vectors, basis = self._vectors(x, at, *where)[first:], self.bases[where]
            exponents[where] = codec.chunk_exponents(basis.weights(vectors))
            codes[where] = codec.scaled(basis.components(vectors, self._analyses[where]), exponents[where])
        left = room - self._fixed() - sum(map(len, exact.values()))
        step = codec.step_for([(y, y.shape[1]) for y in codes.values()], 8 * 0.98 * left)
        while True:
            rounded = {where: codec.quantised(y, step) for where, y in codes.items()}
            parts = []
            for where, data in exact.items():
                some = [rounded[where]] if where in codes else []
                table, pages = codec.pack(some, [exponents[where]] if some else [])
                parts += [data, table, *(pages or [b""])]
            head = struct.pack(f"<If{len(parts)}I", at, step, *map(len, parts))
            if (spare := room - len(head) - sum(map(len, parts))) >= 0:
                break
            if not any(bool(q.any()) for q in rounded.values()):
                raise UserError(f"a chunk of {shapes} has no room for its first tokens at {self.rate:g} bits")
            step *= COARSER
        body = torch.frombuffer(bytearray(head + b"".join(parts) + b"\0" * spare), dtype=torch.uint8)
        return torch.cat([header(self._what(shapes), body), body])

    def unpack(self, data: Tensor, out: Sequence[Tensor]) -> None:
        """Unpack uint8 bytes into `out`, a tensor of the shape that was packed.

        Raises:
            CacheError: the bytes are truncated, damaged, or of another rate, calibration or shape.
        """
        shapes = [tuple(x.shape) for x in out]
        body = checked_body(data, self._what(shapes), self.size(shapes), f"storage={self.rate:g}, {shapes}")
        raw, fixed = body.numpy().tobytes(), self._fixed()
        at, step, *lengths = struct.unpack_from(f"<If{(fixed - 8) // 4}I", raw)
        if not 0 < step < math.inf or at >= self.context or fixed + sum(lengths) > len(raw):
            raise CacheError("this chunk has a position, a step or lengths that are not possible")
        ends = itertools.accumulate(lengths, initial=fixed)
        parts = iter([raw[begin:end] for begin, end in itertools.pairwise(ends)])
        for g, layers in enumerate(self.groups):
            for side in SIDES:
                try:
                    found = self._decoded(g, side, at, step, [next(parts) for _ in range(3)], shapes[0][2])
                    for layer, x in zip(layers, found, strict=True):
                        target = out[0][SIDES.index(side), layer]
                        target.copy_(x.to(target.dtype))
                except UserError as error:
                    raise CacheError(f"this chunk is wrong: {side} of group {g} {error}") from error

    def _decoded(self, g: int, side: Side, at: int, step: float, parts: list[bytes], T: int) -> Iterator[Tensor]:
        """Yield the tokens [T, H·D] of each layer of a group."""
        exact, table, data = parts
        layers, basis, width = self.groups[g], self.bases[g, side], self.width
        first = min(FIRST, T) if at == 0 else 0
        kept = codec.exact_tensor(exact, (len(layers), first, width), torch.bfloat16)
        pages = [Page.of(table, data, len(basis.rows), T - first, step)] if first < T else []
        found = Components.of(pages, basis) if pages else None
        for place, layer in enumerate(layers):
            x = torch.zeros((T, width))
            if found is not None:
                x[first:] = found.vectors(basis, place * width, (place + 1) * width)
                x = self._rotated(x, layer, at, -1) if side == "keys" else x
            x[:first] = kept[place].float()
            yield x

    def _rotated(self, x: Tensor, layer: int, at: int, sign: int) -> Tensor:
        """Return keys [T, H·D] of a layer with RoPE removed (sign 1) or applied (−1). at: position of the first."""
        rope, heads = self.ropes[layer], x.float().unflatten(1, (-1, self.dims["keys"])).transpose(0, 1)[None]
        cos, sin = rope.cos_sin(at, len(x), at + len(x), torch.device("cpu"))
        done = (rope.invert if sign > 0 else rope.apply)(heads, cos[None], sin[None])
        return done[0].transpose(0, 1).flatten(1)

    def _vectors(self, x: Tensor, at: int, g: int, side: Side) -> Tensor:
        """Return the vectors [T, n] of a group; keys before RoPE. x: [2, L, T, H·D]."""
        parts = [x[SIDES.index(side), layer].float() for layer in self.groups[g]]
        if side == "keys":
            parts = [self._rotated(part, layer, at, 1) for layer, part in zip(self.groups[g], parts, strict=True)]
        return torch.cat(parts, dim=1)

    def _position(self, keys: Tensor) -> int:
        """Return the likeliest position of the first token of keys [L, T, H·D].

        Σ_t ⟨R(−p − t)·k_t, μ⟩ is largest at the position p, because vectors before RoPE have the mean μ.
        """
        starts = torch.arange(0, max(1, self.context - keys.shape[1] + 1), BLOCK)
        sums: dict[int, tuple[Rope, Tensor]] = {}
        some = keys[:, FIRST:] if keys.shape[1] > FIRST else keys
        for g, layers in enumerate(self.groups):
            for place, layer in enumerate(layers):
                rope = self.ropes[layer]
                if rope is NO_ROPE:
                    continue
                total = self._rotated(some[layer], layer, keys.shape[1] - some.shape[1], 1).sum(0)
                mean = self.bases[g, "keys"].mean[place * self.width : (place + 1) * self.width].float()
                before = sums[id(rope)][1] if id(rope) in sums else 0.0
                sums[id(rope)] = rope, self._factors(rope, total, mean) + before
        scores = torch.zeros(len(starts))
        for rope, factors in sums.values():
            cos, sin = rope.angles_at(starts).cos_sin()
            scores += torch.cat([cos[0], sin[0]], dim=-1) @ factors
        return int(starts[scores.argmax()])

    def _factors(self, rope: Rope, total: Tensor, mean: Tensor) -> Tensor:
        """Return those of cos and sin in ⟨total, R(p)·mean⟩, [2R]. Channels that are not rotated are left out."""
        total, mean = (x.unflatten(0, (-1, self.dims["keys"])) for x in (total, mean))
        R = rope.angles_at(torch.zeros(1, dtype=torch.int64)).cos_sin()[0].shape[-1]
        one = torch.cat([torch.zeros(1, 2 * R), torch.eye(2 * R)])  # no angle at all, then one factor at a time
        at = rope.apply(mean[None, :, None].expand(-1, -1, len(one), -1), *one[None].split(R, dim=-1))
        found = torch.einsum("hd,hpd->p", total, at[0])
        return found[1:] - found[0]

    def _checked(self, shapes: Sequence[Shape]) -> Shape:
        wanted = 2, len(self.ropes), self.width
        if len(shapes) != 1 or len(shapes[0]) != 4 or (*shapes[0][:2], shapes[0][3]) != wanted or shapes[0][2] < 1:
            raise UserError(
                f"{[list(shape) for shape in shapes]} are not the shapes of a chunk of this model, [2, {wanted[1]}, "
                f"tokens, {wanted[2]}]: use a recipe for parts of its layers or heads"
            )
        return shapes[0]

    def _what(self, shapes: Sequence[Shape]) -> int:
        return zlib.crc32(f"storage {self.rate:g} {self.digest} {[tuple(shape) for shape in shapes]}".encode())


def _half(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16)
