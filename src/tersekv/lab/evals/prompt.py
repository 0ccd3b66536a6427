"""What tasks ask and readers read. It needs no torch, so that the program can list tasks quickly."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Prompt:
    """What a model reads. The cache is packed once `context` has been read, before it sees `question` (the fair order:
    no method knows what will be asked); `answer_start` stands at the beginning of the answer. chat: the text is a
    user's turn in the model's chat template, where it has one."""

    context: str
    question: str = ""
    answer_start: str = ""
    chat: bool = True
