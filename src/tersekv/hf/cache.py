"""`CompressedCache`: a transformers `Cache` whose attention layers store packed keys and values."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from tersekv.cache.footprint import Footprint
from tersekv.cache.parallel import ContextParallel
from tersekv.calibration.calibration import Calibration
from tersekv.calibration.find import calibrated_plans, calibration_for
from tersekv.errors import UserError
from tersekv.hf import pickled, saved
from tersekv.hf.base import ModelCache
from tersekv.hf.layer import CompressedLayer as CompressedLayer
from tersekv.hf.layer import compressed_layers
from tersekv.hf.parallel import spread_over
from tersekv.hf.progress import Progress
from tersekv.hf.token_ids import TokenIds, without_padding
from tersekv.hf.traced import is_traced
from tersekv.hf.waiting import Waiting
from tersekv.hf.why_not import Use, faults
from tersekv.models.config import (
    AttentionShape,
    attention_layers,
    cache_layers,
    heads_by_layer,
    inner_model,
    layers_without_own_tokens,
    text_config,
)
from tersekv.models.rope import Ropes
from tersekv.recipe import LayerPlan, Recipe
from tersekv.tensors import plain
from tersekv.versions import check_transformers


class CompressedCache(ModelCache):
    """A compressed cache for `generate(past_key_values=...)` or `model(past_key_values=...)`.

    Args:
        config: the model, or its config (`model.config`).
        recipe: a recipe string or `Recipe`, for example "kivi:bits=2".
        calibration: the output of `tersekv calibrate`, for recipes that need calibration: a file, a
            folder of such files, or a `Calibration`.
        context_parallel: process group for context parallelism. Its processes run the same model on
            the same tokens; each stores a share of the packed tokens, and attention merges the
            parts. The token policy must keep every token.

    Under `tersekv.compress(model, …)` attention reads the packed bytes. With any other attention
    implementation `update` returns decoded tensors, which is slower; a warning says so once.

    If a forward pass is interrupted between layers, the next one raises an error, which names the
    remedy: `crop` or `reset`. Cached tokens are constants: gradients flow only through the tokens
    of the current call. The docstring of `compress` lists the calls that are refused. Caches can be
    copied and pickled.

    Raises:
        UserError: the recipe is unknown, its options do not fit the model's head dim, or the model
            is not supported; or the calibration is missing or was made for another recipe or model.
    """

    def __init__(
        self,
        config: PreTrainedConfig | PreTrainedModel,
        recipe: str | Recipe | None = None,
        calibration: Calibration | str | Path | None = None,
        context_parallel: ProcessGroup | None = None,
        **unknown: Any,
    ) -> None:
        check_transformers()
        if unknown:
            raise UserError(
                f"CompressedCache takes no {', '.join(unknown)}; it takes a model or its config, recipe, calibration "
                "and context_parallel, and options belong into the recipe, for example 'kivi:bits=4'"
            )
        config = inner_model(config)
        if not isinstance(config, (PreTrainedConfig, PreTrainedModel)):
            raise UserError(
                f"CompressedCache takes a model or its config first, got {type(config).__name__}; write for example "
                "CompressedCache(model, 'kivi:bits=4')"
            )
        recipe = Recipe.parse(recipe)
        if isinstance(config, PreTrainedModel):
            calibration = calibration_for(config, recipe, calibration)
            config = config.config
        plans = calibrated_plans(recipe, text_config(config), calibration)
        self._start(config, recipe, plans, spread_over(context_parallel))

    def empty(self, config: PreTrainedConfig) -> CompressedCache:
        """Return a cache without tokens that has the same recipe and calibrated codecs, for the
        same model. Both share the tables of RoPE."""
        n = len(attention_layers(text_config(config)))
        plans = {layer.index: layer.asked or layer.plan for layer in compressed_layers(self) if layer.index < n}
        ropes = self.ropes if text_config(config) is self.config else None
        return CompressedCache.of(config, self.recipe, plans, self.context_parallel, ropes)

    @property
    def observes(self) -> bool:
        """True if the policy, or a codec that is fitted on the prompt, observes queries."""
        plans = [layer.plan for layer in compressed_layers(self)]
        return any(plan.policy.observes or plan.keys.observes or plan.values.observes for plan in plans)

    def _start(
        self,
        config: PreTrainedConfig,
        recipe: Recipe,
        plans: dict[int, LayerPlan],
        context_parallel: ContextParallel | None,
        ropes: Ropes | None = None,
    ) -> None:
        self.recipe, self.config, self.context_parallel = recipe, text_config(config), context_parallel
        self.shape = AttentionShape.of(self.config)
        self._warned = self.told = self.warned_of_keys = False  # each warning is given once
        self.read_again = 0
        self.compiles = False
        self._model = None
        self.mask_offsets = {}
        self.ropes = ropes or Ropes(self.config, self.shape.key_dim)
        self.kv_heads = heads_by_layer(self.config, self.ropes)
        use: Use = "transformers" if context_parallel is None else "context_parallel"
        if reasons := faults(recipe, plans, self.config, use, self.ropes):
            raise UserError(f"{self.recipe} on {self.config.model_type}: {'; '.join(reasons)}")
        super().__init__(layers=cache_layers(self.config, lambda i, window: CompressedLayer(self, i, plans[i], window)))
        others = layers_without_own_tokens(self.config)
        attention = {layer.index: layer for layer in compressed_layers(self)}
        linear = [i for i, kind in enumerate(attention_layers(self.config)) if kind.type == "linear"]
        asked = any(layer.plan.policy.reads_twice for layer in attention.values()) and not linear
        # a second reading doubles the length, and would change the angles of the first one
        self.reads_twice = asked and not self.ropes.vary(attention)
        storing = {i: layer for i, layer in attention.items() if i not in others}
        self.progress, self.waiting = Progress(storing, linear), Waiting(storing)
        self.token_ids = TokenIds()

    def keep_common(self, ids: Tensor, attention_mask: Tensor | None = None) -> int:
        """Keep the tokens that a prompt begins with, remove all others, and return the number of those kept.

        The next call then reads only the rest of the prompt, which is at least its last token. Where
        layers cannot remove the others (a policy has evicted tokens, a sliding window has moved on, the
        model has a recurrent state), the cache is reset and 0 is returned.

        ids: int64 [B, T], the whole prompt.
        attention_mask: [B, T], for prompts with padding: two prompts agree only where their padding does.

        Raises:
            UserError: the prompt is empty, or the ids of the cache's first tokens are unknown, because
                they were not read under `tersekv.compress`.
        """
        if not ids.numel():
            raise UserError("keep_common got a prompt without tokens; give the ids [B, T] of the whole prompt")
        seen = self.progress.num_tokens().values()
        ahead, behind = max(seen, default=0), min(seen, default=0)
        if ahead and not self.token_ids.known:
            raise UserError(
                f"the ids of this cache's {ahead:,} tokens are unknown, because they were not read under "
                "tersekv.compress; call cache.reset(), or cache.crop() if you know them"
            )
        common = min(self.token_ids.common(without_padding(ids, attention_mask)), ids.shape[-1] - 1, behind)
        try:
            if common < ahead:
                self.crop(common - ahead)
        except RuntimeError:  # our CacheError, or that of a layer with a recurrent state
            common = 0
        if not common:
            self.reset()
        return common

    # ------------------------------------------------------------------ files and copies

    def save(
        self,
        path: str | Path,
        ids: Tensor | None = None,
        model: PreTrainedModel | None = None,
        storage: float | None = None,
    ) -> None:
        """Write the cache to a safetensors file that `load` can read. The write is atomic.

        ids: int64 [B, T], the tokens that the model has read; `load` compares a prompt with them.
        model: the model that filled the cache, if that was not under `tersekv.compress`.
        storage: bits per number of a smaller file, which loads into a cache of any recipe
            (docs/prompt-cache.md). Its tokens are those that this cache decodes to, so read the prompt
            with the recipe `exact`.

        Raises:
            UserError: the cache is empty or has state other than keys and values, the number of ids
                differs, or the file cannot be written.
        """
        saved.save(self, Path(path), ids, inner_model(model), storage)

    @staticmethod
    def load(
        path: str | Path,
        model: PreTrainedModel,
        ids: Tensor | None = None,
        decode: Callable[[list[int]], str] = str,
        recipe: str | Recipe | None = None,
        calibration: Calibration | str | Path | None = None,
    ) -> CompressedCache:
        """Read a cache that `save` wrote, ready to continue.

        On a CPU its packed pages stay in the memory-mapped file. That file must not be modified in
        the meantime; replacing it, as `save` does, is safe.

        ids: int64 [B, T], a prompt that must begin with the tokens of the file.
        decode: turns token ids into text for the error message about a different prompt.
        recipe, calibration: of the cache that a storage file is loaded into, see the class. The recipe is
            `default` if none is given.

        Raises:
            UserError: the file does not exist, is damaged or truncated, or belongs to another
                format, model or prompt.
        """
        return saved.load(CompressedCache, path, inner_model(model), ids, decode, recipe, calibration)

    @plain
    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedCache:
        """Return an independent copy with the same tokens, for a prompt that many continuations
        share. The config is not copied, because it tells which attention is installed on the
        model."""
        memo[id(self.config)] = self.config
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        for refer in (weakref.proxy, weakref.ref):  # as the layers do
            memo[id(refer(self))] = refer(copied)
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __reduce__(self) -> Any:
        """Support pickling; see `hf/pickled.py`."""
        return pickled.reduced(self)

    compiles: bool
    """True if the latest `generate` got a `compile_config` and nothing prevents compiling."""

    @property
    def is_compileable(self) -> bool:
        """True if `generate` should compile its decode steps: only if the caller gave a
        `compile_config`. False during tracing, because traced passes make their own masks."""
        return self.compiles and not is_traced() and all(layer.is_compileable for layer in self.layers)

    @property
    def is_traceable(self) -> bool:
        """True if compiled forward passes can call the operators on the layers. Not supported:
        recurrent states, whose passes are counted in Python, indexers, and chunked attention, whose masks no
        operator makes."""
        chunked = getattr(self.config, "attention_chunk_size", None) is not None
        indexed = any(layer.plan.index_dim for layer in compressed_layers(self))
        serves = self.context_parallel is None and not self.progress.linear and not chunked and not indexed
        return self.hands_out_handles and serves

    def __repr__(self) -> str:
        """Return recipe, tokens, bytes, bits and ratio in one line."""
        return f"{type(self).__name__}({self.recipe.name}): {self.footprint()}"

    def footprint(self) -> Footprint:
        """Return the bytes by part, summed over all attention layers. Tables shared by layers count
        once."""
        stores = [layer.store for layer in compressed_layers(self) if layer.store is not None]
        footprint = Footprint.sum(store.footprint() for store in stores)
        tables = {table.data_ptr(): table for store in stores for table in store.tables()}
        footprint.parts["tables"] = sum(table.numel() * table.element_size() for table in tables.values())
        return footprint
