"""Backend that replaces vLLM's own Triton backend on CUDA devices (`--attention-backend
TRITON_ATTN`).

It has not been run inside vLLM on a GPU.

vLLM has several backends for CUDA. Ours replaces the one that supports every cache layout, head dim
and GPU; its kernels, like ours, are in Triton. Our backend declares no CUDA graph support, because
a step is planned on the CPU. vLLM therefore runs attention between its graphs.
"""

from __future__ import annotations

from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

from tersekv.serving.vllm.backend import ByRecipe


class PackedBackend(ByRecipe, TritonAttentionBackend):
    """Backend of layers on a CUDA device."""

    native = TritonAttentionBackend
