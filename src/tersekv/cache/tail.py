"""The recent window of one side: its latest tokens, as floats. The code calls it the tail."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tersekv.cache.footprint import Footprint
from tersekv.cache.pages import GROWTH, MIN_PAGE_TOKENS
from tersekv.cache.schema import Check, tensor, whole
from tersekv.cache.state import State, Stateful
from tersekv.errors import CacheError
from tersekv.tensors import joined, type_name


def tail_capacity(tokens: int, usual: int, grows: bool = False) -> int:
    """Return the number of tokens to allocate for `tokens` that usually grow to `usual`.

    Short tails double.

    grows: tails may grow beyond `usual` token by token. They then get spare room as a page does.
    """
    if grows and tokens > usual:
        return tokens + max(MIN_PAGE_TOKENS, tokens // GROWTH)
    return max(tokens, min(usual, max(16, 2 * tokens)))


def capacity_after_drop(tokens: int, capacity: int, usual: int) -> int:
    """Return the number of tokens allocated after old ones left.

    Capacity beyond `usual` is freed.
    """
    return tail_capacity(tokens, usual) if capacity > usual >= tokens else capacity


def first_tokens(old: Tensor, new: Tensor, n: int) -> Tensor:
    """Return the first n tokens of old and new, concatenated, [B, H, ·, D]."""
    if old.shape[2] == 0:
        return new[:, :, :n]
    return joined(old[:, :, :n], new[:, :, : max(0, n - old.shape[2])])


class TailBuffer(Stateful):
    """Exact tokens [B, H, capacity, D], appended at the end and removed at the front.

    usual: maximum number of tokens, except after a rollback. A policy may change it, up to
        `most_usual`.
    grows: the tail may grow beyond that, see `tail_capacity`.
    """

    grows = False

    def __init__(
        self,
        B: int,
        H: int,
        D: int,
        dtype: torch.dtype,
        device: torch.device,
        usual: int,
        most_usual: int | None = None,
    ) -> None:
        self._data = torch.empty((B, H, 0, D), dtype=dtype, device=device)
        self.usual, self.most_usual = usual, usual if most_usual is None else most_usual
        self.tokens = 0

    @property
    def data(self) -> Tensor:
        """Tokens in use, a view."""
        return self._data[:, :, : self.tokens]

    def rounded(self, x: Tensor) -> Tensor:
        """Convert new tokens to the dtype of exact ones.

        Raises:
            CacheError: they are not finite, or too large for that dtype.
        """
        rounded = (x.detach() if x.requires_grad else x).to(self._data.dtype)
        # except on a CPU, a check at every token would synchronise with the device
        checked = x.is_cpu or (x.shape[2] > 1 and not x.is_meta)
        # the sum is cheap, and finite for ordinary tokens; the exact test runs only if it is not
        if checked and not math.isfinite(rounded.sum(dtype=torch.float32).item()) and not rounded.isfinite().all():
            raise CacheError(self._why_not_finite(x))
        return rounded

    def _why_not_finite(self, x: Tensor) -> str:
        if not bool(torch.isfinite(x).all()):
            return (
                "keys or values hold NaN or Inf; the model's own computation has overflowed (try bfloat16 or float32 "
                "weights)"
            )
        return (
            f"keys or values reach {float(x.abs().max()):.3g}, which {type_name(self._data.dtype)} cannot hold; use "
            "the policy option exact=bf16 or exact=fp32 (for example window:exact=bf16+kivi)"
        )

    @property
    def capacity(self) -> int:
        """Number of tokens allocated."""
        return self._data.shape[2]

    def reserve(self, n: int) -> None:
        """Allocate room for n more tokens."""
        if self.tokens + n > self._data.shape[2]:
            capacity = tail_capacity(self.tokens + n, self.usual, self.grows)
            grown = self._data.new_empty((*self._data.shape[:2], capacity, self._data.shape[3]))
            grown[:, :, : self.tokens] = self.data
            self._data = grown

    def append(self, x: Tensor) -> None:
        """Append tokens [B, H, n, D]."""
        n = x.shape[2]
        if n:
            self.reserve(n)
            self._data[:, :, self.tokens : self.tokens + n] = x
            self.tokens += n

    def drop_front(self, n: int) -> None:
        """Remove the n oldest tokens and move the rest to the front.

        Capacity beyond `usual` is freed.
        """
        if n == 0:
            return
        left = self.data[:, :, n:]
        left = left if left.is_meta else left.clone()
        self.tokens -= n
        capacity = capacity_after_drop(self.tokens, self._data.shape[2], self.usual)
        if capacity != self._data.shape[2]:
            self._data = self._data.new_empty((*self._data.shape[:2], capacity, self._data.shape[3]))
        self._data[:, :, : self.tokens] = left

    def restart(self) -> None:
        """Remove all tokens, and free their memory. Nothing is known of the usual number yet."""
        self.tokens, self.usual = 0, 0
        self._data = self._data[:, :, :0].clone()

    def drop_back(self, n: int) -> None:
        """Remove the n latest tokens."""
        self.tokens -= n

    def live_state(self) -> State:
        return {"data": self.data, "allocated": self._data.shape[2], "usual": self.usual}

    def schema(self) -> dict[str, Check]:
        B, H, _, D = self._data.shape
        data = tensor(self._data.dtype, B, H, None, D)
        return {"data": data, "allocated": whole(), "usual": whole(0, self.most_usual)}

    def _hold(self, state: State, place: str) -> None:
        """Restore the tokens, with no more capacity than appends could have allocated."""
        data = state["data"]
        self.tokens, self.usual = data.shape[2], state["usual"]
        most = max(self.most_usual, tail_capacity(self.tokens, self.usual, self.grows))
        capacity = max(self.tokens, min(state["allocated"], most))
        self._data = self._data.new_empty((*data.shape[:2], capacity, data.shape[3]))
        self._data[:, :, : self.tokens] = data

    def to(self, device: torch.device | str) -> None:
        """Move the buffer to a device."""
        self._data = self._data.to(device)

    def select(self, rows: Tensor) -> None:
        """Keep these batch rows."""
        self._data = self._data.index_select(0, rows)

    def count(self, footprint: Footprint) -> None:
        """Add the allocated bytes to `footprint`."""
        allocated = self._data.numel() * self._data.element_size()
        used = allocated * self.tokens // self._data.shape[2] if self._data.shape[2] else 0
        footprint.parts["exact window"] += used
        footprint.parts["slack"] += allocated - used
