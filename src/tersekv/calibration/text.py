"""Text that every Python installation has, and prompts made from it.

Corpus `pydoc` is the language reference that ships with Python (`pydoc_data.topics`). It has about
700,000 characters of English prose with code. Topics are joined in the order of their names,
without cleaning.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

from tersekv.errors import UserError

# English text with code has fewer characters per token than this with the tokenizers in use.
_MOST_CHARACTERS_PER_TOKEN = 8


def pydoc_text() -> str:
    """Return all topics of the language reference, in the order of their names.

    Raises:
        UserError: this Python lacks `pydoc_data`.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise UserError(
            "this Python lacks pydoc_data, the text behind help(): install Python's full standard library, "
            "or give a text of your own with --file"
        ) from error
    return "\n\n".join(topics[name] for name in sorted(topics))


def pydoc_document(tokenizer: Any, tokens: int, offset: int = 0, seed: int | None = None) -> str:
    """Return about `tokens` tokens of corpus `pydoc` from character `offset`, or from a position
    drawn with `seed`.

    The document begins at the start of a line and continues at the beginning of the corpus after
    its end.
    """
    if tokens < 1:
        raise UserError(f"a document of {tokens} tokens is not possible: give at least 1")
    text = pydoc_text()
    start = random.Random(seed).randrange(len(text)) if seed is not None else offset % len(text)
    start = text.rfind("\n", 0, start) + 1
    wanted = tokens * _MOST_CHARACTERS_PER_TOKEN
    around = text[start:] + "\n\n" + text
    while len(around) < wanted:
        around += "\n\n" + text
    return _first_tokens(tokenizer, around[:wanted], tokens)


def _first_tokens(tokenizer: Any, text: str, tokens: int) -> str:
    spans = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    return text[: spans[min(tokens, len(spans)) - 1][1]]


def question_prompt(tokenizer: Any, document: str, question: str) -> str:
    """Return the prompt of one user turn: the document, then the question."""
    return chat_prompt(tokenizer, f"{document}\n\n{question}" if document else question)


def chat_prompt(tokenizer: Any, text: str) -> str:
    """Return `text` as a user turn in the tokenizer's chat template; without a template return it
    unchanged."""
    if not getattr(tokenizer, "chat_template", None):
        return text
    return rendered(tokenizer, [{"role": "user", "content": text}])


def rendered(tokenizer: Any, messages: Sequence[dict[str, str]]) -> str:
    """Return messages in the tokenizer's chat template, with the beginning of the answer.

    Raises:
        UserError: the template refuses them, or a message holds half of a character.
    """
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise errors of jinja2, for example about the order of roles
        raise UserError(f"the model's chat template refuses the messages: {str(error)[:200]}") from error
    return whole_characters(text)


def whole_characters(text: str) -> str:
    """Return the text.

    Raises:
        UserError: it holds half of a character, which no tokenizer takes: bytes of another encoding, or half an emoji.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError("the text holds half of a character (a lone surrogate): send UTF-8 text") from error
    return text


def common_ids(tokenizer: Any, text: str, config: Any, raw: bool = False) -> Any:
    """Return the ids [1, T] that all prompts with `text` begin with, whichever question follows, or
    none.

    raw: prompts are plain text, not a chat template (`question_prompt`).

    Raises:
        UserError: such prompts have no first token in common.
    """
    prompts = [text, *(f"{text}\n\n{question}" for question in ("What?", "A b", "1"))]
    prompts = prompts if raw else [chat_prompt(tokenizer, prompt) for prompt in prompts]
    ids = [input_ids(tokenizer, prompt, config, template=not raw) for prompt in prompts]
    columns = zip(*(one[0].tolist() for one in ids), strict=False)
    n = sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
    if not n:
        raise UserError("prompts with this text have no first tokens in common: give a longer text")
    return ids[0][:, :n]


def input_ids(tokenizer: Any, prompt: str, config: Any, new_tokens: int = 0, template: bool = True) -> Any:
    """Return `prompt` as ids [1, T]. template: the prompt contains its special tokens if the
    tokenizer has a chat template.

    Raises:
        UserError: the prompt is empty, or longer than the model's context with `new_tokens` more.
    """
    plain = not (template and getattr(tokenizer, "chat_template", None))
    ids = tokenizer(prompt, add_special_tokens=plain, return_tensors="pt", verbose=False)["input_ids"]
    tokens = ids.shape[-1]
    if not tokens:
        raise UserError("the prompt is empty: give some text with --prompt, --file or on standard input")
    from tersekv.models.config import longest_context  # imports torch, which makers of questions do without

    context = longest_context(config)
    if context and tokens + new_tokens > context:
        raise UserError(
            f"the prompt has {tokens:,} tokens and {new_tokens:,} are to follow, but this model's context is "
            f"{context:,}: shorten the prompt by {tokens + new_tokens - context:,} tokens or ask for fewer"
        )
    return ids
