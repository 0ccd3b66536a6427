"""Clocks for functions that run in turns, and a probe of the memory read bandwidth."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

LEAST_ROUNDS = 5
PROBE_BYTES = 128 << 20


class Spread(NamedTuple):
    """Median, 10th and 90th percentile of `runs` times in milliseconds."""

    ms: float
    p10: float
    p90: float
    runs: int


def take_turns(ways: Mapping[str, Callable[[int], Any]], seconds: float) -> dict[str, Spread]:
    """Time all functions in turns, one after the other in every round.

    In this way a busy machine slows all of them alike, and none finds its data in a cache. Each
    function receives the round's number. A function stops when it has used its share of `seconds`,
    after at least five rounds.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    for run in ways.values():
        run(0)
    number, share = 0, 1e3 * seconds / len(ways)
    while going := [name for name, spent in times.items() if len(spent) < LEAST_ROUNDS or sum(spent) < share]:
        number += 1
        for name in going:
            start = time.perf_counter()
            ways[name](number)
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: spread(spent) for name, spent in times.items()}


def spread(times: list[float]) -> Spread:
    """Return the percentiles of times in milliseconds."""
    ordered, n = sorted(times), len(times)
    return Spread(ordered[n // 2], ordered[n // 10], ordered[n * 9 // 10], n)


def read_bandwidth(threads: int, seconds: float = 1.0) -> float:
    """Return the bandwidth in GB/s with which `threads` threads read memory.

    The probe is memcmp over two equal halves that are too large for the caches.
    """
    compare = ctypes.CDLL(None).memcmp
    compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    # Ones, because pages that were never written all map to one page of zeros.
    halves = [[torch.ones(PROBE_BYTES // 2 // threads, dtype=torch.uint8) for _ in range(2)] for _ in range(threads)]

    def read(pair: list[torch.Tensor]) -> None:
        compare(pair[0].data_ptr(), pair[1].data_ptr(), pair[0].numel())

    with ThreadPoolExecutor(threads) as pool:
        measured = take_turns({"read": lambda _: list(pool.map(read, halves))}, seconds)["read"]
    return PROBE_BYTES / measured.ms / 1e6
