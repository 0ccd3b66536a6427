"""A needle in a haystack, over a grid of lengths and depths.

    This is a very long story book: <book> … essays …
    The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day.
    … essays … </book>.
     Based on the content of the book, Question: What is the best thing to do in San Francisco?
    Answer:                             → Eat a sandwich and sit in Dolores Park on a sunny day.

Source: Kamradt's LLMTest_NeedleInAHaystack (placement, needle, question, 200 tokens kept free) with the prompt and the
score of Fu et al. (arXiv 2402.10171; FranxYao/Long-Context-Data-Engineering, eval/needle), as PolarQuant uses them.
`recall`: distinct words of "eat a sandwich and sit in Dolores Park on a sunny day." in the answer over all 12; "a"
stands there twice, so that a perfect answer scores 11/12. `accuracy`: that phrase is in the answer.

`protocol=minference`: needle "The special magic {city} number is: {7 digits}", prompt of MInference (arXiv 2407.02490;
experiments/needle_in_a_haystack); `accuracy`: the number is in the answer.

Kept: what is said above, greedy answers of 50 (32) tokens at most. Fu et al. log a ROUGE-1 F too, but plot recall.
Different: haystacks are corpus `pydoc` or a text of yours, for Kamradt's essays cannot be carried along (PG-19 in
MInference); seed 0's first sample reads it from the beginning, as Kamradt does, the others from drawn places. Cities
are drawn from their distinct list. chat=true puts the prompt into a user's turn and its last words ("Answer:") at the
beginning of the answer, without the `<|im_start|>` and the space that the authors' plain prompts (chat=false) begin
and end with; the space is left out of those, too. Where prompt and answer need more than the 200 tokens, they get them.
The haystack is packed before the question is read.
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
    """What is hidden, and the words around: those before and after the haystack, the question, and the prompt's last
    words, with which the answer begins in a chat."""

    needle: str
    around: tuple[str, str]
    question: str
    last: str
    expected: str
    new_tokens: int


@dataclass(frozen=True)
class Needle(QuestionTask):
    """samples: per length and depth. lengths: tokens with prompt and answer. depths: percent. protocol: `fu` or
    `minference`. text: `pydoc` or a file. chat: as a user's turn, or as plain text."""

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
        """Samples of each length and depth."""
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
            room -= over  # tokens at the edges of the parts may come out otherwise
        raise too_short("needle", length)

    def _text(self, i: int) -> str:
        """The text from where sample `i` begins to read, and then from its beginning."""
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
        """`accuracy`, and for Fu et al. `recall`."""
        expected = case.expected[0]
        metrics = {"accuracy": float(expected.rstrip(".").lower() in text.lower())}
        if self.protocol == "fu":
            metrics["recall"] = word_recall(text, expected)
        return metrics


def fu() -> Hidden:
    """Kamradt's needle in Fu et al.'s prompt."""
    return Hidden(
        needle=f"\nThe best thing to do in San Francisco is {EATEN}\n",
        around=("This is a very long story book: <book> ", " </book>.\n"),
        question=" Based on the content of the book, Question: What is the best thing to do in San Francisco?",
        last="\nAnswer:",
        expected=EATEN,
        new_tokens=50,
    )


def minference(rng: Random) -> Hidden:
    """MInference's needle and prompt."""
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
