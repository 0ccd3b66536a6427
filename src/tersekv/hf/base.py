"""`ModelCache`: base class of a cache that knows its model and recipe, used by its layers, files
and pickles."""

from __future__ import annotations

import warnings
import weakref
from abc import abstractmethod
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from tersekv.attention.read import AttentionCall
from tersekv.cache.footprint import Footprint
from tersekv.cache.parallel import ContextParallel, HeadShard
from tersekv.calibration.key_error import KeyFigures, remedy
from tersekv.errors import UserError
from tersekv.hf.parallel import heads_of
from tersekv.hf.progress import CheckedCache
from tersekv.models.config import AttentionShape, text_config
from tersekv.models.fingerprint import architecture
from tersekv.models.rope import Ropes
from tersekv.recipe import LayerPlan, Recipe, written

if TYPE_CHECKING:
    from typing_extensions import Self

    from tersekv.hf.waiting import Waiting

ATTENTION_NAME = "tersekv"


class ModelCache(CheckedCache):
    """A cache for the attention layers of one model.

    kv_heads: of each layer.
    mask_offsets: tokens seen and evicted when the latest mask was made, by sliding window.
    told: True once a warning about another recipe or cache was given.
    warned_of_keys: True once a warning about an error of keys was given.
    reads_twice: True if a policy ranks tokens by a second reading of the prompt, and the model's RoPE
        does not depend on the length.
    stored_kl: KL divergence in nats of the storage file that the tokens were loaded from, if it was measured.
    waiting: calls of layers that wait for those of others.
    read_again: tokens at the end of the current call that are a second reading (`hf/second_reading.py`).
    """

    recipe: Recipe
    config: PreTrainedConfig
    shape: AttentionShape
    kv_heads: list[int]
    context_parallel: ContextParallel | None
    ropes: Ropes
    mask_offsets: dict[int | None, tuple[int, int]]
    told: bool
    warned_of_keys: bool
    reads_twice: bool
    read_again: int
    stored_kl: float | None = None
    waiting: Waiting
    _warned: bool
    _model: weakref.ref[PreTrainedModel] | None

    @classmethod
    def of(
        cls,
        config: PreTrainedConfig,
        recipe: Recipe,
        plans: dict[int, LayerPlan],
        context_parallel: ContextParallel | None = None,
        ropes: Ropes | None = None,
    ) -> Self:
        """Return a cache whose layers have the given plans. ropes: those of another cache, to share
        their tables."""
        cache = cls.__new__(cls)
        cache._start(config, recipe, plans, context_parallel, ropes)
        return cache

    @abstractmethod
    def _start(
        self,
        config: PreTrainedConfig,
        recipe: Recipe,
        plans: dict[int, LayerPlan],
        context_parallel: ContextParallel | None,
        ropes: Ropes | None = None,
    ) -> None:
        """Create the layers and set all attributes."""

    @property
    @abstractmethod
    def is_traceable(self) -> bool:
        """True if compiled forward passes can call the operators on the layers."""

    @abstractmethod
    def footprint(self) -> Footprint:
        """Return the bytes by part."""

    def reset(self) -> None:
        """Empty the cache."""
        super().reset()
        self.stored_kl = None  # because further tokens are not from that file

    def shape_of(self, layer: int) -> AttentionShape:
        """Return the shape with the key-value heads of a layer."""
        return self.shape._replace(kv_heads=self.kv_heads[layer])

    def heads(self, held: int, layer: int) -> HeadShard | None:
        """Return the share of a layer's key-value heads in this process if it holds only `held` of
        them, else None."""
        return heads_of(self.model, held, self.kv_heads[layer]) if self.shape.passes_handles else None

    def of_all_heads(self, call: AttentionCall) -> AttentionCall:
        """Return a call with the queries of all processes, which hold the same latents and must code them alike."""
        heads = heads_of(self.model, call.query.shape[1], self.shape.query_heads)
        return call if heads is None else replace(call, query=heads.gather(call.query))

    @property
    def model(self) -> PreTrainedModel | None:
        """The model that filled the cache under `tersekv.compress`; None if there is none or it no
        longer exists."""
        return None if self._model is None else self._model()

    def bind_model(self, model: PreTrainedModel) -> None:
        """Remember the model that fills the cache, whose config tells which attention is installed.

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

    @property
    def hands_out_handles(self) -> bool:
        """True if the model runs our attention and its modules pass keys and values on
        unchanged."""
        return self.config._attn_implementation == ATTENTION_NAME and self.shape.passes_handles

    def warn_decoding(self) -> None:
        """Warn once that all tokens are decoded at every step, and why."""
        if self._warned:
            return
        self._warned = True
        why = f"{self.config.model_type} models change keys and values before attention"
        if self.hands_out_handles:
            why = (
                f"{self.config.model_type} models use keys or values outside of attention, or add to its scores; "
                "this saves memory but no time, so use transformers' own cache where speed matters more"
            )
        elif self.shape.passes_handles:
            why = "tersekv's attention is not installed; wrap the call in `with tersekv.compress(model, recipe):`"
        warnings.warn(f"CompressedCache decodes all tokens at every step: {why}", stacklevel=5)

    def warn_assisted(self, index: int, lossy: bool) -> None:
        """Warn that assisted decoding may choose other tokens, if this is the first layer and its coding is lossy."""
        if lossy and index == next(i for i, layer in enumerate(self.layers) if hasattr(layer, "plan")):
            warnings.warn(
                f"assisted decoding with {self.recipe.name}, which is lossy, may choose other tokens than decoding one "
                "by one, because several tokens are checked before any of them is packed",
                stacklevel=5,
            )

    def warn_of_keys(self, layer: int, figures: KeyFigures) -> None:
        """Warn once that coding drowns the differences of keys, and name a remedy."""
        if self.warned_of_keys:
            return
        self.warned_of_keys = True
        warnings.warn(
            f"layer {layer}: the mean of the keys is {figures.mean:.0f} times their spread, and {self.recipe.name} "
            f"codes them with an error of {figures.error:.1f} times the spread: answers may be garbage; use "
            f"{remedy(self.recipe, self.ropes.known(layer))}",
            stacklevel=5,
        )


def options(part: Any) -> dict[str, str]:
    """Return the options of a codec or policy as text, with the name of its class.

    A state names them, because the recipe of a file could be edited: codes of another seed, or a file
    of another share, would be read wrongly.
    """
    held = {field.name: written(getattr(part, field.name)) for field in fields(part) if field.name != "fitted"}
    return {"class": type(part).__name__, **held}
