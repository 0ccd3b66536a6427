"""RULER's eight needle tasks (NVIDIA/RULER, scripts/data/synthetic/niah.py and
scripts/synthetic.yaml).

    A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about …
    … One of the special magic numbers for torpid-kid is: 1683472. …
    What is the special magic number for torpid-kid mentioned in the provided text?
    The special magic number for torpid-kid mentioned in the provided text is         → 1683472

Kept:

- the texts and their singular forms, keys and values;
- the kinds of haystack (repeated noise, essays, other needles);
- needle depths: 40 steps between sentences of essays, random lines otherwise.

Different:

- Keys are distinct. In RULER two may be equal by chance.
- The order of needles is drawn for each sample. RULER uses one order for all.
- A sentence ends at its end mark. RULER uses a trained tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from uuid import UUID

from tersekv.lab.evals.cases import Case
from tersekv.lab.evals.haystack import NOISE, sentences, spread
from tersekv.lab.evals.prompt import Prompt
from tersekv.lab.evals.words import Words

HEAD = (
    "Some special magic {values} are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {values} afterwards.\n"
)
QUESTION = "\nWhat are all the special magic {values} for {query} mentioned in the provided text?"
ANSWER = " The special magic {values} for {query} mentioned in the provided text are"
NEEDLE = "One of the special magic {values} for {key} is: {value}."
NEW_TOKENS = 128
DEPTHS = tuple(round(100 * i / 39) for i in range(40))


@dataclass(frozen=True)
class Kind:
    """Settings of a task: the haystack, the kinds of keys and values, and how many are hidden and
    queried."""

    haystack: str
    key: str = "words"
    value: str = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


KINDS = {
    "niah_single_1": Kind("noise"),
    "niah_single_2": Kind("essay"),
    "niah_single_3": Kind("essay", value="uuids"),
    "niah_multikey_1": Kind("essay", keys=4),
    "niah_multikey_2": Kind("needle"),
    "niah_multikey_3": Kind("needle", key="uuids", value="uuids"),
    "niah_multivalue": Kind("essay", values=4),
    "niah_multiquery": Kind("essay", keys=4, queries=4),
}


def build(kind: Kind, size: int, rng: Random, words: Words, essay: tuple[str, ...]) -> Case:
    """Build a case without id and cell. size: repetitions of noise, words of the essay, or other
    needles."""
    keys = _distinct(kind.key, kind.keys, rng, words)
    held = {key: [_drawn(kind.value, rng, words) for _ in range(kind.values)] for key in keys}
    needles = [NEEDLE.format(values=kind.value, key=key, value=value) for key in keys for value in held[key]]
    asked = rng.sample(keys, kind.queries)
    rng.shuffle(needles)
    if kind.haystack == "essay":
        context = _in_essay(" ".join(_repeated(essay, size)), needles, rng)
    elif kind.haystack == "noise":
        context = "\n".join(spread([NOISE] * size, needles, rng))
    else:
        others = [
            NEEDLE.format(values=kind.value, key=_drawn(kind.key, rng, words), value=_drawn(kind.value, rng, words))
            for _ in range(size)
        ]
        context = "\n".join(spread(others, needles, rng))
    expected = tuple(value for key in asked for value in held[key])
    return Case("", _prompt(kind.value, context, asked, len(expected) == 1), expected, NEW_TOKENS)


def least(kind: Kind) -> int:
    """Return the smallest size with room for the needles."""
    return 1 if kind.haystack == "essay" else max(5, kind.keys * kind.values)


def _prompt(values: str, context: str, asked: list[str], single: bool) -> Prompt:
    query = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
    head, question, answer = HEAD, QUESTION, ANSWER
    if single:
        values = values[:-1]
        head = head.replace("Some", "A").replace("are", "is")
        question = question.replace("are all", "is")
        answer = answer.replace("are", "is")
    return Prompt(
        head.format(values=values) + context,
        question.format(values=values, query=query),
        answer.format(values=values, query=query),
    )


def _drawn(what: str, rng: Random, words: Words) -> str:
    if what == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    return words.key(rng) if what == "words" else str(UUID(int=rng.getrandbits(128), version=4))


def _distinct(what: str, count: int, rng: Random, words: Words) -> list[str]:
    made: dict[str, None] = {}
    while len(made) < count:
        made[_drawn(what, rng, words)] = None
    return list(made)


def _repeated(words: tuple[str, ...], size: int) -> list[str]:
    return list((words * -(-size // len(words)))[:size])


def _in_essay(text: str, needles: list[str], rng: Random) -> str:
    parts = sentences(text)
    places = sorted(int(len(parts) * depth / 100) for depth in rng.sample(DEPTHS, len(needles)))
    pieces, last = [], 0
    for place, needle in zip(places, needles, strict=True):
        pieces += [" ".join(parts[last:place]), needle]
        last = place
    return " ".join([*pieces, " ".join(parts[last:])])
