"""Build a model's RoPE from its config alone, with the functions of its modelling file in
transformers.

This covers all rope types, layouts and partial rotations of transformers without listing them here.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.configuration_utils import PreTrainedConfig

from tersekv.codecs import Codec
from tersekv.errors import UserError
from tersekv.transforms.rope import NO_ROPE, Apply, Rope
from tersekv.versions import cache_name

T = TypeVar("T")
LENGTH_DEPENDENT = ("dynamic", "longrope")
FAR = 1 << 24
"""Position beyond the context of any model."""
BY_LAYER = ("no_rope_layers", "layer_rope_theta")
"""Config fields with one entry per layer, which is 0 if the layer has no RoPE."""
GIVEN = re.compile(r"position_embeddings if .*layer_type.* == \"(\w+)\" else None")
"""Code of a model that gives the angles of RoPE only to layers of one type."""
NOT_TEXT = ("Vision", "Audio")
"""Words in names of classes that encode images or sound."""

MOST_BUILT = 8
_built: dict[tuple[str, str | None], Rope] = {}
"""RoPE by config and layer type, for further caches of the same model: to build and check one takes 40 ms or more."""
_seen: dict[tuple[str, str | None], tuple[bool, int | None]] = {}
"""True if keys have RoPE, and their heads, likewise: to build an attention module and see takes 8 ms."""


class KeyProbe(Exception):  # noqa: N818  # it stops an attention module whose keys are known
    """In place of a cache: see if keys depend on the angles of RoPE, and their heads, then raise itself."""

    rotated, heads = True, None

    def update(self, keys: Tensor, *_: Any, **__: Any) -> Any:
        """Note H, and if the keys [B, H, n, D] require a gradient, and stop the attention module."""
        self.rotated, self.heads = keys.requires_grad, keys.shape[1]
        raise self


def modelling(config: PreTrainedConfig) -> ModuleType:
    """Return the modelling file of a config, or that of the model class it is for, as some configs have none.

    Raises:
        ImportError: there is neither.
    """
    try:
        return importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    except ImportError:
        made = AutoModelForCausalLM._model_mapping.get(type(config), None)
        if made is None:
            raise
        return sys.modules[made.__module__]


class Ropes:
    """RoPE by layer for a model with text config `config` and heads of `head_dim` channels. Layers
    of one type share one `Rope`."""

    def __init__(self, config: Any, head_dim: int) -> None:
        self.config, self.head_dim = config, head_dim
        self._known: dict[int, Rope] = {}  # by layer

    def of(self, layer: int) -> Rope:
        """Return the RoPE of one layer. It is `NO_ROPE` if only other layers have RoPE.

        Raises:
            UserError: the model has no RoPE, or one that cannot be removed from keys.
        """
        if getattr(self.config, "kv_lora_rank", None):
            raise UserError(f"{self._why()} latents have no RoPE")
        if layer not in self._known:
            try:
                kind, rotates = self._kind(layer), self._rotates(layer)
                self._known[layer] = self._once(_built, kind, lambda: self._make(kind)) if rotates else NO_ROPE
            except UserError:
                raise
            except Exception as error:  # the model's own code may raise any error
                raise UserError(f"{self._why()} its RoPE raises {type(error).__name__} ({error})") from error
        return self._known[layer]

    def known(self, layer: int) -> Rope | None:
        """Return the RoPE of a layer; `NO_ROPE` if the model has none, None if it cannot be removed
        from keys."""
        try:
            return self.of(layer) if self._any else NO_ROPE
        except UserError:
            return None

    def forget(self) -> None:
        """Free what is kept between the layers of one pass, see `Rope.forget`."""
        for rope in {*self._known.values()}:
            rope.forget()

    def vary(self, layers: Iterable[int]) -> bool:
        """True if the angles of one of these layers depend on the length of the sequence."""
        return any((rope := self.known(layer)) is not None and rope.varies for layer in layers)

    def needed_by(self, codec: Codec, layer: int) -> Rope | None:
        """Return the RoPE that `codec` needs for the keys of a layer; None if it needs none.

        Raises:
            UserError: see `of`.
        """
        if not codec.needs_rope:
            return None
        return self.of_means(layer) if codec.centred else self.of(layer)

    def of_means(self, layer: int) -> Rope:
        """Return the RoPE of the mean of a layer's keys. Without RoPE in the model it is `NO_ROPE`,
        because the mean of such keys is constant.

        Raises:
            UserError: see `of`.
        """
        return self.of(layer) if self._any else NO_ROPE

    @functools.cached_property
    def _any(self) -> bool:
        """True if the modelling file has a RoPE, which is more than functions that no attention of it calls."""
        names = vars(self._modelling())
        if any("rotaryembedding" in name.lower() for name in names):
            return True
        if not any(word in name.lower() for name in names for word in ("rotary", "rotate", "rope")):
            return False
        made: list[Any] = [of for name, of in names.items() if name.endswith("Attention") and isinstance(of, type)]
        try:
            read = [inspect.getsource(of.forward).lower() for of in made]
        except OSError:
            return True
        return not read or any(re.search(r"rotary|rotate|\brope", text) for text in read)

    def _kind(self, layer: int) -> str | None:
        """Return the layer's type if the model has a RoPE for each type, else None."""
        types = getattr(self.config, "layer_types", None)
        parameters = getattr(self.config, "rope_parameters", None) or {}
        return types[layer] if types and types[layer] in parameters else None

    def _rotates(self, layer: int) -> bool:
        """True if the keys of a layer have RoPE, according to the model's config, else its code."""
        config = self.config
        for name in BY_LAYER:
            if getattr(config, name, None):
                return bool(getattr(config, name)[layer])
        types, parameters = getattr(config, "layer_types", None), getattr(config, "rope_parameters", None) or {}
        kind = types[layer] if types else None
        if getattr(config, "position_embedding_type", "rope") is None or parameters.get(kind, 0) is None:
            return False
        if parameters.get("rope_theta", 0) is None:
            return False
        return self._once(_seen, kind, lambda: self._look(layer))[0]

    def heads(self, layer: int) -> int | None:
        """Return the number of a layer's KV heads if layers of different types may differ in it, and it is known."""
        types = getattr(self.config, "layer_types", None)
        if not types or getattr(self.config, "kv_lora_rank", None):
            return None
        return self._once(_seen, types[layer], lambda: self._look(layer))[1]

    def _look(self, layer: int) -> tuple[bool, int | None]:
        """Return True unless the model's code shows that a layer's keys do not depend on the angles; and their heads.

        Some models have RoPE only in layers with a sliding window, and only their code says so. The
        module runs on the meta device, which needs no memory. The angles require a gradient, so keys
        that depend on them require one, too.
        """
        probe = KeyProbe()
        try:
            made = self._class("Attention", ("layer_idx",))
            if made is None or "position_embeddings" not in inspect.signature(made.forward).parameters:
                return True, None
            with torch.inference_mode(False), torch.enable_grad(), torch.device("meta"):
                module = made(self.config, layer_idx=layer).requires_grad_(False)
                angles = torch.ones(2, 1, 1, self.head_dim, requires_grad=True).unbind()
                x = torch.ones(1, 1, self.config.hidden_size)
                named = {cache_name(made.forward): probe}
                module(hidden_states=x, position_embeddings=angles, attention_mask=None, **named)
        except KeyProbe:
            # its frames hold the probe, and so everything of the callers, until a collection
            probe.__traceback__ = None
        except Exception:  # a module of another form may raise any error
            return True, None
        try:
            given = GIVEN.search(inspect.getsource(self._modelling()))
        except OSError:
            given = None
        return probe.rotated and (given is None or self.config.layer_types[layer] == given[1]), probe.heads

    def _class(self, suffix: str, takes: tuple[str, ...] = ()) -> Any:
        """Return the decoder's class whose name has a suffix; None if there is none.

        takes: arguments of its `__init__`. A file may have classes for images and sound, too. Then
        the class whose `config` is of this config's type comes first.
        """
        found: list[tuple[bool, int, Any]] = []
        for name, made in vars(self._modelling()).items():
            if name.endswith(suffix) and inspect.isclass(made):
                arguments = inspect.signature(made).parameters
                if "config" in arguments and all(argument in arguments for argument in takes):
                    of = arguments["config"].annotation
                    exact = getattr(of, "__name__", of) == type(self.config).__name__
                    if exact or not any(word in name for word in NOT_TEXT):
                        found.append((not exact, len(found), made))
        return min(found, default=(True, 0, None))[-1]

    def _once(self, built: dict[tuple[str, str | None], T], kind: str | None, make: Callable[[], T]) -> T:
        """Return what `make` returns for layers of a kind, which is made once per config."""
        key = self._key, kind
        made = built.pop(key, None)
        if made is None:
            with torch.device("cpu"):
                made = make()
        built[key] = made  # the last one, so that the one used longest ago comes first
        if len(built) > MOST_BUILT:
            built.pop(next(iter(built)), None)
        return made

    @functools.cached_property
    def _key(self) -> str:
        config = self.config
        return f"{type(config).__module__} {self.head_dim} {config.to_json_string(use_diff=False)}"

    def _make(self, kind: str | None) -> Rope:
        config, made = self.config, self._class("RotaryEmbedding")
        rotate = getattr(self._modelling(), "apply_rotary_pos_emb", None)
        if made is None or rotate is None:
            raise UserError(f"{self._why()} transformers has no common RoPE functions for it")
        parameters = config.rope_parameters if kind is None else config.rope_parameters[kind]
        varies = (parameters or {}).get("rope_type") in LENGTH_DEPENDENT
        once = made(config)
        extra = {} if kind is None else {"layer_type": kind}
        x, plain = torch.zeros(1, dtype=torch.float32), inspect.unwrap(made.forward)

        def ignores_length() -> bool:
            """True if the embedding's own code, without the wrapper of frequencies, ignores the last position."""
            far, both = made(config), torch.tensor([[1, FAR]])
            whole = far(x, both, **extra)[0]
            return torch.equal(whole[:, :1], plain(far, x, both[:, :1], **extra)[0])

        alone = varies and plain is not made.forward and ignores_length()

        def cos_sin(positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
            if not varies:
                cos, sin = once(x, positions[None], **extra)
                return cos[0], sin[0]
            # an embedding takes the length from the last position; a used one keeps the frequencies of longer texts
            embedding, last = made(config), torch.tensor([[max(length, 1) - 1]])
            embedding(x, last, **extra)
            if alone:
                cos, sin = plain(embedding, x, positions[None], **extra)
                return cos[0], sin[0]
            cos, sin = embedding(x, torch.cat([positions[None], last], 1), **extra)
            return cos[0, :-1], sin[0, :-1]

        apply = self._apply(rotate, cos_sin)
        varies = varies or not Rope(cos_sin, apply).is_proportional()
        self._check(Rope(cos_sin, apply, varies))
        return Rope(cos_sin, apply, varies)  # a new one, without the tables cached by the checks

    def _apply(self, rotate: Any, cos_sin: Any) -> Apply:
        """Return the model's rotation for one tensor. If its function accepts rotated channels
        only, the others are passed through."""
        R = cos_sin(torch.arange(1), 1)[0].shape[-1]

        single = list(inspect.signature(rotate).parameters)[1] == "cos"  # one tensor, else queries and keys

        def whole(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            return rotate(x, cos, sin) if single else rotate(x, x, cos, sin)[0]

        def partly(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            return torch.cat([whole(x[..., :R], cos, sin), x[..., R:]], dim=-1)

        probe = torch.zeros(1, 1, 1, self.head_dim)
        try:
            fits = whole(probe, torch.ones(1, 1, R), torch.zeros(1, 1, R)).shape == probe.shape
        except RuntimeError:
            fits = False
        return whole if fits else partly

    def _check(self, rope: Rope) -> None:
        """Raise UserError unless removing RoPE inverts applying it."""
        x = torch.randn(1, 2, 3, self.head_dim, generator=torch.Generator().manual_seed(0))
        cos, sin = (t[None] for t in rope.cos_sin(5, 3, 8, x.device))
        back = rope.invert(rope.apply(x, cos, sin), cos, sin)
        if back.shape != x.shape or not torch.allclose(back, x, atol=1e-4):
            raise UserError(f"{self._why()} it does not rotate pairs of channels")

    def _modelling(self) -> ModuleType:
        try:
            return modelling(self.config)
        except ImportError as error:
            raise UserError(f"{self._why()} it has no modelling file ({error})") from error

    def _why(self) -> str:
        return (
            f"keys of {self.config.model_type} models cannot be coded before RoPE; use pre_rope=false and centre=false:"
        )
