"""Trellis-coded quantisation of decorrelated vectors (ours; docs/methods/trellis.md).

The mean of a vector is removed. A basis decorrelates the rest; reverse water-filling allocates bits
to its components, which are coded by trellis-coded quantisation. x = μ + Σ_d a_d·y_d. For keys μ is
the mean before RoPE, and the basis is after RoPE so that it can be applied to the query. For values
both are plain. The basis diagonalises the covariance in the metric of the loss (Karhunen-Loève
transform): the Fisher information E[g·gᵀ] for values, and its diagonal for keys. Bits b_d minimise
Σ_d λ_d·ε(b_d), with variances λ_d in units of the loss, and the code's squared error ε for N(0, 1).

A vector's length is coded as a gain of 8 bits. If the error with it is larger than expected, codes
are searched again with gains above the one that fits them best. The one with the least error is kept.

- `basis=auto` is klt; with `calibration=prompt` a layer may get another codec (`layer_choice.py`).
- `basis=channels` keeps the channels, `rotation` has a random matrix. `centre=false` does not remove μ.
- `code=scalar` uses Lloyd-Max codebooks in the same stream.
- `calibration=corpus` uses the output of `tersekv calibrate`. `calibration=prompt` fits on the
  prompt's own vectors, with the loss that its queries show (`attention/prompt_loss.py`).
- `pre_rope=true` decorrelates keys before RoPE, which is better at equal bits and slower to read.

Good for: the least divergence for its bytes; with calibration=prompt it needs no corpus.
Bad for: reading prompts fast: fitting and packing take a quarter more time.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from tersekv.codecs.base import Codec, FitsOn, Method, TableBytes, check_choices, check_range, for_both_sides
from tersekv.codecs.codebooks.bits import SQUARED_ERROR, allotted, falls, searched_error, shared_out
from tersekv.codecs.codebooks.trellis import scalar_entries, trellis_entries
from tersekv.codecs.common.layer_choice import chosen, integers_of_kivi
from tersekv.codecs.common.search import ByHead, concatenated, searched
from tersekv.errors import UserError
from tersekv.kernels import backends
from tersekv.kernels.basis import inverses, unpacked_basis, within
from tersekv.kernels.components import in_units
from tersekv.kernels.trellis import largest_gain
from tersekv.kernels.trellis_search import MOST_BITS, STATES
from tersekv.layouts.base import Layout, PackedTensors, Rotated, View
from tersekv.layouts.basis import InBasis
from tersekv.layouts.mean_removed import Biased
from tersekv.layouts.trellis import WORD_BITS, TrellisView, trellis_layout
from tersekv.tensors import TensorSpec
from tersekv.transforms.klt import metric_of, stored
from tersekv.transforms.moments import Moments, Observes, WeightedBy
from tersekv.transforms.rotation import random_rotation

if TYPE_CHECKING:
    from typing_extensions import Self

FITTED = "auto", "klt"
SHARING = ("model", "fisher")
"""Options under which bits are shared across layers.

Without gradients, layers cannot be compared.
"""

LEAST_SPREAD = 0.05
"""Minimum standard deviation of fitted vectors, relative to the length of their mean."""

HEADROOM = 8
"""Factor on scales fitted on a prompt: later tokens may be 980 times as long as those of the prompt, not 123 times."""

MANY_BITS = 3.5
ENOUGH = (1.18, 1.1)
"""Error, relative to the expected one, below which no other gain is tried.

