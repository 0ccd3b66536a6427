"""Memory of kernels: without it they raise MemoryError, and what earlier calls left in it is not read."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest
import torch

from tersekv.kernels import cpu
from tersekv.kernels.cpu import attend as native
from tersekv.kernels.cpu.fit import observed_loss

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


def resident() -> int:
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")
@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer keeps freed memory")
def test_working_memory_is_that_of_the_longest_prompt():
    """Not that of all prompts: the calls together take 150 MB, and the largest one 4."""
    before = 0
    for tokens in range(4096, 65537, 1024):
        x = torch.zeros(1, 2, tokens, 16)
        seen, counts = torch.ones(1, 16, 1, dtype=torch.bool), torch.ones(1, tokens)
        observed_loss(torch.zeros(1, 2, 32, 16), x, x, seen, counts, 0.1, None, None)
        before = before or resident()
    assert resident() - before < 75e6


@pytest.mark.parametrize("q", [1, 40])
def test_memory_of_earlier_calls_is_not_read(q):
    """Rows that see no token, no tokens at all, and results that are merged, after calls that left NaNs."""
    torch.manual_seed(0)
    query, keys, values = torch.randn(1, 4, q, 24).bfloat16(), *torch.randn(2, 1, 2, 96, 24).bfloat16()
    seen = torch.rand(1, q, 96) < 0.5
    seen[:, q // 2] = False
    calls = [((keys, values, 0),), ((keys, values, seen),), ((keys[:, :, :0], values[:, :, :0], 0),)]
    calls += [((keys, values, 0), (keys.neg(), values, seen))]
    for exact in calls:
        expected = native.attend(query, exact, None, None, None, 0.2)
        for factor in (torch.nan, torch.inf):
            native.attend(query * factor, ((keys * factor, values * factor, 0),), None, None, None, 0.2)
        assert torch.equal(native.attend(query, exact, None, None, None, 0.2), expected)
