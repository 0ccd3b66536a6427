"""Bytes that caches hold by part, from records or predicted."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from tersekv.lab.evals.reader import FULL
from tersekv.lab.plots.base import model_name
from tersekv.lab.plots.groups import Group
from tersekv.recipe import Recipe
from tersekv.sizes.estimate import predict

if TYPE_CHECKING:
    from tersekv.sizes.cache_size import CacheShape

SAME_LENGTH = 0.98
"""Share of the longest sample's tokens from which samples count as equally long."""


class Held(NamedTuple):
    """Bytes of a recipe by part at one length. origin: source of the numbers."""

    recipe: str
    tokens: int
    parts: dict[str, int]
    bits: float
    origin: str

    @property
    def bytes(self) -> int:
        """Size of all parts together."""
        return sum(self.parts.values())

    @property
    def full(self) -> bool:
        """True for the full cache."""
        return self.recipe == FULL


def held_at_longest(group: Group) -> list[Held]:
    """Return each recipe's mean bytes over the group's longest samples, the full cache first."""
    longest = max(record["tokens"] for found in group.records.values() for record in found)
    made = []
    for recipe, found in group.records.items():
        same = [record for record in found if record["tokens"] >= SAME_LENGTH * longest]
        if same:
            names = dict.fromkeys(part for record in same for part in record["bytes_by_part"])
            parts = {part: round(fmean(record["bytes_by_part"].get(part, 0) for record in same)) for part in names}
            bits = fmean(record["bits_per_element"] for record in same)
            tokens = round(fmean(record["tokens"] for record in same))
            made.append(Held(recipe, tokens, parts, bits, f"{model_name(group.model)}, {group.title}"))
    return made


def longest(groups: Sequence[Group]) -> Group:
    """Return the group with the longest sample."""
    return max(groups, key=lambda g: max(record["tokens"] for found in g.records.values() for record in found))


def predicted(shape: CacheShape, model: str, recipes: Sequence[str], tokens: int) -> list[Held]:
    """Predict the bytes of the full cache and of recipes after one prefill of `tokens` tokens."""
    origin = f"{model_name(model)}, predicted from its shapes"
    size = shape.elements(tokens) * shape.dtype.itemsize
    made = [Held(FULL, tokens, {"exact": size}, 8.0 * shape.dtype.itemsize, origin)]
    for recipe in recipes:
        parsed = Recipe.parse(recipe)
        footprint = predict(shape, parsed, tokens)
        made.append(Held(str(parsed), tokens, dict(footprint.parts), footprint.bits_per_element, origin))
    return made
