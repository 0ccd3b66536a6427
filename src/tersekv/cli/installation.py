"""Versions, CPU, available kernels and folders of this installation, as `tersekv doctor` shows them."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tersekv import __version__
from tersekv.cli import output
from tersekv.errors import UserError
from tersekv.extras import INSTALL_LAB, LAB
from tersekv.versions import ABSENT, check_transformers, package_version

PACKAGES = ("torch", "triton", "transformers", "safetensors", "numpy", "typer", "rich", *LAB)
# Instruction sets that kernels choose between, as /proc/cpuinfo spells them (x86, then Arm).
FEATURES = (
    *("sse4_2", "avx", "f16c", "fma", "avx2", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16"),
    *("amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimdhp", "asimddp", "sve", "sve2", "bf16", "i8mm"),
)


class Check(NamedTuple):
    """One line about the installation. broken: what to do about it, or None if it is right."""

    what: str
    value: str
    broken: str | None = None


def checks() -> list[Check]:
    """Check what the library needs, in about ten lines."""
    import torch

    from tersekv.kernels import backends, cpu, triton
    from tersekv.models import loading

    def refused(check: Callable[[], object]) -> str | None:
        try:
            check()
        except (UserError, OSError) as error:
            return str(error)
        return None

    usable, model = usable_cores(), cpu_features()[0]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    why_not_gpu, folder = triton.why_not_usable(), loading.cache_dir()
    missing = [name for name in LAB if package_version(name) == ABSENT]
    compilers = [name for name in ("c++", "g++", "clang++") if shutil.which(name)]
    used = refused(backends.chosen) or refused(cpu.why_not_built)
    built = None if used else cpu.why_not_built()
    return [
        Check("tersekv", f"{__version__}, Python {platform.python_version()}"),
        Check("torch", package_version("torch")),
        Check("transformers", package_version("transformers"), refused(check_transformers)),
        Check("cpu", f"{model}, {usable} of {os.cpu_count()} cores, {torch.get_num_threads()} threads"),
        Check("cpu kernels", "none" if used or built else cpu.isa(), used or built),
        Check("gpu", ", ".join(gpus) or "none"),
        Check("gpu kernels", why_not_gpu or triton.detail(), why_not_gpu if gpus else None),
        Check("compiler", ", ".join(compilers) or "none; only building from source and torch.compile need one"),
        Check("cache folder", str(folder), refused(lambda: _write_into(folder))),
        Check("extra lab", f"lacks {', '.join(missing)}: {INSTALL_LAB}" if missing else "complete"),
    ]


def _write_into(folder: Path) -> None:
    """Raise an error unless files can be written into a folder, which is made if it does not exist."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"cannot be written ({error.strerror}); set TERSEKV_CACHE to a folder that can be written"
        ) from error


def show(document: dict[str, Any]) -> None:
    """Print everything of `describe` in tables."""
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
    """Return everything that `tersekv doctor --all` shows."""
    import torch

    from tersekv.kernels import backends
    from tersekv.models import loading

    model, features = cpu_features()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "packages": {"tersekv": __version__, **{name: package_version(name) for name in PACKAGES}},
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": {
            "model": model,
            "features": features,
            "cores": os.cpu_count(),
            "usable_cores": usable_cores(),
            "torch_threads": torch.get_num_threads(),
        },
        "accelerators": ", ".join(gpus) or "none",
        "kernels": [{k: row[k] for k in ("backend", "op", "available", "detail")} for row in backends.report()],
        "folders": {"models": str(loading.cache_dir() / "models")},
    }


def run_header() -> dict[str, Any]:
    """Return the command, the commit and the machine of this run, for the headers of records."""
    import torch

    from tersekv.kernels import cpu

    program = Path(sys.argv[0]).name.replace("__main__.py", "tersekv")  # python -m tersekv
    found: dict[str, Any] = {"command": shlex.join([program, *sys.argv[1:]])}
    roots = Path(__file__).parents[3], Path(sys.argv[0]).absolute().parent.parent
    root = next((root for root in roots if (root / ".git").exists() and (root / "src/tersekv").exists()), None)
    if root:  # a checkout, or one of its programs with an installed package
        asked = ["git", "-C", str(root), "describe", "--always", "--dirty"]
        said = subprocess.run(asked, capture_output=True, text=True)
        found |= {"commit": said.stdout.strip()} if said.returncode == 0 else {}
    isa = cpu.isa() if cpu.why_not_built() is None else None
    name, features = cpu_features()
    return found | {"cpu": name, "flags": features, "isa": isa, "threads": torch.get_num_threads()}


def usable_cores() -> int | None:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def cpu_features() -> tuple[str, list[str]]:
    """Return the CPU's name and those of `FEATURES` it has, from /proc/cpuinfo if that exists.

    The name ends with family and model on x86, because virtual machines name only the brand.
    """
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
    if {"cpu family", "model"} <= fields.keys():
        name += f" (family {fields['cpu family']}, model {fields['model']})"
    return name, [feature for feature in FEATURES if feature in present]
