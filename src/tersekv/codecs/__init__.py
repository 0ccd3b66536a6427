"""Coding methods. Each file registers one method by its name."""

from __future__ import annotations

import functools

from tersekv.codecs.base import Codec, Method, Pair
from tersekv.registry import modules

__all__ = ["Codec", "Method", "Pair", "methods"]


@functools.lru_cache(maxsize=1)
def methods() -> dict[str, Method]:
    """Return the methods of this folder by name, sorted."""
    return {name: module.METHOD for name, module in modules(__name__, __path__).items()}
