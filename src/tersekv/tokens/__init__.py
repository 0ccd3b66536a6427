"""Which tokens stay exact and which are coded, one policy per file: the file's name is its registration."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from tersekv.tokens.base import TokenPolicy

__all__ = ["TokenPolicy", "policies"]


@functools.lru_cache(maxsize=1)
def policies() -> dict[str, type[TokenPolicy]]:
    """Every policy in this folder by name, sorted."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base")
    return {name: importlib.import_module(f"{__name__}.{name}").POLICY for name in names}
