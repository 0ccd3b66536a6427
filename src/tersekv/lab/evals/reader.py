"""`Reader`: a model that reads text with one recipe or with the full cache. Tasks receive readers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tersekv.cache.footprint import Footprint
from tersekv.calibration.find import calibration_for
from tersekv.errors import UserError
from tersekv.hf.compress import compress
from tersekv.hf.prefill import Prefill, fill_layers, held_by, new_cache, shares_prefill
from tersekv.hf.simulate import SimulatedCache
from tersekv.lab.evals import decoding
from tersekv.lab.evals.prompt import Pack, Prompt
from tersekv.lab.evals.tokenise import split_ids
from tersekv.models.config import longest_context
from tersekv.recipe import Recipe
from tersekv.versions import cache_argument

FULL = "full"


@dataclass(frozen=True)
class Answer:
    """A greedy answer.

    - text: without `answer_start`.
    - prompt_tokens: number of tokens read before the answer.
    - footprint: bytes held by the cache after the answer.
    - gold_nll: mean negative log-likelihood of the gold answer over the same packed prompt, in nats
      per token; None without a gold answer. It changes before accuracy does.
    """

    text: str
    prompt_tokens: int
    footprint: Footprint
    gold_nll: float | None = None


class Reader:
    """A model of transformers and its tokenizer with a recipe, or `FULL` for transformers' own
    cache.

    prefill: shared by all readers of one run on the same model, so that each prompt is computed
    once. calibration: a file or a folder of files, for recipes that need a calibration corpus; by
    default the standard folder is searched.

    Raises:
        UserError: a recipe that is unknown, does not support the model or lacks its calibration.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        recipe: str = FULL,
        prefill: Prefill | None = None,
        calibration: Path | None = None,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.recipe = recipe if recipe == FULL else str(Recipe.parse(recipe))
        self._cache_recipe = None if recipe == FULL else self.recipe
        self._prefill = (prefill or Prefill(model)) if shares_prefill(model) else None
        self._last_pass: tuple[Tensor, tuple[Tensor, Footprint]] | None = None
        self._calibration = None if recipe == FULL else calibration_for(model, recipe, calibration)
        self._new_cache()  # raises if the recipe does not support the model

    @property
    def context_tokens(self) -> int:
        """Maximum context of the model in tokens; 2³⁰ for a model without a limit."""
        return longest_context(self.model.config) or 1 << 30

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of `text` alone, without special tokens."""
        return len(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    @torch.no_grad()
    def answer(
        self,
        prompt: Prompt,
        max_new_tokens: int,
        gold: str | None = None,
        stop: Sequence[str] = (),
        min_new_tokens: int = 0,
        pack: Pack = "before-question",
    ) -> Answer:
        """Read the context, pack it, feed the question and answer greedily.

        `pack` says when the cache is packed (`Pack`).

        The answer ends at the end token, at one of `stop`, or after `max_new_tokens`. The first two
        are ignored before `min_new_tokens`.

        Raises:
            UserError: prompt and answer exceed the model's context.
        """
        self._last_pass = None
        split = split_ids(self.tokenizer, prompt, gold)
        following = max(max_new_tokens, len(split.gold))
        tokens = split.context.shape[1] + split.rest.shape[1]
        if tokens + following > self.context_tokens:
            raise UserError(
                f"a prompt of {tokens:,} tokens and {following:,} answer tokens exceed the model's context of "
                f"{self.context_tokens:,}: give a shorter length"
            )
        device = self.model.device
        with self.reading():
            whole = torch.cat([split.context, split.rest], dim=1).to(device)
            if pack == "during-prefill" and self._cache_recipe is not None:
                cache, last = self.read_coded(whole)
            elif pack != "before-question":
                cache, last = self.read_prompt(whole)
            else:
                cache = self.read_context(split.context.to(device))
                last = decoding.feed(self.model, cache, split.rest.to(device))
            gold_nll = decoding.nll_after(self.model, cache, last, split.gold) if split.gold else None
            stopping = decoding.Stopping(self.model, self.tokenizer, max_new_tokens, min_new_tokens, stop)
            text = decoding.greedy(self.model, cache, last, stopping)
        return Answer(text, tokens, held_by(cache), gold_nll)

    @torch.no_grad()
    def simulate(self, ids: Tensor, sinks: int = 0) -> tuple[Tensor, Footprint]:
        """Return logits [T, vocabulary] of ids [1, T] from one forward pass over quantised keys and
        values.

        Every key and value of every layer, except the first `sinks` tokens, is encoded and decoded
        before attention. KVQuant evaluates in this way.
        """
        if self._cache_recipe is None:
            return self._full_pass(ids)
        ids = ids.to(self.model.device)
        cache = self._simulated(sinks).observe(self.model, ids)
        logits = self.model(input_ids=ids, use_cache=True, **cache_argument(self.model, cache)).logits[0]
        return logits, cache.footprint()

    @torch.no_grad()
    def read(self, ids: Tensor, chunk: int, prefix: int = 0) -> tuple[Tensor, Footprint]:
        """Return logits [T - prefix, vocabulary] of ids [1, T] from position `prefix` on, through
        the real cache.

        The first `prefix` tokens are packed after one exact prefill; the others are read `chunk` at
        a time.
        """
        if self._cache_recipe is None:
            return self._full_pass(ids, prefix)
        ids = ids.to(self.model.device)
        with self.reading():
            cache = self.read_context(ids[:, :prefix])
            parts = ids[:, prefix:].split(chunk, dim=1)
            given = cache_argument(self.model, cache)
            logits = torch.cat([self.model(input_ids=part, **given).logits[0] for part in parts])
        return logits, held_by(cache)

    def extras(self) -> dict[str, Any]:
        """Return fields that a record needs in addition to the recipe."""
        return {} if self._calibration is None else {"calibration": self._calibration.about()}

    def _new_cache(self) -> Any:
        return new_cache(self.model, self._cache_recipe, self._calibration)

    def reading(self) -> AbstractContextManager[Any]:
        """Return the context manager for running the model with a cache of this reader."""
        if self._cache_recipe is None:
            return nullcontext()
        return compress(self.model, self._cache_recipe, self._calibration)

    def check_simulated(self, instead: str) -> None:
        """Check that `simulate` takes the recipe. instead: the option that takes every recipe.

        Raises:
            UserError: the recipe evicts tokens, codes them at several rates, or corrects the softmax bias.
        """
        if self._cache_recipe is not None:
            self._simulated(instead=instead)

    def check_coded(self) -> None:
        """Check that `read_coded` takes the recipe and the model.

        Raises:
            UserError: as of `check_simulated`, or the model's state is more than keys and values.
        """
        if self._cache_recipe is not None:
            self._coded()

    def _coded(self, sinks: int = 0) -> SimulatedCache:
        if self._prefill is None:
            raise UserError(
                "pack=during-prefill needs a model whose whole state is keys and values: use pack=after-prompt"
            )
        return self._simulated(sinks, keep=True, instead="pack=after-prompt")

    def _simulated(self, sinks: int = 0, **more: Any) -> SimulatedCache:
        return SimulatedCache(self.model.config, self.recipe, sinks, self._calibration, **more)

    def read_context(self, ids: Tensor) -> Any:
        """Return a packed cache that holds ids [1, T], or an empty cache if T is 0.

        Call it inside the context manager `reading`.
        """
        return self.read_prompt(ids)[0] if ids.shape[1] else self._new_cache()

    def read_prompt(self, ids: Tensor) -> tuple[Any, Tensor]:
        """Return a packed cache that holds ids [1, T], T ≥ 1, and the exact logits [vocabulary] of the
        last token.

        Call it inside the context manager `reading`.
        """
        cache = self._new_cache()
        if self._prefill is not None:
            return cache, self._prefill.fill(cache, ids)
        return cache, decoding.feed(self.model, cache, ids)

    def read_coded(self, ids: Tensor) -> tuple[Any, Tensor]:
        """Return the same as `read_prompt`, with a prompt whose own attention reads coded tokens.

        Raises:
            UserError: the recipe or the model is not suitable (`check_coded`).
        """
        simulated = self._coded(Recipe.parse(self.recipe).policy().sinks)
        cache = self._new_cache()
        simulated.observe(self.model, ids)
        # forward itself, because the hook of `compress` warns of a cache that is not compressed
        given = cache_argument(self.model, simulated)
        output = self.model.forward(input_ids=ids, use_cache=True, logits_to_keep=1, **given)
        fill_layers(self.model, cache, [(tokens, None) for tokens in simulated.received], simulated.losses)
        return cache, output.logits[0, -1]

    def _full_pass(self, ids: Tensor, prefix: int = 0) -> tuple[Tensor, Footprint]:
        """Run the ordinary forward pass; return the logits from position `prefix` on.

        The result for the last ids is kept for comparing other readers. Logits before `prefix` are not
        computed: of 8,192 tokens of a model with 262,144 words they would take 8.6 GB.
        """
        kept = self._last_pass
        if kept is None or not torch.equal(kept[0], ids) or len(kept[1][0]) < ids.shape[1] - prefix:
            self._last_pass = None  # freed before the next one is made
            cache, wanted = new_cache(self.model, None), ids.shape[1] - prefix
            out = self.model(
                input_ids=ids.to(self.model.device),
                use_cache=True,
                logits_to_keep=wanted,
                **cache_argument(self.model, cache),
            )
            kept = self._last_pass = ids, (out.logits[0, -wanted:], held_by(cache))
        logits, held = kept[1]
        return logits[prefix - ids.shape[1] :], held
