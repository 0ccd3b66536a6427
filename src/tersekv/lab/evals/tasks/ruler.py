"""RULER: thirteen synthetic tasks with prompts of a given length.

    A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about …
    The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.
    One of the special magic numbers for torpid-kid is: 1683472.
    The grass is green. …
    What is the special magic number for torpid-kid mentioned in the provided text?
    The special magic number for torpid-kid mentioned in the provided text is         → 1683472

Source: Hsieh et al., RULER (arXiv 2404.06654; NVIDIA/RULER at c3f5e3b). Details of each task are in
tersekv.lab.evals.ruler_needles, ruler_lists and ruler_documents.

Kept:

- the prompt is a user's turn, and the answer's first words are given;
- lengths include the template and the longest answer;
- greedy answers, with control characters removed;
- the score is the share of expected strings in the answer; for questions it is 1 if any of them is
  there;
- the result is the mean over subtasks.

Different:

- Official runs take 500 samples at 4k to 128k.
- Sizes are fitted to the token for each sample. RULER fits them in steps of up to 500 words.
- Essays are the corpus `pydoc` or a file, read from the beginning.
- The space before the answer's first words is kept, and the one after them is omitted.
- By default the text is packed before the question is read (`pack`).

In the default subtasks SmolLM2-135M scores clearly above chance; in the others it is near chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from tersekv.errors import UserError
from tersekv.lab.evals import ruler_documents, ruler_lists, ruler_needles
from tersekv.lab.evals.cases import Case, QuestionTask, check_lengths, chosen, mean_of_subtasks, too_short
from tersekv.lab.evals.haystack import largest, read_text
from tersekv.lab.evals.scores import match_all, match_part, printable
from tersekv.lab.evals.tasks.base import Estimate
from tersekv.lab.evals.words import word_lists
from tersekv.units import parse_lengths

if TYPE_CHECKING:
    from tersekv.lab.evals.reader import Reader

SUBTASKS = (*ruler_needles.KINDS, "vt", "cwe", "fwe", *ruler_documents.FILES)

Maker = Callable[[int], Case]
"""Function that builds a case of a size in the subtask's own unit."""


@dataclass(frozen=True)
class Ruler(QuestionTask):
    """RULER task.

    - lengths: tokens of prompt and answer, separated by commas.
    - subtasks: names separated by commas, or all.
    - data: a folder with question sets (needed for qa_1 and qa_2) and word lists.
    - text: "pydoc" (the language reference in Python's standard library) or a file.
    """

    lengths: str = "1k,2k"
    subtasks: str = "niah_single_1,niah_single_2,niah_multikey_1"
    data: str = ""
    text: str = "pydoc"

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_lengths(self.lengths)
        chosen(self.subtasks, SUBTASKS, "subtasks")

    def cases(self, reader: Reader) -> Iterator[Case]:
        """Yield the samples of each subtask and length."""
        lengths = parse_lengths(self.lengths)
        check_lengths(lengths, reader)
        for subtask in chosen(self.subtasks, SUBTASKS, "subtasks"):
            for length in lengths:
                for i in range(self.samples):
                    made = self._fitted(reader, subtask, length, i)
                    cell = {"subtask": subtask, "length": length}
                    yield replace(made, id=f"{subtask}-{length}-{i}", cell=cell)

    def _fitted(self, reader: Reader, subtask: str, length: int, i: int) -> Case:
        """Return the largest case that fits. Only the size changes during the search."""
        make, least, most = self._maker(reader, subtask, length, i)
        size = largest(lambda size: make(size).tokens(reader) <= length, least, most)
        if size is None:
            raise too_short(subtask, length)
        case = make(size)
        if subtask == "cwe" and size == most and case.tokens(reader) * (size + 1) <= length * size:
            raise ruler_lists.too_few_words(word_lists(self.data), length)  # there is room for one word more
        return case

    def _maker(self, reader: Reader, subtask: str, length: int, i: int) -> tuple[Maker, int, int]:
        """Return a function that builds a case of a size, and the smallest and largest sizes."""

        def rng() -> Random:
            return Random(f"{self.seed}-{subtask}-{length}-{i}")

        if subtask in ruler_needles.KINDS:
            kind = ruler_needles.KINDS[subtask]
            words, essay = word_lists(self.data), tuple(read_text(self.text).split())
            return lambda n: ruler_needles.build(kind, n, rng(), words, essay), ruler_needles.least(kind), length
        if subtask == "vt":
            example = self._example_size(reader, rng)
            return lambda n: ruler_lists.variables(n, example, rng()), ruler_lists.VT_LEAST, length
        if subtask == "cwe":
            words, least = word_lists(self.data), ruler_lists.CWE_LEAST
            return lambda n: ruler_lists.common_words(n, length, rng(), words), least, max(least, len(words.every))
        if subtask == "fwe":
            return lambda n: ruler_lists.frequent_words(n, length, rng()), ruler_lists.FWE_LEAST, length
        documents = ruler_documents.read(subtask, self.data)
        if i >= len(documents.asked):
            raise UserError(f"{subtask} has {len(documents.asked)} questions in {self.data}: give fewer samples")
        least = len(documents.asked[i].needed)
        return lambda n: ruler_documents.build(documents, i, n, rng()), least, len(documents.texts)

    def _example_size(self, reader: Reader, rng: Callable[[], Random]) -> int:
        """Return the repetitions of noise in the variable tracking example, for RULER's 500 tokens."""
        limit, least = ruler_lists.VT_EXAMPLE_TOKENS, ruler_lists.VT_LEAST
        example = ruler_lists.variables_example
        size = largest(lambda n: reader.count_tokens(example(n, rng())) <= limit, least, limit)
        return least if size is None else size

    def score(self, case: Case, text: str) -> dict[str, float]:
        """Return `accuracy`, also under the subtask's name."""
        answer = printable(text)
        match = match_part if case.data == "any" else match_all
        accuracy = match(answer, case.expected)
        return {"accuracy": accuracy, f"accuracy_{case.cell['subtask']}": accuracy}

    def summarise(self, metrics: Sequence[dict[str, float]], full: Sequence[dict[str, float]]) -> dict[str, Estimate]:
        """Return the means per subtask, and their mean as `accuracy`."""
        return mean_of_subtasks(super().summarise(metrics, full))


TASK = Ruler
