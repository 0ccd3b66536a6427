"""Simulate a recipe in one forward pass: attention sees every key and value after encoding and
decoding.

KVQuant (arXiv 2401.18079, §4) and GPTQ's script measure perplexity this way. Queries, too, come
from layers that already read coded tokens. Of the recipe's token policy only the type of exact
tokens is used; only the first `sinks` tokens stay exact. The model is not modified.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tersekv.attention.prompt_loss import losses_for
from tersekv.attention.read import AttentionCall
from tersekv.cache import coding
from tersekv.cache.coding import Tokens
from tersekv.cache.footprint import Footprint
from tersekv.cache.rotary import Rotary
from tersekv.cache.store import LEAST_QUERIES
from tersekv.calibration.calibration import Calibration
from tersekv.calibration.capture import LayerTokens, OnePassCache, watch_calls
from tersekv.calibration.find import calibrated_plans
from tersekv.codecs.base import Codec
from tersekv.errors import CacheError, UserError
from tersekv.models.config import AttentionShape, attention_layers, text_config
from tersekv.models.rope import Ropes
from tersekv.recipe import Recipe
from tersekv.transforms.angles import Angles
from tersekv.transforms.moments import TokenLoss


class SimulatedCache(OnePassCache):
    """A cache for one call of a model, `model(ids, past_key_values=SimulatedCache(model.config, recipe))`.

    received: each layer's keys and values as the model made them, if `keep` is True.
    instead: what takes recipes that a simulation does not, for the error message.
    losses: of errors in each layer's keys and values, see `observe`.

    Raises:
        UserError: the recipe is unknown, evicts tokens, or has options that do not fit the model's
            head dim; or the calibration is missing or was made for another recipe or model.
    """

    def __init__(
        self,
        config: Any,
        recipe: str | Recipe,
        sinks: int = 0,
        calibration: Calibration | str | Path | None = None,
        keep: bool = False,
        instead: str = "a CompressedCache",
    ) -> None:
        super().__init__(config, self._coded)
        self.keep = keep
        self.received: list[LayerTokens] = []
        recipe = Recipe.parse(recipe)
        self.plans = calibrated_plans(recipe, text_config(config), calibration)
        policy = recipe.policy()
        for applies, does, other in (
            (policy.drops, "evicts tokens", "the policy window"),
            (policy.observes, "codes tokens at several rates", "the policy window"),
            (policy.corrected_share, "corrects the softmax bias of packed tokens", "bias_correction=off"),
        ):
            if applies:
                raise UserError(f"{recipe} {does}, which a simulation does not support: use {instead}, or {other}")
        self.sinks = sinks
        self.losses: dict[int, tuple[TokenLoss | None, TokenLoss | None]] = {}
        self._windows = [kind.window for kind in attention_layers(text_config(config))]
        self._ropes = Ropes(text_config(config), AttentionShape.of(text_config(config)).key_dim)
        self._held = Footprint()
        self._tables: dict[int, Tensor] = {}

    def observe(self, model: PreTrainedModel, ids: Tensor) -> SimulatedCache:
        """Observe the queries of an exact pass over ids [B, T], if a codec uses them, and return the
        cache. Without this call such codecs are fitted with equal weights for all tokens."""

        def see(layer: int, tokens: LayerTokens, call: AttentionCall) -> None:
            plan, coded = self.plans[layer], torch.ones(1, ids.shape[1], device=ids.device)
            coded[:, : self.sinks] = 0
            kinds = plan.keys.observes, plan.values.observes
            if ids.shape[1] >= LEAST_QUERIES and any(kinds):
                self.losses[layer] = losses_for(kinds, *tokens, call, coded)

        if any(plan.keys.observes or plan.values.observes for plan in self.plans.values()):
            watch_calls(model, ids, see)
        return self

    def _coded(self, layer: int, keys: Tensor, values: Tensor) -> LayerTokens:
        dims = keys.shape[-1], values.shape[-1]
        plan = self.plans[layer].in_layer(keys.shape[2], self._windows[layer], *dims)
        if self.keep:
            self.received.append(LayerTokens(keys, values))
        B, H, T, _ = keys.shape
        self._held.tokens = max(self._held.tokens, T)
        self._held.elements += B * H * T * (keys.shape[-1] + values.shape[-1])
        dtype = plan.policy.exact_dtype(keys.dtype)
        try:
            rope = self._ropes.needed_by(plan.keys, layer)
            rotary = None if rope is None else Rotary(rope)
            if rotary is not None:
                rotary.note(0, T)
            losses = self.losses.get(layer, (None, None))
            return LayerTokens(
                self._code(plan.keys, keys, dtype, losses[0], rotary), self._code(plan.values, values, dtype, losses[1])
            )
        except (CacheError, UserError) as error:
            raise type(error)(f"layer {layer}: {error}") from error

    def _code(
        self, codec: Codec, x: Tensor, dtype: torch.dtype, loss: TokenLoss | None, rotary: Rotary | None = None
    ) -> Tensor:
        """Return x [B, H, T, D] after encoding and decoding, in its own type. As in the store,
        tokens are rounded to the exact type first."""
        exact = x.to(dtype)
        if not bool(exact.isfinite().all()):
            raise CacheError(f"keys or values are not finite in {str(dtype).removeprefix('torch.')}")
        first, rest = exact[:, :, : self.sinks], exact[:, :, self.sinks :]
        self._held.parts["exact sinks"] += first.numel() * first.element_size()
        if not rest.shape[2]:
            return first.to(x.dtype)

        def angles(place: int, n: int) -> Angles | None:
            return None if rotary is None else rotary.angles(place, n, x.device)

        sinks = Tokens(first, angles(0, self.sinks)) if self.sinks else None
        parts = [Tokens(rest, angles(self.sinks, rest.shape[2]))]
        loss = None if loss is None else loss.tokens(self.sinks)
        codec = coding.fitted(codec.to(x.device), parts, sinks, loss=loss)
        for table in codec.tables(x.shape[-1]):
            self._tables[table.data_ptr()] = table
        layout, coded = codec.layout(x.shape[-1]), [first.to(x.dtype)]
        for start, stop in coding.chunks(0, rest.shape[2], layout.block_tokens, rest):
            n, place = stop - start, self.sinks + start
            whole = math.ceil(n / layout.block_tokens) * layout.block_tokens
            planes = coding.encode(codec, Tokens(rest[:, :, start:stop], angles(place, n)))
            for name, plane in planes.items():  # a partial last block counts in proportion
                share = plane.numel() * plane.element_size() * n / whole
                self._held.parts[layout.planes[name].kind] += round(share)
            decoded = coding.view(codec, planes, x.shape[-1], angles(place, whole)).decode()
            coded.append(decoded[:, :, :n].to(x.dtype))
        return torch.cat(coded, dim=2)

    def footprint(self) -> Footprint:
        """Return the bytes of the codes; tables shared by layers count once."""
        held = Footprint.sum([self._held])
        held.parts["tables"] = sum(table.numel() * table.element_size() for table in self._tables.values())
        return held
