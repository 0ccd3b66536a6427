"""What a codec is: a frozen, self-validating dataclass with four verbs, `fit`, `encode`, `decode`, `true_bits`.

Shapes: B batch, H key-value heads, N blocks, t tokens per block, T = N·t, D head dim.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from tersekv.errors import UserError
from tersekv.layouts.base import Layout, PackedTensors, Side, View
from tersekv.tensors import TensorSpec

if TYPE_CHECKING:
    from typing_extensions import Self

FitsOn = Literal["prompt", "corpus"]

USUAL_KV_HEADS = 8
"""Key-value heads of a layer over which `true_bits` spreads what a token or layer holds once for all heads."""

TABLE_LENGTH_TOKENS = 4096
"""Length over which `true_bits` spreads what is held once per sequence."""


class TableBytes(NamedTuple):
    """Bytes held beside the planes. shared: by table, once per cache however many layers and codecs use the table;
    per_head: for each sequence, layer and KV head; per_layer: for each sequence and layer. of_sequence: false where
    these are fitted on a corpus and serve all sequences."""

    shared: dict[str, int] = {}  # noqa: RUF012 (a NamedTuple's default, never written)
    per_head: int = 0
    per_layer: int = 0
    of_sequence: bool = True

    def of_layer(self, heads: int, batch: int) -> int:
        """Bytes of one layer, without shared ones."""
        return (self.per_head * heads + self.per_layer) * (batch if self.of_sequence else 1)


@dataclass(frozen=True)
class Codec(ABC):
    """A method for one side (keys or values). Fields are its options; `side` and `fitted` are set by the library.
    pre_rope: keys come without RoPE, which is put back as they are read; a recipe may set it for any method. per_head:
    nothing is held for all heads of a token together, since each head may keep other tokens."""

    side: Side = field(default="keys", kw_only=True)
    pre_rope: bool = field(default=False, kw_only=True)
    per_head: bool = field(default=False, kw_only=True)
    fitted: dict[str, Tensor] = field(default_factory=dict, kw_only=True, compare=False, repr=False)

    @property
    def fits_on(self) -> FitsOn | None:
        """What `fit` must have seen before `encode`: nothing, the prompt's own vectors, or a corpus."""
        return None

    @property
    def needs_fit(self) -> FitsOn | None:
        """What it has yet to see."""
        return None if self.fitted else self.fits_on

    @property
    def fit_spans_heads(self) -> bool:
        """Whether what `fit` learns from a prompt hangs on all heads of a layer together."""
        return False

    @property
    def encode_spans_heads(self) -> bool:
        """Whether what `encode` makes of a head hangs on the others."""
        return False

    def of_heads(self, first: int, count: int) -> Self:
        """The codec for some of the heads that it was fitted on."""
        return self

    def learns(self, B: int, H: int, head_dim: int) -> dict[str, TensorSpec]:
        """The tensors that `fitted` may hold for a batch of B rows, in their order. A file may claim anything of
        them."""
        return {}

    def learnt_fault(self, B: int, H: int, head_dim: int) -> str | None:
        """Describe a fault of `fitted` as the end of a sentence, or return None. Each tensor has been checked against
        `learns` before; this checks what they must have in common."""
        missing = [name for name in self.learns(B, H, head_dim) if name not in self.fitted]
        return f"lacks {', '.join(missing)}" if missing and self.needs_fit is None else None

    def fit(self, x: Tensor) -> Self:
        """A codec that has learnt what it needs from x float32 [B, H, T, D]; itself where it needs nothing."""
        return self

    def fit_corpus(self, x: Tensor, gradient: Tensor) -> Self:
        """A codec that has learnt from a corpus x float32 [1, H, T, D]; what the prompt is to say stays open. gradient:
        of the loss with respect to x, of its shape."""
        return self.fit(x)

    @classmethod
    def share_across_layers(cls, codecs: Sequence[Codec]) -> list[Codec]:
        """What a corpus' codecs of this method agree on over all layers and sides, once each has learnt its own."""
        return list(codecs)

    @property
    def centred(self) -> bool:
        """Keys come after RoPE, without the constant part that they had before it: `fitted["mean"]`, [1 or B, H, D]."""
        return False

    @property
    def needs_rope(self) -> bool:
        """Whether the store must know the keys' RoPE."""
        return self.pre_rope or self.centred

    def with_mean(self, x: Tensor) -> Self:
        """A centred codec that knows the constant part of keys x float32 [B, H, T, D] before RoPE."""
        return dataclasses.replace(self, fitted=self.fitted | {"mean": x.mean(2).to(torch.float16)})

    @abstractmethod
    def layout(self, head_dim: int) -> Layout:
        """Packed tensors per block; raises UserError where the options do not fit the head dim."""

    @abstractmethod
    def encode(self, x: Tensor) -> PackedTensors:
        """x float32 [B, H, N·t, D] to planes [B, H, N, ...], whole blocks only."""

    @abstractmethod
    def view(self, planes: PackedTensors, head_dim: int) -> View:
        """The planes as attention reads them."""

    def decode(self, planes: PackedTensors, head_dim: int) -> Tensor:
        """x̂ float32 [B, H, N·t, D]: the vector whose inner product with a query is the method's estimate."""
        return self.view(planes, head_dim).decode()

    def table_bytes(self, head_dim: int) -> TableBytes:
        """Bytes of tables that decoding needs beside the planes."""
        return TableBytes()

    def tables(self, head_dim: int) -> list[Tensor]:
        """The tensors behind `table_bytes`; shared ones are the same object for every layer."""
        return list(self.fitted.values())

    def true_bits(self, head_dim: int, length_tokens: int = TABLE_LENGTH_TOKENS, heads: int = USUAL_KV_HEADS) -> float:
        """Stored bits per element of a layer with `heads` key-value heads, with scales, norms and indices, and with
        tables of the sequence spread over `length_tokens`."""
        tables = self.table_bytes(head_dim)
        spread = (tables.per_head + tables.per_layer / heads) * 8 / (length_tokens * head_dim)
        return self.layout(head_dim).bits(head_dim, heads) + spread

    def select(self, rows: Tensor) -> Self:
        """The codec for the batch rows `rows` (int64), after beams were reordered or a batch was cut."""
        if not self.fitted:
            return self
        return dataclasses.replace(self, fitted={k: v.index_select(0, rows) for k, v in self.fitted.items()})

    def to(self, device: Any) -> Self:
        """The codec with its fitted tensors on `device`."""
        if not self.fitted:
            return self
        return dataclasses.replace(self, fitted={k: v.to(device) for k, v in self.fitted.items()})

    def options(self) -> dict[str, Any]:
        """The options by name, as in a recipe."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if not f.kw_only}


class Pair(NamedTuple):
    """What a method's name stands for: a codec for keys, one for values, and others in the first layers."""

    keys: Codec
    values: Codec
    initial_layers: int = 0
    initial: tuple[Codec, Codec] | None = None

    def at(self, layer: int) -> tuple[Codec, Codec]:
        """The codecs of one layer."""
        return self.initial if self.initial is not None and layer < self.initial_layers else (self.keys, self.values)

    def with_pre_rope(self, pre_rope: bool) -> Pair:
        """Keys coded before RoPE, or after it."""
        initial = self.initial and (dataclasses.replace(self.initial[0], pre_rope=pre_rope), self.initial[1])
        return self._replace(keys=dataclasses.replace(self.keys, pre_rope=pre_rope), initial=initial)


