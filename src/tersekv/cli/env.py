"""`tersekv env`: versions, CPU, available kernels and folders, as needed in a bug report."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tersekv import __version__
from tersekv.cli import output
from tersekv.extras import LAB

PACKAGES = ("torch", "triton", "transformers", "safetensors", "numpy", "typer", "rich", *LAB)
# Instruction sets that kernels choose between, as /proc/cpuinfo spells them (x86, then Arm).
FEATURES = (
    *("sse4_2", "avx", "f16c", "fma", "avx2", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16"),
    *("asimd", "asimdhp", "asimddp", "sve", "sve2", "bf16", "i8mm"),
)


def env(as_json: output.Json = False) -> None:
    """Show versions, CPU features, available kernels and the cache folder."""
    with output.step("looking at torch and the kernels"):
        document = describe()
    if as_json:
        output.print_json(document)
        return
    cpu, folders = document["cpu"], document["folders"]
    rows = [("python", document["python"]), *document["packages"].items()]
    rows += [("system", document["system"]), ("cpu", cpu["model"])]
    rows += [("cpu features", " ".join(cpu["features"]) or "unknown")]
    rows += [("cores", f"{cpu['usable_cores']} of {cpu['cores']} usable, torch uses {cpu['torch_threads']} threads")]
    rows += [("accelerators", document["accelerators"]), ("model folder", folders["models"])]
    output.show(output.table("environment", ("what", "value"), rows, left=2))
    kernels = [(k["backend"], k["op"], "yes" if k["available"] else "no", k["detail"]) for k in document["kernels"]]
    output.show(output.table("kernels", ("backend", "op", "available", "detail"), kernels, left=4))


def describe() -> dict[str, Any]:
    """Return everything that `tersekv env` shows."""
    import torch

    from tersekv.hf import models
    from tersekv.kernels import backends

    model, features = cpu_features()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "packages": {"tersekv": __version__, **{name: package_version(name) for name in PACKAGES}},
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": {
            "model": model,
            "features": features,
            "cores": os.cpu_count(),
            "usable_cores": usable,
            "torch_threads": torch.get_num_threads(),
        },
        "accelerators": ", ".join(gpus) or "none",
        "kernels": [{k: row[k] for k in ("backend", "op", "available", "detail")} for row in backends.report()],
        "folders": {"models": str(models.cache_dir() / "models")},
    }


def package_version(name: str) -> str:
    """Return the version of a package, or "not installed"."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def cpu_features() -> tuple[str, list[str]]:
    """Return the CPU's name and those of `FEATURES` it has, from /proc/cpuinfo if that exists."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine(), []
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip().lower(), value.strip())
    present = set((fields.get("flags") or fields.get("features") or "").split())
    name = fields.get("model name") or fields.get("hardware") or platform.machine()
    return name, [feature for feature in FEATURES if feature in present]
