"""Token policies: which tokens stay exact, are packed or evicted. Each file is one policy."""

from __future__ import annotations

import functools

from tersekv.policies.base import TokenPolicy
from tersekv.registry import modules

__all__ = ["TokenPolicy", "policies"]


@functools.lru_cache(maxsize=1)
def policies() -> dict[str, type[TokenPolicy]]:
    """Return the policy classes of this folder by name, sorted."""
    return {name: module.POLICY for name, module in modules(__name__, __path__).items()}
