"""The keys, or the values, of a layer whose packed tokens have two rates."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from tersekv.cache import coding
from tersekv.cache.blocks import BlockBuffer
from tersekv.cache.coding import Tokens
from tersekv.cache.footprint import Footprint
from tersekv.cache.lost_variance import LostVariance
from tersekv.cache.pool import gathered
from tersekv.cache.schema import Check, of_spec, optional, record, refuse, tensor
from tersekv.cache.side import Prepared, SideStore
from tersekv.cache.state import State, own
from tersekv.codecs import Codec
from tersekv.codecs.transforms.marked_angles import MarkedAngles
from tersekv.codecs.transforms.moments import TokenLoss
from tersekv.codecs.transforms.rope import Angles
from tersekv.kernels.marks import Marks
from tersekv.layouts.base import PackedTensors, View


class Split(NamedTuple):
    """Tokens to pack at each rate, for one side.

    high, rest: int64 [B, H, n], indices among the tokens to pack, ascending.
    loss: of errors in the side's tokens, or None.
    """

    high: Tensor
    rest: Tensor
    loss: TokenLoss | None


class MixedSide(SideStore):
    """One side of the layer.

    rest: packed tokens of the lower rate.
    low: codec of the lower rate, with the same fit.
    lost_rest: lost variance of the lower rate, see `SideStore`.
    """

    PARTS: ClassVar[tuple[str, ...]] = ("packed", "tail", "rest")

    def __init__(self, codec: Codec, rest_bits: float, *arguments: Any) -> None:
        super().__init__(codec, *arguments)
        self.rest_bits = rest_bits
        self.restart()

    def restart(self) -> None:
        """Set the lower rate of the present codec, with no token in it."""
        B, H, _, D = self.sinks.shape
        self.low = self.codec.at_rate(self.rest_bits)
        self.rest = BlockBuffer(self.low.layout(D), B, H, self.sinks.device, self.packed.sizes)
        self.lost_rest: Tensor | None = None

    @property
    def packed_tokens(self) -> int:
        """Number of packed tokens of both rates."""
        return self.packed.tokens + self.rest.tokens

    def prepare(
        self,
        x: Tensor,
        sinks: int,
        own: range,
        flush: int,
        restart: bool,
        place: int = 0,
        loss: TokenLoss | Split | None = None,
        hidden: Tensor | None = None,
    ) -> Prepared:
        """Compute the changes of appending tokens, see `SideStore`. loss: a `Split` for two rates."""
        if not isinstance(loss, Split):
            return super().prepare(x, sinks, own, flush, restart, place, loss, hidden)
        # without tokens to pack, all tokens enter the tail
        made = super().prepare(x, sinks, range(0), 0, restart, place, None, hidden)
        old = self.tail.data[:, :, : 0 if restart else self.tail.tokens]
        waiting = torch.cat([old, made.enter_tail], dim=2)
        codec, low = self.codec, self.low
        if codec.needs_fit == "prompt":
            codec = self._fitted(codec, torch.cat([self.sinks, made.sinks], dim=2), waiting, place, loss.loss)
            low = codec.at_rate(self.rest_bits)
        rates = (codec, loss.high, self.lost), (low, loss.rest, self.lost_rest)
        (high, lost), (rest, lost_rest) = (self._encoded(c, waiting, at, place, hidden, of) for c, at, of in rates)
        leave = self.tail.tokens if restart else min(flush, old.shape[2])
        stay = waiting[:, :, max(flush, old.shape[2]) :]
        return Prepared(codec, made.sinks, high, leave, stay, lost, rest, lost_rest)

    def _encoded(
        self, codec: Codec, x: Tensor, index: Tensor, place: int, hidden: Tensor | None, lost: Tensor | None
    ) -> tuple[list[PackedTensors], Tensor | None]:
        """Encode the tokens `index` [B, H, n] of x [B, H, T, D], whose first one is at `place`.

        Also return their lost variance, or `lost` if it is known.
        """
        parts, sums = [], LostVariance() if self.corrected and lost is None else None
        for start, stop in coding.chunks(0, index.shape[2], self.packed.sizes.unit, x):
            at = index[:, :, start:stop]
            tokens = Tokens(gathered(x, at), self.angles_at(place + at))
            parts.append(coding.encode(codec, tokens))
            if sums is not None:
                counts = None if hidden is None else place + at >= hidden[:, None, None]
                sums.add(tokens.x, self._view(codec, parts[-1], tokens), counts)
        return parts, lost if sums is None else sums.value()

    def correction_of(self, rest: bool) -> Tensor | None:
        """Return the factors of `softmax.score_bias` for one rate, or None."""
        return self._factors_of(self.lost_rest) if rest else self.correction

    def commit(self, new: Prepared) -> None:
        """Apply prepared changes."""
        fitted = new.codec is not self.codec
        super().commit(new)
        if fitted:
            self.restart()
        if new.rest:
            self.lost_rest = new.lost_rest
            self.rest.append(*new.rest)

    def angles_at(self, positions: Tensor) -> Angles | None:
        """Return the RoPE angles at positions int [B, H, n] of the cache."""
        if self.rotary is None:
            return None
        rope, padding = self.rotary.rope, self.rotary.padding
        if rope.varies:  # the table has a row for each token
            given = self.rotary.angles(0, int(positions.max()) + 1, positions.device)
            places = (given.places + positions).to(torch.int32)
            return given._replace(places=places, tokens=positions.shape[2])
        first = 0 if padding is None else padding.to(positions)[:, None, None]
        return rope.angles_at((positions - first).clamp(min=0))

    def _angles(self, marks: Marks) -> Angles | MarkedAngles | None:
        if self.rotary is None or self.rotary.rope.varies:
            return self.angles_at(marks.positions()) if self.rotary is not None else None
        return MarkedAngles(self.rotary.rope, marks, self.rotary.padding)

    def view_of(self, rest: bool, first: int, where: Marks) -> View:
        """Return the view of packed tokens of one rate, from slot `first` on."""
        codec, buffer = (self.low, self.rest) if rest else (self.codec, self.packed)
        t = buffer.layout.block_tokens
        planes = buffer.planes(first // t, (first + where.tokens) // t)
        return coding.view(codec, planes, self.head_dim, self._angles(where))

    @staticmethod
    def _rates(low: Codec) -> dict[str, Tensor]:
        """Return the tensors that differ at the lower rate."""
        return {name: low.fitted[name] for name in low.rate_tensors if name in low.fitted}

    def _share(self, rates: dict[str, Tensor]) -> None:
        """Let both codecs share all fitted tensors but `rates`, which are of the lower rate."""
        self.low = dataclasses.replace(self.low, fitted=self.codec.fitted | rates)

    def live_state(self) -> State:
        """Return the state with the tensors that differ at the lower rate."""
        lost = {"lost_rest": self.lost_rest} if self.corrected else {}
        return super().live_state() | {"low": self._rates(self.low)} | lost

    def schema(self) -> dict[str, Check]:
        B, H, _, D = self.sinks.shape
        specs = {n: of_spec(spec) for n, spec in self.low.learns(B, H, D).items() if n in self.low.rate_tensors}
        lost = {"lost_rest": optional(tensor(torch.float32, B, H, D))} if self.corrected else {}
        return super().schema() | {"low": record(specs, may_lack=True)} | lost

    def _hold(self, state: State, place: str) -> None:
        super()._hold(state, place)
        B, H, _, D = self.sinks.shape
        self._share(own(state["low"]))
        self.lost_rest = own(state.get("lost_rest"))
        if fault := self.low.learnt_fault(B, H, D):
            refuse(f"{place}.low", fault)
        self.rest = BlockBuffer(self.low.layout(D), B, H, self.sinks.device, self.packed.sizes)

    def to(self, device: torch.device | str) -> None:
        """Move everything to a device."""
        super().to(device)
        self.rest.to(device)
        self._share(self._rates(self.low.to(device)))
        self.lost_rest = None if self.lost_rest is None else self.lost_rest.to(device)

    def select(self, rows: Tensor) -> None:
        """Keep these batch rows."""
        super().select(rows)
        self.rest.select(rows)
        self._share(self._rates(self.low.select(rows)))
        self.lost_rest = None if self.lost_rest is None else self.lost_rest.index_select(0, rows)

    def tables(self) -> list[Tensor]:
        """Return the tensors that decoding and attention need next to the packed ones."""
        lost = [] if self.lost_rest is None else [self.lost_rest]
        return [*super().tables(), *(self.low.tables(self.head_dim) if self.rest.tokens else []), *lost]

    def count(self, footprint: Footprint) -> None:
        """Add the bytes held to `footprint`, without tables."""
        super().count(footprint)
        self.rest.count(footprint)
