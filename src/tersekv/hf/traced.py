"""The part of a compressed cache that `torch.compile` sees.

A traced forward pass must not read the store: its Python numbers change at every token, and each change would compile
the model again. A layer therefore shows `torch.compile` one tensor, its handle, which holds the layer's number in a
registry. The operators of `hf/operators.py` look the layer up when the compiled graph runs.
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
    """A handle for a `CompressedLayer`, int64 [] on the CPU. The registry does not keep the layer alive."""
    number = next(_numbers)
    _layers[number] = layer
    return torch.tensor(number, dtype=torch.int64, device="cpu")


def layer_of(handle: Tensor) -> Any:
    """The `CompressedLayer` that a handle was made for.

    Raises:
        CacheError: the layer no longer exists.
    """
    layer = _layers.get(int(handle))
    if layer is None:
        raise CacheError("the cache of this compiled call no longer exists; keep it until the call has ended")
    return layer


def is_traced() -> bool:
    """True while `torch.compile` traces a forward pass without gradients. Passes with gradients take the eager path,
    which may break the graph."""
    return torch.compiler.is_compiling() and not torch.is_grad_enabled()


def num_tokens(handle: Tensor) -> Tensor:
    """The operator of this name, see `hf/operators.py`."""
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
    """The operator of this name, see `hf/operators.py`."""
    out: Tensor = torch.ops.tersekv.append_and_attend(
        key.handle, query, key.tokens, value.tokens, mask, sink_logits, scaling, softcap
    )
    return out


class NewTokens:
    """The keys or the values [B, H, n, D] of one traced call, on their way from `update` to our attention function."""

    def __init__(self, handle: Tensor, tokens: Tensor) -> None:
        self.handle, self.tokens = handle, tokens
