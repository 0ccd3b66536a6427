"""Compile Triton kernels for a GPU that is not there, and count the instructions of their loops.

Triton's package has NVIDIA's assembler and disassembler, so the machine code can be read. A count is
a bound, not a speed.
"""

from __future__ import annotations

import collections
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from tersekv.kernels.triton import tuning

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32), "sm_86": GPUTarget("cuda", 86, 32), "sm_90": GPUTarget("cuda", 90, 32),
    "sm_120": GPUTarget("cuda", 120, 32), "gfx942": GPUTarget("hip", "gfx942", 64),
}  # fmt: skip
"""A100; GPUs with less shared memory; H100 and H200; RTX 50; AMD's MI300."""

SHARED_BYTES = {"sm_80": 164 * 1024, "sm_86": 100 * 1024, "sm_90": 228 * 1024, "sm_120": 100 * 1024}
"""Shared memory of a multiprocessor. A program takes 1 KiB more than it asks for."""

REGISTERS, WARPS = 1 << 16, {"sm_80": 64, "sm_86": 48, "sm_90": 64, "sm_120": 48}
"""Registers of a multiprocessor, and most warps on it."""

launch = JITFunction.run


class NoDevice:
    """A driver that answers Triton's queries before a launch as a GPU's driver would."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_for(target: str, noted: Callable[[JITFunction, Any, dict[str, Any]], None]) -> None:
    """From here on, compile launches for a target of `TARGETS` in place of running them. `noted` gets each
    kernel, its compiled form and the options of its launch."""

    def compiled(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        noted(kernel, launch(kernel, *args, grid=grid, warmup=True, **options), options)

    triton.runtime.driver.set_active(NoDevice(TARGETS[target]))
    tuning.architecture = lambda device: target  # type: ignore[assignment]
    JITFunction.run = compiled


class Counts(NamedTuple):
    """Counts of a kernel's largest loop, or of the whole kernel.

    instructions: of one warp in one turn. shared: those that access shared memory. barriers: those that wait
    for the other warps. registers: per thread. stack_bytes: spilled, per thread. shared_bytes: of a program.
    programs: that fit a multiprocessor at once.
    """

    instructions: int
    shared: int
    barriers: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    programs: int


def counts(made: Any, target: str, warps: int, whole: bool = False) -> Counts:
    """Count the instructions of a kernel compiled for an NVIDIA GPU, of its largest loop or as a whole."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        code, use = (
            subprocess.run([tools / tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for tool, option in (("nvdisasm", "-c"), ("cuobjdump", "--dump-resource-usage"))
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", use)
    assert found is not None, use
    registers, stack = map(int, found.groups())
    names = collections.Counter(line.split(".")[0] for line in _largest_loop(code, whole))
    shared = sum(names[name] for name in ("LDS", "STS", "LDSM", "STSM"))
    held = made.metadata.shared + 1024
    programs = min(
        REGISTERS // (-(-registers // 8) * 8 * 32 * warps), SHARED_BYTES[target] // held, WARPS[target] // warps, 32
    )
    return Counts(sum(names.values()), shared, names["BAR"], registers, stack, made.metadata.shared, programs)


def _largest_loop(code: str, whole: bool) -> list[str]:
    """Return the instructions of the longest backward branch's loop, or all up to the end of the program, without
    predicates."""
    lines: list[str] = []
    labels: dict[str, int] = {}
    loops = [(0, 0)]
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(lines)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?);", line):
            lines.append(instruction[1])
            to = re.search(r"BRA.*?(\.L_x_\d+)", line)
            if to and to[1] in labels:
                loops.append((labels[to[1]], len(lines)))
    if whole:
        return lines[: lines.index("EXIT") + 1] if "EXIT" in lines else lines
    first, last = max(loops, key=lambda loop: loop[1] - loop[0])
    return lines[first:last]
