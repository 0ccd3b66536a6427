"""Prompt of a task. It does not import torch, so that the program can list tasks quickly."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Prompt:
    """Text that a model reads.

    The cache is packed after `context` has been read and before the model sees `question`. This
    order is fair: no method knows the question in advance. `answer_start` is the beginning of the
    answer. chat: True if the text is a user's turn in the model's chat template, where it has one.
    """

    context: str
    question: str = ""
    answer_start: str = ""
    chat: bool = True
