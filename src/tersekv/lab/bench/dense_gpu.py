"""Dense decode attention on a GPU: the baselines for packed attention.

For attention:

- SDPA's flash kernel in bfloat16, with the query group as heads (`enable_gqa`) and as positions;
- FlashInfer, if it is installed;
- our own kernel over bfloat16 and over float8 tokens.

For scores alone: PyTorch's matrix product, which writes all scores, and our own kernel, which
writes their log-sum-exps.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tersekv.kernels import backends

PAGE = 16
Pair = tuple[Tensor, Tensor]
Ways = dict[str, tuple[Callable[..., Tensor], list[Pair]]]


def dense_ways(device: str, query: Tensor, scaling: float, inputs: list[Pair]) -> Ways:
    """Return a function of keys and values for each baseline, with the inputs to call it with.

    device: cuda, or cpu in tests. query: bfloat16 [B, Hkv, G, D]. inputs: bfloat16 [B, Hkv, T, D].
    """
    small = [(k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)) for k, v in inputs]
    own = functools.partial(own_attention, query.float(), scaling)
    return {
        "sdpa flash bfloat16": (functools.partial(_sdpa, device, query.flatten(1, 2).unsqueeze(2), scaling), inputs),
        "sdpa flash bfloat16, group as rows": (functools.partial(_sdpa, device, query, scaling), inputs),
        "flashinfer bfloat16": (functools.partial(_flashinfer, query), [(_paged(k), _paged(v)) for k, v in inputs]),
        "ours bfloat16": (own, inputs),
        "ours float8": (own, small),
        "scores matmul bfloat16": (lambda key, value: query @ key.mT, inputs),
        "scores ours bfloat16": (functools.partial(own_scores, query.float(), scaling), inputs),
    }


def own_attention(query: Tensor, scaling: float, keys: Any, values: Any) -> Tensor:
    """Return our kernel's output over packed or dense tokens. query: float32 [B, Hkv, G, D]."""
    return backends.attend_packed(query, keys, values, None, scaling, None)[0]


def own_scores(query: Tensor, scaling: float, keys: Any, values: Any) -> Tensor:
    """Return our kernel's log-sum-exps over the keys alone. query: float32 [B, Hkv, G, D]."""
    from tersekv.kernels.triton import score_keys

    return score_keys(query, keys, scaling)


def _sdpa(device: str, query: Tensor, scaling: float, key: Tensor, value: Tensor) -> Tensor:
    """Run SDPA. query: [B, Hq, 1, D], or [B, Hkv, G, D] with the query group as positions."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    flash = SDPBackend.FLASH_ATTENTION if device == "cuda" else SDPBackend.MATH
    with sdpa_kernel(flash):
        gqa = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=gqa)


def _flashinfer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Run FlashInfer. query: [B, Hkv, G, D].

    Keys and values are [1, Hkv, T, D] for one row, or pages [pages, Hkv, PAGE, D] for several.
    """
    flashinfer = importlib.import_module("flashinfer")
    B, H, G, D = query.shape
    if B == 1:
        return flashinfer.single_decode_with_kv_cache(query[0].flatten(0, 1), key[0], value[0], kv_layout="HND")
    return _planned(flashinfer, B, H, G, D, len(key) // B, key.device).run(query.flatten(1, 2), (key, value))


@functools.lru_cache(maxsize=4)
def _planned(flashinfer: Any, B: int, H: int, G: int, D: int, pages: int, device: torch.device) -> Any:
    """Return a planned FlashInfer wrapper. The `pages` pages of each row are consecutive."""
    space = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "HND")
    ints = functools.partial(torch.arange, dtype=torch.int32, device=device)
    last = torch.full((B,), PAGE, dtype=torch.int32, device=device)
    wrapper.plan(
        ints(0, B * pages + 1, pages), ints(B * pages), last, G * H, H, D, PAGE,
        q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    return wrapper


def _paged(x: Tensor) -> Tensor:
    """Cut [B, H, T, D] into pages [B·pages, H, PAGE, D]. A single row is returned unchanged."""
    if len(x) == 1 or importlib.util.find_spec("flashinfer") is None:
        return x
    return x.unflatten(2, (-1, PAGE)).transpose(1, 2).flatten(0, 1).contiguous()
