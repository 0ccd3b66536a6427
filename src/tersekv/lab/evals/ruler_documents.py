"""RULER's two question-answering tasks (NVIDIA/RULER, scripts/data/synthetic/qa.py).

    Answer the question based on the given documents. Only give me the answer and do not output any other words.
    The following are given documents.
    Document 1: … Document 2: …
    Answer the question based on the given documents. …
    Question: How many points did the Panthers defense surrender?
    Answer:                                                       → 308

Questions and documents come from SQuAD (qa_1) and HotpotQA (qa_2) files in a folder. These are
`squad.json` or `xquad.en.json` in SQuAD's layout (with or without `is_impossible`), and
`hotpotqa.json` or `hotpot_dev_distractor*.json`.

Kept:

- the texts;
- the i-th sample uses the i-th question;
- documents of the question's own article come before any others.

Different:

- Documents are shuffled for each sample. In RULER one seed puts the right one always in the same
  place.
- If the ten paragraphs of a HotpotQA question do not all fit, distractors are removed, never
  supporting paragraphs. RULER does not terminate in this case.
- If there is room for more than all documents, each is used once. RULER repeats them.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tersekv.errors import UserError
from tersekv.lab.evals.cases import Case
from tersekv.lab.evals.prompt import Prompt

INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
)
HEAD = INSTRUCTION + "The following are given documents.\n\n"
QUESTION = "\n\n" + INSTRUCTION + "Question: {question}"
ANSWER = " Answer:"
NEW_TOKENS = 32
FILES = {
    "qa_1": ("squad.json", "xquad.en.json"),
    "qa_2": ("hotpotqa.json", "hotpot_dev_distractor*.json"),
}


@dataclass(frozen=True)
class Asked:
    """A question with its answers. needed: numbers of its documents. near: numbers of related
    documents."""

    question: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]
    near: tuple[int, ...]


@dataclass(frozen=True)
class Documents:
    """Texts, and questions about them."""

    texts: tuple[str, ...]
    asked: tuple[Asked, ...]


@functools.lru_cache(maxsize=4)
def read(subtask: str, folder: str) -> Documents:
    """Read the questions of `qa_1` or `qa_2`.

    Raises:
        UserError: the folder has no such file, or the file is in another layout.
    """
    names = FILES[subtask]
    if not folder:
        raise UserError(f"{subtask} needs questions: give a folder with {' or '.join(names)} as data")
    found = [path for name in names for path in sorted(Path(folder).glob(name))]
    if not found:
        raise UserError(f"{subtask} needs {' or '.join(names)}, and data {folder!r} has none of them")
    try:
        content = json.loads(found[0].read_text(encoding="utf-8"))
        made = _squad(content) if subtask == "qa_1" else _hotpot(content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{found[0]} is not in the layout of {names[0]} ({error!r:.80}): download it again") from error
    if not made.asked:
        raise UserError(f"{found[0]} has no questions with an answer: download it again")
    return made


def _squad(content: dict[str, Any]) -> Documents:
    articles = content["data"]
    texts = sorted({p["context"] for article in articles for p in article["paragraphs"]})
    number = {text: i for i, text in enumerate(texts)}
    asked = []
    for article in articles:
        here = [number[p["context"]] for p in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            own = number[paragraph["context"]]
            near = tuple(i for i in here if i != own)
            for qa in paragraph["qas"]:
                if not qa.get("is_impossible", False):
                    answers = tuple(dict.fromkeys(answer["text"] for answer in qa["answers"]))
                    asked.append(Asked(qa["question"], answers, (own,), near))
    return Documents(tuple(texts), tuple(asked))


def _hotpot(content: list[dict[str, Any]]) -> Documents:
    def text(paragraph: list[Any]) -> str:
        return f"{paragraph[0]}\n{''.join(paragraph[1])}"

    texts = sorted({text(p) for item in content for p in item["context"]})
    number = {each: i for i, each in enumerate(texts)}
    asked = []
    for item in content:
        supporting = {title for title, _ in item["supporting_facts"]}
        needed = tuple(number[text(p)] for p in item["context"] if p[0] in supporting)
        near = tuple(number[text(p)] for p in item["context"] if p[0] not in supporting)
        asked.append(Asked(item["question"], (item["answer"],), needed, near))
    return Documents(tuple(texts), tuple(asked))


def build(documents: Documents, index: int, size: int, rng: Random) -> Case:
    """Build the `index`-th question with `size` documents, including those that it needs."""
    asked = documents.asked[index]
    more = size - len(asked.needed)
    if more <= len(asked.near):
        chosen = [*asked.needed, *rng.sample(asked.near, more)]
    else:
        own = {*asked.needed, *asked.near}
        others = [i for i in range(len(documents.texts)) if i not in own]
        chosen = [*asked.needed, *asked.near, *rng.sample(others, more - len(asked.near))]
    rng.shuffle(chosen)
    context = "\n\n".join(f"Document {i}:\n{documents.texts[number]}" for i, number in enumerate(chosen, 1))
    prompt = Prompt(HEAD + context, QUESTION.format(question=asked.question), ANSWER)
    return Case("", prompt, asked.answers, NEW_TOKENS, data="any")
