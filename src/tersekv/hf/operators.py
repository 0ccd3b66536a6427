"""Operators of compiled forward passes. Each is a thin wrapper around the functions of eager mode.

```text
tersekv::append_and_attend   append the new tokens of a layer, and attend to all of them
tersekv::num_tokens          number of tokens that a layer has seen
```

`handle` is the tensor of `traced.register`. `append_and_attend` declares that it writes to the
handle, because it changes the layer. The compiler therefore neither removes nor merges its calls,
and keeps their order. The operators read the store in Python, which a CUDA graph would not replay,
so they are marked as unsafe for CUDA graphs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tersekv.attention import masks
from tersekv.hf.attention import attention_forward
from tersekv.hf.layer import CompressedLayer
from tersekv.hf.traced import layer_of


class _Module(NamedTuple):
    """Attributes of an attention module that transformers' attention over plain tensors reads."""

    num_key_value_groups: int
    is_causal: bool = True
    training: bool = False


def append_and_attend(
    handle: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    sink_logits: Tensor | None,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """Append keys and values [B, Hkv, n, D] to a layer, and attend with query [B, Hq, n, D].
    Returns [B, n, Hq, Dv].

    mask: bool [B, 1, n, tokens], or None for causal attention within the layer's sliding window.
    sink_logits: [Hq], or None.
    """
    layer = layer_of(handle)
    layer.cache.progress.reach(layer.index, 1)
    key, value = layer.pending(keys, values)
    module: Any = _Module(query.shape[1] // keys.shape[1])
    given: dict[str, Any] = {"scaling": scaling, "softcap": softcap, "s_aux": sink_logits}
    out, _ = attention_forward(module, query, key, value, _as_in_eager_mode(layer, mask, query), **given)
    return out.contiguous()


def _as_in_eager_mode(layer: CompressedLayer, mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Return the mask of eager mode, so that the same kernels run with the same arguments. It is
    None if plain causal attention suffices."""
    n = query.shape[2]
    tokens = layer.get_seq_length() + n
    if mask is None:
        window = layer.sliding_window
        if window is None or tokens <= window:
            return None
        causal = masks.causal(n, tokens, query.device)
        first = torch.arange(tokens - n - window + 1, tokens - window + 1, device=query.device)
        return (causal & (torch.arange(tokens, device=query.device) >= first[:, None])).expand(len(query), 1, -1, -1)
    # on an accelerator this check would synchronise, so it is made on CPUs only
    if n == 1 and mask.is_cpu and mask.dtype == torch.bool and bool(mask[..., :tokens].all()):
        return None
    return mask


def _append_and_attend_fake(
    handle: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    sink_logits: Tensor | None,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    B, Hq, n, D = query.shape
    value = values if keys.shape[-1] == D else keys  # absorbed queries are longer than the latents
    return query.new_empty(B, n, Hq, value.shape[-1])


def num_tokens(handle: Tensor) -> Tensor:
    """Return the number of tokens that a layer has seen, int64 [] on the CPU."""
    return torch.tensor(layer_of(handle).get_seq_length(), dtype=torch.int64, device="cpu")


def _num_tokens_fake(handle: Tensor) -> Tensor:
    return torch.empty_like(handle)


# FRAGMENT, because other files may define operators of the same namespace
_library = torch.library.Library("tersekv", "FRAGMENT")
_tags = [tag for name in ("cudagraph_unsafe",) if (tag := getattr(torch.Tag, name, None)) is not None]
_library.define(
    "append_and_attend(Tensor(a!) handle, Tensor query, Tensor keys, Tensor values, Tensor? mask, "
    "Tensor? sink_logits, float scaling, float? softcap) -> Tensor",
    tags=_tags,
)
_library.define("num_tokens(Tensor handle) -> Tensor", tags=_tags)
for _name, _run, _fake in (
    ("append_and_attend", append_and_attend, _append_and_attend_fake),
    ("num_tokens", num_tokens, _num_tokens_fake),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tersekv::{_name}", _fake, lib=_library)
