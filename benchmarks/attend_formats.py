"""Packed keys and values of methods beside the grid, as `attend.py` times them."""

from __future__ import annotations

import torch
from torch import Tensor

from tersekv.codecs import methods
from tersekv.formats.base import Layout, Planes, View
from tersekv.formats.roped import Roped
from tersekv.transforms.rope import standard_rope

FORMATS = {
    "qjl256": ("qjl", {"value_bits": 4, "sketch": 256, "initial_layers": 0}),
    "polar": ("polarquant", {}),
    "nuq4-1%": ("kvquant", {"bits": 4, "calibration": "prompt"}),
    "nuq4-1%-prerope": ("kvquant", {"bits": 4, "calibration": "prompt"}),
}
"""Method and options of each; "-prerope" puts RoPE back as keys are read."""

ENCODED_TOKENS = 1024


def make(name: str, heads: int, tokens: int, D: int) -> tuple[View, View, int]:
    """Views of keys and values [1, heads, tokens, D], without their linear maps, and the bytes that they read. Random
    tokens with a few outliers are encoded once and repeated."""
    method, options = FORMATS[name]
    pair = methods()[method].build(**options)
    size, views = 0, []
    for codec in (pair.keys, pair.values):
        x = torch.randn(1, heads, min(tokens, ENCODED_TOKENS), D)
        fitted = codec.fit(x)
        planes = repeated(fitted.layout(D), fitted.encode(x), tokens // x.shape[2])
        size += sum(plane.numel() * plane.element_size() for plane in planes.values())
        views.append(fitted.view(planes, D).inner)
    if name.endswith("prerope"):
        cos, sin = standard_rope(D).cos_sin(0, tokens, 0, torch.device("cpu"))
        views[0] = Roped(views[0], standard_rope(D), cos.unsqueeze(0), sin.unsqueeze(0))
    return views[0], views[1], size


def repeated(layout: Layout, planes: Planes, times: int) -> Planes:
    """Planes of `times` as many blocks, the same over and over, in memory of their own."""
    grown: Planes = {}
    for name, plane in planes.items():
        if layout.planes[name].ragged is not None:
            grown[name] = plane.repeat(times)
        elif name == layout.starts:
            entries = len(next(planes[n] for n, spec in layout.planes.items() if spec.ragged is not None))
            grown[name] = torch.cat([plane + i * entries for i in range(times)], dim=2)
        else:
            grown[name] = plane.repeat(1, 1, times, *[1] * (plane.dim() - 3))
    return grown


def decoded(keys: View, values: View) -> tuple[Tensor, Tensor]:
    """The vectors behind the views, float32 [1, heads, tokens, D]."""
    return keys.decode(), values.decode()
