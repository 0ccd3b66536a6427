"""Tokenise a prompt and split it at the end of the context."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tersekv.calibration.text import chat_prompt
from tersekv.errors import UserError
from tersekv.lab.evals.prompt import Prompt


class SplitIds(NamedTuple):
    """Token ids of a split prompt.

    context [1, C] is read before the cache is packed, and rest [1, R] (R ≥ 1) after. gold: ids of
    the gold answer.
    """

    context: Tensor
    rest: Tensor
    gold: list[int]


def split_ids(tokenizer: Any, prompt: Prompt, gold: str | None = None) -> SplitIds:
    """Tokenise the whole prompt at once and split it at the end of the context.

    The rest begins with the first token that starts at or after the end of the context's text. It
    has at least one token, because the answer follows from it.

    Raises:
        UserError: an empty prompt, or a tokenizer that does not report character offsets.
    """
    text, end, plain = _whole(tokenizer, prompt)
    ids, spans = _encode(tokenizer, text, plain)
    if not ids:
        raise UserError("the prompt is empty: give it a context or a question")
    cut = 0
    if prompt.context:
        later = (i for i, (start, stop) in enumerate(spans) if start >= end and stop > start)
        cut = min(next(later, len(ids)), len(ids) - 1)
    tensor = torch.tensor([ids])
    return SplitIds(tensor[:, :cut], tensor[:, cut:], _gold_ids(tokenizer, text, ids, gold, plain) if gold else [])


def digest(tokenizer: Any, prompt: Prompt, gold: str | None, *more: Any) -> str:
    """Return a hash of all ids of `split_ids`, where they are split, and `more`."""
    split = split_ids(tokenizer, prompt, gold)
    given = (split.context.tolist(), split.rest.tolist(), split.gold, *more)
    return hashlib.sha256(repr(given).encode()).hexdigest()[:16]


def places_of(tokenizer: Any, prompt: Prompt, part: str) -> list[int]:
    """Return the indices of the prompt's tokens that hold the first occurrence of `part`.

    Raises:
        UserError: the tokenizer does not report character offsets.
    """
    text, _, plain = _whole(tokenizer, prompt)
    first = text.index(part)
    _, spans = _encode(tokenizer, text, plain)
    return [i for i, (start, stop) in enumerate(spans) if start < first + len(part) and stop > max(first, start)]


def _whole(tokenizer: Any, prompt: Prompt) -> tuple[str, int, bool]:
    """Return the text that the model reads, the context's end in it, and True if special tokens
    must be added."""
    said = prompt.context + prompt.question
    if not (prompt.chat and getattr(tokenizer, "chat_template", None)):
        return said + prompt.answer_start, len(prompt.context), True
    text = chat_prompt(tokenizer, said)
    kept = said.strip()  # templates may strip a turn
    start = text.find(kept)
    if start < 0:
        raise UserError("the model's chat template changes the user's text: run the task without the template")
    stripped = len(said) - len(said.lstrip())
    return text + prompt.answer_start, start + max(0, min(len(kept), len(prompt.context) - stripped)), False


def _encode(tokenizer: Any, text: str, plain: bool) -> tuple[list[int], list[tuple[int, int]]]:
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            f"{type(tokenizer).__name__} does not report character offsets; evaluation needs a fast tokenizer "
            "(tokenizer.json)"
        )
    made = tokenizer(text, add_special_tokens=plain, return_offsets_mapping=True, verbose=False)
    return list(made["input_ids"]), [(start, stop) for start, stop in made["offset_mapping"]]


def _gold_ids(tokenizer: Any, text: str, ids: list[int], gold: str, plain: bool) -> list[int]:
    """Return the gold answer's tokens as they follow the prompt.

    It is tokenised alone if it would change the prompt's last token.
    """
    joint, _ = _encode(tokenizer, text + gold, plain)
    if joint[: len(ids)] == ids and len(joint) > len(ids):
        return joint[len(ids) :]
    return list(tokenizer(gold, add_special_tokens=False, verbose=False)["input_ids"])
