"""RULER's variable tracking, common words and frequent words (NVIDIA/RULER,
scripts/data/synthetic).

    Memorize and track the chain(s) of variable assignment hidden in the following text.
    … VAR JSAQE = 16482 … VAR KWLLZ = VAR JSAQE …
    Question: Find all variables that are assigned the value 16482 in the text above.
    Answer: According to the chain(s) of variable assignment in the text above, 5 variables are assigned …

The scripts are variable_tracking.py, common_words_extraction.py and freq_words_extraction.py.

Kept:

- the texts, with each example in the same turn as the question;
- variable tracking: one chain of 4 hops, and an example of at most 500 tokens whose names have
  three letters;
- common words: 10 words appear 30 times and the others 3 times (below 4,096 tokens: 6 times and
  once);
- its example: 40 words, 10 times and 3 times (below 4,096 tokens: 20 words, 3 times and once);
- frequent words: words of six letters, whose frequencies follow Zipf's law with exponent 2; the
  most frequent one is written as dots.

Different:

- Names, words and their order are drawn for each sample, including the example. RULER draws orders
  once for all.
- A variable's name is never in the example and in the question.
- The space at the end of the variable tracking prompt is omitted.
- Too short word lists are an error. RULER falls back to a second list.
"""

from __future__ import annotations

import math
import string
from itertools import pairwise
from random import Random

from tersekv.errors import UserError
from tersekv.lab.evals.cases import Case
from tersekv.lab.evals.haystack import NOISE, spread
from tersekv.lab.evals.prompt import Prompt
from tersekv.lab.evals.words import FILES, Words

VT_HEAD = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
VT_QUESTION = "\nQuestion: Find all variables that are assigned the value {value} in the text above."
VT_ANSWER = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the "
    "value {value}, they are:"
)
VT_NEW_TOKENS, VT_HOPS, VT_EXAMPLE_TOKENS = 30, 4, 500
VT_LEAST = VT_HOPS + 1

CWE_HEAD = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n"
)
CWE_QUESTION = "\nQuestion: What are the 10 most common words in the above list?"
CWE_ANSWER = " Answer: The top 10 words that appear most often in the list are:"
CWE_NEW_TOKENS, CWE_COMMON = 120, 10
CWE_LEAST = CWE_COMMON + 1

FWE_HEAD = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
    "appeared coded words. "
)
FWE_QUESTION = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
    "appeared words in the above coded text?"
)
FWE_ANSWER = " Answer: According to the coded text above, the three most frequently appeared words are:"
FWE_NEW_TOKENS, FWE_LETTERS = 50, 6
FWE_LEAST = math.ceil(16 * math.pi**2 / 6)
"""Smallest number of words in which the fourth-ranked word appears at least once."""


def variables(size: int, example_size: int, rng: Random) -> Case:
    """Build variable tracking with `size` repetitions of noise, and `example_size` in the example."""
    names = _names(5, rng)
    example_names = _names(3, rng)
    context, value = _chain(names, size, rng)
    example, example_value = _chain(example_names, example_size, rng)
    shown = VT_HEAD + example + VT_QUESTION.format(value=example_value)
    # Two spaces: one ends RULER's prompt, one precedes the answer.
    shown += VT_ANSWER.format(value=example_value, count=VT_HOPS + 1) + "  " + " ".join(example_names) + "\n\n"
    prompt = Prompt(
        shown + VT_HEAD + context, VT_QUESTION.format(value=value), VT_ANSWER.format(value=value, count=VT_HOPS + 1)
    )
    return Case("", prompt, tuple(names), VT_NEW_TOKENS)


def variables_example(size: int, rng: Random) -> str:
    """Return an example with `size` repetitions of noise, for counting its tokens."""
    context, value = _chain(_names(3, rng), size, rng)
    return VT_HEAD + context + VT_QUESTION.format(value=value) + VT_ANSWER.format(value=value, count=VT_HOPS + 1)


def _names(letters: int, rng: Random) -> list[str]:
    made: dict[str, None] = {}
    while len(made) < VT_HOPS + 1:
        made["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
        made.pop("VAR", None)
    return list(made)


def _chain(names: list[str], size: int, rng: Random) -> tuple[str, str]:
    value = str(rng.randint(10_000, 99_998))
    links = [f"VAR {names[0]} = {value}", *(f"VAR {b} = VAR {a} " for a, b in pairwise(names))]
    return "\n".join(spread([NOISE] * size, links, rng)), value


def common_words(size: int, length: int, rng: Random, words: Words) -> Case:
    """Build common words with `size` different words for a prompt of `length` tokens."""
    every = words.every
    often, seldom, example = (6, 1, (20, 3, 1)) if length < 4096 else (30, 3, (40, 10, 3))
    if max(size, example[0]) > len(every):
        raise too_few_words(words, length)
    shown, shown_common = _numbered(rng.sample(every, example[0]), example[1], example[2], rng)
    context, common = _numbered(rng.sample(every, size), often, seldom, rng)
    answered = " ".join(f"{i}. {word}" for i, word in enumerate(shown_common, 1))
    before = CWE_HEAD + shown + CWE_QUESTION + CWE_ANSWER + f" {answered}\n"
    return Case("", Prompt(before + CWE_HEAD + context, CWE_QUESTION, CWE_ANSWER), tuple(common), CWE_NEW_TOKENS)


def too_few_words(words: Words, length: int) -> UserError:
    """Return the error for word lists that do not fill a prompt."""
    return UserError(
        f"cwe needs more than the {len(words.every):,} available words to fill {length:,} tokens: give a folder with "
        f"longer {', '.join(FILES[:-1])} and {FILES[-1]} as data, or a smaller length"
    )


def _numbered(words: list[str], often: int, seldom: int, rng: Random) -> tuple[str, list[str]]:
    common = words[:CWE_COMMON]
    listed = common * often + words[CWE_COMMON:] * seldom
    rng.shuffle(listed)
    return " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1)), common


def frequent_words(size: int, length: int, rng: Random) -> Case:
    """Build frequent words with about `size` coded words, for a prompt of `length` tokens."""
    vocabulary: dict[str, None] = {}
    while len(vocabulary) < max(4, (length - FWE_NEW_TOKENS) // 50):
        vocabulary["".join(rng.choices(string.ascii_lowercase, k=FWE_LETTERS))] = None
    ranked = ["...", *list(vocabulary)[1:]]
    text = [word for k, word in enumerate(ranked, 1) for _ in range(int(size / (k * k * math.pi**2 / 6)))]
    rng.shuffle(text)
    prompt = Prompt(FWE_HEAD + " ".join(text), FWE_QUESTION, FWE_ANSWER)
    return Case("", prompt, tuple(ranked[1:4]), FWE_NEW_TOKENS)
