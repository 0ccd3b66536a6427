"""Which tokens stay exact and which are coded, one policy per file: the file's name is its registration."""

from __future__ import annotations

import functools

from tersekv.policies.base import TokenPolicy
from tersekv.registry import modules

__all__ = ["TokenPolicy", "policies"]


@functools.lru_cache(maxsize=1)
def policies() -> dict[str, type[TokenPolicy]]:
    """Every policy in this folder by name, sorted."""
    return {name: module.POLICY for name, module in modules(__name__, __path__).items()}
