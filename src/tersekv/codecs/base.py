"""Base class of codecs: frozen dataclasses with `fit`, `encode`, `decode` and `true_bits`.

Shapes: B batch, H key-value heads, N blocks, t tokens per block, T = N·t, D head dim.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from tersekv.codecs.codebooks.bits import SQUARED_ERROR
from tersekv.errors import UserError
from tersekv.layouts.base import Layout, PackedTensors, Side, View
from tersekv.tensors import TensorSpec
from tersekv.transforms.moments import Moments, Observes, WeightedBy

if TYPE_CHECKING:
    from typing_extensions import Self

FitsOn = Literal["prompt", "corpus"]

USUAL_KV_HEADS = 8
"""KV heads that `true_bits` assumes for data stored once for all heads of a token or layer."""

TABLE_LENGTH_TOKENS = 4096
"""Sequence length that `true_bits` assumes for data stored once per sequence."""


class TableBytes(NamedTuple):
    """Bytes held next to the packed tensors.

    shared: bytes by table, counted once per cache for all layers and codecs that use the table.
    per_head: bytes per sequence, layer and KV head.
    per_layer: bytes per sequence and layer.
    of_sequence: False if the last two are fitted on a corpus and serve all sequences.
    """

    shared: dict[str, int] = {}  # noqa: RUF012 (a NamedTuple's default, never written)
    per_head: int = 0
    per_layer: int = 0
    of_sequence: bool = True

    def of_layer(self, heads: int, batch: int) -> int:
        """Return the bytes of one layer, without shared tables."""
        return (self.per_head * heads + self.per_layer) * (batch if self.of_sequence else 1)


@dataclass(frozen=True)
class Codec(ABC):
    """A coding method for one side (keys or values). Fields are its options.

    The library sets the keyword-only fields:

    side: "keys" or "values".
    pre_rope: keys are coded before RoPE, which is applied when they are read. A recipe may set it
        for any method.
    per_head: store nothing jointly for all heads of a token, because each head may keep other tokens.
    fitted: tensors that `fit` has computed.
    """

    rate_options: ClassVar[tuple[str, ...]] = ()
    """Options that a calibration on a corpus does not depend on. One file serves all their values."""
    rate_tensors: ClassVar[tuple[str, ...]] = ()
    """Names in `fitted` that `share_across_layers` computes from the others and from those options."""

    has_rates: ClassVar[bool] = True
    """True if the codec quantises. False for floats, which have one rate."""

    takes_moments: ClassVar[bool] = False
    """True if calibration needs only sums over the corpus, see `fit_moments`."""

    encodes_halves: ClassVar[bool] = False
    """True if `encode` takes tokens of 16 bits, too, and returns what it returns for their float32 copy."""

    side: Side = field(default="keys", kw_only=True)
    pre_rope: bool = field(default=False, kw_only=True)
    per_head: bool = field(default=False, kw_only=True)
    fitted: dict[str, Tensor] = field(default_factory=dict, kw_only=True, compare=False, repr=False)

    @property
    def label(self) -> str:
        """Name of the method in messages."""
        return type(self).__name__

    def in_layer(self, held: int, head_dim: int) -> Codec:
        """Return the codec of a layer: this one, unless it chooses by layer.

        held: number of tokens that the layer is expected to hold.
        """
        return self

    @property
    def fits_on(self) -> FitsOn | None:
        """Data that `fit` needs before `encode`: the "prompt", a "corpus", or None."""
        return None

    @property
    def needs_fit(self) -> FitsOn | None:
        """Data that `fit` still needs: "prompt", "corpus" or None."""
        return None if self.fitted else self.fits_on

    @property
    def observes(self) -> Observes | None:
        """Data of the prompt's queries that `fit_moments` uses: the "loss" of errors that they show,
        or their "scores" (`score_loss`). None if it uses nothing of them.
        """
        return None

    @property
    def fit_spans_heads(self) -> bool:
        """True if fitting one head on a prompt needs data of the layer's other heads."""
        return False

    @property
    def encode_spans_heads(self) -> bool:
        """True if encoding one head needs data of the other heads."""
        return False

    def of_heads(self, first: int, count: int) -> Self:
        """Return the codec for some of the heads that it was fitted on."""
        return self

    def learns(self, B: int, H: int, head_dim: int) -> dict[str, TensorSpec]:
        """Return the allowed tensors of `fitted`, in order, for a batch of B rows.

        Files are checked against this, because their content cannot be trusted.
        """
        return {}

    def learnt_fault(self, B: int, H: int, head_dim: int) -> str | None:
        """Describe a fault of `fitted` as the end of a sentence, or return None.

        Each tensor was checked against `learns` before. This method checks that the tensors fit
        together.
        """
        missing = [name for name in self.learns(B, H, head_dim) if name not in self.fitted]
        return f"lacks {', '.join(missing)}" if missing and self.needs_fit is None else None

    def fit(self, x: Tensor) -> Self:
        """Return the codec fitted on x float32 [B, H, T, D], or itself if it needs no data."""
        return self

    def fit_corpus(self, x: Tensor, gradient: Tensor) -> Self:
        """Return the codec calibrated on a corpus x float32 [1, H, T, D].

        Tensors that depend on the prompt stay unfitted.

        gradient: of the loss with respect to x, with the shape of x.
        """
        if not self.takes_moments:
            return self.fit(x)
        used = gradient if self.weighted_by == "gradients" else None
        return self.fit_moments(Moments.of(x, used, diagonal=self.side == "keys"))

    @property
    def weighted_by(self) -> WeightedBy | None:
        """Weights of the sums in a calibration on a corpus: "gradients" of the loss, or "queries"."""
        return "gradients"

    def fit_moments(self, moments: Moments) -> Self:
        """Return the codec calibrated on sums over a corpus, if `takes_moments`.

        A centred codec has its mean already.
        """
        raise NotImplementedError(f"{type(self).__name__} is not fitted on sums")

    @classmethod
    def share_across_layers(cls, codecs: Sequence[Codec]) -> list[Codec]:
        """Compute `rate_tensors` of calibrated codecs of all layers and sides."""
        return list(codecs)

    def at_rate(self, bits: float) -> Self:
        """Return the codec at another rate, with the same fit.

        Both rates have the same linear maps, so that attention transforms a query once.

        Raises:
            UserError: the method has no such rate.
        """
        raise UserError(
            f"{type(self).__name__} cannot code tokens at several rates from one fit; use trellis, uniform, kivi or "
            "turboquant"
        )

    @staticmethod
    def expected_error(bits: float) -> float:
        """Return the squared error of a number N(0, 1) with so many bits, whole ones or not.

        This is the trellis code's. That of other codes falls with each bit by about the same factor.
        """
        table, whole = SQUARED_ERROR["trellis"], math.floor(bits)
        return float(table[whole] ** (1 - bits + whole) * table[math.ceil(bits)] ** (bits - whole))

    def for_all_rates(self) -> Self:
        """Return the codec with the default of every option in `rate_options`."""
        defaults: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(self) if f.name in self.rate_options}
        return dataclasses.replace(self, **defaults)

    @classmethod
    def fit_all(cls, parts: Sequence[tuple[Any, Moments]]) -> list[Any]:
        """Fit codecs of this class on sums over their vectors, see `fit_moments`."""
        return [codec.fit_moments(moments) for codec, moments in parts]

    @property
    def centred(self) -> bool:
        """True if keys are coded after RoPE with their mean before RoPE removed.

        The mean is `fitted["mean"]`, [1 or B, H, D].
        """
        return False

    @property
    def needs_rope(self) -> bool:
        """True if the store must know the keys' RoPE."""
        return self.pre_rope or self.centred

    def with_mean(self, x: Tensor) -> Self:
        """Return a centred codec with the mean of keys x float32 [B, H, T, D] before RoPE."""
        return dataclasses.replace(self, fitted=self.fitted | {"mean": x.mean(2).to(torch.float16)})

    @abstractmethod
    def layout(self, head_dim: int) -> Layout:
        """Return the packed tensors per block.

        Raises:
            UserError: the options do not fit the head dim.
        """

    @abstractmethod
    def encode(self, x: Tensor) -> PackedTensors:
        """Encode x float32 [B, H, N·t, D], see `encodes_halves`, as packed tensors [B, H, N, ...] of whole blocks."""

    @classmethod
    def encode_all(cls, parts: Sequence[tuple[Any, slice, Tensor]]) -> list[PackedTensors]:
        """Encode tokens of some heads of codecs of this class, of several layers or with other bits; see `encode`.

        Heads of equal codecs without fitted tensors are encoded in one call.
        """
        first, _, like = parts[0]
        alike = all(codec == first and not codec.fitted and x.shape[2:] == like.shape[2:] for codec, _, x in parts)
        if not alike or first.encode_spans_heads or len(parts) == 1:
            return [codec.of_heads(heads.start, x.shape[1]).encode(x) for codec, heads, x in parts]
        made, layout = first.encode(torch.cat([x for _, _, x in parts], dim=1)), first.layout(like.shape[3])
        ends = itertools.accumulate(x.shape[1] for _, _, x in parts)
        return [
            layout.select_heads(made, end - x.shape[1], x.shape[1]) for end, (_, _, x) in zip(ends, parts, strict=True)
        ]

    @property
    def joins(self) -> bool:
        """True if `joined` works on codecs like this one: it fits no tensors, or all of them have a head axis."""
        return not self.fitted and self.fits_on is None

    @classmethod
    def joined(cls, codecs: Sequence[Any]) -> Any:
        """Return one codec for the heads of all codecs, head after head. They have the same options."""
        first = codecs[0]
        fitted = {name: torch.cat([codec.fitted[name] for codec in codecs], dim=1) for name in first.fitted}
        return dataclasses.replace(first, fitted=fitted) if fitted and len(codecs) > 1 else first

    @abstractmethod
    def view(self, planes: PackedTensors, head_dim: int) -> View:
        """Return the packed tensors as a view that attention reads."""

    def decode(self, planes: PackedTensors, head_dim: int) -> Tensor:
        """Return x̂ float32 [B, H, N·t, D], whose inner product with a query is the method's
        estimate.
        """
        return self.view(planes, head_dim).decode()

    def table_bytes(self, head_dim: int) -> TableBytes:
        """Return the bytes of tables that decoding needs next to the packed tensors."""
        return TableBytes()

    def tables(self, head_dim: int) -> list[Tensor]:
        """Return the tensors counted by `table_bytes`.

        Shared ones are the same object for every layer.
        """
        return list(self.fitted.values())

    def true_bits(self, head_dim: int, length_tokens: int = TABLE_LENGTH_TOKENS, heads: int = USUAL_KV_HEADS) -> float:
        """Return the stored bits per element of a layer with `heads` KV heads.

        Scales, norms and indices are included. Tables of the sequence are divided by
        `length_tokens`.
        """
        tables = self.table_bytes(head_dim)
        spread = (tables.per_head + tables.per_layer / heads) * 8 / (length_tokens * head_dim)
        return self.layout(head_dim).bits(head_dim, heads) + spread

    def select(self, rows: Tensor) -> Self:
        """Return the codec for batch rows `rows` (int64), for example after beams were reordered."""
        if not self.fitted:
            return self
        return dataclasses.replace(self, fitted={k: v.index_select(0, rows) for k, v in self.fitted.items()})

    def to(self, device: Any) -> Self:
        """Return the codec with its fitted tensors on `device`."""
        if not self.fitted:
            return self
        return dataclasses.replace(self, fitted={k: v.to(device) for k, v in self.fitted.items()})

    def options(self) -> dict[str, Any]:
        """Return the options by name, as in a recipe."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if not f.kw_only}


class Pair(NamedTuple):
    """Codecs that a method's name builds: for keys, for values, and for the first layers.

    initial: codecs of the `initial_layers` first layers, if they differ.
    """

    keys: Codec
    values: Codec
    initial_layers: int = 0
    initial: tuple[Codec, Codec] | None = None

    def at(self, layer: int) -> tuple[Codec, Codec]:
        """Return the codecs of the keys and values of one layer."""
        return self.initial if self.initial is not None and layer < self.initial_layers else (self.keys, self.values)

    def with_pre_rope(self, pre_rope: bool) -> Pair:
        """Return the pair with keys coded before RoPE (True) or after it (False)."""
        initial = self.initial and (dataclasses.replace(self.initial[0], pre_rope=pre_rope), self.initial[1])
        return self._replace(keys=dataclasses.replace(self.keys, pre_rope=pre_rope), initial=initial)


@dataclass(frozen=True)
class Method:
    """Registration of a method: the constant `METHOD` of a file in `codecs/`, named by the file.

    build: function that makes the codecs.
    variants: option sets that use other code paths than the defaults. Conformance tests run them
        too.
    """

    title: str
    paper: str
    build: Callable[..., Pair]
    variants: tuple[dict[str, Any], ...] = ()

    @functools.cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """Return the options that `build` takes."""
        return dict(inspect.signature(self.build).parameters)


def for_both_sides(codec: type[Codec]) -> Callable[..., Pair]:
    """Return a `build` that uses one codec class with equal options for keys and values."""

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
    """Raise UserError unless every option with a Literal type has one of its values."""
    for name, allowed in _choices(type(codec)).items():
        check_choice(name, getattr(codec, name), allowed)


@functools.lru_cache
def _choices(codec: type[Codec]) -> dict[str, tuple[object, ...]]:
    return {name: get_args(hint) for name, hint in get_type_hints(codec).items() if get_origin(hint) is Literal}


def check_range(name: str, value: int, low: int, high: int) -> None:
    """Raise UserError unless low <= value <= high."""
    if not low <= value <= high:
        raise UserError(f"{name}={value} is out of range; allowed are {low} to {high}")


def whole_bits(bits: float) -> int:
    """Return a number of bits as an int, or raise UserError."""
    if bits % 1:
        raise UserError(f"{bits:g} bits are not allowed here; give a whole number")
    return int(bits)
