"""Plan of one layer: what a recipe and a calibration give it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from tersekv.codecs import Codec
from tersekv.codecs.uniform import Uniform
from tersekv.policies import TokenPolicy

LEAST_EXPECTED = 1536
"""Tokens that a sequence is expected to reach, if its first call is shorter. A chat begins so."""

WINDOW_BITS = 4.0
"""Least bits of layers with a sliding window whose policy chooses rates on the prompt. They hold few tokens, and have
one rate, which cannot follow the attention."""


class LayerPlan(NamedTuple):
    """Codecs and token policy of one layer.

    layer: index of the layer.
    layers: number of layers of the model.
    scores: importance of the model's KV heads, float32 [layers, heads], for policies that need it.
        It is −1 in layers that evict nothing.
    rates: of each KV head bits, lower rate and share of tokens with the former, float32 [heads, 3], if they
        were chosen for this layer (`sizes/rate_allotment.py`). The codecs have the most bits of all heads.
    latent: True if the layer caches latents in place of keys and rotated keys in place of values,
        see `of_latents`.
    index_dim: channels of the keys by which an indexer of the model chooses tokens, 0 without one.
    """

    keys: Codec
    values: Codec
    policy: TokenPolicy
    layer: int = 0
    layers: int = 1
    scores: Tensor | None = None
    rates: Tensor | None = None
    latent: bool = False
    index_dim: int = 0

    @property
    def coded(self) -> str:
        """Method and bits of keys and values, for a person."""
        keys, values = (
            f"{codec.label.lower()}, {bits:g} bits"
            if isinstance(bits := getattr(codec, "bits", None), (int, float))
            else codec.label.lower()
            for codec in (self.keys, self.values)
        )
        return keys if keys == values else f"{keys} / {values}"

    def of_latents(self, index_dim: int = 0) -> LayerPlan:
        """Return the plan of a layer with latent attention.

        Its heads share one key, a latent followed by a rotated key, and one value, the latent. Latents
        get the codec of values, because values are made of them. Their mean stays in them, because as
        a part of keys it would change the scores. Rotated keys get 8 bits, because they are few and
        their errors cost most; or floats if the recipe's keys are floats.
        """
        mean: dict[str, Any] = {"centre": False} if hasattr(self.values, "centre") else {}
        latents = replace(self.values, **mean)
        rotated = Uniform(8, "token", 0, side="values") if self.keys.has_rates else replace(self.keys, side="values")
        return self._replace(keys=latents, values=rotated, latent=True, index_dim=index_dim)

    def per_head(self) -> LayerPlan:
        """Return the plan whose codecs store nothing jointly for all heads of a token."""
        keys, values = (replace(codec, per_head=True) for codec in (self.keys, self.values))
        return self._replace(keys=keys, values=values)

    def in_layer(self, tokens: int, window: int | None, key_dim: int, value_dim: int) -> LayerPlan:
        """Return the plan with the codecs that this layer gets, see `Codec.in_layer`.

        tokens: number of tokens of the first call.
        """
        fixed = window is None and (self.policy.drops or self.policy.observes)
        if fixed:  # such a policy needs the codec's rates or its tokens' places
            return self
        held = max(tokens, LEAST_EXPECTED) if window is None else window

        def chosen(codec: Codec, head_dim: int) -> Codec:
            if self.policy.waits and codec.has_rates:
                codec = codec.at_rate(max(WINDOW_BITS, getattr(codec, "bits", 0)))
            return codec.in_layer(held, head_dim)

        keys, values = chosen(self.keys, key_dim), chosen(self.values, value_dim)
        return self._replace(keys=keys, values=values)