@dataclass(frozen=True)
class Method:
    """A file of `codecs/`: its `METHOD` says what the file's name builds. variants: option sets beside the defaults
    that take another way through the method; conformance tests run them, too."""

    title: str
    paper: str
    build: Callable[..., Pair]
    variants: tuple[dict[str, Any], ...] = ()

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The options that `build` takes."""
        return dict(inspect.signature(self.build).parameters)


def for_both_sides(codec: type[Codec]) -> Callable[..., Pair]:
    """A `build` that uses one codec class with equal options for keys and values."""

    def build(**options: Any) -> Pair:
        return Pair(codec(**options), codec(**options, side="values"))

    fields = [f for f in dataclasses.fields(codec) if not f.kw_only]
    build.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default) for f in fields]
    )
    return build


def check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise UserError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise UserError(f"{name}={value} is not allowed; choose one of {', '.join(map(str, allowed))}")


def check_choices(codec: Codec) -> None:
    """Raise UserError unless each option whose type is a Literal has one of its values."""
    for name, allowed in _choices(type(codec)).items():
        check_choice(name, getattr(codec, name), allowed)


@functools.lru_cache
def _choices(codec: type[Codec]) -> dict[str, tuple[object, ...]]:
    return {name: get_args(hint) for name, hint in get_type_hints(codec).items() if get_origin(hint) is Literal}


def check_range(name: str, value: int, low: int, high: int) -> None:
    """Raise UserError unless low <= value <= high."""
    if not low <= value <= high:
        raise UserError(f"{name}={value} is out of range; allowed are {low} to {high}")
