"""Count the kernels that a GPU would launch for a decode step of a layer, and to encode a block of 32 tokens.

    TRITON_INTERPRET=1 python benchmarks/launches.py attend      # a decode step by number of packed pages.
    TRITON_INTERPRET=1 python benchmarks/launches.py encode      # a block, and a decode step that packs none.

The counts are taken on the CPU, where the code takes the same path. Each line of output is JSON.
`kernels` are launches of Triton kernels. `torch` counts torch operations that process elements (not
views or allocations); each is at least one launch on a GPU. `waits` counts values that the host reads
back. Data that is built once is not counted, because everything runs once before.

`attend`: the layer holds attention sinks, packed pages of 128 tokens and a sliding window of recent
tokens; the kernels are not run. `encode`: torch alone is counted beside the Triton kernels.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

from recorded import parser
from tersekv.attention.read import AttentionCall, attend_new, attend_store
from tersekv.cache.layer import LayerStore
from tersekv.kernels import backends
from tersekv.kernels.registry import NAMESPACE
from tersekv.recipe import Recipe
from tersekv.transforms.rope import standard_rope

ATTENDED = {
    "grid": "kivi:bits=4", "trellis and mean": "trellis:bits=2,calibration=prompt", "polar": "polarquant",
    "signs": "qjl:initial_layers=0", "sparse keys": "kvquant:bits=3,calibration=prompt",
    "rotated grid": "turboquant:bits=4",
}  # fmt: skip
ENCODED = [
    "uniform:bits=4", "kivi:bits=4", "normalfloat", "turboquant:bits=4", "turboquant:bits=4,rotation=hadamard",
    "turboquant:bits=3,variant=prod", "qjl:initial_layers=0", "polarquant", "polarquant:rotation=hadamard",
    "kvquant:calibration=prompt",
]  # fmt: skip
PAGES = (1, 5, 20)
PAGE_TOKENS = 128
WAITS = ("_local_scalar_dense", "nonzero")


class Operations(TorchDispatchMode):
    """Counter of the operations that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.torch = self.waits = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.waits += op.overloadpacket.__name__ in WAITS
        made = op(*args, **(kwargs or {}))
        # our own operators count by their launches
        shares = (
            op.is_view
            or op.namespace == NAMESPACE
            or op.overloadpacket.__name__ in (*WAITS[:1], "empty", "new_empty", "empty_like")
        )
        self.torch += not shares
        return made


@contextmanager
def kernels(execute: bool = True) -> Iterator[list[str]]:
    """Record the names of the kernels launched inside the context.

    execute: False if their results do not matter.
    """
    launched: list[str] = []
    run = InterpretedFunction.run

    def counted(kernel: InterpretedFunction, *args: Any, **options: Any) -> None:
        launched.append(kernel.fn.__name__)
        if execute:
            with _disable_current_modes():
                run(kernel, *args, **options)

    InterpretedFunction.run = counted
    try:
        yield launched
    finally:
        InterpretedFunction.run = run


def layer(recipe: str, pages: int) -> LayerStore:
    """Return a layer of 2 key-value heads with 64 channels and the given number of packed pages."""
    with backends.forced("auto"):  # encoding is not counted
        keys, values = torch.randn(2, 1, 2, pages * PAGE_TOKENS + 36, 64).bfloat16().unbind(0)
        plan = Recipe.parse(f"window:sinks=4,recent=32,start=36+{recipe}").plan(0, 1)
        store = LayerStore(plan, keys, values, None, standard_rope(64))
        first = PAGE_TOKENS + 36
        store.append(keys[:, :, :first], values[:, :, :first])
        for at in range(first, keys.shape[2], PAGE_TOKENS):
            store.append(*(x[:, :, at : at + PAGE_TOKENS] for x in (keys, values)))
    return store


def attending(recipe: str, pages: int) -> dict[str, Any]:
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
    return {"kernels": dict(Counter(launched)), "torch": counted.torch, "waits": counted.waits}


def decoding(recipe: str) -> dict[str, Any]:
    """Count one layer's work for one bfloat16 token.

    The token is appended, and attention reads sinks, 64 packed tokens, a window and the token.
    """
    keys, values = torch.randn(2, 1, 2, 100, 128).bfloat16().unbind(0)
    store = LayerStore(
        Recipe.parse(f"window:sinks=4,recent=32+{recipe}").plan(0, 1), keys, values, None, standard_rope(128)
    )
    store.append(keys, values)
    call = AttentionCall(torch.randn(1, 8, 1, 128).bfloat16(), None, 128**-0.5)

    def token() -> None:
        new = keys[:, :, :1], values[:, :, :1]
        assert attend_new(store, *new, call) is not None
        store.append(*new)

    with backends.forced("triton"), kernels() as launched:
        token()  # makes the tables
        launched.clear()
        with Operations() as counted:
            token()
    return {"torch": counted.torch, "kernels": launched, "waits": counted.waits}


def encoding(recipe: str) -> Iterator[dict[str, Any]]:
    """Count the launches that encode a block of keys and of values, with each backend."""
    x, coder = torch.randn(1, 2, 32, 128), Recipe.parse(recipe).plan(0, 1)
    for side, codec in (("keys", coder.keys.fit(x)), ("values", coder.values.fit(x))):
        for backend in ("reference", "triton"):
            with backends.forced(backend), kernels() as launched:
                codec.encode(x)  # makes the tables
                launched.clear()
                with Operations() as counted:
                    codec.encode(x)
            found = {"torch": counted.torch, "kernels": launched, "waits": counted.waits}
            yield {"recipe": recipe, "side": side, "backend": backend, **found}


def main() -> None:
    """Print one line of JSON per recipe and number of pages, or per recipe, side and backend."""
    options = parser(__doc__)
    options.add_argument("what", choices=("attend", "encode"))
    torch.manual_seed(0)
    if options.parse_args().what == "attend":
        for name, recipe in ATTENDED.items():
            for pages in PAGES:
                found = attending(recipe, pages)
                print(json.dumps({"layouts": name, "recipe": recipe, "pages": pages, **found}), flush=True)
        return
    for recipe in ENCODED:
        print(json.dumps({"recipe": recipe, "side": "a step of a layer", "backend": "triton", **decoding(recipe)}))
        for row in encoding(recipe):
            print(json.dumps(row))


if __name__ == "__main__":
    main()
