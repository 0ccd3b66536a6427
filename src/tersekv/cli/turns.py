"""Token ids of a chat. Each turn adds what the model's chat template writes around it, so that earlier
turns keep the tokens that the cache holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tersekv.calibration.text import rendered, whole_characters
from tersekv.errors import UserError

MARK = "tersekv-marks-this-place"
"""Stands for an earlier message, to find what the template writes after it."""

BREAK = "\n\n"
"""Between a document and the question about it (`question_prompt`)."""


class Turns:
    """The conversation so far. ids: of its tokens, without the end of the latest answer."""

    def __init__(self, tokenizer: Any, system: str | None = None) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise UserError("this model has no chat template, so it cannot chat: use `tersekv generate --raw`")
        self._tokenizer = tokenizer
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.ids: list[int] = []

    def prompt(self, text: str) -> Tensor:
        """Return the ids [1, T] of the conversation with a new question; nothing is changed."""
        head, tail = self._around(MARK)
        if not self.ids:
            added = self._encoded(f"{head}{text}{tail}")
        elif self._is_open(head, tail):
            # a built file ends with what the break and the tail have in common, because one of them follows the text
            ends = (BREAK[:n] for n in (2, 1, 0))
            held = next(end for end in ends if tail.startswith(end) and self._decoded().endswith(end))
            added = self._encoded(f"{BREAK.removeprefix(held)}{text}{tail}")
        else:
            said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
            _, found, after = self._rendered([*said, {"role": "user", "content": text}]).partition(MARK)
            if not found:
                raise UserError("this model's chat template leaves earlier answers out, so one cache cannot go on")
            added = self._encoded(after)
        return torch.tensor([self.ids + added])

    def _is_open(self, head: str, tail: str) -> bool:
        """True if the conversation is a question without its end, as in a file of `prompt-cache build`."""
        # text, because tokens of head and tail may join those of the question; tokenizers add spaces at special tokens
        said = self._decoded().replace(" ", "")
        head, tail = head.replace(" ", ""), tail.replace(" ", "")
        return bool(tail) and said.startswith(head) and tail not in said[len(head) :]

    def _decoded(self) -> str:
        return str(self._tokenizer.decode(self.ids, clean_up_tokenization_spaces=False))

    def _around(self, text: str) -> tuple[str, str]:
        head, _, tail = self._rendered([{"role": "user", "content": text}]).partition(text)
        return head, tail

    def _rendered(self, messages: list[dict[str, str]]) -> str:
        return rendered(self._tokenizer, [*self._system, *messages])

    def _encoded(self, text: str) -> list[int]:
        return list(self._tokenizer(whole_characters(text), add_special_tokens=False, verbose=False)["input_ids"])
