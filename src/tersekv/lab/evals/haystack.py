"""Haystacks: long texts cut and filled by tokens of the reader's tokenizer, with needles between sentences.

Texts are cut where tokens end, at their own characters, and never decoded from ids: what is left is the text itself.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING

from tersekv.errors import UserError
from tersekv.hf.text import chat_prompt
from tersekv.lab.evals.prompt import Prompt

if TYPE_CHECKING:
    from tersekv.lab.evals.reader import Reader

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""The sentences that passkey retrieval and RULER repeat."""

# No text has more characters per token than this under the tokenizers in use.
_MOST_CHARACTERS_PER_TOKEN = 8


@functools.lru_cache(maxsize=4)
def read_text(source: str) -> str:
    """The text of a file, or of the corpus `pydoc`.

    Raises:
        UserError: the file cannot be read, is no text, or has nothing in it.
    """
    from tersekv.lab.evals import windows  # imports torch, which making haystacks does without

    text = windows.read_text(source)
    if not text.strip():
        raise UserError(f"the text {source!r} is empty: give a file with some English prose, or pydoc")
    return text


def token_spans(reader: Reader, text: str) -> list[tuple[int, int]]:
    """The characters [start, end) of each token of `text`.

    Raises:
        UserError: the tokenizer does not say where its tokens lie.
    """
    if not getattr(reader.tokenizer, "is_fast", False):
        raise UserError("this model's tokenizer is a slow one, which does not say where tokens lie: use a fast one")
    found = reader.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return list(found["offset_mapping"])


def prompt_tokens(reader: Reader, prompt: Prompt) -> int:
    """Tokens of a prompt as the reader reads it: in the chat template, or with the special tokens of plain text."""
    tokenizer, said = reader.tokenizer, prompt.context + prompt.question
    if prompt.chat and getattr(tokenizer, "chat_template", None):
        return reader.count_tokens(chat_prompt(tokenizer, said) + prompt.answer_start)
    return reader.count_tokens(said + prompt.answer_start) + tokenizer.num_special_tokens_to_add()


def first_tokens(reader: Reader, text: str, tokens: int) -> str:
    """The first `tokens` tokens of `text`, which is repeated as often as they need."""
    if tokens < 1:
        return ""
    while True:
        piece = text[: tokens * _MOST_CHARACTERS_PER_TOKEN]
        spans = token_spans(reader, piece)
        if len(spans) >= tokens:
            return piece[: spans[tokens - 1][1]]
        text += "\n\n" + text


def insert(reader: Reader, text: str, needle: str, depth: float) -> str:
    """`text` with `needle` after `depth` percent of its tokens, moved back to the end of a sentence (or to the start
    of the text); at 100 it is the end, whatever stands there.

    As Kamradt's LLMTest_NeedleInAHaystack does; only that a full stop must have white space after it (there is no
    sentence's end in `sys.path`), and that an empty line ends one, too (lists and tables have no full stops).
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
    """The first and the last half of `tokens` tokens of `text`; all of it and nothing where it is no longer."""
    spans = token_spans(reader, text)
    if len(spans) <= tokens:
        return text, ""
    half = max(1, tokens // 2)
    return text[: spans[half - 1][1]], text[spans[-half][0] :]


def sentences(text: str) -> list[str]:
    """Sentences by their end marks; a simple rule in place of a trained one."""
    return re.split(r"(?<=[.!?])\s+", text.strip())


def spread(items: Sequence[str], needles: Sequence[str], rng: Random) -> list[str]:
    """`items` with `needles`, in their order, at random different places before items."""
    if len(needles) > len(items):
        raise ValueError(f"{len(needles)} needles among {len(items)} items")
    mixed, places = list(items), sorted(rng.sample(range(len(items)), len(needles)))
    for moved, needle in enumerate(needles):
        mixed.insert(places[moved] + moved, needle)
    return mixed


def largest(fits: Callable[[int], bool], least: int, most: int) -> int | None:
    """The largest size from `least` to `most` that fits, where what is larger fits less; None where none does."""
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
