"""Expand one recipe text into several: ranges and lists of option values form a Cartesian product.

turboquant:bits=2..4           bits=2, bits=3 and bits=4
uniform:bits=2,4,group=32,64   four recipes; an item without "=" is another value of the option before it
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

from tersekv.errors import UserError
from tersekv.recipe import Recipe

MOST_RECIPES = 1000
RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")


def expand(recipe: str) -> list[str]:
    """Return every recipe of a product as a canonical string, in order and without repetition.

    The last option changes fastest.

    Raises:
        UserError: an invalid range, or a recipe that does not parse.
    """
    parts = [_part(text) for text in re.split(r"([;+/])", "".join(recipe.split()))]
    count = 1
    for part in parts:
        count *= len(part)
    if count > MOST_RECIPES:
        raise UserError(f"'{recipe}' expands to {count:,} recipes; at most {MOST_RECIPES:,} are allowed in one run")
    return unique(str(Recipe.parse("".join(choice))) for choice in itertools.product(*parts))


def unique(recipes: Iterable[str]) -> list[str]:
    """Return the recipes in order, each once."""
    return list(dict.fromkeys(recipes))


def _part(text: str) -> list[str]:
    """Return all variants of one method or policy with its options. Other text is returned
    unchanged."""
    name, colon, rest = text.partition(":")
    if not colon:
        return [text]
    options: list[tuple[str, list[str]]] = []
    for item in rest.split(","):
        option, equals, value = item.partition("=")
        if equals:
            options.append((option, _values(item, value)))
        elif options and item:
            options[-1][1].extend(_values(item, item))
        else:
            options.append((item, []))  # the recipe's own parser reports the error
    written = [[f"{option}={value}" for value in values] or [option] for option, values in options]
    return [f"{name}:{','.join(choice)}" for choice in itertools.product(*written)]


def _values(item: str, value: str) -> list[str]:
    """Return the values of an item: 2..4 gives 2, 3 and 4."""
    if ".." not in value:
        return [value]
    found = RANGE.fullmatch(value)
    if not found or int(found[1]) > int(found[2]):
        raise UserError(f"'{item}' is not a valid range; write two whole numbers, the smaller one first, like 2..4")
    if int(found[2]) - int(found[1]) >= MOST_RECIPES:
        raise UserError(f"'{item}' has more than {MOST_RECIPES:,} values; give a shorter range")
    return [str(number) for number in range(int(found[1]), int(found[2]) + 1)]
