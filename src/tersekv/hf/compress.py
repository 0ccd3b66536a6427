"""`compress(model, recipe)`: install packed attention on a model until `remove()` or the end of a
`with` block."""

from __future__ import annotations

import copy
import inspect
import threading
import warnings
import weakref
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface

import tersekv.hf.operators  # noqa: F401  # registers them
from tersekv.calibration.calibration import Calibration
from tersekv.calibration.find import calibration_for
from tersekv.errors import UserError
from tersekv.hf import latent, second_reading
from tersekv.hf.attention import EXPLICIT, attention_forward, attention_mask_for
from tersekv.hf.base import ATTENTION_NAME
from tersekv.hf.cache import CompressedCache
from tersekv.hf.layer import compressed_layers
from tersekv.hf.token_ids import ids_of_call, without_padding
from tersekv.hf.traced import is_traced
from tersekv.models.config import inner_model, text_config
from tersekv.recipe import Recipe
from tersekv.versions import CACHE_NAMES, cache_name, given_cache


def compress(
    model: PreTrainedModel,
    recipe: str | Recipe | CompressedCache,
    calibration: Calibration | str | Path | None = None,
    context_parallel: ProcessGroup | None = None,
) -> Compression:
    """Make `model.generate(...)` and `model(...)` use a `CompressedCache` with `recipe`; attention
    reads its packed bytes. `remove()`, or the end of a `with` block around the call, restores the
    model.

    The call takes effect at once, as PyTorch's hooks do, so that a call without `with` is not
    ignored. Several may be open on one model and end in any order. The latest one decides, and the
    model is restored when the last one ends.

    A `CompressedCache` passed as `past_key_values` keeps its own recipe; a warning says so if that
    recipe differs. A cache class of transformers is used uncompressed, also with a warning. A copy
    of the model (`copy.deepcopy`) has no packed attention.

    Gradients flow through the tokens of a call, and attention dropout is applied, as without a
    cache; cached tokens are constants. Two combinations are refused once the cache holds tokens.
    Dropout needs a policy that keeps all tokens, and `context_parallel` allows neither gradients
    nor dropout.

    recipe: a recipe, or a cache, for example a loaded one: new caches then have its recipe and
    calibration, without its tokens.
    calibration: the output of `tersekv calibrate`, for recipes that need calibration: a file, a
    folder of such files, or a `Calibration`. By default the one in this model's default folder is
    used.
    context_parallel: see `CompressedCache`.

    Raises:
        UserError: the recipe is unknown or does not support the model, or the calibration is
            missing or was made for another recipe or model. Later `generate` raises it for a
            `cache_implementation` other than "dynamic".
    """
    model = inner_model(model)
    if not isinstance(model, PreTrainedModel):
        raise UserError(f"compress takes a transformers model, got {type(model).__name__}")
    if isinstance(recipe, CompressedCache):
        recipe.check_model(model)
        template = recipe.empty(model.config)
    else:
        recipe = Recipe.parse(recipe)
        template = CompressedCache(model.config, recipe, calibration_for(model, recipe, calibration), context_parallel)
    has_usual_cache: Any = getattr(model, "_supports_default_dynamic_cache", None)
    if has_usual_cache is None:
        raise UserError(
            f"{type(model).__name__} cannot generate; compress takes a model that can, such as the one that "
            "AutoModelForCausalLM loads"
        )
    if not has_usual_cache():
        raise UserError(
            f"{type(model).__name__} has a cache of another kind; tersekv supports models with key-value caches"
        )
    if not model._can_set_attn_implementation():
        if not {*CACHE_NAMES} & inspect.signature(model.forward).parameters.keys():
            raise UserError(f"{type(model).__name__} has no cache: it reads all tokens at each step; use it as it is")
        raise UserError(
            f"{type(model).__name__} does not support attention functions; "
            "pass past_key_values=tersekv.CompressedCache(model.config, recipe) without compress"
        )
    return Compression(model, template)


class Compression:
    """Packed attention on one model, installed until `remove()` or the end of a `with` block.

    Deleting this object does not remove the attention. After `remove()` it can be entered again.
    """

    def __init__(self, model: PreTrainedModel, template: CompressedCache) -> None:
        self.model, self.template = model, template
        self._install()

    def __repr__(self) -> str:
        state = "installed" if self.installed else "removed"
        return f"<tersekv.compress of {type(self.model).__name__} with {self.template.recipe}: {state}>"

    @property
    def installed(self) -> bool:
        """True until `remove()`, or the end of the `with` block."""
        return any(template is self.template for template in _open.get(self.model, ()))

    def _install(self) -> None:
        with _lock:
            templates = _open.setdefault(self.model, [])
            if not templates:
                _install(self.model)
            templates.append(self.template)

    def remove(self) -> None:
        """Remove this one; restore the model if no other one is installed on it. A second call does
        nothing."""
        with _lock:
            templates = [template for template in _open.get(self.model, ()) if template is not self.template]
            if templates:
                _open[self.model] = templates
            elif _open.pop(self.model, None) is not None:
                _uninstall(self.model)

    def __enter__(self) -> PreTrainedModel:
        if not self.installed:
            self._install()
        return self.model

    def __exit__(self, *exception: object) -> None:
        self.remove()


