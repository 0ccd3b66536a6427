"""Draw trees of views, lists, tuples, tensors and numbers that differ from a given tree in one
leaf."""

from __future__ import annotations

import copy
import functools

import torch
from hypothesis import strategies as st
from torch import Tensor

from tersekv.layouts.base import View
from tersekv.layouts.polar import Polar


def children(x: object) -> list[tuple[object, object]]:
    if isinstance(x, (View, Polar)):
        return list(vars(x).items())
    if hasattr(x, "_fields"):
        return list(x._asdict().items())
    return list(x.items()) if isinstance(x, dict) else list(enumerate(x)) if isinstance(x, (list, tuple)) else []


def leaves(x: object, path: tuple = ()) -> list[tuple]:
    """Return the paths to the tensors and numbers of a tree."""
    if isinstance(x, Tensor) or type(x) in (int, float):
        return [path]
    return [leaf for key, child in children(x) for leaf in leaves(child, (*path, key))]


def at(x: object, path: tuple) -> object:
    return functools.reduce(lambda x, key: dict(children(x))[key], path, x)


def replaced(x: object, path: tuple, new: object) -> object:
    """Return a copy of the tree with another leaf."""
    if not path:
        return new
    changed = dict(children(x)) | {path[0]: replaced(dict(children(x))[path[0]], path[1:], new)}
    if isinstance(x, (list, tuple)):
        kind = x._make if hasattr(x, "_make") else list if isinstance(x, list) else tuple
        return kind(changed.values())
    if isinstance(x, dict):
        return changed
    out = copy.copy(x)
    vars(out).update(changed)
    return out


def contents(draw, x: Tensor) -> Tensor:
    """Draw a tensor with other elements: all of them or one."""
    seed = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    if x.dtype is torch.bool:
        return torch.rand(x.shape, generator=seed) < 0.5
    if x.is_floating_point():
        number = draw(st.sampled_from([0.0, -1.0, 1e-38, 60000.0, float("inf"), float("nan")]))
        new = torch.full_like(x, number) if number else -x
    else:
        low, high = torch.iinfo(x.dtype).min, torch.iinfo(x.dtype).max
        near = draw(st.booleans())
        new = torch.randint(max(low, -3) if near else low, min(high, 99) if near else high, x.shape, generator=seed)
        new = new.to(x.dtype)
    if draw(st.booleans()) and x.numel():
        keep = torch.arange(x.numel()).view(x.shape) != draw(st.integers(0, x.numel() - 1))
        new = torch.where(keep, x, new)
    return new


def tensor(draw, x: Tensor) -> Tensor:
    """Draw a tensor with another shape, strides, dtype or contents."""
    axis = draw(st.integers(0, max(0, x.dim() - 1)))
    other = draw(st.integers(0, max(0, x.dim() - 1)))
    n = x.shape[axis] if x.dim() else 0
    changes = {
        "contents": lambda: contents(draw, x),
        "dtype": lambda: x.to(draw(st.sampled_from([torch.float32, torch.float16, torch.int64, torch.uint8]))),
        "flat": x.flatten,
        "one more axis": lambda: x.unsqueeze(axis),
        "number": lambda: x.flatten()[0],
    }
    if n:
        changes |= {
            "shorter": lambda: x.narrow(axis, draw(st.integers(0, 1)), n - 1),
            "longer": lambda: torch.cat([x, x.narrow(axis, 0, 1)], axis),
            "empty": lambda: x.narrow(axis, 0, 0),
            "one": lambda: x.narrow(axis, n - 1, 1),
            "expanded": lambda: x.narrow(axis, 0, 1).expand(x.shape),
            "in another order": lambda: x.transpose(axis, other).contiguous().transpose(axis, other),
            "with gaps": lambda: x.repeat_interleave(2, axis)[(slice(None),) * axis + (slice(None, None, 2),)],
            "swapped": lambda: x.transpose(axis, other),
        }
    return changes[draw(st.sampled_from(sorted(changes)))]()


def number(draw, x: float) -> float:
    if isinstance(x, float):
        return draw(st.sampled_from([0.0, -x, float("inf"), float("nan")]))
    return draw(st.sampled_from([-1, 0, 1, x - 1, x + 1, 2 * x, 2**31, 2**62, -(2**62), 2**64]))


def changed(draw, call: dict, path: tuple) -> dict:
    leaf = at(call, path)
    return replaced(call, path, (tensor if isinstance(leaf, Tensor) else number)(draw, leaf))
