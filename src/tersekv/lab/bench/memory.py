"""Peak resident memory of a piece of work."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

from tersekv.malloc_trim import malloc_trim


class PeakMemory:
    """Peak resident memory inside a `with`, beyond what was resident before.

    Linux keeps a high-water mark that can be set back; elsewhere only the process's own peak can be asked, which is
    right for the first use and too small later.
    """

    peak_bytes = 0
    source = ""

    def __enter__(self) -> PeakMemory:
        gc.collect()
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
