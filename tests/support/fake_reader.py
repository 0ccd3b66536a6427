"""A reader without a model. Tokens are words, marks or white-space characters, and the test
provides answers."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tersekv.cache.footprint import Footprint
from tersekv.lab.evals.prompt import Prompt
from tersekv.lab.evals.reader import Answer

TOKEN = re.compile(r" ?\w+|[^\w\s]|\s")
VOCABULARY = 97


class FakeTokenizer:
    """The methods of a fast tokenizer that tasks use. chat: True if it has a template, of six
    tokens."""

    is_fast = True

    def __init__(self, chat: bool = True) -> None:
        self.chat_template = "there is one" if chat else None

    def __call__(self, text: str, return_offsets_mapping: bool = False, **_: Any) -> dict[str, list[Any]]:
        found = list(TOKEN.finditer(text))
        made: dict[str, list[Any]] = {"input_ids": [zlib.crc32(m[0].encode()) % VOCABULARY for m in found]}
        if return_offsets_mapping:
            made["offset_mapping"] = [m.span() for m in found]
        return made

    def apply_chat_template(self, turns: list[dict[str, str]], **_: Any) -> str:
        return f"<user>{turns[0]['content']}<answer>"

    def num_special_tokens_to_add(self) -> int:
        return 1


class FakeReader:
    """A reader that answers with `say(prompt, gold)`.

    `asked` records its calls: prompt, maximum new tokens, gold, stop, minimum new tokens. `packed`
    records when each of them packs the cache.
    """

    recipe = "full"

    def __init__(
        self, say: Callable[[Prompt, str | None], str] = lambda *_: "", context: int = 8192, chat: bool = True
    ) -> None:
        self.say, self.context_tokens, self.tokenizer = say, context, FakeTokenizer(chat)
        self.asked: list[tuple[Prompt, int, str | None, Sequence[str], int]] = []
        self.packed: list[str] = []

    def count_tokens(self, text: str) -> int:
        return len(TOKEN.findall(text))

    def tokens_of(self, prompt: Prompt) -> int:
        """Count as the contract says: a user's turn if there is a template, otherwise plain text."""
        said = prompt.context + prompt.question
        if prompt.chat and self.tokenizer.chat_template:
            said = self.tokenizer.apply_chat_template([{"content": said}])
            return self.count_tokens(said + prompt.answer_start)
        return self.count_tokens(said + prompt.answer_start) + 1

    def answer(
        self,
        prompt: Prompt,
        max_new_tokens: int,
        gold: str | None = None,
        stop: Sequence[str] = (),
        min_new_tokens: int = 0,
        pack: str = "before-question",
    ) -> Answer:
        self.packed.append(pack)
        self.asked.append((prompt, max_new_tokens, gold, stop, min_new_tokens))
        tokens = self.tokens_of(prompt)
        nll = None if gold is None else 0.5
        return Answer(self.say(prompt, gold), tokens, Footprint(tokens=tokens, elements=tokens), nll)

    def simulate(self, ids: torch.Tensor, sinks: int = 0) -> tuple[torch.Tensor, Footprint]:
        return torch.zeros(ids.shape[1], VOCABULARY), Footprint(tokens=ids.shape[1], elements=ids.shape[1])

    def read(self, ids: torch.Tensor, chunk: int, first: int = 0) -> tuple[torch.Tensor, Footprint]:
        return self.simulate(ids)

    def extras(self) -> dict[str, Any]:
        return {}


def ask(task: Any, reader: Any) -> list[dict[str, float]]:
    """Return the metrics of every sample of a task."""
    return [task.evaluate(sample, reader, reader).metrics for sample in task.instances(reader)]


@pytest.fixture
def questions(tmp_path: Path) -> str:
    """Write a folder of small question sets for RULER: SQuAD with 12 questions on 4 articles, HotpotQA with 3."""
    articles = [
        {
            "paragraphs": [
                {
                    "context": f"Article {a}, paragraph {p}.",
                    "qas": [{"question": f"Q{a}{p}?", "answers": [{"text": f"A{a}{p}"}, {"text": f"A{a}{p}"}]}],
                }
                for p in range(3)
            ]
        }
        for a in range(4)
    ]
    articles[0]["paragraphs"][0]["qas"].insert(0, {"question": "?", "answers": [], "is_impossible": True})
    (tmp_path / "squad.json").write_text(json.dumps({"data": articles}))
    hotpot = [
        {
            "question": f"H{i}?",
            "answer": f"B{i}",
            "supporting_facts": [[f"T{i}-2", 0], [f"T{i}-2", 1], [f"T{i}-7", 0]],
            "context": [[f"T{i}-{p}", [f"Text {i}-{p}.", " More."]] for p in range(10)],
        }
        for i in range(3)
    ]
    (tmp_path / "hotpotqa.json").write_text(json.dumps(hotpot))
    return str(tmp_path)
