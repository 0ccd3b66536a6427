"""Passkey retrieval.

    There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you …
    The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.The grass is green. …
    The pass key is 22014. Remember it. 22014 is the pass key.
    The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.The grass is green. …
    What is the pass key? The pass key is             → 22014

Source: Mohtashami and Jaggi, Landmark Attention (arXiv 2305.16300; epfml/landmark-attention,
llama/run_test.py), and its form in PoSE (arXiv 2309.10400; dwzhu-pku/PoSE, src/eval_passkey.py),
which KVQuant uses.

Kept:

- the texts, and a key from 1 to 50,000;
- a uniformly drawn number of repetitions (`pose`, joined without a space) or characters
  (`landmark`) before the key;
- plain completion of at most 10 tokens, of which the first number is the answer.

Different:

- PoSE counts 25 tokens per repetition, as LLaMA's tokenizer does, and none for the answer. Here the
  model's tokenizer counts, and prompt and answer fill the length as far as repetitions fit.
- landmark's lengths are characters (0 to 38,000); here they are tokens.
- By default the text up to the question is packed before the question is read (`pack`). KVQuant's
  run quantises during prefill.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from tersekv.lab.evals.cases import Case, QuestionTask, check_choice, check_lengths, too_short
from tersekv.lab.evals.haystack import NOISE, largest
from tersekv.lab.evals.prompt import Prompt
from tersekv.lab.evals.scores import first_number
from tersekv.units import parse_lengths

if TYPE_CHECKING:
    from tersekv.lab.evals.reader import Reader

INTRODUCTION = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
QUESTION = "\nWhat is the pass key? The pass key is"
ANSWER_TOKENS = 10
VARIANTS = ("pose", "landmark")


@dataclass(frozen=True)
class Passkey(QuestionTask):
    """Passkey task.

    - lengths: tokens of prompt and answer, separated by commas.
    - variant: paper whose wording and places of the key are used, pose or landmark.
    """

    lengths: str = "1k,2k"
    variant: str = "pose"

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_lengths(self.lengths)
        check_choice(self.variant, VARIANTS, "variant")

    def cases(self, reader: Reader) -> Iterator[Case]:
        """Yield the samples of each length."""
        lengths = parse_lengths(self.lengths)
        check_lengths(lengths, reader)
        for length in lengths:
            for i in range(self.samples):
                yield self._case(reader, length, i)

    def _case(self, reader: Reader, length: int, i: int) -> Case:
        def made(size: int) -> Case:
            return build(self.variant, size, Random(f"{self.seed}-{length}-{i}"), f"{length}-{i}", length)

        size = largest(lambda n: made(n).tokens(reader) <= length, 0, length * 8)
        if size is None:
            raise too_short("passkey", length)
        return made(size)

    def score(self, case: Case, text: str) -> dict[str, float]:
        """Return accuracy 1 if the first number is the key."""
        return {"accuracy": float(first_number(text) == int(case.expected[0]))}


def build(variant: str, size: int, rng: Random, name: str, length: int) -> Case:
    """Build a case with `size` repetitions (`pose`) or characters (`landmark`) of noise."""
    key = rng.randint(1, 50_000)
    before = int(rng.random() * (size + 1))  # one draw for any size, so that lengths are comparable
    if variant == "pose":
        prefix, suffix = NOISE * before, NOISE * (size - before)
    else:
        noise = " ".join([NOISE] * (size // len(NOISE) + 1))
        prefix, suffix = noise[:before], noise[: size - before]
    needle = f"The pass key is {key}. Remember it. {key} is the pass key."
    context = "\n".join((INTRODUCTION, prefix, needle, suffix))
    depth = round(100 * before / size) if size else 0
    cell = {"length": length, "depth": depth}
    return Case(name, Prompt(context, QUESTION, chat=False), (str(key),), ANSWER_TOKENS, cell)


TASK = Passkey
