"""Exact tokens of a layer: attention sinks, the recent window, found tokens, and tokens of heads that fill no block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from tersekv.cache.footprint import Footprint
from tersekv.cache.pages import GROWTH, MIN_PAGE_TOKENS
from tersekv.cache.schema import Check, listed, require, tensor, whole
from tersekv.cache.segments import ExactSegment, latent_key
from tersekv.cache.slots import POSITIONS, Slots, in_front
from tersekv.cache.state import Rules, State, Stateful
from tersekv.errors import CacheError
from tersekv.kernels import backends
from tersekv.tensors import gathered, joined, plain, type_name


def capacity_for(tokens: int, usual: int, grows: bool = False) -> int:
    """Return the number of tokens to allocate for `tokens` that usually grow to `usual`.

    Few tokens double.

    grows: there may be more than `usual`, token by token. They then get spare room as a page does.
    """
    if grows and tokens > usual:
        return tokens + max(MIN_PAGE_TOKENS, tokens // GROWTH)
    return max(tokens, min(usual, max(16, 2 * tokens)))


def first_tokens(old: Tensor, new: Tensor, n: int) -> Tensor:
    """Return the first n tokens of old and new, concatenated, [B, H, ·, D]."""
    if old.shape[2] == 0:
        return new[:, :, :n]
    return joined(old[:, :, :n], new[:, :, : max(0, n - old.shape[2])])


def same_tokens(exact: ExactTokens, place: str) -> None:
    """Check that heads have one slot for each token."""
    if exact.slots is not None:
        require(len(exact.slots) == exact.tokens, f"{place}.slots.0.positions", f"must have {exact.tokens} slots")


class ExactTokens(Stateful):
    """Keys and values of a layer, or keys alone, which are appended at the end and removed at the front.

    like: tensors [B, H, ·, D] of both sides in the dtype of exact tokens.
    buffers: of each side [B, H, capacity, D], of which the first `tokens` are in use.
    usual: maximum number of tokens, except after a rollback. A policy may change it, up to
        `most_usual`.
    grows: there may be more than that, see `capacity_for`.
    part: that of a footprint in which they count.
    latent: see `LayerPlan`. Latents and rotated keys are then channels of one tensor, which attention
        reads as keys.
    slots: positions of the tokens if each head holds its own; they have these `fields`.
    written: keys that attention has copied after the last token, with their values, and the number of tokens then; or
        None. They are not tokens yet.
    """

    RULES: ClassVar[Rules] = (same_tokens,)
    PARTS: ClassVar[tuple[str, ...]] = ("slots",)
    HELD: ClassVar[tuple[str, ...]] = ("buffers", "tokens")
    MADE: ClassVar[tuple[str, ...]] = ("written",)

    def __init__(
        self,
        like: Sequence[Tensor],
        usual: int = 0,
        grows: bool = False,
        fields: Mapping[str, torch.dtype] | None = None,
        part: str = "exact window",
        latent: bool = False,
    ) -> None:
        self.buffers, self.latent = [x.new_empty((*x.shape[:2], 0, x.shape[3])) for x in like], latent
        self.usual = self.most_usual = usual
        self.grows, self.part, self.tokens = grows, part, 0
        self.written: tuple[Tensor, int] | None = None
        self.slots: Slots = None if fields is None else Slots(like[0], fields)  # type: ignore[assignment]

    @property
    def data(self) -> list[Tensor]:
        """Tokens in use, as views."""
        return [x[:, :, : self.tokens] for x in self.buffers]

    @property
    def keys(self) -> Tensor:
        """Keys in use, a view."""
        return self.buffers[0][:, :, : self.tokens]

    def segment(self, first: Tensor | int = 0) -> list[ExactSegment]:
        """Return the tokens as attention reads them, if there are any.

        first: position of the first one, or positions of all; of no meaning if heads differ.
        """
        if not (n := self.tokens):
            return []
        keys, values = self.buffers
        keys, values = keys[:, :, :n], values[:, :, :n]
        if self.latent:
            keys, values = latent_key(keys, values), keys
        return [ExactSegment(keys, values, first if self.slots is None else self.slots.positions)]

    # ------------------------------------------------------------------ growing

    def rounded(self, new: Sequence[Tensor]) -> list[Tensor]:
        """Convert new tokens to the dtype of exact ones.

        Raises:
            CacheError: they are not finite, or too large for that dtype.
        """
        return [self._rounded(x) for x in new]

    def _rounded(self, x: Tensor) -> Tensor:
        rounded = (x.detach() if x.requires_grad else x).to(self.buffers[0].dtype)
        # except on a CPU, a check at every token would synchronise with the device
        checked = x.is_cpu or (x.shape[2] > 1 and not x.is_meta)
        if checked and not backends.all_finite(rounded):
            raise CacheError(self._why_not_finite(x))
        return rounded

    def _why_not_finite(self, x: Tensor) -> str:
        if not bool(torch.isfinite(x).all()):
            return (
                "keys or values hold NaN or Inf; the model's own computation has overflowed (try bfloat16 or float32 "
                "weights)"
            )
        return (
            f"keys or values reach {float(x.abs().max()):.3g}, which {type_name(self.buffers[0].dtype)} cannot hold; "
            "use the policy option exact=bf16 or exact=fp32 (for example window:exact=bf16+kivi)"
        )

    @property
    def capacity(self) -> int:
        """Number of tokens allocated."""
        return self.buffers[0].shape[2]

    @plain
    def reserve(self, n: int) -> None:
        """Allocate room for n more tokens."""
        if self.tokens + n > self.capacity:
            self._allocate(capacity_for(self.tokens + n, self.usual, self.grows), self.data)

    def _allocate(self, capacity: int, data: Sequence[Tensor]) -> None:
        """Replace the buffers by new ones with these tokens."""
        self.tokens = data[0].shape[2]
        dims = [x.shape[3] for x in data]
        if self.latent:
            self.buffers = list(self._room(data[0], capacity, sum(dims)).split(dims, dim=-1))
        else:
            self.buffers = [self._room(x, capacity, D) for x, D in zip(data, dims, strict=True)]
        self._write(0, data)

    def _room(self, x: Tensor, capacity: int, D: int) -> Tensor:
        return self.buffers[0].new_empty((*x.shape[:2], capacity, D))

    def _write(self, at: int, data: Sequence[Tensor]) -> None:
        self.written = None
        for buffer, x in zip(self.buffers, data, strict=True):
            buffer[:, :, at : at + x.shape[2]] = x

    def append(self, new: Sequence[Tensor]) -> None:
        """Append tokens [B, H, n, D] of each side."""
        if n := new[0].shape[2]:
            self.reserve(n)
            self._write(self.tokens, new)
            self.tokens += n

    def drop_front(self, n: int) -> None:
        """Remove the n oldest tokens and move the rest to the front.

        Capacity beyond `usual` is freed.
        """
        if n == 0:
            return
        left = [x[:, :, n:] if x.is_meta else x[:, :, n:].clone() for x in self.data]
        self.tokens -= n
        if self.capacity > self.usual >= self.tokens:
            self._allocate(capacity_for(self.tokens, self.usual), left)
        else:
            self._write(0, left)

    def drop_back(self, n: int) -> None:
        """Remove the n latest tokens."""
        self.tokens -= n

    def hold(self, data: Sequence[Tensor]) -> None:
        """Replace the tokens."""
        self.buffers, self.tokens, self.written = list(data), data[0].shape[2], None

    def shrink(self, n: int = 0) -> None:
        """Keep the first n tokens, and no memory for others."""
        self._allocate(n, [x[:, :, :n] for x in self.buffers])

    # ------------------------------------------------------------------ tokens of which each head holds its own

    def add(self, new: Sequence[Tensor], positions: Tensor, fields: Mapping[str, Tensor]) -> None:
        """Append tokens [B, H, n, D] with positions [B, H, n], −1 where a head has none."""
        self.hold([joined(old, x.to(old.dtype)) for old, x in zip(self.data, new, strict=True)])
        self.slots.add({POSITIONS: positions, **fields})
        self._tidy()

    def take(self, new: Sequence[Tensor], positions: Tensor, chosen: Tensor, fields: Mapping[str, Tensor]) -> None:
        """Append those of tokens [B, H, n, D] that are in the mask chosen [B, H, n]."""
        order = in_front(chosen)
        entering = positions.masked_fill(~chosen, -1).gather(2, order)
        self.add([gathered(x, order) for x in new], entering, {name: x.gather(2, order) for name, x in fields.items()})

    def keep(self, alive: Tensor) -> None:
        """Remove all tokens except those in the mask `alive` [B, H, n]."""
        self.slots.keep(alive)
        self._tidy()

    def _tidy(self) -> None:
        """Move tokens to the front of their head and remove slots that no head uses."""
        alive = self.slots.alive
        if not bool(alive.all()):
            order = in_front(alive)
            self.hold([gathered(x, order) for x in self.data])
            self.slots.gather(order)

    # ------------------------------------------------------------------ state

    def live_state(self) -> State:
        return super().live_state() | {"data": self.data, "allocated": self.capacity, "usual": self.usual}

    def schema(self) -> dict[str, Check]:
        data = listed([tensor(x.dtype, *x.shape[:2], None, x.shape[3]) for x in self.buffers])
        return super().schema() | {"data": data, "allocated": whole(), "usual": whole(0, self.most_usual)}

    def _hold(self, state: State, place: str) -> None:
        """Restore the tokens, with no more capacity than appends could have allocated."""
        data, self.usual = state["data"], state["usual"]
        tokens = data[0].shape[2]
        require(len({x.shape[2] for x in data}) == 1, f"{place}.data", "has different numbers of keys and values")
        most = max(self.most_usual, capacity_for(tokens, self.usual, self.grows))
        self._allocate(max(tokens, min(state["allocated"], most)), data)

    def count(self, footprint: Footprint, sinks: int = 0) -> None:
        """Add the bytes held to `footprint`. `sinks` tokens per head count as sinks."""
        for x in self.buffers:
            used = x.nbytes * self.tokens // self.capacity if self.capacity else 0
            as_sinks = used * min(sinks, self.tokens) // self.tokens if self.tokens else 0
            footprint.parts["exact sinks"] += as_sinks
            footprint.parts[self.part] += used - as_sinks
            footprint.parts["slack"] += x.nbytes - used
        super().count(footprint)
