"""Questions of a file like MT-Bench's, and the tokens of a model's answer (SubGen, Figure 1)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from tersekv.calibration.text import chat_prompt, input_ids
from tersekv.errors import UserError
from tersekv.lab.evals.windows import read_text

if TYPE_CHECKING:
    from torch import Tensor

MAX_NEW_TOKENS = 256


def read_questions(path: str) -> dict[str, str]:
    """Return the first turn of each question by its id, from JSON Lines with `question_id` and
    `turns`.

    Raises:
        UserError: the file cannot be read, or a line is no such question.
    """
    found: dict[str, str] = {}
    # No splitlines(), because texts may contain Unicode line separators.
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            asked = json.loads(line)
            found[str(asked["question_id"])] = str(asked["turns"][0])
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise UserError(
                f"line {number} of {path} is not a question: give JSON Lines with question_id and turns, as MT-Bench's"
            ) from error
    return found


def choose(questions: dict[str, str], id: str | None, path: str) -> str:
    """Return the id of the question to ask: the given one, or the first.

    Raises:
        UserError: there is no such question.
    """
    if not questions or (id is not None and id not in questions):
        known = f"it has {', '.join(questions)}" if questions else "it is empty"
        raise UserError(f"{path} has no question {id or 'at all'}: {known}")
    return next(iter(questions)) if id is None else id


@torch.no_grad()
def answered(model: Any, tokenizer: Any, question: str, max_new_tokens: int = MAX_NEW_TOKENS) -> Tensor:
    """Return the ids [1, T] of a question in the model's chat template, followed by the model's greedy
    answer."""
    ids = input_ids(tokenizer, chat_prompt(tokenizer, question), model.config, max_new_tokens).to(model.device)
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": tokenizer.eos_token_id}
    made: Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return made
