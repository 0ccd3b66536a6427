"""Clocks for functions that run on a GPU in turns, each a CUDA graph, timed by CUDA events."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from tersekv.errors import UserError
from tersekv.lab.bench.clock import Spread, spread

LEAST_ROUNDS = 20
Run = Callable[[], Any]


class Clock(Protocol):
    """A device that captures and times functions."""

    device: str
    name: str
    cache_bytes: int

    def capture(self, run: Run) -> Run:
        """Return a function that repeats `run` without launch overhead."""

    def turns(self, ways: Mapping[str, Sequence[Run]], seconds: float) -> dict[str, Spread]:
        """Time all functions in turns. Each round calls the next run of every function once."""


class CudaClock:
    """A clock that records CUDA events on the current stream."""

    device = "cuda"

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise UserError("--device cuda: this machine has no CUDA device")
        properties = torch.cuda.get_device_properties(0)
        self.name, self.cache_bytes = properties.name, properties.L2_cache_size

    def capture(self, run: Run) -> Run:
        """Capture one run in a CUDA graph, after warm-up runs on another stream that also compile."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = run()
        return functools.partial(_replay, graph, run, kept)

    def turns(self, ways: Mapping[str, Sequence[Run]], seconds: float) -> dict[str, Spread]:
        """Run rounds until `seconds` have passed, at least twenty. The first round is not counted."""
        times: dict[str, list[float]] = {name: [] for name in ways}
        rounds, spent = 0, 0.0
        while rounds < LEAST_ROUNDS + 1 or spent < seconds * 1e3:
            for name, ms in self._round(ways, rounds).items():
                spent += ms
                times[name] += [ms] if rounds else []
            rounds += 1
        return {name: spread(each) for name, each in times.items()}

    def _round(self, ways: Mapping[str, Sequence[Run]], number: int) -> dict[str, float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(ways) + 1)]
        torch.cuda._sleep(1_000_000)  # the queue fills during the sleep, so that no run waits for the host
        events[0].record()
        for event, runs in zip(events[1:], ways.values(), strict=True):
            runs[number % len(runs)]()
            event.record()
        torch.cuda.synchronize()
        return {name: events[i].elapsed_time(events[i + 1]) for i, name in enumerate(ways)}


def _replay(graph: torch.cuda.CUDAGraph, run: Run, kept: Any) -> None:
    """Replay the graph. run, kept: the captured function with its inputs, and its outputs. They are
    kept alive because the graph reads and writes their memory."""
    graph.replay()
