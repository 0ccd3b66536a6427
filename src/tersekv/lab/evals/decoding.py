"""Greedy decoding and likelihoods over a cache that has read a prompt."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tersekv.versions import cache_argument


@dataclass(frozen=True)
class Stopping:
    """Conditions that end an answer.

    An answer ends at an end token, at one of the texts `stop` (which is cut off), or after
    `max_new_tokens`. The first two are ignored before `min_new_tokens`.
    """

    model: Any
    tokenizer: Any
    max_new_tokens: int
    min_new_tokens: int = 0
    stop: Sequence[str] = ()
    end_ids: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        ends = self.model.generation_config.eos_token_id
        ends = self.tokenizer.eos_token_id if ends is None else ends
        ids = () if ends is None else tuple(ends) if isinstance(ends, (list, tuple)) else (ends,)
        object.__setattr__(self, "end_ids", ids)

    def text(self, ids: list[int]) -> tuple[str, bool]:
        """Return the answer so far, and True if one of `stop` has ended it."""
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        found = [at for at in (text.find(stop) for stop in self.stop) if at >= 0]
        if not found or len(ids) < self.min_new_tokens:
            return text, False
        return text[: min(found)], True


def feed(model: Any, cache: Any, ids: Tensor) -> Tensor:
    """Read ids [1, n] over a cache. Return the logits [vocabulary] of the last token."""
    return model(input_ids=ids, use_cache=True, logits_to_keep=1, **cache_argument(model, cache)).logits[0, -1]


def greedy(model: Any, cache: Any, logits: Tensor, stopping: Stopping) -> str:
    """Return the greedy continuation after `logits` [vocabulary]. Its tokens are appended to the
    cache."""
    new_ids: list[int] = []
    while len(new_ids) < stopping.max_new_tokens:
        if len(new_ids) < stopping.min_new_tokens and stopping.end_ids:
            logits = logits.index_fill(0, torch.tensor(stopping.end_ids, device=logits.device), float("-inf"))
        token = int(logits.argmax())
        if token in stopping.end_ids:
            break
        new_ids.append(token)
        if stopping.stop and stopping.text(new_ids)[1]:
            break
        if len(new_ids) < stopping.max_new_tokens:
            logits = feed(model, cache, torch.tensor([[token]], device=logits.device))
    return stopping.text(new_ids)[0]


def nll_after(model: Any, cache: Any, logits: Tensor, ids: Sequence[int]) -> float:
    """Return the mean negative log-likelihood of `ids` after a prompt, in nats per token.

    logits: [vocabulary], those of the prompt's last token. The cache is not changed.
    """
    rows = logits[None].float()
    targets = torch.tensor(ids, device=logits.device)
    if len(ids) > 1:
        copied = cache_argument(model, copy.deepcopy(cache))
        following = model(input_ids=targets[None, :-1], use_cache=True, **copied).logits[0]
        rows = torch.cat([rows, following.float()])
    return float(F.cross_entropy(rows, targets))


def loglikelihood(model: Any, cache: Any, last: int, following: Sequence[int], chunk: int) -> tuple[float, bool]:
    """Return the log-likelihood of `following` in nats, and True if greedy decoding gives the same
    tokens.

    last: the token before `following`, which is not in the cache yet. Tokens are read `chunk` at a
    time and appended to the cache.
    """
    read = torch.tensor([[last, *following[:-1]]], device=model.device)
    targets = torch.tensor(following, device=model.device)
    total, greedy_says = 0.0, True
    for part, wanted in zip(read.split(chunk, dim=1), targets.split(chunk), strict=True):
        rows = model(input_ids=part, use_cache=True, **cache_argument(model, cache)).logits[0].float()
        total -= F.cross_entropy(rows, wanted, reduction="sum").item()
        greedy_says = greedy_says and bool((rows.argmax(-1) == wanted).all())
    return total, greedy_says
