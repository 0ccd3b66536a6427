"""Run one generation and measure seconds, tokens per second, bytes of the cache and peak resident
memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tersekv.cli import output
from tersekv.lab.bench.memory import PeakMemory
from tersekv.serving.local.answers import Sampling, Write, pad_id
from tersekv.versions import cache_argument

if TYPE_CHECKING:
    from tersekv.cache.footprint import Footprint
    from tersekv.calibration.calibration import Calibration
    from tersekv.hf.cache import CompressedCache
    from tersekv.lab.evals.tasks.divergence import AnswerDivergence

FULL = "full"


@dataclass(frozen=True)
class Outcome:
    """Answer and measurements of one generation.

    recipe: "full" for transformers' own cache. cached_tokens: prompt tokens that came from a file.
    """

    recipe: str
    answer: str
    new_ids: list[int]
    prompt_tokens: int
    prefill_seconds: float
    decode_tokens_per_second: float
    footprint: Footprint
    peak_bytes: int
    peak_from: str
    cached_tokens: int = 0

    def document(self) -> dict[str, Any]:
        """Return the JSON document of `tersekv generate`."""
        return {
            "answer": self.answer,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "new_tokens": len(self.new_ids),
            "prefill_seconds": round(self.prefill_seconds, 4),
            "decode_tokens_per_second": round(self.decode_tokens_per_second, 3),
            "peak_bytes": self.peak_bytes,
            "cache": {"recipe": self.recipe, **self.footprint.to_dict()},
        }


def compared(watch: AnswerDivergence, full: Outcome, packed: Outcome) -> dict[str, Any]:
    """Return how a packed cache's answer differs from the full cache's, for the JSON document."""
    from tersekv.lab.evals.tasks.divergence import in_words

    same = agreement(full, packed)
    kl, tokens = watch.mean(same)
    return {"agreement": same, "divergence": {"kl": kl, "tokens": tokens, "words": in_words(kl)}}


def agreement(a: Outcome, b: Outcome) -> int:
    """Return the number of new tokens that are equal from the first on."""
    same = 0
    for left, right in zip(a.new_ids, b.new_ids, strict=False):
        if left != right:
            break
        same += 1
    return same


def generate(
    model: Any,
    tokenizer: Any,
    ids: Any,
    recipe: str | None,
    sampling: Sampling,
    write: Write | None = None,
    calibration: Calibration | None = None,
    held: CompressedCache | None = None,
    watch: AnswerDivergence | None = None,
) -> Outcome:
    """Answer `ids` [1, T] with a packed cache, or with transformers' own if `recipe` is None. Text
    is streamed to `write`.

    held: a cache that has read the first tokens. If it has read all of them, the last token is read
    again. watch: sees the scores of every token.
    """
    import torch

    import tersekv
    from tersekv.hf.prefill import held_by, new_cache

    sampling.start()
    if watch is not None:
        watch.begin()
    cache: Any = new_cache(model, recipe, calibration) if held is None else held
    if cache.get_seq_length() == ids.shape[1]:
        cache.crop(-1)
    cached = cache.get_seq_length()
    reads_packed = contextlib.nullcontext() if recipe is None else tersekv.compress(model, cache)
    passes = sampling.passes(ids.shape[1] - cached)
    with (
        PeakMemory() as memory,
        _answering(model, sampling, write, passes) as moved,
        reads_packed,
        torch.inference_mode(),
    ):
        clock = _clock(tokenizer, write, moved)
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            **cache_argument(model, cache),
            streamer=clock,
            stop_strings=list(sampling.stop) or None,
            tokenizer=tokenizer,
            pad_token_id=pad_id(tokenizer, model),
            **({} if watch is None else {"logits_processor": [watch]}),
            **sampling.for_generate(),
        )
    new_ids = out[0, ids.shape[1] :].tolist()
    return Outcome(
        recipe=FULL if recipe is None else recipe,
        answer=tokenizer.decode(new_ids, skip_special_tokens=True),
        new_ids=new_ids,
        prompt_tokens=ids.shape[1],
        prefill_seconds=clock.times[1] - clock.times[0],
        decode_tokens_per_second=_rate(clock.times[1:]),
        footprint=held_by(cache),
        peak_bytes=memory.peak_bytes,
        peak_from=memory.source,
        cached_tokens=cached,
    )


def warm_up(model: Any) -> None:
    """Run a short forward pass, so that loading weights and starting threads is not measured
    later."""
    import torch

    with torch.inference_mode():
        model(input_ids=torch.tensor([[0, 1]]), use_cache=False)


def _rate(times: list[float]) -> float:
    """Return tokens per second, without the first token."""
    return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0


@contextlib.contextmanager
def _answering(model: Any, sampling: Sampling, write: Write | None, passes: int) -> Iterator[Callable[[], None]]:
    """Show the progress of one answer; yield a function to call at each new token. If the answer is
    written to the same place, no progress is shown after the prompt."""
    with contextlib.ExitStack() as running:
        prompt_read = running.enter_context(prefill_progress(model, passes=passes))
        answering: output.ProgressStep | None = None

        def moved() -> None:
            nonlocal answering
            if answering is None:
                prompt_read()
                mixed = write is not None and output.shares_a_place()
                seen = output.step("answering", sampling.max_tokens, "tokens")
                answering = output.ProgressStep("answering") if mixed else running.enter_context(seen)
            answering.advance()

        yield moved


def _clock(tokenizer: Any, write: Write | None, moved: Callable[[], None]) -> Any:
    """Return a streamer that records the time of each token and passes text to `write`. The call
    with the prompt is the start."""
    from transformers import TextStreamer

    class Clock(TextStreamer):
        def __init__(self) -> None:
            super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
            self.times: list[float] = []

        def put(self, value: Any) -> None:
            self.times.append(time.perf_counter())
            if len(self.times) > 1:
                moved()
            super().put(value)

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if write is not None:
                write(text + ("\n" if stream_end else ""))

    return Clock()


@contextlib.contextmanager
def prefill_progress(model: Any, what: str = "reading the prompt", passes: int = 1) -> Iterator[Callable[[], None]]:
    """Show a step that advances with each layer; yield a function that ends it, to call at the
    first new token. passes: number of forward passes over the prompt."""
    from torch import nn

    layers = max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len, default=nn.ModuleList())
    with contextlib.ExitStack() as running:
        step = running.enter_context(output.step(what, passes * len(layers) or None, "layers"))
        for layer in layers:
            running.callback(layer.register_forward_hook(lambda *_: step.advance()).remove)
        yield running.close
