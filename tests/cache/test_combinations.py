"""Features of recipes meet each other: every combination that docs/recipes.md does not refuse works.

Each is fed with a rollback, beams, a saved and loaded cache, attention weights, and rows with padding.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from golden import TOLERANCE
from golden_feeding import Case, Step, run

STORY = "150 1x9 crop5 33 1x34 rows1,0,1 save 1x5 70 w1"
SHARED = "150 1x9 crop5 33 1x34 rows1,0 1x5 70"
"""The same for processes that share a cache."""

KEEPS = [("", "generated=exact"), ("", "found=5"), ("", "bias_correction=full")]
EVICTS = [("", "rest=2"), ("", "bias_correction=half")]
POLICIES = {
    "window:recent=16": KEEPS,
    "mixed:recent=16": KEEPS,
    "mixed:recent=16,allot=prompt": KEEPS,
    "snapkv:recent=16,budget=0.5": EVICTS,
    "h2o:recent=16,budget=96": EVICTS,
    "h2o:recent=16,budget=96,evict=block": EVICTS,
    "headkv:recent=16,budget=0.4": EVICTS,
    "pyramidkv:recent=16,budget=96,window=16": EVICTS,
    "streaming:recent=16,budget=96": EVICTS,
    "subgen:recent=16,budget=96": EVICTS,
}
RECIPES = [
    ",".join(filter(None, [policy, *chosen])) + "+kivi:bits=4"
    for policy, options in POLICIES.items()
    for chosen in itertools.product(*options)
]


def outputs(steps: list[Step]) -> list[list[float]]:
    """Return what attention gave after each step, see `golden_content.signature`."""
    refused = [step for step in steps if "refused" in step or "failed" in step]
    assert not refused
    return [step["attention"] for step in steps if "attention" in step]


@pytest.mark.usefixtures("scored_heads")
@pytest.mark.parametrize("ragged", [False, True], ids=["", "padding"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_all_kernels_agree(recipe: str, ragged: bool, tmp_path: Path):
    native, reference = (
        outputs(run(Case(recipe, STORY, ragged=ragged, backend=backend, hashed=not backend), tmp_path))
        for backend in ("", "reference")
    )
    for ours, theirs in zip(native, reference, strict=True):
        assert ours == pytest.approx(theirs, abs=TOLERANCE["float32"])


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe.startswith("window")])
def test_processes_agree_with_one(recipe: str, tmp_path: Path):
    alone = outputs(run(Case(recipe, SHARED, hashed=False), tmp_path))
    both = outputs(run(Case(recipe, SHARED, shares="tokens", hashed=False), tmp_path))
    for ours, theirs in zip(both, alone * 2, strict=True):
        assert ours == pytest.approx(theirs, abs=TOLERANCE["float32"])
