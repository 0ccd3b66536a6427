"""Clocks for things that run on a GPU in turns: a CUDA graph of each, and events between them."""

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
    """A machine that times."""

    device: str
    name: str
    cache_bytes: int

    def capture(self, run: Run) -> Run:
        """`run` as something that costs nothing to launch."""

    def turns(self, ways: Mapping[str, Sequence[Run]], seconds: float) -> dict[str, Spread]:
        """Times of all ways, one after the other in every round; a way's runs take turns."""


class CudaClock:
    """Events on the current stream."""

    device = "cuda"

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise UserError("--device cuda: there is no CUDA device here")
        properties = torch.cuda.get_device_properties(0)
        self.name, self.cache_bytes = properties.name, properties.L2_cache_size

    def capture(self, run: Run) -> Run:
        """A graph of one run, after a few that compile and warm up on another stream."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = run()
        return functools.partial(_replay, graph, kept)

    def turns(self, ways: Mapping[str, Sequence[Run]], seconds: float) -> dict[str, Spread]:
        """Rounds until `seconds` have passed, twenty at least; the first one is not counted."""
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
        torch.cuda._sleep(1_000_000)  # the queue fills meanwhile, so that no run waits for the host
        events[0].record()
        for event, runs in zip(events[1:], ways.values(), strict=True):
            runs[number % len(runs)]()
            event.record()
        torch.cuda.synchronize()
        return {name: events[i].elapsed_time(events[i + 1]) for i, name in enumerate(ways)}


def _replay(graph: torch.cuda.CUDAGraph, kept: Any) -> None:
    """kept: outputs of the graph, whose memory it writes."""
    graph.replay()
