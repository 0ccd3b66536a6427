"""Kernels called without the registry: what they say to a call, as a text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tersekv.kernels.registry import NotTaken


def why_not(run: Callable[..., Any], *args: Any, **options: Any) -> str | None:
    """Why a kernel does not take a call; None if it does."""
    try:
        run(*args, **options)
    except (NotTaken, NotImplementedError) as reason:
        return str(reason)
    return None
