"""Count the kernels that one decode step of one layer launches on a GPU, by number of packed pages.

    TRITON_INTERPRET=1 python benchmarks/attend_launches.py

The counts are taken on the CPU, where the code takes the same path; the kernels are not run. The
output is one line of JSON per recipe and number of pages. `kernels` counts launches of Triton
kernels by name. `torch` counts torch operations that process elements (not views or allocations);
each is at least one launch on a GPU.

The layer holds attention sinks, packed pages of 128 tokens and a sliding window of recent tokens.
The step runs once before it is counted, so that data built once per set of pages exists.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import torch

from encode_launches import Operations, kernels
from tersekv.attention.read import AttentionCall, attend_store
from tersekv.cache.layer import LayerStore
from tersekv.kernels import backends
from tersekv.recipe import Recipe
from tersekv.transforms.rope import standard_rope

RECIPES = {
    "grid": "kivi:bits=4", "trellis and mean": "trellis:bits=2,calibration=prompt", "polar": "polarquant",
    "signs": "qjl:initial_layers=0", "sparse keys": "kvquant:bits=3,calibration=prompt",
    "rotated grid": "turboquant:bits=4",
}  # fmt: skip
ROPE = standard_rope(64)
PAGES = (1, 5, 20)
PAGE_TOKENS = 128


def layer(recipe: str, pages: int) -> LayerStore:
    """Return a layer of 2 key-value heads with 64 channels and the given number of packed pages."""
    with backends.forced("auto"):  # encoding is not counted
        keys, values = torch.randn(2, 1, 2, pages * PAGE_TOKENS + 36, 64).bfloat16().unbind(0)
        plan = Recipe.parse(f"window:sinks=4,recent=32,start=36+{recipe}").plan(0, 1)
        store = LayerStore(plan, keys, values, None, ROPE)
        first = PAGE_TOKENS + 36
        store.append(keys[:, :, :first], values[:, :, :first])
        for at in range(first, keys.shape[2], PAGE_TOKENS):
            store.append(*(x[:, :, at : at + PAGE_TOKENS] for x in (keys, values)))
    return store


def step(recipe: str, pages: int) -> dict[str, Any]:
    """Count the launches of attention over the layer for one token."""
    store = layer(recipe, pages)
    held = len(list(store.packed_pages()))
    assert held == pages, f"expected {pages} pages, got {held}"
    call = AttentionCall(torch.randn(1, 8, 1, 64).bfloat16(), None, 64**-0.5)
    with backends.forced("triton"), kernels(execute=False) as launched:
        attend_store(store, call)
        launched.clear()
        with Operations() as counted:
            attend_store(store, call)
    return {"kernels": dict(Counter(launched)), "torch": counted.torch}


def main() -> None:
    """Print one line of JSON per recipe and number of pages."""
    torch.manual_seed(0)
    for name, recipe in RECIPES.items():
        for pages in PAGES:
            print(json.dumps({"layouts": name, "recipe": recipe, "pages": pages, **step(recipe, pages)}), flush=True)


if __name__ == "__main__":
    main()
