"""Methods, one per file: the file's name is its registration."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from tersekv.codecs.base import Codec, Method, Pair

__all__ = ["Codec", "Method", "Pair", "methods"]


@functools.lru_cache(maxsize=1)
def methods() -> dict[str, Method]:
    """Every method in this folder by name, sorted."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base")
    return {name: importlib.import_module(f"{__name__}.{name}").METHOD for name in names}
