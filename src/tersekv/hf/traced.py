"""Handles and wrappers through which `torch.compile` sees a compressed cache.

A traced forward pass must not read the store. Its Python numbers change at every token, and each
change would recompile the model. Each layer therefore exposes one tensor, its handle, with the
layer's number in a registry. The operators of `hf/operators.py` look up the layer when the compiled
graph runs.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

from tersekv.errors import CacheError
from tersekv.tensors import plain

_numbers = itertools.count()
_layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


@plain
def register(layer: Any) -> Tensor:
    """Return a new handle for a `CompressedLayer`, int64 [] on the CPU. The registry holds a weak
    reference."""
    number = next(_numbers)
    _layers[number] = layer
    return torch.tensor(number, dtype=torch.int64, device="cpu")


def layer_of(handle: Tensor) -> Any:
    """Return the `CompressedLayer` that a handle belongs to.

    Raises:
        CacheError: the layer no longer exists.
    """
    layer = _layers.get(int(handle))
    if layer is None:
        raise CacheError("the cache of this compiled call no longer exists; keep it until the call has ended")
    return layer


def is_traced() -> bool:
    """True while `torch.compile` traces a forward pass without gradients. Passes with gradients use
    the eager path, which may break the graph."""
    return torch.compiler.is_compiling() and not torch.is_grad_enabled()


def num_tokens(handle: Tensor) -> Tensor:
    """Call the operator `tersekv::num_tokens`, see `hf/operators.py`."""
    tokens: Tensor = torch.ops.tersekv.num_tokens(handle)
    return tokens


def append_and_attend(
    key: NewTokens,
    value: NewTokens,
    query: Tensor,
    mask: Tensor | None,
    sink_logits: Tensor | None,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """Call the operator `tersekv::append_and_attend`, see `hf/operators.py`."""
    out: Tensor = torch.ops.tersekv.append_and_attend(
        key.handle, query, key.tokens, value.tokens, mask, sink_logits, scaling, softcap
    )
    return out


class NewTokens:
    """New keys or values [B, H, n, D] of one traced call, passed from `update` to our attention
    function."""

    def __init__(self, handle: Tensor, tokens: Tensor) -> None:
        self.handle, self.tokens = handle, tokens
