"""QJL (arXiv 2406.03482): keys as the signs of a Johnson-Lindenstrauss sketch.

Per key, M bits sign(S·k) and the norm ‖k‖ are stored. The estimate √(π/2)/M·‖k‖·⟨S·q, sign(S·k)⟩
(Eq. 4) is unbiased (Lemma 3.2). Rows of S are orthogonal in blocks of D (§4.1), and the constant is
the exact one for such rows (`transforms/sketch.py`). The few channels with the largest norm
over the prompt, per KV head, have their own sketch and norm (§4.1). With `calibration=corpus` they
are the largest over a corpus, the same for all prompts.

Differences from the authors' code: ‖k_in‖ and ‖k_out‖ are both stored; the authors store ‖k‖ and
‖k_out‖ and subtract squares. Norms are divided by √n before they are rounded to 16 bits, so that
they cannot overflow. The outlier sketch is an independent matrix on the outlier channels; the
authors reuse the first rows of S. `outliers_per=group` chooses the channels for every 32 tokens, as
the authors' code does, and stores their indices.

The authors' setting for head dim 128: M = 256 and an outlier sketch of 256; M = 512 and 128 in the
first 15 of 32 layers; values with 2 bits in groups of 32. The recipe `qjl` uses this setting at any
head dim, with M = 2·D in place of 256, and for the first 15 layers at any depth: they are 15 of 18
in Gemma 3 270M, where `initial_layers=8` is the authors' share. Stored bits per key element at
D = 128: 4.25 (5.25 in the first layers); with `outliers_per=group` 4.27 (5.27). The mean of keys
and values over 32 layers is 3.86.

Good for: results of the paper, and unbiased scores.
Bad for: quality: on a small model one token in five changes with 5 bits.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tersekv.codecs.base import Method, Pair, TableBytes, check_choices, check_range
from tersekv.codecs.common.outlier_channels import OutlierChannels
from tersekv.codecs.uniform import Uniform
from tersekv.errors import UserError
from tersekv.kernels import backends
from tersekv.layouts.base import BLOCK_TOKENS, Layout, PackedTensors, PlaneSpec
from tersekv.layouts.signs import SignSketch, SignsView, signs_planes
from tersekv.transforms.sketch import jl_sketch, sign_factor

OUTLIER_SEED_OFFSET = 7_919


@dataclass(frozen=True)
class Qjl(OutlierChannels):
    """Keys by QJL.

    sketch: rows M of S, 0 for 2·D.
    outliers: number of channels with their own sketch, 0 for none.
    outlier_sketch: rows of their sketch, 0 for 2·D.
    outliers_per: "prompt" or "group" (32 tokens).
    orthogonal: rows are orthogonal in blocks of D.
    initial: twice the rows and half the outlier rows, for the first layers.
    seed: of S, the same on every rank and machine.
    calibration: prompt or corpus, from which the channels of `outliers_per=prompt` are chosen.
    """

    rate_options: ClassVar[tuple[str, ...]] = (
        "sketch", "outlier_sketch", "orthogonal", "initial", "seed", "initial_layers", "value_bits", "value_group",
    )  # fmt: skip

    sketch: int = 0
    outliers: int = 8
    outlier_sketch: int = 0
    outliers_per: Literal["prompt", "group"] = "prompt"
    orthogonal: bool = True
    initial: bool = False
    seed: int = 0
    calibration: Literal["prompt", "corpus"] = "prompt"

    def __post_init__(self) -> None:
        check_range("sketch", self.sketch, 0, 1 << 16)
        check_range("outlier_sketch", self.outlier_sketch, 0, 1 << 16)
        check_range("outliers", self.outliers, 0, 255)
        check_range("seed", self.seed, 0, 2**31)
        check_choices(self)

    def num_outliers(self, head_dim: int) -> int:
        """Return the number of outlier channels."""
        return self.outliers

    @property
    def chooses_channels(self) -> bool:
        """True if one set of outlier channels serves all blocks."""
        return self.outliers > 0 and self.outliers_per == "prompt"

    def rows(self, head_dim: int) -> int:
        """Return M, the bits per key without outliers."""
        return (self.sketch or 2 * head_dim) * (2 if self.initial else 1)

    def outlier_rows(self, head_dim: int) -> int:
        """Return the number of rows of the outlier sketch."""
        rows = self.outlier_sketch or 2 * head_dim
        return max(1, rows // 2) if self.initial else rows

    def layout(self, head_dim: int) -> Layout:
        """Return the packed tensors: signs and norms, those of outliers, and per group the outlier
        indices.
        """
        if self.outliers >= head_dim:
            raise UserError(f"outliers={self.outliers} must be less than the head dim {head_dim}; 8 is usual")
        planes = signs_planes(self.rows(head_dim), torch.float16)
        if self.outliers:
            planes |= signs_planes(self.outlier_rows(head_dim), torch.float16, "outlier_")
            if self.outliers_per == "group":
                index = torch.uint8 if head_dim <= 256 else torch.int16
                planes["channels"] = PlaneSpec((self.outliers,), index, "scales and norms", channels=head_dim)
        return Layout(BLOCK_TOKENS, planes)

    def _largest(self, x: Tensor) -> Tensor:
        """Return the channels with the largest norm over the token axis (-2), ascending: int64
        [..., n].
        """
        return x.square().sum(-2).topk(self.outliers, dim=-1).indices.sort(-1).values

    def encode(self, x: Tensor) -> PackedTensors:
        """Encode x float32 [B, H, N·t, D] as packed tensors.

        Sketches are computed in float64, so that signs do not depend on how tokens are batched.
        """
        blocks = x.unflatten(2, (-1, BLOCK_TOKENS))
        D = x.shape[-1]
        main = jl_sketch(self.rows(D), D, self.seed, self.orthogonal, str(x.device))
        if not self.outliers:
            return _planes(blocks, main, "")
        if self.outliers_per == "group":
            channels = self._largest(blocks)
        else:
            channels = self.channels(len(x)).unsqueeze(2).expand(-1, -1, blocks.shape[2], -1)
        index = channels.unsqueeze(-2).expand(-1, -1, -1, BLOCK_TOKENS, -1)
        planes = _planes(blocks.scatter(-1, index, 0.0), main, "")
        planes |= _planes(blocks.gather(-1, index), self._outlier_matrix(D, str(x.device)), "outlier_")
        if self.outliers_per == "group":
            planes["channels"] = channels.to(self.layout(D).planes["channels"].dtype)
        return planes

    def _outlier_matrix(self, D: int, device: str) -> Tensor:
        seed = self.seed + OUTLIER_SEED_OFFSET
        return jl_sketch(self.outlier_rows(D), self.outliers, seed, self.orthogonal, device)

    def view(self, planes: PackedTensors, head_dim: int) -> SignsView:
        """Return the view of ordinary channels and, if there are any, outlier channels."""
        device = str(planes["signs"].device)
        main = jl_sketch(self.rows(head_dim), head_dim, self.seed, self.orthogonal, device)
        if not self.outliers:
            return SignsView([self._sketch(planes, "", main, head_dim, None, None)], head_dim)
        per_group, B = self.outliers_per == "group", len(planes["signs"])
        channels = planes["channels"].long() if per_group else self.channels(B).unsqueeze(2)
        outlier = self._outlier_matrix(head_dim, device)
        sketches = [
            self._sketch(planes, "", main, head_dim, None, channels),
            self._sketch(planes, "outlier_", outlier, self.outliers, channels, None),
        ]
        return SignsView(sketches, head_dim)

    def _sketch(
        self, planes: PackedTensors, prefix: str, S: Tensor, n: int, channels: Tensor | None, dropped: Tensor | None
    ) -> SignSketch:
        signs, norms = planes[f"{prefix}signs"], planes[f"{prefix}norms"]
        factor = sign_factor(n, self.orthogonal) * math.sqrt(n) / S.shape[0]
        return SignSketch(signs, norms, S, factor, channels, dropped)

    def table_bytes(self, head_dim: int) -> TableBytes:
        """Return the bytes of the sketch matrices, float32, and of the fitted channel indices."""
        shapes = [(self.rows(head_dim), head_dim, self.seed)]
        if self.outliers:
            shapes.append((self.outlier_rows(head_dim), self.outliers, self.seed + OUTLIER_SEED_OFFSET))
        shared = {f"sketch {M}x{D} {seed} {self.orthogonal}": 4 * M * D for M, D, seed in shapes}
        return TableBytes(shared, 2 * self.outliers if self.fits_on else 0, of_sequence=self.fits_on != "corpus")

    def tables(self, head_dim: int) -> list[Tensor]:
        """Return the tensors counted by `table_bytes`."""
        main = jl_sketch(self.rows(head_dim), head_dim, self.seed, self.orthogonal, "cpu")
        outlier = [self._outlier_matrix(head_dim, "cpu")] if self.outliers else []
        return [main, *outlier, *self.fitted.values()]


def _planes(x: Tensor, S: Tensor, prefix: str) -> PackedTensors:
    rms = x.square().mean(-1).sqrt()
    return {f"{prefix}signs": backends.encode_signs(x, S), f"{prefix}norms": rms.to(torch.float16)}


def build(
    sketch: int = 0,
    outliers: int = 8,
    outlier_sketch: int = 0,
    outliers_per: Literal["prompt", "group"] = "prompt",
    orthogonal: bool = True,
    initial_layers: int = 15,
    value_bits: int = 2,
    value_group: int = 32,
    seed: int = 0,
    calibration: Literal["prompt", "corpus"] = "prompt",
) -> Pair:
    """Build the codecs: keys by QJL, values as integers per token.

    initial_layers: number of first layers with twice the rows.
    value_bits: bits of the values, 1 to 8.
    value_group: channels per scale of the values.
    """
    check_range("initial_layers", initial_layers, 0, 10_000)
    keys = Qjl(sketch, outliers, outlier_sketch, outliers_per, orthogonal, False, seed, calibration)
    values = Uniform(value_bits, "token", value_group, side="values")
    first = dataclasses.replace(keys, initial=True)
    return Pair(keys, values, initial_layers, (first, values))


METHOD = Method(
    "QJL",
    "arXiv 2406.03482",
    build,
    variants=(
        {"outliers_per": "group"},
        {"outliers": 0, "sketch": 100, "orthogonal": False},
        {"calibration": "corpus"},
    ),
)
