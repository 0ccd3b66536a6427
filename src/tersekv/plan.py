"""Plan of one layer: what a recipe and a calibration give it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tersekv.codecs import Codec
from tersekv.policies import TokenPolicy


class LayerPlan(NamedTuple):
    """Codecs and token policy of one layer.

    layer: index of the layer.
    layers: number of layers of the model.
    scores: importance of the model's KV heads, float32 [layers, heads], for policies that need it.
        It is −1 in layers that evict nothing.
    rates: bits, lower rate and share of tokens with the codec's bits, float32 [3], if they were
        chosen for this layer (`cache/rate_allotment.py`). Codecs and policy have them already.
    """

    keys: Codec
    values: Codec
    policy: TokenPolicy
    layer: int = 0
    layers: int = 1
    scores: Tensor | None = None
    rates: Tensor | None = None
