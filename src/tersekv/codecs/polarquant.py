"""PolarQuant (arXiv 2502.02617): a random rotation, then recursive polar coordinates.

Angles are coded, with one radius per 2^L channels.
One orthogonal matrix, shared by keys, values, layers and heads, makes channels alike (§3.1).
`rotation=none` is the paper's variant without it. L levels of polar coordinates (Definition 1,
Algorithm 1) give D/2^L radii in 16 bits and angles with known densities (Lemma 2). Level 1 is
uniform on [0, 2π). Level ℓ ≥ 2 has density ∝ sin^{2^{ℓ−1}−1}(2ψ) on [0, π/2]. Each angle is coded
as the nearest entry of its level's codebook (§4.1):

- `codebook=offline`: level 1 evenly spaced, the others Lloyd-Max for the density. One codebook for
  everything.
- `codebook=online`: k-means on the prompt's own angles, per layer (`codecs/codebooks/kmeans.py`),
  at prefill.

With the paper's 4 levels of 4, 2, 2 and 2 bits a block of 16 channels takes 16 + 8·4 + 4·2 + 2·2 +
2 = 62 bits, 3.875 per element (§4.1). A decoded block has exactly its stored radius, because
codebooks hold unit directions.

Differences from the paper: the angle of level 1 is on a circle, so the search for its nearest entry
wraps at 2π. Online samples are weighted with the squared radius at their level, because an angle's
error is multiplied by the radius (`weighted=false`: the paper's plain k-means). The rotation is
computed in float64, so that codes do not depend on how tokens are batched.

Good for: results of the paper.
Bad for: quality: turboquant:bits=4 diverges a quarter as much with hardly more bits.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from tersekv.codecs.base import Codec, FitsOn, Method, TableBytes, check_choices, check_range, for_both_sides
from tersekv.codecs.codebooks.kmeans import kmeans
from tersekv.codecs.codebooks.lloyd_max import polar_table
from tersekv.errors import UserError
from tersekv.kernels import backends
from tersekv.layouts.base import BLOCK_TOKENS, Layout, PackedTensors, Rotated, View
from tersekv.layouts.grid import SCALE_DTYPES, round_scale
from tersekv.layouts.polar import Polar, PolarView
from tersekv.tensors import TensorSpec, cached_table
from tersekv.transforms.polar import to_polar
from tersekv.transforms.rotation import random_rotation, rotated

if TYPE_CHECKING:
    from typing_extensions import Self

FIT_SAMPLES = 16_384
"""Number of angles per level that online codebooks are fitted on, drawn at random."""

LEAST_WEIGHT = 1e-3
"""Minimum weight of a sample, relative to the mean.

