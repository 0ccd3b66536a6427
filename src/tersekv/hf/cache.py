"""`CompressedCache`: a transformers `Cache` whose attention layers keep packed bytes."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer
from transformers.configuration_utils import PreTrainedConfig

from tersekv.errors import CacheError, UserError
from tersekv.hf.calibration import Calibration, calibrated_plans
from tersekv.hf.config import AttentionShape, attention_layers, text_config
from tersekv.hf.handle import Pending, PendingTokens
from tersekv.hf.rope import Ropes
from tersekv.recipe import LayerPlan, Recipe
from tersekv.store.footprint import Footprint
from tersekv.store.kept import new_store
from tersekv.store.layer import LayerStore
from tersekv.store.selective import UNREADABLE, SelectiveStore

ATTENTION_NAME = "tersekv"


class CompressedLayer(CacheLayerMixin):
    """One attention layer: a `LayerStore` behind transformers' layer interface."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: CompressedCache, index: int, plan: LayerPlan, window: int | None) -> None:
        super().__init__()
        self.cache, self.index, self.plan, self.sliding_window = cache, index, plan, window
        self.is_sliding = window is not None
        self.store: LayerStore | SelectiveStore | None = None
        self.record_past = False
        self.home: torch.device | None = None

    # ------------------------------------------------------------------ growing

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Create the store with the shapes of the first tokens."""
        rope = self.cache.ropes.of(self.index) if self.plan.keys.needs_rope else None
        self.store = new_store(self.plan, key_states, value_states, self.sliding_window, rope)
        self.store.record_past = self.record_past
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Take new tokens [B, H, n, D]. Returns handles where our attention is installed, else all tokens decoded."""
        self._check(key_states, value_states)
        if self.store is None:
            self.lazy_initialization(key_states, value_states)
        if self.cache.hands_out_handles:
            pending = Pending(self, key_states, value_states)
            return PendingTokens(pending, False), PendingTokens(pending, True)
        self.cache.warn_decoding()
        return self.append_and_decode(key_states, value_states)

    def _check(self, keys: Tensor, values: Tensor) -> None:
        if self.store is None:
            return
        B, H, D = self.store.batch_size, self.store.kv_heads, self.store.keys.head_dim
        if keys.shape[:2] != (B, H) or keys.shape[-1] != D:
            raise CacheError(
                f"layer {self.index} holds batch {B} × {H} heads × {D}, got keys {tuple(keys.shape)}; "
                "use a new cache for another batch, or batch_repeat_interleave / batch_select_indices"
            )

    def append(self, keys: Tensor, values: Tensor, padding: Tensor | None = None, votes: Tensor | None = None) -> None:
        """Add tokens to the store, with the attention that it has asked to see; errors name the layer."""
        assert self.store is not None
        try:
            self.store.append(keys, values, padding, *(() if votes is None else (votes,)))
        except (CacheError, UserError) as error:
            raise type(error)(f"layer {self.index}: keys or values hold {error}") from error

    def append_and_decode(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add tokens and return [B, H, tokens, D]: those held before decoded, the new ones exact.

        Raises:
            UserError: the layer's policy drops tokens.
        """
        assert self.store is not None
        if isinstance(self.store, SelectiveStore):
            raise UserError(f"{self.cache.recipe}: {UNREADABLE}")
        past = self.store.decoded(keys.dtype) if self.store.seen else None
        self.append(keys, values)
        if past is None:
            return keys, values
        return torch.cat([past[0], keys], dim=2), torch.cat([past[1], values], dim=2)

    # ------------------------------------------------------------------ transformers' questions

    def get_seq_length(self) -> int:
        """Tokens seen."""
        return 0 if self.store is None else self.store.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Masks span all tokens seen; with handles the reader slices them, else dropped tokens are cut off in front."""
        seen = self.get_seq_length()
        dropped = 0 if self.store is None or self.cache.hands_out_handles else self.store.dropped
        return seen + query_length - dropped, dropped

    def get_max_length(self) -> int:
        """No maximum, or the sliding window."""
        return -1 if self.sliding_window is None else self.sliding_window

    @property
    def batch_size(self) -> int:
        """Rows of the batch."""
        return -1 if self.store is None else self.store.batch_size

    # ------------------------------------------------------------------ changing

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the latest tokens; `tokens_to_remove` is minus their number."""
        tokens_to_remove = int(tokens_to_remove)  # releases before 5.17 pass a tensor
        if tokens_to_remove > 0:
            raise UserError(f"crop takes minus the number of tokens to remove, got {tokens_to_remove}; pass 0 or less")
        if self.store is not None:
            try:
                self.store.crop(-tokens_to_remove)
            except CacheError as error:
                raise CacheError(f"layer {self.index}: {error}") from error

    def activate_past_recording(self) -> None:
        """From now on a sliding window forgets at a `crop` only, so that any number of proposals can be taken back."""
        self.record_past = True
        if self.store is not None:
            self.store.record_past = True

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow beam search."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        if self.store is not None:
            rows = torch.arange(self.batch_size, device=self.store.device)
            self.store.select(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows: indices or a bool mask."""
        if self.store is not None:
            rows = indices.nonzero().squeeze(1) if indices.dtype == torch.bool else indices
            self.store.select(rows)

    def reset(self) -> None:
        """Forget all tokens and what was fitted on them."""
        self.store = None
        self.is_initialized = False

    def offload(self) -> None:
        """Move the bytes to the host."""
        if self.store is not None:
            self.home = self.store.device
            self.store.to("cpu")

    def prefetch(self) -> None:
        """Move the bytes back to where they were."""
        if self.store is not None and self.home is not None:
            self.store.to(self.home)


def empty_layer() -> Any:
    """A place for a layer that caches nothing; releases before 5.17 keep an unused dynamic layer there."""
    return getattr(cache_utils, "DummyLayer", cache_utils.DynamicLayer)()


class CompressedCache(Cache):
    """A cache for `generate(past_key_values=...)` or `model(past_key_values=...)`.

    Args:
        config: the model's config (`model.config`).
        recipe: a recipe string or `Recipe`, for example "kivi:bits=2".
        calibration: for recipes that learn from a corpus, what `tersekv calibrate` made: a file, a folder of them, or a
            `Calibration`.

    Under `tersekv.compress(model, …)` attention reads the packed bytes; with any other attention implementation
    `update` hands out decoded tensors (slower; said once in a warning).

    Raises:
        UserError: unknown recipe, options that do not fit the model's head dim, a model it cannot serve, or a
            calibration that is missing or was made for something else.
    """

    def __init__(
        self, config: PreTrainedConfig, recipe: str | Recipe, calibration: Calibration | str | Path | None = None
    ) -> None:
        self.recipe = Recipe.parse(recipe)
        self.config = text_config(config)
        self.shape: AttentionShape = AttentionShape.of(self.config)
        self._warned = False
        self.ropes = Ropes(self.config, self.shape.key_dim)
        kinds = attention_layers(self.config)
        plans = calibrated_plans(self.recipe, self.config, calibration)
        layers: list[Any] = []
        for index, kind in enumerate(kinds):
            if kind.type == "attention":
                plan = plans[index]
                plan.keys.layout(self.shape.key_dim)
                plan.values.layout(self.shape.value_dim)
                if plan.keys.needs_rope:
                    self.ropes.of(index)
                if plan.policy.drops and not self.shape.passes_handles:
                    raise UserError(f"{self.recipe} on {self.config.model_type}: {UNREADABLE}")
                layers.append(CompressedLayer(self, index, plan, kind.window))
            else:
                layers.append(LinearAttentionLayer() if kind.type == "linear" else empty_layer())
        super().__init__(layers=layers)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedCache:
        """A cache of its own with the same tokens, for a prompt that many continuations share; the config stays the
        model's, since it says which attention is installed."""
        memo[id(self.config)] = self.config
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    @property
    def hands_out_handles(self) -> bool:
        """Whether the model runs our attention and its modules pass keys and values on untouched."""
        return self.config._attn_implementation == ATTENTION_NAME and self.shape.passes_handles

    def warn_decoding(self) -> None:
        """Say once that the fast path is not in use."""
        if self._warned:
            return
        self._warned = True
        why = (
            "tersekv's attention is not installed; wrap the call in `with tersekv.compress(model, recipe):`"
            if self.shape.passes_handles
            else f"{self.config.model_type} models open keys and values before attention"
        )
        warnings.warn(f"CompressedCache decodes all tokens at every step: {why}", stacklevel=4)

    def footprint(self) -> Footprint:
        """Bytes held by part, over all attention layers; tables shared by layers count once."""
        stores = [
            layer.store for layer in self.layers if isinstance(layer, CompressedLayer) and layer.store is not None
        ]
        footprint = Footprint.sum(store.footprint() for store in stores)
        tables = {table.data_ptr(): table for store in stores for table in store.tables()}
        footprint.parts["tables"] = sum(table.numel() * table.element_size() for table in tables.values())
        return footprint
