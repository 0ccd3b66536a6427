"""One model that answers prompts with packed caches, and keeps the caches for later prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor

import tersekv
from tersekv.calibration.text import rendered, whole_characters
from tersekv.errors import UserError
from tersekv.hf.cache import CompressedCache
from tersekv.models.config import longest_context
from tersekv.serving.local.answers import Answer, Sampling, Stop, Stopped, Write, answer
from tersekv.serving.local.prompt_caches import PromptCaches

Prompt = Sequence[dict[str, str]] | str | Tensor
"""Messages of a chat, a text, or token ids [1, T]."""


class Engine:
    """A model under `compress`, for one answer at a time. template: an empty cache with the recipe.

    most_bytes: packed bytes of earlier prompts that are kept. prefill_chunk: see `Sampling`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        template: CompressedCache,
        most_bytes: int,
        prefill_chunk: int | None = None,
    ) -> None:
        self.model, self.tokenizer, self._prefill_chunk = model, tokenizer, prefill_chunk
        self.caches = PromptCaches(lambda: template.empty(model.config), most_bytes)
        self.longest = longest_context(model.config)
        self._installed = tersekv.compress(model, template)

    def close(self) -> None:
        """Restore the model."""
        self._installed.remove()

    def ids(self, prompt: Prompt) -> Tensor:
        """Return a prompt as ids [1, T].

        Raises:
            UserError: the model has no chat template, or it refuses the messages; the prompt is empty,
                or does not fit the model's context.
        """
        ids = self._ids(prompt)
        if not ids.shape[1]:
            raise UserError("the prompt has no tokens")
        if self.longest and ids.shape[1] >= self.longest:
            raise UserError(f"the prompt has {ids.shape[1]:,} tokens, and this model's context is {self.longest:,}")
        return ids.to(self.model.device)

    def _ids(self, prompt: Prompt) -> Tensor:
        if isinstance(prompt, str):
            return self.tokenizer(whole_characters(prompt), return_tensors="pt", verbose=False)["input_ids"]
        if isinstance(prompt, Tensor):
            return self._known(prompt)
        if not getattr(self.tokenizer, "chat_template", None):
            raise UserError("this model has no chat template, so it cannot chat; ask for completions of a text")
        text = rendered(self.tokenizer, prompt)
        return self.tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False)["input_ids"]

    def _known(self, ids: Tensor) -> Tensor:
        size = self.model.config.get_text_config().vocab_size
        if not bool(((ids >= 0) & (ids < size)).all()):
            raise UserError(f"the prompt has token ids that this model does not know; they go from 0 to {size - 1:,}")
        return ids

    def answer(self, ids: Tensor, sampling: Sampling, write: Write, stop: Stop) -> Answer:
        """Answer a prompt [1, T], with an earlier cache if one begins as it does.

        Raises:
            Stopped: `stop` was set; what was read is kept.
        """
        if stop.is_set():
            raise Stopped
        most = min(sampling.max_tokens, self.longest - ids.shape[1]) if self.longest else sampling.max_tokens
        sampling = dataclasses.replace(sampling, max_tokens=most, prefill_chunk=self._prefill_chunk)
        cache = self.caches.take(ids)
        try:
            given = answer(self.model, self.tokenizer, cache, ids, sampling, write, stop)
        except Stopped:
            self.caches.keep(cache)
            raise
        self.caches.keep(cache)  # not after other errors, which may damage it
        return given
