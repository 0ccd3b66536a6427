"""Backend that replaces vLLM's own on CPUs (`CPU_ATTN`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, _get_attn_isa

from tersekv.kernels import softmax
from tersekv.serving.dense import AttentionKind, Lengths, attend_dense
from tersekv.serving.vllm.backend import ByRecipe

LONG_PROMPT = 1024
"""Tokens of a request from which our kernel is not slower than vLLM's."""

SCRATCH_PAGE = 128
"""Tokens per page of the memory in which vLLM's kernel reads unpacked tokens."""


class _Plan:
    """Arguments of vLLM's kernel for the requests of one step, which all its layers share."""

    def __init__(self, query: Tensor, kv_heads: int, lengths: Lengths, window: int) -> None:
        _, Hq, D = query.shape
        self.lengths, self.shape, self.dtype, self.window = lengths, (Hq, kv_heads, D), query.dtype, window
        self.isa = _get_attn_isa(query.dtype, SCRATCH_PAGE, D)
        self.starts = torch.tensor([0, *lengths.queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self.seen = torch.tensor(lengths.tokens, dtype=torch.int32)
        pages = -(-self.seen // SCRATCH_PAGE)
        first = pages.cumsum(0) - pages
        self.table = (first[:, None] + torch.arange(int(pages.max()))).int()
        tokens = [int(f) * SCRATCH_PAGE + torch.arange(n) for f, n in zip(first, lengths.tokens, strict=True)]
        self.slots = torch.cat(tokens)
        self.memory = query.new_zeros((int(pages.sum()), kv_heads, 2 * SCRATCH_PAGE, D))
        self.metadata: Any = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(lengths.queries), num_heads=Hq, num_kv_heads=kv_heads, head_dim=D, seq_lens=self.seen,
            dtype=query.dtype, query_start_loc=self.starts, causal=True, sliding_window_size=window, isa=self.isa,
            enable_kv_split=True, dynamic_causal=None, kv_cache_dtype="auto",
        )  # fmt: skip


class VllmDense:
    """`DenseAttention` by vLLM's own CPU kernel, for all requests in one call; of long prompts by ours."""

    def __init__(self) -> None:
        self._plans: dict[int, _Plan] = {}  # by sliding window

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, lengths: Lengths, kind: AttentionKind) -> Tensor:
        """See `tersekv.serving.dense.DenseAttention`."""
        Hq, D = query.shape[1:]
        ours = max(lengths.tokens) >= LONG_PROMPT and softmax.prefers_native(query, keys, values)
        if ours or D not in CPUAttentionBackend.get_supported_head_sizes():
            return attend_dense(query, keys, values, lengths, kind)
        window = -1 if kind.window is None else kind.window
        plan = self._plans.get(window)
        if (
            plan is None
            or plan.lengths is not lengths
            or (plan.shape, plan.dtype) != ((Hq, keys.shape[1], D), query.dtype)
        ):
            plan = self._plans[window] = _Plan(query, keys.shape[1], lengths, window)
        key_cache, value_cache = plan.memory.chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(
            keys.to(query.dtype), values.to(query.dtype), key_cache, value_cache, plan.slots, plan.isa, k_scale=1.0,
            v_scale=1.0, kv_cache_dtype="auto",
        )  # fmt: skip
        out = torch.empty_like(query)
        ops.cpu_attention_with_kv_cache(
            query=query, key_cache=key_cache, value_cache=value_cache, output=out, query_start_loc=plan.starts,
            seq_lens=plan.seen, scale=kind.scaling, causal=True, alibi_slopes=None, sliding_window=window,
            block_table=plan.table, softcap=kind.softcap or 0.0, scheduler_metadata=plan.metadata,
            s_aux=kind.sink_logits, dynamic_causal=None, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto",
        )  # fmt: skip
        return out


class PackedBackend(ByRecipe, CPUAttentionBackend):
    """Backend of layers on a CPU."""

    native = CPUAttentionBackend
    dense = VllmDense()
