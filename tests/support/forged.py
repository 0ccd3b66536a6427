"""Forged cache files: one value or tensor of a valid file is changed, and all digests are
recomputed."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tersekv.cache import tensor_file
from tersekv.cache.state import TENSOR

Mutant = tuple[str, dict[str, Any], dict[str, Tensor]]
"""Description of the change, header of the file, and its tensors."""

VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 3, 31, 32, 33, 64, 1000, 2**31, 2**40, 2**63, -(2**40), 10**30, 0.5, 1.0,
    math.nan, math.inf, -math.inf, "", "x", "float32", "float64", "int8", [], [1], [[]], {}, {"x": 1}, {TENSOR: "x"},
    {TENSOR: 3},
]  # fmt: skip
DTYPES = [*tensor_file.NAMES]


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    said, tensors, _ = tensor_file.read(path)
    said.pop("crc32")
    said.pop("format")
    return said, {name: tensor.clone() for name, tensor in tensors.items()}


def leaves(tree: Any, path: tuple = ()) -> Iterator[tuple]:
    """Yield the paths to everything in a tree, containers included."""
    if path:
        yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from leaves(value, (*path, key))


def at(tree: Any, path: tuple) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def mutants(said: dict[str, Any], tensors: dict[str, Tensor], seed: int, count: int) -> Iterator[Mutant]:
    """Yield `count` files that differ from the given one in one place each."""
    draw = random.Random(seed)
    places = list(leaves(said))
    names = list(tensors)
    while count:
        changed, held = copy.deepcopy(said), dict(tensors)
        if draw.random() < 0.5:
            what = _tree(draw, changed, draw.choice(places))
        else:
            what = _tensor(draw, held, draw.choice(names))
        if what is not None:
            count -= 1
            yield what, changed, held


def _tree(draw: random.Random, said: dict[str, Any], path: tuple) -> str | None:
    """Change a tree: another value, a missing one, an additional one, one from another place, or
    two swapped."""
    parent, key = at(said, path[:-1]), path[-1]
    old = parent[key]
    kind = draw.choice(["value", "value", "near", "gone", "more", "twin", "swapped"])
    where = ".".join(map(str, path))
    if kind == "value":
        parent[key] = copy.deepcopy(draw.choice(VALUES))
    elif kind == "near":
        if type(old) is not int:
            return None
        parent[key] = draw.choice([old - 1, old + 1, old - 32, old + 32, 2 * old, -old, float(old), str(old)])
    elif kind == "gone":
        del parent[key]
    elif kind == "more":
        if isinstance(old, list):
            old.append(copy.deepcopy(old[-1]) if old else 0)
        elif isinstance(old, dict):
            old["more"] = draw.choice(VALUES)
        else:
            return None
    elif kind in ("twin", "swapped"):
        other = draw.choice(list(leaves(said)))
        if other[: len(path)] == path or path[: len(other)] == other:
            return None
        far, far_key = at(said, other[:-1]), other[-1]
        value = far[far_key]
        if kind == "swapped":
            far[far_key] = old
        parent[key] = copy.deepcopy(value)
        where += " and " + ".".join(map(str, other))
    return f"{kind} {where}"


def _tensor(draw: random.Random, held: dict[str, Tensor], name: str) -> str | None:
    kind = draw.choice(sorted(TENSORS))
    old = held[name]
    if kind == "gone":
        del held[name]
    elif kind == "more":
        held[f"{name}.more"] = old
    elif kind == "swapped":
        other = draw.choice(sorted(held))
        held[name], held[other] = held[other], old
        return f"swapped {name} and {other}"
    else:
        new = TENSORS[kind](draw, old)
        if new is None:
            return None
        held[name] = new.contiguous()
    return f"{kind} {name}"


def _dtype(draw: random.Random, x: Tensor) -> Tensor:
    return x.to(draw.choice(DTYPES))


def _viewed(draw: random.Random, x: Tensor) -> Tensor | None:
    """Return the same bytes as another dtype of the same width."""
    same = [t for t in DTYPES if t.itemsize == x.element_size() and t not in (x.dtype, torch.bool)]
    return x.view(draw.choice(same)) if same and x.dim() else None


def _axis(draw: random.Random, x: Tensor) -> int | None:
    axes = [i for i, n in enumerate(x.shape) if n]
    return draw.choice(axes) if axes else None


def _on_axis(change: Callable[[Tensor, int], Tensor]) -> Callable[[random.Random, Tensor], Tensor | None]:
    def changed(draw: random.Random, x: Tensor) -> Tensor | None:
        axis = _axis(draw, x)
        return None if axis is None else change(x, axis)

    return changed


def _one_element(draw: random.Random, x: Tensor) -> Tensor | None:
    """Set an element to NaN, infinity, a negative number, or its dtype's largest or smallest
    number."""
    if not x.numel() or x.dtype == torch.bool:
        return None
    extremes = torch.finfo(x.dtype) if x.is_floating_point() else torch.iinfo(x.dtype)
    values = [extremes.min, extremes.max, *((math.nan, math.inf, -math.inf) if x.is_floating_point() else (0,))]
    new = x.clone()
    new.view(-1)[draw.randrange(x.numel())] = draw.choice(values)
    return new


TENSORS: dict[str, Callable[[random.Random, Tensor], Tensor | None]] = {
    "gone": lambda draw, x: None,
    "more": lambda draw, x: None,
    "swapped": lambda draw, x: None,
    "dtype": _dtype,
    "viewed": _viewed,
    "flat": lambda draw, x: x.flatten(),
    "one more axis": lambda draw, x: x.unsqueeze(draw.randrange(x.dim() + 1)),
    "number": lambda draw, x: x.flatten()[0] if x.numel() else None,
    "shorter": _on_axis(lambda x, axis: x.narrow(axis, 0, x.shape[axis] - 1)),
    "longer": _on_axis(lambda x, axis: torch.cat([x, x.narrow(axis, 0, 1)], axis)),
    "empty": _on_axis(lambda x, axis: x.narrow(axis, 0, 0)),
    "broadcast": _on_axis(lambda x, axis: x.narrow(axis, 0, 1)),
    "turned over": _on_axis(lambda x, axis: x.flip(axis)),
    "transposed": lambda draw, x: x.transpose(0, -1) if x.dim() > 1 else None,
    "element": _one_element,
    "zeros": lambda draw, x: torch.zeros_like(x),
    "ones": lambda draw, x: torch.full_like(x, -1 if x.dtype.is_signed else 1),
}


def rewrite(path: Path, to: Path, **changes: Any) -> None:
    """Write a copy of a file with a changed header."""
    said, tensors = read(path)
    tensor_file.write(to, tensors, said | changes)
