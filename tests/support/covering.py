"""A covering design chooses some of the combinations of a test's parameters.

With strength 2 every pair of values of two parameters is in a chosen case, with strength 1 every
value is. Errors that need three certain values at once are rare (Kuhn, Wallace, Gallo: Software
fault interactions and implications for software testing, 2004).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations


def covering(cases: Sequence[Sequence[str]], strength: int) -> list[int]:
    """Return indices of cases that cover all `strength` values that meet in a case, in order.

    cases: the values of each case, as many in each. Of cases that cover as much that is new, the
        one whose values were chosen least often is next.
    """
    axes = range(len(cases[0]))
    if len(axes) <= strength:
        return list(range(len(cases)))
    parts = [{tuple((a, case[a]) for a in some) for some in combinations(axes, strength)} for case in cases]
    left, used, chosen = set().union(*parts), Counter[tuple[int, str]](), []
    while left:
        best = max(
            range(len(cases)), key=lambda i: (len(parts[i] & left), -sum(used[v] for v in enumerate(cases[i])), -i)
        )
        chosen.append(best)
        left -= parts[best]
        used.update(enumerate(cases[best]))
    return sorted(chosen)
