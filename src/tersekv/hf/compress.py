"""`with compress(model, recipe):` installs packed attention on a model and puts everything back afterwards."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from tersekv.errors import UserError
from tersekv.hf.attention import attention_forward
from tersekv.hf.cache import ATTENTION_NAME, CompressedCache
from tersekv.hf.calibration import Calibration, calibration_for
from tersekv.hf.config import text_config
from tersekv.hf.fingerprint import architecture
from tersekv.recipe import Recipe


@contextmanager
def compress(
    model: PreTrainedModel,
    recipe: str | Recipe | CompressedCache,
    calibration: Calibration | str | Path | None = None,
    context_parallel: ProcessGroup | None = None,
) -> Iterator[PreTrainedModel]:
    """Inside, `model.generate(...)` and `model(...)` use a `CompressedCache` with `recipe` (unless one is passed), and
    attention reads its packed bytes. Contexts nest and may overlap; after the last one is left, also by an exception,
    the model is as it was.

    recipe: or a cache, for example one that was loaded; new caches are then as it is, without its tokens.
    calibration: for recipes that learn from a corpus, what `tersekv calibrate` made: a file, a folder of them, or a
    `Calibration`; without it the one in the default place for this model is used.
    context_parallel: see `CompressedCache`.

    Raises:
        UserError: unknown recipe, a model that the recipe cannot serve, or a calibration that is missing or was made
            for something else.
    """
    if not isinstance(model, PreTrainedModel):
        raise UserError(f"compress takes a transformers model, got {type(model).__name__}")
    if not isinstance(recipe, CompressedCache):
        recipe = Recipe.parse(recipe)
        recipe = CompressedCache(model.config, recipe, calibration_for(model, recipe, calibration), context_parallel)
    if architecture(recipe.config) != architecture(model.config):
        raise UserError(f"this cache was made for a {recipe.config.model_type} of another architecture than the model")
    context = recipe.empty(model.config)
    has_usual_cache: Any = model._supports_default_dynamic_cache
    if not has_usual_cache():
        raise UserError(
            f"{type(model).__name__} keeps a cache of its own kind; tersekv serves models with key-value caches"
        )
    if not model._can_set_attn_implementation():
        raise UserError(
            f"{type(model).__name__} does not take attention functions; "
            "pass past_key_values=tersekv.CompressedCache(model.config, recipe) without compress"
        )
    with _lock:
        contexts = _open.setdefault(model, [])
        if not contexts:
            _undo[model] = _install(model)
        contexts.append(context)
    try:
        yield model
    finally:
        with _lock:
            contexts.remove(context)
            if not contexts:
                del _open[model]
                _undo.pop(model).close()


# A context is an empty cache; the latest that is open says what new ones are like. They may be left in another order
# than entered (threads, generators): the last one left puts the model back.
_lock = threading.RLock()
_open: weakref.WeakKeyDictionary[PreTrainedModel, list[CompressedCache]] = weakref.WeakKeyDictionary()
_undo: weakref.WeakKeyDictionary[PreTrainedModel, ExitStack] = weakref.WeakKeyDictionary()


def _install(model: PreTrainedModel) -> ExitStack:
    """Everything that makes a model use packed attention; closing what is returned puts all of it back."""
    undo = ExitStack()
    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
    undo.callback(_unregister)
    config = text_config(model.config)
    undo.callback(setattr, config, "_attn_implementation", config._attn_implementation)
    config._attn_implementation = ATTENTION_NAME
    _provide_cache(model, undo)
    return undo


def _unregister() -> None:
    if not _open:
        AttentionInterface._global_mapping.pop(ATTENTION_NAME, None)
        AttentionMaskInterface._global_mapping.pop(ATTENTION_NAME, None)


def _new_cache(model: PreTrainedModel) -> CompressedCache:
    return _open[model][-1].empty(model.config)


def _provide_cache(model: PreTrainedModel, undo: ExitStack) -> None:
    """Give `generate` and plain calls a compressed cache where they would make their own."""
    original: Any = model._prepare_cache_for_generation
    shadowed = model.__dict__.get("_prepare_cache_for_generation")

    def prepare(generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        ours = generation_config.use_cache is not False and generation_config.cache_implementation in (None, "dynamic")
        if ours and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = _new_cache(model)
            generation_config = copy.copy(generation_config)
            generation_config.cache_implementation = None  # transformers refuses "dynamic" beside a cache
        return original(generation_config, model_kwargs, *args, **kwargs)

    def before_forward(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        use_cache = kwargs.get("use_cache")
        use_cache = module.config.get_text_config().use_cache if use_cache is None else use_cache
        # past_key_values is the fourth argument where it is given by position
        if use_cache and kwargs.get("past_key_values") is None and len(args) < 4:
            kwargs["past_key_values"] = _new_cache(model)
        cache = kwargs.get("past_key_values")
        if isinstance(cache, CompressedCache):
            cache.knows(model)
        return args, kwargs

    def restore() -> None:
        if shadowed is None:
            del model.__dict__["_prepare_cache_for_generation"]
        else:
            model.__dict__["_prepare_cache_for_generation"] = shadowed

    model.__dict__["_prepare_cache_for_generation"] = prepare
    undo.callback(restore)
    undo.callback(model.register_forward_pre_hook(before_forward, with_kwargs=True).remove)
