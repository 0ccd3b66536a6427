"""Golden hashes: what caches hold after every step of a few stories, which a rewrite must not change.

Each case feeds one recipe with made tokens, through `cache.update` and the attention function
(`golden_feeding.py`). After each step it compares with `golden.json`:

- held: the positions that each layer, row and head holds, and the lengths that a mask needs;
- tokens: keys and values of each position, decoded, as attention reads them;
- parts, bytes: every number of the footprint after every call, and the bytes at the end of the step;
- saved: the tensors of a saved file, by content alone, sorted; the story goes on with the loaded cache;
- read: decoded tokens that a model without our attention gets;
- attention: sums of the outputs, compared with a tolerance, because CPUs round products differently.

Nothing else depends on how products are rounded: inputs are small integers, and codecs multiply
nothing. Cases with RoPE removed (`exact=False`) leave out tokens and saved tensors.

No name of a class or attribute is hashed. Only `golden_content.segments` asks stores what they hold.
`golden.py` writes the hashes anew, and compares hundreds of further cases with another commit.
"""

from __future__ import annotations

import json

import pytest

from golden import DIFFERS, HASHES, ROUNDS, SAME, WORKS, brief, compared
from golden_cases import CASES, matrix
from golden_feeding import Case, run

GOLDEN = json.loads(HASHES.read_text())


@pytest.mark.usefixtures("scored_heads")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.recipe)
def test_caches_hold_the_same(case: Case, tmp_path):
    found = [brief(case, step) for step in run(case, tmp_path)]
    assert compared(case, GOLDEN[case.name], found) == (SAME, "")


def test_every_case_has_hashes_and_its_own_name():
    assert GOLDEN.keys() == {case.name for case in CASES}
    assert len({case.name for case in matrix()}) == len(matrix()) > 300


def test_verdicts():
    """A step that was refused and works now counts as equal, and so do outputs that are rounded in another way."""
    case = CASES[0]
    step = {"step": "40", "held": "a", "attention": [0.5], "bits": "b"}
    refused = {"step": "40", "refused": "UserError"}
    assert compared(case, [step], [step]) == (SAME, "")
    assert compared(case, [refused], [step]) == (WORKS, "40")
    assert compared(case, [step], [refused]) == (DIFFERS, "40: refused with UserError")
    assert compared(case, [step], [step | {"bits": "c", "attention": [0.5002]}]) == (ROUNDS, "40: bits")
    assert compared(case, [step], [step | {"held": "c", "attention": [0.6]}]) == (DIFFERS, "40: held, attention")
    assert compared(case, [step, step], [step])[0] == DIFFERS
