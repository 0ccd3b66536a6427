"""Measure the peak memory of a block of code: resident memory, or a GPU's."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch

from tersekv.malloc_trim import malloc_trim


class PeakMemory:
    """Context manager that measures peak resident memory above the level at its start.

    On a CUDA device it is the memory of torch's tensors there. Linux keeps a high-water mark that
    can be reset. Elsewhere only the process's own peak is available: it is correct for the first
    use, and later uses may report too little.
    """

    peak_bytes = 0
    source = ""

    def __init__(self, device: torch.device | None = None) -> None:
        self._gpu = device if device is not None and device.type == "cuda" else None

    def __enter__(self) -> PeakMemory:
        gc.collect()
        if self._gpu is not None:
            torch.cuda.reset_peak_memory_stats(self._gpu)
            self._before, self.source = torch.cuda.memory_allocated(self._gpu), "max_memory_allocated of torch.cuda"
            return self
        malloc_trim()
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self._before = _status_bytes("VmRSS")
            self.source = "VmHWM of /proc/self/status"
        except OSError:
            self._before = _process_peak()
            self.source = "ru_maxrss of getrusage"
        return self

    def __exit__(self, *_: object) -> None:
        if self._gpu is not None:
            after = torch.cuda.max_memory_allocated(self._gpu)
        else:
            after = _status_bytes("VmHWM") if self.source.startswith("VmHWM") else _process_peak()
        self.peak_bytes = max(0, after - self._before)


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}")


def _process_peak() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
