"""The backend that stands for vLLM's own in Triton on CUDA devices (`--attention-backend TRITON_ATTN`).

vLLM chooses among several backends there, and ours stands for the one that takes every layout of the cache, head dim
and GPU; its kernels, like ours, are in Triton. Without cudagraph support stated, vLLM runs attention between its graphs
and never in one: a step's plan is made on the CPU. Not yet run inside vLLM on a GPU.
"""

from __future__ import annotations

from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

from tersekv.serving.vllm.backend import ByRecipe


class PackedBackend(ByRecipe, TritonAttentionBackend):
    """What a layer on a CUDA device gets."""

    native = TritonAttentionBackend