The second number is for `MANY_BITS` and more. A tenth less takes a fifth more time for 1.6 % less error.
"""

MOST_GAIN = "a vector is {0:.3g} times as long as those that the codec was fitted on, and must be at most {1:.3g}; {2}"


@dataclass(frozen=True)
class Trellis(Codec):
    """One side of the trellis codec.

    bits: mean bits per component, 0.25 to 8. A token's bits are rounded up to a multiple of 16.
    basis: klt, channels, rotation, or auto, which is klt in all layers but those of `in_layer`.
    code: trellis or scalar.
    centre: remove the mean.
    metric: fisher or none. On a prompt, fisher is estimated from its queries.
    allot: with a corpus, share bits over all layers and sides (model), or give each the same
        (layer).
    calibration: corpus or prompt.
    seed: of the rotation.
    """

    rate_options: ClassVar[tuple[str, ...]] = ("bits", "allot")
    rate_tensors: ClassVar[tuple[str, ...]] = ("bits",)
    takes_moments: ClassVar[bool] = True

    bits: float = 2.0
    basis: Literal["auto", "klt", "channels", "rotation"] = "auto"
    code: Literal["trellis", "scalar"] = "trellis"
    centre: bool = True
    metric: Literal["fisher", "none"] = "fisher"
    allot: Literal["model", "layer"] = "model"
    calibration: Literal["corpus", "prompt"] = "corpus"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.25 <= self.bits <= MOST_BITS:
            raise UserError(f"bits={self.bits:g} is out of range; allowed are 0.25 to {MOST_BITS}")
        check_choices(self)
        check_range("seed", self.seed, 0, 2**31)

    def in_layer(self, held: int, head_dim: int) -> Codec:
        """Return the codec of a layer if the basis is "auto" and fitted on the prompt, see `layer_choice.py`."""
        if self.basis != "auto" or self.calibration != "prompt":
            return self
        basis, bits = chosen(self.bits, held, head_dim)
        if basis == "integers":
            return integers_of_kivi(self.side, head_dim, pre_rope=self.pre_rope, per_head=self.per_head)
        return dataclasses.replace(self, basis=basis, bits=bits)

    @property
    def fits_on(self) -> FitsOn | None:
        """Data that the option `calibration` names."""
        return self.calibration

    @property
    def needs_fit(self) -> FitsOn | None:
        """Data still needed: None once bits are fitted."""
        return None if "bits" in self.fitted else self.fits_on

    @property
    def weighted_by(self) -> WeightedBy | None:
        """ "gradients" if errors are weighted by the loss."""
        return "gradients" if self.metric == "fisher" else None

    @property
    def observes(self) -> Observes | None:
        """ "loss" if a fit on a prompt uses the loss that its queries show."""
        return "loss" if self.calibration == "prompt" and self.metric == "fisher" else None

    @property
    def centred(self) -> bool:
        """True for keys after RoPE whose mean before RoPE is removed."""
        return self.centre and self.side == "keys" and not self.pre_rope

    @property
    def _own_mean(self) -> bool:
        return self.centre and not self.centred

    def of_heads(self, first: int, count: int) -> Self:
        """Return the codec for some heads. All fitted tensors have a head axis."""
        own = {name: t[:, first : first + count] for name, t in self.fitted.items()}
        return dataclasses.replace(self, fitted=own)

    joins: ClassVar[bool] = True  # all fitted tensors have a head axis

    @functools.cached_property
    def _fitted_words(self) -> int:
        return int(self.fitted["bits"][0, 0].sum()) // WORD_BITS

    def words(self, head_dim: int) -> int:
        """Return the number of int16 elements of a token's stream."""
        if "bits" in self.fitted:
            return self._fitted_words
        return math.ceil(self.bits * head_dim / WORD_BITS)

    def layout(self, head_dim: int) -> Layout:
        """Return the packed tensors: stream and gain."""
        if self.words(head_dim) * WORD_BITS > MOST_BITS * head_dim:
            raise UserError(f"bits={self.bits:g} is too many for {head_dim} channels; allowed are at most {MOST_BITS}")
        return trellis_layout(self.words(head_dim))

    def learns(self, B: int, H: int, head_dim: int) -> dict[str, TensorSpec]:
        """Return the specifications of the tensors in `fit`, per batch row or for all rows."""
        rows, half = (1, B), torch.float16
        channels = rows, H, head_dim
        found = {"mean": TensorSpec(half, channels)} if self.centre else {}
        if self.basis in FITTED:
            found["basis"] = TensorSpec(torch.uint8, (rows, H, 3 * -(-(head_dim**2) // 4)))
            found["channels"] = TensorSpec(half, channels)
        return found | {
            "scale": TensorSpec(half, channels, low=torch.finfo(half).tiny * 2**-10),
            "importance": TensorSpec(torch.float32, (rows, H), low=0),
            "weight": TensorSpec(half, channels, low=0),
            "bits": TensorSpec(torch.uint8, channels, 0, MOST_BITS),
        }

    def learnt_fault(self, B: int, H: int, head_dim: int) -> str | None:
        """Check that streams have one length and that the basis is invertible."""
        fault = super().learnt_fault(B, H, head_dim)
        if fault or "bits" not in self.fitted:
            return fault
        if len({len(t) for t in self.fitted.values()}) > 1:
            return "has tensors for one row and tensors for several"
        sums = self.fitted["bits"].sum(-1)
        if not self.words(head_dim) or not bool((sums == self.words(head_dim) * WORD_BITS).all()):
            return f"has bits that do not fill whole words of {WORD_BITS}"
        if "basis" in self.fitted and bool(inverses(self._klt())[1].any()):
            return "has a basis that cannot be inverted"
        return None

    def fit(self, x: Tensor, gradient: Tensor | None = None) -> Self:
        """Fit on x float32 [B, H, T, D], each batch row separately.

        gradient: of the loss with respect to x, with the shape of x.

        Fits:

        - `mean` float16 [B, H, D]; centred keys have it already.
        - `basis` uint8 [B, H, 3·D²/4] and `channels` float16 [B, H, D], see `kernels/basis.py`.
        - `scale`, `weight` float16 [B, H, D].
        - `importance` float32 [B, H], the value of weight 1.
        - `bits` uint8 [B, H, D].
        """
        return self.fit_moments(Moments.of(x, gradient, self.side == "keys"))

    def fit_moments(self, moments: Moments) -> Self:
        """Fit on sums over vectors, without the vectors; see `fit`."""
        return self.fit_all([(self, moments)])[0]

    @classmethod
    def fit_all(cls, parts: Sequence[tuple[Self, Moments]]) -> list[Self]:
        """Fit several codecs, those with the same options but the side in one call. See `fit_moments`."""
        first = parts[0][0]
        forms = [codec._forms(moments) for codec, moments in parts]
        kinds = {
            (dataclasses.replace(codec, side=first.side), moments.vectors, *(form.shape for form in of))
            for (codec, moments), of in zip(parts, forms, strict=True)
        }
        if len(kinds) > 1:
            fits = (codec._fitted(moments.vectors, *of) for (codec, moments), of in zip(parts, forms, strict=True))
            return [dataclasses.replace(codec, fitted=fitted) for (codec, _), fitted in zip(parts, fits, strict=True)]
        fitted = first._fitted(parts[0][1].vectors, *(concatenated(of, 1) for of in zip(*forms, strict=True)))
        each = zip(*(t.chunk(len(parts), 1) for t in fitted.values()), strict=True)
        return [
            dataclasses.replace(codec, fitted={name: t.clone() for name, t in zip(fitted, own, strict=True)})
            for (codec, _), own in zip(parts, each, strict=True)
        ]

    def _forms(self, moments: Moments) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean float16 [B, H, D], 0 if none is removed, `metric_of` and `Moments.covariance`."""
        mean = self.fitted.get("mean", torch.zeros_like(moments.total, dtype=torch.float16))
        if self._own_mean:
            mean = stored(moments.total / max(1, moments.vectors))
        # gradients of keys have a diagonal metric
        metric = metric_of(moments, self.metric, self.calibration, self.side == "keys" and self.calibration == "corpus")
        return mean, metric, moments.covariance(mean if self._own_mean else None)

    def _fitted(self, vectors: int, mean: Tensor, metric: Tensor, covariance: Tensor) -> dict[str, Tensor]:
        """Return the fitted tensors of heads whose vectors, of which there are so many, have these forms."""
        D = covariance.shape[-1]
        spread = covariance.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
        prior = D / (D + vectors)  # a short prompt does not span later vectors
        added = prior * spread
        if self.centre:  # vectors of a prompt of one repeated token have no variance, but later ones do
            least = LEAST_SPREAD**2 * mean.double().square().mean(-1, keepdim=True)
            added += (least - spread).clamp_min(0)
        covariance = (1 - prior) * covariance
        covariance.diagonal(dim1=-2, dim2=-1).add_(added)
        fitted = {"mean": mean} if self.centre else {}
        if self.basis in FITTED:
            fitted["basis"], fitted["channels"], variance, weight = backends.fitted_basis(covariance, metric)
        else:
            basis = self._fixed_basis(D, covariance.device).double().expand_as(covariance)
            variance, weight = within(covariance, basis), within(metric, basis)
        total, error = math.ceil(self.bits * D / WORD_BITS) * WORD_BITS, SQUARED_ERROR[self.code]
        factor = HEADROOM if self.calibration == "prompt" else 1
        return fitted | backends.fitted_components(variance, weight, falls(error), total, factor)._asdict()

    @classmethod
    def share_across_layers(cls, codecs: Sequence[Codec]) -> list[Codec]:
        """Allot the bits of calibrated codecs; of those with `allot=model` over layers and sides."""
        settled = [codec.at_rate(codec.bits) if isinstance(codec, Trellis) else codec for codec in codecs]
        ours = [(i, c) for i, c in enumerate(codecs) if isinstance(c, Trellis) and (c.allot, c.metric) == SHARING]
        if len(ours) < 2:
            return settled
        losses = [codec.losses() for _, codec in ours]
        total = int(sum(codec.bits * loss.numel() for (_, codec), loss in zip(ours, losses, strict=True))) // WORD_BITS
        error = SQUARED_ERROR[ours[0][1].code]
        shares = shared_out(losses, total, WORD_BITS, error)
        for (i, codec), loss, words in zip(ours, losses, shares, strict=True):
            own = allotted(loss, words * WORD_BITS, error)
            settled[i] = dataclasses.replace(codec, fitted=codec.fitted | {"bits": own})
        return settled

    def at_rate(self, bits: float) -> Self:
        """Return the codec with these mean bits in each head."""
        if "scale" not in self.fitted:
            return dataclasses.replace(self, bits=bits)
        total = math.ceil(bits * self.fitted["scale"].shape[-1] / WORD_BITS) * WORD_BITS
        own = allotted(self.losses(), total, SQUARED_ERROR[self.code])
        return dataclasses.replace(self, bits=bits, fitted=self.fitted | {"bits": own})

    def losses(self) -> Tensor:
        """Return the loss per unit of squared error of each coded component, float64 [B, H, D]."""
        weight = self.fitted["weight"].double() * self.fitted["importance"].double().unsqueeze(-1)
        return weight * self.fitted["scale"].double().square()

    def _fixed_basis(self, D: int, device: torch.device) -> Tensor:
        if self.basis == "channels":
            return torch.eye(D, device=device)
        return random_rotation(D, self.seed, "qr", str(device))

    def encode(self, x: Tensor) -> PackedTensors:
        """Encode x float32 [B, H, N·t, D] as packed tensors."""
        return self.encode_all([(self, slice(0, x.shape[1]), x)])[0]

    @classmethod
    def encode_all(cls, parts: Sequence[tuple[Self, slice, Tensor]]) -> list[PackedTensors]:
        """Encode tokens of some heads of several codecs in one search."""
        return searched(parts)

    def differs_in_bits(self, other: Codec) -> bool:
        """Return True if the other codec has the same memory fitted, but for the bits, as after `at_rate`."""
        if not isinstance(other, Trellis) or dataclasses.replace(self, bits=other.bits) != other:
            return False
        own, its = ({name: t for name, t in of.fitted.items() if name != "bits"} for of in (self, other))
        return own.keys() == its.keys() and all(t.is_set_to(its[name]) for name, t in own.items())

    def searched_by(self, like: ByHead | None = None) -> ByHead:
        """Return what a search needs of each head. like: that of a codec which differs in its bits."""
        bits, many = self.fitted["bits"], self.bits >= MANY_BITS
        error = searched_error(self.code).to(bits.device, non_blocking=True)
        if like is not None:
            return like._replace(bits=bits, enough=ENOUGH[many] * (like.weight * error[bits.int()]).sum(-1))
        own = *(self.fitted[name] for name in ("scale", "weight", "bits")), error
        if self.basis in FITTED:
            found = backends.search_arguments(self.fitted["basis"], self.fitted["channels"], *own)
        else:
            found = in_units(self._inverse(), *own)
        shift = self.fitted["mean"].float() if self._own_mean else torch.zeros_like(found.weight)
        return ByHead(shift, found.matrix, found.weight, bits, ENOUGH[many] * found.expected)

    def check_gain(self, length: Tensor) -> None:
        """Raise UserError if a vector is too long for the largest gain."""
        gain = float(length.amax()) if length.numel() else 0.0
        if gain > largest_gain():
            advice = "calibrate on text like this one, or use a method without fitting, such as turboquant"
            times = HEADROOM if self.calibration == "prompt" else 1
            raise UserError(MOST_GAIN.format(times * gain, times * largest_gain(), advice))

    def _inverse(self) -> Tensor:
        """Return the inverse of the rows of a basis that is not fitted, float32 [1 or B, H, D, D]."""
        scale = self.fitted["scale"]
        return self._fixed_basis(scale.shape[-1], scale.device).T.expand(*scale.shape, -1)

    def _klt(self) -> Tensor:
        """Return the fitted basis, float64 [1 or B, H, D, D]."""
        return unpacked_basis(self.fitted["basis"], self.fitted["channels"])

    def entries(self, device: str) -> Tensor:
        """Return the codebooks of all bit widths, float32 [9, 256]."""
        return trellis_entries(device) if self.code == "trellis" else scalar_entries(device)

    def view(self, planes: PackedTensors, head_dim: int) -> View:
        """Return the view of streams with the basis and the mean."""
        device = planes["stream"].device
        view: View = TrellisView(planes, self.fitted["bits"], self.fitted["scale"], self.entries(str(device)))
        if self.basis in FITTED:
            view = InBasis(view, self.fitted["basis"], self.fitted["channels"])
        elif self.basis == "rotation":
            view = Rotated(view, self._fixed_basis(head_dim, device))
        return Biased(view, self.fitted["mean"]) if self._own_mean else view

    def select(self, rows: Tensor) -> Self:
        """Return the codec for these batch rows. Tensors from a corpus are shared by all rows."""
        if all(len(t) == 1 for t in self.fitted.values()):
            return self
        return super().select(rows)

    def table_bytes(self, head_dim: int) -> TableBytes:
        """Return the bytes of codebooks, means, scales, weights, bits and the basis."""
        shared = {f"{self.code} tables": 4 * (MOST_BITS + 1) * STATES}
        if self.basis == "rotation":
            shared[f"rotation qr {head_dim} {self.seed}"] = 4 * head_dim**2
        per_head = 4 + head_dim * (5 + 2 * self.centre)
        per_head += 3 * -(-(head_dim**2) // 4) + 2 * head_dim if self.basis in FITTED else 0
        return TableBytes(shared, per_head, of_sequence=self.fits_on != "corpus")

    def tables(self, head_dim: int) -> list[Tensor]:
        """Return the tensors counted by `table_bytes`."""
        rotation = [self._fixed_basis(head_dim, torch.device("cpu"))] if self.basis == "rotation" else []
        return [self.entries("cpu"), *rotation, *self.fitted.values()]


METHOD = Method(
    "Trellis (ours)",
    "docs/methods/trellis.md",
    for_both_sides(Trellis),
    variants=(
        {"calibration": "prompt", "bits": 1.75},
        {"calibration": "prompt", "basis": "channels", "code": "scalar"},
        {"calibration": "prompt", "basis": "rotation", "centre": False, "bits": 3.5},
    ),
)
