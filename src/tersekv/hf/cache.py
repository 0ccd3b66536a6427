"""`CompressedCache`: a transformers `Cache` whose attention layers keep packed bytes."""

from __future__ import annotations

import copy
import importlib
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import LongTensor, Tensor
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel, cache_utils
from transformers.cache_utils import Cache, LinearAttentionLayer
from transformers.configuration_utils import PreTrainedConfig

from tersekv.errors import UserError
from tersekv.hf.calibration import Calibration, calibrated_plans
from tersekv.hf.config import AttentionShape, attention_layers, layers_without_own_tokens, text_config
from tersekv.hf.fingerprint import architecture
from tersekv.hf.layer import CompressedLayer as CompressedLayer
from tersekv.hf.layer import checked_crop
from tersekv.hf.parallel import check_spread, heads_of, spread_over
from tersekv.hf.progress import Progress
from tersekv.hf.rope import Ropes
from tersekv.recipe import LayerPlan, Recipe
from tersekv.store.footprint import Footprint
from tersekv.store.heads import Heads
from tersekv.store.selective import UNREADABLE
from tersekv.store.spread import Spread
from tersekv.tensors import plain

ATTENTION_NAME = "tersekv"


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
        context_parallel: processes that run the same model on the same tokens, and divide the packed ones: each holds
            some, and attention joins what they have. For policies that keep every token.

    Under `tersekv.compress(model, …)` attention reads the packed bytes; with any other attention implementation
    `update` hands out decoded tensors (slower; said once in a warning).

    Raises:
        UserError: unknown recipe, options that do not fit the model's head dim, a model it cannot serve, or a
            calibration that is missing or was made for something else.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        recipe: str | Recipe,
        calibration: Calibration | str | Path | None = None,
        context_parallel: ProcessGroup | None = None,
    ) -> None:
        recipe = Recipe.parse(recipe)
        plans = calibrated_plans(recipe, text_config(config), calibration)
        self._start(config, recipe, plans, spread_over(context_parallel))

    @classmethod
    def of(
        cls, config: PreTrainedConfig, recipe: Recipe, plans: dict[int, LayerPlan], spread: Spread | None = None
    ) -> CompressedCache:
        """A cache whose layers have these plans."""
        cache = cls.__new__(cls)
        cache._start(config, recipe, plans, spread)
        return cache

    def empty(self, config: PreTrainedConfig) -> CompressedCache:
        """A cache like this without tokens, for the same model: its recipe, and what its codecs learnt from a
        corpus."""
        plans = {layer.index: layer.plan for layer in self.layers if isinstance(layer, CompressedLayer)}
        return CompressedCache.of(config, self.recipe, plans, self.spread)

    def _start(
        self, config: PreTrainedConfig, recipe: Recipe, plans: dict[int, LayerPlan], spread: Spread | None
    ) -> None:
        self.recipe, self.config, self.spread = recipe, text_config(config), spread
        self.shape: AttentionShape = AttentionShape.of(self.config)
        self._warned = self.told = False  # each warning comes once
        self._model: weakref.ref[PreTrainedModel] | None = None
        self.mask_offsets: dict[int | None, tuple[int, int]] = {}  # by window: tokens seen, and forgotten, at a mask
        self.ropes = Ropes(self.config, self.shape.key_dim)
        kinds = attention_layers(self.config)
        layers: list[Any] = []
        for index, kind in enumerate(kinds):
            if kind.type == "attention":
                plan = plans[index]
                plan.keys.layout(self.shape.key_dim)
                plan.values.layout(self.shape.value_dim)
                rope = self.ropes.needed_by(plan.keys, index)
                if spread is not None and kind.window is None:
                    check_spread(recipe, plan, self.shape.passes_handles, rope)
                if plan.policy.drops and not self.shape.passes_handles:
                    raise UserError(f"{self.recipe} on {self.config.model_type}: {UNREADABLE}")
                layers.append(CompressedLayer(self, index, plan, kind.window))
            else:
                layers.append(LinearAttentionLayer() if kind.type == "linear" else empty_layer())
        super().__init__(layers=layers)
        others = layers_without_own_tokens(self.config)
        attention = {i: layer for i, layer in enumerate(layers) if isinstance(layer, CompressedLayer)}
        linear = [i for i, kind in enumerate(kinds) if kind.type == "linear"]
        self.progress = Progress({i: layer for i, layer in attention.items() if i not in others}, linear)

    # ------------------------------------------------------------------ growing and changing

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Take new tokens [B, H, n, D] into a layer: handles where our attention is installed, else all tokens decoded.

        Raises:
            CacheError: the forward pass before this one was interrupted, so that layers differ in their tokens.
        """
        self.progress.reach(layer_idx, 1)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """A linear layer's convolution state, which some models change in place."""
        return self._linear(super().get_conv_state, layer_idx, 0, state_idx=state_idx)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Take a linear layer's new convolution state."""
        return self._linear(super().update_conv_state, layer_idx, 0, conv_states, state_idx=state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Take a linear layer's new recurrent state."""
        change = super().update_recurrent_state
        return self._linear(change, layer_idx, 1 + state_idx, recurrent_states, state_idx=state_idx, **kwargs)

    def _linear(self, change: Callable[..., Any], layer: int, state: int, *new: Tensor, **kwargs: Any) -> Any:
        self.progress.reach(layer, state)
        result = change(*new, layer_idx=layer, **kwargs)
        self.progress.end(layer)
        return result

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the latest tokens; `tokens_to_remove` is minus their number. After an interrupted forward pass it
        counts from the layer that has seen most, and all layers end with the same tokens.

        Raises:
            CacheError: a layer cannot take back as many; nothing has changed.
        """
        excess = self.progress.excess(-checked_crop(tokens_to_remove))
        with self.progress.changing():
            layers: list[Any] = self.layers
            for index, layer in enumerate(layers):
                layer.crop(-excess[index] if index in excess else tokens_to_remove)

    def reset(self) -> None:
        """Forget all tokens and what was fitted on them."""
        super().reset()
        self.progress.clear()

    def reorder_cache(self, beam_idx: LongTensor) -> None:
        """Follow beam search."""
        with self.progress.changing():
            super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row of the batch `repeats` times."""
        with self.progress.changing():
            super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch: indices or a bool mask."""
        with self.progress.changing():
            super().batch_select_indices(indices)

    # ------------------------------------------------------------------ files and copies

    def save(self, path: str | Path, ids: Tensor | None = None, model: PreTrainedModel | None = None) -> None:
        """Write everything to a safetensors file, whole or not at all: what `load` makes an equal cache of.

        ids: int64 [B, T], the tokens that the model has read, where prompts are to be compared with them. model: the
        one that filled it, where that was not under `tersekv.compress`.

        Raises:
            UserError: an empty cache, ids of another length, state beside keys and values, a file that cannot be
                written.
        """
        saved = importlib.import_module("tersekv.hf.saved")
        saved.save(self, Path(path), ids, model)

    @staticmethod
    def load(path: str | Path, model: PreTrainedModel, ids: Tensor | None = None) -> CompressedCache:
        """The cache that `save` wrote, ready to go on; on a CPU its packed pages stay in the memory-mapped file, which
        must not be written to meanwhile (replacing it, as `save` does, is safe).

        ids: int64 [B, T], a prompt, which must begin with the tokens of the file.

        Raises:
            UserError: no such file, one that is damaged, cut off, of another format or model, or of another prompt.
        """
        saved = importlib.import_module("tersekv.hf.saved")
        return saved.load(path, model, ids)

    def heads(self, held: int) -> Heads | None:
        """Which key-value heads this process holds, where it holds only some of them."""
        return heads_of(self.model, held, self.shape.kv_heads) if self.shape.passes_handles else None

    @property
    def model(self) -> PreTrainedModel | None:
        """The model that filled it under `tersekv.compress`, as long as that lives."""
        return None if self._model is None else self._model()

    def knows(self, model: PreTrainedModel) -> None:
        """Note which model fills it; that model's config says which attention is installed.

        Raises:
            UserError: the cache was made for a model of another architecture.
        """
        if self.model is not model:
            self.check_model(model)
            self.config, self._model = text_config(model.config), weakref.ref(model)

    def check_model(self, model: PreTrainedModel) -> None:
        """Raise UserError unless the cache was made for a model of this architecture."""
        if self.config is not text_config(model.config) and architecture(self.config) != architecture(model.config):
            raise UserError(
                f"this cache was made for a {self.config.model_type} of another architecture than the model; make one "
                "with tersekv.CompressedCache(model.config, recipe)"
            )

    @plain
    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedCache:
        """A cache of its own with the same tokens, for a prompt that many continuations share; the config stays the
        model's, since it says which attention is installed."""
        memo[id(self.config)] = self.config
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __reduce__(self) -> Any:
        """See `hf/pickled.py`."""
        return importlib.import_module("tersekv.hf.pickled").reduced(self)

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
        warnings.warn(f"CompressedCache decodes all tokens at every step: {why}", stacklevel=5)

    def footprint(self) -> Footprint:
        """Bytes held by part, over all attention layers; tables shared by layers count once."""
        stores = [
            layer.store for layer in self.layers if isinstance(layer, CompressedLayer) and layer.store is not None
        ]
        footprint = Footprint.sum(store.footprint() for store in stores)
        tables = {table.data_ptr(): table for store in stores for table in store.tables()}
        footprint.parts["tables"] = sum(table.numel() * table.element_size() for table in tables.values())
        return footprint
