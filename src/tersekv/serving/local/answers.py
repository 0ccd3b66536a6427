"""Generate one answer with a packed cache: streamed, ended by stop strings, and stopped on demand."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tersekv.errors import CacheError
from tersekv.hf.cache import CompressedCache
from tersekv.versions import cache_argument

Write = Callable[[str], None]
UNFINISHED = "\ufffd"
"""A tokenizer writes it in place of a character of which some bytes are missing yet."""


DECODED_BEFORE = 5
"""Most ids of a prompt that an answer which continues it is decoded after."""


class Stopped(Exception):  # noqa: N818  # not an error: the answer is no longer wanted
    """Raised between two layers or tokens once an answer's `Stop` is set. ids: new tokens until then."""

    def __init__(self, ids: Sequence[int] = ()) -> None:
        super().__init__()
        self.ids = list(ids)


Stop = threading.Event


@dataclass(frozen=True)
class Sampling:
    """Options of one answer. Where temperature and top_p are None the model's generation config decides.

    temperature: 0 is greedy. stop: strings that end the answer. min_tokens: the end of text is not
    accepted before. prefill_chunk: prompt tokens per forward pass, None for all of them. continues: the
    answer goes on with the prompt's text, and may begin with a space.
    """

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    prefill_chunk: int | None = None
    continues: bool = False

    def for_generate(self) -> dict[str, Any]:
        """Return the options of transformers' `generate`, but for `stop`."""
        lengths = {
            "max_new_tokens": self.max_tokens,
            "min_new_tokens": self.min_tokens or None,
            "prefill_chunk_size": self.prefill_chunk,
        }
        if self.temperature == 0:  # None silences warnings about sampling options of the generation config
            return {**lengths, "do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        chosen = {"temperature": self.temperature, "top_p": self.top_p}
        given = {name: value for name, value in chosen.items() if value is not None}
        return lengths | ({"do_sample": True, **given} if given else {})

    def passes(self, tokens: int) -> int:
        """Return the number of forward passes that read so many tokens of a prompt."""
        return math.ceil(tokens / (self.prefill_chunk or max(1, tokens)))

    def start(self) -> None:
        """Set torch's seed, if there is one."""
        if self.seed is not None:
            torch.manual_seed(self.seed)


@dataclass(frozen=True)
class Answer:
    """ids: new tokens, with that of the end. ended: False if `max_tokens` cut it. cached: tokens of the
    prompt that the cache held before."""

    text: str
    ids: list[int]
    cached: int
    ended: bool


class Text:
    """Text of a growing answer, written as soon as it is known not to be part of a stop string.

    before: ids that the answer continues.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], write: Write, before: Sequence[int] = ()) -> None:
        self._tokenizer, self._stop, self._write = tokenizer, stop, write
        self._ids = [*before]
        # first id of those that are decoded together, and of those whose text is not known
        self._start, self._shown = 0, len(before)
        self._held = ""
        self.text = ""

    def add(self, id: int) -> bool:
        """Add a token. Return True if a stop string ends the answer."""
        self._ids.append(id)
        # ids are decoded after those before them, because some tokenizers drop a space at the start of a text
        before = self._decoded(self._ids[self._start : self._shown])
        now = self._decoded(self._ids[self._start :])
        if now.endswith(UNFINISHED):
            return False
        self._start, self._shown = self._shown, len(self._ids)
        return self._take(now[len(before) :])

    def end(self) -> bool:
        """Write what is held back, because no more tokens follow. Return True if a stop string was in it."""
        before = self._decoded(self._ids[self._start : self._shown])
        found = self._take(self._decoded(self._ids[self._start :])[len(before) :])
        self._show(self._held)
        self._held = ""
        return found

    def _decoded(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _take(self, new: str) -> bool:
        self._held += new
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self._show(self._held[: min(found)])
            self._held, self._ids, self._start, self._shown = "", [], 0, 0
            return True
        kept = max((n for stop in self._stop for n in range(len(stop)) if self._held.endswith(stop[:n])), default=0)
        self._show(self._held[: len(self._held) - kept])
        self._held = self._held[len(self._held) - kept :]
        return False

    def _show(self, text: str) -> None:
        if text:
            self.text += text
            self._write(text)


class _Streamer:
    """Streamer of `generate`: passes tokens to `Text`, and ends the answer."""

    def __init__(self, text: Text, stop: Stop) -> None:
        self.text, self.stop = text, stop
        self.ids: list[int] = []
        self._prompt = True
        self.stopped = False

    def put(self, value: Tensor) -> None:
        """Receive the prompt, then one token at a time."""
        if self.stop.is_set():
            raise Stopped
        if self._prompt:
            self._prompt = False
            return
        self.ids += value.tolist()
        if self.text.add(self.ids[-1]):
            self.stopped = True
            raise Stopped

    def end(self) -> None:
        """Receive the end of the answer."""


def answer(
    model: Any, tokenizer: Any, cache: CompressedCache, ids: Tensor, sampling: Sampling, write: Write, stop: Stop
) -> Answer:
    """Answer the prompt ids [1, T] with a cache that holds any tokens. Call it under `compress`.

    Raises:
        Stopped: `stop` was set. The cache holds the tokens before it, and can be used again.
    """
    cached = cache.keep_common(ids)
    text = Text(tokenizer, sampling.stop, write, ids[0, -DECODED_BEFORE:].tolist() if sampling.continues else ())
    streamer = _Streamer(text, stop)
    sampling.start()
    ends = _ids(model.generation_config.eos_token_id)
    try:
        with _stoppable(model, stop), torch.inference_mode():
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                **cache_argument(model, cache),
                streamer=streamer,
                pad_token_id=pad_id(tokenizer, model),
                **sampling.for_generate(),
            )
    except Stopped as stopped:
        if not streamer.stopped:
            _repair(cache)
            raise Stopped(streamer.ids) from stopped
    ended = text.end() or streamer.stopped or (bool(streamer.ids) and streamer.ids[-1] in ends)
    return Answer(text.text, streamer.ids, cached, ended)


def pad_id(tokenizer: Any, model: Any) -> int | None:
    """Return the id that `generate` pads with, so that it does not warn about a missing one."""
    ends = tokenizer.pad_token_id, tokenizer.eos_token_id, model.generation_config.eos_token_id
    return next((ids[0] for ids in map(_ids, ends) if ids), None)


def _ids(given: Any) -> list[int]:
    return [] if given is None else list(given) if isinstance(given, (list, tuple)) else [int(given)]


def _repair(cache: CompressedCache) -> None:
    """Remove the tokens of a pass that was stopped between two layers, or all where that is impossible."""
    seen = cache.progress.num_tokens().values()
    try:
        return cache.progress.check()  # it was stopped before its first layer
    except CacheError:
        pass
    try:
        if min(seen):
            return cache.crop(min(seen) - max(seen))
    except RuntimeError:
        pass
    return cache.reset()


@contextmanager
def _stoppable(model: Any, stop: Stop) -> Iterator[None]:
    """Let passes of the model raise `Stopped` before a layer, because a long prompt is one pass."""

    def check(*_: Any) -> None:
        if stop.is_set():
            raise Stopped

    layers = max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len, default=nn.ModuleList())
    hooks = [layer.register_forward_pre_hook(check) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
