"""Freed memory that the allocator keeps."""

from __future__ import annotations

import contextlib
import ctypes


def malloc_trim() -> None:
    """Hand what glibc keeps of freed memory back to the system; elsewhere nothing.

    Once a tensor of some megabytes was freed, glibc takes others of its size from its heap, where what is freed stays
    resident: as much again as a packed cache holds, after a prompt's exact keys and values are gone.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
