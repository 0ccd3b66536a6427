"""Coding methods. Each file registers one method by its name."""

from __future__ import annotations

import functools

from tersekv.codecs.base import Codec, Method, Pair, TableBytes
from tersekv.registry import modules

__all__ = ["Codec", "Method", "Pair", "TableBytes", "methods"]

registered: dict[str, Method] = {}
"""Methods that `tersekv.register_codec` added in this process."""


@functools.lru_cache(maxsize=1)
def methods() -> dict[str, Method]:
    """Return the methods of this folder and the registered ones by name, sorted."""
    found = {name: module.METHOD for name, module in modules(__name__, __path__).items()}
    return dict(sorted((found | registered).items()))
