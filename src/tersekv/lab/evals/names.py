"""Names of recipes in tables and plots: short ones that are distinct, and long ones broken into
lines."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from tersekv.recipe import PRESETS

ALWAYS = ("bits", "budget")
"""Options that a short name always includes if the recipe has them."""
_TERM = re.compile(r"([a-z]\w*)((?::[^;+/]*)?)")


def short_names(recipes: Sequence[str]) -> dict[str, str]:
    """Return a short name for each recipe: its methods and the options that differ within the same
    methods.

    `full` and other texts that are not recipes keep their names.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for recipe in dict.fromkeys(recipes):
        groups[_TERM.sub(r"\1", recipe)].append(recipe)
    return {recipe: _without_common(recipe, group) for group in groups.values() for recipe in group}


def names_as_asked(recipes: Sequence[str], asked: Sequence[str]) -> dict[str, str]:
    """Return a short name for each canonical recipe. A preset requested by name keeps that name."""
    return short_names(recipes) | {PRESETS[name]: name for name in asked if name in PRESETS}


def broken(recipe: str, width: int) -> list[str]:
    """Break a recipe into lines of at most `width` characters, only where a part begins.

    A part that is longer than `width` has a line of its own.
    """
    lines = [""]
    for part in re.split(r"(?<=[;+/,:])", recipe):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return lines


def _without_common(recipe: str, group: Sequence[str]) -> str:
    options = [_options(other) for other in group]
    place = -1

    def kept(found: re.Match[str]) -> str:
        nonlocal place
        place += 1
        mine = _options(recipe)[place]
        differ = [
            name for name in mine if name in ALWAYS or any(other[place].get(name) != mine[name] for other in options)
        ]
        return found[1] + (":" + ",".join(f"{name}={mine[name]}" for name in differ) if differ else "")

    return _TERM.sub(kept, recipe)


def _options(recipe: str) -> list[dict[str, str]]:
    """Return the options by name, for each method and policy in a recipe."""
    return [
        dict(option.partition("=")[::2] for option in options.removeprefix(":").split(",") if option)
        for _, options in _TERM.findall(recipe)
    ]
