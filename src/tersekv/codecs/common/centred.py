"""Keys coded by any method after their mean is removed (ours): the option `centre=true`.

The mean of keys before RoPE is one vector μ per KV head. Some models have channels whose mean is many
times their spread, mostly those with a bias in the key projection. A method that rotates keys, or
has one scale for several channels, spends its codes on this mean, which is equal for all tokens. So
the codec gets what is left:

    coded after RoPE (usual)     k_n − RoPE_n(μ)      attention adds q·RoPE_n(μ)
    coded before RoPE            k_n − μ              decoding adds μ before it applies RoPE

μ takes 2 bytes per channel and head, and none per token. It is the mean of the prompt, or of a corpus
(`calibration=corpus`). Figures: docs/measured/quality.md.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from tersekv.codecs.base import Codec, FitsOn, Pair, TableBytes, check_choices
from tersekv.errors import UserError
from tersekv.layouts.base import Layout, PackedTensors, View
from tersekv.layouts.mean_removed import Biased
from tersekv.tensors import TensorSpec
from tersekv.transforms.moments import Moments, Observes, WeightedBy

if TYPE_CHECKING:
    from typing_extensions import Self

MEAN = "mean"


@dataclass(frozen=True)
class Centred(Codec):
    """Keys coded by `codec` with their mean removed.

    codec: the method, with its options; its fitted tensors are in `fitted`, next to the mean.
    calibration: data that the mean is from, prompt or corpus.
    """

    codec: Codec
    calibration: Literal["prompt", "corpus"] = "prompt"

    def __post_init__(self) -> None:
        check_choices(self)
        if not self.codec.has_rates:
            raise UserError("centre=true has no effect on keys that are not quantised; leave it out")
        if self.codec.fits_on == "corpus" and not self.codec.takes_moments and not self.pre_rope:
            raise UserError(
                "centre=true needs calibration=prompt or pre_rope=true here, because keys without RoPE are not kept "
                "while a corpus is read"
            )

    @functools.cached_property
    def coder(self) -> Codec:
        """The codec with its own fitted tensors."""
        own = {name: t for name, t in self.fitted.items() if name != MEAN}
        return dataclasses.replace(
            self.codec, side=self.side, pre_rope=self.pre_rope, per_head=self.per_head, fitted=own
        )

    def _with(self, coder: Codec) -> Self:
        """Return the codec with another `coder` and the same mean."""
        mean = {MEAN: self.fitted[MEAN]} if MEAN in self.fitted else {}
        return dataclasses.replace(
            self, codec=dataclasses.replace(coder, fitted={}), fitted=mean | coder.fitted, per_head=coder.per_head
        )

    # ------------------------------------------------------------------ properties of the method

    @property
    def rate_options(self) -> tuple[str, ...]:  # type: ignore[override]  # a constant of other codecs
        """Options that a calibration on a corpus does not depend on."""
        return self.codec.rate_options

    @property
    def rate_tensors(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of fitted tensors that depend on the rate."""
        return self.codec.rate_tensors

    @property
    def has_rates(self) -> bool:  # type: ignore[override]
        """True if the method quantises."""
        return self.codec.has_rates

    @property
    def takes_moments(self) -> bool:  # type: ignore[override]
        """True if calibration needs only sums over the corpus."""
        return self.codec.fits_on != "corpus" or self.codec.takes_moments

    @property
    def label(self) -> str:
        """Name of the method in messages."""
        return f"centred {self.codec.label}"

    @property
    def bits(self) -> Any:
        """Bits of the method. AttributeError if it has no such option."""
        return self.codec.bits  # type: ignore[attr-defined]

    @property
    def fits_on(self) -> FitsOn | None:
        """Data that the method or its mean needs."""
        return self.codec.fits_on or self.calibration

    @property
    def needs_fit(self) -> FitsOn | None:
        """Data still needed: for the mean first, then for the method."""
        return self.coder.needs_fit if MEAN in self.fitted else self.calibration

    @property
    def observes(self) -> Observes | None:
        """Data of the prompt's queries that the method uses."""
        return self.codec.observes

    @property
    def weighted_by(self) -> WeightedBy | None:
        """Weights of the sums in a calibration."""
        return self.codec.weighted_by if self.codec.fits_on == "corpus" else None

    @property
    def fit_spans_heads(self) -> bool:
        """True if fitting the method needs all heads. The mean needs its own only."""
        return self.coder.fit_spans_heads

    @property
    def encode_spans_heads(self) -> bool:
        """True if encoding one head needs data of the other heads."""
        return self.coder.encode_spans_heads

    @property
    def centred(self) -> bool:
        """True if the caller removes the rotated mean, False if `encode` removes the mean before RoPE."""
        return not self.pre_rope

    # ------------------------------------------------------------------ fitted tensors

    def of_heads(self, first: int, count: int) -> Self:
        """Return the codec for some heads."""
        own = self._with(self.coder.of_heads(first, count))
        mean = self.fitted.get(MEAN)
        if mean is None or mean.shape[1] == count:  # each process fits the mean of its own heads
            return own
        return dataclasses.replace(own, fitted=own.fitted | {MEAN: mean[:, first : first + count]})

    def learns(self, B: int, H: int, head_dim: int) -> dict[str, TensorSpec]:
        """Return the specifications of the mean and of the method's fitted tensors."""
        rows = 1 if self.calibration == "corpus" else (1, B)
        mean = TensorSpec(torch.float16, (rows, H, head_dim))
        return {MEAN: mean} | self.coder.learns(B, H, head_dim)

    def learnt_fault(self, B: int, H: int, head_dim: int) -> str | None:
        """Return a fault of the method's tensors."""
        return super().learnt_fault(B, H, head_dim) or self.coder.learnt_fault(B, H, head_dim)

    def fit(self, x: Tensor) -> Self:
        """Fit on keys float32 [B, H, T, D], which have no mean any more if the codec is `centred`."""
        codec = self if self.centred else self.with_mean(x)
        return codec._with(codec.coder.fit(codec._input(x)))

    def fit_corpus(self, x: Tensor, gradient: Tensor) -> Self:
        """Calibrate on a corpus of keys before RoPE, float32 [1, H, T, D]."""
        codec = self.with_mean(x)
        return codec._with(codec.coder.fit_corpus(codec._input(x), gradient))

    def fit_moments(self, moments: Moments) -> Self:
        """Fit on sums over keys, which have no mean any more if the codec is `centred`."""
        codec = self
        if not self.centred:
            mean = (moments.total / max(1, moments.vectors)).half()
            codec = dataclasses.replace(self, fitted=self.fitted | {MEAN: mean})
            left = moments.total - moments.vectors * mean.double()
            moments = moments._replace(total=left, squares=moments.vectors * moments.covariance(mean))
        return codec._with(codec.coder.fit_moments(moments)) if codec.coder.needs_fit == self.calibration else codec

    def _input(self, x: Tensor) -> Tensor:
        """Return the vectors that the method codes."""
        return x if self.centred else x - self.fitted[MEAN].float().unsqueeze(2)

    def at_rate(self, bits: float) -> Self:
        """Return the codec at another rate, with the same mean."""
        return self._with(self.coder.at_rate(bits))

    def for_all_rates(self) -> Self:
        """Return the codec with the default of every option of the rate."""
        return dataclasses.replace(self, codec=self.codec.for_all_rates())

    def select(self, rows: Tensor) -> Self:
        """Return the codec for these batch rows. A mean from a corpus is shared by all rows."""
        own = self._with(self.coder.select(rows))
        if MEAN not in self.fitted or self.calibration == "corpus":
            return own
        return dataclasses.replace(own, fitted=own.fitted | {MEAN: self.fitted[MEAN].index_select(0, rows)})

    # ------------------------------------------------------------------ coding

    def layout(self, head_dim: int) -> Layout:
        """Return the method's packed tensors."""
        return self.coder.layout(head_dim)

    def encode(self, x: Tensor) -> PackedTensors:
        """Encode keys float32 [B, H, N·t, D]; those of a `centred` codec have no mean any more."""
        return self.coder.encode(self._input(x))

    def view(self, planes: PackedTensors, head_dim: int) -> View:
        """Return the method's view, with the mean of keys before RoPE."""
        view = self.coder.view(planes, head_dim)
        return view if self.centred else Biased(view, self.fitted[MEAN])

    def table_bytes(self, head_dim: int) -> TableBytes:
        """Return the bytes of the method's tables and of the mean."""
        own = self.coder.table_bytes(head_dim)
        fixed = not own.per_head and not own.per_layer
        return own._replace(
            per_head=own.per_head + 2 * head_dim, of_sequence=self.calibration == "prompt" if fixed else own.of_sequence
        )

    def tables(self, head_dim: int) -> list[Tensor]:
        """Return the tensors counted by `table_bytes`."""
        return [*self.coder.tables(head_dim), *(t for name, t in self.fitted.items() if name == MEAN)]

    def options(self) -> dict[str, Any]:
        """Return the method's options and `centre`."""
        return self.codec.options() | {"centre": True}


def with_centre(pair: Pair, calibration: FitsOn) -> Pair:
    """Return the codecs with the mean of keys removed, which is from the prompt or from a corpus."""

    def centred(keys: Codec) -> Codec:
        return Centred(keys, calibration, side=keys.side, pre_rope=keys.pre_rope, per_head=keys.per_head)

    return pair._replace(keys=centred(pair.keys), initial=pair.initial and (centred(pair.initial[0]), pair.initial[1]))
