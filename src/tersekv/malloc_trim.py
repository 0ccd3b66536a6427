"""Return freed memory from the allocator to the system."""

from __future__ import annotations

import contextlib
import ctypes


def malloc_trim() -> None:
    """Return freed heap memory to the system with glibc's `malloc_trim`; elsewhere do nothing.

    After tensors of some megabytes are freed, glibc keeps their pages resident for later
    allocations. After a prompt's exact keys and values are freed, these pages can take as much
    memory as the packed cache.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
