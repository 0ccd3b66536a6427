"""Backend that replaces vLLM's own on CPUs (`CPU_ATTN`)."""

from __future__ import annotations

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from tersekv.serving.vllm.backend import ByRecipe


class PackedBackend(ByRecipe, CPUAttentionBackend):
    """Backend of layers on a CPU."""

    native = CPUAttentionBackend
