"""Decoding speed of a model with each cache: transformers' own, its quantised ones, and packed ones, in one run.

Every cache reads the prompt itself, whole or in chunks, then greedy tokens are timed. In each round a cache is also
timed after the first `BASELINE` tokens of the prompt: the difference of the two is what the context adds to a step.
Caches take turns, round after round, so that a machine that slows down slows them all.
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

from tersekv.errors import UserError
from tersekv.hf.peers import PEERS, new_peer
from tersekv.hf.prefill import held_by
from tersekv.hf.text import pydoc_document
from tersekv.lab.bench.memory import PeakMemory
from tersekv.lab.evals.decoding import feed
from tersekv.lab.evals.reader import FULL, Reader

WARM_UP = 3
"""Tokens decoded before the clock starts."""

BASELINE = 16
"""Tokens of context of the step that every other one is compared with."""

EXECUTIONS = ("eager",)
"""Ways to run a step; records name theirs."""


class Reading(NamedTuple):
    """An empty cache, and the context manager in which the model reads and decodes with it."""

    cache: Any
    attention: AbstractContextManager[Any]


@dataclass
class Decoding:
    """One cache after one length of context; lists have an entry per round.

    context: tokens in the cache before the first step that is timed. prefill_chunk: tokens of a forward pass over the
    prompt, None if it was read whole. execution: one of `EXECUTIONS`. step_ms: mean time of a step; baseline_ms: the
    same after `BASELINE` tokens. prefill_seconds: reading and packing the prompt. times_full: how many times as fast a
    step was as with transformers' own cache in the same round. bytes, bits_per_element: held after the prompt, None
    where a library does not say. peak_bytes: growth of resident memory in the last round, reading the prompt included.
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
    times_full: list[float] = field(default_factory=list)
    bytes: int | None = None
    bits_per_element: float | None = None
    peak_bytes: int | None = None

    @property
    def adds_ms(self) -> list[float]:
        """What the context adds to a step, per round."""
        return [step - baseline for step, baseline in zip(self.step_ms, self.baseline_ms, strict=True)]

    @property
    def tokens_per_second(self) -> float:
        """Of the median step."""
        return 1e3 / statistics.median(self.step_ms)

    def document(self) -> dict[str, Any]:
        """The entry of records and of the program's JSON document."""
        derived = {"adds_ms": self.adds_ms, "tokens_per_second": self.tokens_per_second}
        return {"bench": "generate", "baseline_context": BASELINE, **vars(self), **derived}


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
    """Yields the caches of each way to read the prompt and each context when all rounds are done; `full`,
    transformers' own cache, is always the first of them.

    names: recipes, or `PEERS`. contexts: lengths in tokens. prefill_chunks: tokens of a forward pass over the prompt,
    None for all of it. seed: of torch's generator, set before each timing. report: called with a line per round.
    progress: called with timings done, all timings, and what comes next.

    Raises:
        UserError: an unknown recipe, a peer that is not installed, a context that is too short or too long for the
            model, an execution that is not known.
    """
    if execution not in EXECUTIONS:
        raise UserError(f"execution {execution!r} is not one of: {', '.join(EXECUTIONS)}")
    _check_contexts(model, contexts, new_tokens)
    caches = _caches(model, tokenizer, list(dict.fromkeys([FULL, *names])), calibration)
    dtype = str(model.dtype).removeprefix("torch.")
    done, total = 0, len(prefill_chunks) * len(contexts) * rounds * len(caches)
    for chunk in prefill_chunks:
        for context in contexts:
            ids = prompt(tokenizer, context + 1).to(model.device)
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
    """Exactly that many token ids [1, tokens] of Python's language reference, from a character on."""
    text = pydoc_document(tokenizer, tokens + 50, offset=offset)
    return tokenizer(text, return_tensors="pt", add_special_tokens=False, verbose=False).input_ids[:, :tokens]


def _check_contexts(model: Any, contexts: Sequence[int], new_tokens: int) -> None:
    if min(contexts) <= BASELINE:
        raise UserError(
            f"a context of {min(contexts)} tokens is too short: give more than {BASELINE}, the context that steps are "
            "compared with"
        )
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
    most = limit - WARM_UP - new_tokens
    if max(contexts) > most:
        raise UserError(
            f"a context of {max(contexts):,} and {WARM_UP + new_tokens} new tokens are more than the model's "
            f"{limit:,}: give at most {max(0, most):,}"
        )


@torch.inference_mode()
def _time(
    model: Any, empty: Callable[[], Reading], ids: Tensor, chunk: int | None, new_tokens: int, into: Decoding
) -> None:
    """Time a cache after the first tokens of ids [1, T] and after T - 1 of them, and note a round's figures."""
    cache, attention = empty()
    with attention:
        feed(model, cache, ids[:, :BASELINE])
        into.baseline_ms.append(_decode_ms(model, cache, ids[:, BASELINE : BASELINE + 1], new_tokens))
    del cache  # before memory is looked at
    with PeakMemory() as peak:
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
    into.peak_bytes = peak.peak_bytes


def _decode_ms(model: Any, cache: Any, token: Tensor, new_tokens: int) -> float:
    """Milliseconds of a step, the mean of `new_tokens` greedy ones after the token [1, 1]."""
    for step in range(WARM_UP + new_tokens):
        if step == WARM_UP:
            start = _clock(model)
        token = feed(model, cache, token).argmax().view(1, 1)
    return (_clock(model) - start) / new_tokens * 1e3


def _clock(model: Any) -> float:
    """Seconds, once the device has done all that it was given."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()


def _caches(
    model: Any, tokenizer: Any, names: Sequence[str], calibration: Path | None
) -> dict[str, Callable[[], Reading]]:
    """For each name a function that makes an empty cache; recipes by their canonical names."""
    made: dict[str, Callable[[], Reading]] = {}
    for name in names:
        if name in PEERS:
            new_peer(model, name)  # raises the error of a library that is not installed
            made[name] = partial(_peer, model, name)
        else:
            reader = Reader(model, tokenizer, name, calibration=calibration)
            made[reader.recipe] = partial(_packed, reader)
    return made


def _peer(model: Any, name: str) -> Reading:
    return Reading(new_peer(model, name), nullcontext())


def _packed(reader: Reader) -> Reading:
    return Reading(reader.read_context(torch.empty(1, 0, dtype=torch.long)), reader.reading())
