"""Base classes of question-answering tasks: a prompt, the expected answer, and a score for the
model's answer."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, get_args

from tersekv.errors import UserError, hint
from tersekv.lab.evals.haystack import prompt_tokens
from tersekv.lab.evals.prompt import Pack, Prompt
from tersekv.lab.evals.tasks.base import Estimate, Result, Sample, Task

if TYPE_CHECKING:
    from tersekv.lab.evals.reader import Reader

MOST_SAMPLES = 1_000_000


@dataclass(frozen=True)
class Case:
    """A question with its expected answer.

    - expected: strings of a correct answer. The task's score decides whether all of them or any one
      is required.
    - new_tokens: maximum number of answer tokens.
    - cell: position in the task's grid (length in tokens, depth in percent, subtask).
    - single: True if `expected` is the only correct answer; its likelihood is then measured too.
    - data: anything else that scoring needs.
    """

    id: str
    prompt: Prompt
    expected: tuple[str, ...]
    new_tokens: int
    cell: dict[str, Any] = field(default_factory=dict)
    single: bool = True
    stop: tuple[str, ...] = ()
    min_new_tokens: int = 0
    data: Any = None

    @property
    def gold(self) -> str | None:
        """The correct answer as it would follow the prompt, with a separating space; None if
        several are correct."""
        if not self.single or len(self.expected) != 1:
            return None
        before = self.prompt.answer_start or ("" if self.prompt.chat else self.prompt.context + self.prompt.question)
        return self.expected[0] if not before or before[-1].isspace() else f" {self.expected[0]}"

    def tokens(self, reader: Reader) -> int:
        """Return the number of tokens of the prompt and of the longest answer."""
        gold = reader.count_tokens(self.gold) if self.gold else 0
        return prompt_tokens(reader, self.prompt) + max(self.new_tokens, gold)


@dataclass(frozen=True)
class QuestionTask(Task):
    """A task whose samples are cases.

    - samples: number per cell of the task's grid.
    - seed: seed of all random draws.
    - pack: when the cache is packed: before-question, after-prompt or during-prefill.
    """

    samples: int = 10
    seed: int = 0
    pack: Pack = "before-question"

    def __post_init__(self) -> None:
        check_choice(self.pack, get_args(Pack), "pack")
        if not 1 <= self.samples <= MOST_SAMPLES:
            raise UserError(f"samples={self.samples} is not allowed; give 1 to {MOST_SAMPLES:,} per cell")

    def about(self) -> str:
        """Describe the given options and the number of samples in plain words."""
        said = {field.name: getattr(self, field.name) for field in fields(self)}
        parts = [
            f"{name} {str(value).lower() if isinstance(value, bool) else str(value).replace(',', ', ')}"
            for name, value in said.items()
            if value != "" and name not in ("samples", "seed", "pack")
        ]
        parts.append(f"packed {self.pack.replace('-', ' ' if self.pack == 'during-prefill' else ' the ')}")
        drawn = f", seed {self.seed}" if self.seed else ""
        return "; ".join([*parts, f"{self.samples} sample{'' if self.samples == 1 else 's'} each{drawn}"])

    @abstractmethod
    def cases(self, reader: Reader) -> Iterator[Case]:
        """Yield the cases in order."""

    @abstractmethod
    def score(self, case: Case, text: str) -> dict[str, float]:
        """Return the metrics of an answer, including `accuracy`."""

    def check(self, reader: Reader) -> None:
        """Check that pack=during-prefill takes the recipe and the model."""
        if self.pack == "during-prefill":
            reader.check_coded()

    def instances(self, reader: Reader) -> Sequence[Sample]:
        """Return all cases.

        Raises:
            UserError: a case exceeds the model's context, or data or options are invalid.
        """
        from tersekv.lab.evals.tokenise import digest  # imports torch, which listing tasks does without

        made = []
        for case in self.cases(reader):
            tokens = case.tokens(reader)
            if tokens > reader.context_tokens:
                raise UserError(
                    f"sample {case.id} has {tokens:,} tokens with its answer, but this model's context is "
                    f"{reader.context_tokens:,}: give a shorter length"
                )
            content = repr((case.prompt, case.expected)).encode()
            limits = case.new_tokens, case.min_new_tokens, case.stop
            given = digest(reader.tokenizer, case.prompt, case.gold, *limits)
            made.append(Sample(case.id, case, hashlib.sha256(content).hexdigest()[:16], given))
        return made

    def evaluate(self, sample: Sample, reader: Reader, full: Reader) -> Result:
        """Let `reader` answer the case and score its answer."""
        case: Case = sample.data
        answer = reader.answer(case.prompt, case.new_tokens, case.gold, case.stop, case.min_new_tokens, self.pack)
        metrics = self.score(case, answer.text)
        if answer.gold_nll is not None:
            metrics["gold_nll"] = answer.gold_nll
        details = {**case.cell, "expected": list(case.expected), "answer": answer.text}
        return Result(metrics, answer.prompt_tokens, answer.footprint, details)

    def summarise(self, metrics: Sequence[dict[str, float]], full: Sequence[dict[str, float]]) -> dict[str, Estimate]:
        """Return means over the samples that have the metric."""
        names = dict.fromkeys(name for sample in metrics for name in sample)
        return {name: Estimate.of([sample[name] for sample in metrics if name in sample]) for name in names}


def mean_of_subtasks(estimates: dict[str, Estimate]) -> dict[str, Estimate]:
    """Set `accuracy` to the mean of the subtasks' means, independent of their numbers of samples.

    The standard error treats subtasks as independent.
    """
    parts = [estimate for name, estimate in estimates.items() if name.startswith("accuracy_")]
    if not parts:
        return estimates
    mean = sum(part.mean for part in parts) / len(parts)
    stderr = sum(part.stderr**2 for part in parts) ** 0.5 / len(parts)
    return {**estimates, "accuracy": Estimate(mean, stderr)}


def chosen(text: str, known: Sequence[str], option: str) -> tuple[str, ...]:
    """Parse names separated by commas, each one of `known`; `all` selects all of them.

    Raises:
        UserError: an unknown name.
    """
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if names == ("all",):
        return tuple(known)
    for name in names:
        if name not in known:
            raise UserError(f"{option} {name!r} is not known{hint(name, known)} (known: all, {', '.join(known)})")
    return names


def check_choice(value: str, known: Sequence[str], option: str) -> None:
    """Reject a value that is not in `known`.

    Raises:
        UserError: `value` is not one of them.
    """
    if value not in known:
        raise UserError(f"{option} is {value!r}{hint(value, known)}: choose {' or '.join(known)}")


def check_lengths(lengths: Sequence[int], reader: Reader) -> None:
    """Reject lengths beyond the model's context.

    Raises:
        UserError: a length exceeds the model's context.
    """
    for length in lengths:
        if length > reader.context_tokens:
            raise UserError(
                f"length {length:,} exceeds this model's context of {reader.context_tokens:,} tokens: give a shorter "
                "length"
            )


def too_short(name: str, length: int) -> UserError:
    """Return the error for a length into which not even the smallest haystack fits."""
    return UserError(f"{name} does not fit into {length:,} tokens with its answer: give a greater length")
