"""A kernel without memory raises MemoryError, and the process continues."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tersekv.kernels import cpu

pytestmark = pytest.mark.skipif(cpu.why_not_built() is not None, reason=cpu.why_not_built() or "")

CODE = """
import resource, sys, torch
from tersekv.kernels.cpu import encode as native
from tersekv.codecs.codebooks.trellis import trellis_entries

threads, D = int(sys.argv[1]), 1 << 16
torch.set_num_threads(threads)
y, weight, bits = torch.zeros(1, 64, D), torch.ones(1, D), torch.full((1, D), 2, dtype=torch.uint8)
tables = trellis_entries("cpu")
small = [x[..., :32].contiguous() for x in (y, weight, bits)]
native.encode_trellis(*small, tables)  # its threads are there
pages = int(open("/proc/self/statm").read().split()[0])
room = 5 << 20  # for the result of 4 MB, not for the 4.5 MB of working memory of each thread
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room, resource.RLIM_INFINITY))
try:
    native.encode_trellis(y, weight, bits, tables)
    print("enough")
except MemoryError:
    print("MemoryError")
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(native.encode_trellis(*small, tables).shape)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's memory limits")
@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer itself needs memory then")
@pytest.mark.parametrize("threads", [1, 3])
def test_no_memory_for_a_kernel(threads):
    ran = subprocess.run([sys.executable, "-c", CODE, str(threads)], capture_output=True, text=True, timeout=120)
    assert ran.stdout.splitlines() == ["MemoryError", "torch.Size([1, 64, 32])"], ran.stderr
