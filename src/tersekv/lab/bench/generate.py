"""Measure a model's decoding speed with each cache in one run.

The caches are transformers' own, its quantised ones, and packed ones. Each cache prefills the
prompt itself, whole or in chunks; then greedy decoding steps are timed, and the reading of a second
turn of `TURN` tokens. In each round a cache is
also timed after the first `BASELINE` tokens of the prompt. The difference of the two times is the
cost that the context adds to a step. Caches take turns in every round, so that a slow phase of the
machine affects all of them alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tersekv.calibration.text import pydoc_document
from tersekv.errors import UserError
from tersekv.hf.peers import PEERS, new_peer
from tersekv.hf.prefill import held_by
from tersekv.lab.bench.memory import PeakMemory
from tersekv.lab.evals.decoding import feed
from tersekv.lab.evals.reader import FULL, Reader
from tersekv.models.config import longest_context
from tersekv.tensors import type_name

WARM_UP = 3
"""Number of tokens decoded before timing starts."""

BASELINE = 16
"""Context length, in tokens, of the baseline step."""

MOST_BASELINE_STEPS = 64
"""Baseline steps that are timed at most, because each lengthens the context that it should not have."""

TURN = 512
"""Number of tokens of the second turn."""

EXECUTIONS = ("eager",)
"""Ways to run a step, as named in records."""


class Reading(NamedTuple):
    """An empty cache, and the context manager for running the model with it."""

    cache: Any
    attention: AbstractContextManager[Any]


@dataclass
class Decoding:
    """Timings of one cache at one context length. Lists have an entry per round.

    - context: tokens in the cache before the first timed step.
    - prefill_chunk: tokens per forward pass over the prompt, None if it was read whole.
    - execution: one of `EXECUTIONS`.
    - step_ms: mean time of a step. baseline_ms: the same after `BASELINE` tokens.
    - prefill_seconds: time to read and pack the prompt.
    - turn_seconds: time to read `TURN` more tokens after the steps. Empty if they exceed the model's limit.
    - times_full: speed of a step relative to transformers' own cache in the same round.
    - bytes, bits_per_element: size of the cache after the prompt, None for libraries that do not
      report it.
    - peak_bytes: growth of resident memory in the last round, prefill and second turn included.
    """

    cache: str
    dtype: str
    context: int
    prefill_chunk: int | None
    execution: str
    seed: int
    step_ms: list[float] = field(default_factory=list)
    baseline_ms: list[float] = field(default_factory=list)
    prefill_seconds: list[float] = field(default_factory=list)
    turn_seconds: list[float] = field(default_factory=list)
    times_full: list[float] = field(default_factory=list)
    bytes: int | None = None
    bits_per_element: float | None = None
    peak_bytes: int | None = None

    @property
    def adds_ms(self) -> list[float]:
        """Time that the context adds to a step, per round."""
        return [step - baseline for step, baseline in zip(self.step_ms, self.baseline_ms, strict=True)]

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed of the median step."""
        return 1e3 / statistics.median(self.step_ms)

    def document(self) -> dict[str, Any]:
        """Return the entry of records and of the program's JSON document."""
        derived = {"adds_ms": self.adds_ms, "tokens_per_second": self.tokens_per_second}
        return {"bench": "generate", "baseline_context": BASELINE, "turn": TURN, **vars(self), **derived}


def run(
    model: Any,
    tokenizer: Any,
    names: Sequence[str],
    contexts: Sequence[int],
    prefill_chunks: Sequence[int | None] = (None,),
    new_tokens: int = 32,
    rounds: int = 3,
    calibration: Path | None = None,
    execution: str = "eager",
    seed: int = 0,
    report: Callable[[str], None] = lambda _: None,
    progress: Callable[[int, int, str], None] = lambda *_: None,
) -> Iterator[Decoding]:
    """Time the caches. Yield the results of one prefill chunk and one context once all rounds are
    done.

    `full`, transformers' own cache, is always the first result.

    - tokenizer: None for a prompt of random tokens.
    - names: recipes, or names from `PEERS`.
    - contexts: lengths in tokens.
    - prefill_chunks: tokens per forward pass over the prompt, None for all of it.
    - seed: set on torch's generator before each timing.
    - report: called with one line per round.
    - progress: called with the number of timings done, their total, and a description of the next.

    Raises:
        UserError: an unknown recipe or execution, a peer that is not installed, or a context that is
            too short or too long for the model.
    """
    if execution not in EXECUTIONS:
        raise UserError(f"execution {execution!r} is not one of: {', '.join(EXECUTIONS)}")
    _check_contexts(model, contexts, new_tokens)
    caches = _caches(model, tokenizer, list(dict.fromkeys([FULL, *names])), calibration)
    dtype = type_name(model.dtype)
    done, total = 0, len(prefill_chunks) * len(contexts) * rounds * len(caches)
    for chunk in prefill_chunks:
        for context in contexts:
            ids = prompt(tokenizer, context + 1) if tokenizer else random_prompt(model, context + 1)
            ids = ids.to(model.device)
            found = {name: Decoding(name, dtype, context, chunk, execution, seed) for name in caches}
            for turn in range(rounds):
                for name, empty in caches.items():
                    progress(done, total, f"timing {name} after {context:,} tokens")
                    torch.manual_seed(seed)
                    _time(model, empty, ids, chunk, new_tokens, found[name])
                    one = found[name]
                    one.times_full.append(found[FULL].step_ms[-1] / one.step_ms[-1])
                    done += 1
                said = ", ".join(f"{name} {one.step_ms[-1]:.1f}" for name, one in found.items())
                read = "prompt read whole" if chunk is None else f"prompt in chunks of {chunk:,}"
                report(f"{dtype}, {context:,} tokens, {read}, round {turn + 1} of {rounds}, ms per token: {said}")
            yield from found.values()


