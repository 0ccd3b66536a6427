"""Count instructions of the C++ kernels per token and KV head with valgrind, unaffected by machine
load.

    python benchmarks/instructions.py [--out benchmarks/records/instructions.jsonl] [--isas avx2,scalar]

It needs valgrind with its headers and a C compiler (Debian: apt-get install valgrind gcc). Each
operator is called with a number of tokens and with twice as many; attention has one query position.
The difference of the two counts is the cost of the tokens, without the fixed cost of a call.

Valgrind does not support AVX-512. Instructions are not units of time: one AVX2 instruction does the
work of several portable ones, and table look-ups take longer than additions.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import recorded
from recorded import record, show
from tersekv.codecs.codebooks.trellis import trellis_entries
from tersekv.codecs.polarquant import offline_table
from tersekv.kernels.cpu import attend as cpu_attend
from tersekv.kernels.cpu import encode
from tersekv.kernels.encode_grid import GridPlace
from tersekv.lab.bench.attend import HeadCounts
from tersekv.lab.bench.formats import make_segment
from tersekv.transforms.rotation import hadamard_parts, random_rotation
from tersekv.transforms.sketch import jl_sketch

FORMATS = ["grid4", "grid3", "grid2", "qjl256", "polar", "nuq4-1%", "trellis2", "trellis3"]
TOKENS = {"attend": 1024, "encode": 1024, "search": 64}
"""Number of tokens of the shorter call."""

SOURCE = """
#include <valgrind/callgrind.h>
void count(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void counted(const char* what) { CALLGRIND_DUMP_STATS_AT(what); CALLGRIND_STOP_INSTRUMENTATION; }
"""
MARKS, SEGMENTS = "marks.so", "segments.pt"
Run = Callable[[], Any]


def attention(heads: HeadCounts, tokens: int, segments: dict[str, Any]) -> Iterator[tuple[str, Run]]:
    """Yield attention of one query position over each segment, and over exact tokens."""
    query = torch.randn(1, heads.kv, heads.query // heads.kv, heads.dim)
    scaling = heads.dim**-0.5
    for name, segment in segments.items():
        keys, values = segment.operands()
        yield name, lambda k=keys, v=values: cpu_attend.attend_packed(query, k, v, None, scaling, None)
    key, value = torch.randn(2, 1, heads.kv, tokens, heads.dim).unbind(0)
    yield "exact", lambda: cpu_attend.attend_exact(query, key, value, None, scaling, None)


def searching(heads: HeadCounts, tokens: int) -> Iterator[tuple[str, Run]]:
    """Yield the search for trellis codes of `tokens` tokens."""
    y, tables = torch.randn(heads.kv, tokens, heads.dim), trellis_entries("cpu")
    for rate in (2, 4):
        bits = torch.full((heads.kv, heads.dim), rate, dtype=torch.uint8)
        yield (
            f"encode_trellis, {rate} bits",
            lambda bits=bits: encode.encode_trellis(y, torch.ones(bits.shape), bits, tables),
        )


def encoding(heads: HeadCounts, tokens: int) -> Iterator[tuple[str, Run]]:
    """Yield every other encoder over `tokens` tokens."""
    H, D = heads.kv, heads.dim
    x = torch.randn(1, H, tokens, D)
    blocks = x.unflatten(2, (-1, 32))
    keys, values = GridPlace("keys", 4, "channel", 32, 32), GridPlace("values", 4, "token", 32, 32)
    low, high = encode.group_ranges(x, keys)
    scale = (high - low) / 15
    table = torch.randn(8).sort().values
    yield "group_ranges, per channel", lambda: encode.group_ranges(x, keys)
    yield "group_ranges, per token", lambda: encode.group_ranges(x, values)
    yield "encode_grid, 4-bit integers, keys", lambda: encode.encode_grid(x, keys, scale, low, None)
    yield (
        "encode_grid, 3-bit table, values",
        lambda: encode.encode_grid(x, GridPlace("values", 3, "token", D, 32), None, None, table),
    )
    codes = torch.randint(16, (1, H, tokens // 32, D, 32), dtype=torch.uint8)
    yield "pack_lanes, 4 bits", lambda: encode.pack_lanes(codes, 4)
    sketch = jl_sketch(2 * D, D, 0, True, "cpu")
    yield f"encode_signs, {2 * D} rows", lambda: encode.encode_signs(blocks, sketch)
    tables = [offline_table(bits, level, "cpu") for level, bits in enumerate((4, 2, 2, 2), start=1)]
    yield "encode_polar, 4-2-2-2", lambda: encode.encode_polar(blocks, (4, 2, 2, 2), tables)
    yield "rotate_dense", lambda: encode.rotate_dense(x, random_rotation(D, 0))
    order, signs = hadamard_parts(D, 0, "cpu")
    yield "rotate_hadamard", lambda: encode.rotate_hadamard(x, random_rotation(D, 0, "hadamard"), order, signs)


def count(folder: Path, heads: HeadCounts) -> None:
    """Run every call twice inside valgrind and count the second run."""
    marks = ctypes.CDLL(str(folder / MARKS))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    gc.disable()
    for times, segments in enumerate(torch.load(folder / SEGMENTS, weights_only=False), start=1):
        calls = {
            "attend": attention(heads, TOKENS["attend"] * times, segments),
            "encode": encoding(heads, TOKENS["encode"] * times),
            "search": searching(heads, TOKENS["search"] * times),
        }
        for kind, found in calls.items():
            for what, call in found:
                call()
                marks.count()
                call()
                marks.counted(f"{kind}|{what}|{times}".encode())


def prepare(folder: Path, heads: HeadCounts) -> None:
    """Prepare the files that `count` loads: packed segments, and a library that controls valgrind.

    Segments are packed here because fitting codecs is slow inside valgrind.

    Raises:
        SystemExit: valgrind, its header or a C compiler is missing.
    """
    compiler = shutil.which("cc")
    if shutil.which("valgrind") is None or compiler is None:
        raise SystemExit("instructions.py needs valgrind and a C compiler (Debian: apt-get install valgrind gcc)")
    command = [compiler, "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", str(folder / MARKS)]
    if subprocess.run(command, input=SOURCE, text=True).returncode:
        raise SystemExit("instructions.py needs the header valgrind/callgrind.h (Debian: apt-get install valgrind)")
    lengths = [TOKENS["attend"] * times for times in (1, 2)]
    segments = [{name: make_segment(name, heads.kv, n, heads.dim, seed=0) for name in FORMATS} for n in lengths]
    torch.save(segments, folder / SEGMENTS)


def counts(isa: str, heads: HeadCounts, folder: Path) -> dict[tuple[str, str, int], int]:
    """Run this program in valgrind. Return instructions by kind, call and factor of the token
    count."""
    command = [
        "valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/out", sys.executable,
        __file__, "--heads", str(heads), "--counted", str(folder),
    ]  # fmt: skip
    same = {"TERSEKV_CPU_ISA": isa, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    subprocess.run(command, env=os.environ | same, check=True, stderr=subprocess.DEVNULL)
    found = {}
    for file in folder.glob("out.*"):
        text = file.read_text()
        file.unlink()
        label = re.search(r"^desc: Trigger: Client Request: (\w+)\|(.*)\|(\d)$", text, re.MULTILINE)
        total = re.search(r"^(?:totals|summary): (\d+)", text, re.MULTILINE)
        if label and total:
            found[label[1], label[2], int(label[3])] = int(total[1])
    return found


def measure(isa: str, heads: HeadCounts, folder: Path) -> list[dict[str, Any]]:
    """Return the records of one instruction set."""
    found = counts(isa, heads, folder)
    rows = []
    for (kind, what, times), number in sorted(found.items()):
        if times == 2:
            more = number - found[kind, what, 1]
            rows.append({
                "kind": kind, "what": what, "isa": isa,
                "T": TOKENS[kind], "instructions": found[kind, what, 1],
                "per_token_and_head": round(more / TOKENS[kind] / heads.kv, 1),
            })  # fmt: skip
    return rows


def main() -> None:
    parser = recorded.parser(__doc__)
    parser.add_argument("--isas", default="avx2,scalar")
    parser.add_argument(
        "--heads", type=HeadCounts.parse, default=HeadCounts(9, 3, 64), help="query heads/KV heads/head dim"
    )
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    parser.add_argument("--counted", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.counted:
        count(options.counted, options.heads)
        return
    isas = options.isas.split(",")
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name), options.heads)
        rows = [row for isa in isas for row in measure(isa, options.heads, Path(name))]
    lines = []
    for kind, what in dict.fromkeys((row["kind"], row["what"]) for row in rows):
        by_isa = {row["isa"]: row["per_token_and_head"] for row in rows if (row["kind"], row["what"]) == (kind, what)}
        lines.append([f"{kind}: {what}" if kind == "attend" else what, *(f"{by_isa[isa]:,.1f}" for isa in isas)])
    show(f"instructions per token and KV head, {options.heads}", ("op", *isas), lines)
    about = {
        "bench": "instructions",
        "shape": str(options.heads),
        "valgrind": subprocess.getoutput("valgrind --version"),
    }
    record(options.out, about, rows)


if __name__ == "__main__":
    main()
