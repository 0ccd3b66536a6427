"""Haystacks: long texts of a given number of tokens with needles between their sentences.

Texts are cut at token boundaries but never decoded from ids, so the remaining text is unchanged.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING

from tersekv.calibration.text import chat_prompt
from tersekv.errors import UserError
from tersekv.lab.evals.prompt import Prompt

if TYPE_CHECKING:
    from tersekv.lab.evals.reader import Reader

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""Sentences that passkey retrieval and RULER repeat."""

# Upper bound of the characters per token for the tokenizers in use.
_MOST_CHARACTERS_PER_TOKEN = 8


@functools.lru_cache(maxsize=4)
def read_text(source: str) -> str:
    """Return the text of a file, or of the corpus `pydoc`.

    Raises:
        UserError: the file cannot be read, is not text, or is empty.
    """
    from tersekv.lab.evals import windows  # imported here because it needs torch, which building haystacks does not

    text = windows.read_text(source)
    if not text.strip():
        raise UserError(f"the text {source!r} is empty: give a file with English prose, or pydoc")
    return text


def token_spans(reader: Reader, text: str) -> list[tuple[int, int]]:
    """Return the character range [start, end) of each token of `text`.

    Raises:
        UserError: the tokenizer does not report character offsets.
    """
    if not getattr(reader.tokenizer, "is_fast", False):
        raise UserError("this model's tokenizer does not report character offsets: use a fast tokenizer")
    found = reader.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return list(found["offset_mapping"])


def prompt_tokens(reader: Reader, prompt: Prompt) -> int:
    """Return the number of tokens of a prompt, including the chat template or the special tokens of
    plain text."""
    tokenizer, said = reader.tokenizer, prompt.context + prompt.question
    if prompt.chat and getattr(tokenizer, "chat_template", None):
        return reader.count_tokens(chat_prompt(tokenizer, said) + prompt.answer_start)
    return reader.count_tokens(said + prompt.answer_start) + tokenizer.num_special_tokens_to_add()


def first_tokens(reader: Reader, text: str, tokens: int) -> str:
    """Return the first `tokens` tokens of `text`, which is repeated as often as necessary."""
    if tokens < 1:
        return ""
    most = tokens * _MOST_CHARACTERS_PER_TOKEN
    while True:
        piece = text[:most]
        spans = token_spans(reader, piece)
        if len(spans) >= tokens:
            return piece[: spans[tokens - 1][1]]
        if len(text) > most:  # lines and tables have long tokens
            most *= 2
        else:
            text += "\n\n" + text


def insert(reader: Reader, text: str, needle: str, depth: float) -> str:
    """Insert `needle` after `depth` percent of the tokens of `text`, at the end of a sentence.

    The position moves back to the previous end of a sentence, or to the start of the text. At 100
    percent the needle is appended, even within a sentence.

    This follows Kamradt's LLMTest_NeedleInAHaystack with two differences. A full stop ends a
    sentence only before white space, because names such as `sys.path` contain full stops. An empty
    line also ends a sentence, because lists and tables have no full stops.
    """
    if depth >= 100:
        return text + needle
    spans = token_spans(reader, text)
    last = int(len(spans) * depth / 100)
    while last and not _ends_sentence(text, spans[last - 1]):
        last -= 1
    cut = spans[last - 1][1] if last else 0
    return text[:cut] + needle + text[cut:]


def _ends_sentence(text: str, span: tuple[int, int]) -> bool:
    start, end = span
    stop = text[start:end].strip() == "." and not text[end : end + 1].strip()
    return stop or text.endswith("\n\n", 0, end)


def middle_cut(reader: Reader, text: str, tokens: int) -> tuple[str, str]:
    """Return the first and the last half of `tokens` tokens of `text`.

    A text of at most that length is returned whole, with an empty second part.
    """
    spans = token_spans(reader, text)
    if len(spans) <= tokens:
        return text, ""
    half = max(1, tokens // 2)
    return text[: spans[half - 1][1]], text[spans[-half][0] :]


def sentences(text: str) -> list[str]:
    """Split a text into sentences at their end marks, with a simple rule instead of a trained
    model."""
    return re.split(r"(?<=[.!?])\s+", text.strip())


def spread(items: Sequence[str], needles: Sequence[str], rng: Random) -> list[str]:
    """Insert `needles`, in their order, before distinct random items."""
    if len(needles) > len(items):
        raise ValueError(f"{len(needles)} needles among {len(items)} items")
    mixed, places = list(items), sorted(rng.sample(range(len(items)), len(needles)))
    for moved, needle in enumerate(needles):
        mixed.insert(places[moved] + moved, needle)
    return mixed


def largest(fits: Callable[[int], bool], least: int, most: int) -> int | None:
    """Return the largest size from `least` to `most` that fits, or None if none does.

    It is a binary search: no size may fit if a smaller one does not.
    """
    if least > most or not fits(least):
        return None
    low, step = least, 1
    while low < most and fits(min(low + step, most)):
        low, step = min(low + step, most), step * 2
    high = min(low + step, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
