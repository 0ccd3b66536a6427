"""OSCAR (arXiv 2605.17757): a rotation that follows the queries' covariance, then clipped integers.

Keys and values are rotated by R = U·H·P, one R per layer and side:

- U are the eigenvectors of a covariance. For keys it is E[q·qᵀ] of the queries of each KV head,
  averaged over the heads. For values it is E[w·v·vᵀ] with the weights w = kᵀ·E[q·qᵀ]·k of their
  keys, with mean 1 in each head.
- H is the Hadamard matrix. P places the column of the i-th largest eigenvalue at the bit-reversed i, so
  that each group of channels gets columns of large and of small eigenvalues.

The components Rᵀ·x of a token are clipped at a quantile of their absolute values: the element
⌊clip·D⌋ of the sorted ones, .96 for keys and .92 for values. Then they are rounded to integers in
groups of 128 channels, with one range per group and token. A head dim below 128 is one group.

Published are 2 bits, 64 attention sinks and 256 recent tokens in 16 bits
(`window:sinks=64,recent=256+oscar`), and a calibration on 30,000 tokens (`tersekv calibrate`, whose
default is 32,768). With `calibration=prompt` the prompt's own queries give the covariances.

Sources: the paper's abstract and the authors' repository with its description. The paper's full text
was not at hand.

Differences: scores in w use the covariance of the sample's own queries, not of all samples. Scale and
minimum take 16 bits, 32 in the authors' code. R is stored in 6 bits per entry (`kernels/basis.py`),
and encoding inverts what is stored. `rotation=head` gives each KV head its own, as a later version
of the authors' code does. Without queries (`pre_rope=true`) U are the eigenvectors of the keys' own
covariance. A head dim that is not a power of two is mixed in blocks.

Good for: results of the paper: 2 bits with 64 sinks and 256 recent tokens.
Bad for: a first use, because it is calibrated on a corpus; kvarn diverges less at 2 and 3 bits.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from tersekv.codecs.base import Codec, FitsOn, Method, Pair, TableBytes, check_choices, check_range
from tersekv.codecs.codebooks.fixed import integers
from tersekv.errors import UserError
from tersekv.kernels import backends
from tersekv.kernels.basis import inverses, packed_basis, unpacked_basis
from tersekv.layouts.base import Layout, PackedTensors
from tersekv.layouts.basis import InBasis
from tersekv.layouts.grid import Grid, GridView, round_scale
from tersekv.tensors import TensorSpec
from tersekv.transforms.moments import Moments, Observes, WeightedBy
from tersekv.transforms.rotation import random_rotation

if TYPE_CHECKING:
    from typing_extensions import Self

TOO_LARGE = "keep that layer exact: put ;LAYER=exact:dtype=bf16 after the recipe"


@dataclass(frozen=True)
class Oscar(Codec):
    """One side of OSCAR.

    bits: 1 to 8.
    group: channels per range; 0, or more than the head dim, means all of a token.
    clip: share of a token's components that are not clipped, 1 for no clipping.
    rotation: one per layer, or one per KV head.
    calibration: corpus or prompt.
    """

    rate_options: ClassVar[tuple[str, ...]] = ("bits", "group", "clip", "key_clip", "value_clip")
    takes_moments: ClassVar[bool] = True

    bits: int = 2
    group: int = 128
    clip: float = 1.0
    rotation: Literal["layer", "head"] = "layer"
    calibration: Literal["corpus", "prompt"] = "corpus"

    def __post_init__(self) -> None:
        check_range("bits", self.bits, 1, 8)
        check_range("group", self.group, 0, 1024)
        check_choices(self)
        if not 0.5 <= self.clip <= 1:
            raise UserError(f"clip={self.clip:g} is out of range; allowed are 0.5 to 1, and 1 clips nothing")

    @property
    def fits_on(self) -> FitsOn | None:
        """Data that the option `calibration` names."""
        return self.calibration

    @property
    def weighted_by(self) -> WeightedBy | None:
        """ "queries", whose covariance the rotation follows."""
        return "queries"

    @property
    def observes(self) -> Observes | None:
        """ "scores" if a fit on a prompt uses its queries."""
        return "scores" if self.calibration == "prompt" else None

    @property
    def fit_spans_heads(self) -> bool:
        """True if all heads have one rotation."""
        return self.rotation == "layer"

    def of_heads(self, first: int, count: int) -> Self:
        """Return the codec for some heads."""
        if self.rotation == "layer":
            return self
        own = {name: t[:, first : first + count] for name, t in self.fitted.items()}
        return dataclasses.replace(self, fitted=own)

    def grid(self, head_dim: int) -> Grid:
        """Return the memory layout."""
        group = self.group if self.group < head_dim else 0
        return Grid(self.bits, self.side, "token", group, True, head_dim)

    def layout(self, head_dim: int) -> Layout:
        """Return the packed tensors: codes, scale and offset."""
        return self.grid(head_dim).layout()

    def learns(self, B: int, H: int, head_dim: int) -> dict[str, TensorSpec]:
        """Return the specifications of the rotation, per batch row or for all rows."""
        shape = (1, B), 1 if self.rotation == "layer" else H
        return {
            "basis": TensorSpec(torch.uint8, (*shape, 3 * -(-(head_dim**2) // 4))),
            "channels": TensorSpec(torch.float16, (*shape, head_dim)),
        }

    def learnt_fault(self, B: int, H: int, head_dim: int) -> str | None:
        """Check that the rotation is complete and invertible."""
        fault = super().learnt_fault(B, H, head_dim)
        if fault or not self.fitted:
            return fault
        if len(self.fitted["basis"]) != len(self.fitted["channels"]):
            return "has tensors for one row and tensors for several"
        if bool(inverses(unpacked_basis(**self.fitted))[1].any()):
            return "has a rotation that cannot be inverted"
        return None

    def fit(self, x: Tensor) -> Self:
        """Fit on x float32 [B, H, T, D] without queries, each batch row separately."""
        return self.fit_moments(Moments.of(x))

    def fit_moments(self, moments: Moments) -> Self:
        """Fit the rotation on sums over vectors, and for keys on the queries' covariance in them."""
        form = moments.squares if moments.metric is None else moments.metric
        if self.rotation == "layer":
            form = form.mean(1, keepdim=True)
        rows = rotation_of(form).mT  # row d of the basis is column d of R
        ones = rows.new_ones(rows.shape[:-1])
        return dataclasses.replace(self, fitted=packed_basis(rows, ones, one_factor=True))

    def encode(self, x: Tensor) -> PackedTensors:
        """Encode x float32 [B, H, N·t, D] as packed tensors."""
        grid = self.grid(x.shape[-1])
        inverse, _ = inverses(unpacked_basis(**self.fitted))
        y = (x.double() @ inverse).float()
        most = y.abs().kthvalue(min(int(self.clip * x.shape[-1]), x.shape[-1] - 1) + 1, -1, keepdim=True).values
        y = torch.minimum(torch.maximum(y, -most), most)
        low, high = backends.group_ranges(y, grid.place)
        scale = round_scale((high - low) / (2**self.bits - 1), torch.float16, "a scale", TOO_LARGE)
        offset = round_scale(low, torch.float16, "a minimum", TOO_LARGE)
        return grid.encode(y, None, scale, offset)

    def view(self, planes: PackedTensors, head_dim: int) -> InBasis:
        """Return the view of codes with the codebook 0 … 2^b − 1 and the rotation."""
        heads = planes["codes"].shape[1]
        grid = GridView(self.grid(head_dim), planes, integers(self.bits, str(planes["codes"].device)), integers=True)
        basis, channels = (self.fitted[name].expand(-1, heads, -1) for name in ("basis", "channels"))
        return InBasis(grid, basis, channels)

    def select(self, rows: Tensor) -> Self:
        """Return the codec for these batch rows. Tensors from a corpus are shared by all rows."""
        if all(len(t) == 1 for t in self.fitted.values()):
            return self
        return super().select(rows)

    def table_bytes(self, head_dim: int) -> TableBytes:
        """Return the bytes of the integers as floats, and of the rotation."""
        rotation = 3 * -(-(head_dim**2) // 4) + 2 * head_dim
        per_head, per_layer = (0, rotation) if self.rotation == "layer" else (rotation, 0)
        shared = {f"integers {self.bits}": 4 * 2**self.bits}
        return TableBytes(shared, per_head, per_layer, of_sequence=self.fits_on != "corpus")

    def tables(self, head_dim: int) -> list[Tensor]:
        """Return the tensors counted by `table_bytes`."""
        return [integers(self.bits, "cpu"), *self.fitted.values()]


def rotation_of(form: Tensor) -> Tensor:
    """Return R = U·H·P for a covariance float64 [..., D, D]."""
    D = form.shape[-1]
    lengths, vectors = torch.linalg.eigh((form + form.mT) / 2)
    mixed = vectors @ random_rotation(D, None, "hadamard", str(form.device)).double().T
    order = lengths.argsort(dim=-1, descending=True, stable=True)
    places = bit_reversed(D).to(form.device)
    # column `places[i]` of P picks direction order[i]
    picked = torch.empty_like(order).scatter(-1, places.expand_as(order), order)
    return mixed.gather(-1, picked.unsqueeze(-2).expand_as(mixed))


def bit_reversed(D: int) -> Tensor:
    """Return the numbers 0 … D − 1 in bit-reversed order, int64 [D]."""
    bits = max(1, (D - 1).bit_length())
    reversed_ = torch.tensor([int(f"{i:0{bits}b}"[::-1], 2) for i in range(1 << bits)])
    return reversed_[reversed_ < D]


def build(
    bits: int = 2,
    group: int = 128,
    key_clip: float = 0.96,
    value_clip: float = 0.92,
    rotation: Literal["layer", "head"] = "layer",
    calibration: Literal["corpus", "prompt"] = "corpus",
) -> Pair:
    """Build the codecs.

    key_clip, value_clip: share of a token's components that are not clipped.
    """
    keys = Oscar(bits, group, key_clip, rotation, calibration)
    return Pair(keys, Oscar(bits, group, value_clip, rotation, calibration, side="values"))


METHOD = Method(
    "OSCAR",
    "arXiv 2605.17757",
    build,
    variants=(
        {"calibration": "prompt", "bits": 3},
        {"calibration": "prompt", "rotation": "head", "group": 16, "key_clip": 1.0, "value_clip": 1.0},
    ),
)
