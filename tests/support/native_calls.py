"""Call kernels without the registry and return their refusals as text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tersekv.kernels.registry import NotTaken

ROUNDING_ISAS = ("amx", "avx512vnni", "avx512bf16")
"""Instruction sets that multiply some numbers in bfloat16 or in integers."""


def why_not(run: Callable[..., Any], *args: Any, **options: Any) -> str | None:
    """Return the reason why a kernel refuses a call, or None if it accepts it."""
    try:
        run(*args, **options)
    except (NotTaken, NotImplementedError) as reason:
        return str(reason)
    return None