Without it, much shorter tokens would get no entries.
"""


@dataclass(frozen=True)
class PolarQuant(Codec):
    """One side of PolarQuant.

    bits: per level from 1 on, each 1 to 8. Their number is L, and 2^L divides the head dim.
    rotation: qr, hadamard or none.
    codebook: offline or online.
    radii: dtype, fp16 or bf16.
    weighted: weight online samples with their squared radius.
    seed: of the rotation and of online sampling.
    """

    bits: str = "4-2-2-2"
    rotation: Literal["qr", "hadamard", "none"] = "qr"
    codebook: Literal["offline", "online"] = "offline"
    radii: Literal["fp16", "bf16"] = "fp16"
    weighted: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        parts = self.bits.split("-")
        if not all(part.isascii() and part.isdecimal() and 1 <= int(part) <= 8 for part in parts):
            raise UserError(
                f"bits={self.bits} is not allowed; give 1 to 8 bits for each level, from the first on, joined by '-', "
                "for example bits=4-2-2-2"
            )
        check_choices(self)
        check_range("seed", self.seed, 0, 2**31)

    @property
    def level_bits(self) -> tuple[int, ...]:
        """Bits per angle of levels 1 to L."""
        return tuple(int(part) for part in self.bits.split("-"))

    @property
    def fits_on(self) -> FitsOn | None:
        """Data that `fit` needs: "prompt" if the codebooks are fitted on its angles."""
        return "prompt" if self.codebook == "online" else None

    @property
    def fit_spans_heads(self) -> bool:
        """True if codebooks are fitted, because all heads share them."""
        return self.codebook == "online"

    def polar(self, head_dim: int) -> Polar:
        """Return the memory layout.

        Raises:
            UserError: 2^L does not divide the head dim.
        """
        levels = len(self.level_bits)
        if head_dim % 2**levels:
            most = (head_dim & -head_dim).bit_length() - 1
            raise UserError(
                f"bits={self.bits} has {levels} levels, and 2^{levels} does not divide the head dim {head_dim}; "
                f"give bits for at most {most} levels"
            )
        return Polar(self.level_bits, head_dim, SCALE_DTYPES[self.radii])

    def layout(self, head_dim: int) -> Layout:
        """Return the packed tensors: angles and radii."""
        return self.polar(head_dim).layout()

    def learns(self, B: int, H: int, head_dim: int) -> dict[str, TensorSpec]:
        """Return the specifications of online codebooks."""
        if self.codebook == "offline":
            return {}
        levels = enumerate(self.level_bits, start=1)
        return {f"level {level}": TensorSpec(torch.float32, (B, 2**bits)) for level, bits in levels}

    def fit(self, x: Tensor) -> Self:
        """Fit online codebooks on x [B, H, T, D]: per level [B, 2^b], float32."""
        if self.codebook == "offline":
            return self
        rotated = self._rotated(x)
        angles, _ = to_polar(rotated, len(self.level_bits))
        fitted = {}
        for level, (bits, angle) in enumerate(zip(self.level_bits, angles, strict=True), start=1):
            squared_radius = rotated.unflatten(-1, (-1, 2**level)).square().sum(-1)
            rows = [self._online(a, r, bits) for a, r in zip(angle, squared_radius, strict=True)]
            fitted[f"level {level}"] = torch.stack(rows).to(x.device)
        return dataclasses.replace(self, fitted=fitted)

    def _online(self, angle: Tensor, squared_radius: Tensor, bits: int) -> Tensor:
        """Fit a codebook for one level of one batch row, on all its heads and tokens."""
        angle, weight = angle.flatten(), squared_radius.flatten()
        if angle.numel() > FIT_SAMPLES:
            generator = torch.Generator().manual_seed(self.seed)
            drawn = torch.randperm(angle.numel(), generator=generator)[:FIT_SAMPLES].to(angle.device)
            angle, weight = angle[drawn], weight[drawn]
        if not self.weighted or not bool(weight.any()):
            weight = torch.ones_like(weight)
        weight = weight.clamp_min(LEAST_WEIGHT * float(weight.mean()))
        return torch.from_numpy(kmeans(angle.cpu().numpy(), 2**bits, weight.cpu().numpy())).float()

    def encode(self, x: Tensor) -> PackedTensors:
        """Encode x float32 [B, H, N·t, D] as packed tensors."""
        polar = self.polar(x.shape[-1])
        blocks = self._rotated(x).unflatten(2, (-1, BLOCK_TOKENS))
        angles, radii = backends.encode_polar(blocks, polar.level_bits, self._level_tables(str(x.device)))
        stored = round_scale(radii / polar.radius_unit, polar.radius_dtype, "a radius", "use radii=bf16")
        return {"angles": angles, "radii": stored}

    def _rotated(self, x: Tensor) -> Tensor:
        if self.rotation == "none":
            return x
        return rotated(x, self.seed, self.rotation)

    def _matrix(self, head_dim: int, device: str) -> Tensor:
        assert self.rotation != "none"
        return random_rotation(head_dim, self.seed, self.rotation, device)

    def _level_tables(self, device: str) -> list[Tensor]:
        """Return the codebooks of levels 1 to L: [2^b], or [B, 2^b] if fitted."""
        if self.codebook == "online":
            names = (f"level {level}" for level in range(1, len(self.level_bits) + 1))
            return [self.fitted[name] for name in names if name in self.fitted]
        return [offline_table(bits, level, device) for level, bits in enumerate(self.level_bits, start=1)]

    def view(self, planes: PackedTensors, head_dim: int) -> View:
        """Return the view of polar codes, with the rotation if there is one."""
        device = str(planes["angles"].device)
        view = PolarView(self.polar(head_dim), planes, self._level_tables(device))
        return view if self.rotation == "none" else Rotated(view, self._matrix(head_dim, device))

    def table_bytes(self, head_dim: int) -> TableBytes:
        """Return the bytes of codebooks of angles, float32, and of the rotation."""
        shared = {}
        if self.rotation != "none":
            shared[f"rotation {self.rotation} {head_dim} {self.seed}"] = 4 * head_dim**2
        if self.codebook == "online":
            return TableBytes(shared, per_layer=4 * sum(2**bits for bits in self.level_bits))
        levels = enumerate(self.level_bits, start=1)
        return TableBytes(shared | {f"polar {bits} {level}": 4 * 2**bits for level, bits in levels})

    def tables(self, head_dim: int) -> list[Tensor]:
        """Return the tensors counted by `table_bytes`."""
        rotation = [] if self.rotation == "none" else [self._matrix(head_dim, "cpu")]
        return [*rotation, *self._level_tables("cpu")]


@cached_table
def offline_table(bits: int, level: int, device: str) -> Tensor:
    """Return the angles of one level, ascending, float32 [2^bits].

    They are evenly spaced at level 1, otherwise optimal for Lemma 2's density.
    """
    if level == 1:
        return ((torch.arange(2**bits, dtype=torch.float64) + 0.5) * 2 * math.pi / 2**bits).to(device, torch.float32)
    return torch.tensor(polar_table(bits, level), dtype=torch.float32, device=device)


METHOD = Method(
    "PolarQuant",
    "arXiv 2502.02617",
    for_both_sides(PolarQuant),
    variants=(
        {"codebook": "online"},
        {"codebook": "online", "rotation": "none", "weighted": False},
        {"bits": "5-3-2", "rotation": "hadamard", "radii": "bf16"},
    ),
)