def prompt(tokenizer: Any, tokens: int, offset: int = 0) -> Tensor:
    """Return exactly `tokens` token ids [1, tokens] of Python's language reference.

    offset: position of the first character.
    """
    text = pydoc_document(tokenizer, tokens + 50, offset=offset)
    return tokenizer(text, return_tensors="pt", add_special_tokens=False, verbose=False).input_ids[:, :tokens]


def random_prompt(model: Any, tokens: int) -> Tensor:
    """Return random token ids [1, tokens], the same at every call."""
    g = torch.Generator().manual_seed(0)
    return torch.randint(model.config.get_text_config().vocab_size, (1, tokens), generator=g)


def _check_contexts(model: Any, contexts: Sequence[int], new_tokens: int) -> None:
    if min(contexts) <= BASELINE:
        raise UserError(
            f"a context of {min(contexts)} tokens is too short: give more than {BASELINE}, the context of the baseline "
            "step"
        )
    limit = _limit(model)
    most = limit - WARM_UP - new_tokens
    if max(contexts) > most:
        raise UserError(
            f"a context of {max(contexts):,} and {WARM_UP + new_tokens} new tokens exceed the model's limit of "
            f"{limit:,}: give at most {max(0, most):,}"
        )


def _limit(model: Any) -> int:
    return longest_context(model.config) or 1 << 30


@torch.inference_mode()
def _time(
    model: Any, empty: Callable[[], Reading], ids: Tensor, chunk: int | None, new_tokens: int, into: Decoding
) -> None:
    """Time a cache after the first `BASELINE` tokens of ids [1, T] and after T - 1, and store both."""
    cache, attention = empty()
    with attention:
        feed(model, cache, ids[:, :BASELINE])
        steps = min(new_tokens, MOST_BASELINE_STEPS)
        into.baseline_ms.append(_decode_ms(model, cache, ids[:, BASELINE : BASELINE + 1], steps))
    del cache  # freed before memory is measured
    with PeakMemory(model.device) as peak:
        cache, attention = empty()
        with attention:
            start = _clock(model)
            for part in ids[:, :-1].split(chunk or ids.shape[1], dim=1):
                feed(model, cache, part)
            into.prefill_seconds.append(_clock(model) - start)
            if into.bytes is None and into.cache not in PEERS:
                held = held_by(cache)
                into.bytes, into.bits_per_element = held.total_bytes, held.bits_per_element
            into.step_ms.append(_decode_ms(model, cache, ids[:, -1:], new_tokens))
            if cache.get_seq_length() + TURN <= _limit(model):
                turn = ids.repeat(1, -(-TURN // ids.shape[1]))[:, :TURN]
                start = _clock(model)
                feed(model, cache, turn)
                into.turn_seconds.append(_clock(model) - start)
    into.peak_bytes = peak.peak_bytes


def _decode_ms(model: Any, cache: Any, token: Tensor, new_tokens: int) -> float:
    """Return the mean milliseconds of `new_tokens` greedy steps after `token` [1, 1]."""
    for step in range(WARM_UP + new_tokens):
        if step == WARM_UP:
            start = _clock(model)
        token = feed(model, cache, token).argmax().view(1, 1)
    return (_clock(model) - start) / new_tokens * 1e3


def _clock(model: Any) -> float:
    """Return the time in seconds after the device has finished all queued work."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()


def _caches(
    model: Any, tokenizer: Any, names: Sequence[str], calibration: Path | None
) -> dict[str, Callable[[], Reading]]:
    """Return a function per name that makes an empty cache. Recipes get their canonical names."""
    made: dict[str, Callable[[], Reading]] = {}
    for name in names:
        if name in PEERS:
            new_peer(model, name)  # raises an error if the library is not installed
            made[name] = partial(_peer, model, name)
        else:
            reader = Reader(model, tokenizer, name, calibration=calibration)
            made[reader.recipe] = partial(_packed, reader)
    return made


def _peer(model: Any, name: str) -> Reading:
    return Reading(new_peer(model, name), nullcontext())


def _packed(reader: Reader) -> Reading:
    return Reading(reader.read_context(torch.empty(1, 0, dtype=torch.long)), reader.reading())
