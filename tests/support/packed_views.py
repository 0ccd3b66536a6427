"""Views of random tokens in every packed layout, and bounds of their float32 errors."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tersekv.codecs import Codec, methods
from tersekv.kernels.attend_grid import decode_grid
from tersekv.layouts.base import Concat, Rotated, Sum, View
from tersekv.layouts.exact import ExactView
from tersekv.layouts.grid import GridView
from tersekv.layouts.mean_removed import RotatedMean
from tersekv.layouts.roped import Roped
from tersekv.layouts.signs import SignSketch, SignsView
from tersekv.transforms.rope import Rope, standard_rope

FORMATS = {
    "exact": ("exact", {"dtype": "bf16"}),
    "grid": ("kivi", {"bits": 2}),
    "grid 3": ("uniform", {"bits": 3}),
    "grid 5": ("uniform", {"bits": 5}),
    "grid 6 per channel": ("uniform", {"bits": 6, "axis": "channel", "group": 64}),
    "grid 7": ("turboquant", {"bits": 7.0}),
    "grid per channel with factors": ("kvarn", {"tile": 64}),
    "grid 5 with factors": ("kvarn", {"bits": 5, "tile": 32}),
    "grid 8": ("uniform", {"bits": 8, "axis": "channel", "group": 0, "scales": "bf16"}),
    "signs": ("qjl", {"sketch": 256}),
    "signs per group": ("qjl", {"outliers_per": "group", "sketch": 200}),
    "signs alone": ("qjl", {"outliers": 0, "sketch": 100, "orthogonal": False}),
    "polar": ("polarquant", {}),
    "polar online": ("polarquant", {"codebook": "online", "radii": "bf16", "rotation": "none"}),
    "polar other bits": ("polarquant", {"bits": "5-3-2"}),
    "polar one level": ("polarquant", {"bits": "3"}),
    "sparse": ("kvquant", {"calibration": "prompt", "outliers": 0.02}),
    "sparse matrix": ("kvquant", {"bits": 4, "calibration": "prompt", "outliers_per": "matrix", "axis": "token"}),
    "sparse per channel": ("kvquant", {"calibration": "prompt", "outliers": 0.02, "value_axis": "channel"}),
    "sparse blocks": ("kvquant", {"calibration": "prompt", "outliers": 0.02, "room": 1.1}),
    "joined": ("turboquant", {"bits": 2.5}),
    "joined and added": ("turboquant", {"bits": 3.25, "variant": "prod"}),
    "trellis": ("trellis", {"bits": 2.0, "calibration": "prompt"}),
    "trellis other tables": ("trellis", {"bits": 1.5, "calibration": "prompt", "basis": "channels", "code": "scalar"}),
    "signs without codes": ("turboquant", {"bits": 1.0, "variant": "prod"}),
}
"""Recipe of each format: method and options."""


def tokens(B: int, H: int, T: int, D: int) -> Tensor:
    """Return vectors with outlier channels and single outliers, float32 [B, H, T, D]."""
    x = torch.randn(B, H, T, D)
    x[..., :: D // 4] *= 4
    return torch.where(torch.rand_like(x) < 0.005, x * 8, x)


def codec_of(name: str, side: str) -> Codec:
    """Build the codec of a format of `FORMATS`."""
    method, options = FORMATS[name]
    codec = getattr(methods()[method].build(**options), side)
    if method == "qjl":
        codec = methods()[method].build(**options, initial_layers=0).keys
        codec = codec.__class__(**{**codec.options(), "side": side})
    return codec


def packed(name: str, side: str, x: Tensor) -> View:
    """Pack x [B, H, T, D] in a format of `FORMATS`, in tensors with spare capacity after the last
    block."""
    codec = codec_of(name, side).fit(x)
    planes = codec.encode(x)
    layout = codec.layout(x.shape[-1])
    for name_, plane in planes.items():
        if layout.planes[name_].ragged is None:
            full = torch.cat(
                [plane, torch.full_like(plane[:, :, :1], float("nan") if plane.is_floating_point() else -1)], 2
            )
            planes[name_] = full[:, :, : plane.shape[2]]
    return codec.view(planes, x.shape[-1])


def interleaved_rope(R: int) -> Rope:
    """Return GPT-J's RoPE: pairs are adjacent channels, and each column of cos and sin occurs
    twice."""
    frequency = 10_000.0 ** (-torch.arange(0, R, 2, dtype=torch.float64) / R)

    def cos_sin(positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
        angle = positions.double()[:, None] * frequency.repeat_interleave(2)
        return angle.cos() * 1.1, angle.sin() * 1.1

    def apply(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x[..., 0:R:2], x[..., 1:R:2]
        rotated = x[..., :R] * cos.unsqueeze(1) + torch.stack([-second, first], -1).flatten(-2) * sin.unsqueeze(1)
        return torch.cat([rotated, x[..., R:]], dim=-1)

    return Rope(cos_sin, apply)


@functools.cache
def rope(kind: str, R: int) -> Rope:
    """Return a RoPE on R channels with pairs in one of the two usual orders."""
    return standard_rope(R) if kind == "halves" else interleaved_rope(R)


def roped(view: View, kind: str, R: int, T: int, rows: str = "shared") -> Roped:
    """Return a view of keys before RoPE.

    rows: positions "shared", separate "per row", or separate "per head" (2 rows, 3 heads).
    """
    of = rope(kind, R)
    if rows == "shared":
        return Roped(view, of, of.angles_at(torch.arange(5, 5 + T)))
    shape = (2, T) if rows == "per row" else (2, 3, T)
    return Roped(view, of, of.angles_at(torch.randint(0, 3000, shape)))


def magnitude(view: View) -> Tensor:
    """Return, per element, the sum of the absolute values that float32 adds up: float64 [B, H, T,
    D]."""
    if isinstance(view, Sum):
        return sum(magnitude(part) for part in view.views)
    if isinstance(view, Concat):
        parts = [magnitude(part) for part in view.views]
        rows = max(map(len, parts))
        return torch.cat([part.expand(rows, -1, -1, -1) for part in parts], dim=-1)
    if isinstance(view, Rotated):
        return magnitude(view.inner) @ view.rotation.abs().double()
    if isinstance(view, Roped):
        return _rotated_magnitude(magnitude(view.before), view)
    if isinstance(view, RotatedMean):
        return _rotated_magnitude(view.mean.unsqueeze(2).abs().double(), view)
    if isinstance(view, SignsView):
        return sum(_sketch_magnitude(s, view.head_dim) for s in view.sketches)
    if isinstance(view, GridView):
        side = view.side
        if side.factor is not None:
            side = side._replace(factor=side.factor.abs())
        total = decode_grid(side._replace(table=side.table.abs(), scale=side.scale.abs(), offset=None)).double()
        if side.offset is not None:
            total += decode_grid(side._replace(table=torch.ones_like(side.table), scale=side.offset.abs(), offset=None))
        return total
    assert isinstance(view, ExactView) or view.kind in ("polar", "sparse", "sparse blocks", "trellis")
    return view.decode().abs().double()


def _rotated_magnitude(size: Tensor, view: Roped | RotatedMean) -> Tensor:
    channels = view.rope.channels(size.shape[-1])
    partner, cos, sin = channels[:, 0].long(), channels[:, 1].long(), channels[:, 2].long()
    of_token = [x if x.dim() == 4 else x.unsqueeze(1) for x in (x.abs().double() for x in view.angles.rows())]
    rotated = size * of_token[0][..., cos] + size[..., partner] * of_token[1][..., sin]
    return torch.where(partner >= 0, rotated, size)


def table_error(view: View, query: Tensor) -> float:
    """Return the largest error of q·k̂, for query [B, H, R, D], from tables of 16-bit partial sums.

    It is half a step per nibble of signs. A step is 1/32760 of the largest sum of |S·q| over 32
    rows of the sketch.
    """
    if isinstance(view, Sum):
        return sum(table_error(part, query) for part in view.views)
    if isinstance(view, Concat):
        return sum(map(table_error, view.views, query.split(view.dims, dim=-1)))
    if not isinstance(view, SignsView):
        return 0.0
    return sum(_sketch_error(sketch, query) for sketch in view.sketches)


def _sketch_error(sketch: SignSketch, query: Tensor) -> float:
    blocks = sketch.norms.shape[2] if sketch.varies else 1
    at = [c if c is None else c.expand(-1, -1, blocks, -1) for c in (sketch.channels, sketch.dropped)]
    most = 0.0
    for n in range(blocks):
        channels, dropped = (c if c is None else c[:, :, n : n + 1] for c in at)
        sketched = sketch._replace(channels=channels, dropped=dropped).query(query).abs()
        groups = torch.nn.functional.pad(sketched, (0, -sketched.shape[-1] % 32)).unflatten(-1, (-1, 32))
        most = max(most, float(groups.sum(-1).max()))
    nibbles = 2 * sketch.signs.shape[3]
    return nibbles * 0.5 * most / 32760 * float(sketch.norms.abs().max()) * abs(sketch.factor)


def _sketch_magnitude(sketch: SignSketch, head_dim: int) -> Tensor:
    ones = sketch._replace(
        signs=torch.full_like(sketch.signs, 255), norms=sketch.norms.abs(), sketch=sketch.sketch.abs()
    )
    return ones.decode(head_dim).double()


def make_mask(B: int, q: int, T: int) -> Tensor:
    """Return a random mask [B, q, T] with a row that sees nothing and a row that starts late."""
    mask = torch.rand(B, q, T) < 0.6
    mask[:, 0] = False
    mask[:, -1, : T // 2] = False
    return mask