def remove_all(model: PreTrainedModel) -> None:
    """Restore a model, however often `compress` was called on it."""
    with _lock:
        if _open.pop(model, None) is not None:
            _uninstall(model)


class _Before(NamedTuple):
    """Attributes of a model that packed attention replaces, and the handles of its hooks.

    methods: those that were set on the instance, by name.

    It must not reference the model, which is its key in a weak dictionary.
    """

    attention: str | None
    methods: dict[str, Any]
    hooks: list[RemovableHandle]


# Open templates by model. A template is an empty cache; new caches are copies of the latest
# template.
_lock = threading.RLock()
_open: weakref.WeakKeyDictionary[PreTrainedModel, list[CompressedCache]] = weakref.WeakKeyDictionary()
_before: weakref.WeakKeyDictionary[PreTrainedModel, _Before] = weakref.WeakKeyDictionary()

PREPARE, INPUTS, COPY = "_prepare_cache_for_generation", "prepare_inputs_for_generation", "__deepcopy__"
HOOKS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)  # fmt: skip
"""Attributes of a module that hold hooks of forward passes by their ids."""


def _install(model: PreTrainedModel) -> None:
    """Replace a model's attention, mask and cache creation by ours."""
    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, attention_mask_for)
    config, owner = text_config(model.config), weakref.ref(model)
    latent.install(model)
    hook = model.register_forward_pre_hook(partial(_before_forward, owner), with_kwargs=True)
    hooks = [hook, *second_reading.install(model)]
    methods = {name: model.__dict__[name] for name in (PREPARE, INPUTS) if name in model.__dict__}
    _before[model] = before = _Before(config._attn_implementation, methods, hooks)
    config._attn_implementation = ATTENTION_NAME
    if not model._supports_sdpa:
        EXPLICIT.add(id(config))
    for name, ours in ((PREPARE, _prepare), (INPUTS, _inputs)):
        replacement: Any = partial(ours, owner)
        replacement.__signature__ = inspect.signature(getattr(model, name))  # `generate` reads the parameters
        model.__dict__[name] = replacement
    for module in _with_config(model):
        module.__dict__[COPY] = partial(_plain_copy, weakref.ref(module), before)


def _uninstall(model: PreTrainedModel) -> None:
    before = _before.pop(model)
    text_config(model.config)._attn_implementation = before.attention
    EXPLICIT.discard(id(text_config(model.config)))
    for hook in before.hooks:
        hook.remove()
    for name in (PREPARE, INPUTS):
        del model.__dict__[name]
    model.__dict__.update(before.methods)
    for module in _with_config(model):
        module.__dict__.pop(COPY, None)
    if not _open:
        latent.uninstall()
        AttentionInterface._global_mapping.pop(ATTENTION_NAME, None)
        AttentionMaskInterface._global_mapping.pop(ATTENTION_NAME, None)


def _with_config(model: PreTrainedModel) -> list[PreTrainedModel]:
    """Return the model and those of its submodels that share its text config."""
    config = text_config(model.config)
    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    return [part for part in parts if part is model or part.config is config]


def _plain_copy(owner: weakref.ref[PreTrainedModel], before: _Before, memo: dict[int, Any]) -> PreTrainedModel:
    """Deep-copy a model without packed attention, because copies of the hooks and functions would
    refer to the original."""
    model: Any = owner()
    copied = model.__class__.__new__(model.__class__)
    memo[id(model)] = copied
    copied.__setstate__({name: copy.deepcopy(held, memo) for name, held in model.__dict__.items() if name != COPY})
    config = text_config(copied.config)
    if config is not text_config(model.config):
        config._attn_implementation = before.attention
    _without_hooks(copied, {hook.id for hook in before.hooks})
    for name in (PREPARE, INPUTS):
        if name in copied.__dict__:
            del copied.__dict__[name]
            if name in before.methods:
                copied.__dict__[name] = copy.deepcopy(before.methods[name], memo)
    return copied


def _without_hooks(model: PreTrainedModel, ids: set[int]) -> None:
    """Remove hooks by their ids from a copy of a model."""
    for module in model.modules():
        for name in HOOKS:
            held = getattr(module, name)
            for i in ids & held.keys():
                del held[i]


def _template(model: PreTrainedModel) -> CompressedCache | None:
    """Return the template of new caches; None if nothing is installed, as on a shallow copy of a
    model."""
    templates = _open.get(model)
    return templates[-1] if templates else None


