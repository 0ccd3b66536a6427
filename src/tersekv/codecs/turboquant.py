"""TurboQuant (arXiv 2504.19874): a random rotation, then scalar quantisation of coordinates.

y = R·x/‖x‖ has coordinates with density ∝ (1 − y²)^{(D−3)/2} (Lemma 1). The codebook is that
density's Lloyd-Max solution.

- `variant=mse` (Algorithm 1): codes and the norm. `correct_norm` stores the norm that makes ‖x̂‖ =
  ‖x‖ instead, because the codebook shrinks vectors by 1 − MSE on average.
- `variant=prod` (Algorithm 2): one bit less per coordinate, and a QJL sketch of the residual, D
  signs and its norm. Inner products are unbiased, with a larger variance at equal bits. At 1 bit
  only the sketch is left.
- Fractional bits (§4.3): bits = b + f with f = .25, .5 or .75. The quarter of the channels with the
  largest norm over the prompt, per KV head, gets b + 4f bits; the others get b. Each part is coded
  as its own vector, with its own norm, rotation and codebook for its dimension. The paper's "2.5
  bits" are 3 bits for 32 of 128 channels and 2 bits for the others. That is 2.25, the name used
  here. With `calibration=corpus` the channels are the largest over a corpus, the same for all
  prompts.

Differences from the paper: norms are stored as ‖x‖/√D in float16, so that they cannot overflow. The
residual is computed from the stored values, so that prod is unbiased despite rounding. The sketch
has orthogonal rows (`orthogonal=false` for the paper's Gaussian ones). Rotations are computed in
float64, so that codes do not depend on how tokens are batched. The rotation is applied to the query
and to the output, never to the cache.

Good for: 3 and 4 bits without data.
Bad for: keys with biases, unless centre=true; and 2 bits, which change one token in five.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from tersekv.codecs.base import (
    Method,
    TableBytes,
    check_choices,
    check_range,
    for_both_sides,
    whole_bits,
)
from tersekv.codecs.codebooks.lloyd_max import sphere_table
from tersekv.codecs.common.outlier_channels import OutlierChannels
from tersekv.errors import UserError
from tersekv.kernels import backends
from tersekv.layouts.base import BLOCK_TOKENS, Concat, Layout, PackedTensors, PlaneSpec, Rotated, Sum, View
from tersekv.layouts.grid import Grid, GridView, nearest_code, round_scale
from tersekv.layouts.signs import SignSketch, SignsView, signs_planes
from tersekv.tensors import cached_table
from tersekv.transforms.rotation import random_rotation, rotated, split_rotation
from tersekv.transforms.sketch import jl_sketch, sign_factor

if TYPE_CHECKING:
    from typing_extensions import Self

OUTLIER_SHARE = 4
"""One of this many channels is an outlier if bits are fractional (32 of 128 in the paper)."""

SKETCH_SEED_OFFSET = 104_729

_IN_USE: MutableMapping[Tensor, MutableMapping[tuple[int, str, int, str], Tensor]] = WeakIdKeyDictionary()
"""Maps of heads that some view has, by the channels they were made of and the other options."""

TOO_LARGE = "keep that layer exact: put ;LAYER=exact:dtype=bf16 after the recipe"


class ChannelPart(NamedTuple):
    """Channels that are coded together as one rotated vector.

    bits: per channel, the sketch's sign included.
    name: prefix of the part's packed tensors.
    """

    dim: int
    bits: int
    name: str = ""


@dataclass(frozen=True)
class TurboQuant(OutlierChannels):
    """One side of TurboQuant.

    bits: 1 to 8 in steps of a quarter.
    variant: mse or prod.
    rotation: qr or hadamard.
    correct_norm: keep the vector's length exactly (mse).
    orthogonal: orthogonal rows of the sketch (prod).
    seed: of rotation and sketch.
    calibration: prompt or corpus, from which fractional bits choose the outlier channels.
    """

    encodes_halves: ClassVar[bool] = True
    rate_options: ClassVar[tuple[str, ...]] = ("bits", "variant", "rotation", "correct_norm", "orthogonal", "seed")

    bits: float = 4.0
    variant: Literal["mse", "prod"] = "mse"
    rotation: Literal["qr", "hadamard"] = "qr"
    correct_norm: bool = False
    orthogonal: bool = True
    seed: int = 0
    calibration: Literal["prompt", "corpus"] = "prompt"

    def __post_init__(self) -> None:
        low, high = math.floor(self.bits), math.floor(self.bits) + 4 * (self.bits % 1)
        if self.bits * 4 % 1 or low < 1 or high > 8:
            raise UserError(
                f"bits={self.bits:g} is not allowed; give 1 to 8, or a quarter, half or three quarters more than 1 to "
                "5 (a quarter of the channels then has that fraction times four bits more, 8 at most)"
            )
        check_choices(self)
        check_range("seed", self.seed, 0, 2**31)
        if self.correct_norm and self.variant == "prod":
            raise UserError("correct_norm=true would make variant=prod biased; leave it out, or use variant=mse")

    def num_outliers(self, head_dim: int) -> int:
        """Return the number of channels with more bits, if bits are fractional."""
        return head_dim // OUTLIER_SHARE

    @property
    def chooses_channels(self) -> bool:
        """True if bits are fractional."""
        return self.bits % 1 > 0

    def at_rate(self, bits: float) -> Self:
        """Return the codec with other bits. Both rates must be whole numbers, without a sketch."""
        if self.variant != "mse" or self.bits % 1:
            raise UserError("several rates need variant=mse and a whole number of bits")
        return dataclasses.replace(self, bits=float(whole_bits(bits)))

    def parts(self, head_dim: int) -> list[ChannelPart]:
        """Return the channel parts that are coded separately, outlier channels first."""
        low = math.floor(self.bits)
        if not self.bits % 1:
            return [ChannelPart(head_dim, low)]
        outliers = head_dim // OUTLIER_SHARE
        if head_dim % OUTLIER_SHARE or outliers < 3:
            raise UserError(
                f"bits={self.bits:g} needs a head dim that is a multiple of 4 and at least 12, got {head_dim}; "
                "use whole bits"
            )
        extra = round(4 * (self.bits % 1))
        return [ChannelPart(outliers, low + extra, "outlier_"), ChannelPart(head_dim - outliers, low)]

    def layout(self, head_dim: int) -> Layout:
        """Return the packed tensors: codes and scale of each part; for prod also of the
        residual.
        """
        planes: dict[str, PlaneSpec] = {}
        for part in self.parts(head_dim):
            if grid := self._grid(part):
                planes |= {part.name + key: spec for key, spec in grid.layout().planes.items()}
            if self.variant == "prod":
                planes |= signs_planes(part.dim, torch.float16, part.name)
        return Layout(BLOCK_TOKENS, planes)

    def _grid(self, part: ChannelPart) -> Grid | None:
        """Return the layout of the codes, with one scale per token.

        None if prod leaves no bit for them.
        """
        bits = part.bits - (self.variant == "prod")
        return Grid(bits, self.side, "token", 0, False, part.dim) if bits else None

    def encode(self, x: Tensor) -> PackedTensors:
        """Encode x [B, H, N·t, D] of any float dtype as packed tensors."""
        whole = self._rotated(x)
        planes: PackedTensors = {}
        start = 0
        for part in self.parts(x.shape[-1]):
            y = whole[..., start : start + part.dim]
            start += part.dim
            codes = self._codes(y, part)
            planes |= {part.name + key: plane for key, plane in codes.items()}
            if self.variant == "prod":
                grid = self._grid_view(codes, part)
                residual = y if grid is None else y - grid.decode()
                planes |= self._residual(residual.unflatten(2, (-1, BLOCK_TOKENS)), part)
        return planes

    def _rotated(self, x: Tensor) -> Tensor:
        if self.fits_on is None:
            return rotated(x, self.seed, self.rotation)
        return torch.matmul(x.double(), self._matrix(x.shape[-1], str(x.device)).transpose(-1, -2).double()).float()

    def _codes(self, y: Tensor, part: ChannelPart) -> PackedTensors:
        grid = self._grid(part)
        if grid is None:
            return {}
        table = sphere_entries(grid.bits, part.dim, str(y.device))
        groups = grid.groups(y)
        scale = groups.square().mean(-1).sqrt()
        if not self.correct_norm:
            stored = round_scale(scale, torch.float16, "a norm", TOO_LARGE)
            return grid.encode(y, table, scale, None) | {"scale": stored}
        codes = nearest_code(groups / torch.where(scale == 0, 1.0, scale).unsqueeze(-1), table)
        scale = scale / table[codes.long()].square().mean(-1).sqrt()
        return grid.pack(codes, round_scale(scale, torch.float16, "a norm", TOO_LARGE), None)

    def _residual(self, residual: Tensor, part: ChannelPart) -> PackedTensors:
        """Return signs and norm (divided by √dim) of residual [B, H, N, t, dim]."""
        signs = backends.encode_signs(residual, self._sketch(part, str(residual.device)))
        norm = residual.square().mean(-1).sqrt()
        return {f"{part.name}signs": signs, f"{part.name}norms": norm.to(torch.float16)}

    def _sketch(self, part: ChannelPart, device: str) -> Tensor:
        return jl_sketch(part.dim, part.dim, self.seed + SKETCH_SEED_OFFSET, self.orthogonal, device)

    def _matrix(self, head_dim: int, device: str) -> Tensor:
        """Return the orthogonal map before coding: [D, D], or [B, H, D, D] if heads differ.

        A matrix for each head takes too much memory to be kept. Pages that are read together share one tensor.
        """
        if self.fits_on is None:
            return random_rotation(head_dim, self.seed, self.rotation, device)
        key = self.seed, self.rotation, head_dim, device
        known = _IN_USE.setdefault(self.fitted["channels"], WeakValueDictionary())
        if (matrix := known.get(key)) is None:
            matrix = known[key] = self._matrix_of_heads(head_dim, device)
        return matrix

    def _matrix_of_heads(self, head_dim: int, device: str) -> Tensor:
        blocks = split_rotation(head_dim // OUTLIER_SHARE, head_dim, self.seed, self.rotation, device)
        channels = self.fitted["channels"].long()
        others = torch.ones((*channels.shape[:-1], head_dim), dtype=torch.bool, device=channels.device)
        others.scatter_(-1, channels, False)
        rest = others.nonzero()[:, -1].view(*channels.shape[:-1], -1)
        place = torch.cat([channels, rest], -1).argsort(-1)  # place of each channel among the parts
        return blocks.T[place].mT

    def view(self, planes: PackedTensors, head_dim: int) -> View:
        """Return the view of the parts' channels, concatenated, with the rotation."""
        views: list[tuple[View, int]] = []
        for part in self.parts(head_dim):
            grid = self._grid_view(
                {k: planes[part.name + k] for k in ("codes", "scale") if part.name + k in planes}, part
            )
            signs = self._signs_view(planes, part) if self.variant == "prod" else None
            both = [v for v in (grid, signs) if v is not None]
            views.append((both[0] if len(both) == 1 else Sum(both), part.dim))
        inner = views[0][0] if len(views) == 1 else Concat(views)
        return Rotated(inner, self._matrix(head_dim, str(next(iter(planes.values())).device)))

    def _grid_view(self, planes: PackedTensors, part: ChannelPart) -> GridView | None:
        grid = self._grid(part)
        if grid is None:
            return None
        table = sphere_entries(grid.bits, part.dim, str(planes["codes"].device))
        return GridView(grid, planes, table, symmetric=True)

    def _signs_view(self, planes: PackedTensors, part: ChannelPart) -> SignsView:
        signs, norms = (planes[f"{part.name}{name}"] for name in ("signs", "norms"))
        factor = sign_factor(part.dim, self.orthogonal) / math.sqrt(part.dim)
        return SignsView([SignSketch(signs, norms, self._sketch(part, str(signs.device)), factor)], part.dim)

    def table_bytes(self, head_dim: int) -> TableBytes:
        """Return the bytes of codebooks, rotations and sketches, and of the channel indices."""
        shared = {}
        for part in self.parts(head_dim):
            grid = self._grid(part)
            if grid is not None:
                shared[f"sphere {grid.bits} {part.dim}"] = 4 * 2**grid.bits
            if self.variant == "prod":
                seed = self.seed + SKETCH_SEED_OFFSET
                shared[f"sketch {part.dim}x{part.dim} {seed} {self.orthogonal}"] = 4 * part.dim**2
        split = " split" if self.fits_on else ""
        shared[f"rotation {self.rotation} {head_dim} {self.seed}{split}"] = 4 * head_dim**2
        per_head = 2 * self.num_outliers(head_dim) if self.fits_on else 0
        return TableBytes(shared, per_head, of_sequence=self.fits_on != "corpus")

    def tables(self, head_dim: int) -> list[Tensor]:
        """Return the tensors counted by `table_bytes`."""
        options = self.seed, self.rotation, "cpu"
        split = split_rotation(head_dim // OUTLIER_SHARE, head_dim, *options) if self.fits_on else None
        found = [random_rotation(head_dim, *options) if split is None else split]
        for part in self.parts(head_dim):
            grid = self._grid(part)
            if grid is not None:
                found.append(sphere_entries(grid.bits, part.dim, "cpu"))
            if self.variant == "prod":
                found.append(self._sketch(part, "cpu"))
        return [*found, *self.fitted.values()]


@cached_table
def sphere_entries(bits: int, D: int, device: str) -> Tensor:
    """Return the optimal codebook for √D times a sphere's coordinate, float32 [2^bits]."""
    return torch.tensor(sphere_table(bits, D), dtype=torch.float32, device=device)


METHOD = Method(
    "TurboQuant",
    "arXiv 2504.19874",
    for_both_sides(TurboQuant),
    variants=(
        {"bits": 3.0, "variant": "prod"},
        {"bits": 1.0, "variant": "prod", "orthogonal": False},
        {"bits": 2.5},
        {"bits": 3.25, "variant": "prod", "rotation": "hadamard"},
        {"bits": 2.0, "rotation": "hadamard", "correct_norm": True},
        {"bits": 2.5, "calibration": "corpus"},
    ),
)
