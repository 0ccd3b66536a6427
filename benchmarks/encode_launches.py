"""Count the operations for encoding a block of 32 tokens, and for one decode step of a layer.

    TRITON_INTERPRET=1 python benchmarks/encode_launches.py

Encoding is counted for torch alone and for the Triton kernels. In the decode step no block is
packed. The counts are taken on the CPU, where the code takes the same path. `torch` counts torch
operations that process elements (not views or sizes); each is at least one launch on a GPU.
`kernels` lists kernel launches, and `waits` counts values that the host reads back. Tables that are
made once are not counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

from tersekv.attention.read import AttentionCall, attend_store
from tersekv.cache.layer import LayerStore
from tersekv.kernels import backends
from tersekv.kernels.registry import NAMESPACE
from tersekv.recipe import Recipe
from tersekv.transforms.rope import standard_rope

RECIPES = [
    "uniform:bits=4", "kivi:bits=4", "normalfloat", "turboquant:bits=4", "turboquant:bits=4,rotation=hadamard",
    "turboquant:bits=3,variant=prod", "qjl:initial_layers=0", "polarquant", "polarquant:rotation=hadamard",
    "kvquant:calibration=prompt",
]  # fmt: skip
ROPE = standard_rope(128)
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


def step(recipe: str) -> dict[str, Any]:
    """Count one layer's work for one bfloat16 token.

    The token is appended, and attention reads sinks, 64 packed tokens and a window.
    """
    keys, values = torch.randn(2, 1, 2, 100, 128).bfloat16().unbind(0)
    store = LayerStore(Recipe.parse(f"window:sinks=4,recent=32+{recipe}").plan(0, 1), keys, values, None, ROPE)
    store.append(keys, values)
    call = AttentionCall(torch.randn(1, 8, 1, 128).bfloat16(), None, 128**-0.5)

    def token() -> None:
        store.append(keys[:, :, :1], values[:, :, :1])
        attend_store(store, call)

    with backends.forced("triton"), kernels() as launched:
        token()  # makes the tables
        launched.clear()
        with Operations() as counted:
            token()
    # On a CPU each side is checked for validity with a sum that is read back. Other devices skip
    # this.
    checks = 2
    return {"torch": counted.torch - checks, "kernels": launched, "waits": counted.waits - checks}


def main() -> None:
    """Print one line of JSON per recipe, side and backend, and one per recipe for a decode step."""
    torch.manual_seed(0)
    x = torch.randn(1, 2, 32, 128)
    for recipe in RECIPES:
        print(json.dumps({"recipe": recipe, "side": "a step of a layer", "backend": "triton", **step(recipe)}))
        coder = Recipe.parse(recipe).plan(0, 1)
        for side, codec in (("keys", coder.keys.fit(x)), ("values", coder.values.fit(x))):
            for backend in ("reference", "triton"):
                with backends.forced(backend), kernels() as launched:
                    codec.encode(x)  # makes the tables
                    launched.clear()
                    with Operations() as counted:
                        codec.encode(x)
                what = {"recipe": recipe, "side": side, "backend": backend}
                print(json.dumps(what | {"torch": counted.torch, "kernels": launched, "waits": counted.waits}))


if __name__ == "__main__":
    main()
