"""RULER: thirteen tasks made to a length.

    A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about …
    The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.
    One of the special magic numbers for torpid-kid is: 1683472.
    The grass is green. …
    What is the special magic number for torpid-kid mentioned in the provided text?
    The special magic number for torpid-kid mentioned in the provided text is         → 1683472

Source: Hsieh et al., RULER (arXiv 2404.06654; NVIDIA/RULER at c3f5e3b). What each task keeps and what differs stands
in tersekv.lab.evals.ruler_needles, ruler_lists and ruler_documents.

Kept: the prompt in a user's turn with the answer's first words given; lengths that include the template and the
longest answer; greedy answers, cleaned of control characters; the share of the expected strings in the answer, or for
questions whether one of them is there; the mean over subtasks as the result.
Different: official runs take 500 samples at 4k to 128k; sizes are fitted for each sample, to the token, instead of in
steps of up to 500 words; essays are corpus `pydoc` or a text of yours, read from its beginning; the space before the
answer's first words is kept, the one after them is not. The text is packed before the question is read.

The default subtasks are those in which SmolLM2-135M leaves room above chance; the others are near its floor.
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
"""Makes a case of a size in the subtask's own unit."""


@dataclass(frozen=True)
class Ruler(QuestionTask):
    """samples: per subtask and length. lengths: tokens with the answer. subtasks: names with commas, or `all`.
    data: a folder with question sets (needed for qa_1 and qa_2) and word lists. text: essays, `pydoc` or a file."""

    lengths: str = "1k,2k"
    subtasks: str = "niah_single_1,niah_single_2,niah_multikey_1"
    data: str = ""
    text: str = "pydoc"

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_lengths(self.lengths)
        chosen(self.subtasks, SUBTASKS, "subtasks")

    def cases(self, reader: Reader) -> Iterator[Case]:
        """Samples of each subtask and length."""
        lengths = parse_lengths(self.lengths)
        check_lengths(lengths, reader)
        for subtask in chosen(self.subtasks, SUBTASKS, "subtasks"):
            for length in lengths:
                for i in range(self.samples):
                    made = self._fitted(reader, subtask, length, i)
                    cell = {"subtask": subtask, "length": length}
                    yield replace(made, id=f"{subtask}-{length}-{i}", cell=cell)

    def _fitted(self, reader: Reader, subtask: str, length: int, i: int) -> Case:
        """The largest case that fits, by a search in which nothing but the size changes."""
        make, least, most = self._maker(reader, subtask, length, i)
        size = largest(lambda size: make(size).tokens(reader) <= length, least, most)
        if size is None:
            raise too_short(subtask, length)
        return make(size)

    def _maker(self, reader: Reader, subtask: str, length: int, i: int) -> tuple[Maker, int, int]:
        """How to make a case of a size, and the least and the most size there is."""

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
            words = word_lists(self.data)
            return lambda n: ruler_lists.common_words(n, length, rng(), words), ruler_lists.CWE_LEAST, length
        if subtask == "fwe":
            return lambda n: ruler_lists.frequent_words(n, length, rng()), ruler_lists.FWE_LEAST, length
        documents = ruler_documents.read(subtask, self.data)
        if i >= len(documents.asked):
            raise UserError(f"{subtask} has {len(documents.asked)} questions in {self.data}: ask for fewer samples")
        least = len(documents.asked[i].needed)
        return lambda n: ruler_documents.build(documents, i, n, rng()), least, len(documents.texts)

    def _example_size(self, reader: Reader, rng: Callable[[], Random]) -> int:
        """Repetitions of noise in the example of variable tracking, for RULER's 500 tokens."""
        limit, least = ruler_lists.VT_EXAMPLE_TOKENS, ruler_lists.VT_LEAST
        example = ruler_lists.variables_example
        size = largest(lambda n: reader.count_tokens(example(n, rng())) <= limit, least, limit)
        return least if size is None else size

    def score(self, case: Case, text: str) -> dict[str, float]:
        """`accuracy`, under the subtask's name as well."""
        answer = printable(text)
        match = match_part if case.data == "any" else match_all
        accuracy = match(answer, case.expected)
        return {"accuracy": accuracy, f"accuracy_{case.cell['subtask']}": accuracy}

    def summarise(self, metrics: Sequence[dict[str, float]], full: Sequence[dict[str, float]]) -> dict[str, Estimate]:
        """Means per subtask, and their mean as `accuracy`."""
        return mean_of_subtasks(super().summarise(metrics, full))


TASK = Ruler
