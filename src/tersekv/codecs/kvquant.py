"""KVQuant (arXiv 2401.18079): keys per channel before RoPE, values per token, in non-uniform
codebooks with sparse outliers.

- Keys (§3.1, 3.2): before RoPE, per channel. Calibration gives each channel's thresholds, its
  (1 ± s)/2-quantiles for a share s of outliers. Elements between the thresholds are normalised to
  [−1, 1].
- Values: per token. Thresholds and range are those of the token itself, over all heads of a layer.
- nuq (§3.3): per layer one codebook of 2^b entries for keys and one for values, from k-means with
  the weights of Eq. 7: Fisher information (squared gradient) times the squared scale of the element.
- Outliers (§3.4): a share of .1, .5 or 1 % per vector, rounded down for a token's values, stored in
  16 bits each (layout `sparse`). With `room` (ours) each block of 32 tokens and head has places for
  equally many. The most extreme outliers get them, and the others are clamped to the thresholds.
- Q-Norm (§3.6 of an earlier version): the decoding codebook has the activations' mean and deviation.
- The first token is exact (§3.5): use the policy's sinks.

`tersekv calibrate` computes the fitted tensors. `calibration=prompt` fits them on the prompt
instead, without Fisher information. The paper's ablations are options: `table=nf|int` (Table 11),
`outliers_per=matrix` (12), `axis=token` and `value_axis=channel` (9), `pre_rope=false` (10),
`ranges=online` (14), `weights=fisher|none`.

Unlike the authors' code, k-means uses the weight s² of Eq. 7. Sparse entries hold the difference to
the dense code. A token's thresholds include all heads.

Good for: results of the paper, and 4 bits after a calibration.
Bad for: a first use, because it is calibrated on a corpus, and 2 bits.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from tersekv.codecs.base import Codec, FitsOn, Method, Pair, TableBytes, check_choice, check_choices, check_range
from tersekv.codecs.codebooks.fixed import fixed_table
from tersekv.codecs.codebooks.kmeans import weighted_codebook
from tersekv.errors import UserError
from tersekv.kernels import backends
from tersekv.layouts.base import BLOCK_TOKENS, Layout, PackedTensors, Sum, View, whole_share
from tersekv.layouts.grid import Grid, GridView, nearest_code, per_row, round_scale
from tersekv.layouts.sparse import (
    MAX_CHANNELS,
    SparseBlocksView,
    SparseView,
    largest,
    largest_of_blocks,
    largest_share,
    pack_outlier_blocks,
    pack_outliers,
    quantiles,
    sparse_block_planes,
    sparse_planes,
)
from tersekv.tensors import TensorSpec

if TYPE_CHECKING:
    from typing_extensions import Self

TOO_LARGE = "keep that layer exact: put ;LAYER=exact:dtype=bf16 after the recipe"


@dataclass(frozen=True)
class KVQuant(Codec):
    """One side of KVQuant.

    bits: 2 to 5.
    table: codebook, nuq, nf or int.
    outliers: share of elements stored as outliers, 0 to 0.1.
    outliers_per: vector or matrix.
    axis: channel (needs calibration) or token, for this side.
    ranges: offline or online, for channels.
    weights: of k-means: eq7 (Fisher times s²), fisher, or none.
    q_norm: normalise the codebook used for decoding.
    cap: maximum number of outliers per token and head, 0 for no limit.
    calibration: corpus or prompt.
    room: outliers that a block of 32 tokens of a head has places for, as a multiple of the expected
        number, 0.1 to 10. 0 for a list of any length, so that sizes of blocks differ.
    """

    rate_options: ClassVar[tuple[str, ...]] = ("room",)

    bits: int = 3
    table: Literal["nuq", "nf", "int"] = "nuq"
    outliers: float = 0.01
    outliers_per: Literal["vector", "matrix"] = "vector"
    axis: Literal["channel", "token"] = "channel"
    ranges: Literal["offline", "online"] = "offline"
    weights: Literal["eq7", "fisher", "none"] = "eq7"
    q_norm: bool = False
    cap: int = 0
    calibration: Literal["corpus", "prompt"] = "corpus"
    room: float = 0.0

    def __post_init__(self) -> None:
        check_range("bits", self.bits, 2, 5)
        check_choices(self)
        check_range("cap", self.cap, 0, 255)
        if not 0 <= self.outliers <= 0.1:
            raise UserError(f"outliers={self.outliers:g} is out of range; allowed are 0 to 0.1, and 0.01 is usual")
        if self.room and not 0.1 <= self.room <= 10:
            raise UserError(f"room={self.room:g} is out of range; allowed are 0 and 0.1 to 10, and 1.5 is usual")

    @property
    def _of_matrix(self) -> bool:
        """True if thresholds are fitted for the whole layer."""
        return self.outliers_per == "matrix" and self.outliers > 0

    @property
    def _learns(self) -> set[str]:
        """Parts that must be fitted: "ranges", "table", both or none."""
        ranges = {"ranges"} if self.axis == "channel" or self._of_matrix else set()
        return ranges | ({"table"} if self.table == "nuq" else set())

    @property
    def fits_on(self) -> FitsOn | None:
        """Data that `fit` needs: "corpus", unless the prompt or each token gives everything."""
        if not self._learns:
            return None
        only_ranges = self._learns == {"ranges"} and self.ranges == "online"
        return "prompt" if self.calibration == "prompt" or only_ranges else "corpus"

    @property
    def needs_fit(self) -> FitsOn | None:
        """Data still needed: the corpus first, then the prompt if ranges are online."""
        if self.fits_on is None or (("lower" in self.fitted or "ranges" not in self._learns) and self._has_table):
            return None
        if self.fits_on == "corpus" and self.ranges == "online" and self._has_table:
            return "prompt"
        return self.fits_on

    @property
    def _has_table(self) -> bool:
        return self.table != "nuq" or "table" in self.fitted

    @property
    def fit_spans_heads(self) -> bool:
        """True if fitting needs all heads, for a codebook or a matrix's thresholds."""
        return not self._has_table or self._of_matrix

    @property
    def encode_spans_heads(self) -> bool:
        """True if a token's range covers all heads."""
        return self.axis == "token" and not self.per_head

    def of_heads(self, first: int, count: int) -> Self:
        """Return the codec for some heads, with their thresholds of channels."""
        per_head = {name: t for name, t in self.fitted.items() if t.dim() == 3 and t.shape[1] > 1}
        own = {name: t[:, first : first + count] for name, t in per_head.items()}
        return dataclasses.replace(self, fitted=self.fitted | own)

    def learns(self, B: int, H: int, head_dim: int) -> dict[str, TensorSpec]:
        """Return the specifications of thresholds and codebooks, per batch row or for all rows.

        Tensors from a corpus are for all rows.
        """
        found = {}
        learnt = (1,) if self.fits_on == "corpus" else (1, B)
        rows = learnt if self.ranges == "offline" else (1, B)
        if "ranges" in self._learns:
            extent = (H, head_dim) if self.axis == "channel" else (1, 1)
            found = dict.fromkeys(("lower", "upper"), TensorSpec(torch.float32, (rows, *extent)))
        if self.table == "nuq":
            table = TensorSpec(torch.float32, (learnt, 2**self.bits))
            found |= {"table": table} | ({"table_read": table} if self.q_norm else {})
        return found

    def learnt_fault(self, B: int, H: int, head_dim: int) -> str | None:
        """Check that float16 holds the ranges, and that fitted tensors have equally many rows."""
        fault = super().learnt_fault(B, H, head_dim)
        if fault is None and self.fits_on == "prompt" and len({len(t) for t in self.fitted.values()}) > 1:
            return "has tensors for one row and tensors for several"
        if fault or "lower" not in self.fitted or "upper" not in self.fitted:
            return fault
        low, high = self.fitted["lower"], self.fitted["upper"]
        if low.shape != high.shape or not bool((low <= high).all()):
            return "has lower thresholds above upper ones"
        stored = (high / 2 - low / 2).half().isfinite() & (high / 2 + low / 2).half().isfinite()
        return None if bool(stored.all()) else "has thresholds that float16 cannot hold"

    def fit(self, x: Tensor, fisher: Tensor | None = None) -> Self:
        """Fit on x float32 [B, H, T, D], each batch row separately. For a corpus B is 1.

        Fits `lower` and `upper` [B, H, D] (per channel) or [B, 1, 1] (per matrix), `table` and
        `table_read` [B, 2^bits].

        fisher: squared gradients of the loss with respect to x, of its shape. 1 if not given.
        """
        fitted = dict(self.fitted)
        if "ranges" in self._learns:
            fitted["lower"], fitted["upper"] = self._thresholds(x)
        codec = dataclasses.replace(self, fitted=fitted)
        if self.table != "nuq" or "table" in fitted:
            return codec
        weight = torch.ones_like(x) if fisher is None or self.weights == "none" else fisher
        tables = [codec._kmeans(x[b : b + 1], weight[b : b + 1], b) for b in range(len(x))]
        fitted["table"] = torch.stack([t for t, _ in tables]).to(x.device)
        if self.q_norm:
            fitted["table_read"] = torch.stack([t for _, t in tables]).to(x.device)
        return dataclasses.replace(codec, fitted=fitted)

    def fit_corpus(self, x: Tensor, gradient: Tensor) -> Self:
        """Fit on a corpus, without ranges if they come from the prompt."""
        codec = self.fit(x, gradient.square())
        if self.ranges == "offline":
            return codec
        kept = {name: t for name, t in codec.fitted.items() if name not in ("lower", "upper")}
        return dataclasses.replace(codec, fitted=kept)

    def _thresholds(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return quantiles over tokens, or over the whole matrix."""
        vectors = x.reshape(len(x), 1, 1, -1) if self._of_matrix else x.transpose(-1, -2)
        low, high = quantiles(vectors, self.outliers)
        if self._of_matrix and self.axis == "channel":
            # outliers are those of the whole matrix; the other elements have a range per channel
            inside = ((x >= low.unsqueeze(-1)) & (x <= high.unsqueeze(-1))) | (x == x.amin(2, keepdim=True))
            low_c = torch.where(inside, x, torch.inf).amin(2).clamp_min(low)
            high_c = torch.where(inside, x, -torch.inf).amax(2).clamp_max(high)
            return low_c, torch.maximum(low_c, high_c)
        return low, high

    def _kmeans(self, x: Tensor, weight: Tensor, row: int) -> tuple[Tensor, Tensor]:
        """Return the codebook in [−1, 1] and the decoding codebook, for one row [1, H, T, D]."""
        # without a limit of outliers per block, so that one calibration serves all of them
        one = dataclasses.replace(self, fitted={k: v[row : row + 1] for k, v in self.fitted.items()}, room=0.0)
        scale, middle, outlier = one._normalise(x)
        y = ((x - middle) / torch.where(scale == 0, 1.0, scale))[~outlier]
        if self.weights == "eq7":
            weight = weight * scale.square()
        return weighted_codebook(y, weight.expand_as(x)[~outlier], self.bits, self.q_norm)

    def _normalise(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return scale, middle and the mask of outliers for x [B, H, T, D].

        Scale (half the range) and middle have their stored precision and broadcast to x.
        """
        if self.axis == "channel" or self._of_matrix:
            low, high = (self.fitted[k].unsqueeze(2) for k in ("lower", "upper"))
        else:
            vectors, H = (x, x.shape[1]) if self.per_head else (x.transpose(1, 2).flatten(2), 1)
            low, high = (q.view(len(x), H, x.shape[2], 1) for q in backends.quantiles(vectors, self.outliers))
        outlier = (x < low) | (x > high) if self.outliers else torch.zeros_like(x, dtype=torch.bool)
        excess = torch.maximum(low - x, x - high)
        if self.outliers and self.axis == "token" and not self._of_matrix:
            outlier = largest_share(excess, outlier, self.outliers, self.per_head)
        if self.cap:
            outlier = largest(excess, outlier, self.cap)
        if self.outliers and self.room:
            outlier = largest_of_blocks(excess, outlier, self.places(x.shape[-1]))
        if self.axis == "token":
            axes = (3,) if self.per_head else (1, 3)
            rest_low = torch.where(outlier, torch.inf, x).amin(axes, keepdim=True)
            rest_high = torch.where(outlier, -torch.inf, x).amax(axes, keepdim=True)
            low, high = (torch.where(rest.isfinite(), rest, 0.0) for rest in (rest_low, rest_high))
        scale, middle = (high - low) / 2, (high + low) / 2
        return _stored(scale).float(), _stored(middle).float(), outlier

    def encode(self, x: Tensor) -> PackedTensors:
        """Encode x float32 [B, H, N·t, D] as packed tensors."""
        D = x.shape[-1]
        scale, middle, outlier = self._normalise(x)
        y = ((x - middle) / torch.where(scale == 0, 1.0, scale)).clamp(-1, 1)
        table, read = self._tables(str(x.device))
        codes = per_row(nearest_code, y, table)
        grid = self.grid(D)
        by_group = grid.groups(codes)
        ranges = None
        if self.axis == "token":
            ranges = [s.squeeze(-1).unflatten(2, (-1, grid.block_tokens)).unsqueeze(3) for s in (scale, middle)]
        planes = grid.pack(by_group, *((None, None) if ranges is None else (r.half() for r in ranges)))
        if self.outliers:
            dense = per_row(lambda c, t: t[c.long()], codes, read) * scale + middle
            rest = x - dense
            planes |= pack_outlier_blocks(rest, outlier, self.places(D)) if self.room else pack_outliers(rest, outlier)
        return planes

    def places(self, head_dim: int) -> int:
        """Return the number of outliers that a block of a head has places for, if there is `room`."""
        elements = BLOCK_TOKENS * head_dim
        return min(elements, max(1, math.ceil(round(self.room * self.outliers * elements, 6))))

    def _tables(self, device: str) -> tuple[Tensor, Tensor]:
        """Return the codebooks for encoding and decoding in [−1, 1], [2^b] or, if fitted,
        [B, 2^b].
        """
        table = self.fitted["table"] if self.table == "nuq" else fixed_table(self.table, self.bits, device)
        return table, self.fitted.get("table_read", table)

    def grid(self, head_dim: int) -> Grid:
        """Return the layout of the dense codes."""
        return Grid(self.bits, self.side, self.axis, 0, True, head_dim)

    def layout(self, head_dim: int) -> Layout:
        """Return the layout: codes, scale and offset of a token for all heads, and outliers."""
        if head_dim > MAX_CHANNELS:
            raise UserError(f"kvquant stores outliers of heads with at most {MAX_CHANNELS} channels, got {head_dim}")
        layout = self.grid(head_dim).layout()
        planes = {
            name: spec if name == "codes" else dataclasses.replace(spec, shared=not self.per_head)
            for name, spec in layout.planes.items()
        }
        if self.outliers and self.room:
            planes |= sparse_block_planes(self.places(head_dim), head_dim)
        elif self.outliers:
            of_tokens = self.axis == "token" and not self._of_matrix
            share = whole_share(self.outliers, head_dim) if of_tokens and self.per_head else self.outliers * head_dim
            planes |= sparse_planes(share, head_dim)
            if of_tokens and not self.per_head and not self.cap:
                of_all = self.outliers, head_dim
                for name in [name for name, spec in planes.items() if spec.ragged is not None]:
                    planes[name] = dataclasses.replace(planes[name], share=of_all)
        return Layout(layout.block_tokens, planes)

    def view(self, planes: PackedTensors, head_dim: int) -> View:
        """Return the view of the dense codes plus the outliers."""
        B, H = planes["codes"].shape[:2]
        scale = offset = None
        dense_planes = dict(planes)
        if self.axis == "channel":
            low, high = (self.fitted[k].expand(B, H, -1) for k in ("lower", "upper"))
            # `encode` has checked it, and a check would synchronise with the GPU
            scale, offset = ((high - low) / 2).to(torch.float16), ((high + low) / 2).to(torch.float16)
        else:
            dense_planes |= {name: planes[name].expand(-1, H, -1, -1, -1) for name in ("scale", "offset")}
        _, table = self._tables(str(planes["codes"].device))
        if table.dim() == 2 and len(table) == 1:
            table = table[0]
        dense = GridView(self.grid(head_dim), dense_planes, table, scale, offset)
        if not self.outliers:
            return dense
        return Sum([dense, (SparseBlocksView if self.room else SparseView)(planes, head_dim)])

    def select(self, rows: Tensor) -> Self:
        """Return the codec for these batch rows. Tensors from a corpus are shared by all rows."""
        if all(len(t) == 1 for t in self.fitted.values()):
            return self
        fitted = {name: t.index_select(0, rows) if len(t) > 1 else t for name, t in self.fitted.items()}
        return dataclasses.replace(self, fitted=fitted)

    def table_bytes(self, head_dim: int) -> TableBytes:
        """Return the bytes of thresholds and codebooks, float32."""
        shared = {} if self.table == "nuq" else {f"{self.table} {self.bits}": 4 * 2**self.bits}
        per_channel = 8 * head_dim if self.axis == "channel" else 0
        per_layer = 4 * 2**self.bits * (1 + self.q_norm) if self.table == "nuq" else 0
        per_layer += 8 if self._of_matrix and not per_channel else 0
        return TableBytes(shared, per_channel, per_layer, of_sequence=self.fits_on != "corpus")

    def tables(self, head_dim: int) -> list[Tensor]:
        """Return the tensors counted by `table_bytes`."""
        fixed = [] if self.table == "nuq" else [fixed_table(self.table, self.bits, "cpu")]
        return [*fixed, *self.fitted.values()]


def _stored(x: Tensor) -> Tensor:
    return round_scale(x, torch.float16, "a range", TOO_LARGE)


def build(
    bits: int = 3,
    outliers: float = 0.01,
    table: Literal["nuq", "nf", "int"] = "nuq",
    axis: Literal["channel", "token"] = "channel",
    outliers_per: Literal["vector", "matrix"] = "vector",
    ranges: Literal["offline", "online"] = "offline",
    weights: Literal["eq7", "fisher", "none"] = "eq7",
    q_norm: bool = False,
    cap: int = 0,
    calibration: Literal["corpus", "prompt"] = "corpus",
    value_axis: Literal["token", "channel"] = "token",
    room: float = 0.0,
) -> Pair:
    """Build the codecs, keys before RoPE.

    axis, value_axis: channel or token, for the keys and for the values.
    """
    check_choice("value_axis", value_axis, ("token", "channel"))
    options = bits, table, outliers, outliers_per, axis, ranges, weights, q_norm, cap, calibration, room
    keys = KVQuant(*options, pre_rope=True)
    if value_axis == "token":
        ranges = "offline"  # a token's range is always its own
    return Pair(keys, dataclasses.replace(keys, axis=value_axis, ranges=ranges, side="values", pre_rope=False))


METHOD = Method(
    "KVQuant",
    "arXiv 2401.18079",
    build,
    variants=(
        {"outliers": 0.0},
        {"calibration": "prompt", "bits": 2, "q_norm": True},
        {"calibration": "prompt", "axis": "token", "cap": 1},
        {"outliers_per": "matrix", "table": "nf"},
        {"ranges": "online", "table": "int", "outliers": 0.05},
        {"calibration": "prompt", "value_axis": "channel", "table": "int"},
        {"calibration": "prompt", "room": 1.5},
    ),
)
