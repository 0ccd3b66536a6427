"""Decoding speed at several depths: transformers' own cache, its quantised ones, and packed ones, in one run.

Every cache is filled with the same prompt, packed from one exact prefill where its policy does not look at queries;
then greedy tokens are timed. Caches take turns, round after round, so that a machine that slows down slows them all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tersekv.errors import UserError
from tersekv.hf.peers import PEERS, new_peer
from tersekv.hf.prefill import Prefill, held_by
from tersekv.hf.text import pydoc_document
from tersekv.lab.bench.memory import PeakMemory
from tersekv.lab.evals.decoding import feed
from tersekv.lab.evals.reader import FULL, Reader

WARM_UP = 3
"""Tokens decoded before the clock starts."""


class Reading(NamedTuple):
    """A cache that has read a prompt, and what attention over it needs."""

    cache: Any
    attention: AbstractContextManager[Any]


@dataclass
class Decoding:
    """One cache at one depth. rates: tokens per second of each round. bytes, bits_per_element: held at that depth, None
    where a library does not say. peak_bytes: what resident memory grew by at most in the last round, from before the
    cache took keys and values that were at hand until the last token."""

    cache: str
    depth: int
    rates: list[float] = field(default_factory=list)
    bytes: int | None = None
    bits_per_element: float | None = None
    peak_bytes: int | None = None

    @property
    def tokens_per_second(self) -> float:
        """The median round."""
        return statistics.median(self.rates)

    def document(self) -> dict[str, Any]:
        """The entry of records and of the program's JSON document."""
        return {"bench": "generate", **vars(self), "tokens_per_second": self.tokens_per_second}


def run(
    model: Any,
    tokenizer: Any,
    names: Sequence[str],
    depths: Sequence[int],
    new_tokens: int = 64,
    rounds: int = 3,
    calibration: Path | None = None,
    report: Callable[[str], None] = lambda _: None,
    progress: Callable[[int, int, str], None] = lambda *_: None,
) -> Iterator[Decoding]:
    """Yields each depth's caches when all of its rounds are done; `full` is always the first of them.

    names: recipes, or `PEERS`. depths: tokens in the cache before the first one that is timed. report: called with a
    line per round. progress: called with timings done, all timings, and what comes next.

    Raises:
        UserError: an unknown recipe, a peer that is not installed, a depth that the model does not take.
    """
    caches = _caches(model, tokenizer, list(dict.fromkeys([FULL, *names])), calibration)
    most = model.config.get_text_config().max_position_embeddings
    if max(depths) + WARM_UP + new_tokens + 1 > most:
        raise UserError(
            f"depth {max(depths):,} and {WARM_UP + new_tokens} new tokens are more than the model's {most:,}: give less"
        )
    done, total = 0, len(depths) * rounds * len(caches)
    for depth in depths:
        ids = prompt(tokenizer, depth + 1)
        found = {name: Decoding(name, depth) for name in caches}
        for turn in range(rounds):
            for name, read in caches.items():
                progress(done, total, f"timing {name} after {depth:,} tokens")
                with PeakMemory() as peak:
                    _time(model, read(ids[:, :depth]), ids[:, depth:], new_tokens, found[name])
                found[name].peak_bytes = peak.peak_bytes
                done += 1
            said = ", ".join(f"{name} {decoding.rates[-1]:.2f}" for name, decoding in found.items())
            report(f"depth {depth:,}, round {turn + 1} of {rounds}, tokens/s: {said}")
        yield from found.values()


def prompt(tokenizer: Any, tokens: int, offset: int = 0) -> Tensor:
    """Exactly that many token ids [1, tokens] of Python's language reference, from a character on."""
    text = pydoc_document(tokenizer, tokens + 50, offset=offset)
    return tokenizer(text, return_tensors="pt", add_special_tokens=False, verbose=False).input_ids[:, :tokens]


@torch.inference_mode()
def _time(model: Any, reading: Reading, last: Tensor, new_tokens: int, into: Decoding) -> None:
    """Decode greedily after the token `last` [1, 1] and note the rate and, the first time, the bytes."""
    with reading.attention:
        if not into.rates and into.cache not in PEERS and into.depth:
            held = held_by(reading.cache)
            into.bytes, into.bits_per_element = held.total_bytes, held.bits_per_element
        token = last.to(model.device)
        for step in range(WARM_UP + new_tokens):
            if step == WARM_UP:
                start = time.perf_counter()
            token = feed(model, reading.cache, token).argmax().view(1, 1)
        into.rates.append(new_tokens / (time.perf_counter() - start))


def _caches(
    model: Any, tokenizer: Any, names: Sequence[str], calibration: Path | None
) -> dict[str, Callable[[Tensor], Reading]]:
    """For each name what reads ids [1, n] into a new cache; recipes by their canonical names."""
    prefill = Prefill(model)
    made: dict[str, Callable[[Tensor], Reading]] = {}
    for name in names:
        if name in PEERS:
            made[name] = _peer(model, prefill, name)
        else:
            reader = Reader(model, tokenizer, name, prefill, calibration)
            made[reader.recipe] = _packed(reader)
    return made


def _packed(reader: Reader) -> Callable[[Tensor], Reading]:
    def read(ids: Tensor) -> Reading:
        with torch.inference_mode(), reader.reading():
            cache = reader.read_context(ids.to(reader.model.device))
        return Reading(cache, reader.reading())

    return read


def _peer(model: Any, prefill: Prefill, name: str) -> Callable[[Tensor], Reading]:
    new_peer(model, name)  # says what is not installed

    def read(ids: Tensor) -> Reading:
        cache = new_peer(model, name)
        if ids.shape[1]:
            with torch.inference_mode():
                prefill.fill(cache, ids.to(model.device))
        return Reading(cache, nullcontext())

    return read
