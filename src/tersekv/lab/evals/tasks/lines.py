"""Line retrieval.

`variant=longeval`:

    Below is a record of lines I want you to remember. Each line begins with 'line <line index>' and contains …
    line torpid-kid: REGISTER_CONTENT is <24169>
    line wide-eyed-lender: REGISTER_CONTENT is <3119>
    …
    Now the record is over. Tell me what is the <REGISTER_CONTENT> in line torpid-kid? I need the number.   → 24169

Source: LongEval (Li et al., lmsys.org/blog/2023-06-29-longchat; DachengLi1/LongChat,
longeval/generate_testcases.py).

Kept:

- text, chat template, and names of an adjective and a noun;
- numbers from 1 to 50,000, and a uniformly drawn target;
- at most 100 answer tokens, of which the last number counts;
- `data` reads LongEval's own cases (`200_lines.jsonl`); smaller cases are drawn from them and keep
  the target.

Different:

- The space at the end of the prompt is omitted.
- Names are distinct as in LongEval but come from tersekv.lab.evals.words, or from word lists in
  `data`.
- By default the record is packed before the question is read (`pack`).

`variant=pairs` is our own, for models too small for that wording. Lines are `torpid-kid: 24169`,
and the question is in the user's turn. The answer begins with the given name and colon, and its
first number counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from tersekv.errors import UserError
from tersekv.lab.evals.cases import Case, QuestionTask, check_choice
from tersekv.lab.evals.prompt import Prompt
from tersekv.lab.evals.scores import first_number, last_number
from tersekv.lab.evals.words import FILES, word_lists
from tersekv.units import parse_numbers

if TYPE_CHECKING:
    from tersekv.lab.evals.reader import Reader

HEADER = (
    "Below is a record of lines I want you to remember. Each line begins with 'line <line index>' and contains a "
    "'<REGISTER_CONTENT>' at the end of the line as a numerical value. For each line index, memorize its "
    "corresponding <REGISTER_CONTENT>. At the end of the record, I will ask you to retrieve the corresponding "
    "<REGISTER_CONTENT> of a certain line index. Now the record start:\n\n"
)
LINE = "line {name}: REGISTER_CONTENT is <{number}>\n"
QUESTION = "\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line {name}? I need the number."
PAIRS_HEADER = "Below is a record of names and their numbers. Remember the number of each name.\n\n"
PAIRS_LINE = "{name}: {number}\n"
PAIRS_QUESTION = "\nThe record is over. What is the number of {name}?"
VARIANTS = ("longeval", "pairs")
MOST_LINES = 100_000
Shipped = tuple[dict[str, int], str]
"""Numbers by name, and the name that is asked for."""


@dataclass(frozen=True)
class Lines(QuestionTask):
    """Line retrieval task.

    - lines: numbers of lines, separated by commas.
    - variant: wording of the lines: longeval, or pairs, which is simpler.
    - data: a folder with LongEval's `<n>_lines.jsonl` (for variant longeval) or with word lists.
    """

    lines: str = "10,20"
    variant: str = "longeval"
    data: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_numbers(self.lines, "lines", 1, MOST_LINES)
        check_choice(self.variant, VARIANTS, "variant")

    def cases(self, reader: Reader) -> Iterator[Case]:
        """Yield the samples of each number of lines."""
        for count in parse_numbers(self.lines, "lines", 1, MOST_LINES):
            shipped = self._shipped(count)
            for i in range(self.samples):
                rng = Random(f"{self.seed}-{count}-{i}")
                if shipped:
                    pairs, name = subset(shipped[i % len(shipped)], count, rng)
                else:
                    names = word_lists(self.data).keys(rng, count)
                    pairs = {name: rng.randint(1, 50_000) for name in names}
                    name = rng.choice(names)
                yield build(self.variant, pairs, name, f"{count}-{i}")

    def _shipped(self, count: int) -> list[Shipped]:
        """Return LongEval's cases with the smallest sufficient number of lines.

        The list is empty if `data` has word lists or is not given.

        Raises:
            UserError: no file has that many lines, or the file is not in LongEval's layout.
        """
        if not self.data or any((Path(self.data) / file).exists() for file in FILES):
            return []
        if self.variant != "longeval":
            raise UserError(f"variant=pairs takes names from word lists, but {self.data} has no {', '.join(FILES)}")
        files = Path(self.data).glob("[0-9]*_lines.jsonl")
        sizes = {int(size): p for p in files if (size := p.name.removesuffix("_lines.jsonl")).isdecimal()}
        enough = [size for size in sizes if size >= count]
        if not enough:
            raise UserError(
                f"data {self.data!r} has no cases of {count} lines or more (files like 200_lines.jsonl, from "
                "DachengLi1/LongChat): give fewer lines, or omit data to generate them"
            )
        path = sizes[min(enough)]
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
            found = [read_case(json.loads(line), count) for line in lines if line.strip()]
            if not found:
                raise ValueError("no cases")
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError(
                f"{path} is not in LongEval's layout ({error!r:.80}): download it again from DachengLi1/LongChat"
            ) from error
        return found

    def score(self, case: Case, text: str) -> dict[str, float]:
        """Return accuracy 1 if the number is correct: the last one (LongEval) or the first one
        (pairs)."""
        number = last_number(text) if self.variant == "longeval" else first_number(text)
        return {"accuracy": float(number == int(case.expected[0]))}


def read_case(shipped: dict[str, Any], count: int) -> Shipped:
    """Return the numbers by name of a LongEval case, which must have `count` lines, and its target's name."""
    pairs = {}
    for line in shipped["prompt"].splitlines():
        if line.startswith("line ") and ": REGISTER_CONTENT is <" in line:
            name, number = line.removeprefix("line ").split(": REGISTER_CONTENT is ")
            pairs[name] = int(number.strip("<> "))
    target = str(shipped["random_idx"][0])
    if len(pairs) < count or target not in pairs:
        raise ValueError(f"{len(pairs)} lines, the target is {target}")
    return pairs, target


def subset(shipped: Shipped, count: int, rng: Random) -> Shipped:
    """Return `count` lines of a case in their order, including its target, and the target's name."""
    pairs, target = shipped
    kept = {target, *rng.sample([name for name in pairs if name != target], count - 1)}
    return {name: number for name, number in pairs.items() if name in kept}, target


def build(variant: str, pairs: dict[str, int], name: str, id: str) -> Case:
    """Build the case that asks for `name`."""
    place = list(pairs).index(name)
    cell = {"lines": len(pairs), "depth": round(100 * place / max(1, len(pairs) - 1))}
    expected = (str(pairs[name]),)
    if variant == "pairs":
        context = PAIRS_HEADER + "".join(PAIRS_LINE.format(name=n, number=v) for n, v in pairs.items())
        return Case(id, Prompt(context, PAIRS_QUESTION.format(name=name), f"{name}:"), expected, 10, cell)
    context = HEADER + "".join(LINE.format(name=n, number=v) for n, v in pairs.items())
    return Case(id, Prompt(context, QUESTION.format(name=name)), expected, 100, cell)


TASK = Lines
