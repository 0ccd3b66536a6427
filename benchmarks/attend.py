"""Decode attention (q = 1) over packed keys and values against PyTorch's dense ways, on the CPU.

    python benchmarks/attend.py [--out benchmarks/records/attend.jsonl] [--quick]

Layout as in KIVI: keys scaled per channel and 32 tokens, values per token and 32 channels. Parity is checked before
anything is timed. Inputs rotate over several sets, so that a call rarely finds its bytes in the fast caches.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tersekv.cli.env import cpu_features
from tersekv.ops import cpu
from tersekv.ops.attend_grid import GridSide, decode_grid
from tersekv.ops.attend_packed import attend_packed
from tersekv.ops.lanes import packed_shape

BLOCK, GROUP = 32, 32
SHAPES = {"9/3/64": (9, 3, 64), "32/8/128": (32, 8, 128)}
TOKENS = [1024, 8192, 32768]
BITS = [4, 3, 2]
SET_BYTES, MAX_SETS = 48 << 20, 8  # more than the caches hold, as far as memory and time allow


def make_side(side: str, bits: int, heads: int, tokens: int, D: int) -> GridSide:
    """A random side [1, heads, tokens/32, ...] in KIVI's layout: any bits are codes."""
    N = tokens // BLOCK
    packed, lanes = (D, BLOCK) if side == "keys" else (BLOCK, D)
    codes = torch.randint(-(2**31), 2**31, (1, heads, N, *packed_shape(bits, packed, lanes)), dtype=torch.int32)
    plane = (BLOCK // GROUP, D) if side == "keys" else (D // GROUP, BLOCK)
    scale = torch.rand(1, heads, N, *plane).half() * (3 / 2**bits)
    offset = -scale * (2**bits - 1) / 2
    axis = "channel" if side == "keys" else "token"
    return GridSide(side, bits, axis, GROUP, BLOCK, D, codes, scale, offset, torch.arange(2**bits).float())


def side_bytes(grid: GridSide) -> int:
    return sum(x.numel() * x.element_size() for x in (grid.codes, grid.scale, grid.offset))


def median(run: Callable[[Any], Any], inputs: list[Any], seconds: float) -> tuple[float, float, float, int]:
    """Median, 10th and 90th percentile in µs, and the number of runs, over inputs taken in turn."""
    run(inputs[0])
    times: list[float] = []
    stop = time.perf_counter() + seconds
    for item in itertools.cycle(inputs):
        start = time.perf_counter()
        run(item)
        times.append((time.perf_counter() - start) * 1e6)
        if len(times) >= 5 and time.perf_counter() > stop:
            break
    times.sort()
    return times[len(times) // 2], times[len(times) // 10], times[len(times) * 9 // 10], len(times)


def check_parity(query: Tensor, sides: tuple[GridSide, GridSide], scaling: float) -> None:
    out, lse = cpu.attend_packed(query, *sides, None, scaling, None)
    expected, expected_lse = attend_packed(query, *sides, None, scaling, None)
    torch.testing.assert_close(out, expected, rtol=0, atol=3e-5 * decode_grid(sides[1]).abs().max().item())
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


def batched_matmul(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """query [1, Hkv, G, D]: the best dense way in eager PyTorch, the group as rows of one product."""
    weights = torch.softmax(torch.matmul(query, key.transpose(-1, -2)) * scaling, dim=-1)
    return torch.matmul(weights, value)


def dense_ways(query: Tensor, scaling: float) -> dict[str, Callable[[tuple[Tensor, Tensor]], Tensor]]:
    Hkv, G, D = query.shape[1:]

    def sdpa(kv: tuple[Tensor, Tensor]) -> Tensor:
        q = query.to(kv[0].dtype).reshape(1, Hkv * G, 1, D)
        return F.scaled_dot_product_attention(q, *kv, scale=scaling, enable_gqa=True)

    def matmul(kv: tuple[Tensor, Tensor]) -> Tensor:
        return batched_matmul(query.to(kv[0].dtype), *kv, scaling)

    return {"sdpa": sdpa, "matmul": matmul}


def measure(shape: str, tokens: int, seconds: float) -> list[dict[str, Any]]:
    Hq, Hkv, D = SHAPES[shape]
    query, scaling = torch.randn(1, Hkv, Hq // Hkv, D), D**-0.5
    rows = []

    def add(what: str, bits: int | None, threads: int, size: int, run: Callable[[Any], Any], inputs: list[Any]) -> None:
        torch.set_num_threads(threads)
        mid, p10, p90, n = median(run, inputs, seconds)
        rows.append({
            "what": what, "shape": shape, "bits": bits, "T": tokens, "threads": threads,
            "median_us": round(mid, 1), "p10": round(p10, 1), "p90": round(p90, 1), "runs": n,
            "bytes": size, "gb_per_s": round(size / mid / 1e3, 2),
        })  # fmt: skip

    def sets(size: int) -> int:
        return max(2, min(MAX_SETS, SET_BYTES // size))

    for bits in BITS:
        one = make_side("keys", bits, Hkv, tokens, D), make_side("values", bits, Hkv, tokens, D)
        size = sum(map(side_bytes, one))
        check_parity(query, one, scaling)
        inputs = [one] + [
            tuple(g._replace(codes=g.codes.clone(), scale=g.scale.clone(), offset=g.offset.clone()) for g in one)
            for _ in range(sets(size) - 1)
        ]
        for threads in (1, 2):
            add("tersekv", bits, threads, size, lambda kv: cpu.attend_packed(query, *kv, None, scaling, None), inputs)
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        size = 2 * Hkv * tokens * D * dtype.itemsize
        inputs = [tuple(torch.randn(1, Hkv, tokens, D).to(dtype) for _ in range(2)) for _ in range(sets(size))]
        for way, run in dense_ways(query, scaling).items():
            for threads in (1, 2):
                add(f"{way} {name}", None, threads, size, run, inputs)
    for row in rows:
        best = min(r["median_us"] for r in rows if r["bits"] is None and r["threads"] == row["threads"])
        row["ratio_to_best_dense"] = round(best / row["median_us"], 2)
    return rows


def print_rows(console: Console, shape: str, tokens: int, rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"{shape} (query heads / key-value heads / head dim), {tokens:,} tokens")
    for column in ("what", "bits", "threads", "median µs", "p10–p90", "GB/s", "× best dense"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for r in rows:
        table.add_row(
            r["what"], str(r["bits"] or "–"), str(r["threads"]), f"{r['median_us']:,.0f}",
            f"{r['p10']:,.0f}–{r['p90']:,.0f}", f"{r['gb_per_s']:.1f}", f"{r['ratio_to_best_dense']:.2f}",
        )  # fmt: skip
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    parser.add_argument("--quick", action="store_true", help="small contexts only")
    options = parser.parse_args()
    if reason := cpu.why_not_built():
        raise SystemExit(reason)
    torch.manual_seed(0)
    common = {"bench": "attend", "isa": cpu.isa(), "cpu": cpu_features()[0], "torch": torch.__version__}
    console = Console()
    console.print(f"{common['cpu']}, {common['isa']}, torch {common['torch']}")
    for shape in SHAPES:
        for tokens in TOKENS[: 1 if options.quick else None]:
            rows = measure(shape, tokens, 0.15 if options.quick else 0.8)
            print_rows(console, shape, tokens, rows)
            if options.out:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                with options.out.open("a") as file:
                    file.writelines(json.dumps(common | row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