def _prepare(
    owner: weakref.ref[PreTrainedModel],
    generation_config: Any,
    model_kwargs: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Replace the model's method by which `generate` makes its cache: make a compressed one."""
    model: Any = owner()
    template = _template(model)
    if template is not None and generation_config.use_cache is not False:
        asked = generation_config.cache_implementation
        if asked not in (None, "dynamic"):
            raise UserError(
                f"generate got cache_implementation='{asked}' while tersekv.compress is installed; leave it out of the "
                "call and of the generation config, or remove compress to use that cache"
            )
        if given_cache(model_kwargs) is None:
            # as `generate` itself names it: models that write the method with **kwargs do not tell
            model_kwargs[cache_name(GenerationMixin.prepare_inputs_for_generation)] = template.empty(model.config)
            generation_config = copy.copy(generation_config)
            generation_config.cache_implementation = None  # transformers rejects "dynamic" together with a cache
        if isinstance(cache := given_cache(model_kwargs), CompressedCache):
            cache.compiles = _compiles(model, generation_config)
            for layer in compressed_layers(cache):  # transformers turns it on later for the main cache of both
                layer.activate_past_recording(past=bool(generation_config.is_assistant))
    return _original(model, PREPARE)(generation_config, model_kwargs, *args, **kwargs)


def _original(model: PreTrainedModel, name: str) -> Any:
    """Return the method that `compress` replaces on a model."""
    before = _before.get(model)
    held = None if before is None else before.methods.get(name)
    return partial(getattr(type(model), name), model) if held is None else held


def _inputs(owner: weakref.ref[PreTrainedModel], input_ids: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace the model's method that cuts a prompt to the part that its cache lacks: check the other
    part first."""
    model: Any = owner()
    cache = given_cache(kwargs)
    # next_sequence_length is None for a call with the new tokens only
    whole = kwargs.get("is_first_iteration") and kwargs.get("next_sequence_length") is not None
    if whole and isinstance(cache, CompressedCache) and kwargs.get("inputs_embeds") is None:
        _check_prompt(cache, input_ids, kwargs.get("attention_mask"))
    return _original(model, INPUTS)(input_ids, *args, **kwargs)


def _check_prompt(cache: CompressedCache, ids: Any, mask: Any) -> None:
    """Warn about a prompt that does not begin with the tokens of its cache.

    Raises:
        UserError: the prompt has no token that the cache lacks.
    """
    held, known = cache.get_seq_length(), cache.token_ids.known
    if held >= ids.shape[1]:
        raise UserError(
            f"the prompt has {ids.shape[1]:,} tokens, and the cache that was passed holds {held:,}: call "
            "cache.keep_common(ids) before, which leaves the last one to be read, or pass a new cache"
        )
    if known and (common := cache.token_ids.common(without_padding(ids, mask))) < known:
        warnings.warn(
            f"the prompt does not begin with the {held:,} tokens in the cache that was passed: it differs from token "
            f"{common:,} on, and the answer mixes both; call cache.keep_common(ids) before, or pass a new cache",
            stacklevel=4,
        )


def _compiles(model: PreTrainedModel, generation_config: Any) -> bool:
    """True if `generate` should compile its decode steps: the caller gave a `compile_config` and
    nothing prevents it."""
    config = generation_config.compile_config
    if config is None or generation_config.disable_compile or generation_config.output_attentions:
        return False
    return model.device.type != "cpu" or bool(getattr(config, "_compile_all_devices", False))


def _before_forward(owner: weakref.ref[PreTrainedModel], module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Pass a compressed cache to plain calls of the model that would make their own cache. This is
    a pre-forward hook."""
    cache = given_cache(kwargs)
    if is_traced() and isinstance(cache, CompressedCache) and cache.is_traceable:
        return args, kwargs  # the operators do the checks of each pass
    model: Any = owner()
    template = _template(model)
    if template is None:
        return args, kwargs
    use_cache = kwargs.get("use_cache")
    use_cache = module.config.get_text_config().use_cache if use_cache is None else use_cache
    # the cache is the fourth positional argument
    if use_cache and cache is None and len(args) < 4:
        kwargs[cache_name(module.forward)] = cache = template.empty(model.config)
    if isinstance(cache, CompressedCache):
        if any(kwargs.get(name) is not None for name in ("encoder_hidden_states", "encoder_outputs")):
            raise UserError(
                f"{type(model).__name__} got states of an encoder; a compressed cache does not support "
                "cross-attention: leave them out, or use transformers' own cache"
            )
        cache.bind_model(model)
        if not (is_traced() and cache.is_traceable):
            cache.progress.start()
            cache.token_ids.note(cache.get_seq_length(), ids_of_call(args, kwargs))
        if cache.recipe is not template.recipe and cache.recipe != template.recipe:
            _say_once(cache, f"the cache that was passed keeps its own recipe, {cache.recipe}, not {template.recipe}")
    elif isinstance(cache, Cache):
        _say_once(template, f"a {type(cache).__name__} was passed while compress is installed; it is not compressed")
    return args, kwargs


def _say_once(cache: CompressedCache, what: str) -> None:
    """Warn once per cache."""
    if not cache.told:
        cache.told = True
        warnings.warn(what, stacklevel=3)
