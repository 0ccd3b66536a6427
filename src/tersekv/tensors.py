"""Tensors that outlive a call must not be inference tensors, nor follow a default device or type that a caller set."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def plain(fn: Callable[P, T]) -> Callable[P, T]:
    """Run `fn` outside `torch.inference_mode`, so that what it makes or grows can be written and used later in any
    mode."""

    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_inference_mode_enabled():
            return fn(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return fn(*args, **kwargs)

    return run


def cached_table(fn: Callable[P, T]) -> Callable[P, T]:
    """Cache a table by its arguments; it is made on the CPU, in no special mode."""

    @functools.lru_cache(maxsize=64)
    @functools.wraps(fn)
    def make(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
            return fn(*args, **kwargs)

    return make  # type: ignore[return-value]
