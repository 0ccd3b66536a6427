"""Helpers for tensors that outlive a call, and checks of tensors that were read from a file.

Such tensors must not be inference tensors and must not depend on a caller's default device or
dtype.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")


def plain(fn: Callable[P, T]) -> Callable[P, T]:
    """Run `fn` outside `torch.inference_mode`, so that its tensors stay writable later, and outside `torch.autocast`,
    which would compute with fewer bits and refuses some types."""

    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        inference = torch.is_inference_mode_enabled()
        if not (inference or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
            return fn(*args, **kwargs)
        with contextlib.ExitStack() as outside:
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    outside.enter_context(torch.autocast(device, enabled=False))
            if inference:
                outside.enter_context(torch.inference_mode(False))
                outside.enter_context(torch.no_grad())
            return fn(*args, **kwargs)

    return run


def last_contiguous(x: Tensor) -> Tensor:
    """Return x, copied only if its last axis is not contiguous."""
    return x.contiguous() if x.dim() and x.stride(-1) != 1 else x


def cached_table(fn: Callable[P, T]) -> Callable[P, T]:
    """Cache a table by the function's arguments. It is built on the CPU, outside inference mode."""

    @functools.lru_cache(maxsize=64)
    @functools.wraps(fn)
    def make(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
            return fn(*args, **kwargs)

    return make  # type: ignore[return-value]


@dataclass(frozen=True)
class TensorSpec:
    """Allowed dtype, shape and range of a tensor.

    shape: per axis a length, a tuple of allowed lengths, or None for any length.
    low, high: smallest and largest allowed element. None means the limit of the dtype.
    anything: allow every element, NaN included. Otherwise NaN is never allowed, and infinity only
        if a bound is infinite.
    ascending: each element of the last axis must be larger than the one before.
    """

    dtype: torch.dtype
    shape: tuple[int | tuple[int, ...] | None, ...]
    low: float | None = None
    high: float | None = None
    anything: bool = False
    ascending: bool = False

    def __str__(self) -> str:
        axes = (
            "any" if n is None else " or ".join(map(str, dict.fromkeys(n))) if isinstance(n, tuple) else str(n)
            for n in self.shape
        )
        return f"{type_name(self.dtype)} [{', '.join(axes)}]"

    def fault(self, x: object) -> str | None:
        """Describe how `x` breaks the specification, as the end of a sentence.

        None if it does not.
        """
        if not isinstance(x, Tensor):
            return f"is not a tensor, and must be {self}"
        lengths = zip(x.shape, self.shape, strict=False)
        fits = len(x.shape) == len(self.shape) and all(
            wanted is None or n in (wanted if isinstance(wanted, tuple) else (wanted,)) for n, wanted in lengths
        )
        if x.dtype != self.dtype or not fits:
            return f"is {type_name(x.dtype)} {list(x.shape)}, and must be {self}"
        if (
            self.anything
            or x.is_meta
            or x.numel() == 0
            or (self.low is self.high is None and not x.is_floating_point())
        ):
            return None
        limits = torch.finfo(x.dtype) if x.is_floating_point() else torch.iinfo(x.dtype)
        low = limits.min if self.low is None else self.low
        high = limits.max if self.high is None else self.high
        least, most = (bound.item() for bound in x.aminmax())
        if not (low <= least and most <= high):  # also true for NaN
            return f"has elements from {least:g} to {most:g}, and must have {low:g} to {high:g}"
        if self.ascending and not bool((x.diff(dim=-1) > 0).all()):
            return "has elements that do not ascend"
        return None


def type_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without "torch.", for example float16."""
    return str(dtype).removeprefix("torch.")


def chosen_tokens(blocks: Tensor, index: Tensor, axis: int | None) -> Tensor:
    """Return blocks of the tokens `index` (int64 [B, H, n·t]) of blocks [B, H, N, …] of t tokens.

    axis: that of the tokens, counted from the fourth of `blocks`.
    """
    assert axis is not None
    tokens = blocks.movedim(3 + axis, 3)
    own = index.reshape(*index.shape, *(1,) * (tokens.dim() - 4)).expand(*index.shape, *tokens.shape[4:])
    chosen = tokens.flatten(2, 3).gather(2, own).unflatten(2, (-1, tokens.shape[3]))
    return chosen.movedim(3, 3 + axis).contiguous()


def gathered(x: Tensor, index: Tensor) -> Tensor:
    """Return tokens `index` [B, H, n] of x [B, H, T, D]."""
    return x.gather(2, index.unsqueeze(-1).expand(*index.shape, x.shape[-1]))


def joined(*parts: Tensor) -> Tensor:
    """Concatenate tensors [B, H, n, …] along the third axis. Of tensors on the device meta, only shapes."""
    if not parts[0].is_meta:
        return torch.cat(parts, dim=2)
    B, H, _, *rest = parts[0].shape  # torch would import a thousand modules for it
    return parts[0].new_empty((B, H, sum(part.shape[2] for part in parts), *rest))
