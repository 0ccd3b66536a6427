"""Prompts that end with their answer, for measuring the importance of heads (`calibration/head_scores.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from tersekv.lab.evals.tasks.needle import Needle
from tersekv.lab.evals.tokenise import places_of, split_ids

if TYPE_CHECKING:
    from tersekv.calibration.head_scores import AnsweredPrompt
    from tersekv.lab.evals.reader import Reader


def answered_prompts(reader: Reader, text: str, samples: int, length: int, seed: int) -> Iterator[AnsweredPrompt]:
    """Yield needles of the task `needle:protocol=minference`, at evenly spaced depths of the text.

    HeadKV's own prompts have a reasoning step and a wrong answer next to the needle. These have
    neither.

    Raises:
        UserError: a prompt does not fit into the length or the model's context.
    """
    from tersekv.calibration.head_scores import AnsweredPrompt

    for i in range(samples):
        depth = int(100 * (i + 0.5) / samples)
        task = Needle(lengths=str(length), depths=str(depth), protocol="minference", text=text, seed=seed + i)
        for sample in task.instances(reader):
            case = sample.data
            ids = split_ids(reader.tokenizer, case.prompt, case.gold)
            source = places_of(reader.tokenizer, case.prompt, case.expected[0])
            whole = torch.cat([ids.context[0], ids.rest[0], torch.tensor(ids.gold)])
            yield AnsweredPrompt(whole, source, len(ids.gold))
