"""Latent attention (MLA): modules that cache latents, from which they make keys and values of all heads.

Head h has the key [U_h·c, r] and the value V_h·c for a latent c and a rotated key r of a token, so

    q·[U_h·c, r] = [U_hᵀ·q_nope, q_rope]·[c, r],    Σ_n p_n·V_h·c_n = V_h·(Σ_n p_n·c_n).

The query absorbs U once, and the output V. Attention itself then has one KV head whose key is [c, r]
and whose value is c: the same numbers, which are read once. Expanding is cheaper for a call of many
queries, because then it costs less than longer products for every query.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tersekv.hf.handle import PendingTokens
from tersekv.hf.traced import NewTokens
from tersekv.models.config import EXPAND

FLOATS = torch.float32, torch.bfloat16, torch.float16, torch.float64


class UpProjection(NamedTuple):
    """The matrices U [H, nope, R] and V [H, Dv, R] of a module."""

    keys: Tensor
    values: Tensor

    @staticmethod
    def of(module: Any, device: torch.device) -> UpProjection:
        """Return the matrices of a module with `expand_kv` on a device."""
        linear, dims = module.kv_b_proj, [module.qk_nope_head_dim, module.v_head_dim]
        plain = type(linear) is nn.Linear and linear.weight.dtype in FLOATS and not linear.weight.is_meta
        weight = linear.weight if plain else _dequantised(linear, device)
        if hasattr(weight, "to_local"):  # tensor parallelism: the heads of this process
            weight = weight.to_local()
        return UpProjection(*weight.view(-1, sum(dims), weight.shape[-1]).split(dims, dim=1))

    @property
    def most_queries(self) -> float:
        """Number of queries of a call beyond which expanding needs fewer products than absorbing."""
        (_, nope, R), Dv = self.keys.shape, self.values.shape[1]
        return R * (nope + Dv) / (2 * R - nope - Dv) if nope + Dv < 2 * R else float("inf")

    def query(self, query: Tensor) -> Tensor:
        """Return [Uᵀ·q_nope, q_rope] [B, H, q, R + D] for queries [B, H, q, nope + D]."""
        nope = self.keys.shape[1]
        return torch.cat([torch.matmul(query[..., :nope], self.keys), query[..., nope:]], dim=-1)

    def output(self, out: Tensor) -> Tensor:
        """Return V·o [B, q, H, Dv] for weighted means of latents [B, q, H, R]."""
        # V stays the left factor: a product in bfloat16 with its transpose on the right would copy V first
        return torch.matmul(self.values, out.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).contiguous()


_weights: weakref.WeakKeyDictionary[nn.Module, tuple[tuple[Any, ...], Tensor]] = weakref.WeakKeyDictionary()


def _dequantised(linear: Any, device: torch.device) -> Tensor:
    """Return the weight [out, in] of a layer that is quantised, has adapters, or is elsewhere until it is called.

    It is computed again after each change, and in each call if it has a gradient or is kept elsewhere.
    """
    parts = *linear.parameters(), *linear.buffers()
    if any(x.is_meta or (torch.is_grad_enabled() and x.requires_grad) for x in parts):
        return _image_of_one(linear, device)
    state: tuple[Any, ...] = tuple((id(x), 0 if x.is_inference() else x._version) for x in parts)
    state += tuple(str(getattr(linear, name, "")) for name in ("active_adapters", "disable_adapters", "scaling"))
    known, weight = _weights.get(linear, ((), None))
    if weight is None or known != state:
        with torch.no_grad():
            weight = _image_of_one(linear, device)
        _weights[linear] = state, weight
    return weight


def _image_of_one(linear: Any, device: torch.device) -> Tensor:
    parts = *linear.parameters(), *linear.buffers()
    dtype = next((x.dtype for x in parts if x.dtype in FLOATS), torch.get_default_dtype())
    one = torch.eye(linear.in_features, dtype=dtype, device=device)
    return linear(one).T.contiguous()


# ------------------------------------------------------------------ handles

_replaced: dict[type, Callable[..., Any]] = {}


def install(model: nn.Module) -> None:
    """Let modules of latent attention pass handles of cached tokens to the attention function."""
    for made in {type(module) for module in model.modules()}:
        for owner in made.__mro__:
            if EXPAND in vars(owner) and owner not in _replaced:
                _replaced[owner] = expand = vars(owner)[EXPAND]
                setattr(owner, EXPAND, _passing_handles(expand))


def uninstall() -> None:
    """Restore all classes, and free the weights that were kept."""
    _weights.clear()
    for owner, expand in _replaced.items():
        setattr(owner, EXPAND, expand)
    _replaced.clear()


def _passing_handles(expand: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(expand)
    def passed(module: Any, latents: Any, rotated: Any) -> Any:
        if isinstance(latents, (PendingTokens, NewTokens)):
            return latents, rotated
        return expand(module, latents, rotated)

    return passed
