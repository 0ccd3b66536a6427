"""Threads of torch's operations around packing, and of our kernels.

On few numbers several threads gain nothing. On a busy machine each parallel operation of torch then waits
for a thread that has no core: eigenvectors of three 64 × 64 matrices took 232 ms with two threads beside
one other process, and 1.8 ms with one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tersekv.kernels import cpu

FEW_ELEMENTS = 1 << 20
"""Number of elements up to which torch works in one thread."""

_outer = threading.local()


def threads() -> int:
    """Return the number of threads of a kernel: that of torch outside of `one_thread`."""
    outer: int | None = getattr(_outer, "threads", None)
    return outer or torch.get_num_threads()


@contextmanager
def one_thread(elements: int) -> Iterator[None]:
    """Run torch's operations of a block on few elements in the calling thread. Our kernels keep their threads.

    `torch.set_num_threads` would also change the number of threads that start meanwhile. The extension sets that of
    the calling thread alone. Where it is not built, torch keeps its threads.
    """
    before = torch.get_num_threads()
    if elements > FEW_ELEMENTS or before == 1 or cpu.why_not_built() is not None:
        yield
        return
    native = cpu.loaded()
    _outer.threads, mkl = before, native.mkl_threads()
    try:
        native.set_torch_threads(1, 1)
        yield
    finally:
        native.set_torch_threads(before, mkl)
        _outer.threads = None
