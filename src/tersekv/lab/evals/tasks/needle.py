"""Needle in a haystack, over a grid of lengths and depths.

    This is a very long story book: <book> … essays …
    The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day.
    … essays … </book>.
     Based on the content of the book, Question: What is the best thing to do in San Francisco?
    Answer:                             → Eat a sandwich and sit in Dolores Park on a sunny day.

Source: Kamradt's LLMTest_NeedleInAHaystack (placement, needle, question, 200 tokens reserved). The
prompt and the score are those of Fu et al. (arXiv 2402.10171;
FranxYao/Long-Context-Data-Engineering, eval/needle), as PolarQuant uses them.

`recall` is the number of distinct words of "eat a sandwich and sit in Dolores Park on a sunny day."
in the answer, over all 12. The word "a" occurs twice, so a perfect answer scores 11/12. `accuracy`
is 1 if that phrase is in the answer.

`protocol=minference`: the needle is "The special magic {city} number is: {7 digits}", in the prompt
of MInference (arXiv 2407.02490; experiments/needle_in_a_haystack). `accuracy` is 1 if the number is
in the answer.

Kept: everything above, and greedy answers of at most 50 (MInference: 32) tokens. Fu et al. also log
a ROUGE-1 F score, but plot recall.

Different:

- Haystacks are the corpus `pydoc` or a file, because Kamradt's essays cannot be distributed.
  MInference uses PG-19.
- The first sample of seed 0 reads the text from its beginning, as Kamradt does. The others start at
  random places.
- Cities are drawn from the distinct names of MInference's list.
- chat=true puts the prompt into a user's turn and its last words ("Answer:") at the beginning of
  the answer. The authors' plain prompts (chat=false) begin with `<|im_start|>` and end with a
  space. chat=true omits both, and chat=false omits the space.
- If question and answer need more than the 200 reserved tokens, more are reserved.
- By default the haystack is packed before the question is read (`pack`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from tersekv.lab.evals.cases import Case, QuestionTask, check_choice, check_lengths, too_short
from tersekv.lab.evals.haystack import first_tokens, insert, read_text
from tersekv.lab.evals.prompt import Prompt
from tersekv.lab.evals.scores import word_recall
from tersekv.units import parse_lengths, parse_numbers

if TYPE_CHECKING:
    from tersekv.lab.evals.reader import Reader

BUFFER = 200
EATEN = "eat a sandwich and sit in Dolores Park on a sunny day."
CITIES = (
    "Chicago,Yangon,Antananarivo,Colombo,Almaty,Sydney,Mexico City,Seattle,Lagos,Amsterdam,Belgrade,Cairo,Baghdad,"
    "Damascus,Kigali,Dakar,Sofia,Victoria,Tashkent,Mumbai,Barcelona,Amman,Toronto,Bratislava,Johannesburg,Thimphu,"
    "Bangkok,Santiago,San Francisco,Paris,Rabat,Copenhagen,Madrid,Ho Chi Minh City,Sarajevo,Delhi,Istanbul,Khartoum,"
    "Helsinki,Doha,Kuala Lumpur,Budapest,Shanghai,Moscow,Los Angeles,Oslo,Berlin,Bangalore,Tokyo,Melbourne,Port Louis,"
    "Lisbon,Nairobi,Kampala,Lima,Maputo,Vancouver,Dubai,Jakarta,Yerevan,Beirut,Athens,Bucharest,Brussels,Tunis,Astana,"
    "Seoul,Buenos Aires,Vienna"
)
PROTOCOLS = ("fu", "minference")


class Hidden(NamedTuple):
    """A needle and the text around it.

    - around: text before and after the haystack.
    - last: last words of the prompt. In a chat the answer begins with them.
    """

    needle: str
    around: tuple[str, str]
    question: str
    last: str
    expected: str
    new_tokens: int


@dataclass(frozen=True)
class Needle(QuestionTask):
    """Needle-in-a-haystack task.

    - lengths: tokens of prompt and answer, separated by commas.
    - depths: places of the needle in percent of the text.
    - protocol: needle, prompt and score: fu or minference.
    - text: "pydoc" (the language reference in Python's standard library) or a file.
    - chat: form of the prompt: true for a user's turn, false for plain text.
    """

    samples: int = 1
    lengths: str = "1k,2k"
    depths: str = "0,25,50,75,100"
    protocol: str = "fu"
    text: str = "pydoc"
    chat: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_lengths(self.lengths)
        parse_numbers(self.depths, "depths", 0, 100)
        check_choice(self.protocol, PROTOCOLS, "protocol")

    def cases(self, reader: Reader) -> Iterator[Case]:
        """Yield the samples of each length and depth."""
        lengths = parse_lengths(self.lengths)
        check_lengths(lengths, reader)
        for length in lengths:
            for depth in parse_numbers(self.depths, "depths", 0, 100):
                for i in range(self.samples):
                    yield self._case(reader, length, depth, i)

    def _case(self, reader: Reader, length: int, depth: int, i: int) -> Case:
        hidden = fu() if self.protocol == "fu" else minference(Random(f"{self.seed}-{length}-{depth}-{i}"))
        id, cell = f"{length}-{depth}-{i}", {"length": length, "depth": depth}
        needed = self._filled(hidden, "", id, cell).tokens(reader)
        room = length - max(BUFFER, needed) - reader.count_tokens(hidden.needle)
        text = self._text(i)
        while room > 0:
            haystack = insert(reader, first_tokens(reader, text, room), hidden.needle, depth)
            case = self._filled(hidden, haystack, id, cell)
            over = case.tokens(reader) - length
            if over <= 0:
                return case
            room -= over  # tokens at the boundaries of the parts may change when the parts are joined
        raise too_short("needle", length)

    def _text(self, i: int) -> str:
        """Return the text from the start of sample `i`, followed by the whole text."""
        text = read_text(self.text)
        start = Random(f"{self.seed}-{i}").randrange(len(text)) if self.seed or i else 0
        start = text.rfind("\n", 0, start) + 1
        return text[start:] + "\n\n" + text

    def _filled(self, hidden: Hidden, haystack: str, id: str, cell: dict[str, int]) -> Case:
        opening = "<|im_start|> " if self.protocol == "fu" and not self.chat else ""
        context = opening + haystack.join(hidden.around)
        if self.chat:
            prompt = Prompt(context, hidden.question, hidden.last.strip())
        else:
            prompt = Prompt(context, hidden.question + hidden.last, chat=False)
        return Case(id, prompt, (hidden.expected,), hidden.new_tokens, cell)

    def score(self, case: Case, text: str) -> dict[str, float]:
        """Return `accuracy`, and `recall` for Fu et al."""
        expected = case.expected[0]
        metrics = {"accuracy": float(expected.rstrip(".").lower() in text.lower())}
        if self.protocol == "fu":
            metrics["recall"] = word_recall(text, expected)
        return metrics


def fu() -> Hidden:
    """Return Kamradt's needle in Fu et al.'s prompt."""
    return Hidden(
        needle=f"\nThe best thing to do in San Francisco is {EATEN}\n",
        around=("This is a very long story book: <book> ", " </book>.\n"),
        question=" Based on the content of the book, Question: What is the best thing to do in San Francisco?",
        last="\nAnswer:",
        expected=EATEN,
        new_tokens=50,
    )


def minference(rng: Random) -> Hidden:
    """Return MInference's needle and prompt."""
    city, number = rng.choice(CITIES.split(",")), str(rng.randint(10**6, 10**7 - 1))
    return Hidden(
        needle=f"\nThe special magic {city} number is: {number}\n",
        around=(
            "Write a high-quality answer for the given question using only the provided search results (some of which "
            "might be irrelevant).\n",
            "",
        ),
        question=(
            f"\n\nQuestion: What is the special magic {city} number? Don't give information outside the document or "
            "repeat your findings. Keep your response short and direct."
        ),
        last=" Answer:",
        expected=number,
        new_tokens=32,
    )


TASK = Needle
